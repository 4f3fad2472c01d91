"""How long the tests with a Ceph take: a line at the end of a run of tests."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from tests.support import ceph

PROPERTY = "ceph"
"""Of a report: a cluster was up meanwhile. Reports of pytest-xdist's workers have it, too."""


class CephTime:
    """A plugin of pytest: adds up the set-ups, calls and ends of tests in which a cluster was up.

    The start and end of a cluster are in them. A cluster that several tests share counts as long as
    it is there, whether or not each of them uses it.
    """

    def __init__(self, config: pytest.Config) -> None:
        """Nothing was run yet."""
        self._config = config
        self._tests: set[str] = set()
        self._s = self._all_s = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self,
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Notes in the report on a part of a test whether a cluster was up."""
        report = yield
        if ceph.was_up():
            report.user_properties.append((PROPERTY, True))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes the time of a part of a test."""
        self._all_s += report.duration
        if any(name == PROPERTY for name, _ in report.user_properties):
            self._tests.add(report.nodeid)
            self._s += report.duration

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Says what the tests with a cluster took, if there were any."""
        if not self._tests:
            return
        at_a_time = getattr(self._config.option, "numprocesses", None) or 1
        terminalreporter.line(
            f"tests with a Ceph: {len(self._tests)}, {self._s:.0f} s of {self._all_s:.0f} s"
            f" ({100 * self._s / self._all_s:.0f} %); {at_a_time} at a time:"
            f" {self._s / at_a_time:.0f} s"
        )
