"""Block devices of this host over the files that the target exports: for copies of Cinder's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Run = Callable[..., tuple[str, str]]
"""Runs a program as root and returns what it printed: Cinder's `_execute`."""


class Loops:
    """Loop devices, by losetup(8)."""

    def __init__(self, run: Run) -> None:
        """Runs losetup by `run`."""
        self._run = run

    def attach(self, file: Path, *, read_only: bool) -> Path:
        """Returns the device over a file, which is made if need be."""
        present = self._losetup("--noheadings", "--output", "NAME", "--associated", str(file))
        if present:
            return Path(present[0])
        words = ["--read-only"] if read_only else []
        (made,) = self._losetup("--direct-io=on", "--find", "--show", *words, str(file))
        return Path(made)

    def detach(self, file: Path) -> None:
        """Takes all devices away that are, or were, over a file of this path."""
        for line in self._losetup("--list", "--noheadings", "--output", "NAME,BACK-FILE"):
            device, _, over = line.partition(" ")
            if over.strip().removesuffix(" (deleted)") == str(file):
                self._losetup("--detach", device)

    def _losetup(self, *words: str) -> list[str]:
        return self._run("losetup", *words, run_as_root=True)[0].splitlines()
