"""A removable disk: Linux says when it is in use, and nothing but a real change disturbs it."""

from __future__ import annotations

from typing import Any

import pytest

from pydataplane.errors import RpcError
from tests.guest.conftest import MIB, BootGuest, add, disk
from tests.support.target import Target

pytestmark = pytest.mark.vm


def lun(target: Target) -> dict[str, Any]:
    """Returns the only LUN of `vm0`."""
    (controller,) = target.rpc("vhost_get_controllers", name="vm0")
    (shown,) = controller["backend_specific"]["scsi"]
    found: dict[str, Any] = shown["luns"][0]
    return found


@pytest.mark.nightly
def test_linux_prevents_the_removal_of_a_mounted_disk(target: Target, boot: BootGuest) -> None:
    """PREVENT at mount, ALLOW at unmount; an eject in between is refused, and so is a removal."""
    removal = {"ctrlr": "vm0", "scsi_target_num": 4, "unless_prevented": True}
    target.make_lvstore()
    target.rpc("bdev_lvol_create", lvol_name="v0", size_in_mib=16, lvs_name="lvs0")
    guest = boot()
    add(target, 4, "lvs0/v0", removable=True)
    name = disk(guest, 4)
    guest.agent.wait_for(f"dmesg | grep -F '[{name}] Attached SCSI removable disk'")
    assert guest.run(f"cat /sys/block/{name}/removable").strip() == "1"
    seen = lun(target)
    assert not seen["removal_prevented"]
    assert seen["attached_at"] <= seen["event_at"] <= seen["guest_seen_at"]

    guest.run(f"mkfs.ext4 -q /dev/{name}")
    assert not lun(target)["removal_prevented"]
    for _ in range(2):
        guest.run(f"mount /dev/{name} /mnt")
        assert lun(target)["removal_prevented"]
        # START STOP UNIT with LOEJ, past the mount through the generic device.
        words = guest.run("sg_raw /dev/sg0 1b 00 00 00 02 00", check=False)
        assert "Medium removal prevented" in words
        error = target.fails("vhost_scsi_controller_remove_target", **removal)
        assert isinstance(error, RpcError)
        assert error.code == -16
        guest.run("touch /mnt/file && sync")
        guest.run("umount /mnt")
        assert not lun(target)["removal_prevented"]
    guest.run("sg_raw /dev/sg0 1b 00 00 00 02 00")
    assert lun(target)["ejected"]
    assert "No medium found" in guest.run(f"dd if=/dev/{name} count=1 2>&1", check=False)
    guest.run("sg_raw /dev/sg0 1b 00 00 00 03 00")
    assert not lun(target)["ejected"]
    guest.run(f"mount /dev/{name} /mnt && test -f /mnt/file && umount /mnt")
    guest.run("sg_raw /dev/sg0 1b 00 00 00 02 00")
    target.rpc("vhost_scsi_controller_remove_target", **removal)
    guest.agent.wait_for(f"! grep -q {name} /proc/partitions")


@pytest.mark.nightly
def test_a_mounted_removable_disk_grows_and_is_reset_unharmed(
    target: Target, boot: BootGuest
) -> None:
    """Linux fails I/O of a removable disk that meets a unit attention; nothing here causes one."""
    target.make_lvstore(size=96 << 20)
    target.rpc("bdev_lvol_create", lvol_name="v0", size_in_mib=24, lvs_name="lvs0")
    add(target, 4, "lvs0/v0", removable=True)
    guest = boot()
    name = disk(guest, 4)
    guest.run(f"mkfs.ext4 -q /dev/{name} && mount /dev/{name} /mnt")
    guest.run("dd if=/dev/urandom of=/mnt/file bs=1M count=8 && sync")
    written = guest.run("md5sum < /mnt/file")
    guest.run(
        "(while dd if=/mnt/file of=/mnt/copy bs=64k conv=fsync; do :; done) "
        "> /tmp/load.log 2>&1 & echo $! > /tmp/load"
    )
    target.rpc("bdev_lvol_resize", name="lvs0/v0", size_in_mib=48)
    guest.agent.wait_for(f"grep -x {48 * MIB // 512} /sys/block/{name}/size")
    assert lun(target)["resize_event_at"] is not None
    guest.run(f"resize2fs /dev/{name}")
    guest.run(f"sg_reset --device /dev/{name}")
    guest.run("kill -0 $(cat /tmp/load) && kill $(cat /tmp/load)")
    guest.agent.wait_for("! pidof dd")
    guest.run("echo 3 > /proc/sys/vm/drop_caches")
    assert guest.run("md5sum < /mnt/file") == written
    assert int(guest.run("df -m /mnt | tail -n 1").split()[1]) > 40
    log = guest.run("dmesg")
    assert "I/O error" not in log
    assert "EXT4-fs error" not in log
    guest.run("umount /mnt")
    guest.run(f"mount /dev/{name} /mnt && umount /mnt")
