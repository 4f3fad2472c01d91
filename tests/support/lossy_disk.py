"""A disk that takes writes and loses them: one flush reports it, as the kernel does."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.initiator import Initiator

MIB = 1 << 20
FLUSH = bytes([0x35, *bytes(9)])
"""SYNCHRONIZE CACHE (10), SBC-4 5.29."""
HARDWARE_ERROR = 4
ROOM_MIB = 24
DISK_MIB = 64


def run(*command: str | Path, check: bool = True) -> str:
    """Runs a program and returns what it says."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=check
    )
    return done.stdout


@contextmanager
def small_file_system(path: Path) -> Iterator[Path]:
    """A file system in memory with room for 24 MiB at `path`, which is made; needs root."""
    path.mkdir()
    run("mount", "-t", "tmpfs", "-o", f"size={ROOM_MIB}m", "tmpfs", path)
    try:
        yield path
    finally:
        # The kernel may still be busy with a loop device on it.
        run("umount", "--lazy", path)


def fill(directory: Path) -> Path:
    """Takes all the room of a file system; returns the file that has it."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        size = MIB
        while size >= 4096:
            try:
                if file.write(bytes(size)) < size:
                    size //= 2
            except OSError:
                size //= 2
    return filler


@dataclass(frozen=True)
class LossyDisk:
    """A block device of 64 MiB on a sparse file, used through the page cache."""

    device: str
    file: Path

    @property
    def filler(self) -> Path:
        """The file that takes the room."""
        return self.file.parent / "filler"

    def lose(self) -> None:
        """Has what is written where nothing was before be lost from now on."""
        fill(self.file.parent)

    def mend(self) -> None:
        """Has it keep again what is written."""
        self.filler.unlink()


@contextmanager
def lossy_disk(directory: Path) -> Iterator[LossyDisk]:
    """Makes one on a small file system; needs root.

    Writes succeed; what finds no room is reported by one fdatasync.
    """
    file = directory / "disk"
    with file.open("xb") as sparse:
        sparse.truncate(DISK_MIB * MIB)
    # Blocks of 4 KiB cannot be written directly by a bdev with blocks of 512 bytes.
    loop = run("losetup", "--find", "--show", "--sector-size", "4096", file).strip()
    try:
        yield LossyDisk(loop, file)
    finally:
        run("losetup", "-d", loop)


def fails_to_flush(guest: Initiator) -> bool:
    """Flushes; whether the guest is told of an error that it does not try again."""
    answer = guest.cdb(FLUSH)
    assert answer["response"] == 0
    if answer["status"] == 0:
        return False
    assert answer["sense"][2] & 15 == HARDWARE_ERROR, answer
    return True
