"""Commits' subjects have up to 72 characters: `python -m tests.subjects`, as `make lint` does.

pre-commit refuses a longer one where it is installed (.pre-commit-config.yaml).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 72
#: Of the commits before, some are longer, and stay.
SINCE = "2026-11-28T00:00:00Z"


def too_long(root: Path = ROOT, since: str = SINCE) -> list[str]:
    """Returns hash and subject of the last commits that have a longer one.

    Those of a clone that are later than `since`; none where `root` is no repository.
    """
    if not (root / ".git").exists():
        return []  # a release's sources
    said = subprocess.run(
        ["git", "-C", root, "log", f"--since={since}", "--format=%h %s"],
        check=True,
        capture_output=True,
        text=True,
        encoding="utf-8",
    ).stdout
    return [line for line in said.splitlines() if len(line.partition(" ")[2]) > MOST]


if __name__ == "__main__":
    if found := too_long():
        sys.exit("\n".join([f"subjects of more than {MOST} characters:", *found]))
