"""`python -m tests.bench.idle`: what 64 guests cost that are connected and do nothing.

"CPU" is what the target's process takes of one, in percent, while they do nothing and it sleeps.
"first read" is how long a read of 4 KiB of a RAM disk takes one of them after half a second in
which nobody did anything, and the target slept; the guest, virtlun-bench's, looks for the answer.
"plain wake" is what this machine takes to wake a thread on another CPU after such a time, and to
show its store to who looks for it: there is no way below that.
"QD1 beside" is the mean of one more guest's reads beside them, divided by that of such a guest
alone: of a target that polls, on a null bdev, in turn. "start" is from the start of the target's
process, which makes all of them anew, until it answers; their volumes are of one lvstore on a
file. "RSS" is what the target has in memory then (VmRSS, proc_pid_status(5)), and with all of them
connected; "its own" is that without what it has touched of the guests' memory, which is theirs
(RssShmem).
"""

from __future__ import annotations

import argparse
import math
import mmap
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.measure import Point, measure
from tests.bench.subjects import Bench, Subject, running
from tests.bench.upgrade import rss_kib, shared_kib
from tests.support.initiator import Initiator
from tests.support.target import Target

GUESTS = 64
SIZE_MIB = 4
READ_10 = bytes([0x28, *bytes(6), 0, 8, 0])
IDLE_S = 5.0
PAUSE_S = 0.5
FIRST_READS = 40
STARTS = 5
ROUNDS = 5
SECONDS = 1.0


@dataclass(frozen=True)
class Measured:
    """One figure, and what it is to stay below."""

    name: str
    value: float
    unit: str
    goal: float

    @property
    def is_met(self) -> bool:
        """Whether it is below its goal."""
        return self.value < self.goal


@contextmanager
def guests_of(target: Target) -> Iterator[list[Initiator]]:
    """Connects a guest to each of the target's controllers."""
    with ExitStack() as stack:
        found = []
        for n in range(GUESTS):
            found.append(stack.enter_context(Initiator(target.vhost_dir / f"vm-{n}")))
            found[-1].send("connect")
            found[-1].ready()
        yield found


def cpu_s(pid: int) -> float:
    """Returns the seconds of a CPU that a process has taken so far (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def plain_wake_us() -> float:
    """Returns how long another process, on a CPU of its own, takes to wake up and answer."""
    kick, seen = os.eventfd(0), mmap.mmap(-1, mmap.PAGESIZE)
    allowed = sorted(os.sched_getaffinity(0))
    child = os.fork()
    if child == 0:
        os.sched_setaffinity(0, {allowed[0]})
        while True:
            os.eventfd_read(kick)
            seen[0] ^= 1
    took = []
    try:
        os.sched_setaffinity(0, {allowed[-1]})
        for _ in range(FIRST_READS):
            time.sleep(PAUSE_S)
            before, begun = seen[0], time.perf_counter()
            os.eventfd_write(kick, 1)
            while seen[0] == before:
                pass
            took.append((time.perf_counter() - begun) * 1e6)
    finally:
        os.sched_setaffinity(0, allowed)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(kick)
    return statistics.median(took)


def at_rest() -> list[Measured]:
    """Measures a target whose guests do nothing, and its start."""
    directory = Path(tempfile.mkdtemp(prefix="vi-", dir="/tmp"))
    target = Target(directory).start()
    try:
        target.make_lvstore(size=(GUESTS * SIZE_MIB + 64) << 20)
        for n in range(GUESTS):
            target.rpc(
                "bdev_lvol_create", lvol_name=f"vm-{n}", size_in_mib=SIZE_MIB, lvs_name="lvs0"
            )
            target.rpc("vhost_create_scsi_controller", ctrlr=f"vm-{n}")
            target.add_lun(f"vm-{n}", f"lvs0/vm-{n}")
        starts = []
        for _ in range(STARTS):
            target.stop()
            begun = time.monotonic()
            target.start()
            starts.append((time.monotonic() - begun) * 1e3)
        started = rss_kib(target.pid) * 1024 / 1e6
        with guests_of(target) as guests:
            time.sleep(PAUSE_S)
            before, begun = cpu_s(target.pid), time.monotonic()
            time.sleep(IDLE_S)
            share = (cpu_s(target.pid) - before) / (time.monotonic() - begun)
            first_us = []
            target.rpc("bdev_malloc_create", name="ram", num_blocks=2048, block_size=512)
            target.add_lun("vm-0", "ram", 1)
            guests[0].ready(1)
            for _ in range(FIRST_READS):
                time.sleep(PAUSE_S)
                answer = guests[0].cdb(READ_10, target=1, data_in_len=4096, poll=True)
                assert (answer["response"], answer["status"]) == (0, 0), answer
                first_us.append(float(answer["us"]))
            connected = rss_kib(target.pid) * 1024 / 1e6
            own = connected - shared_kib(target.pid) * 1024 / 1e6
    finally:
        target.stop()
        shutil.rmtree(directory)
    return [
        Measured("CPU", 100 * share, "%", 1.0),
        Measured("first read, median", statistics.median(first_us), "µs", 50.0),
        Measured("plain wake, median", plain_wake_us(), "µs", math.inf),
        Measured("start, median", statistics.median(starts), "ms", 200.0),
        Measured("RSS, started", started, "MB", 60.0),
        Measured("RSS, connected", connected, "MB", math.inf),
        Measured("RSS, connected, its own", own, "MB", 60.0),
    ]


def beside() -> Measured:
    """Measures a guest with one read in flight beside those that do nothing, and alone."""
    scratch = Path(tempfile.mkdtemp(prefix="vi-", dir="/tmp"))
    allowed = sorted(os.sched_getaffinity(0))
    cpus = (allowed[0], allowed[1]) if len(allowed) > 1 else None
    benches = [
        Bench(scratch / name, scratch, SIZE_MIB, cpus[1] if cpus else None) for name in ("a", "b")
    ]
    points: dict[str, list[Point]] = {"alone": [], "beside": []}
    try:
        makers: list[Callable[[], Subject]] = [
            partial(bench.ours_null, poll=True) for bench in benches
        ]
        with running(makers) as found, ExitStack() as stack:
            alone, crowded = found
            crowded.thaw()
            for n in range(GUESTS):
                stack.enter_context(idle_guest(crowded, f"idle-{n}"))
            crowded.freeze()
            for _ in range(ROUNDS):
                points["alone"].append(measure(alone, "randread", 1, SECONDS, cpus))
                points["beside"].append(measure(crowded, "randread", 1, SECONDS, cpus))
            # They hang up.
            crowded.thaw()
    finally:
        shutil.rmtree(scratch)
    pairs = zip(points["beside"], points["alone"], strict=True)
    # Where the hypervisor moved one of the two between the CPUs says nothing.
    same = [b.mean_ns / a.mean_ns for b, a in pairs if b.mode == a.mode]
    return Measured("QD1 beside", statistics.median(same or [float("nan")]), "times", 1.2)


@contextmanager
def idle_guest(subject: Subject, name: str) -> Iterator[None]:
    """Makes a controller with a disk, and connects a guest to it that does nothing more."""
    assert subject.rpc is not None
    subject.rpc.call("vhost_create_scsi_controller", ctrlr=name)
    subject.rpc.call("bdev_null_create", name=f"{name}-n", num_blocks=2048, block_size=512)
    subject.rpc.call(
        "vhost_scsi_controller_add_target", ctrlr=name, scsi_target_num=0, bdev_name=f"{name}-n"
    )
    with Initiator(subject.socket.with_name(name)) as guest:
        guest.send("connect")
        guest.ready()
        yield


def main() -> int:
    """Measures and prints a table; 1 if a row misses its goal with ``--goal``."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.idle", description=f"What {GUESTS} guests cost that do nothing."
    )
    parser.add_argument("--goal", action="store_true", help="fail if a row misses its goal")
    arguments = parser.parse_args()
    rows = [*at_rest(), beside()]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"{GUESTS} GUESTS")
    for title in ("MEASURED", "GOAL"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.value:.2f} {row.unit}",
            "" if row.goal == math.inf else f"below {row.goal:g} {row.unit}",
        )
    Console(highlight=False).print(table)
    missed = [row for row in rows if not row.is_met] if arguments.goal else []
    for row in missed:
        print(f"{row.name} is {row.value:.2f} {row.unit}, not below {row.goal:g}", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
