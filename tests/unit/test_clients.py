"""The table of the programs of others is of the versions that are there, and of tests that are."""

from __future__ import annotations

from tests.support.cache import ROOT
from tests.support.clients import CLIENTS, line, there


def test_the_versions_are_those_that_are_there() -> None:
    found = there()
    assert "qemu-system-x86" in found  # `make setup` has it
    for each in CLIENTS:
        if each.package in found:
            version = found[each.package]
            if each.updated:
                assert int(version.split(".")[0]) >= int(each.version), each.name
            else:
                assert version == each.version, each.name


def test_who_tries_each_is_there() -> None:
    for each in CLIENTS:
        assert each.tests
        for name in each.tests:
            assert (ROOT / "tests" / name).exists(), name


def test_a_run_of_tests_says_them() -> None:
    assert f"Nova {there()['nova']}; " in line()
