"""Signals that a command does not get while it does what is to be done whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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


@contextmanager
def deferred() -> Iterator[None]:
    """Keeps ^C, SIGTERM and SIGHUP from what is to be done whole, and short: they come after it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [
        (number, signal.signal(number, lambda number, _: came.append(number))) for number in numbers
    ]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
