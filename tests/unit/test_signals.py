"""Signals while something is done whole."""

from __future__ import annotations

import signal

import pytest

from plugin.signals import deferred, uninterrupted


def test_what_is_deferred_comes_when_all_is_done() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), deferred():
        with deferred():
            signal.raise_signal(signal.SIGINT)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_not_to_be_interrupted_is_not_by_what_is_deferred_within() -> None:
    with uninterrupted():
        with deferred():
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
