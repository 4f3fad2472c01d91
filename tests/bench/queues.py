"""`python -m tests.bench.queues`: a guest's two request queues on two reactors, beside both on one.

Random reads of a RAM disk that was written before, by a guest that sleeps until it is called. The
reactors copy the data, so that of large reads the guest takes little of the two CPUs that there may
be, and with small ones it takes as much as they do: of these, two reactors can show what they gain
only where the guest has CPUs of its own. Both targets take turns; a ratio is of the bytes a second
of one turn, and its median, least and greatest are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.support.target import Target, binary

MIB = 1 << 20
SIZE = 256 * MIB
QUEUES = 2
DEPTH = 4
"""Reads in flight on each queue."""
SIZES = ("4k", "64k", "1m")


@dataclass(frozen=True)
class Run:
    """What one run measured."""

    mib_per_s: float
    target_cpus: float
    """What the target's threads took, in CPUs."""


@contextmanager
def running(cpus: list[int]) -> Iterator[Target]:
    """A target with a reactor on each of these CPUs, and a filled RAM disk of the controller vm."""
    directory = Path(tempfile.mkdtemp(prefix="vq-", dir="/var/tmp"))
    target = Target(directory, "--cpumask", f"[{','.join(map(str, cpus))}]").start()
    try:
        target.rpc("bdev_malloc_create", name="ram", num_blocks=SIZE // 512, block_size=512)
        target.rpc("vhost_create_scsi_controller", ctrlr="vm")
        target.add_lun("vm", "ram")
        guest(target, "--bs", "1m", "--fill", "--time", "0.01")
        yield target
    finally:
        target.stop()
        shutil.rmtree(directory, ignore_errors=True)


def guest(target: Target, *words: str) -> Run:
    """Runs a guest that sleeps until it is called."""
    command = [str(binary("virtlun-bench")), "run", str(target.vhost_dir / "vm"), "--json"]
    command += ["--rw", "randread", "--sleep", "--queues", str(QUEUES), "--iodepth", str(DEPTH)]
    command += ["--target-pid", str(target.pid), *words]
    done = subprocess.run(command, capture_output=True, check=True)
    report = json.loads(done.stdout)
    return Run(report["mib_per_s"], report["target_cpus"])


def main() -> int:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.queues", description="Two queues on two reactors and on one."
    )
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (5)")
    parser.add_argument("--time", type=float, default=1.0, help="seconds of one run (1)")
    arguments = parser.parse_args()
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        print("two reactors need two CPUs", file=sys.stderr)
        return 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("READS OF")
    for title in ("ONE, MIB/S", "TWO, MIB/S", "TWO / ONE", "LEAST", "GREATEST", "CPUS: ONE", "TWO"):
        table.add_column(title, justify="right")
    with ExitStack() as stack:
        one, two = (stack.enter_context(running(allowed[:count])) for count in (1, 2))
        for size in track(SIZES, console=Console(stderr=True), transient=True):
            words = ("--bs", size, "--time", str(arguments.time))
            pairs = [(guest(one, *words), guest(two, *words)) for _ in range(arguments.rounds)]
            ratios = sorted(b.mib_per_s / a.mib_per_s for a, b in pairs)
            table.add_row(
                size,
                *(f"{statistics.median(p[n].mib_per_s for p in pairs):,.0f}" for n in (0, 1)),
                *(f"{ratio:.2f}" for ratio in (statistics.median(ratios), ratios[0], ratios[-1])),
                *(f"{statistics.median(p[n].target_cpus for p in pairs):.2f}" for n in (0, 1)),
            )
    Console(highlight=False, width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
