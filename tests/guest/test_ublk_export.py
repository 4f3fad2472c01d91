"""A volume as a ublk device, of a real target and holder: its users notice no more than a pause.

Both programs run in a guest, whose kernel has the driver. `VIRTLUN_SEED` repeats the moments of a
run.
"""

from __future__ import annotations

import json
import random
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.guest.emulator import newer
from tests.guest.image import Kernel, build
from tests.support import program_disk
from tests.support.agent import GuestError
from tests.support.qemu import Guest
from tests.support.restarts import choose_seed
from tests.support.target import SANDBOX_REFUSED, binary
from tests.support.verified_io import VerifiedIo

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

VOLUME_MIB = 32
DEPTH = 16
VOLUME = "lvs0/v0"
SOCKET = "/ram/rpc.sock"
COMMAND = (
    f"/programs/virtlun-target --rpc-socket {SOCKET} --vhost-dir /ram/vhost --state-dir /ram/state "
    "--export-dir /run/virtlun/export"
)


class TargetInside:
    """A target in a guest, with a volume on a file of the guest's memory."""

    def __init__(self, guest: Guest, *options: str) -> None:
        """Starts it, with further options, and makes the volume."""
        self.guest, self.options = guest, options
        guest.run(f"truncate -s {3 * VOLUME_MIB}M /ram/disk; touch /ram/log; chmod 666 /ram/disk")
        self.start()
        self.rpc("bdev_uring_create", filename="/ram/disk", name="base", block_size=512)
        self.rpc("bdev_lvol_create_lvstore", bdev_name="base", lvs_name="lvs0")
        self.rpc(
            "bdev_lvol_create",
            lvol_name="v0",
            size_in_mib=VOLUME_MIB,
            lvs_name="lvs0",
            thin_provision=True,
        )

    def start(self, *options: str) -> None:
        """Starts a process and waits until it serves."""
        before = self.guest.run("cat /tmp/target.pid 2>/dev/null || true").strip()
        command = shlex.join(["setsid", *COMMAND.split(), *self.options, *options])
        self.guest.run(
            f"export LD_LIBRARY_PATH={program_disk.PLACE}/lib; {command} >>/ram/log 2>&1 & "
            "echo $! >/tmp/target.pid"
        )
        end = time.monotonic() + 120
        while True:
            try:
                if self.rpc("virtlun_get_status"):
                    return
            except AssertionError:
                lives = self.guest.run("kill -0 $(cat /tmp/target.pid)", check=False) == ""
                assert lives and time.monotonic() < end, f"{before}: {self.words()}"
                time.sleep(0.1)

    def rpc(self, method: str, **params: object) -> Any:
        """Calls a method and returns its result; AssertionError with the error."""
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        if not params:
            del request["params"]
        said = self.guest.run(f"unix_call {SOCKET} {shlex.quote(json.dumps(request))}", check=False)
        assert said.startswith("{"), said
        answer = json.loads(said)
        assert "result" in answer, f"{method}: {answer}\n{self.words()}"
        return answer["result"]

    def words(self) -> str:
        """Returns the log, with the kernel's."""
        return self.guest.run("dmesg | tail -n 30; tail -n 60 /ram/log; ps")

    def kill(self) -> None:
        """As a crash, and a new process."""
        self.guest.run(f"kill -9 $(cat /tmp/target.pid); rm -f {SOCKET}")
        self.start()

    def terminate(self) -> None:
        """In order, and a new process."""
        self.guest.run(
            "pid=$(cat /tmp/target.pid); kill -TERM $pid; "
            "for i in $(seq 300); do [ -d /proc/$pid ] || exit 0; sleep .1; done; exit 1"
        )
        self.start()

    def upgrade(self) -> None:
        """A new process takes over from the one that serves."""
        before = self.guest.run("cat /tmp/target.pid").strip()
        self.start("--take-over")
        ended = f"for i in $(seq 300); do [ -d /proc/{before} ] || exit 0; sleep .1; done; exit 1"
        try:
            self.guest.run(ended, 240.0)
        except GuestError as error:
            raise AssertionError(f"pid {before} serves on:\n{self.words()}") from error


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Guest]:
    """With the programs; no sandbox refused a call, and nothing surprised the kernel."""
    names = ("virtlun-target", "virtlun-holder")
    image = program_disk.make(tmp_path, {name: binary(name) for name in names})
    with Guest(
        build(Kernel.BACKPORTS),
        tmp_path,
        emulator=newer(),
        memory_mib=640,
        deadline_s=300.0,
        extra=program_disk.options(image),
    ) as guest:
        guest.run(program_disk.MOUNT)
        guest.run(f"mkdir -p /ram; mount -t tmpfs -o size={4 * VOLUME_MIB}m tmpfs /ram")
        yield guest
        words = guest.run("cat /ram/*log; dmesg")
        assert SANDBOX_REFUSED not in words and "WARNING" not in words, words
        assert "BUG:" not in words, words


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
        done = io.status().requests
        way()
        io.goes_on(done)
        time.sleep(moments.uniform(0, 0.4))
    io.finish()
    (listed,) = target.rpc("virtlun_export_list")
    assert listed["path"] == f"/dev/{disk}"


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


def test_a_parked_device_is_read_and_not_written(target: TargetInside) -> None:
    guest, disk = target.guest, export(target)
    guest.run(f"dd if=/bin/busybox of=/dev/{disk} bs=4k count=1 oflag=direct")
    target.rpc("virtlun_export_park", bdev_name=VOLUME)
    guest.run(f"dd if=/dev/{disk} of=/dev/null bs=4k count=1 iflag=direct")
    target.rpc("virtlun_export_unpark", bdev_name=VOLUME)
    guest.run(f"dd if=/bin/busybox of=/dev/{disk} bs=4k count=1 oflag=direct")
    target.rpc("virtlun_export_delete", bdev_name=VOLUME)


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
