"""`python -m tests.bench.upgrade`: how long guests wait while the target's program is replaced.

Guests are virtlun-bench's, one a controller, each with a volume of one lvstore on a file. "target"
is what the target says: from holding its guests to serving them again. "guest" is the longest time
that a read of a guest, which reads all the time, took around an upgrade.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.support.initiator import Initiator
from tests.support.target import Target

SIZE_MIB = 4
BETWEEN_S = 0.1


def measure(controllers: int, rounds: int) -> tuple[list[float], list[float]]:
    """Upgrades `rounds` times; milliseconds as the target and as one guest sees them."""
    directory = Path(tempfile.mkdtemp(prefix="vu-", dir="/tmp"))
    target = Target(directory).start()
    try:
        target.make_lvstore(size=(controllers * SIZE_MIB + 64) << 20)
        with ExitStack() as stack:
            guests = []
            for n in range(controllers):
                name = f"vm-{n}"
                volume = target.rpc(
                    "bdev_lvol_create", lvol_name=name, size_in_mib=SIZE_MIB, lvs_name="lvs0"
                )
                target.rpc("vhost_create_scsi_controller", ctrlr=name)
                target.add_lun(name, volume)
                guests.append(stack.enter_context(Initiator(target.vhost_dir / name)))
                guests[-1].send("connect")
                guests[-1].ready()
            return upgrades(target, guests[0], rounds)
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


def main() -> None:
    """Measures and prints a table in milliseconds."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.upgrade", description="Milliseconds that an upgrade takes."
    )
    parser.add_argument("--rounds", type=int, default=20, help="upgrades of each row (20)")
    rounds = parser.parse_args().rounds
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("CONTROLLERS", "target p50", "target max", "guest p50", "guest max"):
        table.add_column(title, justify="right")
    for controllers in (1, 16, 64):
        by_target, by_guest = measure(controllers, rounds)
        table.add_row(
            str(controllers),
            *(f"{statistics.median(by_target):.1f}", f"{max(by_target):.1f}"),
            *(f"{statistics.median(by_guest):.1f}", f"{max(by_guest):.1f}"),
        )
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
