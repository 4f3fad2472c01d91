"""The list of what libiscsi's SCSI suite says of our disks; it is run by tests/guest."""

from __future__ import annotations

from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # comes with lightkube

from tests.guest import test_conformance
from tests.guest.conformance import BY_DAY, FILE, LISTED, PASSES, Kind, Listed
from tests.guest.test_conformance import TARGETS

TESTS = 215
#: Of them, how many pass on one disk at least.
PASSING = 173


def listed() -> dict[str, Any]:
    """Returns what the file has."""
    found: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return found


def test_as_many_tests_pass_on_a_disk_as_is_known() -> None:
    assert len(LISTED.every) == len(set(LISTED.every)) == TESTS
    assert len(LISTED.passing()) == PASSING
    assert len(LISTED.nowhere()) == TESTS - PASSING
    assert LISTED.passing().isdisjoint(LISTED.nowhere())


def test_what_another_disk_is_said_to_have_gets_further_there() -> None:
    for reason in LISTED.reasons:
        if reason.kind is Kind.ELSEWHERE:
            for test in reason.tests:
                reasons = {LISTED.reason(disk, test) for disk in LISTED.tests}
                kinds = {each.kind if each else None for each in reasons}
                assert kinds != {Kind.ELSEWHERE}, test


def test_each_disk_of_the_list_is_in_the_guest() -> None:
    assert set(TARGETS) == set(LISTED.tests)
    assert set(BY_DAY) < set(TARGETS)


@pytest.mark.parametrize(
    ("test", "said", "outcome"),
    [
        ("Read6.Simple", "passed", PASSES),
        ("Read6.Simple", "    [SKIPPED] New words\npassed", "skipped: New words"),
        (
            "Reserve6.Logout",
            "  [SKIPPED] This RESERVE6 test is only supported for iSCSI backends\npassed",
            "skipped: it needs an initiator of iSCSI, or two",
        ),
        # A reason is of its own tests alone.
        (
            "Read6.Simple",
            "  [SKIPPED] only supported for iSCSI backends\npassed",
            "skipped: only supported for iSCSI backends",
        ),
        (
            "WriteAtomic16.Simple",
            " [FAILED] WRITEATOMIC16 command failed with INVALID_FIELD_IN_CDB\nFAILED\n  1. x",
            "fails: it writes up to 256 blocks, whatever page B0h says",
        ),
        # A mistake of the suite hides no other failure of the same test.
        (
            "WriteAtomic16.Simple",
            "[FAILED] WRITEATOMIC16 command failed INVALID_FIELD_IN_CDB\n[FAILED] Other\nFAILED",
            "fails: [FAILED] WRITEATOMIC16 command failed INVALID_FIELD_IN_CDB\n[FAILED] Other\n"
            "FAILED",
        ),
        # Nor does a part that is skipped.
        (
            "Reserve6.Logout",
            "  [SKIPPED] only supported for iSCSI backends\n[FAILED] Other\nFAILED",
            "fails: [SKIPPED] only supported for iSCSI backends\n[FAILED] Other\nFAILED",
        ),
        ("ReadOnly.ReadOnlySBC", "\nFAILED\n 1. file.c:1 - CU", "fails: FAILED\n 1. file.c:1 - CU"),
        ("Read6.Simple", "", "fails: "),
    ],
)
def test_an_outcome_is_what_the_suite_says(test: str, said: str, outcome: str) -> None:
    assert LISTED.outcome(test, said) == outcome


def test_a_list_that_contradicts_itself_is_refused() -> None:
    unknown = listed()
    unknown["skipped"][0]["tests"] = {"Reserve6": "Nothing"}
    with pytest.raises(ValueError, match=r"no disk of it runs \['Reserve6.Nothing'\]"):
        Listed(unknown)
    strange = listed()
    strange["skipped"][0]["of"] = ["fast"]
    with pytest.raises(ValueError, match=r"nobody knows \['fast'\]"):
        Listed(strange)
    twice = listed()
    twice["mistakes"].append(twice["mistakes"][0])
    with pytest.raises(ValueError, match=r"CompareAndWrite\.Simple of malloc, 512: \["):
        Listed(twice).expected("malloc, 512")
    reasonless = listed()
    (crypto,) = [each for each in reasonless["skipped"] if "CRYPTO" in each["says"]]
    reasonless["skipped"].remove(crypto)
    reasonless["elsewhere"].append(crypto)
    with pytest.raises(ValueError, match=r"Sanitize\.CryptoErase passes nowhere: \[\]"):
        Listed(reasonless).nowhere()


def test_by_day_run_those_of_which_the_page_says_so() -> None:
    run = test_conformance.test_a_disk_conforms_as_listed
    marks = {mark.name: mark for mark in getattr(run, "pytestmark")}  # noqa: B009
    assert "nightly" not in marks
    by_day = {each for each in marks["parametrize"].args[1] if isinstance(each, str)}
    assert by_day == set(BY_DAY)
