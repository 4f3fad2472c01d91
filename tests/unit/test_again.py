"""What `make test` runs a second time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.again import MOST_FILES, MOST_TESTS, OF_DATA, is_worth_it
from tests.support.cache import ROOT

FAILED = pytest.ExitCode.TESTS_FAILED


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


def test_what_was_lost_once_was_lost() -> None:
    """No test of data has a second chance, also not beside others."""
    for name in OF_DATA:
        assert list(ROOT.glob(f"{name}*")), f"{name} is no test's"
    assert not is_worth_it(FAILED, ["tests/target/test_inflight.py::test_it[kill]"], [])
    assert not is_worth_it(FAILED, ["tests/a.py::b", "tests/crash/test_kill.py::test_it"], [])


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("assert runs > 1", 0, "test_it.py::test_it"),
        ("assert False", 1, "1 failed"),
        ("pass", 0, "1 passed"),
    ],
)
def test_what_fails_once_is_named_and_what_fails_twice_fails(
    tmp_path: Path, body: str, code: int, said: str
) -> None:
    """With real runs of pytest, each with a test that counts its runs."""
    (tmp_path / "test_it.py").write_text(
        "from pathlib import Path\n\n\ndef test_it():\n"
        "    counted = Path('runs')\n"
        "    counted.write_text(counted.read_text() + '.' if counted.exists() else '.')\n"
        f"    runs = len(counted.read_text())\n    {body}\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "tests.again", "-q", "-n", "2", "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert said in ended.stdout
    assert ("passed alone" in ended.stdout) == (body == "assert runs > 1")
