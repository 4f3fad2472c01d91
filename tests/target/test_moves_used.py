"""A volume that a guest goes on with in another place: which of the two counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from plugin.moves import notes, targetcopy
from plugin.moves.moving import Moved, Mover
from plugin.moves.naming import Domains
from plugin.moves.notes import Note
from pydataplane.client import Client
from pydataplane.errors import (
    BUSY,
    METHOD_NOT_FOUND,
    NO_DATA,
    NO_DEVICE,
    RpcError,
    VolumeError,
)
from pydataplane.volumes import Volumes
from tests.support.night import at_night
from tests.support.target import Target
from tests.target.test_cli import refused
from tests.target.test_lun_copy import lun, moved, start, until_in, uuid_of

__all__ = ["moved"]

pytestmark = pytest.mark.root

VM = {"ctrlr": "vm-0", "scsi_target_num": 0}


def volumes(target: Target) -> Volumes:
    return Volumes(Client(target.rpc_socket))


def note(target: Target, state: notes.State = "mirrored", of: str | None = None) -> None:
    """Notes that lvs1/w is what lvs0/v is being moved to, and is known to guests as that."""
    its, source = volumes(target), uuid_of(target, "lvs0/v")
    notes.write(its, uuid_of(target, "lvs1/w"), Note(of or source, "lvs0/v"), state)
    its.set_xattr("lvs1/w", notes.IDENTITY, source)


def state(target: Target) -> tuple[notes.State, bool]:
    """Returns what is noted at lvs1/w, and whether lvs0/v has moved by its own note."""
    its = volumes(target)
    found = notes.read(its, uuid_of(target, "lvs1/w"))
    assert found is not None
    gone = its.xattrs(uuid_of(target, "lvs0/v")).get(notes.MOVED)
    assert gone is None or json.loads(gone)["to"] == uuid_of(target, "lvs1/w")
    return found.state, gone is not None


def counts(target: Target) -> str:
    found: str = target.rpc("virtlun_lvol_move_check", name="lvs1/w")["counts"]
    return found


def has_moved(target: Target, to: str | None = None) -> None:
    """Notes at lvs0/v that its guest has gone on with lvs1/w, or another one."""
    text = json.dumps({"to": to or uuid_of(target, "lvs1/w"), "path": "lvs1/w"})
    volumes(target).set_xattr("lvs0/v", notes.MOVED, text)


def show(target: Target, volume: str) -> str:
    """Shows a volume to another VM; returns the refusal."""
    with pytest.raises(RpcError) as caught:
        target.add_lun("vm-1", volume)
    assert caught.value.code == BUSY
    return str(caught.value)


@pytest.fixture
def pair(moved: Target) -> Target:
    """A target with lvs0/v as the disk of vm-0, which moves to lvs1/w, and vm-1 without a disk."""
    note(moved)
    moved.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    return moved


def pivot(target: Target) -> None:
    start(target)
    until_in(target, "ready")
    target.rpc("virtlun_lun_copy_pivot", **VM)


def let_go(target: Target) -> None:
    """The VM ends."""
    target.rpc("vhost_scsi_controller_remove_target", **VM)


@pytest.mark.parametrize("killed", [False, at_night(True)])
def test_after_a_pivot_the_old_one_is_no_disk_any_more(pair: Target, killed: bool) -> None:
    serial = lun(pair)["serial"]
    assert "is no disk yet" in show(pair, "lvs1/w")
    pivot(pair)
    if killed:
        pair.kill9()
        pair.start()
    assert state(pair) == ("pivoted", True)
    found = notes.read(volumes(pair), uuid_of(pair, "lvs1/w"))
    assert found is not None and found.pause_us is not None and found.pause_us > 0
    assert counts(pair) == "new"
    assert lun(pair)["bdev_name"] == uuid_of(pair, "lvs1/w")
    let_go(pair)
    said = show(pair, "lvs0/v")
    assert "is no disk any more: its VM went on with volume lvs1/w" in said, said
    assert counts(pair) == "new"
    for method, options in (("virtlun_export_create", {}), ("ublk_start_disk", {"ublk_id": 0})):
        exported = pair.fails(method, bdev_name="lvs0/v", **options)
        assert "is no disk any more" in str(exported), "what it has is no more what the guest has"
    pair.add_lun("vm-0", "lvs1/w")
    assert lun(pair)["serial"] == serial, "the same disk"


def test_a_target_that_ends_in_a_pivot_has_what_it_recorded_count(pair: Target) -> None:
    """It has noted the move, and the record is still of the old volume."""
    note(pair, "pivoted")
    has_moved(pair)
    pair.kill9()
    pair.start()
    assert lun(pair)["bdev_name"] == uuid_of(pair, "lvs0/v")
    assert state(pair) == ("pivoted", False), "which does not count alone"
    assert counts(pair) == "old"
    # Somebody goes on by hand: that is noted as well.
    pivot(pair)
    assert (state(pair), counts(pair)) == (("pivoted", True), "new")
    let_go(pair)
    assert "is no disk any more" in show(pair, "lvs0/v")
    pair.add_lun("vm-1", "lvs1/w")


def test_a_pivot_of_an_earlier_target_is_noted_when_the_disk_is_restored(pair: Target) -> None:
    """Which has noted nothing."""
    pivot(pair)
    note(pair)
    volumes(pair).remove_xattr("lvs0/v", notes.MOVED)
    assert counts(pair) == "new", "as it is recorded"
    pair.restart()
    # At the latest when somebody asks, as the old volume may come later than the disk.
    assert counts(pair) == "new"
    assert state(pair) == ("pivoted", True)


def test_a_pivoted_volume_that_is_away_leaves_the_old_one_no_disk(pair: Target) -> None:
    pivot(pair)
    pair.kill9()
    base = pair.directory / "lvs1.img"
    base.rename(base.with_suffix(".away"))
    pair.start()
    assert "by what is recorded" in str(
        pair.fails("vhost_scsi_controller_add_target", **VM, bdev_name="lvs0/v")
    )
    let_go(pair)
    assert "is no disk any more" in show(pair, "lvs0/v")
    base.with_suffix(".away").rename(base)
    pair.rpc("bdev_uring_create", filename=str(base), name="lvs1-base", block_size=512)
    assert counts(pair) == "new"
    pair.add_lun("vm-0", "lvs1/w")


def test_an_old_volume_that_is_away_may_count(pair: Target) -> None:
    note(pair, "pivoted")
    let_go(pair)
    pair.kill9()
    base = pair.directory / "lvs0.img"
    base.rename(base.with_suffix(".away"))
    pair.start()
    assert counts(pair) == "unknown"
    said = show(pair, "lvs1/w")
    assert "is no disk yet" in said and "virtlun_lvol_remove_xattr of its virtlun.move" in said, (
        said
    )
    base.with_suffix(".away").rename(base)
    pair.rpc("bdev_uring_create", filename=str(base), name="lvs0-base", block_size=512)
    assert counts(pair) == "old"
    pair.add_lun("vm-1", "lvs0/v")


@pytest.mark.parametrize("of", ["copying", "mirrored"])
def test_what_nobody_can_tell_is_no_disk(pair: Target, of: notes.State) -> None:
    note(pair, of)
    let_go(pair)
    assert counts(pair) == "old"
    has_moved(pair)
    assert counts(pair) == "unknown"
    said = show(pair, "lvs0/v")
    assert "nobody can tell whether it counts or volume lvs1/w" in said, said
    assert "is no disk yet" in show(pair, "lvs1/w")
    with pytest.raises(VolumeError, match="nobody can tell whether volume lvs0/v counts") as caught:
        move(pair)
    assert f"remove the xattrs {notes.MOVED} of the one and {notes.XATTR}" in str(caught.value)
    assert (state(pair), counts(pair)) == ((of, True), "unknown"), "nothing is copied"


@pytest.mark.parametrize("of", ["whole", at_night("copying")])
def test_what_a_vm_has_gone_on_with_is_never_copied_over(pair: Target, of: notes.State) -> None:
    """Though nothing but the record says so: that is noted anew, and the move is completed."""
    pivot(pair)
    note(pair, of)
    volumes(pair).remove_xattr("lvs0/v", notes.MOVED)
    assert move(pair).volume.path == "lvs1/w"
    assert lun(pair)["bdev_name"] == uuid_of(pair, "lvs1/w")
    assert [each.path for each in volumes(pair).volumes()] == ["lvs1/w"]


@pytest.mark.parametrize("of", ["copying", "whole"])
def test_who_counts_is_asked_again_when_the_old_volume_is_held(
    pair: Target, monkeypatch: pytest.MonkeyPatch, of: notes.State
) -> None:
    note(pair, of)
    let_go(pair)
    hold = targetcopy.hold

    def held(*words: Any) -> None:
        hold(*words)
        has_moved(pair)

    monkeypatch.setattr(targetcopy, "hold", held)
    with pytest.raises(VolumeError, match="nobody can tell whether volume lvs0/v counts"):
        move(pair)
    assert state(pair) == (of, True), "nothing is copied, and nothing deleted"
    assert disks(pair) == {"vm-0": [], "vm-1": []}, "nobody holds it"


def test_what_has_gone_on_is_a_disk_again_when_the_old_volume_is_lost_for_good(
    pair: Target,
) -> None:
    pivot(pair)
    let_go(pair)
    pair.kill9()
    (pair.directory / "lvs0.img").unlink()
    pair.start()
    with pytest.raises(VolumeError, match="or if it is lost for good") as caught:
        move(pair)
    says = f"remove the xattr {notes.XATTR} of lvs1/w (virtlun_lvol_remove_xattr)"
    assert says in str(caught.value)
    pair.rpc("virtlun_lvol_remove_xattr", name="lvs1/w", xattr_name=notes.XATTR)
    pair.add_lun("vm-0", "lvs1/w")


def test_a_pivot_that_a_command_has_noted_less_of_is_noted_again(pair: Target) -> None:
    """One that was repeated in the same moment."""
    pivot(pair)
    note(pair)
    assert counts(pair) == "new"
    assert state(pair) == ("pivoted", True)


def test_a_volume_that_went_elsewhere_is_no_disk(pair: Target) -> None:
    note(pair, "pivoted")
    let_go(pair)
    has_moved(pair, "6f1c6d64-0000-4000-8000-000000000000")
    assert counts(pair) == "unknown"
    assert "is no disk any more" in show(pair, "lvs0/v")
    assert "is no disk yet" in show(pair, "lvs1/w")


@pytest.mark.parametrize(
    ("of", "says"), [("whole", "new"), ("pivoted", "neither"), ("mirrored", "neither")]
)
def test_what_is_left_of_a_pair(pair: Target, of: notes.State, says: str) -> None:
    """A pivot that was killed before it noted anything at the old one says nothing without that."""
    note(pair, of)
    let_go(pair)
    pair.rpc("bdev_lvol_delete", name="lvs0/v")
    assert counts(pair) == says
    assert "is no disk yet" in show(pair, "lvs1/w"), "the move itself has the rest to do"


def test_who_deletes_an_old_volume_that_has_moved_leaves_the_new_one_in_its_place(
    pair: Target,
) -> None:
    serial = lun(pair)["serial"]
    pivot(pair)
    let_go(pair)
    assert (state(pair), counts(pair)) == (("pivoted", True), "new")
    said = str(pair.fails("bdev_lvol_delete_lvstore", lvs_name="lvs0"))
    assert "volume lvs0/v has moved to lvs1/w: complete that" in said, said
    pair.rpc("bdev_lvol_delete", name="lvs0/v")
    assert counts(pair) == "new"
    pair.add_lun("vm-0", "lvs1/w")
    assert lun(pair)["serial"] == serial, "the same disk"
    let_go(pair)
    pair.kill9()
    pair.start()
    assert counts(pair) == "new"
    assert move(pair).volume.path == "lvs1/w"
    assert notes.XATTR not in volumes(pair).xattrs("lvs1/w"), "the move is complete"
    pair.add_lun("vm-0", "lvs1/w")


def test_an_old_volume_whose_new_one_cannot_be_told_is_not_deleted(pair: Target) -> None:
    pivot(pair)
    let_go(pair)
    pair.kill9()
    base = pair.directory / "lvs1.img"
    base.rename(base.with_suffix(".away"))
    pair.start()
    said = str(pair.fails("bdev_lvol_delete", name="lvs0/v"))
    assert "lvstore lvs1 is not there: load it first" in said, said
    base.with_suffix(".away").rename(base)
    pair.rpc("bdev_uring_create", filename=str(base), name="lvs1-base", block_size=512)
    pair.rpc("bdev_lvol_delete", name="lvs0/v")
    assert counts(pair) == "new"


def test_a_move_that_ends_before_it_deletes_the_old_volume_leaves_the_new_one(
    pair: Target,
) -> None:
    pivot(pair)
    note(pair, "whole")
    let_go(pair)
    assert (state(pair), counts(pair)) == (("whole", True), "new")
    assert "is no disk any more" in show(pair, "lvs0/v")
    pair.add_lun("vm-1", "lvs1/w")
    pair.kill9()
    pair.start()
    assert (state(pair), counts(pair)) == (("whole", True), "new")


class NoDomains:
    """A libvirt without domains."""

    def check_none_saved(self, _: str) -> None:
        pass

    def of_uuid(self, _: str) -> None:
        return None

    def redefine(self, _: str, __: str) -> list[str]:
        return []

    def naming(self, _: str) -> list[str]:
        return []


def move(target: Target) -> Moved:
    its, domains = volumes(target), cast(Domains, NoDomains())
    return Mover(its, its, domains).move("lvs0/v", "lvs1/w", lambda *_: None)


class Killed(BaseException):
    """As SIGKILL ends a process."""


@pytest.mark.parametrize(
    "where",
    [
        at_night("before write"),
        "after write",
        at_night("before delete"),
        "after delete",
        at_night("before remove_xattr"),
        at_night("after remove_xattr"),
    ],
)
def test_the_end_of_a_move_that_is_killed_is_made_up_for(
    pair: Target, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Of one whose VM has gone on with the new volume, and ended; with the target, too."""
    pivot(pair)
    let_go(pair)
    when, step = where.split()
    owner: Any = notes if step == "write" else Volumes
    does = getattr(owner, step)

    def killed(*args: Any, **options: Any) -> None:
        if when == "after":
            does(*args, **options)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(owner, step, killed)
        with pytest.raises(Killed):
            move(pair)
    pair.kill9()
    pair.start()
    if where in ("before write", "after write", "before delete"):
        assert "is no disk any more" in show(pair, "lvs0/v")
    if where == "after delete":
        pair.add_lun("vm-0", "lvs1/w")  # nothing else has what its guest wrote
        let_go(pair)
    if where != "after remove_xattr":
        assert counts(pair) == "new"
        assert move(pair).volume.path == "lvs1/w"
    assert [each.path for each in volumes(pair).volumes()] == ["lvs1/w"]
    assert volumes(pair).xattrs("lvs1/w").keys() == {notes.IDENTITY}
    pair.add_lun("vm-1", "lvs1/w")


def record_too(target: Target, volume: str, ctrlr: str = "vm-1", number: int = 0) -> None:
    """Has the record of a target that has ended say that a controller has a volume (its UUID)."""
    file = target.state_dir / "config.json"
    found = json.loads(file.read_text())
    of = {each["subsystem"]: each["config"] for each in found["subsystems"]}
    calls = of["vhost_scsi"]
    (added,) = (call for call in calls if call["method"] == "vhost_scsi_controller_add_target")
    of_it = {"ctrlr": ctrlr, "scsi_target_num": number, "bdev_name": volume}
    calls.append(added | {"params": added["params"] | of_it})
    file.write_text(json.dumps(found))


def disks(target: Target) -> dict[str, list[str]]:
    """Returns the bdevs of each controller."""
    return {
        each["ctrlr"]: [scsi["luns"][0]["bdev_name"] for scsi in each["backend_specific"]["scsi"]]
        for each in target.rpc("vhost_get_controllers")
    }


def problem(target: Target) -> str:
    (found,) = target.rpc("virtlun_get_status")["restore_problems"]
    return str(found)


@pytest.mark.parametrize("away", [None, "lvs0", "lvs1"])
def test_a_stale_record_of_the_old_volume_takes_nothing_back(
    pair: Target, away: str | None
) -> None:
    """While another VM is on the new one, also where one of them comes later."""
    pivot(pair)
    old, new = uuid_of(pair, "lvs0/v"), uuid_of(pair, "lvs1/w")
    pair.kill9()
    record_too(pair, old)
    base = pair.directory / f"{away}.img"
    if away:
        base.rename(base.with_suffix(".away"))
    pair.start()
    if away:
        assert disks(pair) == {"vm-0": [], "vm-1": []}
        if away == "lvs1":
            assert notes.MOVED in volumes(pair).xattrs(old)
        base.with_suffix(".away").rename(base)
        pair.rpc("bdev_uring_create", filename=str(base), name=f"{away}-base", block_size=512)
    assert disks(pair) == {"vm-0": [new], "vm-1": []}
    assert "does not count while another disk is recorded on volume lvs1/w" in problem(pair)
    assert (state(pair), counts(pair)) == (("pivoted", True), "unknown")
    pair.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-1", scsi_target_num=0)
    assert (state(pair), counts(pair)) == (("pivoted", True), "new")


def test_a_stale_record_of_the_new_volume_notes_nothing(pair: Target) -> None:
    old, new = uuid_of(pair, "lvs0/v"), uuid_of(pair, "lvs1/w")
    pair.kill9()
    record_too(pair, new)
    pair.start()
    assert disks(pair) == {"vm-0": [old], "vm-1": []}
    assert "does not count while another disk is recorded on volume lvs0/v" in problem(pair)
    assert (state(pair), counts(pair)) == (("mirrored", False), "unknown")
    pair.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-1", scsi_target_num=0)
    assert counts(pair) == "old"


def test_a_volume_that_is_recorded_twice_does_not_move(pair: Target) -> None:
    old = uuid_of(pair, "lvs0/v")
    pair.kill9()
    record_too(pair, old)
    pair.start()
    with pytest.raises(
        RpcError, match="is recorded as a disk of controller vm-1 as well"
    ) as caught:
        start(pair)
    assert caught.value.code == BUSY
    pair.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-1", scsi_target_num=0)
    pivot(pair)


def test_a_volume_that_its_own_controller_has_recorded_twice_does_not_move(pair: Target) -> None:
    """What is left of the second one would have the old one count when the first is removed."""
    old = uuid_of(pair, "lvs0/v")
    pair.kill9()
    record_too(pair, old, "vm-0", 1)
    pair.start()
    with pytest.raises(RpcError, match="is recorded as a disk of controller vm-0 as well"):
        start(pair)
    pair.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-0", scsi_target_num=1)
    pivot(pair)


def test_an_old_volume_that_counts_by_another_disk_says_so_before_it_is_shown(pair: Target) -> None:
    """Or it would not count any more when that is gone, whatever this one's guest has written."""
    note(pair, "pivoted")
    has_moved(pair)
    assert "is in use by" in show(pair, "lvs0/v")
    assert state(pair) == ("pivoted", False)


@pytest.mark.parametrize("of", ["copying", "whole"])
def test_a_volume_that_the_move_of_what_nobody_uses_has_takes_no_guest(
    pair: Target, of: notes.State
) -> None:
    note(pair, of)
    with pytest.raises(RpcError, match="have `virtlun volume move` complete that") as caught:
        start(pair)
    assert caught.value.code == BUSY


def test_a_target_of_an_earlier_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would go on with another volume, and note nothing."""

    def has_no_such(_: Client, method: str, **params: Any) -> Any:
        raise RpcError(METHOD_NOT_FOUND, f"method {method} not found")

    monkeypatch.setattr(Client, "call", has_no_such)
    for ask in (notes.counting, notes.check_target):
        with pytest.raises(
            VolumeError, match="`virtlun target upgrade`, and move the volume again"
        ):
            ask(Client(tmp_path / "socket"), "6f1c6d64-0000-4000-8000-000000000000")


def test_what_is_no_move_has_nothing_to_check(pair: Target) -> None:
    for name, code in (("lvs0/v", NO_DATA), ("lvs0/none", NO_DEVICE)):
        with pytest.raises(RpcError) as caught:
            pair.rpc("virtlun_lvol_move_check", name=name)
        assert caught.value.code == code
    assert pair.rpc("virtlun_lvol_move_check", name="lvs1/w") == {
        "of": uuid_of(pair, "lvs0/v"),
        "path": "lvs0/v",
        "state": "mirrored",
        "counts": "old",
        "pause_us": None,
    }


def test_what_counts_is_not_changed_by_who_asks_for_the_old_one(pair: Target) -> None:
    """As a gateway that knows of no pivot."""
    pivot(pair)
    with pytest.raises(RpcError):
        pair.rpc("vhost_scsi_controller_add_target", **VM, bdev_name="lvs0/v")
    assert state(pair) == ("pivoted", True)


def test_a_new_volume_without_the_note_at_the_old_one_does_not_count(pair: Target) -> None:
    note(pair, "pivoted")
    assert "is no disk yet" in show(pair, "lvs1/w")
    let_go(pair)
    pair.add_lun("vm-1", "lvs0/v")


def test_no_other_volume_is_copied_there(pair: Target) -> None:
    note(pair, of="6f1c6d64-0000-4000-8000-000000000000")
    with pytest.raises(RpcError, match="is what volume lvs0/v is being moved to") as caught:
        start(pair)
    assert caught.value.code == BUSY
    volumes(pair).set_xattr("lvs1/w", notes.XATTR, "{")
    with pytest.raises(RpcError, match="nobody can read its xattr"):
        start(pair)


def test_a_copy_that_nobody_moves_notes_nothing(pair: Target) -> None:
    volumes(pair).remove_xattr("lvs1/w", notes.XATTR)
    pivot(pair)
    assert volumes(pair).xattrs("lvs1/w").keys() == {notes.IDENTITY}
    assert notes.MOVED not in volumes(pair).xattrs("lvs0/v")


def test_what_was_left_is_said_without_a_gateway(pair: Target) -> None:
    """Nothing is deleted, and neither goes elsewhere."""
    pivot(pair)
    let_go(pair)
    for of, to, says in (
        ("lvs0/v", "lvs1/w", "a VM has gone on with volume lvs1/w, and no gateway answers"),
        ("lvs0/v", "lvs1/else", "does not count any more: its VM has gone on with another one"),
        ("lvs1/w", "lvs0/else", "is not whole yet: it is being moved there"),
    ):
        said = refused(pair, "volume", "move", of, to)
        assert says in said, said
    assert [each.path for each in volumes(pair).volumes()] == ["lvs0/v", "lvs1/w"]
    assert state(pair) == ("pivoted", True)
