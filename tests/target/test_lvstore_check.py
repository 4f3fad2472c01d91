"""`virtlun lvstore check`: metadata that goes bad on the medium of a real target's lvstore."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.target import Target
from tests.target.test_cli import done, refused, run

MIB = 1 << 20
PAGE = 4096


@pytest.fixture
def file(target: Target) -> Path:
    """The file of the lvstore lvs0, which has one volume in a page of its own, in place."""
    path = target.directory / "store.img"
    done(target, "lvstore", "create", "lvs0", "--file", str(path), "--size", "64M")
    target.make_thin("vm", 16)
    target.restart()  # what was in the journal is in its place
    return path


def spoil(path: Path) -> int:
    """Changes the page that has the volume's name; returns where it is, bytes."""
    at = path.read_bytes().index(b"vm\0\0\0\0") // PAGE * PAGE
    file = os.open(path, os.O_WRONLY)
    os.pwrite(file, b"spoilt", at + 2000)
    os.fsync(file)
    os.close(file)
    return at


def test_what_has_gone_bad_is_found_and_written_anew(target: Target, file: Path) -> None:
    assert "are as they should be" in run(target, "lvstore", "check", "lvs0").output
    at = spoil(file)
    bad = run(target, "lvstore", "check", "lvs0", "--json")
    assert bad.exit_code == 1
    (problem,) = json.loads(bad.stdout)["problems"]
    assert problem["place"].endswith(f"at byte {at}")
    assert not problem["repaired"]
    shown = run(target, "lvstore", "check", "lvs0")
    assert (shown.exit_code, f"at byte {at}" in shown.stdout) == (1, True)
    (mended,) = json.loads(done(target, "lvstore", "check", "lvs0", "--repair", "--json"))[
        "problems"
    ]
    assert mended == problem | {"repaired": True}
    done(target, "lvstore", "check", "lvs0")
    target.kill9()
    target.start()
    assert [each["name"] for each in target.rpc("bdev_lvol_get_lvols")] == ["vm"]


def test_one_that_is_refused_is_explained(target: Target, file: Path) -> None:
    done(target, "lvstore", "check", "lvs0")
    (loaded,) = (each["base_bdev"] for each in target.rpc("bdev_lvol_get_lvstores"))
    assert "in use" in refused(target, "lvstore", "check", "--bdev", loaded)
    target.stop()
    at = spoil(file)
    target.start()
    assert target.rpc("bdev_lvol_get_lvstores") == []
    (bdev,) = (each["name"] for each in target.rpc("bdev_get_bdevs"))
    found = run(target, "lvstore", "check", "--bdev", bdev, "--json")
    assert found.exit_code == 1
    (problem,) = json.loads(found.stdout)["problems"]
    assert problem["place"].endswith(f"at byte {at}")
    for words in ((), ("lvs0", "--bdev", bdev), ("--bdev", bdev, "--repair")):
        assert run(target, "lvstore", "check", *words).exit_code == 2
