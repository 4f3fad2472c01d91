"""A volume as a ublk device, of a real target and holder: its users notice no more than a pause.

Both programs run in a guest, whose kernel has the driver. `VIRTLUN_SEED` repeats the moments of a
run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.guest.image import Kernel
from tests.support import program_disk, target_inside
from tests.support.qemu import Guest
from tests.support.restarts import choose_seed
from tests.support.target import SANDBOX_REFUSED
from tests.support.target_inside import SOCKET, VOLUME, VOLUME_MIB, TargetInside
from tests.support.verified_io import VerifiedIo

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

DEPTH = 16


@pytest.fixture(scope="module", params=[Kernel.NEWEST], ids=str)
def booted(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Guest]:
    """A guest with the programs, for the tests of one module."""
    kernel: Kernel = request.param
    scratch = tmp_path_factory.mktemp("guest")
    with program_disk.guest(scratch, target_inside.programs(), kernel, memory_mib=640) as guest:
        yield guest


@pytest.fixture
def guest(booted: Guest) -> Iterator[Guest]:
    """With nothing of the test before; no sandbox refused a call, nothing surprised the kernel."""
    booted.run(target_inside.PREPARE)
    yield booted
    words = booted.run("cat /ram/*log")
    booted.run(target_inside.CLEAN, 90.0)
    program_disk.unsurprised(booted)
    assert SANDBOX_REFUSED not in words, words


@pytest.fixture
def target(guest: Guest) -> Iterator[TargetInside]:
    """A target of root's, which starts its holder itself; no I/O failed."""
    inside = TargetInside(guest)
    yield inside
    words = inside.guest.run("dmesg")
    assert "I/O error" not in words, words


def export(target: TargetInside) -> str:
    """Exports the volume as a device; returns its name in /dev."""
    path = Path(target.rpc("virtlun_export_create", bdev_name=VOLUME, device=True)["path"])
    assert path.parent == Path("/dev") and path.name.startswith("ublkb"), target.words()
    (listed,) = target.rpc("virtlun_export_list")
    assert (listed["path"], listed["survives"], listed["opens"]) == (str(path), "crash", 0)
    return path.name


@pytest.mark.nightly
def test_a_volume_survives_the_end_of_its_target(target: TargetInside) -> None:
    """Crashes, orderly restarts and upgrades in a mixed order, under verified I/O."""
    seed = choose_seed()
    moments = random.Random(seed)
    disk = export(target)
    io = VerifiedIo(target.guest, disk, seed=seed, threads=1, depth=DEPTH)
    ways: list[Callable[[], None]] = [target.kill] * 3 + [target.terminate] * 2
    ways += [target.upgrade] * 2
    moments.shuffle(ways)
    for way in ways:
        io.goes_on_after(way)
        time.sleep(moments.uniform(0, 0.4))
    io.finish()
    (listed,) = target.rpc("virtlun_export_list")
    assert listed["path"] == f"/dev/{disk}"
    target.rpc("virtlun_export_delete", bdev_name=VOLUME)


@pytest.mark.nightly
def test_a_mounted_device_is_not_deleted_and_a_deleted_one_is_gone(target: TargetInside) -> None:
    guest, disk = target.guest, export(target)
    guest.run(f"mkfs.ext4 -q -F /dev/{disk}; mkdir -p /fs; mount -t ext4 /dev/{disk} /fs")
    guest.run("cp /bin/busybox /fs/; sync")
    (listed,) = target.rpc("virtlun_export_list")
    assert listed["opens"] == 1
    with pytest.raises(AssertionError, match="is open 1 times"):
        target.rpc("virtlun_export_delete", bdev_name=VOLUME)
    target.kill()
    guest.run("cmp /bin/busybox /fs/busybox; umount /fs")
    target.rpc("virtlun_export_delete", bdev_name=VOLUME)
    assert guest.run("ls /dev | grep ublk[bc] || true") == ""
    disk = export(target)
    guest.run(f"mount -t ext4 /dev/{disk} /fs; cmp /bin/busybox /fs/busybox; umount /fs")
    target.rpc("virtlun_export_delete", bdev_name=VOLUME)


@pytest.mark.nightly
def test_a_device_takes_memory_for_what_is_in_flight_only(target: TargetInside) -> None:
    """Not the 32 MiB for all that may be: 64 requests of 512 KiB."""

    def resident_kib() -> int:
        return int(
            target.guest.run("awk '/^VmRSS/ { print $2 }' /proc/$(cat /tmp/target.pid)/status")
        )

    before = resident_kib()
    disk = export(target)
    idle = resident_kib()
    target.guest.run(f"dd if=/dev/zero of=/dev/{disk} bs=4k count=256 oflag=direct")
    used = resident_kib()
    print(f"KiB: {before} without the device, {idle} with it, {used} after its use")
    assert idle - before < 8 << 10
    assert used - before < 16 << 10
    target.rpc("virtlun_export_delete", bdev_name=VOLUME)


@pytest.mark.nightly
def test_a_device_grows_while_it_is_used(target: TargetInside) -> None:
    """At once; and after a target that was killed before it could tell the kernel."""
    can = {"ublk": True, "resizes": True, "why": ""}
    assert target.rpc("virtlun_export_get_devices") == can
    guest, disk = target.guest, export(target)

    def grow(mib: int) -> None:
        target.rpc("bdev_lvol_resize", name=VOLUME, size_in_mib=mib)

    def sectors() -> int:
        return int(guest.run(f"cat /sys/block/{disk}/size"))

    guest.run(f"mkfs.ext4 -q -F -b 4096 /dev/{disk}; mkdir -p /fs; mount -t ext4 /dev/{disk} /fs")
    for step in (1, 2):
        mib = VOLUME_MIB + 8 * step
        grow(mib)
        assert sectors() == mib << 11
        guest.run(f"resize2fs /dev/{disk}")
        target.kill()
        assert sectors() == mib << 11
    assert int(guest.run("df -k /fs | awk 'NR == 2 { print $2 }'")) > VOLUME_MIB << 10
    guest.run("dd if=/dev/zero bs=1M count=36 of=/fs/x; sync; umount /fs")
    target.rpc("virtlun_export_delete", bdev_name=VOLUME)
    made = target.rpc("virtlun_export_create", bdev_name=VOLUME, device=True, block_size=4096)
    disk = Path(made["path"]).name
    assert guest.run(f"cat /sys/block/{disk}/queue/logical_block_size") == "4096\n"
    assert guest.run("readlink /run/virtlun/export/*.disk") == f"/dev/{disk}\n"
    target.kill()
    guest.run(f"mount -t ext4 /dev/{disk} /fs; ls -l /fs/x; umount /fs")
    target.rpc("virtlun_export_delete", bdev_name=VOLUME)
    assert guest.run("ls /run/virtlun/export") == ""


@pytest.mark.nightly
@pytest.mark.parametrize("booted", [Kernel.BACKPORTS], indirect=True, ids=str)
def test_a_device_keeps_its_size_on_an_older_kernel(target: TargetInside) -> None:
    """One that is made later has the new one."""
    found = target.rpc("virtlun_export_get_devices")
    assert (found["ublk"], found["resizes"], "Linux 6.16" in found["why"]) == (True, False, True)
    guest, disk = target.guest, export(target)
    target.rpc("bdev_lvol_resize", name=VOLUME, size_in_mib=2 * VOLUME_MIB)
    assert int(guest.run(f"cat /sys/block/{disk}/size")) == VOLUME_MIB << 11
    target.rpc("virtlun_export_delete", bdev_name=VOLUME)
    disk = export(target)
    assert int(guest.run(f"cat /sys/block/{disk}/size")) == VOLUME_MIB << 12
    target.rpc("virtlun_export_delete", bdev_name=VOLUME)


@pytest.mark.nightly
def test_a_parked_device_is_read_and_not_written(target: TargetInside) -> None:
    guest, disk = target.guest, export(target)
    guest.run(f"dd if=/bin/busybox of=/dev/{disk} bs=4k count=1 oflag=direct")
    target.rpc("virtlun_export_park", bdev_name=VOLUME)
    guest.run(f"dd if=/dev/{disk} of=/dev/null bs=4k count=1 iflag=direct")
    target.rpc("virtlun_export_unpark", bdev_name=VOLUME)
    guest.run(f"dd if=/bin/busybox of=/dev/{disk} bs=4k count=1 oflag=direct")
    target.rpc("virtlun_export_delete", bdev_name=VOLUME)


@pytest.mark.nightly
def test_another_users_target_and_a_holder_that_is_killed(guest: Guest) -> None:
    """As a service runs them. What nobody serves for longer than the holder waits fails."""
    holder = (
        "virtlun-holder --socket /run/virtlun/holder.sock --dir /run/virtlun/export --user 1000 "
        "--wait 8 "
        ">>/ram/holder.log 2>&1 & echo $! >/tmp/holder.pid"
    )
    guest.run(f"chown 1000:1000 /ram; {program_disk.run(holder)}")
    guest.run(
        "for i in $(seq 100); do [ -S /run/virtlun/holder.sock ] && exit; sleep .1; done; exit 1"
    )
    target = TargetInside(guest, "--holder-socket", "/run/virtlun/holder.sock", "--user", "1000")
    disk = export(target)
    assert guest.run("awk '/^Uid/ { print $3 }' /proc/$(cat /tmp/target.pid)/status") == "1000\n"
    io = VerifiedIo(guest, disk, seed=choose_seed(), threads=1, depth=DEPTH)
    for way in (target.kill, target.terminate):
        done = io.status().requests
        guest.run("kill -9 $(cat /tmp/holder.pid)")
        io.goes_on(done)
        guest.run(program_disk.run(holder))
        way()
        io.goes_on(done)
    io.finish()
    guest.run(f"kill -9 $(cat /tmp/target.pid); rm -f {SOCKET}")
    guest.run(
        f"dd if=/dev/{disk} of=/dev/null bs=4k count=1 iflag=direct && exit 1; "
        "for i in $(seq 300); do ls /dev | grep -q ublk[bc] || exit 0; sleep .1; done; exit 1",
        deadline_s=90,
    )


HOLDER = (
    "virtlun-holder --socket /run/virtlun/holder.sock --dir /run/virtlun/export --wait {wait} "
    ">>/ram/holder.log 2>&1 & echo $! >/tmp/holder.pid; "
    "for i in $(seq 600); do [ -S /run/virtlun/holder.sock ] && exit; sleep .1; done; exit 1"
)


def start_holder(guest: Guest, wait: int) -> None:
    """Starts a holder that gives up after so many seconds what nobody serves."""
    command = program_disk.run(HOLDER.format(wait=wait))
    guest.run(f"rm -f /run/virtlun/holder.sock; {command}", deadline_s=90.0)


@pytest.mark.nightly
def test_without_a_holder_a_device_stays_and_the_next_one_knows_it(guest: Guest) -> None:
    """Nobody else can take it away; and one that never heard of it gives it up in its time."""
    start_holder(guest, 60)
    target = TargetInside(guest, "--holder-socket", "/run/virtlun/holder.sock")
    disk = export(target)
    guest.run("kill -9 $(cat /tmp/holder.pid)")
    for force in (False, True):
        with pytest.raises(AssertionError, match="no holder answers"):
            target.rpc("virtlun_export_delete", bdev_name=VOLUME, force=force)
    write = f"dd if=/bin/busybox of=/dev/{disk} bs=4k count=1 oflag=direct"
    guest.run(write)
    assert target.rpc("virtlun_export_list")[0]["path"] == f"/dev/{disk}"
    start_holder(guest, 60)
    target.rpc("virtlun_export_delete", bdev_name=VOLUME)
    threads = "cat /proc/$(cat /tmp/target.pid)/task/*/comm | grep export- || true"
    assert guest.run(threads) == "" == guest.run("ls /dev | grep ublk[bc] || true")
    disk = export(target)
    guest.run("kill -9 $(cat /tmp/holder.pid) $(cat /tmp/target.pid)")
    start_holder(guest, 3)
    guest.run(
        f"dd if=/dev/{disk} of=/dev/null bs=4k count=1 iflag=direct && exit 1; "
        "for i in $(seq 300); do ls /dev | grep -q ublk[bc] || exit 0; sleep .1; done; exit 1",
        deadline_s=90,
    )
    assert "given up" in guest.run("cat /ram/holder.log")


@pytest.mark.nightly
def test_a_write_that_waited_for_a_parked_device_fails(guest: Guest) -> None:
    """Who has the volume meanwhile is not overwritten by what a dead target had not answered."""
    start_holder(guest, 600)
    target = TargetInside(guest, "--holder-socket", "/run/virtlun/holder.sock")
    disk = export(target)
    first = f"dd if=/dev/{disk} bs=4k count=1 iflag=direct 2>/dev/null | cmp -n 4096 - "
    guest.run(f"dd if=/bin/busybox of=/dev/{disk} bs=4k count=1 oflag=direct")
    target.rpc("virtlun_export_park", bdev_name=VOLUME)
    guest.run(f"kill -9 $(cat /tmp/target.pid); rm -f {SOCKET}")
    zeros = f"dd if=/dev/zero of=/dev/{disk} bs=4k count=1 oflag=direct"
    guest.run(f"({zeros} 2>/tmp/said; echo $? >/tmp/status) & echo begun")
    target.start()
    ended = "for i in $(seq 300); do [ -s /tmp/status ] && exit 0; sleep .1; done; exit 1"
    guest.run(ended, 90.0)
    assert guest.run("cat /tmp/status") == "1\n", guest.run("cat /tmp/said")
    assert target.rpc("virtlun_export_list")[0]["parked"] is True
    guest.run(first + "/bin/busybox")
    target.rpc("virtlun_export_unpark", bdev_name=VOLUME)
    guest.run(zeros)
    guest.run(first + "/dev/zero")
    target.rpc("virtlun_export_delete", bdev_name=VOLUME)
