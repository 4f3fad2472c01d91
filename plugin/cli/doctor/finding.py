"""What a look at one thing gives, and what several of them ask for."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing looked at: `state` is ok, warning or failed; `advice` says what to do."""

    what: str
    state: str
    found: str
    advice: str = ""


def run(*words: str, timeout_s: float = 10.0) -> str | None:
    """Returns what a command printed, or None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=timeout_s, check=True, input=""
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def version_of(text: str | None) -> tuple[int, ...] | None:
    """Returns the version in what a program printed; 0 for a third number that is not there."""
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text or "")
    return tuple(int(part) for part in found.groups(default="0")) if found else None


def dotted(version: tuple[int, ...]) -> str:
    """Returns a version as people write it."""
    return ".".join(str(part) for part in version)
