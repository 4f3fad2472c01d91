"""A run of all tests fails where an example was left out: tests/support/examples.py judges."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.examples import LEFT, ROOT

CONFTEST = """\
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.support import examples

HERE = Path(__file__).parent
examples.ROOT, examples.EXAMPLES = HERE, HERE / "examples"
examples.MANIFESTS = [HERE / "examples/two.yaml"]
examples.OF_THE_NIGHT = {{HERE / "examples/night.conf"}}
examples.PARTS = (
    (("cluster",), lambda path: path in examples.MANIFESTS),
    (("plain",), lambda path: path not in examples.MANIFESTS),
)

def pytest_configure(config):
    config.addinivalue_line("markers", "nightly: of the night")
    config.pluginmanager.register(examples.Judge(config), "examples")
"""
#: As tests/conftest.py leaves them out.
WITHOUT_NIGHT = """
def pytest_collection_modifyitems(config, items):
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=nightly)
    items[:] = [item for item in items if item not in nightly]
"""
NIGHT = """
from pytest import mark
@mark.nightly
def test_of_the_night():
    pass
"""
PLAIN = """\
from tests.support import examples
def test_runs_it():
    examples.used(examples.EXAMPLES / "one.conf")
def test_another():
    pass
"""
CLUSTER = """\
from tests.support import examples
def test_first():
    examples.applied({"kind": "A", "metadata": {"name": "a"}})
"""
#: What makes the second object of the manifest applied as it stands.
SECOND = """\
def test_second():
    examples.applied({"metadata": {"name": "b"}, "kind": "B"})
"""
WORKERS = ("-p", "xdist", "-n", "2")
CHANGED = SECOND.replace('"b"', '"other"')


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST.format(root=str(ROOT)))
    for name in ("examples", "plain", "cluster"):
        (tmp_path / name).mkdir()
    (tmp_path / "examples/one.conf").write_text("one")
    (tmp_path / "examples/two.yaml").write_text(
        "kind: A\nmetadata: {name: a}\n---\nkind: B\nmetadata: {name: b}\n"
    )
    (tmp_path / "plain/test_plain.py").write_text(PLAIN)
    (tmp_path / "cluster/test_cluster.py").write_text(CLUSTER + SECOND)
    return tmp_path


def run(folder: Path, *words: str) -> tuple[int, str]:
    """Returns the exit status of a run of the tests in a folder, and what it says of examples."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *words],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    left = [line for line in done.stdout.splitlines() if line.startswith("examples/")]
    return done.returncode, " ".join(left)


@pytest.mark.parametrize(
    ("second", "workers"),
    [(SECOND, WORKERS), (CHANGED, WORKERS), ("", ())],
    ids=["applied", "changed", "not"],
)
def test_a_manifest_is_used_when_each_object_was_taken_as_it_stands(
    folder: Path, second: str, workers: tuple[str, ...]
) -> None:
    (folder / "cluster/test_cluster.py").write_text(CLUSTER + second)
    assert run(folder, *workers) == ((0, "") if second == SECOND else (1, "examples/two.yaml"))


def test_any_other_file_is_used_when_a_test_says_so(folder: Path) -> None:
    (folder / "plain/test_plain.py").write_text(PLAIN.replace("examples.used", "str"))
    assert run(folder) == (1, "examples/one.conf")


@pytest.mark.parametrize("words", [("-k", "another"), ("plain/test_plain.py::test_another",)])
def test_a_run_of_some_tests_is_not_judged(folder: Path, words: tuple[str, ...]) -> None:
    assert run(folder, *words) == (0, "")


def test_a_folder_is_judged_by_itself(folder: Path) -> None:
    (folder / "cluster/test_cluster.py").write_text(CLUSTER)
    assert run(folder, "plain") == (0, "")
    assert run(folder, "cluster") == (1, "examples/two.yaml")


def test_a_run_that_failed_names_them_as_well(folder: Path) -> None:
    (folder / "cluster/test_cluster.py").write_text("def test_fails():\n    assert False\n")
    assert run(folder) == (1, "examples/two.yaml")
    # Who runs the failed test again knows that it is not all.
    kept = folder / ".pytest_cache/v" / LEFT
    assert json.loads(kept.read_text()) == ["two.yaml"]


@pytest.mark.parametrize("workers", [WORKERS, ()], ids=["workers", "alone"])
def test_what_only_the_night_uses_is_judged_by_night(
    folder: Path, workers: tuple[str, ...]
) -> None:
    (folder / "examples/night.conf").write_text("night")
    (folder / "plain/test_night.py").write_text(NIGHT)
    assert run(folder, *workers) == (1, "examples/night.conf")
    with (folder / "conftest.py").open("a") as conftest:
        conftest.write(WITHOUT_NIGHT)
    assert run(folder, *workers) == (0, "")
