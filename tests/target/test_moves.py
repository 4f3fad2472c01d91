"""`virtlun volume move` of volumes that nobody uses: whole, refused, given up, and cut off."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from plugin.gateway import lvolcopies
from plugin.moves import notes
from pydataplane.client import Client
from pydataplane.volumes import Volumes
from tests.support.night import at_night, by_day
from tests.support.target import Target
from tests.target.test_cli import done, refused, run

pytestmark = pytest.mark.root

MIB = 1 << 20
SIZE_MIB = 24
#: Bytes a second with which a copy takes longer than a test.
SLOW = MIB
STILL = 1
"""The same of one that never ends: no test is too slow to see it under way."""
MOVE = ("volume", "move", "lvs0/v", "lvs1")

KILLED = """
import sys
from pathlib import Path
from plugin.cli import main
from pydataplane.client import Client
from tests.support.killed import Fuse, rpc

Fuse(Path(sys.argv.pop(1))).watch(Client, "call", rpc)
main()
"""
"""The command, which ends by SIGKILL where a file says."""


@pytest.fixture
def stores(target: Target) -> Target:
    """A target with the lvstores lvs0, which has the thin volume v with data, and lvs1."""
    for store in ("lvs0", "lvs1"):
        target.make_lvstore(store, 128 * MIB)
    target.make_thin("v", SIZE_MIB)
    fill(target, "lvs0/v", 1)
    return target


def fill(target: Target, volume: str, seed: int) -> None:
    """Writes to the beginning, the middle and the end of a volume."""
    chance = random.Random(seed)
    with target.exported(volume) as path, path.open("rb+", buffering=0) as file:
        for at in (0, 7 * MIB + 4096, (SIZE_MIB - 1) * MIB):
            os.pwrite(file.fileno(), chance.randbytes(MIB), at)
        os.fsync(file)


def digest(target: Target, volume: str) -> str:
    with target.exported(volume) as path:
        return hashlib.sha256(path.read_bytes()).hexdigest()


def volumes(target: Target) -> Volumes:
    return Volumes(Client(target.rpc_socket))


def paths(target: Target) -> list[str]:
    return [each.path for each in volumes(target).volumes()]


def check_only(target: Target, volume: str, data: str) -> None:
    """Checks that there is one volume, which is whole, free and without a note."""
    assert paths(target) == [volume]
    assert digest(target, volume) == data
    assert volumes(target).xattrs(volume).keys() <= {notes.IDENTITY}
    assert target.rpc("vhost_get_controllers") == []


@pytest.mark.parametrize("to", ["lvs1", "lvs1/other"])
def test_a_volume_is_in_another_lvstore_then(stores: Target, to: str) -> None:
    data = digest(stores, "lvs0/v")
    (moved,) = json.loads(done(stores, "volume", "move", "lvs0/v", to, "--json"))
    there = to if "/" in to else f"{to}/v"
    assert (moved["path"], moved["thin"], moved["size"]) == (there, True, SIZE_MIB * MIB)
    assert (moved["allocated"], moved["domains"]) == (4 * MIB, [])
    check_only(stores, there, data)
    said = refused(stores, "volume", "move", "lvs0/v", to)
    assert "there is no volume lvs0/v, and no move of it" in said
    told = run(stores, "volume", "move", there, "lvs0/v")
    assert told.exit_code == 0
    assert "no gateway answers: domains that name" in told.stderr
    check_only(stores, "lvs0/v", data)


def test_what_a_volume_is_goes_with_it(stores: Target, tmp_path: Path) -> None:
    """Thick, encrypted, limited by hand, with protection information, or a clone."""
    key = tmp_path / "key"
    key.write_bytes(bytes(range(64)))
    done(stores, "key", "create", "k", "--file", str(key))
    done(stores, "volume", "create", "lvs0/thick", "8M", "--key", "k", "--dif-type", "1")
    done(stores, "volume", "limits", "lvs0/thick", "--total-iops-sec", "5000")
    (moved,) = json.loads(done(stores, "volume", "move", "lvs0/thick", "lvs1", "--json"))
    assert (moved["thin"], moved["key"], moved["dif_type"]) == (False, "k", 1)
    limits = json.loads(done(stores, "volume", "limits", "lvs1/thick", "--json"))
    assert limits["total_iops_sec"] == 5000
    done(stores, "volume", "snapshot", "lvs0/v", "base")
    done(stores, "volume", "clone", "lvs0/v@base", "copy")
    data = digest(stores, "lvs0/copy")
    done(stores, "volume", "move", "lvs0/copy", "lvs1")
    assert digest(stores, "lvs1/copy") == data
    assert volumes(stores).volume("lvs1/copy").parent is None


def test_what_cannot_move_is_refused_and_nothing_is_left(stores: Target) -> None:
    done(stores, "volume", "create", "lvs1/taken", "8M", "--thin")
    done(stores, "volume", "create", "lvs0/busy", "8M", "--thin")
    done(stores, "volume", "create", "lvs0/claim", "8M", "--thin")
    done(stores, "volume", "create", "lvs0/part", "8M", "--thin")
    stores.rpc("vhost_create_scsi_controller", ctrlr="vm-0")
    stores.make_thin("used", 8)
    stores.add_lun("vm-0", "lvs0/used")
    done(stores, "volume", "create", "lvs0/old", "8M", "--thin")
    done(stores, "volume", "create", "lvs0/large", "4G", "--thin")
    done(stores, "volume", "snapshot", "lvs0/old", "monday")
    volumes(stores).set_xattr("lvs0/claim", "csi.volume", "{}")
    volumes(stores).set_xattr("lvs0/part", "virtlun.import", "{}")
    stores.attach("other", "lvs0/busy")
    before = paths(stores)
    with stores.exported("lvs0/v"):
        assert "is exported, and in use by" in refused(stores, *MOVE)
    for of, to, says in (
        ("lvs0/v", "lvs0", "is in lvs0 already: `virtlun volume rename`"),
        ("lvs0/v", "none", "there is no lvstore none"),
        ("lvs0/v", "lvs1/taken", "lvs1/taken exists already, and is of no move of lvs0/v"),
        ("lvs0/none", "lvs1", "there is no volume lvs0/none"),
        ("lvs0/busy", "lvs1", "in use by controller other"),
        ("lvs0/used", "lvs1", "in use by a VM (vm-0), and no gateway answers"),
        ("lvs0/part", "lvs1", "is not whole yet: it is being imported"),
        ("lvs0/claim", "lvs1", "is a claim's of Kubernetes"),
        ("lvs0/old", "lvs1", "has 1 snapshots, which would stay behind (old@monday)"),
        ("lvs0/old@monday", "lvs1", "a snapshot stays with its volume"),
    ):
        said = refused(stores, "volume", "move", of, to)
        assert says in said, said
    assert paths(stores) == before


def test_one_without_room_is_undone(stores: Target) -> None:
    done(stores, "volume", "create", "lvs1/rest", "110M")
    with stores.exported("lvs0/v") as path, path.open("rb+", buffering=0) as file:
        for at in range(SIZE_MIB):
            os.pwrite(file.fileno(), os.urandom(MIB), at * MIB)
        os.fsync(file)
    data = digest(stores, "lvs0/v")
    said = refused(stores, *MOVE)
    assert "needs 25165824 bytes, and lvs1 has" in said
    done(stores, "volume", "delete", "lvs1/rest", "--yes")
    done(stores, *MOVE)
    check_only(stores, "lvs1/v", data)


def test_given_up_it_is_as_it_was(stores: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ^C, while the target copies."""
    data = digest(stores, "lvs0/v")
    start = lvolcopies.start
    with monkeypatch.context() as patched:
        patched.setattr(lvolcopies, "start", lambda c, of, to, _: start(c, of, to, STILL))
        patched.setattr(time, "sleep", lambda _: signal.raise_signal(signal.SIGINT))
        assert "cancelled: volume lvs0/v is as it was" in refused(stores, *MOVE)
    check_only(stores, "lvs0/v", data)


def test_a_second_command_waits_for_no_first(
    stores: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def second(_: float) -> None:
        command = [sys.executable, "-m", "plugin.cli.main", "--socket", str(stores.rpc_socket)]
        ran = subprocess.run([*command, *MOVE], capture_output=True, text=True, check=False)
        told.append(ran.stderr)
        raise KeyboardInterrupt

    start = lvolcopies.start
    monkeypatch.setattr(lvolcopies, "start", lambda c, of, to, _: start(c, of, to, STILL))
    monkeypatch.setattr(time, "sleep", second)
    refused(stores, *MOVE)
    assert len(told) == 1 and "is being moved by another command" in told[0]


@by_day("after virtlun_lun_copy_pivot")
@pytest.mark.parametrize(
    "where",
    [
        at_night("after bdev_lvol_create"),
        at_night("before vhost_create_scsi_controller"),
        at_night("before vhost_scsi_controller_add_target"),
        at_night("before virtlun_lun_copy_start"),
        at_night("after virtlun_lun_copy_start"),
        at_night("before virtlun_lun_copy_pivot"),
        "after virtlun_lun_copy_pivot",
        at_night("before virtlun_lun_copy_abort"),
        at_night("before vhost_delete_controller"),
        at_night("before bdev_lvol_delete"),
        "after bdev_lvol_delete",
        at_night("before virtlun_lvol_remove_xattr"),
    ],
)
def test_one_that_is_killed_is_completed_by_the_next(stores: Target, where: str) -> None:
    data = digest(stores, "lvs0/v")
    kill_at(stores, where)
    check_one_counts(stores, data)
    if where == "before bdev_lvol_delete":
        # Somebody uses the volume again: what was copied counts no more.
        fill(stores, "lvs0/v", 2)
        data = digest(stores, "lvs0/v")
    done(stores, *MOVE)
    check_only(stores, "lvs1/v", data)


def kill_at(target: Target, where: str, of: str = "lvs0/v") -> None:
    fuse = target.directory / "fuse"
    fuse.write_text(where)
    command = [sys.executable, "-c", KILLED, str(fuse), "--socket", str(target.rpc_socket)]
    words = [*command, "volume", "move", of, "lvs1"]
    ended = subprocess.run(words, check=False, capture_output=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def check_one_counts(target: Target, data: str) -> None:
    """Checks that the volume is there, or all of it in the new place."""
    there = paths(target)
    if "lvs0/v" in there:
        return
    (only,) = there
    assert only == "lvs1/v"
    note = notes.read(volumes(target), volumes(target).lvol(only).uuid)
    assert note is not None and note.state == "whole"
    assert digest(target, only) == data


@pytest.mark.parametrize("kept", [True, at_night(False)])
def test_a_killed_target_is_asked_again(
    stores: Target, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It copies, or has just ended its last step; `kept`: the former."""
    data = digest(stores, "lvs0/v")
    start, delete = lvolcopies.start, Volumes.delete
    with monkeypatch.context() as patched:
        if kept:
            patched.setattr(lvolcopies, "start", lambda c, of, to, _: start(c, of, to, STILL))
            patched.setattr(time, "sleep", lambda _: stores.kill9())
        else:

            def deleted(self: Volumes, *words: Any, **given: Any) -> None:
                delete(self, *words, **given)
                stores.kill9()

            patched.setattr(Volumes, "delete", deleted)
        assert "no target answers" in refused(stores, *MOVE)
    stores.start()
    if not kept:
        check_one_counts(stores, data)
    done(stores, *MOVE)
    check_only(stores, "lvs1/v", data)
