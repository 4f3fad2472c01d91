"""`python -m tests.bench.limits`: how exactly limits of a disk's I/O are kept, and how soon.

A guest keeps 32 requests in flight on a disk in RAM, which could do far more than any limit here.
What it did is told by the target's own counters, which come with the time they were read at.

* Accuracy: what was done in five seconds, from a second after the limit was set on, as a share of
  what the limit lets through. The goal is 2 % either way.
* One direction beside the other: a guest keeps 32 reads and 32 writes in flight, of which one kind
  is limited. What the limited ones did, as above, with the same goal; and what the others did
  beside them, as a share of what they do where nothing is limited. The goal is four fifths of
  that.
* A change while the guest goes on: what was done in half a second, from 100 ms after the change
  on, as a share of what the new limit lets through; after all limits were taken away, whether it is
  ten times what the old one let through. The goal is 5 %: two I/Os more or less count as much.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.support.target import Target, binary

MIB = 1 << 20
SIZE = 64 * MIB
LEAD_S, MEASURED_S = 1.0, 5.0
SETTLE_S, CHANGED_S = 0.1, 0.5
"""After a change: until it is to be in force, and how long what is done then is looked at."""
KEPT_WITHIN, CHANGED_WITHIN = 0.02, 0.05
MANY_TIMES = 10
"""Of what the old limit let through is done without one."""
BESIDE_AT_LEAST = 0.8
"""Of what a direction does where nothing is limited is done beside the other one's limit."""


@dataclass(frozen=True)
class Load:
    """What a guest does, and the limit that is put on it."""

    about: str
    limits: dict[str, int]
    words: tuple[str, ...]
    counters: tuple[str, ...]
    """Of bdev_get_iostat, summed: what the limit is of."""

    @property
    def rate(self) -> int:
        """Returns what the limit lets through a second."""
        (rate,) = self.limits.values()
        return rate


OPERATIONS, BYTES = ("num_read_ops", "num_write_ops"), ("bytes_read", "bytes_written")
READS = ("--rw", "randread", "--bs", "4k")
LOADS = (
    Load("operations, 4 KiB", {"total_iops_sec": 500}, READS, OPERATIONS),
    Load("operations, 4 KiB", {"total_iops_sec": 20_000}, READS, OPERATIONS),
    Load("reads, 4 KiB", {"read_iops_sec": 2_000}, READS, OPERATIONS[:1]),
    Load("bytes, 4 KiB", {"total_bytes_sec": 50 * MIB}, READS, BYTES),
    Load(
        "bytes, 64 KiB", {"total_bytes_sec": 200 * MIB}, ("--rw", "randread", "--bs", "64k"), BYTES
    ),
    Load("bytes, 1 MiB", {"total_bytes_sec": 100 * MIB}, ("--rw", "randread", "--bs", "1m"), BYTES),
    Load(
        "bytes written, 64 KiB",
        {"write_bytes_sec": 100 * MIB},
        ("--rw", "randwrite", "--bs", "64k"),
        BYTES[1:],
    ),
)
MIXED = ("--rw", "randapart", "--bs", "4k")
BESIDE = (
    Load("writes, 4 KiB", {"write_iops_sec": 2_000}, MIXED, OPERATIONS[1:]),
    Load("reads, 4 KiB", {"read_iops_sec": 2_000}, MIXED, OPERATIONS[:1]),
)
CHANGES = ((2_000, 10_000), (10_000, 2_000), (10_000, 500), (2_000, 0))
"""Operations a second before and after; 0: no limit any more."""


@contextmanager
def running(words: tuple[str, ...], seconds: float, in_flight: int = 32) -> Iterator[Target]:
    """A target whose disk, `ram`, a guest keeps busy for so long."""
    directory = Path(tempfile.mkdtemp(prefix="vl-", dir="/var/tmp"))
    cpus = sorted(os.sched_getaffinity(0))
    target = Target(directory, "--cpumask", f"[{cpus[-1]}]").start()
    guest = None
    try:
        target.rpc("bdev_malloc_create", name="ram", num_blocks=SIZE // 512, block_size=512)
        target.rpc("vhost_create_scsi_controller", ctrlr="vm")
        target.add_lun("vm", "ram")
        command = [str(binary("virtlun-bench")), "run", str(target.vhost_dir / "vm"), "--sleep"]
        command += ["--iodepth", str(in_flight), "--time", str(seconds), "--json", *words]
        guest = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while not done(target, OPERATIONS)[1]:
            if guest.poll() is not None:
                assert guest.stderr is not None
                raise RuntimeError(f"the guest ended: {guest.stderr.read().decode()}")
            time.sleep(0.01)
        yield target
    finally:
        if guest:
            guest.kill()
            guest.communicate()
        target.stop()
        shutil.rmtree(directory, ignore_errors=True)


def done(target: Target, counters: tuple[str, ...]) -> tuple[float, int]:
    """Returns the target's time in seconds, and the sum of counters of the disk."""
    told = target.rpc("bdev_get_iostat", names=["ram"])
    (disk,) = told["bdevs"]
    return told["ticks"] / told["tick_rate"], sum(disk[counter] for counter in counters)


def rate(target: Target, counters: tuple[str, ...], seconds: float) -> float:
    """Returns how much was done a second, for so long from now on."""
    begun, before = done(target, counters)
    time.sleep(seconds)
    ended, after = done(target, counters)
    return (after - before) / (ended - begun)


def kept(load: Load, seconds: float) -> float:
    """Returns what is done under a limit, as a share of it."""
    with running(load.words, seconds + LEAD_S + 60) as target:
        target.rpc("virtlun_bdev_set_limits", name="ram", **load.limits)
        time.sleep(LEAD_S)
        return rate(target, load.counters, seconds) / load.rate


@dataclass(frozen=True)
class Beside:
    """What both directions did where one is limited."""

    limited: float
    """Operations a second of the limited one."""
    other: float
    """The same of the other one."""
    alone: float
    """What the other one did before, as nothing was limited."""


def beside(load: Load, seconds: float) -> Beside:
    """Returns what is done of either direction, of which `load` has one limited."""
    others = tuple(counter for counter in OPERATIONS if counter not in load.counters)
    with running(load.words, 2 * (seconds + LEAD_S) + 60, in_flight=64) as target:
        time.sleep(LEAD_S)
        alone = rate(target, others, seconds)
        target.rpc("virtlun_bdev_set_limits", name="ram", **load.limits)
        time.sleep(LEAD_S)
        begun, before = done(target, load.counters)
        other = rate(target, others, seconds)
        ended, after = done(target, load.counters)
        return Beside((after - before) / (ended - begun), other, alone)


def changed(before: int, after: int) -> float:
    """Returns what is done soon after a change, as a share of the limit there is then.

    Without one, as a share of the one that there was.
    """
    with running(READS, 60) as target:
        target.rpc("virtlun_bdev_set_limits", name="ram", total_iops_sec=before)
        time.sleep(LEAD_S)
        target.rpc("virtlun_bdev_set_limits", name="ram", total_iops_sec=after)
        time.sleep(SETTLE_S)
        return rate(target, OPERATIONS, CHANGED_S) / (after or before)


def main() -> int:
    """Measures and prints three tables; 1 if a goal is missed that is insisted on."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.limits", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="half a second of each")
    parser.add_argument("--goal", action="store_true", help="exit with 1 where a goal is missed")
    arguments = parser.parse_args()
    progress = Console(stderr=True)
    seconds = 0.5 if arguments.quick else MEASURED_S
    missed = 0
    accuracy = Table("LIMIT OF", box=None, pad_edge=False, header_style="bold")
    accuracy.add_column("A SECOND", justify="right")
    accuracy.add_column("DONE", justify="right")
    for load in track(LOADS, "limits", console=progress, transient=True):
        share = kept(load, seconds)
        missed += abs(share - 1) > KEPT_WITHIN
        accuracy.add_row(load.about, f"{load.rate:,}", f"{100 * share:.2f} %")
    mixed = Table("ONE LIMITED", box=None, pad_edge=False, header_style="bold")
    for heading in ("A SECOND", "DONE", "THE OTHERS, A SECOND", "OF WHAT THEY DO UNLIMITED"):
        mixed.add_column(heading, justify="right")
    for load in track(BESIDE, "mixed loads", console=progress, transient=True):
        both = beside(load, seconds)
        share, kept_up = both.limited / load.rate, both.other / both.alone
        missed += abs(share - 1) > KEPT_WITHIN
        missed += kept_up < BESIDE_AT_LEAST
        mixed.add_row(
            load.about,
            f"{both.limited:,.0f}",
            f"{100 * share:.2f} %",
            f"{both.other:,.0f}",
            f"{100 * kept_up:.0f} %",
        )
    changes = Table("CHANGED FROM", "TO", box=None, pad_edge=False, header_style="bold")
    changes.add_column(f"DONE FROM {1000 * SETTLE_S:.0f} MS ON", justify="right")
    for before, after in track(CHANGES, "changes", console=progress, transient=True):
        share = changed(before, after)
        missed += abs(share - 1) > CHANGED_WITHIN if after else share < MANY_TIMES
        told = f"{100 * share:.1f} %" if after else f"{share:.0f} times the old limit"
        changes.add_row(f"{before:,}", f"{after:,}" if after else "no limit", told)
    out = Console(highlight=False, width=100)
    out.print(accuracy, "", mixed, "", changes)
    if missed and arguments.goal:
        print(f"{missed} of these are beyond the goal", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
