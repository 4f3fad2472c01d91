"""`python -m tests.sizes [COMMIT...]`: files and lines of each part, and its largest file.

Of what is committed, HEAD unless commits are named; several stand below each other.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

PARTS = {
    "crates": r"pydataplane/crates/[^/]+/src/.+\.rs",
    "crates' tests": r"pydataplane/crates/[^/]+/tests/.+\.rs",
    "pydataplane": r"pydataplane/(?!crates/).+\.py",
    "plugin": r"plugin/.+\.py",
    "csi": r"csi/.+\.py",
    "tests": r"tests/.+\.py",
}
"""What a part's paths look like."""

GENERATED = re.compile(r".+_pb2(_grpc)?\.py")
"""Not counted: nobody reads it."""


class NoSuchCommitError(Exception):
    """This checkout does not have the commit: it is shallow, or no checkout at all."""


@dataclass(frozen=True)
class Size:
    """How much a part is."""

    files: int
    lines: int
    largest: int
    """Lines of its longest file."""
    path: str
    """And that file."""


def lines_of(commit: str, root: Path = ROOT) -> dict[str, int]:
    """Returns the lines of each Rust and Python file of a commit.

    Raises:
        NoSuchCommitError: git does not have it here.
    """
    # An empty pattern is in every line; -I leaves out what is no text.
    command = ["git", "-C", str(root), "grep", "-I", "-c", "-e", "", commit]
    done = subprocess.run(
        [*command, "--", "*.rs", "*.py"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise NoSuchCommitError(done.stderr.strip() or f"{commit} has no such file")
    found = (line.removeprefix(f"{commit}:").rpartition(":") for line in done.stdout.splitlines())
    return {path: int(count) for path, _, count in found}


def sizes(commit: str, root: Path = ROOT) -> dict[str, Size]:
    """Returns the size of each part that the commit has.

    Raises:
        NoSuchCommitError: git does not have it here.
    """
    lines = lines_of(commit, root)
    made = {}
    for part, pattern in PARTS.items():
        own = {
            path: count
            for path, count in lines.items()
            if re.fullmatch(pattern, path) and not GENERATED.fullmatch(path)
        }
        if own:
            path = max(sorted(own), key=own.__getitem__)
            made[part] = Size(len(own), sum(own.values()), own[path], path)
    return made


def table(commits: list[str], root: Path = ROOT) -> Iterator[str]:
    """Yields the lines of a Markdown table of these commits.

    Raises:
        NoSuchCommitError: git does not have one of them here.
    """
    yield "| commit | part | files | lines | largest file |"
    yield "| --- | --- | --- | --- | --- |"
    for commit in commits:
        for part, size in sizes(commit, root).items():
            largest = f"{size.largest}: `{size.path}`"
            yield f"| {commit} | {part} | {size.files} | {size.lines:,} | {largest} |"


def main() -> int:
    """Prints the table; 1 if a commit is not there."""
    try:
        print("\n".join(table(sys.argv[1:] or ["HEAD"])))
    except NoSuchCommitError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
