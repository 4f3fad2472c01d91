"""`python -m tests.bench.instructions`: instructions of one READ and one WRITE of 4 KiB, by stage.

Each stage's example program runs it so often, and then twice as often, under valgrind; what the
second run has more, by the number of requests, is what one takes, whatever else a machine does.
The programs are those of the tests (profile dev): with the checks of a debug build, and less
optimized than what is installed. Of calls of the kernel valgrind counts nothing: a file is one on
tmpfs, which is read and written by preadv2 and pwritev2, not through the io_uring.

A stage that takes 5 % more than EXPECTED says fails; `--accept` writes what was counted there, and
into the table of the documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXPECTED = Path(__file__).with_name("instructions.json")
PAGE = ROOT / "docs/pages/explanation/request.md"

REQUESTS = 16_000
"""Of the shorter run; a multiple of what comes at a time, and of how often the clock is read."""
TOLERANCE = 0.05
"""A stage may take so much more, or less, before anything is said."""
ACCEPT = "python -m tests.bench.instructions --accept"
OPERATIONS = ("read", "write")

Counts = dict[str, dict[str, int]]
"""Instructions, by stage and operation."""


@dataclass(frozen=True)
class Stage:
    """What one program runs, with what is not the stage's own taken off."""

    program: str
    arguments: tuple[str, ...] = ()
    without: tuple[str, ...] | None = None
    """Arguments with which the program runs all but the stage."""


POLLER = "poll_cost"
"""The one of which the arguments begin with the kind of a disk."""

STAGES = {
    "null disk, from ring to ring (`vhost`)": Stage(POLLER, ("null",)),
    "poller, of that (`vhost`)": Stage(POLLER, ("null",), ("below", "null")),
    "poller, where the disk answers later (`vhost`)": Stage(POLLER, ("later",), ("below", "later")),
    "disk in memory, more than a null one (`bdev`)": Stage(POLLER, ("malloc",), ("null",)),
    "file on tmpfs, more than a null disk (`bdev`)": Stage(POLLER, ("file",), ("null",)),
    "ring (`virtqueue`)": Stage("ring_cost"),
    "in-flight region, of that (`virtqueue`)": Stage("ring_cost", (), ("untracked",)),
    "SCSI (`scsi`)": Stage("read_cost"),
    "thick volume (`lvol`)": Stage("cost", ("thick",), ("ram",)),
    "thin volume (`lvol`)": Stage("cost", ("thin",), ("ram",)),
    "virtio-blk request (`virtio-blk`)": Stage("request_cost"),
    "tuples of 8 blocks (`protection`)": Stage("tuple_cost"),
}


class NotCountedError(Exception):
    """Why there are no counts, in one sentence."""


def build() -> Path:
    """Builds the programs as the tests do (`make build LEAN=1`); returns the folder they are in.

    Where cargo builds otherwise, incrementally for instance, the code is other code: then it is in
    a folder of its own.
    """
    lean = {"CARGO_PROFILE_DEV_DEBUG": "0", "CARGO_INCREMENTAL": "0"}
    folder = ROOT / "pydataplane/target"
    if any(os.environ.get(name) != value for name, value in lean.items()):
        folder /= "instructions"
    command = ["cargo", "build", "--quiet", "--locked", "--examples"]
    command += [
        "--manifest-path",
        str(ROOT / "pydataplane/Cargo.toml"),
        "--target-dir",
        str(folder),
    ]
    if subprocess.run(command, env={**os.environ, **lean}, check=False).returncode != 0:
        raise NotCountedError("cargo did not build the programs: see above")
    return folder / "debug/examples"


def toolchain() -> str:
    """Returns the compiler's version."""
    version = subprocess.run(["rustc", "--version"], cwd=ROOT, capture_output=True, check=True)
    return version.stdout.decode().split()[1]


def _count(program: Path, *arguments: str) -> int:
    """Returns the instructions of one run."""
    command = ["valgrind", "--tool=cachegrind", "--cache-sim=no"]
    command += ["--cachegrind-out-file=/dev/null", str(program), *arguments]
    # memcpy and the like as on the least of these CPUs: they are not what is measured.
    env = {**os.environ, "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-ERMS,-FSRM"}
    try:
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NotCountedError("valgrind is not installed: apt install valgrind") from None
    found = re.search(r"I +refs: +([\d,]+)", run.stderr)
    if run.returncode != 0 or found is None:
        raise NotCountedError(f"{' '.join(command)} failed: {run.stderr[-2000:]}")
    return int(found[1].replace(",", ""))


def _of_one(program: Path, *arguments: str) -> float:
    """Returns the instructions of one request."""
    once, twice = (_count(program, *arguments, str(n * REQUESTS)) for n in (1, 2))
    return (twice - once) / REQUESTS


def count(folder: Path) -> Counts:
    """Returns the counts of the programs in `folder`."""
    runs: dict[tuple[str, ...], float] = {}
    for stage in STAGES.values():
        for arguments in (stage.arguments, stage.without):
            if arguments is not None:
                runs |= {(stage.program, *arguments, operation): 0.0 for operation in OPERATIONS}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        of_one = pool.map(lambda run: _of_one(folder / run[0], *run[1:]), runs)
        runs = dict(zip(runs, of_one, strict=True))

    def one(stage: Stage, operation: str) -> int:
        counted = runs[stage.program, *stage.arguments, operation]
        if stage.without is not None:
            counted -= runs[stage.program, *stage.without, operation]
        return round(counted)

    return {
        name: {operation: one(stage, operation) for operation in OPERATIONS}
        for name, stage in STAGES.items()
    }


def compare(
    expected: Mapping[str, Mapping[str, int]], counted: Counts
) -> tuple[list[str], list[str]]:
    """Returns sentences on what takes more than it may, and on what takes less."""
    worse: list[str] = []
    better: list[str] = []
    for stage, operations in counted.items():
        for operation, now in operations.items():
            before = expected.get(stage, {}).get(operation, 0)
            change = f"{operation.upper()}, {stage}: {now} instructions instead of {before}"
            if now > before * (1 + TOLERANCE):
                worse.append(f"{change}; find out why, or accept it with {ACCEPT}")
            elif now < before * (1 - TOLERANCE):
                better.append(f"{change}; keep it with {ACCEPT}")
    gone = expected.keys() - counted.keys()
    worse += [f"{stage}: it is not counted any more; accept it with {ACCEPT}" for stage in gone]
    return worse, better


def table(counts: Mapping[str, Mapping[str, int]]) -> str:
    """Returns the documentation's table."""
    lines = ["| instructions of | READ | WRITE |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {of['read']:,} | {of['write']:,} |" for name, of in counts.items()]
    return "\n".join(lines)


def expected() -> tuple[str, Counts]:
    """Returns the compiler's version and the counts that are accepted."""
    document = json.loads(EXPECTED.read_text())
    return document["toolchain"], document["instructions"]


def accept(counted: Counts) -> None:
    """Writes EXPECTED, and the table into the page."""
    document = {"toolchain": toolchain(), "instructions": counted}
    EXPECTED.write_text(json.dumps(document, indent=2) + "\n")
    page = PAGE.read_text()
    there = re.compile(r"^\| instructions of \|.*?(?=\n\n)", re.MULTILINE | re.DOTALL)
    PAGE.write_text(there.sub(lambda _: table(counted), page, count=1))


def check() -> tuple[Counts, list[str], list[str]]:
    """Builds, counts and compares; returns the counts, and what [`compare`] says."""
    counted = count(build())
    of, counts = expected()
    worse, better = compare(counts, counted)
    if (now := toolchain()) != of:
        worse.append(f"rustc is {now}, the counts are of {of}: accept those of it with {ACCEPT}")
    return counted, worse, better


def main() -> int:
    """Prints the table, and what has changed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.instructions", description="Count a request's instructions."
    )
    parser.add_argument("--accept", action="store_true", help="write what is counted as expected")
    arguments = parser.parse_args()
    try:
        if arguments.accept:
            accept(counted := count(build()))
            print(table(counted))
            return 0
        counted, worse, better = check()
    except NotCountedError as error:
        print(error, file=sys.stderr)
        return 1
    print(table(counted), *worse, *better, sep="\n")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
