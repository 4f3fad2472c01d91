"""Files whose open(2) waits, as on a file system that is slow."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from collections.abc import Callable
from pathlib import Path

FAN_CLASS_CONTENT = 0x04
FAN_CLOEXEC = 0x01
FAN_MARK_ADD = 0x01
FAN_OPEN_PERM = 0x0001_0000
FAN_ALLOW = 0x01
AT_FDCWD = -100
EVENT = struct.Struct("=IBBHQii")
"""struct fanotify_event_metadata: length, version, reserved, own length, mask, file, process."""
ANSWER = struct.Struct("=iI")


class HeldOpens:
    """Lets nobody open one of some files before a test lets him; a context manager.

    Needs root (fanotify(7)). A test's own opens wait for nobody.
    """

    def __init__(self, paths: list[Path], before: Callable[[int], None]) -> None:
        """Calls `before` with a process that opens one of `paths`; it waits until that returns."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._group = libc.fanotify_init(FAN_CLASS_CONTENT | FAN_CLOEXEC, os.O_RDONLY)
        if self._group < 0:
            raise OSError(ctypes.get_errno(), "fanotify_init")
        for path in paths:
            mask = ctypes.c_uint64(FAN_OPEN_PERM)
            if libc.fanotify_mark(self._group, FAN_MARK_ADD, mask, AT_FDCWD, os.fsencode(path)):
                os.close(self._group)
                raise OSError(ctypes.get_errno(), f"fanotify_mark of {path}")
        self._before = before
        self._end = os.eventfd(0)
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        while True:
            ready, _, _ = select.select([self._group, self._end], [], [])
            if self._group not in ready:
                return
            events = os.read(self._group, 4096)
            while events:
                length, _, _, _, _, file, process = EVENT.unpack_from(events)
                events = events[length:]
                try:
                    if process != os.getpid():
                        self._before(process)
                finally:
                    os.write(self._group, ANSWER.pack(file, FAN_ALLOW))
                    os.close(file)

    def __enter__(self) -> HeldOpens:
        """Returns it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Holds nobody any more."""
        os.eventfd_write(self._end, 1)
        self._thread.join()
        os.close(self._group)
        os.close(self._end)
