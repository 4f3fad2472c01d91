"""What a disk says of itself in a real guest, and the names that udev makes of that."""

from __future__ import annotations

from uuid import UUID

import pytest

from pydataplane.errors import RpcError
from tests.guest.conftest import BootGuest, add, disk
from tests.support.qemu import Guest
from tests.support.target import Target

pytestmark = pytest.mark.vm

WWN = "5000c50015ea71ad"


def naa(guest: Guest, name: str) -> str:
    """Returns the first designator of VPD page 83h, if it is an NAA one of 8 bytes, hexadecimal.

    udev's scsi_id takes an NAA designator before all others: /dev/disk/by-id has scsi-3 and these
    digits, and wwn-0x and these digits.
    """
    page = guest.run(f"od -An -v -tx1 /sys/block/{name}/device/vpd_pg83")
    octets = page.split()
    assert octets[4:8] == ["01", "03", "00", "08"], page
    return "".join(octets[8:16])


@pytest.mark.nightly
def test_names_by_id_are_the_volumes_or_as_chosen(target: Target, boot: BootGuest) -> None:
    target.make_lvstore()
    made = target.rpc("bdev_lvol_create", lvol_name="v0", size_in_mib=8, lvs_name="lvs0")
    target.make_thin("chosen", 8)
    add(target, 0, "lvs0/v0")
    add(target, 1, "lvs0/chosen", wwn=WWN, vendor="ACME", product="Fast disk", rotation_rate=7200)
    guest = boot()
    own, chosen = disk(guest, 0), disk(guest, 1)
    halves = UUID(made).int >> 64, UUID(made).int & (1 << 64) - 1
    of_uuid = f"{(halves[0] ^ halves[1]) & (1 << 60) - 1 | 3 << 60:016x}"
    assert naa(guest, own) == of_uuid
    assert naa(guest, chosen) == WWN
    assert guest.run(f"cat /sys/block/{chosen}/device/wwid").strip() == f"naa.{WWN}"
    words = guest.run(f"cd /sys/block/{chosen} && cat device/vendor device/model queue/rotational")
    assert words.split() == ["ACME", "Fast", "disk", "1"]
    words = guest.run(f"cd /sys/block/{own} && cat device/vendor device/model queue/rotational")
    assert words.split() == ["VIRTLUN", "Logical", "Volume", "0"]
    # Another target number, and another attach: the same name.
    target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm0", scsi_target_num=0)
    guest.agent.wait_for(f"[ ! -e /sys/block/{own} ]")
    add(target, 9, "lvs0/v0")
    assert naa(guest, disk(guest, 9)) == of_uuid


@pytest.mark.nightly
def test_discard_and_the_write_cache_are_as_chosen(target: Target, boot: BootGuest) -> None:
    target.make_lvstore()
    target.make_thin("v0", 8)
    target.make_thin("v1", 8)
    add(target, 0, "lvs0/v0")
    add(target, 1, "lvs0/v1", discard=False, write_cache=False)
    guest = boot()
    own, chosen = disk(guest, 0), disk(guest, 1)
    for name, discards, cache in ((own, True, "write back"), (chosen, False, "write through")):
        most = int(guest.run(f"cat /sys/block/{name}/queue/discard_max_bytes"))
        assert (most > 0) == discards
        assert guest.run(f"cat /sys/block/{name}/queue/write_cache").strip() == cache
    guest.run(f"dd if=/dev/zero of=/dev/{chosen} bs=4k count=8 oflag=direct")


@pytest.mark.nightly
def test_the_physical_block_is_as_chosen(target: Target, boot: BootGuest) -> None:
    target.make_lvstore()
    for name in ("v0", "v1", "v2"):
        target.rpc("bdev_lvol_create", lvol_name=name, size_in_mib=8, lvs_name="lvs0")
    add(target, 0, "lvs0/v0", physical_block_size=65536)
    add(target, 1, "lvs0/v1", block_size=4096, physical_block_size=4096)
    target.rpc(
        "vhost_create_blk_controller", ctrlr="b0", dev_name="lvs0/v2", physical_block_size=8192
    )
    guest = boot()

    def seen() -> list[int]:
        words = "physical_block_size minimum_io_size"
        return [
            int(size)
            for number in (0, 1)
            for size in guest.run(f"cd /sys/block/{disk(guest, number)}/queue; cat {words}").split()
        ]

    assert seen() == [65536, 65536, 4096, 4096]
    guest.run(f"dd if=/dev/urandom of=/dev/{disk(guest, 0)} bs=64k count=16 oflag=direct")
    target.upgrade()
    for number in (0, 1):
        guest.run(f"echo 1 > /sys/block/{disk(guest, number)}/device/rescan")
    assert seen() == [65536, 65536, 4096, 4096]
    blk, scsi = sorted(target.rpc("vhost_get_controllers"), key=lambda each: each["ctrlr"])
    assert blk["backend_specific"]["block"]["physical_block_size"] == 8192
    luns = [each["luns"][0] for each in scsi["backend_specific"]["scsi"]]
    assert [lun["physical_block_size"] for lun in luns] == [65536, 4096]
    target.rpc("bdev_malloc_create", name="other", num_blocks=2048, block_size=512)
    with pytest.raises(RpcError, match=r"3000 bytes: ask for a power of two from 512, its logical"):
        add(target, 2, "other", physical_block_size=3000)
