"""`virtlun lvstore check`: metadata that goes bad on the medium of a real target's lvstore."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import tracer
from tests.support.initiator import connected
from tests.support.target import Target
from tests.target.test_cli import done, refused, run
from tests.target.test_history_kills import dies

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
    target.crash()
    assert [each["name"] for each in target.rpc("bdev_lvol_get_lvols")] == ["vm"]


@pytest.mark.nightly
@pytest.mark.skipif(not tracer.is_possible(), reason="the tracer knows x86-64 alone")
def test_a_repair_that_is_killed_has_mended_it_or_changed_nothing(
    target: Target, file: Path
) -> None:
    """At each write and flush of it: the rest of the store is as it was in any case."""
    target.kill9()
    good = file.read_bytes()
    outcomes = set()
    for nth in itertools.count():
        file.write_bytes(good)
        target.start()
        at = spoil(file)
        reached = dies(target, ("virtlun_lvstore_check", {"lvs_name": "lvs0", "repair": True}), nth)
        target.crash()
        mended = bool(target.rpc("bdev_lvol_get_lvstores"))
        outcomes.add(mended)
        if not mended:
            assert reached, "it was answered"
            target.kill9()
            with file.open("r+b") as store:
                store.seek(at)
                store.write(good[at : at + PAGE])
            target.start()
        done(target, "lvstore", "check", "lvs0")
        assert [each["name"] for each in target.rpc("bdev_lvol_get_lvols")] == ["vm"]
        target.kill9()
        if not reached:
            break
    assert outcomes == {False, True}


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
    for words in ((), ("lvs0", "--bdev", bdev)):
        assert run(target, "lvstore", "check", *words).exit_code == 2
    before = file.read_bytes()
    found = run(target, "lvstore", "check", "--bdev", bdev, "--repair", "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout)["problems"] == [problem]
    assert file.read_bytes() == before


def test_a_copy_of_the_superblock_is_mended_where_nobody_has_loaded_it(
    target: Target, file: Path
) -> None:
    """Of a second file with the same lvstore, which is not loaded beside the first."""
    target.stop()
    other = file.with_name("copied.img")
    shutil.copyfile(file, other)
    with other.open("r+b") as opened:
        opened.write(bytes(4096))
    target.start()
    bdev = target.rpc("bdev_uring_create", filename=str(other), name="copied", block_size=512)
    assert len(target.rpc("bdev_lvol_get_lvstores")) == 1
    words = ("lvstore", "check", "--bdev", bdev)
    for repair, code in (((), 1), (("--repair",), 0)):
        found = run(target, *words, *repair, "--json")
        (problem,) = json.loads(found.stdout)["problems"]
        assert problem["place"] == "superblock copy A at byte 0"
        assert (problem["repaired"], found.exit_code) == (bool(repair), code)
    assert "are as they should be" in run(target, *words).output


def dumped(target: Target, *words: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in done(target, "lvstore", "dump", *words, "--json").split("\n")
        if line
    ]


def test_a_dump_tells_each_page(target: Target, file: Path) -> None:
    """Each entry is where it says, and what it says is what the target was told."""
    target.rpc("vhost_create_scsi_controller", ctrlr="vm")
    add = {"ctrlr": "vm", "scsi_target_num": 0, "bdev_name": "lvs0/vm"}
    target.rpc("vhost_scsi_controller_add_target", **add)
    with connected(target, "vm") as guest:
        for lba in (0, 4096, 8192):
            guest.write(lba, bytes([9]) * PAGE)
    target.rpc("virtlun_lvol_set_xattr", name="lvs0/vm", xattr_name="user", xattr_value="x")
    target.rpc("bdev_lvol_snapshot", lvol_name="lvs0/vm", snapshot_name="before")
    live = dumped(target, "lvs0")
    kinds = [each["kind"] for each in live]
    assert kinds[:2] == ["superblock", "superblock"] and kinds.count("record") >= 3
    assert all(each["problem"] is None for each in live)
    assert done(target, "lvstore", "dump", "lvs0").count("superblock") == 2
    target.restart()  # all is in its place
    entries = dumped(target, "lvs0")
    of = {each["facts"]["name"]: each["facts"] for each in entries if each["kind"] == "root"}
    assert of["vm"]["parent"] == of["before"]["blob"]
    assert (of["vm"]["xattrs"], of["before"]["flags"]) == ("user", "thin,read-only,snapshot")
    (lvol,) = (each for each in target.rpc("bdev_lvol_get_lvols") if each["name"] == "vm")
    assert of["vm"]["uuid"] == lvol["uuid"]
    (extents,) = (
        each["facts"]["clusters"].split(",")
        for each in entries
        if each["kind"] == "extents" and each["facts"]["blob"] == of["before"]["blob"]
    )
    size = int(entries[0]["facts"]["cluster_size"])
    first = int(entries[0]["facts"]["first_data_cluster"])
    data = file.read_bytes()
    at = []
    for word in extents:
        cluster, rest = word.split("+")
        at.append(int(cluster) * size)
        offset = int(rest.split("@")[1]) * size
        assert data[offset : offset + PAGE] == bytes([9]) * PAGE, (word, first)
    assert at == [0, 4096 * 512, 8192 * 512]
    for each in entries:
        assert data[each["offset"] : each["offset"] + 4] in (b"VLBL", b"VLJO", b"VLPG")
    target.stop()
    bad = next(each["offset"] for each in entries if each["kind"] == "root")
    with file.open("r+b") as spoilt:
        spoilt.seek(bad + 2000)
        spoilt.write(b"spoilt")
    target.start()
    (bdev,) = (each["name"] for each in target.rpc("bdev_get_bdevs"))
    (problem,) = (each for each in dumped(target, "--bdev", bdev) if each["problem"])
    assert (problem["offset"], problem["kind"]) == (bad, "page")
    assert problem["problem"] == "its checksum does not match"
    assert "give an LVSTORE, or --bdev" in run(target, "lvstore", "dump").output
