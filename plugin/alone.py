"""One command that works with a volume at a time, and steps that nobody interrupts."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydataplane.errors import VolumeError

LOCKS = "move.lock"
"""A file beside the target's socket, of which each volume that is worked with has bytes locked."""


@contextmanager
def alone(folder: Path, *work: tuple[str, str]) -> Iterator[None]:
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


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keeps ^C, SIGTERM and SIGHUP from what is to be done whole: they are lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
