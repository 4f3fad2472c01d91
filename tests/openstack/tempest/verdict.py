"""What a run of Tempest has shown: reads what came of its tests, and the list of skips."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # comes with lightkube

HERE = Path(__file__).parent
SKIPS = HERE / "skips.yaml"
COUNTS = HERE / "counts.yaml"
_OF_A_CLASS = re.compile(r"(?:setUpClass|tearDownClass) \((.+)\)")


@dataclass(frozen=True)
class Skip:
    """Why some tests are skipped."""

    name: str
    tests: re.Pattern[str] | None
    """In the IDs of those that are not begun."""
    says: re.Pattern[str] | None
    """In what Tempest says of those that it decides not to run."""
    why: str


def skips(file: Path = SKIPS) -> list[Skip]:
    """Reads the list."""
    listed = yaml.safe_load(file.read_text())
    return [
        Skip(name, _pattern(each, "tests"), _pattern(each, "says"), each["why"])
        for name, each in listed.items()
    ]


def _pattern(entry: Mapping[str, str], word: str) -> re.Pattern[str] | None:
    return re.compile(entry[word]) if word in entry else None


def not_begun(listed: Iterable[Skip]) -> str:
    """Returns the pattern of what is not to be begun."""
    return "|".join(f"({skip.tests.pattern})" for skip in listed if skip.tests)


@dataclass
class Verdict:
    """The counts of a run."""

    passed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """How many tests, by the name of their reason."""
    wrong: list[str] = field(default_factory=list)
    """What failed or was not run, and skips without a reason, each with what was said."""

    def counts(self) -> dict[str, Any]:
        """Returns them as they are kept."""
        return {"passed": self.passed, "skipped": dict(self.skipped)}


def judge(
    tests: Iterable[str], results: Mapping[str, tuple[str, str]], listed: Iterable[Skip]
) -> Verdict:
    """Returns what came of tests, by their IDs.

    `results` has status and words of each, and of the set-up of classes whose tests have not begun.
    """
    listed = list(listed)
    verdict = Verdict()
    classes = {
        match[1]: result
        for name, result in results.items()
        if (match := _OF_A_CLASS.fullmatch(name))
    }
    for name in tests:
        status, said = results.get(name, ("", ""))
        if status in ("", "exists"):  # known, but not begun
            status, said = classes.get(name.partition("[")[0].rpartition(".")[0], ("not run", ""))
        out = next((skip.name for skip in listed if skip.tests and skip.tests.search(name)), None)
        reason = next((skip.name for skip in listed if skip.says and skip.says.search(said)), None)
        if status == "not run" and out:
            verdict.skipped[out] += 1
        elif status == "success":
            verdict.passed += 1
        elif status == "skip" and reason:
            verdict.skipped[reason] += 1
        else:
            verdict.wrong.append(f"{name}: {status}: {said}")
    known = ("success", "skip")
    verdict.wrong += [
        f"{name}: {status}: {said}"
        for name, (status, said) in classes.items()
        if status not in known
    ]
    needless = [skip.name for skip in listed if skip.name not in verdict.skipped]
    verdict.wrong += [f"nothing is skipped for the reason {name}" for name in needless]
    return verdict
