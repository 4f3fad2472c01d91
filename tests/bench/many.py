"""`python -m tests.bench.many`: what calls about a volume take among 10,000, and a start.

Thin volumes of 4 MiB in a sparse file. The first row is of a store with ten of them. Medians, in
milliseconds, from call to answer; the stop and the start are of one time each.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.support.target import Target

GIB = 1 << 30
TIMES = 20
"""How often each call is made."""
CALLS = ("create", "snapshot", "clone", "resize", "rename", "delete", "stop", "start")


def ms(call: Callable[[], object]) -> float:
    """Returns how long a call takes, milliseconds."""
    begin = time.monotonic()
    call()
    return 1e3 * (time.monotonic() - begin)


def measured(target: Target, count: int, console: Console) -> list[float]:
    """Makes so many volumes, and returns what each of CALLS takes then."""
    target.make_lvstore(size=256 * GIB)
    create = {"size_in_mib": 4, "lvs_name": "lvs0", "thin_provision": True}

    def made(name: str) -> float:
        return ms(lambda: target.rpc("bdev_lvol_create", lvol_name=name, **create))

    numbers = track(range(count), f"{count:,} volumes", console=console)
    created = [made(f"v{number}") for number in numbers][-TIMES:]
    calls: dict[str, Callable[[int], object]] = {
        "snapshot": lambda n: target.rpc(
            "bdev_lvol_snapshot", lvol_name=f"lvs0/v{n}", snapshot_name=f"s{n}"
        ),
        "clone": lambda n: target.rpc(
            "bdev_lvol_clone", snapshot_name=f"lvs0/s{n}", clone_name=f"c{n}"
        ),
        "resize": lambda n: target.rpc("bdev_lvol_resize", name=f"lvs0/v{n}", size_in_mib=8),
        "rename": lambda n: target.rpc("bdev_lvol_rename", old_name=f"lvs0/c{n}", new_name=f"d{n}"),
        "delete": lambda n: target.rpc("bdev_lvol_delete", name=f"lvs0/d{n}"),
    }
    steps = min(TIMES, count)
    taken = [median(ms(lambda: call(n)) for n in range(steps)) for call in calls.values()]  # noqa: B023
    return [median(created), *taken, ms(target.stop), ms(target.start)]


def main() -> int:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.many", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="among 1,000")
    counts = (10, 1_000 if parser.parse_args().quick else 10_000)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("VOLUMES", *(call.upper() for call in CALLS)):
        table.add_column(title, justify="right")
    progress = Console(stderr=True)
    for count in counts:
        directory = Path(tempfile.mkdtemp(prefix="vs-", dir="/var/tmp"))
        target = Target(directory).start()
        try:
            taken = measured(target, count, progress)
        finally:
            target.stop()
            shutil.rmtree(directory, ignore_errors=True)
        table.add_row(f"{count:,}", *(f"{each:,.2f}" for each in taken))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
