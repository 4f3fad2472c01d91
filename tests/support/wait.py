"""Waiting in tests for what happens elsewhere, in one way."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 60.0
"""Longest wait where a test says nothing else: long enough for a busy machine."""
EVERY_S = 0.02
"""Shortest time between two looks, where a test says nothing else."""
PAUSES = 2.0
"""So many times as long as a look took is the time to the next one: kubectl, which takes 0.1 s of a
processor, is not to keep one busy."""


def listens(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> bool:
    """Whether somebody listens on a UNIX socket: there is a moment when only its file is there."""
    with socket.socket(socket.AF_UNIX, kind) as probe:
        return probe.connect_ex(str(path)) == 0


def until(
    ready: Callable[[], T | None],
    what: object = "",
    deadline_s: float = DEADLINE_S,
    every_s: float | None = None,
) -> T:
    """Calls `ready` until what it returns is true, and returns that; an OSError is a not yet.

    Between two calls are `every_s` seconds (default: as EVERY_S and PAUSES say).

    Raises:
        AssertionError: `deadline_s` seconds have passed; says what was waited for, which is `what`
            or, if that can be called, what it returns then.
    """
    end = time.monotonic() + deadline_s
    failure: OSError | None = None
    while True:
        begun = time.monotonic()
        try:
            if result := ready():
                return result
            failure = None
        except OSError as error:
            failure = error
        now = time.monotonic()
        if now > end:
            said = what() if callable(what) else what
            last = f", but at last: {failure}" if failure else ""
            raise AssertionError(
                f"not within {deadline_s:.0f} s: {said or 'what is waited for'}{last}"
            )
        time.sleep(max(EVERY_S, PAUSES * (now - begun)) if every_s is None else every_s)
