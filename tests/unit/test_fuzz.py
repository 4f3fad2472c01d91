"""How fuzz targets are run, with programs in their place."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.fuzz import __main__ as fuzz

#: What libFuzzer says in the end.
WORKS = """\
print("#30\tINITED cov: 7", "#7 DONE cov: 12", sep="\\n")
print("stat::number_of_executed_units: 34", flush=True)
"""
FINDS = "print('Test unit written to /findings/crash-1'); raise SystemExit(77)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a target, and for what it keeps."""
    monkeypatch.setattr(fuzz, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(fuzz, "MADE", tmp_path)
    return tmp_path


def target(folder: Path, code: str) -> Path:
    """Returns a program that takes a target's place."""
    program = folder / "target"
    program.write_text(f"#!{sys.executable}\n{code}")
    program.chmod(0o755)
    return program


def test_a_target_that_finds_nothing_says_what_it_ran(folder: Path) -> None:
    ended = fuzz.run(target(folder, WORKS), 1, 1)
    assert (ended.failure, ended.runs, ended.covered) == (None, 34, 12)


def test_a_finding_is_a_failure_with_how_to_repeat_it(folder: Path) -> None:
    program = target(folder, FINDS)
    ended = fuzz.run(program, 1, 1)
    assert ended.failure is not None
    assert f"repeat it with: {program} /findings/crash-1" in ended.failure


def test_one_that_ends_without_a_run_is_a_failure(folder: Path) -> None:
    assert fuzz.run(target(folder, "raise SystemExit(0)"), 1, 1).failure is not None


def test_one_that_does_not_end_is_killed_and_a_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "GRACE_S", 0)
    hangs = f"{WORKS.rstrip()}\nimport signal\nsignal.pause()"
    assert fuzz.run(target(folder, hangs), 1, 1).failure is not None


def test_what_runs_by_day_and_by_night_are_the_same_targets() -> None:
    listed = (fuzz.HERE / "src/lib.rs").read_text().split("pub const TARGETS", 1)[1]
    by_day = re.findall(r'^    \("(\w+)", [\w:]+\),$', listed.split("];", 1)[0], re.MULTILINE)
    programs = sorted(program.stem for program in (fuzz.HERE / "fuzz_targets").iterdir())
    assert sorted(by_day) == sorted(fuzz.targets()) == programs
