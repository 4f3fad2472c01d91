"""What libiscsi's SCSI suite is expected to say of each disk: the list of conformance.yaml."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # comes with lightkube

FILE = Path(__file__).with_name("conformance.yaml")
PASSES = "passes"
BY_DAY = ("thin volume, 512, two paths",)
"""Disks that each run of the tests has; the others are of the night."""
FIRST = ("ReceiveCopyResults", "MultipathIO")
"""Suites that are run before the others, as they expect a disk which none of these has used: no
status of a copy, no unit attention on another path, and zeros where nothing was written."""


class Kind(enum.Enum):
    """Why a test does not pass; the name of its part of the list."""

    ELSEWHERE = "elsewhere"
    """Skipped: another disk has what it is about."""
    SKIPPED = "skipped"
    """Skipped: no disk has it."""
    MISTAKES = "mistakes"
    """Failed by a mistake of the suite."""
    DIFFERS = "differs"
    """Failed, as we decided otherwise."""

    @property
    def skips(self) -> bool:
        """Whether the suite itself skips it."""
        return self in {Kind.ELSEWHERE, Kind.SKIPPED}


@dataclass(frozen=True)
class Reason:
    """Why some tests do not pass on some disks."""

    kind: Kind
    says: re.Pattern[str]
    """Of what the suite says."""
    why: str
    tests: frozenset[str]
    disks: frozenset[str]

    @property
    def outcome(self) -> str:
        """What is compared, and shown to a person."""
        return f"{'skipped' if self.kind.skips else 'fails'}: {self.why}"


class Listed:
    """The list."""

    def __init__(self, listed: Mapping[str, Any]) -> None:
        """Takes what the file has.

        Raises:
            ValueError: it contradicts itself; the text says where.
        """
        self.release: str = listed["release"]
        every = list(_names(listed["tests"]))
        protected = list(_names(listed["protected"]))
        self.tests: dict[str, list[str]] = {
            disk: protected if "protected" in traits else every
            for disk, traits in listed["disks"].items()
        }
        """Of each disk, what is run on it."""
        self.every = every
        self.reasons = [
            _reason(kind, entry, listed["disks"]) for kind in Kind for entry in listed[kind.value]
        ]
        for reason in self.reasons:
            run = {test for disk in reason.disks for test in self.tests[disk]}
            if strange := reason.tests - run:
                raise ValueError(f"{reason.why}: no disk of it runs {sorted(strange)}")

    def reason(self, disk: str, test: str) -> Reason | None:
        """Returns why a test does not pass; None if it is expected to.

        Raises:
            ValueError: the list has two reasons.
        """
        found = [each for each in self.reasons if test in each.tests and disk in each.disks]
        if len(found) > 1:
            raise ValueError(f"{test} of {disk}: {[each.why for each in found]}")
        return found[0] if found else None

    def expected(self, disk: str) -> dict[str, str]:
        """Returns the outcome of each test of a disk."""
        reasons = {test: self.reason(disk, test) for test in self.tests[disk]}
        return {test: reason.outcome if reason else PASSES for test, reason in reasons.items()}

    def outcome(self, test: str, said: str) -> str:
        """Returns the outcome by what the suite said of a test; unknown words are shown as such.

        Its last word is `passed` also where it skipped the test.
        """
        known = [each for each in self.reasons if test in each.tests]
        passed = re.search(r"\bpassed\s*$", said) is not None
        skipped = re.findall(r"\[SKIPPED\] *(.*)", said)
        if skipped and passed:
            fits = (each for each in known if each.kind.skips and each.says.search(said))
            unknown = f"skipped: {skipped[0]}"
        elif passed:
            return PASSES
        else:
            failed = set(re.findall(r"\[FAILED\] *(.*)", said))
            fits = (
                each
                for each in known
                if failed and not each.kind.skips and all(map(each.says.fullmatch, failed))
            )
            unknown = f"fails: {said.strip()}"
        reason = next(fits, None)
        return reason.outcome if reason else unknown

    def passing(self) -> set[str]:
        """Returns the tests that pass on one disk at least."""
        return {
            test
            for disk in self.tests
            for test, outcome in self.expected(disk).items()
            if outcome == PASSES
        }

    def nowhere(self) -> dict[str, Reason]:
        """Returns why each other test passes on no disk.

        Raises:
            ValueError: the list has not one reason for it, beside those of single disks.
        """
        found: dict[str, Reason] = {}
        for test in self.every:
            if test in self.passing():
                continue
            reasons = [
                each
                for each in self.reasons
                if test in each.tests and each.kind is not Kind.ELSEWHERE
            ]
            if len({each.outcome for each in reasons}) != 1:
                raise ValueError(f"{test} passes nowhere: {[each.why for each in reasons]}")
            found[test] = reasons[0]
        return found


def _names(suites: Mapping[str, str]) -> Iterator[str]:
    for suite, tests in suites.items():
        for test in tests.split():
            yield f"{suite}.{test}"


def _reason(kind: Kind, entry: Mapping[str, Any], disks: Mapping[str, list[str]]) -> Reason:
    known = {trait for traits in disks.values() for trait in traits}
    of, but = set(entry.get("of", known)), set(entry.get("but", ()))
    if strange := (of | but) - known or set(entry) - {"says", "why", "of", "but", "tests"}:
        raise ValueError(f"{entry['why']}: nobody knows {sorted(strange)}")
    chosen = frozenset(
        disk
        for disk, traits in disks.items()
        if ("of" not in entry or of & set(traits)) and not but & set(traits)
    )
    tests = frozenset(_names(entry["tests"]))
    return Reason(kind, re.compile(entry["says"]), entry["why"], tests, chosen)


LISTED = Listed(yaml.safe_load(FILE.read_text()))
