"""What a disk says of itself in a real guest, and the names that udev makes of that."""

from __future__ import annotations

from uuid import UUID

import pytest

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
