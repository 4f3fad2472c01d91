"""A guest's volume is moved to another lvstore while the guest writes to it."""

from __future__ import annotations

from typing import Any

import pytest

from pydataplane.domain import reconcile
from pydataplane.domain.errors import ReconcileError
from pydataplane.domain.model import FrontEnd, LunPlan, Plan, VolumeRef
from pydataplane.domain.observed import observe
from pydataplane.errors import BUSY, INVALID, NO_DEVICE, RpcError
from tests.support.initiator import Initiator, connected
from tests.support.night import at_night
from tests.support.target import Target
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_blk import GET_ID
from tests.target.test_upgrade import FullQueue, Load

MIB = 1 << 20
SIZE_MIB = 40
VM = {"ctrlr": "vm-0", "scsi_target_num": 0}
SLOW = 1
"""Bytes a second with which a copy takes longer than a test."""
BLOCK = 512


@pytest.fixture
def moved(make_target: MakeTarget) -> Target:
    """A target with the thin volume lvs0/v as the disk of vm-0, and lvs1/w, as large, beside it."""
    target = make_target().start()
    for store in ("lvs0", "lvs1"):
        target.make_lvstore(store, 160 * MIB)
    target.make_thin("v", SIZE_MIB)
    target.make_thin("w", SIZE_MIB, "lvs1")
    target.attach("vm-0", "lvs0/v")
    return target


def uuid_of(target: Target, name: str) -> str:
    found: str = target.rpc("bdev_get_bdevs", name=name)[0]["uuid"]
    return found


def start(target: Target, to: str = "lvs1/w", **options: Any) -> None:
    assert target.rpc("virtlun_lun_copy_start", **VM, dst_bdev_name=to, **options) is True


def copy_of(target: Target) -> dict[str, Any]:
    (copy,) = target.rpc("virtlun_lun_copy_check", **VM)
    return dict(copy)


def until_in(target: Target, state: str) -> dict[str, Any]:
    def there() -> dict[str, Any] | None:
        copy = copy_of(target)
        assert copy["state"] in ("copying", "ready", state), copy
        return copy if copy["state"] == state else None

    return until(there, f"a copy that is {state}")


def lun(target: Target) -> dict[str, Any]:
    (controller,) = target.rpc("vhost_get_controllers", name="vm-0")
    found: dict[str, Any] = controller["backend_specific"]["scsi"][0]["luns"][0]
    return found


def identity(guest: Initiator) -> list[bytes]:
    """Standard INQUIRY data, and the pages 80h and 83h."""
    cdbs = ([0x12, 0, 0, 0, 255, 0], [0x12, 1, 0x80, 0, 255, 0], [0x12, 1, 0x83, 0, 255, 0])
    return [guest.cdb(bytes(cdb), data_in_len=255)["data_in"] for cdb in cdbs]


def flush(guest: Initiator) -> None:
    answer = guest.cdb(bytes([0x35, *bytes(9)]))
    assert (answer["response"], answer["status"]) == (0, 0), answer


@pytest.mark.nightly
def test_a_guest_with_a_full_queue_goes_on_through_copy_and_pivot(moved: Target) -> None:
    source, destination = uuid_of(moved, "lvs0/v"), uuid_of(moved, "lvs1/w")
    with FullQueue(moved, "vm-0", 8) as load:
        until(lambda: moved.rpc("virtlun_vhost_get_stats")[0]["requests"] > 500, "I/O")
        start(moved, bytes_per_second=24 * MIB)
        copy = copy_of(moved)
        assert (copy["src_bdev_name"], copy["dst_bdev_name"]) == (source, destination)
        assert copy["total_bytes"] == SIZE_MIB * MIB
        assert lun(moved)["bdev_name"] == source
        assert until_in(moved, "ready")["copied_bytes"] == SIZE_MIB * MIB
        assert moved.rpc("virtlun_lun_copy_pivot", **VM) is True
        assert load.runs(), "it was over before the guest was on the copy"
        assert lun(moved)["bdev_name"] == destination
        # Nobody needs it any more.
        moved.rpc("bdev_lvol_delete", name="lvs0/v")
        load.check()
    assert moved.rpc("virtlun_lun_copy_check") == []


@pytest.mark.nightly
@pytest.mark.parametrize("serial", [None, at_night("disk-1")])
def test_a_virtio_blk_disk_goes_over_as_well(moved: Target, serial: str | None) -> None:
    moved.rpc("vhost_delete_controller", ctrlr="vm-0")
    given = {} if serial is None else {"serial": serial}
    moved.rpc("vhost_create_blk_controller", ctrlr="vm-0", dev_name="lvs0/v", **given)

    def shown() -> bytes:
        with Initiator(moved.vhost_dir / "vm-0") as guest:
            guest.send("connect", kind="blk")
            answer: bytes = guest.send("blk", kind=GET_ID, sector=0, data_in_len=20)["data_in"]
            return answer

    before = shown()
    with FullQueue(moved, "vm-0", 8, blk=True) as load:
        until(lambda: moved.rpc("virtlun_vhost_get_stats")[0]["requests"] > 500, "I/O")
        start(moved, bytes_per_second=24 * MIB)
        until_in(moved, "ready")
        moved.rpc("virtlun_lun_copy_abort", **VM)
        start(moved)
        until_in(moved, "ready")
        assert moved.rpc("virtlun_lun_copy_pivot", **VM) is True
        assert load.runs(), "it was over before the guest was on the copy"
        moved.rpc("bdev_lvol_delete", name="lvs0/v")
        load.check()
    destination = uuid_of(moved, "lvs1/w")
    for _ in range(2):
        (controller,) = moved.rpc("vhost_get_controllers")
        assert controller["backend_specific"]["block"]["bdev"] == destination
        assert shown() == before
        moved.restart()


def test_the_guest_sees_the_same_disk_also_after_a_restart(moved: Target) -> None:
    with connected(moved) as guest:
        guest.write(100, b"\1" * 4096)
        before = identity(guest)
        assert uuid_of(moved, "lvs0/v").encode() in before[1]
        start(moved)
        until_in(moved, "ready")
        guest.write(5000, b"\2" * 4096)
        moved.rpc("virtlun_lun_copy_pivot", **VM)
        # No unit attention either: nothing of what the guest knows has changed.
        answer = guest.cdb(bytes(6))
        assert (answer["response"], answer["status"]) == (0, 0), answer
        assert identity(guest) == before
        assert (guest.read(100, 8), guest.read(5000, 8)) == (b"\1" * 4096, b"\2" * 4096)
        guest.write(9000, b"\3" * 4096)
    moved.restart()
    assert lun(moved)["bdev_name"] == uuid_of(moved, "lvs1/w")
    with connected(moved) as guest:
        assert identity(guest) == before
        assert guest.read(9000, 8) == b"\3" * 4096


def test_zeros_take_no_room_in_a_thin_destination(moved: Target) -> None:
    with connected(moved) as guest:
        for at in (0, 30):
            guest.write(at * MIB // BLOCK, b"\7" * MIB)
        guest.write(20 * MIB // BLOCK, bytes(MIB))
        start(moved)
        until_in(moved, "ready")
        ranges = moved.rpc("virtlun_lvol_get_allocated_ranges", name="lvs1/w")["ranges"]
        assert [each["offset"] // MIB for each in ranges] == [0, 30]
        moved.rpc("virtlun_lun_copy_pivot", **VM)
        assert guest.read(20 * MIB // BLOCK, 2048) == bytes(MIB)


def test_what_lay_on_the_destination_is_gone(moved: Target) -> None:
    moved.attach("vm-1", "lvs1/w")
    with connected(moved, "vm-1") as other:
        other.write(10 * MIB // BLOCK, b"\6" * MIB)
    moved.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
    with connected(moved) as guest:
        guest.write(0, b"\5" * 4096)
        start(moved)
        until_in(moved, "ready")
        moved.rpc("virtlun_lun_copy_pivot", **VM)
        assert guest.read(10 * MIB // BLOCK, 2048) == bytes(MIB)
        assert guest.read(0, 8) == b"\5" * 4096


def test_an_aborted_copy_leaves_the_guest_and_frees_the_destination(moved: Target) -> None:
    with Load(moved, "vm-0") as load:
        load.wait()
        for state, limit in (("copying", SLOW), ("ready", 0)):
            start(moved, bytes_per_second=limit)
            until_in(moved, state)
            load.wait()
            busy = moved.fails("bdev_lvol_delete", name="lvs1/w")
            assert "the copy of target 0 of controller vm-0" in str(busy)
            assert moved.rpc("virtlun_lun_copy_abort", **VM) is True
            assert moved.rpc("virtlun_lun_copy_check") == []
            load.wait()
        moved.rpc("bdev_lvol_delete", name="lvs1/w")
        shown = lun(moved)
        assert (shown["bdev_name"], shown["uuid"]) == (uuid_of(moved, "lvs0/v"), None)
        load.check()


def test_a_target_that_is_killed_before_the_pivot_is_on_the_source(moved: Target) -> None:
    with connected(moved) as guest:
        guest.write(0, b"\1" * 4096)
        start(moved)
        until_in(moved, "ready")
        guest.write(8, b"\2" * 4096)
        moved.kill9()
    moved.start()
    assert moved.rpc("virtlun_lun_copy_check") == []
    assert lun(moved)["bdev_name"] == uuid_of(moved, "lvs0/v")
    with connected(moved) as guest:
        assert guest.read(0, 16) == b"\1" * 4096 + b"\2" * 4096
    moved.rpc("bdev_lvol_delete", name="lvs1/w")


def test_a_target_that_is_killed_after_the_pivot_is_on_the_destination(moved: Target) -> None:
    with connected(moved) as guest:
        guest.write(0, b"\1" * 4096)
        before = identity(guest)
        start(moved)
        until_in(moved, "ready")
        moved.rpc("virtlun_lun_copy_pivot", **VM)
        guest.write(8, b"\2" * 4096)
        moved.kill9()
    moved.start()
    assert lun(moved)["bdev_name"] == uuid_of(moved, "lvs1/w")
    with connected(moved) as guest:
        assert guest.read(0, 16) == b"\1" * 4096 + b"\2" * 4096
        assert identity(guest) == before


def test_an_upgrade_loses_the_copy_and_not_the_guest(moved: Target) -> None:
    with Load(moved, "vm-0") as load:
        load.wait()
        start(moved, bytes_per_second=SLOW)
        load.wait()
        moved.upgrade()
        load.wait()
        assert moved.rpc("virtlun_lun_copy_check") == []
        assert lun(moved)["bdev_name"] == uuid_of(moved, "lvs0/v")
        assert "is lost: the target is being upgraded" in moved.words()
        # And once more from the beginning.
        start(moved)
        until_in(moved, "ready")
        moved.rpc("virtlun_lun_copy_pivot", **VM)
        load.wait()
        moved.upgrade()
        load.wait()
        assert lun(moved)["bdev_name"] == uuid_of(moved, "lvs1/w")
        load.check()


def test_a_larger_destination_makes_a_larger_disk_of_which_the_guest_is_told(moved: Target) -> None:
    moved.make_thin("large", SIZE_MIB + 8, "lvs1")
    with connected(moved) as guest:
        start(moved, "lvs1/large")
        until_in(moved, "ready")
        moved.rpc("virtlun_lun_copy_pivot", **VM)
        sense = guest.cdb(bytes(6))["sense"]
        assert (sense[2] & 15, sense[12], sense[13]) == (6, 0x2A, 0x09)
        guest.ready()
        capacity = guest.cdb(bytes([0x25, *bytes(9)]), data_in_len=8)["data_in"]
        assert int.from_bytes(capacity[:4], "big") + 1 == (SIZE_MIB + 8) * MIB // BLOCK


def test_a_thick_destination_takes_no_unmap_and_the_guest_is_told(moved: Target) -> None:
    moved.rpc("bdev_lvol_create", lvs_name="lvs1", lvol_name="thick", size_in_mib=SIZE_MIB)
    with connected(moved) as guest:
        guest.write(64, b"\4" * 4096)
        start(moved, "lvs1/thick")
        until_in(moved, "ready")
        # To the guest it is thin still.
        unmap = bytes([0, 22, 0, 16, 0, 0, 0, 0, *(64).to_bytes(8, "big"), 0, 0, 0, 8, 0, 0, 0, 0])
        answer = guest.cdb(bytes([0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0]), data_out=unmap)
        assert (answer["response"], answer["status"]) == (0, 0), answer
        moved.rpc("virtlun_lun_copy_pivot", **VM)
        sense = guest.cdb(bytes(6))["sense"]
        assert (sense[2] & 15, sense[12], sense[13]) == (6, 0x3F, 0x03)
        guest.ready()
        assert guest.read(64, 8) == bytes(4096)


def test_a_bdev_that_changes_ends_its_copy_in_a_sentence(moved: Target) -> None:
    with Load(moved, "vm-0") as load:
        start(moved, bytes_per_second=SLOW)
        moved.rpc("bdev_lvol_resize", name="lvs1/w", size_in_mib=SIZE_MIB + 4)
        failed = until_in(moved, "failed")
        assert failed["error"].endswith(f"bdev {failed['dst_bdev_name']} was resized"), failed
        assert moved.fails("virtlun_lun_copy_pivot", **VM)
        # Another one takes its place.
        moved.make_thin("x", SIZE_MIB, "lvs1")
        until(lambda: copied_again(moved, "lvs1/x"), "the first copy is over")
        until_in(moved, "ready")
        moved.rpc("virtlun_lun_copy_pivot", **VM)
        load.wait()
        load.check()


def copied_again(target: Target, to: str = "lvs1/w", **options: Any) -> bool:
    try:
        start(target, to, **options)
    except RpcError as error:
        assert error.code == BUSY, error
        return False
    return True


def test_a_copy_ends_with_its_target(moved: Target) -> None:
    start(moved, bytes_per_second=SLOW)
    # What is no number of a target is not all of the controller's.
    with pytest.raises(RpcError, match="target 256"):
        moved.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-0", scsi_target_num=256)
    assert copy_of(moved)["state"] in ("copying", "ready")
    moved.rpc("vhost_scsi_controller_remove_target", **VM)
    assert moved.rpc("virtlun_lun_copy_check") == []
    moved.add_lun("vm-0", "lvs0/v")
    until(lambda: copied_again(moved), "the destination is free")
    moved.rpc("vhost_delete_controller", ctrlr="vm-0")
    assert moved.rpc("virtlun_lun_copy_check") == []

    def deleted() -> bool:
        try:
            return bool(moved.rpc("bdev_lvol_delete", name="lvs1/w"))
        except RpcError as error:
            assert error.code == BUSY, error
            return False

    until(deleted, "the destination is free")


@pytest.mark.nightly
def test_the_limit_of_a_copy_is_changed_while_it_goes_on(moved: Target) -> None:
    with connected(moved) as guest:
        for at in range(0, SIZE_MIB, 2):
            guest.write(at * MIB // BLOCK, b"\1" * MIB)
    # The guest may not have left yet.
    until(lambda: copied_again(moved, bytes_per_second=1), "a copy")
    assert copy_of(moved)["bytes_per_second"] == 1
    early = moved.fails("virtlun_lun_copy_pivot", **VM)
    assert isinstance(early, RpcError)
    assert (early.code, "wait until all are" in str(early)) == (BUSY, True)
    assert moved.rpc("virtlun_lun_copy_set_limit", **VM, bytes_per_second=0) is True
    until_in(moved, "ready")


def test_what_cannot_be_copied_is_refused(moved: Target) -> None:
    moved.make_thin("small", SIZE_MIB - 1, "lvs1")
    moved.rpc("bdev_malloc_create", name="m0", num_blocks=SIZE_MIB * MIB // 4096, block_size=4096)
    moved.add_lun("vm-0", "lvs1/small", 1, shareable=True)

    def refused(to: str, code: int, words: str, number: int = 0) -> None:
        vm = {"ctrlr": "vm-0", "scsi_target_num": number}
        error = moved.fails("virtlun_lun_copy_start", **vm, dst_bdev_name=to)
        assert isinstance(error, RpcError)
        assert (error.code, words in str(error)) == (code, True), error

    refused("lvs1/none", NO_DEVICE, "there is no bdev lvs1/none")
    refused("lvs1/w", NO_DEVICE, "has no target 9", 9)
    refused("lvs0/v", BUSY, "in use by target 0 of controller vm-0")
    refused("lvs1-base", BUSY, "in use by lvstore lvs1")
    refused("m0", INVALID, "has blocks of 4096 bytes")
    refused("lvs1/w", BUSY, "is shareable", 1)
    moved.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-0", scsi_target_num=1)
    refused("lvs1/small", INVALID, "use a larger one")
    for method in ("abort", "pivot"):
        assert "is not being copied" in str(moved.fails(f"virtlun_lun_copy_{method}", **VM))
    start(moved)
    refused("lvs1/w", BUSY, "pivot or abort that first")


@pytest.mark.parametrize("blk", [False, True])
def test_a_pivoted_disk_is_never_shown_on_what_its_guest_has_left(moved: Target, blk: bool) -> None:
    """As a gateway asks for that which was killed in the pivot, while the new disk is away."""
    if blk:
        moved.rpc("vhost_delete_controller", ctrlr="vm-0")
        moved.rpc("vhost_create_blk_controller", ctrlr="vm-0", dev_name="lvs0/v")
    start(moved)
    until_in(moved, "ready")
    moved.rpc("virtlun_lun_copy_pivot", **VM)
    if not blk:
        with connected(moved) as guest:
            guest.write(0, b"\1" * 4096)
            flush(guest)
    base = moved.directory / "lvs1.img"
    moved.kill9()
    base.rename(base.with_suffix(".away"))
    moved.start()

    def refused(method: str, **params: Any) -> None:
        error = moved.fails(method, ctrlr="vm-0", **params)
        assert isinstance(error, RpcError) and error.code == BUSY, error
        assert "by what is recorded, and cannot be shown (" in str(error), error

    if blk:
        refused("vhost_create_blk_controller", dev_name="lvs0/v")
    else:
        refused("vhost_scsi_controller_add_target", scsi_target_num=0, bdev_name="lvs0/v")
        # Nor has another disk its number, which a guest would take for it.
        any_number = {"scsi_target_num": -1, "bdev_name": "lvs0/v"}
        assert moved.rpc("vhost_scsi_controller_add_target", ctrlr="vm-0", **any_number) == 1
        moved.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-0", scsi_target_num=1)
    base.with_suffix(".away").rename(base)
    moved.rpc("bdev_uring_create", filename=str(base), name="lvs1-base", block_size=512)
    new = uuid_of(moved, "lvs1/w")
    (controller,) = moved.rpc("vhost_get_controllers")
    if blk:
        assert controller["backend_specific"]["block"]["bdev"] == new
    else:
        assert lun(moved)["bdev_name"] == new
        with connected(moved) as guest:
            assert guest.read(0, 8) == b"\1" * 4096


def test_what_is_recorded_of_a_disk_goes_when_it_is_removed(moved: Target) -> None:
    moved.kill9()
    (moved.directory / "lvs0.img").unlink()
    moved.start()
    error = moved.fails("vhost_scsi_controller_add_target", **VM, bdev_name="lvs1/w")
    assert "have target 0 of controller vm-0 removed first" in str(error), error
    moved.rpc("vhost_scsi_controller_remove_target", **VM)
    moved.add_lun("vm-0", "lvs1/w")
    assert lun(moved)["bdev_name"] == uuid_of(moved, "lvs1/w")


@pytest.mark.parametrize("front", ["scsi", "blk"])
def test_a_domain_that_starts_has_what_it_names_though_what_its_disk_was_on_is_lost(
    moved: Target, front: FrontEnd
) -> None:
    moved.rpc("vhost_delete_controller", ctrlr="vm-0", force=True)

    def plan(store: str, name: str) -> Plan:
        volume = VolumeRef(store, name)
        disk = LunPlan(0, "sda", volume, uuid_of(moved, volume.alias), front=front)
        socket = str(moved.vhost_dir / "vm-0")
        return Plan("d", "vm-0", socket, 1, (disk,), has_scsi=front == "scsi")

    before, after = plan("lvs0", "v"), plan("lvs1", "w")
    reconcile.ensure(moved.client, before, whole=True)
    moved.kill9()
    (moved.directory / "lvs0.img").unlink()
    moved.start()
    with pytest.raises(ReconcileError, match="by what is recorded, and cannot be shown"):
        reconcile.ensure(moved.client, after, whole=False)
    assert [each.dev for each in reconcile.ensure(moved.client, after, whole=True)] == ["sda"]
    address = after.luns[0].address("vm-0")
    shown = observe(moved.client).controllers[address.controller][address.target]
    assert shown.bdev == uuid_of(moved, "lvs1/w")
    assert reconcile.ensure(moved.client, after, whole=True) == []
