"""What became of a step, and for how long that counts: until what it tests has changed.

That is told by git: by the hashes of the trees that the step names, and by its command. So a commit
that changes the documentation alone repeats nothing, and whatever is not committed counts for no
later run.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.nightly.steps import Step
from tests.support.cache import ROOT


@dataclass(frozen=True)
class Outcome:
    """What became of a step."""

    step: str
    #: passed, failed or not run
    verdict: str
    took_s: float
    #: The log, or why it did not run.
    remark: str
    #: Of what was tested; empty where that was changed and not committed.
    key: str
    #: The commit that was checked out.
    commit: str
    #: When it ended, in seconds since 1970.
    at: float


def _git(checkout: Path, *words: str) -> str | None:
    asked = subprocess.run(
        ["git", "-C", str(checkout), *words], capture_output=True, text=True, check=False
    )
    return asked.stdout if asked.returncode == 0 else None


def key(step: Step, checkout: Path = ROOT) -> str:
    """Returns a name of what a step tests, the same for the same content.

    It is empty where the checkout differs from its commit in that, has not all of the step's paths,
    or is none of git's.
    """
    changed = _git(checkout, "status", "--porcelain", "--untracked-files=all", "--", *step.paths)
    trees = _git(checkout, "ls-tree", "HEAD", "--", *step.paths)
    if changed != "" or trees is None or len(trees.splitlines()) != len(set(step.paths)):
        return ""
    tested = json.dumps([sorted(trees.splitlines()), step.command, step.environment])
    return hashlib.sha256(tested.encode()).hexdigest()[:16]


def commit(checkout: Path = ROOT) -> str:
    """Returns the short name of the commit that is checked out."""
    return (_git(checkout, "rev-parse", "--short=12", "HEAD") or "unknown").strip()


def known(results: Path, keys: dict[str, str]) -> dict[str, Outcome]:
    """Returns what became of steps, by name, of those whose key is what it was."""
    found = {}
    for name, now in keys.items():
        try:
            outcome = Outcome(**json.loads((results / f"{name}.json").read_text()))
        except (OSError, ValueError, TypeError):  # none yet, of another version, or cut off
            continue
        if now and outcome.key == now:
            found[name] = outcome
    return found


def keep(results: Path, outcome: Outcome) -> None:
    """Writes down what became of a step."""
    results.mkdir(parents=True, exist_ok=True)
    partial = results / f"{outcome.step}.partial"
    partial.write_text(json.dumps(asdict(outcome), indent=1))
    partial.rename(results / f"{outcome.step}.json")


def all_passed(outcomes: Iterable[Outcome]) -> bool:
    """Whether nothing failed, and nothing could not be run."""
    return all(outcome.verdict == "passed" for outcome in outcomes)
