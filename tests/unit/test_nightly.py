"""A night that was ended goes on where it was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import nightly
from tests.fuzz.__main__ import targets
from tests.nightly import STEPS, Step, keep, known, run

AT = "0123456789ab"


@pytest.fixture(autouse=True)
def at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody changes the checkout meanwhile."""
    monkeypatch.setattr(nightly, "commit", lambda: AT)


def test_what_passed_is_known_at_its_commit_only(tmp_path: Path) -> None:
    step = Step("says something", 1, [sys.executable, "-c", "print('words')"])
    passed = run("miri", step, AT, tmp_path)
    keep(tmp_path, passed)
    assert (passed.verdict, passed.commit) == ("passed", AT)
    assert Path(passed.remark).read_text() == "words\n"
    assert known(tmp_path, AT) == {"miri": passed}
    assert known(tmp_path, "ba9876543210") == {}


def test_what_failed_or_did_not_run_is_no_success(tmp_path: Path) -> None:
    failed = run("fuzz", Step("", 1, [sys.executable, "-c", "raise SystemExit(3)"]), AT, tmp_path)
    missing = run("miri", Step("", 1, ["none"], lambda: "no Miri"), AT, tmp_path)
    for outcome in (failed, missing):
        keep(tmp_path, outcome)
    assert (failed.verdict, missing.verdict, missing.remark) == ("failed", "not run", "no Miri")
    assert {name: one.verdict for name, one in known(tmp_path, AT).items()} == {
        "fuzz": "failed",
        "miri": "not run",
    }


def test_a_changed_checkout_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that is changed when the step begins nor one that is when it ends."""
    passes = Step("", 1, [sys.executable, "-c", ""])
    keep(tmp_path, run("fuzz", passes, f"{AT}-dirty", tmp_path))
    assert known(tmp_path, f"{AT}-dirty") == {}
    monkeypatch.setattr(nightly, "commit", lambda: f"{AT}-dirty")
    keep(tmp_path, run("fuzz", passes, AT, tmp_path))
    assert known(tmp_path, AT) == {}


def test_a_result_of_another_version_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "fuzz.json").write_text('{"step": "fuzz"}')
    (tmp_path / "miri.json").write_text('{"step":')
    outcome = nightly.Outcome("dreams", "passed", 1.0, "", AT, 0.0)
    keep(tmp_path, outcome)
    assert known(tmp_path, AT) == {}


def test_each_step_says_how_long_it_takes() -> None:
    assert all(step.about and step.minutes > 0 for step in STEPS.values())
    assert len(targets()) == nightly.FUZZ_TARGETS
