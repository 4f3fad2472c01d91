"""`python -m tests.bench.kv`: a key-value store on blobs beside RocksDB on the same file system.

The store is examples/kv, about 300 lines without its tests, on the blobstore in a file; RocksDB is
Debian's, by its own `db_bench`, without compression. Keys have 16 bytes, by chance, values 100.
`fillsync` puts and syncs each entry; `overwrite` puts keys anew that are there; in `readwrite` nine
of ten operations get. RocksDB is measured by one thread, as ours is; its files are where ours is,
and each round is of one after the other, so that both see the same disk.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.support.cache import ROOT

MIB = 1024
#: Ours, RocksDB's benchmarks with options, and how many operations are measured. Its own fillsync
#: has a thousandth of the keys, and after its fillrandom a third of them is not there.
WORKLOADS = {
    "fillsync": (("--benchmarks=fillrandom", "--sync=1"), 5_000),
    "overwrite": (("--benchmarks=filluniquerandom,overwrite",), 500_000),
    "readwrite": (
        ("--benchmarks=filluniquerandom,readrandomwriterandom", "--readwritepercent=90"),
        500_000,
    ),
}
ROUNDS = 3
QUICK = 10
"""So much fewer operations in a short run."""


def build() -> Path:
    """Builds the example as a release has it; returns the program."""
    manifest = str(ROOT / "pydataplane/Cargo.toml")
    command = ["cargo", "build", "--release", "--locked", "--manifest-path", manifest]
    said = subprocess.run(
        [*command, "-p", "blobstore", "--example", "kv", "--message-format", "json"],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    made = [json.loads(line) for line in said.splitlines() if '"executable"' in line]
    return Path(next(each["executable"] for each in made if each["target"]["name"] == "kv"))


def ours(program: Path, folder: Path, workload: str, count: int) -> float:
    """Returns the operations a second of examples/kv."""
    file = folder / "kv.img"
    done = subprocess.run(
        [str(program), str(file), str(MIB), workload, str(count)],
        stdout=subprocess.PIPE,
        check=True,
    )
    file.unlink()
    rate: float = json.loads(done.stdout)["per_second"]
    return rate


def rocksdb(folder: Path, options: tuple[str, ...], count: int) -> float:
    """Returns the operations a second of the last of some benchmarks of db_bench."""
    path = folder / "rocksdb"
    words = ["--compression_type=none", "--key_size=16", "--value_size=100", "--threads=1"]
    done = subprocess.run(
        ["db_bench", f"--db={path}", *options, f"--num={count}", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        text=True,
    )
    shutil.rmtree(path)
    found = re.findall(r"^\w+ +:.* (\d+) ops/sec", done.stdout, re.MULTILINE)
    return float(found[-1])


def main() -> int:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.kv", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer of all")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="where files are")
    asked = parser.parse_args()
    if shutil.which("db_bench") is None:
        print("db_bench is not there: install rocksdb-tools", file=sys.stderr)
        return 1
    program = build()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("WORKLOAD", "ours a second", "RocksDB", "ratio"):
        table.add_column(title, justify="left" if title == "WORKLOAD" else "right")
    with tempfile.TemporaryDirectory(prefix="kv-", dir=asked.folder) as name:
        folder = Path(name)
        for workload, (options, count) in WORKLOADS.items():
            number = count // QUICK if asked.quick else count
            rates: tuple[list[float], list[float]] = ([], [])
            for _ in range(1 if asked.quick else ROUNDS):
                os.sync()
                rates[0].append(ours(program, folder, workload, number))
                os.sync()
                rates[1].append(rocksdb(folder, options, number))
            mine, theirs = map(statistics.median, rates)
            table.add_row(workload, f"{mine:,.0f}", f"{theirs:,.0f}", f"{mine / theirs:.2f}")
    Console(highlight=False).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
