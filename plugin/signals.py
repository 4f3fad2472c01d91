"""Signals that a command does not get while it does what is to be done whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keeps ^C, SIGTERM and SIGHUP from what is to be done whole: they are lost."""
    with _handled_by(signal.SIG_IGN):
        yield


@contextmanager
def deferred() -> Iterator[None]:
    """Keeps ^C, SIGTERM and SIGHUP from what is to be done whole, and short: they come after it."""
    came: list[int] = []
    try:
        with _handled_by(lambda number, _: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextmanager
def _handled_by(handler: Callable[[int, object], None] | signal.Handlers) -> Iterator[None]:
    """Has the three signals handled so; of another thread than the main one they are none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in before:
            signal.signal(number, earlier)
