"""When the last test of each folder ended: a line at the end of a run, to see the longest path."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest


class Ends:
    """A plugin of pytest: notes for each folder of tests when its last one ended."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """The run begins; `now` tells the time in seconds."""
        self._now = now
        self._begin = now()
        self._ends: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A part of a test has ended."""
        folder = report.nodeid.split("::")[0].rpartition("/")[0]
        self._ends[folder] = self._now() - self._begin

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Says it of each folder, if there are several."""
        if len(self._ends) > 1:
            told = sorted(self._ends.items(), key=lambda entry: entry[1])
            ends = ", ".join(f"{folder} {seconds:.0f} s" for folder, seconds in told)
            terminalreporter.line(f"the last tests ended after: {ends}")
