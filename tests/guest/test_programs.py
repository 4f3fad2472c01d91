"""sg3_utils' programs against our disks, from a real guest: what they ask for is what they get."""

from __future__ import annotations

import re

import pytest

from tests.guest.conftest import MIB, BootGuest, add, add_malloc, disk
from tests.support.qemu import Guest
from tests.support.target import Target

pytestmark = pytest.mark.vm

SIZE_MIB = 32
#: The programs look devices up by their numbers there.
DEVICES = (
    "mkdir -p /dev/block; for disk in /sys/block/sd*; do"
    " ln -sf ../$(basename $disk) /dev/block/$(cat $disk/dev); done"
)


def status(guest: Guest, command: str) -> tuple[int, str]:
    """Exit status and words of a command."""
    words = guest.run(f"{command} 2>&1; echo status=$?")
    said, _, code = words.rpartition("status=")
    return int(code), said


def works(guest: Guest, command: str) -> str:
    code, said = status(guest, command)
    assert code == 0, said
    return said


def first_mib(guest: Guest, device: str) -> str:
    return guest.run(f"dd if={device} bs=1M count=1 iflag=direct 2> /dev/null | md5sum")


@pytest.fixture
def devices(target: Target, boot: BootGuest) -> tuple[Guest, str, str]:
    """A guest with a RAM disk and a thin volume, as its devices."""
    add_malloc(target, 0, SIZE_MIB)
    target.make_lvstore(size=2 * SIZE_MIB * MIB)
    add(target, 1, target.make_thin("thin", SIZE_MIB))
    guest = boot()
    ram, thin = (f"/dev/{disk(guest, number)}" for number in (0, 1))
    guest.run(DEVICES)
    return guest, ram, thin


def test_blocks_are_copied_without_the_guest(devices: tuple[Guest, str, str]) -> None:
    guest, ram, thin = devices
    guest.run(
        f"head -c 1048576 /dev/urandom > /tmp/data; dd if=/tmp/data of={ram} oflag=direct bs=1M"
    )
    works(guest, f"sg_xcopy if={ram} of={thin} bs=512 count=2048")
    expected = guest.run("md5sum < /tmp/data")
    assert first_mib(guest, thin) == expected
    # Within a disk, to where it overlaps.
    works(guest, f"sg_xcopy if={thin} of={thin} bs=512 count=2048 seek=7")
    moved = f"dd if={thin} bs=512 skip=7 count=2048 iflag=direct 2> /dev/null | md5sum"
    assert guest.run(moved) == expected
    told = works(guest, f"sg_vpd --page=tpc {thin}")
    assert "Extended copy(LID1)" in told
    assert "CSCD: Identification Descriptor" in told


def test_a_disk_is_sanitized(target: Target, devices: tuple[Guest, str, str]) -> None:
    guest, ram, thin = devices
    zeros = guest.run("head -c 1048576 /dev/zero | md5sum")
    for device in (ram, thin):
        guest.run(f"head -c 1048576 /dev/urandom | dd of={device} oflag=direct bs=512 2> /dev/null")
        assert first_mib(guest, device) != zeros
    works(guest, f"sg_sanitize --overwrite --count=2 --zero --quick --wait {ram}")
    works(guest, f"sg_sanitize --block --quick --wait {thin}")
    assert first_mib(guest, ram) == first_mib(guest, thin) == zeros
    (bdev,) = target.rpc("bdev_get_bdevs", name="lvs0/thin")
    assert bdev["driver_specific"]["lvol"]["num_allocated_clusters"] == 0
    # Which blocks a RAM disk has nobody knows, and keys are not ours.
    assert status(guest, f"sg_sanitize --block --quick --wait {ram}")[0] != 0
    assert status(guest, f"sg_sanitize --crypto --quick --wait {thin}")[0] != 0
    works(guest, f"sg_sanitize --fail --quick --wait {thin}")


def test_mode_pages_are_set_and_saved(target: Target, devices: tuple[Guest, str, str]) -> None:
    guest, _, thin = devices
    write = f"dd if=/dev/zero of={thin} bs=512 count=1 oflag=direct"
    page = "8a,a,2,10,{swp},40,0,0,0,0,0,0"
    works(guest, f"sg_wr_mode --save --page=a --contents={page.format(swp=8)} {thin}")
    assert status(guest, write)[0] != 0
    for control in (0, 3):
        told = works(guest, f"sg_modes --control={control} --page=0xa {thin}")
        assert re.search(r"8a 0a 02 10 08 40", told), told
    assert "WP=1" in told
    assert len(list((target.state_dir / "mode").glob("*.json"))) == 1
    works(guest, f"sg_wr_mode --save --page=a --contents={page.format(swp=0)} {thin}")
    works(guest, write)
    assert list((target.state_dir / "mode").glob("*.json")) == []
    # What cannot be changed is not.
    refused = page.format(swp=0).replace("10", "20", 1)
    assert status(guest, f"sg_wr_mode --page=a --contents={refused} {thin}")[0] != 0
    # As Linux has the cache turned off.
    cache = guest.run(f"ls -d /sys/block/{thin[5:]}/device/scsi_disk/*/cache_type").strip()
    assert guest.run(f"cat {cache}").strip() == "write back"
    guest.run(f"echo write through > {cache}")
    assert guest.run(f"cat {cache}").strip() == "write through"
    assert "88 12 00" in works(guest, f"sg_modes --page=8 {thin}")
    works(guest, write)


def test_ports_groups_logs_and_atomic_writes_are_told(
    target: Target, devices: tuple[Guest, str, str]
) -> None:
    guest, _, thin = devices
    told = works(guest, f"sg_rtpg --decode {thin}")
    assert "active/optimized" in told
    (group,) = re.findall(r"target port group id : 0x(\w+)", told)
    (port,) = re.findall(r"port ids:\s+0x(\w+)", told)
    identity = works(guest, f"sg_vpd --page=di {thin}")
    assert re.search(rf"Target port group: 0x0*{group}\n", identity), identity
    assert re.search(rf"Relative target port: 0x0*{port}\n", identity), identity
    assert f"Relative port={int(port, 16)}" in works(guest, f"sg_vpd --page=sp {thin}")
    assert "Policy: shared" in works(guest, f"sg_vpd --page=mpp {thin}")
    assert "ORDSUP=1" in works(guest, f"sg_vpd --page=ei {thin}")
    logs = works(guest, f"sg_logs --all {thin}")
    assert "Temperature page" in logs
    assert "IE asc = 0x0, ascq = 0x0" in logs
    # The room of the volume and of its lvstore, in MiB, as page B2h says.
    assert "Threshold exponent: 11" in works(guest, f"sg_vpd --page=lbpv {thin}")
    (free,) = re.findall(r"Available LBA mapping threshold resource count: (\d+)", logs)
    (store,) = target.rpc("bdev_lvol_get_lvstores")
    assert int(free) == store["free_clusters"] * store["cluster_size"] >> 20
    limits = works(guest, f"sg_vpd --page=bl {thin}")
    (blocks,) = map(int, re.findall(r"Maximum atomic transfer length: (\d+)", limits))
    guest.run(f"head -c {512 * blocks * 2} /dev/urandom > /tmp/data")
    atomic = f"sg_write_x --atomic=0 --in=/tmp/data --lba={blocks} --num={{}} {thin}"
    works(guest, atomic.format(blocks))
    assert status(guest, atomic.format(2 * blocks))[0] != 0
    read = f"dd if={thin} bs=512 skip={blocks} count={blocks} iflag=direct 2> /dev/null | md5sum"
    assert guest.run(read) == guest.run(f"head -c {512 * blocks} /tmp/data | md5sum")
