"""The programs on blobs in examples/ run, as their users would have them run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.cache import ROOT
from tests.support.examples import EXAMPLES, used

BUILD_S = 300.0


@pytest.fixture(scope="module")
def programs() -> dict[str, Path]:
    """The examples of the blobstore by name, built as `cargo test` has them."""
    manifest = str(ROOT / "pydataplane/Cargo.toml")
    # Of all crates, as `cargo test` has them: with the features of one, or with the fuzz targets,
    # what they are built on would be built again.
    command = ["cargo", "build", "--locked", "--manifest-path", manifest]
    said = subprocess.run(
        [*command, "--examples", "--message-format", "json"],
        stdout=subprocess.PIPE,
        check=True,
        timeout=BUILD_S,
    ).stdout
    made = [json.loads(line) for line in said.splitlines() if b'"executable"' in line]
    return {each["target"]["name"]: Path(each["executable"]) for each in made if each["executable"]}


def ran(*command: str) -> str:
    """Runs a program to its end."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_hello_blob(programs: dict[str, Path]) -> None:
    used(EXAMPLES / "hello-blob/main.rs")
    said = ran(str(programs["hello-blob"]))
    assert "read:    hello, blob" in said
    assert "before:  hello, blob" in said


@pytest.mark.parametrize("workload", ["fillsync", "overwrite", "readwrite"])
def test_a_key_value_store(programs: dict[str, Path], tmp_path: Path, workload: str) -> None:
    for name in ("main.rs", "kv.rs"):
        used(EXAMPLES / "kv" / name)
    count = 50 if workload == "fillsync" else 20_000
    said = json.loads(ran(str(programs["kv"]), str(tmp_path / "kv"), "256", workload, str(count)))
    assert (said["workload"], said["operations"]) == (workload, count)
    assert said["per_second"] > 0


def test_a_wrong_workload_is_refused(programs: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "kv"
    done = subprocess.run(
        [str(programs["kv"]), str(file), "64", "fillsnyc", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "usage: kv FILE MIB" in done.stderr
    assert not file.exists()
