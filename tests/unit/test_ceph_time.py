"""The line at the end of a run on what the tests with a Ceph take."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """\
import pytest
from tests.support.ceph import Ceph
from tests.support.ceph_time import CephTime

class Fake(Ceph):
    def _make_monitor(self):
        raise AssertionError("no monitor")

def pytest_configure(config):
    config.pluginmanager.register(CephTime(config), "ceph-time")

@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = Fake.__new__(Fake)
    try:
        made.__init__(tmp_path_factory.mktemp("ceph"))
    except AssertionError:
        pass
    yield made
    made.stop()
"""
WITH = "import time\ndef test_a(cluster): time.sleep(0.6)\ndef test_b(cluster): time.sleep(0.6)\n"
WITHOUT = "import time\ndef test_c(): time.sleep(0.6)\ndef test_d(): time.sleep(0.6)\n"


def run(folder: Path, tests: dict[str, str], *options: str) -> str:
    """Runs tests beside CONFTEST; returns what pytest printed."""
    for name, text in {"conftest": CONFTEST, **tests}.items():
        (folder / f"{name}.py").write_text(text)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options),
            *("-c", "/dev/null", "--rootdir", folder, "--confcutdir", folder, folder),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("options", [(), ("-n", "2", "--dist", "loadfile")], ids=["one", "two"])
def test_the_time_is_that_of_the_tests_with_a_cluster(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    said = run(tmp_path, {"test_a": WITH, "test_b": WITHOUT}, *options)
    found = re.search(
        r"^tests with a Ceph: (\d), (\d) s of (\d) s \(\d+ %\); (\d) at a time: ",
        said,
        re.MULTILINE,
    )
    assert found and found.groups() == ("2", "1", "2", "2" if options else "1"), said


def test_a_run_without_a_cluster_says_nothing_of_it(tmp_path: Path) -> None:
    assert "Ceph" not in run(tmp_path, {"test_b": WITHOUT})
