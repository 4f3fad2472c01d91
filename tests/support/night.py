"""Which variants of a test are left to the night.

By day each kind of thing, and each class of failures, is tried once, at its cheapest: where a byte
on the wire shows it, no guest boots for it. What tries the same code through another door, with one
more parameter, or beside what another program does, is for the night.
"""

from __future__ import annotations

from typing import Any

import pytest

by_day = pytest.mark.by_day
"""`@by_day("ID", ...)`: of this test's variants these run by day, by their ids."""


def at_night(*values: Any, id: str | None = None) -> Any:  # noqa: A002 - as pytest.param has it
    """Returns the parameters of a variant that runs where `-m nightly` is said."""
    return pytest.param(*values, id=id, marks=pytest.mark.nightly)


class Variants:
    """Marks as those of the night what `by_day` does not name."""

    @pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Raises pytest.UsageError for a name that no variant of the test has."""
        unknown: dict[tuple[str, str], str] = {}
        found = set()
        for item in items:
            if not (mark := item.get_closest_marker("by_day")):
                continue
            test, _, variant = item.nodeid.partition("[")
            unknown |= {(test, name): item.nodeid for name in mark.args}
            found.add((test, variant.removesuffix("]")))
            if variant.removesuffix("]") not in mark.args:
                item.add_marker(pytest.mark.nightly)
        # Who names a variant on the command line has collected no other.
        whole = {test for test, _ in found if len([1 for each, _ in found if each == test]) > 1}
        for test, name in unknown.keys() - found:
            if test in whole:
                raise pytest.UsageError(f"{test} has no variant {name!r}")
