"""`python -m tests.bench.stages`: what one request takes each stage of an installed build.

Instructions and nanoseconds of a READ and a WRITE of 4 KiB, by the programs of
`tests.bench.instructions`, but built as what is installed is (profile release). Instructions are
counted by valgrind, as there. Nanoseconds are CPU time of the program, least of several runs: again
what twice as many requests take more. All is in the cache then, as in a guest's ring it is not: it
is the processor's part, to which the way of cache lines between CPUs comes.

Of calls of the kernel valgrind counts nothing: what `submit_cost` says of bdevs and of a file on
tmpfs is printed beneath, the kernel's part included. Such a file is read and written by preadv2 and
pwritev2, not through the io_uring. `--accept` writes the table into the documentation.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from tests.bench.instructions import OPERATIONS, PAGE, ROOT, STAGES, NotCountedError, count

REQUESTS = 1_000_000
"""Of the shorter run: some tens of milliseconds, or more."""
ROUNDS = 5
MARK = re.compile(r"^\| installed build, .*?(?=\n\n)", re.MULTILINE | re.DOTALL)


def build(folder: Path) -> Path:
    """Builds the programs in `folder`; returns where they are."""
    command = ["cargo", "build", "--quiet", "--locked", "--release", "--examples"]
    command += ["--manifest-path", str(ROOT / "pydataplane/Cargo.toml")]
    command += ["--target-dir", str(folder)]
    for crate in ("virtqueue", "scsi", "lvol", "virtio-blk", "protection", "bdev", "vhost-scsi"):
        command += ["-p", crate]
    if subprocess.run(command, check=False).returncode != 0:
        raise NotCountedError("cargo did not build the programs: see above")
    return folder / "release/examples"


def _cpu_s(program: Path, *arguments: str) -> float:
    """Returns the CPU time of one run, seconds."""
    process = subprocess.Popen([str(program), *arguments], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise NotCountedError(f"{program.name} {' '.join(arguments)} failed: see above")
    return used.ru_utime + used.ru_stime


def ns_of_one(program: Path, *arguments: str) -> float:
    """Returns the CPU time of one request, nanoseconds."""
    least = [
        min(_cpu_s(program, *arguments, str(n * REQUESTS)) for _ in range(ROUNDS)) for n in (1, 2)
    ]
    return (least[1] - least[0]) / REQUESTS * 1e9


def stages(folder: Path) -> dict[str, dict[str, float]]:
    """Returns the nanoseconds of each stage and operation."""
    found: dict[str, dict[str, float]] = {}
    for name, stage in STAGES.items():
        found[name] = {}
        for operation in OPERATIONS:
            took = ns_of_one(folder / stage.program, *stage.arguments, operation)
            if stage.without is not None:
                took -= ns_of_one(folder / stage.program, *stage.without, operation)
            found[name][operation] = took
    return found


def of_a_file(folder: Path) -> str:
    """Returns what `submit_cost` says of a file in memory, line by line."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="vstage-") as file:
        file.truncate(512 << 20)
        run = subprocess.run(
            [folder / "submit_cost", file.name], capture_output=True, text=True, check=False
        )
    if run.returncode != 0:
        raise NotCountedError(f"submit_cost failed: {run.stderr[-2000:]}")
    return run.stdout


def table(instructions: dict[str, dict[str, int]], ns: dict[str, dict[str, float]]) -> str:
    """Returns the documentation's table."""
    today = datetime.now(UTC).date().isoformat()
    lines = [
        f"| installed build, {today} | READ: instructions | ns | WRITE: instructions | ns |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, of in instructions.items():
        cells = (f"{of[operation]:,} | {ns[name][operation]:,.0f}" for operation in OPERATIONS)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.stages", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--accept", action="store_true", help="write the table into the page")
    parser.add_argument("--build", action="store_true", help="only build the programs")
    arguments = parser.parse_args()
    given = os.environ.get("CARGO_TARGET_DIR")
    try:
        folder = build(Path(given) if given else ROOT / "pydataplane/target")
        if arguments.build:
            return 0
        ns = stages(folder)
        told = of_a_file(folder)
        found = table(count(folder), ns)
    except NotCountedError as error:
        print(error, file=sys.stderr)
        return 1
    print(found, told, sep="\n\n")
    if arguments.accept:
        PAGE.write_text(MARK.sub(lambda _: found, PAGE.read_text(), count=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
