"""`python -m tests.bench.profile`: in which functions the instructions of a READ are, by stage.

Callgrind counts what each function executes itself, in two runs of a stage's program
(`tests.bench.instructions`) of which the second one reads twice as often: what that has more is the
READs'. A function that the compiler has put into another one is counted there.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.bench.instructions import REQUESTS, STAGES, NotCountedError, build

PROFILED = ("ring (`virtqueue`)", "SCSI (`scsi`)")
TOP = 10
#: A line of callgrind_annotate: instructions, their share, file and function, object.
LINE = re.compile(r"^ *([\d,]+) \( *[\d.]+%\)  \S*?:(?!:)(.+?)(?: \[[^\]]*\])?$", re.MULTILINE)
#: What the compiler puts behind a name to tell it from others.
HASH = re.compile(r"::h[0-9a-f]{16}$")


def parse(annotated: str) -> Counter[str]:
    """Returns the instructions of each function, from what callgrind_annotate says."""
    found: Counter[str] = Counter()
    for count, name in LINE.findall(annotated):
        found[HASH.sub("", name)] += int(count.replace(",", ""))
    return found


def _of_run(program: Path, *arguments: str) -> Counter[str]:
    with tempfile.NamedTemporaryFile(prefix="callgrind-") as out:
        run = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out.name}", str(program)]
        for command in (
            [*run, *arguments],
            ["callgrind_annotate", "--threshold=100", "--auto=no", out.name],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise NotCountedError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
        return parse(done.stdout)


def profile(program: Path, *arguments: str) -> list[tuple[str, float]]:
    """Returns functions and their instructions of one READ, those with the most first."""
    once, twice = (_of_run(program, *arguments, "read", str(n * REQUESTS)) for n in (1, 2))
    twice.subtract(once)
    return [(name, count / REQUESTS) for name, count in twice.most_common() if count > 0]


def table(stage: str, functions: list[tuple[str, float]]) -> str:
    """Returns the functions of a stage that have the most, as a table of the documentation."""
    total = sum(count for _, count in functions)
    lines = [f"| {stage} | instructions of a READ | share |", "| --- | ---: | ---: |"]
    lines += [
        f"| `{name}` | {count:,.0f} | {100 * count / total:.0f} % |"
        for name, count in functions[:TOP]
    ]
    return "\n".join(lines)


def main() -> int:
    """Prints a table for each stage."""
    try:
        folder = build()
        for name in PROFILED:
            stage = STAGES[name]
            print(table(name, profile(folder / stage.program, *stage.arguments)), end="\n\n")
    except NotCountedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
