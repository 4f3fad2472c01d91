"""`virtlun volume move` when something fails or others are in its way, and what guests see."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from plugin.gateway import lvolcopies
from plugin.moves import moverequest, notes
from pydataplane.errors import BUSY, RpcError, VolumeError
from pydataplane.volumes import Volumes
from tests.support.target import Target
from tests.target.test_cli import done, refused
from tests.target.test_moves import (
    MIB,
    MOVE,
    SIZE_MIB,
    SLOW,
    STILL,
    check_only,
    digest,
    fill,
    kill_at,
    paths,
    stores,
    volumes,
)

__all__ = ["stores"]

pytestmark = pytest.mark.root

TIMED_OUT = -110


def test_given_up_while_the_new_one_is_made_nothing_is_left(
    stores: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, create = digest(stores, "lvs0/v"), Volumes.create

    def created(self: Volumes, *words: Any, **given: Any) -> Any:
        create(self, *words, **given)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Volumes, "create", created)
        assert "cancelled: volume lvs0/v is as it was" in refused(stores, *MOVE)
    check_only(stores, "lvs0/v", data)


def test_what_cannot_be_undone_is_said(stores: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    data, start = digest(stores, "lvs0/v"), lvolcopies.start

    def fails(*_: Any, **given: Any) -> None:
        raise RpcError(-16, "it does not go", "bdev_lvol_delete")

    with monkeypatch.context() as patched:
        patched.setattr(lvolcopies, "start", lambda c, of, to, _: start(c, of, to, STILL))
        patched.setattr(time, "sleep", lambda _: signal.raise_signal(signal.SIGINT))
        patched.setattr(Volumes, "delete", fails)
        said = refused(stores, *MOVE)
    assert "cancelled. Volume lvs0/v counts" in said and "it does not go" in said
    assert paths(stores) == ["lvs0/v", "lvs1/v"]
    done(stores, *MOVE)
    check_only(stores, "lvs1/v", data)


def deleted_with_error(
    stores: Target, monkeypatch: pytest.MonkeyPatch, code: int, *, done_first: bool
) -> None:
    """Has the deletion of the old volume answer an error, after it was done or without that."""
    real, old = Volumes.delete, volumes(stores).volume("lvs0/v").uuid

    def delete(self: Volumes, reference: str, **given: Any) -> None:
        if reference != old or done_first:
            real(self, reference, **given)
        if reference == old:
            raise RpcError(code, "it does not go", "bdev_lvol_delete")

    monkeypatch.setattr(Volumes, "delete", delete)


@pytest.mark.parametrize("code", [BUSY, TIMED_OUT])
def test_a_deletion_that_fails_when_it_was_done_loses_nothing(
    stores: Target, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As that of an image whose pool cannot empty its trash."""
    data = digest(stores, "lvs0/v")
    with monkeypatch.context() as patched:
        deleted_with_error(stores, patched, code, done_first=True)
        done(stores, *MOVE)
    check_only(stores, "lvs1/v", data)


@pytest.mark.parametrize(
    ("code", "state", "says"),
    [
        (BUSY, "copying", "Somebody uses it, so it counts, and lvs1/v is not it any more"),
        (TIMED_OUT, "whole", "Both are there; move it again"),
    ],
)
def test_a_deletion_that_fails_leaves_both(
    stores: Target, monkeypatch: pytest.MonkeyPatch, code: int, state: str, says: str
) -> None:
    with monkeypatch.context() as patched:
        deleted_with_error(stores, patched, code, done_first=False)
        assert says in refused(stores, *MOVE)
    assert paths(stores) == ["lvs0/v", "lvs1/v"]
    note = notes.read(volumes(stores), volumes(stores).lvol("lvs1/v").uuid)
    assert note is not None and note.state == state
    fill(stores, "lvs0/v", 2)
    data = digest(stores, "lvs0/v")
    done(stores, *MOVE)
    check_only(stores, "lvs1/v", data)


def test_the_new_name_is_held_and_nobody_uses_what_has_it(
    stores: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another move, by who makes a volume, and by who shows it to a VM."""
    data, start = digest(stores, "lvs0/v"), lvolcopies.start
    stores.make_lvstore("lvs2", 64 * MIB)
    done(stores, "volume", "create", "lvs2/w", f"{SIZE_MIB}M", "--thin")
    stores.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    told: list[str] = []

    def others(_: float) -> None:
        monkeypatch.undo()
        command = [sys.executable, "-m", "plugin.cli.main", "--socket", str(stores.rpc_socket)]
        words = [*command, "volume", "move", "lvs2/w", "lvs1/v"]
        ran = subprocess.run(words, capture_output=True, text=True, check=False)
        told.append(ran.stderr)
        told.append(refused(stores, "volume", "create", "lvs1/v", f"{SIZE_MIB}M", "--thin"))
        # Without the lock of the first command, as of one that has ended, too.
        told.append(refused(stores, "volume", "move", "lvs2/w", "lvs1/v"))
        for method, given in (
            ("vhost_scsi_controller_add_target", {"ctrlr": "vm-1", "scsi_target_num": 0}),
            ("vhost_create_blk_controller", {"ctrlr": "vm-2"}),
        ):
            named = "bdev_name" if "scsi_target_num" in given else "dev_name"
            with pytest.raises(RpcError) as raised:
                stores.rpc(method, **given, **{named: "lvs1/v"})
            told.append(str(raised.value))

    monkeypatch.setattr(lvolcopies, "start", lambda c, of, to, _: start(c, of, to, SLOW))
    monkeypatch.setattr(time, "sleep", others)
    done(stores, *MOVE)
    for said, expected in zip(
        told,
        (
            "lvs1/v exists already, and is of no move of lvs2/w",
            "another volume is being moved to it",
            "lvs1/v exists already, and is of no move of lvs2/w",
            "volume lvs0/v is being moved to it",
            "volume lvs0/v is being moved to it",
        ),
        strict=True,
    ):
        assert expected in said, said
    assert paths(stores) == ["lvs1/v", "lvs2/w"]
    assert digest(stores, "lvs1/v") == data


def test_a_move_that_begins_in_the_same_moment_shares_no_volume(
    stores: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two have looked, and nothing was there: the second one to make it is refused."""
    data = digest(stores, "lvs0/v")
    done(stores, "volume", "create", "lvs0/w", f"{SIZE_MIB}M", "--thin")
    seen = moverequest.find(volumes(stores), "lvs0/w", "lvs1/v")
    make = moverequest.make
    told: list[str] = []

    def made(of: Volumes, move: moverequest.MoveRequest, source: Any) -> str:
        first = make(of, move, source)
        assert seen.source is not None
        with pytest.raises(VolumeError) as raised:
            make(of, seen, seen.source)
        told.append(str(raised.value))
        return first

    monkeypatch.setattr(moverequest, "make", made)
    done(stores, *MOVE)
    assert "another volume is being moved to it" in told[0]
    assert paths(stores) == ["lvs0/w", "lvs1/v"]
    assert digest(stores, "lvs1/v") == data


def test_guests_know_it_as_the_same_disk_and_its_notes_go_with_it(stores: Target) -> None:
    """Also after a second move, and a restart of the target: serial, and what is made of UUIDs."""
    data, was = digest(stores, "lvs0/v"), volumes(stores).volume("lvs0/v").uuid
    volumes(stores).set_xattr("lvs0/v", "owner", "me")
    before = shown(stores, "lvs0/v")
    done(stores, *MOVE)
    assert volumes(stores).volume("lvs1/v").uuid != was
    assert shown(stores, "lvs1/v") == before
    done(stores, "volume", "move", "lvs1/v", "lvs0/new")
    assert volumes(stores).xattrs("lvs0/new") == {"owner": "me", notes.IDENTITY: was}
    assert shown(stores, "lvs0/new") == before
    assert digest(stores, "lvs0/new") == data
    volumes(stores).set_xattr("lvs0/new", notes.IDENTITY, "none")
    stores.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    with pytest.raises(RpcError, match=r"the xattr virtlun.identity of bdev .* is no UUID"):
        stores.add_lun("vm-1", "lvs0/new")


def shown(target: Target, volume: str) -> list[str]:
    """Returns as what guests know a volume, as a LUN and as a virtio-blk disk."""
    target.attach("vm-1", volume)
    found = []
    for step in range(2):
        if step == 1:
            target.restart()
        (controller,) = target.rpc("vhost_get_controllers")
        lun = controller["backend_specific"]["scsi"][0]["luns"][0]
        found += [lun["serial"], lun.get("uuid") or lun["bdev_name"]]
    target.rpc("vhost_delete_controller", ctrlr="vm-1")
    target.rpc("vhost_create_blk_controller", ctrlr="vm-2", dev_name=volume)
    (controller,) = target.rpc("vhost_get_controllers")
    found.append(controller["backend_specific"]["block"]["serial"])
    target.rpc("vhost_delete_controller", ctrlr="vm-2")
    return found


def test_a_snapshot_that_is_taken_meanwhile_is_not_left_behind(
    stores: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = lvolcopies.start

    def started(*words: Any) -> None:
        start(*words)
        volumes(stores).snapshot(["lvs0/v"], "now")

    monkeypatch.setattr(lvolcopies, "start", started)
    assert "has 1 snapshots, which would stay behind (v@now)" in refused(stores, *MOVE)
    assert paths(stores) == ["lvs0/v", "lvs0/v@now"]


def test_a_note_that_is_damaged_is_said(stores: Target) -> None:
    done(stores, "volume", "create", "lvs1/v", f"{SIZE_MIB}M", "--thin")
    for text in ("{}", "[", '{"of": 1, "path": "x/y", "state": "whole"}'):
        volumes(stores).set_xattr("lvs1/v", notes.XATTR, text)
        assert "the xattr virtlun.move of volume lvs1/v is damaged" in refused(stores, *MOVE)


def test_one_that_has_its_uuid_as_its_name_is_completed(stores: Target) -> None:
    data, uuid = digest(stores, "lvs0/v"), volumes(stores).volume("lvs0/v").uuid
    kill_at(stores, "after bdev_lvol_delete", uuid)
    done(stores, "volume", "move", uuid, "lvs1")
    check_only(stores, "lvs1/v", data)
    said = refused(stores, "volume", "move", uuid, "lvs1")
    assert f"there is no volume {uuid}, and no move of it to lvs1" in said


def test_a_renamed_one_counts_still(stores: Target) -> None:
    """It was about to be deleted when the command was killed."""
    kill_at(stores, "before bdev_lvol_delete")
    done(stores, "volume", "rename", "lvs0/v", "renamed")
    fill(stores, "lvs0/renamed", 2)
    data = digest(stores, "lvs0/renamed")
    done(stores, *MOVE)
    check_only(stores, "lvs1/v", data)
