"""Save, restore and live migration: QEMU allows them because the target logs its writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guest.conftest import BootGuest, checksum, disk
from tests.guest.emulator import newer
from tests.support.migration import is_over, passes
from tests.support.qemu import CMDLINE
from tests.support.target import Target
from tests.support.wait import until

pytestmark = pytest.mark.vm

DISK_MIB = 24


def shared_disk(target: Target) -> None:
    """Makes one RAM disk that `vm0` and `vm1` both show as target 0."""
    target.rpc("bdev_malloc_create", name="disk", num_blocks=DISK_MIB * 2048, block_size=512)
    target.rpc("vhost_create_scsi_controller", ctrlr="vm1")
    for controller in ("vm0", "vm1"):
        target.add_lun(controller, "disk", shareable=True)


@pytest.mark.nightly
def test_saved_and_restored(target: Target, boot: BootGuest, scratch: Path) -> None:
    """What `virsh save` and `restore` do; without LOG_SHMFD, QEMU would refuse."""
    shared_disk(target)
    guest = boot("vm0")
    name = disk(guest, 0)
    guest.run(f"dd if=/dev/urandom of=/dev/{name} bs=1M count={DISK_MIB} oflag=direct")
    written = checksum(guest, name)
    state = scratch / "saved"
    guest.qmp("migrate-set-parameters", **{"max-bandwidth": 1 << 32})
    guest.qmp("migrate", uri=f"exec:cat > {state}")
    until(lambda: is_over(guest), "saved")
    guest.stop()
    restored = boot("vm0", incoming=f"exec:cat {state}")
    restored.arrived()
    assert checksum(restored, name) == written
    guest_log = restored.run("dmesg | tail -n 50")
    assert "I/O error" not in guest_log


@pytest.mark.nightly
def test_what_the_target_writes_during_live_migration_arrives(
    target: Target, boot: BootGuest, scratch: Path
) -> None:
    """Pages that only the target wrote (reads into the page cache) reach the other side.

    The whole disk is read through the guest's page cache after the first pass over memory, and
    read again from that cache on the other side: no I/O, so wrong sums mean pages not logged.
    """
    shared_disk(target)
    # Debian's kernel zeroes each page that it allocates, and by that alone marks it dirty.
    # QEMU before 9.0 loses writes of the guest itself (test_migration_many.py).
    source = boot("vm0", emulator=newer(), extra=("-append", f"{CMDLINE} init_on_alloc=0"))
    name = disk(source, 0)
    source.run(f"dd if=/dev/urandom of=/dev/{name} bs=1M count={DISK_MIB} oflag=direct")
    written = checksum(source, name)
    socket = scratch / "migration"
    arriving = boot("vm1", emulator=newer(), incoming=f"unix:{socket}")
    # As long as somebody has the disk open, its page cache stays.
    source.run(f"sleep 10000 < /dev/{name} > /dev/null 2>&1 &")
    # Something to send all the time, and a limit that it never keeps: no switch-over yet.
    source.run("head -c 8000000 /dev/urandom > /tmp/noise")
    source.run(
        "(while :; do cat /tmp/noise > /tmp/busy; done) > /dev/null 2>&1 & echo $! > /tmp/pid"
    )
    slow = {"max-bandwidth": 32 << 20, "downtime-limit": 1}
    source.qmp("migrate-set-parameters", **slow)
    source.qmp("migrate", uri=f"unix:{socket}")
    until(lambda: passes(source) >= 2, "a pass over all memory")
    # Slower still, so that a starved guest has dirtied something before each pass is over.
    source.qmp("migrate-set-parameters", **{"max-bandwidth": 2 << 20})
    assert not is_over(source)
    source.run(f"cat /dev/{name} > /dev/null")
    assert not is_over(source), "it must not switch before the pages are written"
    source.qmp("migrate-set-parameters", **{"max-bandwidth": 1 << 32, "downtime-limit": 30000})
    until(lambda: is_over(source), "migrated")
    source.stop()
    arriving.arrived()
    arriving.run("kill $(cat /tmp/pid)")
    sectors = f"awk '{{print $3}}' /sys/block/{name}/stat"
    before = arriving.run(sectors)
    assert arriving.run(f"md5sum < /dev/{name}").split()[0] == written
    assert arriving.run(sectors) == before, "the sum was taken from the page cache"
    # And the disk goes on, through the other controller.
    assert checksum(arriving, name) == written
    arriving.run(f"dd if=/dev/zero of=/dev/{name} bs=1M count=1 oflag=direct")
