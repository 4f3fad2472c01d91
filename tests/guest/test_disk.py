"""What Linux makes of our disks."""

from __future__ import annotations

import pytest

from tests.guest.conftest import BootGuest, add, add_malloc, checksum, disk
from tests.support.agent import GuestError
from tests.support.target import Target

pytestmark = pytest.mark.vm


@pytest.mark.nightly
def test_a_disk_is_what_it_was_made_as(target: Target, boot: BootGuest) -> None:
    """Serial, size, block size and write protection arrive in the guest."""
    target.make_lvstore()
    uuid = target.rpc("bdev_lvol_create", lvol_name="v0", size_in_mib=24, lvs_name="lvs0")
    add(target, 0, "lvs0/v0", serial="virtlun-0001")
    target.rpc("bdev_malloc_create", name="ro", num_blocks=4096, block_size=4096)
    add(target, 1, "ro", read_only=True)
    guest = boot()
    name, protected = disk(guest, 0), disk(guest, 1)
    assert guest.run(f"cat /sys/block/{name}/size").strip() == str(24 * 2048)
    assert "virtlun-0001" in guest.run(f"sg_vpd --page=sn /dev/{name}")
    assert uuid.replace("-", "")[:8] in guest.run(f"sg_vpd --page=di /dev/{name}").replace("-", "")
    assert guest.run(f"cat /sys/block/{protected}/ro").strip() == "1"
    assert guest.run(f"cat /sys/block/{protected}/queue/logical_block_size").strip() == "4096"
    with pytest.raises(GuestError):
        guest.run(f"dd if=/dev/zero of=/dev/{protected} bs=4096 count=1 oflag=direct")
    assert "error" not in guest.run("dmesg | grep -i ' sd[a-z]' | grep -v protect || true").lower()


@pytest.mark.nightly
def test_data_survives_file_systems_discard_and_direct_io(target: Target, boot: BootGuest) -> None:
    """ext4 on a thin lvol: written, unmounted, checked, read back."""
    target.make_lvstore(size=96 << 20)
    target.rpc(
        "bdev_lvol_create", lvol_name="v0", size_in_mib=48, lvs_name="lvs0", thin_provision=True
    )
    add(target, 5, "lvs0/v0")
    guest = boot()
    name = disk(guest, 5)
    guest.run(f"mkfs.ext4 -q /dev/{name} && mount /dev/{name} /mnt")
    guest.run("dd if=/dev/urandom of=/mnt/file bs=1M count=16 && sync")
    written = guest.run("md5sum < /mnt/file")
    guest.run("umount /mnt && echo 3 > /proc/sys/vm/drop_caches")
    guest.run(f"mount /dev/{name} /mnt")
    assert guest.run("md5sum < /mnt/file") == written
    guest.run(f"umount /mnt && blkdiscard /dev/{name}")
    zeros = guest.run("dd if=/dev/zero bs=1M count=48 2>/dev/null | md5sum").split()[0]
    assert checksum(guest, name) == zeros


@pytest.mark.nightly
def test_a_reset_of_the_lun_ends_and_io_goes_on(target: Target, boot: BootGuest) -> None:
    """sg_reset sends LOGICAL UNIT RESET through the control queue."""
    add_malloc(target, 0, 16)
    guest = boot()
    name = disk(guest, 0)
    guest.run(f"dd if=/dev/urandom of=/dev/{name} bs=1M count=16 oflag=direct")
    written = checksum(guest, name)
    guest.run(
        f"(for i in 1 2 3 4; do dd if=/dev/{name} of=/dev/null bs=64k iflag=direct; done) & "
        f"for i in 1 2 3; do sg_reset --device /dev/{name} || exit 1; done; wait"
    )
    assert checksum(guest, name) == written
    assert "Power-on or device reset occurred" in guest.run("dmesg")


@pytest.mark.nightly
def test_statistics_show_what_the_guest_did(target: Target, boot: BootGuest) -> None:
    """What libvirt will show as block statistics."""
    add_malloc(target, 0, 16)
    guest = boot()
    name = disk(guest, 0)

    def stats() -> dict[str, int]:
        target_stats = target.rpc("virtlun_vhost_get_stats", name="vm0")[0]["targets"][0]
        return {key: value for key, value in target_stats.items() if isinstance(value, int)}

    before = stats()
    guest.run(f"dd if=/dev/zero of=/dev/{name} bs=64k count=32 oflag=direct")
    guest.run(f"dd if=/dev/{name} of=/dev/null bs=64k count=16 iflag=direct")
    after = stats()
    assert after["writes"] - before["writes"] == 32
    assert after["write_bytes"] - before["write_bytes"] == 32 * 65536
    assert after["read_bytes"] - before["read_bytes"] >= 16 * 65536
    assert after["errors"] == before["errors"]
