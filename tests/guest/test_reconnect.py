"""What a VM sees of a restarted target, with a QEMU that reconnects and with one that cannot."""

from __future__ import annotations

import time

import pytest

from tests.guest.conftest import BootGuest, add_malloc, checksum, disk
from tests.guest.emulator import Emulator, newer
from tests.support.agent import GuestError
from tests.support.target import Target

pytestmark = pytest.mark.vm

RECONNECT_MS = 100


def connected(target: Target) -> bool:
    """Whether a VM is connected to `vm0`."""
    (controller,) = target.rpc("vhost_get_controllers")
    return bool(controller["sessions"])


@pytest.mark.nightly
def test_a_quiet_disk_is_there_again(target: Target, boot: BootGuest, emulator: Emulator) -> None:
    file = target.make_file("disk.img", 16 << 20)
    target.rpc("bdev_uring_create", filename=str(file), name="d0", block_size=512)
    target.add_lun("vm0", "d0")
    if not emulator.reconnects:
        with pytest.raises(GuestError, match="vhost_backend_init failed: Protocol error"):
            boot(emulator=emulator, reconnect_ms=RECONNECT_MS)
        return
    guest = boot(emulator=emulator, reconnect_ms=RECONNECT_MS)
    name = disk(guest, 0)
    guest.run(f"dd if=/dev/urandom of=/dev/{name} bs=1M count=16 oflag=direct")
    written = checksum(guest, name)
    for end in (target.kill9, target.stop):
        end()
        target.start()
        assert checksum(guest, name) == written
    assert "I/O error" not in guest.run("dmesg")


@pytest.mark.nightly
def test_a_size_that_no_event_could_tell_any_more_is_seen(target: Target, boot: BootGuest) -> None:
    """The guest is paused while the volume grows, and the target dies with the event."""
    target.make_lvstore()
    volume = target.rpc("bdev_lvol_create", lvol_name="v", size_in_mib=16, lvs_name="lvs0")
    target.add_lun("vm0", volume, 3)
    guest = boot(emulator=newer(), reconnect_ms=RECONNECT_MS)
    name = disk(guest, 3)
    guest.qmp("stop")
    target.rpc("bdev_lvol_resize", name=volume, size_in_mib=32)
    target.crash()
    guest.qmp("cont")
    guest.agent.wait_for(f"grep -x {(32 << 20) // 512} /sys/block/{name}/size")


@pytest.mark.nightly
@pytest.mark.parametrize("emulator", ["stock", "newer"], indirect=True)
def test_without_reconnect_a_disk_waits_until_the_vm_starts_again(
    target: Target, boot: BootGuest, emulator: Emulator
) -> None:
    add_malloc(target, 0, 16)
    guest = boot(emulator=emulator)
    name = disk(guest, 0)
    target.crash()
    guest.run(
        f"(dd if=/dev/{name} of=/dev/null bs=4k count=1 iflag=direct; echo done > /tmp/done) &"
    )
    time.sleep(2)  # there is nothing to wait for: what is tested is that nothing happens
    assert guest.run("ls /tmp/done", check=False).startswith("ls:")
    assert not connected(target)
    assert guest.qmp("query-status")["status"] == "running"
    guest.stop()
    assert disk(boot(emulator=emulator), 0)
    assert connected(target)
