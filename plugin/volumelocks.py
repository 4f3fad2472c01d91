"""Locks of volumes: one command of this host at a time works with each.

They are of the open file (F_OFD_SETLK of fcntl(2)): one within another of the same process ends
without the outer one, as a process's own would not.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydataplane.errors import VolumeError

LOCKS = "move.lock"
"""A file beside the target's socket, of which each volume that is worked with has bytes locked."""

_FLOCK = struct.Struct("@hhqqi0q")
"""struct flock: type, whence, start, length, process."""


@contextmanager
def locked(folder: Path, *work: tuple[str, str]) -> Iterator[None]:
    """Keeps other commands of this host from `work`: of what (any text), and what is done with it.

    One that is killed keeps them no more.

    Raises:
        VolumeError: another one does.
        OSError: the file cannot be locked.
    """
    with (folder / LOCKS).open("ab") as file:
        for of, what in work:
            byte = int.from_bytes(hashlib.sha256(of.encode()).digest()[:8], "big") >> 2
            try:
                fcntl.fcntl(
                    file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
                )
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                raise VolumeError(f"{what} by another command: wait") from error
        yield
