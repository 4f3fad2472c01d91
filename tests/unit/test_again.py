"""What `make test` runs a second time, and what comes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.again import MOST_FILES, MOST_TESTS, NOT_OF_DATA, cause, is_worth_it
from tests.support.cache import ROOT
from tests.support.night import at_night

FAILED = pytest.ExitCode.TESTS_FAILED
STARVED = "(the emulated guest ran for 3.1 s and waited 97 s for a processor)"
#: A test of pytest's own folder, which has that name there.
MAY = "tests/guest/test_hotplug.py"
BOOT = f"tests.support.agent.GuestError: the guest did not boot within 120 s {STARVED}\n--- qemu"
ANSWER = f"tests.support.agent.GuestError: no answer within 60 s {STARVED} to: true"


def test_a_few_failures_are_looked_at_again_and_nothing_else() -> None:
    """Many failures, another end and a failure of no test fail at once."""
    assert is_worth_it(FAILED, ["tests/a.py::b"], [])
    assert not is_worth_it(FAILED, [], [])
    assert not is_worth_it(FAILED, ["tests/a.py::b"], ["two.yaml"]), "an example was left out, too"
    assert not is_worth_it(pytest.ExitCode.OK, [], [])
    assert not is_worth_it(pytest.ExitCode.INTERRUPTED, ["tests/a.py::b"], [])
    assert is_worth_it(FAILED, [f"tests/a.py::b[{n}]" for n in range(MOST_TESTS)], [])
    assert not is_worth_it(FAILED, [f"tests/a.py::b[{n}]" for n in range(MOST_TESTS + 1)], [])
    assert not is_worth_it(FAILED, [f"tests/{n}.py::b" for n in range(MOST_FILES + 1)], [])


@pytest.mark.parametrize("messages", [[BOOT], [ANSWER], [BOOT, ANSWER]])
def test_a_starved_guest_is_a_cause(messages: list[str]) -> None:
    assert cause(f"{MAY}::test_it[1]", messages)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [""],
        [BOOT, ""],
        [BOOT, "assert 1 == 2"],
        [BOOT.replace(f" {STARVED}", "")],
        ["tests.support.agent.GuestError: exit status 1 in the guest from: true\n" + STARVED],
        ["AssertionError: " + BOOT],
        ["tests.support.agent.GuestError: no answer within 60 s to: echo " + STARVED],
    ],
)
def test_nothing_else_is(messages: list[str]) -> None:
    """A guest that waits for our device, a test's own words, one cause beside another failure."""
    assert not cause(f"{MAY}::test_it", messages)


def test_what_was_lost_once_was_lost() -> None:
    """No test of data has a second chance, and none that nobody has looked at."""
    for name in NOT_OF_DATA:
        assert (ROOT / name).is_file(), f"{name} is no test's"
    for name in ("guest/test_upgrade", "libvirt/test_copied_domains", "crash/test_kill", "new"):
        assert not cause(f"tests/{name}.py::test_it", [BOOT])


ONCE = "    if runs == 1:\n        "


@pytest.mark.parametrize(
    ("file", "body", "code", "said"),
    [
        at_night("test_it.py", "    assert runs > 1", 1, "passed alone"),
        at_night(
            "test_it.py", f"{ONCE}raise GuestError({BOOT.split(': ', 1)[1]!r})", 1, "passed alone"
        ),
        at_night(MAY, "    assert runs > 1", 1, "passed alone"),
        (MAY, f"{ONCE}raise GuestError({BOOT.split(': ', 1)[1]!r})", 0, "passed alone"),
        at_night(MAY, f"    raise GuestError({BOOT.split(': ', 1)[1]!r})", 1, "fail alone, too"),
        ("test_it.py", "    assert False", 1, "fail alone, too"),
        at_night("test_it.py", "    pass", 0, "1 passed"),
    ],
)
def test_a_failure_fails_the_run_unless_its_message_shows_a_cause_outside(
    tmp_path: Path, file: str, body: str, code: int, said: str
) -> None:
    """With real runs of pytest, each with a test that counts its runs, among workers."""
    test = tmp_path / file
    test.parent.mkdir(parents=True, exist_ok=True)
    test.write_text(
        "from pathlib import Path\n\nfrom tests.support.agent import GuestError\n\n\n"
        "def test_it():\n"
        "    counted = Path('runs')\n"
        "    counted.write_text(counted.read_text() + '.' if counted.exists() else '.')\n"
        f"    runs = len(counted.read_text())\n{body}\n"
    )
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "tests.again", "-q", "-n", "2", "--import-mode=importlib"),
            *("--rootdir", ".", file),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert said in ended.stdout
    assert len((tmp_path / "runs").read_text()) == (1 if "1 passed" in said else 2)
    assert ("other programs had the processors" in ended.stdout) == (
        file == MAY and "raise" in body
    )
