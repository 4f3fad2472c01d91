"""What a run of the suite has shown: reads Ginkgo's JSON report and the list of skips."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # comes with lightkube

SKIPS = Path(__file__).parent / "skips.yaml"


class VerdictError(Exception):
    """The list of skips, or a report, is not of its form; the text says what is wrong."""


@dataclass(frozen=True)
class Skip:
    """Why some specs are skipped."""

    pattern: re.Pattern[str]
    """Of `not_run` in a spec's whole name, of `skipped` in what the suite says."""
    why: str


@dataclass(frozen=True)
class Skips:
    """The list of skips, as far as it holds for one run on this machine."""

    not_run: tuple[Skip, ...]
    """What is not begun."""
    skipped: tuple[Skip, ...]
    """What the suite decides not to run."""

    @classmethod
    def read(
        cls, run: str, conditions: Mapping[str, Callable[[], bool]], file: Path = SKIPS
    ) -> Skips:
        """Reads the list for a run; an entry with `when` holds where that condition does.

        Raises:
            VerdictError: the file has what nobody knows.
        """
        listed = yaml.safe_load(file.read_text())
        if set(listed) != {"not_run", "skipped"}:
            raise VerdictError(f"{file}: it has {sorted(listed)}, not not_run and skipped")
        found = {
            kind: tuple(_skips(file, listed[kind], word, run, conditions))
            for kind, word in (("not_run", "specs"), ("skipped", "says"))
        }
        return cls(**found)

    def argument(self) -> str:
        """Returns the pattern of specs that Ginkgo is not to begin."""
        return "|".join(f"({skip.pattern.pattern})" for skip in self.not_run)


def _skips(
    file: Path,
    entries: list[dict[str, Any]],
    word: str,
    run: str,
    conditions: Mapping[str, Callable[[], bool]],
) -> Iterator[Skip]:
    for entry in entries:
        when = entry.get("when")
        if not {word, "why"} <= set(entry) <= {word, "why", "runs", "when"}:
            raise VerdictError(f"{file}: an entry has {sorted(entry)}: give {word} and why")
        if when is not None and when not in conditions:
            raise VerdictError(f"{file}: there is no condition {when}, only {sorted(conditions)}")
        if (when is None or conditions[when]()) and run in entry.get("runs", [run]):
            yield Skip(re.compile(entry[word]), entry["why"])


@dataclass
class Verdict:
    """The counts of a run."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    """Name and words of each spec that failed, and what failed around them."""
    skipped: Counter[str] = field(default_factory=Counter)
    """How many, by their reason."""
    unlisted: Counter[str] = field(default_factory=Counter)
    """Specs skipped for what is not on the list, by what the suite said."""

    @property
    def good(self) -> bool:
        """Whether something passed, nothing failed and each skip has its reason."""
        return self.passed > 0 and not self.failed and not self.unlisted


def read(report: Path, focus: str, skips: Skips) -> Verdict:
    """Reads Ginkgo's JSON report of a run, of the specs whose names have `focus` in them.

    Raises:
        VerdictError: there is no whole report.
    """
    try:
        suites = json.loads(report.read_text())
    except (OSError, ValueError) as error:
        raise VerdictError(f"the suite left no report: {error}") from error
    verdict = Verdict()
    for suite in suites:
        for reason in suite.get("SpecialSuiteFailureReasons") or ():
            verdict.failed.append(f"the suite: {reason}")
        for spec in suite.get("SpecReports") or ():
            _count(verdict, spec, re.compile(focus), skips)
        if not suite["SuiteSucceeded"] and not verdict.failed:
            verdict.failed.append("the suite did not succeed, and did not say why")
    return verdict


def _count(verdict: Verdict, spec: Mapping[str, Any], focus: re.Pattern[str], skips: Skips) -> None:
    name = " ".join([*(spec.get("ContainerHierarchyTexts") or ()), spec["LeafNodeText"]])
    state, said = spec["State"], (spec.get("Failure") or {}).get("Message", "")
    if state in ("skipped", "pending"):
        if spec["LeafNodeType"] != "It" or not focus.search(name):
            return
        reason = _reason(skips.skipped, said) if said else _reason(skips.not_run, name)
        if reason:
            verdict.skipped[reason] += 1
        else:
            verdict.unlisted[said or f"not begun: {name}"] += 1
    elif state != "passed":
        verdict.failed.append(f"{name or spec['LeafNodeType']} ({state}): {said}")
    elif spec["LeafNodeType"] == "It":
        verdict.passed += 1


def _reason(skips: tuple[Skip, ...], text: str) -> str | None:
    return next((skip.why for skip in skips if skip.pattern.search(text)), None)
