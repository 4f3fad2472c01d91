"""`python -m tests.bench.layers`: a volume's I/O beside that of the bdev below it.

Random reads and writes of 4 KiB at QD32 of a thick and a thin volume and of clones, each of a chain
of 1, 8 and 32 snapshots that have its clusters in turn, beside the bdev that their lvstore lies on:
hot, where the volume has its clusters, and cold, where each write is the first to its cluster. A
volume has 1 GiB in clusters of 64 KiB, all of which was written before it is read. A thick and a
thin one lie on an lvstore with checksums, too. In RAM, and in a file whose disk is written to
directly. In brackets what each is of the bdev's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from tests.bench.cold import below, lvstore, run
from tests.bench.snapshots import guest_of
from tests.support.target import Target

MIB = 1 << 20
CLUSTER = 64 << 10
SIZE_MIB = 1 << 10
SIZE = str(SIZE_MIB * MIB)
DEPTHS = (1, 8, 32)


def hot(target: Target, bdev: str, rw: str, seconds: float) -> float:
    """Returns the random reads or writes a second."""
    words = ("--rw", rw, "--iodepth", "32", "--time", str(seconds), "--size", SIZE)
    return run(target, bdev, *words)


def first_writes(target: Target, bdev: str) -> float:
    """Returns the writes a second, each to a cluster that the volume has not yet."""
    return run(target, bdev, "--stride", str(CLUSTER), "--size", SIZE)


def fill(target: Target, bdev: str) -> None:
    """Writes all of it, so that no read is of a hole."""
    run(target, bdev, "--bs", "1m", "--stride", "1m", "--size", SIZE)


def write_each(target: Target, volume: str, first: int, step: int) -> None:
    """Writes a volume's clusters from `first` on, `step` apart."""
    with guest_of(target, volume) as guest:
        for cluster in range(first, int(SIZE) // CLUSTER, step):
            guest.write(cluster * CLUSTER // 512, b"w" * CLUSTER)


def layers(kind: str, seconds: float) -> Iterator[tuple[str, float, float, float]]:
    """Measures the bdev, then what lies on it: name, reads, writes and first writes a second.

    The last are 0 of what has all of its room.
    """

    def both(target: Target, bdev: str) -> tuple[float, float]:
        return hot(target, bdev, "randread", seconds), hot(target, bdev, "randwrite", seconds)

    with below(kind) as target:
        fill(target, "base")
        yield "the bdev below", *both(target, "base"), 0
    for checksums, told in ((False, ""), (True, ", checksums")):
        with lvstore(kind, CLUSTER, checksums=checksums) as target:
            target.rpc("bdev_lvol_create", lvs_name="lvs", lvol_name="thick", size_in_mib=SIZE_MIB)
            fill(target, "lvs/thick")
            yield f"thick{told}", *both(target, "lvs/thick"), 0
        with lvstore(kind, CLUSTER, checksums=checksums) as target:
            target.make_thin("thin", SIZE_MIB, "lvs")
            first = first_writes(target, "lvs/thin")
            fill(target, "lvs/thin")
            yield f"thin{told}", *both(target, "lvs/thin"), first
    for depth in DEPTHS:
        with lvstore(kind, CLUSTER) as target:
            target.make_thin("vm", SIZE_MIB, "lvs")
            for level in range(depth):
                write_each(target, "lvs/vm", level, depth)
                target.rpc("bdev_lvol_snapshot", lvol_name="lvs/vm", snapshot_name=f"s{level}")
            # Of what the snapshots show, before it has any of it.
            reads = hot(target, "lvs/vm", "randread", seconds)
            first = first_writes(target, "lvs/vm")
            yield (
                f"a clone, {depth} deep",
                reads,
                hot(target, "lvs/vm", "randwrite", seconds),
                first,
            )


def main() -> int:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.layers", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="a second each")
    seconds = 1.0 if parser.parse_args().quick else 5.0
    console = Console()
    for kind in ("RAM", "file"):
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column(kind.upper() if kind == "RAM" else kind.capitalize())
        for title in ("reads", "writes", "first writes"):
            table.add_column(title, justify="right")
        base: tuple[float, float] | None = None
        for name, reads, writes, first in layers(kind, seconds):
            base = base or (reads, writes)
            rates = ((reads, base[0]), (writes, base[1]), (first, base[1]))
            table.add_row(name, *(f"{a:,.0f} ({a / b:.2f})" if a else "" for a, b in rates))
        console.print(table)
    console.print("4 KiB a second at QD32 (of the bdev's)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
