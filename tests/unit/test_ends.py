"""The line at the end of a run on which folder's tests ended last."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.ends import Ends


def run(*parts: tuple[float, str]) -> list[str]:
    """Returns what is told of parts of tests that end then, of a run that begins at 100."""
    times = iter([100.0, *(at for at, _ in parts)])
    ends = Ends(lambda: next(times))
    lines: list[str] = []
    for _, nodeid in parts:
        report: Any = SimpleNamespace(nodeid=nodeid)
        ends.pytest_runtest_logreport(report)
    ends.pytest_terminal_summary(SimpleNamespace(line=lines.append))
    return lines


def test_the_last_end_of_each_folder_is_told_in_their_order() -> None:
    parts = [
        (101.0, "tests/target/test_a.py::test_b[x/y]"),
        (160.0, "tests/kubernetes/test_c.py::test_d"),
        (170.4, "tests/target/test_a.py::test_e"),
    ]
    told = "the last tests ended after: tests/kubernetes 60 s, tests/target 70 s"
    assert run(*parts) == [told]


@pytest.mark.parametrize("parts", [(), ((101.0, "tests/unit/test_a.py::test_b"),)])
def test_of_one_folder_nothing_is_told(parts: tuple[tuple[float, str], ...]) -> None:
    assert run(*parts) == []
