"""Waiting in tests for what happens elsewhere, in one way."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

DEADLINE_S = 60.0
"""Longest wait where a test says nothing else: long enough for a busy machine."""
START_DEADLINE_S = 90.0
"""Longest wait for a process that was just started."""
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
    *,
    process: subprocess.Popen[Any] | None = None,
    not_yet: type[Exception] = OSError,
) -> T:
    """Calls `ready` until what it returns is true, and returns that; it may raise `not_yet`.

    Between two calls are `every_s` seconds (default: as EVERY_S and PAUSES say).

    Raises:
        AssertionError: `deadline_s` seconds have passed, or `process` has ended, in vain; says what
            was waited for, which is `what` or, if that can be called, what it returns then.
    """
    end = time.monotonic() + deadline_s
    while True:
        begun = time.monotonic()
        status = None if process is None else process.poll()
        failure: Exception | None = None
        try:
            if result := ready():
                return result
        except not_yet as error:
            failure = error
        now = time.monotonic()
        if now > end or status is not None:
            why = f"not within {deadline_s:.0f} s"
            if process is not None and status is not None:
                why = f"process {process.pid} ended with status {status} before"
            said = (what() if callable(what) else what) or "what is waited for"
            last = f", but at last: {failure}" if failure else ""
            raise AssertionError(f"{why}: {said}{last}") from failure
        time.sleep(max(EVERY_S, PAUSES * (now - begun)) if every_s is None else every_s)


def serves(
    process: subprocess.Popen[Any], ready: Callable[[], object], what: str, log: Path
) -> None:
    """Waits as `until` until a process that was just started is ready.

    Raises:
        AssertionError: it ended, or START_DEADLINE_S seconds have passed; with the end of its log.
    """
    until(
        ready,
        lambda: f"{what}\n{log.read_text(errors='replace')[-2000:] if log.exists() else ''}",
        START_DEADLINE_S,
        process=process,
    )
