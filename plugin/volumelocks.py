"""Locks of volumes: one command of this host at a time works with each."""

from __future__ import annotations

import errno
import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydataplane.errors import VolumeError

LOCKS = "move.lock"
"""A file beside the target's socket, of which each volume that is worked with has bytes locked."""


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
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                raise VolumeError(f"{what} by another command: wait") from error
        yield
