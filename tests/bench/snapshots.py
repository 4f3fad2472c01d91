"""`python -m tests.bench.snapshots`: what snapshots and clones cost, and those beside them.

All is on a sparse file, whose flushes are the disk's own. Calls are those of JSON-RPC, in an
lvstore with as many lvols as said. First writes are of 4 KiB, one at a time, each to another
cluster that the volume has not yet of its own. "Around each" is the longest read and write of a
guest that does one after the other all the time, while snapshots of its volume of 1 TiB are taken.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.upgrade import rss_kib
from tests.support.initiator import Initiator
from tests.support.target import Target

BLOCK = 4096
CLUSTER_MIB = 1
IMAGE_MIB = 10 << 10
LARGE_MIB = 1 << 20
GIB = 1 << 30
UNDER_LOAD_MS = 20.0
"""No I/O of a guest takes longer while a snapshot is taken."""
CALL_MS = 5.0
"""No call about one of many lvols takes longer."""
LOAD_S = 2.0
"""Nor does the load of an lvstore with many."""


@contextmanager
def lvstore(gib: int) -> Iterator[Target]:
    """A target with an lvstore on a sparse file."""
    directory = Path(tempfile.mkdtemp(prefix="vs-", dir="/tmp"))
    target = Target(directory).start()
    try:
        target.make_lvstore(size=gib * GIB)
        yield target
    finally:
        target.stop()
        shutil.rmtree(directory)


@contextmanager
def guest_of(target: Target, bdev: str) -> Iterator[Initiator]:
    """A guest with one LUN."""
    target.rpc("vhost_create_scsi_controller", ctrlr="vm")
    target.add_lun("vm", bdev)
    try:
        with Initiator(target.vhost_dir / "vm") as guest:
            guest.send("connect")
            guest.ready()
            yield guest
    finally:
        target.rpc("vhost_delete_controller", ctrlr="vm", force=True)


def call_ms(target: Target, method: str, **params: Any) -> float:
    """Returns how long a call takes."""
    begun = time.monotonic()
    target.rpc(method, **params)
    return (time.monotonic() - begun) * 1e3


def write_ms(guest: Initiator, cluster: int) -> float:
    """Returns how long a write to a cluster takes."""
    begun = time.monotonic()
    guest.write(cluster * CLUSTER_MIB << 11, b"w" * BLOCK)
    return (time.monotonic() - begun) * 1e3


def read_ms(guest: Initiator, cluster: int) -> float:
    """Returns how long a read of a cluster's first block takes."""
    begun = time.monotonic()
    guest.read(cluster * CLUSTER_MIB << 11, BLOCK // 512)
    return (time.monotonic() - begun) * 1e3


class Rows:
    """Times of one thing after the other, in milliseconds, and what they are to stay below."""

    def __init__(self) -> None:
        """Begins without rows."""
        self.table = Table(box=None, pad_edge=False, header_style="bold", title="milliseconds")
        self.table.add_column("")
        for title in ("times", "p50", "p99", "longest", "goal"):
            self.table.add_column(title, justify="right")
        self.missed: list[str] = []

    def add(self, what: str, values: list[float], *, goal_ms: float | None = None) -> None:
        """Adds p50, p99, which is to stay below the goal, and the longest of some times."""
        ordered = sorted(values)
        p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
        shown = (statistics.median(ordered), p99, ordered[-1])
        goal = "" if goal_ms is None else f"{goal_ms:.0f}"
        self.table.add_row(what, str(len(ordered)), *(f"{value:.2f}" for value in shown), goal)
        if goal_ms is not None and p99 >= goal_ms:
            self.missed.append(f"{what}: {p99:.1f} ms (p99), not below {goal_ms:.0f}")


def under_snapshots(rows: Rows, rounds: int) -> None:
    """A guest's I/O around snapshots of its large volume."""
    with lvstore(2 << 10) as target:
        volume = target.make_thin("vm", LARGE_MIB)
        with guest_of(target, volume) as guest:
            stop, longest = threading.Event(), {"read": 0.0, "write": 0.0}

            def work() -> None:
                for at in itertools.count():
                    if stop.is_set():
                        return
                    longest["write"] = max(longest["write"], write_ms(guest, at % 64))
                    longest["read"] = max(longest["read"], read_ms(guest, at % 64))

            worker = threading.Thread(target=work)
            worker.start()
            calls, reads, writes = [], [], []
            try:
                for number in range(rounds):
                    time.sleep(0.1)
                    longest.update(read=0.0, write=0.0)
                    name = {"lvol_name": "lvs0/vm", "snapshot_name": f"s{number}"}
                    calls.append(call_ms(target, "bdev_lvol_snapshot", **name))
                    time.sleep(0.05)
                    reads.append(longest["read"])
                    writes.append(longest["write"])
            finally:
                stop.set()
                worker.join()
    rows.add("snapshot of 1 TiB under I/O", calls)
    rows.add("longest read of the guest around each", reads, goal_ms=UNDER_LOAD_MS)
    rows.add("longest write of the guest around each", writes, goal_ms=UNDER_LOAD_MS)


def image(rows: Rows, clones: int) -> None:
    """Clones of an image."""
    with lvstore(64) as target:
        target.make_thin("image", IMAGE_MIB)
        with guest_of(target, "lvs0/image") as guest:
            for cluster in range(0, IMAGE_MIB, 20):
                write_ms(guest, cluster)
        target.rpc("bdev_lvol_snapshot", lvol_name="lvs0/image", snapshot_name="golden")
        make = [clone_ms(target, n) for n in range(clones)]
        rows.add(f"clone of an image of 10 GiB (all: {sum(make):.0f} ms)", make)
        for name, volume in (("clone", "lvs0/vm0"), ("thin volume", target.make_thin("new", 1024))):
            with guest_of(target, volume) as guest:
                first = [write_ms(guest, n * 20) for n in range(50)]
                again = [write_ms(guest, n * 20) for n in range(50)]
            rows.add(f"first write to a cluster of a {name}", first)
            rows.add("  again", again)


def clone_ms(target: Target, number: int) -> float:
    """Returns how long it takes to make a clone of the image."""
    names = {"snapshot_name": "lvs0/golden", "clone_name": f"vm{number}"}
    return call_ms(target, "bdev_lvol_clone", **names)


def many(rows: Rows, lvols: int) -> str:
    """Calls in an lvstore of many lvols, and its load; returns a sentence on that."""
    with lvstore(10 << 10) as target:
        target.make_thin("image", 1 << 10)
        target.rpc("bdev_lvol_snapshot", lvol_name="lvs0/image", snapshot_name="golden")
        create = [clone_ms(target, n) for n in range(lvols)]
        rows.add(f"clone, the last of {lvols}", create[-min(1000, lvols) :], goal_ms=CALL_MS)
        for method in ("bdev_lvol_snapshot", "bdev_lvol_resize", "bdev_lvol_delete"):
            times = []
            for n in range(100):
                params: dict[str, Any] = {"name": f"lvs0/vm{n}"}
                if method == "bdev_lvol_snapshot":
                    params = {"lvol_name": f"lvs0/vm{n}", "snapshot_name": f"s{n}"}
                elif method == "bdev_lvol_resize":
                    params["size_in_mib"] = 2 << 10
                times.append(call_ms(target, method, **params))
            rows.add(f"{method} of {lvols} lvols", times, goal_ms=CALL_MS)
        target.stop()
        begun = time.monotonic()
        target.start()
        while not target.rpc("bdev_lvol_get_lvstores"):
            time.sleep(0.01)
        took = time.monotonic() - begun
        if took >= LOAD_S:
            rows.missed.append(f"the lvstore is loaded in {took:.1f} s, not below {LOAD_S:.0f}")
        return (
            f"an lvstore of 10 TiB with {lvols} clones: loaded {took:.2f} s after the target's "
            f"start, which has {rss_kib(target.pid) / 1024:.0f} MiB then"
        )


def main() -> int:
    """Measures and prints the tables; 1 if a row misses its goal with ``--goal``."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.snapshots", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer of all")
    parser.add_argument("--goal", action="store_true", help="fail if a row misses its goal")
    arguments = parser.parse_args()
    quick = arguments.quick
    rows = Rows()
    under_snapshots(rows, 10 if quick else 50)
    image(rows, 100)
    loaded = many(rows, 1000 if quick else 10_000)
    console = Console()
    console.print(rows.table)
    console.print(loaded)
    missed = rows.missed if arguments.goal else []
    for sentence in missed:
        print(sentence, file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
