"""How fuzz targets are run, with programs in their place."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.fuzz import __main__ as fuzz

#: What libFuzzer does: it works until it is told to end, and says then how much that was. It runs
#: its corpus first, and does not listen before that is done.
WORKS = """\
import signal, sys, time
def deaf(*_):
    sys.exit(9)
signal.signal(signal.SIGUSR1, deaf)
while time.process_time() < 2:
    pass
print("#30\tINITED cov: 7", flush=True)
def end(*_):
    print("#7 DONE cov: 12", "stat::number_of_executed_units: 34", sep="\\n", flush=True)
    sys.exit(0)
signal.signal(signal.SIGUSR1, end)
while True:
    pass
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


@pytest.mark.nightly
def test_beside_other_work_a_target_ends_after_its_corpus_and_its_time(folder: Path) -> None:
    ended = fuzz.run(target(folder, WORKS), 1, 1, beside=True)
    assert (ended.failure, ended.runs, ended.covered) == (None, 34, 12)
    assert ended.processor_s >= 2.9  # two of them for the corpus


#: As above, with a corpus of nothing; it works so much of the time.
WORKS_SOMETIMES = """\
import signal, sys, time
print("#1\tINITED cov: 7", flush=True)
def end(*_):
    print("#7 DONE cov: 12", "stat::number_of_executed_units: 34", sep="\\n", flush=True)
    sys.exit(0)
signal.signal(signal.SIGUSR1, end)
while True:
    until = time.process_time() + {busy}
    while time.process_time() < until:
        pass
    time.sleep({idle})
"""


@pytest.mark.parametrize(
    ("busy", "idle", "seconds", "least"), [(0.1, 0.0, 2, 0.2), (0.05, 0.2, 1, 0.4)]
)
def test_beside_other_work_a_target_has_its_time_and_enough_of_a_processor(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    busy: float,
    idle: float,
    seconds: int,
    least: float,
) -> None:
    monkeypatch.setattr(fuzz, "BESIDE_LEAST_S", least)
    begun = time.monotonic()
    program = target(folder, WORKS_SOMETIMES.format(busy=busy, idle=idle))
    ended = fuzz.run(program, seconds, 1, beside=True)
    assert ended.failure is None
    assert time.monotonic() - begun >= seconds
    assert ended.processor_s >= least


@pytest.mark.parametrize("beside", [False, True])
def test_a_finding_is_a_failure_with_how_to_repeat_it(folder: Path, beside: bool) -> None:
    program = target(folder, FINDS)
    ended = fuzz.run(program, 1, 1, beside=beside)
    assert ended.failure is not None
    assert f"repeat it with: {program} /findings/crash-1" in ended.failure


def test_one_that_ends_without_a_run_is_a_failure(folder: Path) -> None:
    assert fuzz.run(target(folder, "raise SystemExit(0)"), 1, 1, beside=True).failure is not None
