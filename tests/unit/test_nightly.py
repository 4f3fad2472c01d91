"""A night that was ended goes on where it was, and what counts is what was tested."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests import nightly
from tests.bench import upgrade
from tests.fuzz.__main__ import targets
from tests.nightly import night as nights
from tests.nightly.night import Night
from tests.nightly.results import Outcome, all_passed, commit, keep, key, known
from tests.nightly.steps import FUZZ_TARGETS, LONG_TESTS, PROPERTY_TESTS, STEPS, Lane, Step
from tests.support.cache import ROOT
from tests.support.wait import until

KEY = "0123456789abcdef"


def step(code: str = "", lane: Lane = Lane.COMPUTING, **others: object) -> Step:
    """Returns one that runs some Python."""
    words = {"about": "", "minutes": 1, "paths": ("a",), **others}
    return Step(lane=lane, command=[sys.executable, "-c", code], **words)  # type: ignore[arg-type]


def outcome(name: str, verdict: str = "passed", of: str = KEY) -> Outcome:
    return Outcome(name, verdict, 1.0, "", of, "c0ffee", 0.0)


# What counts


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[..., None]:
    """A repository with the files `a/code` and `docs/page`; returns git in it."""

    def git(*words: str) -> None:
        identity = ("-c", "user.name=T", "-c", "user.email=t@example.org")
        subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True
        )

    for name in ("a/code", "docs/page"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("one\n")
    (tmp_path / ".gitignore").write_text("*.o\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    return git


def test_a_key_is_of_what_is_tested_alone(checkout: Callable[..., None], tmp_path: Path) -> None:
    first, before = key(step(), tmp_path), commit(tmp_path)
    assert first
    (tmp_path / "docs/page").write_text("two\n")
    (tmp_path / "a/made.o").write_text("two\n")
    assert key(step(), tmp_path) == first
    checkout("commit", "-qam", "two")
    assert key(step(), tmp_path) == first
    assert commit(tmp_path) != before
    (tmp_path / "a/code").write_text("three\n")
    checkout("commit", "-qam", "three")
    third = key(step(), tmp_path)
    assert third not in ("", first)
    assert len({third, key(step("1"), tmp_path), key(step(environment={"A": "1"}), tmp_path)}) == 3
    checkout("revert", "--no-edit", "HEAD")
    assert key(step(), tmp_path) == first


def test_what_is_not_committed_has_no_key(checkout: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "a/new").write_text("new\n")
    assert key(step(), tmp_path) == ""
    (tmp_path / "a/new").unlink()
    (tmp_path / "a/code").write_text("two\n")
    assert key(step(), tmp_path) == ""
    checkout("checkout", "a/code")
    assert key(step(), tmp_path)
    assert key(step(paths=("a", "gone")), tmp_path) == ""
    assert key(step(), tmp_path / "a/none") == ""


def test_what_is_known_is_of_the_same_key(tmp_path: Path) -> None:
    for one in (outcome("miri"), outcome("fuzz", "failed"), outcome("asan", of="")):
        keep(tmp_path, one)
    now = dict.fromkeys(("miri", "fuzz", "asan", "tsan"), KEY)
    assert known(tmp_path, now) == {"miri": outcome("miri"), "fuzz": outcome("fuzz", "failed")}
    assert known(tmp_path, dict.fromkeys(now, "fedcba9876543210")) == {}
    assert known(tmp_path, dict.fromkeys(now, "")) == {}


def test_a_result_of_another_version_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "fuzz.json").write_text('{"step": "fuzz"}')
    (tmp_path / "miri.json").write_text('{"step":')
    assert known(tmp_path, dict.fromkeys(("fuzz", "miri"), KEY)) == {}


# How it runs


@pytest.fixture
def at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody changes the checkout meanwhile."""
    monkeypatch.setattr(nights, "key", lambda _: KEY)


@pytest.mark.usefixtures("at_rest")
def test_what_failed_or_did_not_run_is_no_success(tmp_path: Path) -> None:
    night = Night(tmp_path)
    passed = night.run("asan", step("print('words')"))
    failed = night.run("fuzz", step("raise SystemExit(3)"))
    missing = night.run("miri", step(missing=lambda: "no Miri"))
    assert Path(passed.remark).read_text() == "words\n"
    assert [one.verdict for one in (passed, failed, missing)] == ["passed", "failed", "not run"]
    assert (passed.key, missing.remark) == (KEY, "no Miri")
    assert [all_passed(each) for each in ([passed], [passed, failed], [passed, missing])] == [
        True,
        False,
        False,
    ]


def test_what_is_changed_meanwhile_counts_for_no_later_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = iter([KEY, "fedcba9876543210"])
    monkeypatch.setattr(nights, "key", lambda _: next(keys))
    ended = Night(tmp_path).run("fuzz", step())
    assert (ended.verdict, ended.key) == ("passed", "")


@pytest.mark.usefixtures("at_rest")
def test_a_step_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nights, "ENDING_S", 0.1)
    pid = tmp_path / "pid"
    code = (
        "import signal, subprocess, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        f"open({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid));"
        "time.sleep(600)"
    )
    ended = Night(tmp_path).run("fuzz", step(code, minutes=0.02))
    assert (ended.verdict, ended.remark.split(";")[0]) == ("failed", "no end within 0.06 min")
    child = Path(f"/proc/{pid.read_text()}/stat")
    until(lambda: not child.exists() or ") Z " in child.read_text(), "the end of its child")


class Meeting:
    """Steps that say when they begin and end, and wait for a file before they end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: dict[str, Step] = {}

    def add(self, name: str, lane: Lane) -> None:
        begun, may_end = str(self.folder / f"{name}.begun"), str(self.folder / f"{name}.end")
        code = (
            f"import pathlib, time; pathlib.Path({begun!r}).touch()\n"
            f"while not pathlib.Path({may_end!r}).exists(): time.sleep(0.01)"
        )
        self.steps[name] = step(code, lane)

    def begun(self) -> set[str]:
        return {path.stem for path in self.folder.glob("*.begun")}

    def end(self, *names: str) -> None:
        for name in names:
            (self.folder / f"{name}.end").touch()


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    made = Meeting(tmp_path)
    for name in ("long", "e2e"):
        made.add(name, Lane.GUESTS)
    for name in ("fuzz", "miri"):
        made.add(name, Lane.COMPUTING)
    for name in ("bench", "noisy"):
        made.add(name, Lane.MEASURING)
    yield made
    made.end(*made.steps)


@pytest.mark.usefixtures("at_rest")
def test_what_measures_runs_alone_and_last(meeting: Meeting, tmp_path: Path) -> None:
    ended: list[Outcome] = []
    night = threading.Thread(
        target=Night(tmp_path / "logs").all, args=(meeting.steps, ended.append)
    )
    night.start()
    together = {"long", "e2e", "fuzz"}
    until(lambda: meeting.begun() >= together, "those that may run at a time")
    assert meeting.begun() == together
    meeting.end("long", "fuzz")
    until(lambda: "miri" in meeting.begun(), "the next one that computes")
    meeting.end("e2e")
    until(lambda: len(ended) == 3, "three are through")
    assert not meeting.begun() & {"bench", "noisy"}
    meeting.end("miri")
    until(lambda: "bench" in meeting.begun(), "the first that measures")
    assert "noisy" not in meeting.begun()
    meeting.end("bench", "noisy")
    night.join()
    assert [one.step for one in ended][-2:] == ["bench", "noisy"]
    assert {one.step: one.verdict for one in ended} == dict.fromkeys(meeting.steps, "passed")


@pytest.mark.usefixtures("at_rest")
def test_one_that_is_stopped_says_nothing_of_what_it_did_not_end(
    meeting: Meeting, tmp_path: Path
) -> None:
    ended: list[Outcome] = []
    night = Night(tmp_path / "logs")
    interrupted = threading.Event()

    def run() -> None:
        try:
            night.all(meeting.steps, ended.append)
        except KeyboardInterrupt:
            interrupted.set()

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: "e2e" in meeting.begun(), "it has begun")
    meeting.end("long")
    until(lambda: ended, "one is through")
    night.stop()
    thread.join()
    assert interrupted.is_set()
    assert [one.step for one in ended] == ["long"]


def test_each_round_has_a_seed_of_its_own_and_the_first_that_fails_is_the_last(
    tmp_path: Path,
) -> None:
    words = [sys.executable, "-m", "tests.nightly.repeat", "--rounds", "5", "--", sys.executable]
    code = (
        "import os, pathlib; seeds = pathlib.Path('seeds').open('a+');"
        "seeds.write(os.environ['VIRTLUN_SEED'] + os.linesep); seeds.seek(0);"
        "raise SystemExit(len(seeds.readlines()) == 3)"
    )
    said = subprocess.run(
        [*words, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    seeds = (tmp_path / "seeds").read_text().split()
    assert len(set(seeds)) == len(seeds) == 3
    assert said.returncode == 1
    last = said.stdout.splitlines()[-1]
    assert last.startswith("round 3 failed") and f"VIRTLUN_SEED={seeds[2]}" in last


# What the steps are


def test_each_step_says_how_long_it_takes_and_what_it_tests() -> None:
    for name, one in STEPS.items():
        assert one.about and one.minutes > 0, name
        assert len(set(one.paths)) == len(one.paths), name
        trees = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "--", *one.paths],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for path in one.paths:
            assert any(Path(each).is_relative_to(path) for each in trees), f"{name}: no {path}"
    assert len(targets()) == FUZZ_TARGETS


@pytest.mark.parametrize("name", ["bench-noisy", "bench-upgrade"])
def test_a_night_insists_on_goals(name: str) -> None:
    assert "--goal" in STEPS[name].command


def test_an_upgrade_is_to_take_a_guest_less_than_a_tenth_of_a_second() -> None:
    quick = upgrade.Row([50.0], [99.0, 40.0, 12.0], 600.0)
    (said,) = upgrade.missed({1: quick, 64: replace(quick, by_guest_ms=[100.0])})
    assert said.startswith("with 64 controllers a guest waits for 100 ms at most")


def test_the_tests_of_the_night_are_found() -> None:
    assert {"tests/guest/test_restart_under_io.py", "tests/target/test_upgrade.py"} <= {*LONG_TESTS}
    assert "tests/guest/test_upgrade.py" in LONG_TESTS, "one with variants of the night"
    assert "tests/unit/test_nightly.py" not in LONG_TESTS
    assert "tests/unit/gateway/test_wire.py" in PROPERTY_TESTS


def test_what_a_long_test_has_printed_is_in_the_log(tmp_path: Path) -> None:
    """A seed of one that passed as well: the next release may fail with it."""
    test = tmp_path / "test_long.py"
    test.write_text(
        "from pytest import fixture, mark\n@fixture\ndef seed(): print('VIRTLUN_SEED=7')\n"
        "@mark.nightly\ndef test_passes(seed): print('a pause of 0.1 s')\n"
    )
    command = [word for word in STEPS["long"].command if word not in LONG_TESTS]
    said = subprocess.run([*command, test], cwd=tmp_path, stdout=subprocess.PIPE, check=True).stdout
    assert b"VIRTLUN_SEED=7" in said and b"a pause of 0.1 s" in said


def _file_of(module: str) -> Path | None:
    """Returns the file of a module of this repository."""
    path = ROOT / module.replace(".", "/")
    return next(
        (each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None
    )


def _imported(file: Path) -> Iterator[Path]:
    """Yields the files of ours that one imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (found for found in map(_file_of, names) if found)


def _of(one: Step) -> list[Path]:
    """Returns the Python files that a step's command names, or those of the module that it runs."""
    words = one.command
    files: list[Path] = []
    for at, word in enumerate(words):
        if word == "-m" and words[at + 1].startswith("tests."):
            place = ROOT / words[at + 1].replace(".", "/")
            files += [place / "__main__.py"] if place.is_dir() else [place.with_suffix(".py")]
        elif word.startswith("tests/"):
            above = [ROOT / folder / "conftest.py" for folder in Path(word).parents]
            files += [ROOT / word, *(file for file in above if file.is_file())]
    return files


@pytest.mark.parametrize("name", STEPS)
def test_whatever_a_step_imports_is_among_what_it_tests(name: str) -> None:
    """Else a change of it would not repeat the step."""
    one = STEPS[name]
    found: set[Path] = set()
    left = _of(one)
    assert left or one.command[0] in ("cargo", "make")
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += _imported(file)
    empty = {ROOT / "tests/__init__.py", Path(nightly.__file__)}
    imported = {file.relative_to(ROOT) for file in found - empty}
    unnamed = {
        str(path) for path in imported if not any(path.is_relative_to(each) for each in one.paths)
    }
    assert not unnamed
