"""A machine that booted while nobody knew who had reserved its disk has it once that is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guest.conftest import MIB, BootGuest, add, disk
from tests.support.target import Target

pytestmark = pytest.mark.vm


def damaged(target: Target) -> Path:
    """Has target 0 of `vm0` be a volume whose record is damaged; returns the record."""
    target.make_lvstore()
    uuid = target.make_thin("v", 16)
    record = target.state_dir / "reservations" / f"{uuid}.json"
    record.parent.mkdir()
    record.write_bytes(b"{")
    add(target, 0, uuid)
    return record


@pytest.mark.nightly
@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "removed"])
def test_its_disk_has_its_size_without_a_rescan(
    target: Target, boot: BootGuest, replaced: bool
) -> None:
    record = damaged(target)
    guest = boot()
    name = disk(guest, 0)
    guest.agent.wait_for(f"dmesg | grep -F '[{name}] Attached SCSI disk'")
    assert guest.run(f"cat /sys/block/{name}/size").strip() == "0"
    if replaced:
        guest.run("sg_persist --out --replace-lost --param-sark=0xa --prout-type=1 /dev/sg0")
    else:
        record.unlink()
    guest.agent.wait_for(f"grep -x {16 * MIB // 512} /sys/block/{name}/size")
    guest.run(f"mkfs.ext4 -q /dev/{name} && mount /dev/{name} /mnt && umount /mnt")
    assert "Write cache: enabled" in guest.run(f"dmesg | grep -F '[{name}]'")
