"""Disks that come, grow and go under a running guest, with no word to QEMU."""

from __future__ import annotations

import pytest

from tests.guest.conftest import MIB, BootGuest, add, add_malloc, checksum, disk, remove
from tests.support.target import Target

pytestmark = pytest.mark.vm


@pytest.mark.nightly
def test_a_disk_comes_grows_and_goes(target: Target, boot: BootGuest) -> None:
    """The guest's kernel follows each step by itself."""
    target.make_lvstore(size=96 << 20)
    target.rpc("bdev_lvol_create", lvol_name="v0", size_in_mib=16, lvs_name="lvs0")
    guest = boot()
    assert guest.run("ls /sys/block | grep sd || true") == ""

    add(target, 7, "lvs0/v0")
    name = disk(guest, 7)
    guest.agent.wait_for(f"dmesg | grep -F '[{name}] Attached SCSI disk'")
    guest.run(f"dd if=/dev/urandom of=/dev/{name} bs=1M count=16 oflag=direct")
    written = checksum(guest, name)

    target.rpc("bdev_lvol_resize", name="lvs0/v0", size_in_mib=40)
    guest.agent.wait_for(f"grep -x {40 * MIB // 512} /sys/block/{name}/size")
    log = guest.run("dmesg")
    assert "Capacity data has changed" in log
    assert f"{name}: detected capacity change from {16 * 2048} to {40 * 2048}" in log
    assert checksum(guest, name, 16) == written
    guest.run(f"dd if=/dev/zero of=/dev/{name} bs=1M seek=39 count=1 oflag=direct")

    remove(target, 7)
    guest.agent.wait_for(f"! grep -q {name} /proc/partitions")
    assert guest.run("ls /sys/bus/scsi/devices | grep 0:0:7:0 || true") == ""

    add(target, 7, "lvs0/v0")
    again = disk(guest, 7)
    assert checksum(guest, again, 16) == written


@pytest.mark.nightly
def test_many_disks_at_once_outrun_the_event_buffers(target: Target, boot: BootGuest) -> None:
    """Linux gives 8 event buffers; no event is lost while the others wait for them."""
    guest = boot()
    numbers = range(0, 250, 10)
    for number in numbers:
        add_malloc(target, number, 1)
    for number in numbers:
        disk(guest, number)
    for number in numbers:
        remove(target, number)
    guest.agent.wait_for("! ls /sys/bus/scsi/devices | grep 0:0:")


@pytest.mark.nightly
def test_a_disk_that_is_taken_away_under_load_harms_no_other(
    target: Target, boot: BootGuest
) -> None:
    """Its own I/O ends, in success or error; the other disk's goes on."""
    add_malloc(target, 0, 16)
    add_malloc(target, 1, 16)
    guest = boot()
    kept, lost = disk(guest, 0), disk(guest, 1)
    guest.run(f"dd if=/dev/urandom of=/dev/{kept} bs=1M count=16 oflag=direct")
    written = checksum(guest, kept)
    guest.run(
        f"(while dd if=/dev/{lost} of=/dev/null bs=64k iflag=direct; do :; done) "
        "> /dev/null 2>&1 & echo $! > /tmp/load"
    )
    remove(target, 1)
    guest.agent.wait_for("! kill -0 $(cat /tmp/load)")
    guest.agent.wait_for("! ls /sys/bus/scsi/devices | grep 0:0:1:0")
    assert checksum(guest, kept) == written


@pytest.mark.nightly
def test_a_volume_that_is_deleted_leaves_the_guest(target: Target, boot: BootGuest) -> None:
    """Deleting the bdev takes its targets with it."""
    name = add_malloc(target, 2, 4)
    guest = boot()
    disk(guest, 2)
    target.rpc("bdev_malloc_delete", name=name)
    guest.agent.wait_for("! ls /sys/bus/scsi/devices | grep 0:0:2:0")


@pytest.mark.nightly
def test_a_paused_guest_sees_what_happened_when_it_goes_on(target: Target, boot: BootGuest) -> None:
    """QEMU stops the rings of a paused guest, whose driver does not scan when it goes on."""
    add_malloc(target, 1, 4)
    guest = boot()
    disk(guest, 1)
    target.make_lvstore(size=96 << 20)
    target.rpc("bdev_lvol_create", lvol_name="v0", size_in_mib=16, lvs_name="lvs0")
    add(target, 3, "lvs0/v0")
    grown = disk(guest, 3)
    guest.qmp("stop")
    add_malloc(target, 4, 8)
    remove(target, 1)
    target.rpc("bdev_lvol_resize", name="lvs0/v0", size_in_mib=40)
    guest.qmp("cont")
    guest.agent.wait_for(f"grep -x {40 * MIB // 512} /sys/block/{grown}/size")
    guest.agent.wait_for("! ls /sys/bus/scsi/devices | grep 0:0:1:0")
    disk(guest, 4)
