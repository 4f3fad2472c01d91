"""A plugin of pytest, `-p tests.support.reasons`: keeps why each test of a run failed.

In pytest's cache, for tests/again.py: a list of messages for each test, that of the exception with
its class's name in front, and "" of a failure that is no exception of a test's, as of a worker that
died.
"""

from __future__ import annotations

import pytest

#: In the cache's folder of values.
REASONS = "again/reasons"


class _Reasons:
    def __init__(self) -> None:
        self.messages: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes one part of a test: its fixtures' set-up, itself, or their end."""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.messages.setdefault(report.nodeid, []).append(getattr(crash, "message", ""))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Takes a file whose tests could not be read."""
        if report.failed:
            self.messages.setdefault(report.nodeid, []).append("")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Keeps them."""
        if session.config.cache is not None:
            session.config.cache.set(REASONS, self.messages)


def pytest_configure(config: pytest.Config) -> None:
    """Only who has all reports keeps them: with pytest-xdist, none of its workers."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Reasons(), "reasons")
