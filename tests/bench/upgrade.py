"""`python -m tests.bench.upgrade`: how long guests wait while the target's program is replaced.

Guests are virtlun-bench's, one a controller, each with a volume of one lvstore on a file. "target"
is what the target says: from holding its guests to serving them again. "guest" is the longest time
that a read of a guest, which reads all the time, took around an upgrade, all in milliseconds.
"KiB a peer" is what a guest costs the target in memory: how much larger its RSS (VmRSS,
proc_pid_status(5)) is with all controllers made and connected than before, divided by their number;
before any upgrade. Pages of the guests' own memory that the target has touched are in it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.support.initiator import Initiator
from tests.support.target import Target

SIZE_MIB = 4
BETWEEN_S = 0.1
GOAL_MS = 100.0
"""What a guest waits for while its target is upgraded is less than that, however many there are."""


@dataclass(frozen=True)
class Row:
    """What was measured with some controllers."""

    by_target_ms: list[float]
    """Pauses as the target tells them."""
    by_guest_ms: list[float]
    """The longest reads of a guest."""
    kib_a_peer: float


def rss_kib(pid: int) -> int:
    """Resident memory of a process."""
    return _status_kib(pid, "VmRSS")


def shared_kib(pid: int) -> int:
    """Of that, memory that it shares by a memfd or /dev/shm: of a target, the guests'."""
    return _status_kib(pid, "RssShmem")


def _status_kib(pid: int, field: str) -> int:
    """A figure of proc_pid_status(5)."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None, field
    return int(found[1])


def measure(controllers: int, rounds: int) -> Row:
    """Measures memory with so many controllers, and upgrades `rounds` times."""
    directory = Path(tempfile.mkdtemp(prefix="vu-", dir="/tmp"))
    target = Target(directory).start()
    try:
        target.make_lvstore(size=(controllers * SIZE_MIB + 64) << 20)
        volumes = {
            name: target.rpc(
                "bdev_lvol_create", lvol_name=name, size_in_mib=SIZE_MIB, lvs_name="lvs0"
            )
            for name in (f"vm-{n}" for n in range(controllers))
        }
        with ExitStack() as stack:
            before_kib = rss_kib(target.pid)
            guests = []
            for name, volume in volumes.items():
                target.rpc("vhost_create_scsi_controller", ctrlr=name)
                target.add_lun(name, volume)
                guests.append(stack.enter_context(Initiator(target.vhost_dir / name)))
                guests[-1].send("connect")
                guests[-1].ready()
            kib_a_peer = (rss_kib(target.pid) - before_kib) / controllers
            return Row(*upgrades(target, guests[0], rounds), kib_a_peer)
    finally:
        target.stop()
        shutil.rmtree(directory)


def upgrades(target: Target, guest: Initiator, rounds: int) -> tuple[list[float], list[float]]:
    """Upgrades again and again, while one guest reads."""
    stop, longest = threading.Event(), [0.0]

    def read() -> None:
        while not stop.is_set():
            begun = time.monotonic()
            guest.read(0, 8)
            longest[0] = max(longest[0], (time.monotonic() - begun) * 1e3)

    reader = threading.Thread(target=read)
    reader.start()
    by_target, by_guest = [], []
    try:
        for _ in range(rounds):
            time.sleep(BETWEEN_S)
            longest[0] = 0.0
            target.upgrade()
            time.sleep(BETWEEN_S)
            by_guest.append(longest[0])
            by_target.append(target.rpc("virtlun_get_status")["upgrade"]["pause_ms"])
    finally:
        stop.set()
        reader.join()
    return by_target, by_guest


def missed(rows: dict[int, Row]) -> list[str]:
    """A sentence for each row that misses the goal, by the number of its controllers."""
    longest = {n: max(row.by_guest_ms) for n, row in rows.items()}
    return [
        f"with {n} controllers a guest waits for {most:.0f} ms at most (the goal: less than "
        f"{GOAL_MS:.0f} ms)"
        for n, most in longest.items()
        if most >= GOAL_MS
    ]


def main() -> int:
    """Measures and prints a table; 1 if a row misses the goal with ``--goal``."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.upgrade",
        description="Milliseconds that an upgrade takes, and memory of the target a peer.",
    )
    parser.add_argument("--rounds", type=int, default=20, help="upgrades of each row (20)")
    parser.add_argument("--goal", action="store_true", help="fail if a row misses the goal")
    arguments = parser.parse_args()
    rows: dict[int, Row] = {}
    table = Table(box=None, pad_edge=False, header_style="bold")
    pauses = ("target p50", "target max", "guest p50", "guest max")
    for title in ("CONTROLLERS", *pauses, "KiB a peer"):
        table.add_column(title, justify="right")
    for controllers in (1, 16, 64):
        row = rows[controllers] = measure(controllers, arguments.rounds)
        table.add_row(
            str(controllers),
            *(f"{statistics.median(row.by_target_ms):.1f}", f"{max(row.by_target_ms):.1f}"),
            *(f"{statistics.median(row.by_guest_ms):.1f}", f"{max(row.by_guest_ms):.1f}"),
            f"{row.kib_a_peer:,.0f}",
        )
    Console(highlight=False).print(table)
    complaints = missed(rows) if arguments.goal else []
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
