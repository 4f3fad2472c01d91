"""`python -m tests.bench.interrupts`: interrupts per I/O of a guest that sleeps until it is called.

Random reads of 4 KiB by one queue. First with a call for each request that ended while the guest
wanted one, then with the default, which holds calls back by what is in flight and what becomes of
it (vhost_controller_set_coalescing). The disks: RAM, which has ended a request before another
begins; RAM that takes the time of an SSD; a file. Both settings take turns, several times; the
medians are shown. That the guest has a CPU of its own, where its interrupts cost the target
nothing, is for the default the worst case: a VM also pays for each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.support.target import Target, binary

MIB = 1 << 20
SIZE = 256 * MIB
DEPTHS = (1, 8, 32, 128)
SETTINGS = {"none": False, "default": True}
"""Whether calls are held back as they are by default."""
SSD_US = 80
"""What a read of 4 KiB takes on an NVMe SSD, microseconds."""


@dataclass(frozen=True)
class Run:
    """What one run measured."""

    iops: float
    interrupts: float
    """For each I/O."""
    mean_us: float
    p99_us: float


@contextmanager
def running(bdev: str) -> Iterator[Target]:
    """A target with one reactor and a controller `vm` on this bdev."""
    directory = Path(tempfile.mkdtemp(prefix="vs-", dir="/var/tmp"))
    cpus = sorted(os.sched_getaffinity(0))
    target = Target(directory, "--cpumask", f"[{cpus[-1]}]").start()
    try:
        if bdev == "file":
            file = str(target.make_file("base.img", SIZE))
            target.rpc("bdev_uring_create", filename=file, name="base", block_size=512)
        else:
            target.rpc("bdev_malloc_create", name="base", num_blocks=SIZE // 512, block_size=512)
        if bdev == "SSD":
            names = ("avg_read_latency", "p99_read_latency", "avg_write_latency")
            times = dict.fromkeys((*names, "p99_write_latency"), SSD_US)
            target.rpc("bdev_delay_create", base_bdev_name="base", name="slow", **times)
        target.rpc("vhost_create_scsi_controller", ctrlr="vm")
        target.add_lun("vm", "slow" if bdev == "SSD" else "base")
        guest(target, "--bs", "1m", "--fill", "--time", "0.01")
        yield target
    finally:
        target.stop()
        shutil.rmtree(directory, ignore_errors=True)


def guest(target: Target, *words: str) -> dict[str, float]:
    """Runs a guest that sleeps until it is called; returns what it measured."""
    command = [str(binary("virtlun-bench")), "run", str(target.vhost_dir / "vm"), "--json"]
    command += ["--rw", "randread", "--sleep", *words]
    done = subprocess.run(command, capture_output=True, check=True)
    report: dict[str, float] = json.loads(done.stdout)
    return report


def counted(target: Target) -> tuple[int, int]:
    """Returns the interrupts and the requests of the controller so far."""
    (stats,) = target.rpc("virtlun_vhost_get_stats", name="vm")
    return stats["interrupts"], stats["requests"]


def measure(target: Target, depth: int, seconds: float, *, default: bool) -> Run:
    """Measures one depth with one setting."""
    base = {"delay_base_us": 0, "iops_threshold": 60_000, "adaptive": default}
    target.rpc("vhost_controller_set_coalescing", ctrlr="vm", **base)
    before = counted(target)
    report = guest(target, "--iodepth", str(depth), "--time", str(seconds))
    interrupts, requests = (b - a for a, b in zip(before, counted(target), strict=True))
    return Run(
        iops=report["iops"],
        interrupts=interrupts / max(requests, 1),
        mean_us=report["mean_ns"] / 1e3,
        p99_us=report["p99_ns"] / 1e3,
    )


def compared(bdev: str, depth: int, seconds: float, rounds: int) -> dict[str, Run]:
    """Measures both settings in turns; returns the medians of each."""
    runs: dict[str, list[Run]] = {name: [] for name in SETTINGS}
    with running(bdev) as target:
        for _ in range(rounds):
            for name, default in SETTINGS.items():
                runs[name].append(measure(target, depth, seconds, default=default))
    fields = ("iops", "interrupts", "mean_us", "p99_us")
    return {
        name: Run(*(median(getattr(run, field) for run in found) for field in fields))
        for name, found in runs.items()
    }


def main() -> int:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.interrupts", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="one short round of each")
    parser.add_argument("--rounds", type=int, help="runs of each (5)")
    parser.add_argument("--time", type=float, help="seconds of one run (2)")
    arguments = parser.parse_args()
    seconds = arguments.time or (0.5 if arguments.quick else 2.0)
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("DISK", "QD", "KIOPS", "", "INTERRUPTS/IO", "", "MEAN us", "", "P99 us", ""):
        table.add_column(title, justify="left" if title == "DISK" else "right")
    table.add_row("", "", *("none", "default") * 4)
    rows = [(bdev, depth) for bdev in ("RAM", "SSD", "file") for depth in DEPTHS]
    for bdev, depth in track(rows, "interrupts", console=Console(stderr=True)):
        none, default = compared(bdev, depth, seconds, rounds).values()
        pairs = [
            (f"{none.iops / 1e3:.1f}", f"{default.iops / 1e3:.1f}"),
            (f"{none.interrupts:.2f}", f"{default.interrupts:.2f}"),
            (f"{none.mean_us:.1f}", f"{default.mean_us:.1f}"),
            (f"{none.p99_us:.1f}", f"{default.p99_us:.1f}"),
        ]
        table.add_row(bdev, str(depth), *(text for pair in pairs for text in pair))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
