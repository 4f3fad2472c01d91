"""A disk that fails reads and writes with EIO, from some place on, until it is mended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
DISK_MIB = 64
GOOD_MIB = 16
"""What does not fail: an lvstore's metadata is there."""


@dataclass(frozen=True)
class FailingDisk:
    """A loop device on another one, whose file loses its end while the disk is to fail.

    It begins a sector later than the other, so that a write, too, is of parts of the other's pages
    and has to read these first; and the kernel ends a read beyond a loop device's file with EIO.
    """

    device: str
    below: str
    file: Path

    @property
    def _kept(self) -> Path:
        return self.file.with_name("kept")

    def fail(self) -> None:
        """Has all beyond the first 16 MiB fail from now on; nothing is written meanwhile."""
        self._flush()
        self._kept.write_bytes(self.file.read_bytes())
        os.truncate(self.file, GOOD_MIB * MIB)
        self._flush()

    def mend(self) -> None:
        """Has it work again, with what it had before it failed."""
        with self._kept.open("rb") as kept, self.file.open("r+b") as file:
            kept.seek(GOOD_MIB * MIB)
            file.seek(GOOD_MIB * MIB)
            file.write(kept.read())

    def _flush(self) -> None:
        """Writes what the page cache has of both, and forgets it."""
        for device in (self.device, self.below):
            subprocess.run(["blockdev", "--flushbufs", device], check=True)


@contextmanager
def failing_disk(directory: Path) -> Iterator[FailingDisk]:
    """Makes one of 64 MiB, which everybody may open, in `directory`; needs root."""
    file = directory / "disk"
    with file.open("xb") as sparse:
        sparse.truncate(DISK_MIB * MIB)
    made: list[str] = []
    try:
        for words in ([file], ["--offset", "512"]):
            command = ["losetup", "--find", "--show", *words, *made]
            made.append(subprocess.check_output(command, text=True).strip())
        below, device = made
        Path(device).chmod(0o666)
        yield FailingDisk(device, below, file)
    finally:
        for each in reversed(made):
            Path(each).chmod(0o660)
            subprocess.run(["losetup", "-d", each], check=True)
