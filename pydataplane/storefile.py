"""The file or block device that an lvstore lies on: its length, and how it grows."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydataplane.errors import VolumeError


def is_empty(path: Path) -> bool:
    """Whether it is what is left where making an lvstore was cut off at the very beginning."""
    return path.is_file() and path.stat().st_size == 0


def length(path: Path) -> int:
    """Returns the bytes of a file or block device."""
    with path.open("rb") as file:
        return os.lseek(file.fileno(), 0, os.SEEK_END)


@contextmanager
def grown(lvstore: str, path: Path, size: int | None, most: int | None) -> Iterator[int]:
    """Makes the file of `lvstore` `size` bytes long, and yields its length or the device's.

    Who grows the same file at the same time waits, so that none is ever made shorter. `most` is
    what the lvstore can grow to, bytes; None: not known.

    Raises:
        VolumeError: a smaller size, more than `most`, or more than a block device has.
    """
    regular = stat.S_ISREG(path.stat().st_mode)
    with path.open("r+b" if regular else "rb") as file:
        if regular:
            # Not flock, which the target holds.
            fcntl.lockf(file, fcntl.LOCK_EX)
        present = os.lseek(file.fileno(), 0, os.SEEK_END)
        wanted = present if size is None else size
        if wanted < present:
            raise VolumeError(
                f"lvstore {lvstore} cannot be made smaller: {path} has {present} bytes, "
                f"{wanted} are fewer; give a larger size"
            )
        if most is not None and wanted > most:
            raise VolumeError(
                f"lvstore {lvstore} cannot grow to {wanted} bytes: the metadata that it was "
                f"made with is good for {most} at most; make another lvstore"
            )
        if wanted > present and not regular:
            raise VolumeError(
                f"lvstore {lvstore} lies on the device {path} of {present} bytes, not {wanted}: "
                "grow the device itself first, then leave the size out"
            )
        if wanted > present:
            os.truncate(path, wanted)
            os.fsync(file.fileno())
        yield wanted
