"""Waiting in tests for what happens elsewhere, in one way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 60.0
"""Longest wait where a test says nothing else: long enough for a busy machine."""


def until(
    ready: Callable[[], T], what: object = "", deadline_s: float = DEADLINE_S, every_s: float = 0.02
) -> T:
    """Calls `ready` every `every_s` seconds until what it returns is true, and returns that.

    Raises:
        AssertionError: `deadline_s` seconds have passed; says what was waited for, which is `what`
            or, if that can be called, what it returns then.
    """
    end = time.monotonic() + deadline_s
    while not (result := ready()):
        if time.monotonic() > end:
            said = what() if callable(what) else what
            raise AssertionError(f"not within {deadline_s:.0f} s: {said or 'what is waited for'}")
        time.sleep(every_s)
    return result
