"""A pivot that fails is taken back before its copy ends, in all that can be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from plugin.moves import notes
from plugin.moves.notes import Note
from pydataplane.errors import BUSY, NO_DEVICE, RpcError, VolumeError
from tests.support.initiator import connected
from tests.support.night import at_night
from tests.support.target import Target
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_lun_copy import MIB, SIZE_MIB, VM, lun, moved, start, until_in, uuid_of
from tests.target.test_moves_used import counts, move, note, pair, show, state, volumes
from tests.target.test_upgrade_slow_disk import NEW_PROGRAM

__all__ = ["moved", "pair"]

pytestmark = pytest.mark.root


def refused(target: Target, step: str, why: str) -> None:
    error = str(target.fails(f"virtlun_lun_copy_{step}", **VM))
    assert why in error, error


def starts_once_the_guest_left(target: Target, to: str = "lvs1/w") -> None:
    """Starts a copy whose guest's session has just ended: what it had in flight ends first."""

    def started() -> bool:
        try:
            start(target, to)
        except RpcError as error:
            assert "I/O of the VM that left has not ended" in str(error), error
            return False
        return True

    until(started, "the session has ended")


def is_free(target: Target, volume: str) -> bool:
    with suppress(RpcError):
        target.rpc("bdev_lvol_delete", name=volume)
        return True
    return False


def make_failing(target: Target, failing: str) -> Target:
    """Makes lvs0 and lvs1, of which `failing` is on a disk that can be told to fail."""
    target.start()
    target.make_lvstore("lvs1" if failing == "lvs0" else "lvs0", 160 * MIB)
    file = target.make_file(f"{failing}.img", 160 * MIB)
    target.rpc("bdev_uring_create", filename=str(file), name="base", block_size=512)
    target.rpc("bdev_error_create", base_name="base")
    options = {"bdev_name": "EE_base", "lvs_name": failing, "cluster_sz": 1 * MIB}
    target.rpc("bdev_lvol_create_lvstore", **options)
    target.make_thin("v", SIZE_MIB)
    target.make_thin("w", SIZE_MIB, "lvs1")
    target.attach("vm-0", "lvs0/v")
    note(target)
    return target


@pytest.fixture
def failing(make_target: MakeTarget) -> Target:
    """As `pair`, with lvs0 on a disk that can be told to fail."""
    return make_failing(make_target(), "lvs0")


def fail_writes(target: Target) -> None:
    """Has all writes of that disk fail from now on."""
    options: dict[str, Any] = {"io_type": "write", "error_type": "failure", "num": 1 << 20}
    target.rpc("bdev_error_inject_error", name="EE_base", **options)


def fail_no_more(target: Target) -> None:
    target.rpc("bdev_error_inject_error", name="EE_base", io_type="clear", error_type="failure")
    target.rpc("virtlun_bdev_clear_flush_error", name="EE_base")


@pytest.mark.parametrize("then", ["abort", "pivot"])
def test_a_copy_whose_pivot_cannot_be_recorded_goes_on_until_it_can(
    moved: Target, then: str
) -> None:
    start(moved)
    until_in(moved, "ready")
    in_the_way = moved.state_dir / "config.json.new"
    in_the_way.mkdir()
    refused(moved, "pivot", "that cannot be recorded")
    assert lun(moved)["bdev_name"] == uuid_of(moved, "lvs0/v")
    refused(moved, "abort", "cannot be taken back, and its copy goes on")
    until_in(moved, "ready")
    in_the_way.rmdir()
    moved.rpc(f"virtlun_lun_copy_{then}", **VM)
    gone, left = ("lvs1/w", "lvs0/v") if then == "abort" else ("lvs0/v", "lvs1/w")
    moved.rpc("bdev_lvol_delete", name=gone)
    moved.kill9()
    moved.start()
    assert lun(moved)["bdev_name"] == uuid_of(moved, left)


def taken(target: Target, ctrlr: str = "vm-0") -> int:
    """How many requests the queues of a guest had."""
    (of_vm,) = target.rpc("virtlun_vhost_get_stats", name=ctrlr)
    return int(of_vm["requests"])


@pytest.mark.nightly
def test_a_copy_of_a_disk_whose_io_does_not_end_can_be_aborted_though_nothing_can_be_recorded(
    failing: Target,
) -> None:
    """Its pivot has written nothing yet."""
    volumes(failing).remove_xattr("lvs1/w", notes.XATTR)
    start(failing)
    until_in(failing, "ready")
    with connected(failing) as guest:
        guest.write(0, b"a" * 512)
        options: dict[str, Any] = {"io_type": "write", "error_type": "pending", "num": 1}
        failing.rpc("bdev_error_inject_error", name="EE_base", **options)
        thread = threading.Thread(target=lambda: guest.write(0, b"b" * 512))
        before = taken(failing)
        thread.start()
        until(lambda: taken(failing) > before, "the write")
        in_the_way = failing.state_dir / "config.json.new"
        in_the_way.mkdir()
        refused(failing, "pivot", "has not ended after")
        failing.rpc("bdev_error_resume_pending", name="EE_base")
        thread.join(30)
        failing.rpc("virtlun_lun_copy_abort", **VM)
        assert guest.read(0, 1) == b"b" * 512
    in_the_way.rmdir()


def test_a_move_whose_pivot_cannot_be_recorded_leaves_the_new_volume_no_disk(pair: Target) -> None:
    start(pair)
    until_in(pair, "ready")
    in_the_way = pair.state_dir / "config.json.new"
    in_the_way.mkdir()
    refused(pair, "pivot", "that cannot be recorded")
    # The old one's note is not taken back as long as the record may be of the new one.
    assert (state(pair), counts(pair)) == (("mirrored", True), "old")
    in_the_way.rmdir()
    pair.rpc("virtlun_lun_copy_abort", **VM)
    assert (state(pair), counts(pair)) == (("mirrored", False), "old")


@pytest.mark.parametrize("killed", [True, at_night(False)])
def test_a_copy_that_fails_after_a_pivot_that_cannot_be_recorded_has_the_old_one_count(
    pair: Target, killed: bool
) -> None:
    """Which alone has what its guest writes then, until the VM ends, and the target."""
    start(pair)
    until_in(pair, "ready")
    in_the_way = pair.state_dir / "config.json.new"
    in_the_way.mkdir()
    refused(pair, "pivot", "that cannot be recorded")
    with suppress(RpcError):  # it is not recorded
        pair.rpc("bdev_lvol_resize", name="lvs1/w", size_in_mib=SIZE_MIB + 4)
    until_in(pair, "failed")
    assert state(pair) == ("mirrored", True)
    with suppress(RpcError):
        pair.rpc("vhost_scsi_controller_remove_target", **VM)
    if killed:
        pair.kill9()
    in_the_way.rmdir()
    if killed:
        pair.start()
        assert lun(pair)["bdev_name"] == uuid_of(pair, "lvs0/v")
        pair.rpc("vhost_scsi_controller_remove_target", **VM)
    until(lambda: state(pair) == ("mirrored", False), "all is taken back")
    assert counts(pair) == "old"
    pair.add_lun("vm-1", "lvs0/v")


def test_a_move_whose_pivot_cannot_be_noted_at_the_old_volume_leaves_the_new_one_no_disk(
    failing: Target,
) -> None:
    start(failing)
    until_in(failing, "ready")
    fail_writes(failing)
    refused(failing, "pivot", "that cannot be noted at the volumes")
    found = notes.read(volumes(failing), uuid_of(failing, "lvs1/w"))
    assert found is not None and found.state == "mirrored"
    refused(failing, "abort", "cannot be taken back, and its copy goes on")
    # Nor does a copy that fails let go of them: what its guest writes is on the old one alone.
    failing.rpc("bdev_lvol_resize", name="lvs1/w", size_in_mib=SIZE_MIB + 4)
    until_in(failing, "failed")
    failing.rpc("vhost_scsi_controller_remove_target", **VM)
    assert not is_free(failing, "lvs1/w")
    failing.kill9()
    failing.start()
    assert counts(failing) in ("old", "unknown")


def test_a_disk_that_ended_with_its_bdev_is_forgotten_when_it_is_removed(failing: Target) -> None:
    """As an lvstore that cannot be unloaded in order leaves its disks recorded. So is its copy."""
    volumes(failing).remove_xattr("lvs1/w", notes.XATTR)
    start(failing)
    until_in(failing, "ready")
    fail_writes(failing)
    with suppress(RpcError):
        failing.rpc("bdev_uring_delete", name="base")

    def has_no_disk() -> bool:
        (controller,) = failing.rpc("vhost_get_controllers")
        return bool(controller["backend_specific"]["scsi"] == [])

    def has_failed() -> bool:
        # One that was over before its disk went is forgotten with it.
        copies = failing.rpc("virtlun_lun_copy_check", **VM)
        return all(copy["state"] == "failed" for copy in copies)

    until(has_no_disk, "the disk is gone")
    until(has_failed, "the copy has failed")
    failing.rpc("vhost_scsi_controller_remove_target", **VM)
    assert failing.rpc("virtlun_lun_copy_check") == []
    error = failing.fails("vhost_scsi_controller_remove_target", **VM)
    assert isinstance(error, RpcError) and error.code == NO_DEVICE

    def is_added() -> bool:
        with suppress(RpcError):
            failing.add_lun("vm-0", "lvs1/w")
            return True
        return False

    until(is_added, "the copy has let go of it")
    refused(failing, "pivot", "is not being copied")


def test_what_is_left_of_a_failed_pivot_takes_no_later_one_back(make_target: MakeTarget) -> None:
    """Nor does a later one begin before that is taken back, also when its VM has ended."""
    target = make_failing(make_target(), "lvs1")
    start(target)
    until_in(target, "ready")
    fail_writes(target)
    refused(target, "pivot", "that cannot be noted at the volumes")
    # Of another move.
    elsewhere = json.dumps({"to": "6f1c6d64-0000-4000-8000-000000000000", "path": "lvs2/x"})
    volumes(target).set_xattr("lvs0/v", notes.MOVED, elsewhere)
    refused(target, "abort", "cannot be taken back, and its copy goes on")
    assert volumes(target).xattrs("lvs0/v")[notes.MOVED] == elsewhere
    volumes(target).remove_xattr("lvs0/v", notes.MOVED)
    target.rpc("vhost_scsi_controller_remove_target", **VM)
    target.add_lun("vm-0", "lvs0/v")
    target.make_lvstore("lvs2", 160 * MIB)
    target.make_thin("x", SIZE_MIB, "lvs2")
    for noted in (False, True):
        if noted:
            of = Note(uuid_of(target, "lvs0/v"), "lvs0/v")
            notes.write(volumes(target), uuid_of(target, "lvs2/x"), of, "mirrored")
        with pytest.raises(RpcError, match="failed, and is not taken back yet") as caught:
            start(target, "lvs2/x")
        assert caught.value.code == BUSY
    assert lun(target)["bdev_name"] == uuid_of(target, "lvs0/v")
    fail_no_more(target)
    # Which is in use by what is left, until all is taken back.
    until(lambda: is_free(target, "lvs1/w"), "the first destination is free")
    start(target, "lvs2/x")
    until_in(target, "ready")
    target.rpc("virtlun_lun_copy_pivot", **VM)
    gone = json.loads(volumes(target).xattrs("lvs0/v")[notes.MOVED])
    assert gone["to"] == uuid_of(target, "lvs2/x") == lun(target)["bdev_name"]


def test_a_new_volume_whose_disk_is_pulled_keeps_the_old_one_from_nothing(
    make_target: MakeTarget,
) -> None:
    """Though it is noted there nowhere that a pivot failed. Nor does it count when it is back."""
    target = make_failing(make_target(), "lvs1")
    new = uuid_of(target, "lvs1/w")
    with connected(target) as guest:
        guest.write(0, b"a" * 512)
        start(target)
        until_in(target, "ready")
        fail_writes(target)
        refused(target, "pivot", "that cannot be noted at the volumes")
        refused(target, "abort", "cannot be taken back, and its copy goes on")
        # That waits until the copy, which says that it failed until it is ended, has let go.
        thread = threading.Thread(target=lambda: is_deleted(target, "base"))
        thread.start()
        guest.write(0, b"b" * 512)
        until(lambda: is_over(target), "the copy is over")
        thread.join(30)
        target.make_lvstore("lvs2", 160 * MIB)
        target.make_thin("x", SIZE_MIB, "lvs2")
        of = Note(uuid_of(target, "lvs0/v"), "lvs0/v")
        notes.write(volumes(target), uuid_of(target, "lvs2/x"), of, "mirrored")
        start(target, "lvs2/x")
        until_in(target, "ready")
        target.rpc("virtlun_lun_copy_pivot", **VM)
        assert guest.read(0, 1) == b"b" * 512
    file = str(target.directory / "lvs1.img")
    target.rpc("bdev_uring_create", filename=file, name="base", block_size=512)
    until(lambda: shows(target, new), "the disk is there again")
    assert target.rpc("virtlun_lvol_move_check", name=new)["counts"] == "unknown"
    with pytest.raises(RpcError, match="is no disk yet: volume lvs0/v is being moved to it"):
        target.add_lun("vm-1", "lvs1/w")
    assert lun(target)["bdev_name"] == uuid_of(target, "lvs2/x")


def is_deleted(target: Target, base: str) -> bool:
    with suppress(RpcError):
        target.rpc("bdev_uring_delete", name=base)
        return True
    return False


def is_over(target: Target) -> bool:
    with suppress(RpcError):  # while its lvstore is being unloaded, or when it is over
        target.rpc("virtlun_lun_copy_abort", **VM)
    return bool(target.rpc("virtlun_lun_copy_check") == [])


def shows(target: Target, bdev: str) -> bool:
    with suppress(RpcError):
        return bool(target.rpc("bdev_get_bdevs", name=bdev))
    return False


def test_while_a_pivot_is_not_taken_back_that_is_said(pair: Target) -> None:
    """Of a VM that has ended: then nobody can tell which volume counts."""
    start(pair)
    until_in(pair, "ready")
    in_the_way = pair.state_dir / "config.json.new"
    in_the_way.mkdir()
    refused(pair, "pivot", "that cannot be recorded")
    with suppress(RpcError):  # that is not recorded
        pair.rpc("vhost_scsi_controller_remove_target", **VM)
    assert (state(pair), counts(pair)) == (("mirrored", True), "unknown")
    said = show(pair, "lvs0/v")
    assert "a pivot of bdev" in said and "that cannot be recorded" in said, said
    with pytest.raises(VolumeError, match="mend what the target's log says"):
        move(pair)
    give_up(pair)
    assert "of target 0 of controller vm-0 has not ended: a pivot of bdev" in pair.words()
    in_the_way.rmdir()
    until(lambda: state(pair) == ("mirrored", False), "all is taken back")
    pair.add_lun("vm-1", "lvs0/v")


def test_a_move_from_a_disk_that_takes_no_changes_is_refused_before_it_writes_anything(
    failing: Target,
) -> None:
    start(failing)
    until_in(failing, "ready")
    fail_writes(failing)
    with pytest.raises(RpcError):
        volumes(failing).set_xattr("lvs0/v", "owner", "vm-0")
    refused(failing, "pivot", "lvstore lvs0 takes no changes")
    failing.rpc("virtlun_lun_copy_abort", **VM)
    with pytest.raises(RpcError, match="`virtlun bdev clear-flush-error EE_base` when that is"):
        start(failing)
    # The data goes on, and goes elsewhere without notes.
    volumes(failing).remove_xattr("lvs1/w", notes.XATTR)
    start(failing)
    until_in(failing, "ready")
    failing.rpc("virtlun_lun_copy_pivot", **VM)
    assert lun(failing)["bdev_name"] == uuid_of(failing, "lvs1/w")


def give_up(target: Target) -> None:
    """Has a program take over that ends when the guests are held for it, if they are."""
    subprocess.run(
        [sys.executable, "-c", NEW_PROGRAM, f"{target.rpc_socket}.upgrade"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        input=b"\n",
        timeout=60,
        check=False,  # it is ended
    )


def test_a_copy_that_an_upgrade_cannot_end_has_it_refused_before_any_guest_is_held(
    pair: Target,
) -> None:
    """What the copy has of its volumes keeps them from being given away, and taken back then."""
    start(pair)
    until_in(pair, "ready")
    pair.make_lvstore("lvs2", 160 * MIB)
    pair.make_thin("x", SIZE_MIB, "lvs2")
    in_the_way = pair.state_dir / "config.json.new"
    in_the_way.mkdir()
    refused(pair, "pivot", "that cannot be recorded")
    with connected(pair) as guest:
        guest.write(0, b"a" * 512)
        give_up(pair)
        assert "of target 0 of controller vm-0 has not ended: a pivot of bdev" in pair.words()
        assert lun(pair)["bdev_name"] == uuid_of(pair, "lvs0/v")
        assert guest.read(0, 1) == b"a" * 512
        with pytest.raises(RpcError, match=r"is being copied to bdev .*; pivot or abort") as caught:
            start(pair, "lvs2/x")
        assert caught.value.code == BUSY
        until_in(pair, "ready")  # others, too, would go on
        in_the_way.rmdir()
        pair.rpc("virtlun_lun_copy_abort", **VM)
        assert (state(pair), counts(pair)) == (("mirrored", False), "old")
        assert guest.read(0, 1) == b"a" * 512
    starts_once_the_guest_left(pair, "lvs2/x")
    pair.upgrade()
    assert lun(pair)["bdev_name"] == uuid_of(pair, "lvs0/v")


def pending(target: Target) -> int:
    """How many more writes of the disk that can fail are to wait."""
    (bdev,) = target.rpc("bdev_get_bdevs", name="EE_base")
    (injected,) = bdev["driver_specific"]["error_disk"]["injected"].values()
    return int(injected["num"])


def test_what_is_taken_back_late_leaves_a_later_disk_of_that_number_alone(
    make_target: MakeTarget,
) -> None:
    target = make_failing(make_target(), "lvs1")
    target.make_lvstore("lvs2", 160 * MIB)
    target.make_thin("x", SIZE_MIB, "lvs2")
    with connected(target) as guest:
        guest.write(0, b"a" * 512)
    starts_once_the_guest_left(target)
    until_in(target, "ready")
    in_the_way = target.state_dir / "config.json.new"
    in_the_way.mkdir()
    refused(target, "pivot", "that cannot be recorded")
    in_the_way.rmdir()
    options: dict[str, Any] = {"io_type": "write", "error_type": "pending", "num": 1 << 20}
    target.rpc("bdev_error_inject_error", name="EE_base", **options)
    # That ends the copy.
    target.rpc("bdev_lvol_resize", name="lvs0/v", size_in_mib=SIZE_MIB + 4)
    until(lambda: pending(target) < 1 << 20, "the note at lvs1/w waits")
    target.rpc("vhost_scsi_controller_remove_target", **VM)
    target.add_lun("vm-0", "lvs2/x")
    options = {"io_type": "clear", "error_type": "failure"}
    target.rpc("bdev_error_inject_error", name="EE_base", **options)
    target.rpc("bdev_error_resume_pending", name="EE_base")
    until(lambda: is_free(target, "lvs1/w"), "all is taken back")
    with connected(target) as guest:
        assert guest.read(0, 1) == bytes(512)


@pytest.mark.nightly
def test_a_copy_ends_with_a_disk_whose_io_has_not(failing: Target) -> None:
    """That goes when it has, and its number is another one's then."""
    volumes(failing).remove_xattr("lvs1/w", notes.XATTR)
    start(failing)
    until_in(failing, "ready")
    with connected(failing) as guest:
        options: dict[str, Any] = {"io_type": "write", "error_type": "pending", "num": 1}
        failing.rpc("bdev_error_inject_error", name="EE_base", **options)
        thread = threading.Thread(target=lambda: guest.write(0, b"b" * 512))
        before = taken(failing)
        thread.start()
        until(lambda: taken(failing) > before, "the write")
        error = failing.fails("vhost_scsi_controller_remove_target", **VM)
        assert isinstance(error, RpcError) and error.code == BUSY
        assert failing.rpc("virtlun_lun_copy_check") == []
        failing.rpc("bdev_error_resume_pending", name="EE_base")
        thread.join(30)
