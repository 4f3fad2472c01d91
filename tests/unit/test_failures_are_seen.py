"""What fails where nobody looks fails its test: in a thread, or in a pipe in a test's guest."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IN_A_THREAD = """\
import threading
def test_it():
    def check():
        assert {holds}
    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize("holds", [True, False])
def test_a_check_that_fails_in_a_thread_fails_its_test(tmp_path: Path, *, holds: bool) -> None:
    test = tmp_path / "test_thread.py"
    test.write_text(IN_A_THREAD.format(holds=holds))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "--confcutdir", tmp_path, test),
        ],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == (0 if holds else 1), done.stdout


@pytest.fixture
def guest(tmp_path: Path) -> tuple[str, dict[str, str]]:
    """The guest's side of the agent, as a script for its shell here, and its environment."""
    (serve,) = re.findall(
        r"^serve\(\) \{\n.*?^\}\n",
        (ROOT / "tests/guest/init").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert serve.count("/tmp/") >= 3
    subprocess.run(["/bin/busybox", "--install", "-s", tmp_path], check=True)
    return f"{serve.replace('/tmp/', f'{tmp_path}/')}serve\n", {"PATH": str(tmp_path)}


@pytest.mark.parametrize(
    ("command", "status"), [("true | cat", 0), ("false | cat", 1), ("cat /none | wc -c", 1)]
)
def test_a_pipe_in_a_guest_fails_where_any_part_of_it_does(
    guest: tuple[str, dict[str, str]], command: str, status: int
) -> None:
    script, environment = guest
    done = subprocess.run(
        ["/bin/busybox", "sh", "-c", script],
        input=f"7 {base64.b64encode(command.encode()).decode()}\n",
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[:2] == ["AGENT-READY", "BEGIN 7"]
    assert done.stdout.splitlines()[-1] == f"END 7 {status}"
