"""A disk that does not answer: whoever is not on it goes on."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pydataplane.errors import RpcError
from tests.support.frozen import frozen
from tests.support.initiator import Initiator, Refused, connected
from tests.support.target import Target
from tests.support.wait import until
from tests.target.conftest import MakeTarget

MIB = 1 << 20


@dataclass(frozen=True)
class Disks:
    """Disks that can be kept from answering: RAM disks that another target exports as files."""

    backing: Target

    def path(self, size_in_mib: int = 64) -> str:
        """Makes a disk; returns its path."""
        blocks = size_in_mib * MIB // 512
        name = self.backing.rpc("bdev_malloc_create", num_blocks=blocks, block_size=512)
        path: str = self.backing.rpc("virtlun_export_create", bdev_name=name)["path"]
        return path

    @contextmanager
    def without_answers(self) -> Iterator[None]:
        """Stops the process that serves the disks: all I/O to them waits."""
        with frozen(self.backing.pid):
            yield


@pytest.fixture
def disks(make_target: MakeTarget) -> Disks:
    """Disks for `target`; needs root and /dev/fuse."""
    return Disks(make_target().start())


def lvstore_on(target: Target, name: str, path: str, *volumes: str) -> None:
    """Makes an lvstore with volumes of 4 MiB on a disk."""
    target.rpc("bdev_aio_create", name=name, filename=path, block_size=512)
    target.rpc("bdev_lvol_create_lvstore", bdev_name=name, lvs_name=name)
    for volume in volumes:
        target.rpc("bdev_lvol_create", lvs_name=name, lvol_name=volume, size_in_mib=4)


def waiting(target: Target) -> list[str]:
    """What waits for a disk."""
    return [wait["name"] for wait in target.rpc("virtlun_get_status")["waiting"]]


def test_an_lvstore_whose_disk_does_not_answer_keeps_nobody_else_waiting(
    disks: Disks, target: Target
) -> None:
    lvstore_on(target, "slow", disks.path(), "v0", "v1")
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    with disks.without_answers():
        refused: list[int] = []

        def remove() -> None:
            try:
                target.rpc("bdev_lvol_delete", name="slow/v0")
            except RpcError as why:
                refused.append(why.code)

        delete = threading.Thread(target=remove, daemon=True)
        delete.start()
        until(lambda: "slow/v0" not in str(target.rpc("bdev_get_bdevs")))
        target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=512)
        add = {"ctrlr": "vm-1", "scsi_target_num": 0}
        target.rpc("vhost_scsi_controller_add_target", **add, bdev_name="m0")
        target.rpc("vhost_scsi_controller_remove_target", **add)
        target.rpc("virtlun_export_create", bdev_name="m0")
        target.rpc("virtlun_export_delete", bdev_name="m0")
        # On a slow machine it may have given up by now, but it cannot have done its work.
        assert delete.is_alive() or refused == [-16]
    delete.join(60)
    assert not delete.is_alive()
    if refused:
        # Then nothing was done.
        target.rpc("bdev_lvol_delete", name="slow/v0")
    (left,) = target.rpc("bdev_lvol_get_lvols", lvs_name="slow")
    assert left["name"] == "v1"
    target.rpc("bdev_lvol_delete", name="slow/v1")
    assert target.stop() == 0


def test_a_disk_that_does_not_answer_at_the_start_keeps_nobody_else_waiting(
    disks: Disks, target: Target
) -> None:
    lvstore_on(target, "slow", disks.path(), "v0")
    lvstore_on(target, "fast", str(target.make_file("fast.img", 64 * MIB)), "v0")
    target.attach("vm-1", "fast/v0", "slow/v0")
    before = target.configuration()
    assert target.stop() == 0
    with disks.without_answers():
        target.start()
        until(lambda: waiting(target) == ["bdev slow"], "only the slow disk is waited for")
        problems = target.rpc("virtlun_get_status")["restore_problems"]
        assert len(problems) == 2, problems
        assert problems[0].startswith("bdev slow is not restored: its disk does not answer")
        with connected(target, "vm-1") as guest:
            guest.write(0, bytes([7]) * 4096)
            # A change that is recorded meanwhile loses nothing of what waits.
            target.rpc("bdev_null_create", name="n0", num_blocks=8, block_size=512)
            for subsystem, calls in before.items():
                assert all(call in target.configuration()[subsystem] for call in calls)
        assert target.stop() == 0
        target.start()
        guest = connected(target, "vm-1")
    with guest:
        until(lambda: not waiting(target))
        until(lambda: not target.rpc("virtlun_get_status")["restore_problems"])
        guest.ready(1)
        guest.write(0, bytes([9]) * 4096, target=1)
        assert guest.read(0, 8) == bytes([7]) * 4096
    target.restart()
    assert target.rpc("virtlun_get_status")["restore_problems"] == []


@pytest.mark.nightly
def test_what_is_deleted_while_its_disk_does_not_answer_does_not_come_back(
    disks: Disks, target: Target
) -> None:
    lvstore_on(target, "slow", disks.path(), "v0")
    assert target.stop() == 0
    with disks.without_answers():
        target.start()
        assert target.rpc("bdev_aio_delete", name="slow") is True
        assert target.rpc("virtlun_get_status")["restore_problems"] == []
    until(lambda: not waiting(target) and not target.rpc("bdev_get_bdevs"))
    assert target.configuration()["bdev"] == []
    target.restart()
    assert target.rpc("bdev_get_bdevs") == []


@pytest.mark.nightly
def test_what_replaces_a_bdev_while_its_disk_does_not_answer_stays(
    disks: Disks, target: Target
) -> None:
    lvstore_on(target, "slow", disks.path(), "v0")
    assert target.stop() == 0
    with disks.without_answers():
        target.start()
        assert waiting(target) == ["bdev slow"]
        target.rpc("bdev_aio_delete", name="slow")
        # Of the same name, on another disk.
        lvstore_on(target, "slow", str(target.make_file("new.img", 64 * MIB)), "v0")
        before = target.rpc("bdev_get_bdevs"), target.configuration()["bdev"]
    until(lambda: not waiting(target))
    # The old disk's thread has done all that it does when its line is there.
    until(lambda: "was deleted or replaced before its disk answered" in target.words())
    assert (target.rpc("bdev_get_bdevs"), target.configuration()["bdev"]) == before
    assert target.rpc("virtlun_get_status")["restore_problems"] == []
    target.restart()
    assert (target.rpc("bdev_get_bdevs"), target.configuration()["bdev"]) == before


@pytest.mark.nightly
def test_a_controller_is_started_before_disks_that_it_does_not_name_answer(
    disks: Disks, target: Target
) -> None:
    lvstore_on(target, "slow", disks.path(), "v0")
    lvstore_on(target, "fast", str(target.make_file("fast.img", 64 * MIB)), "v0")
    target.rpc("bdev_aio_create", name="bare", filename=disks.path(), block_size=512)
    # Those on slow disks are the first in the configuration.
    for name, bdev in (("slow", "slow/v0"), ("bare", "bare"), ("fast", "fast/v0")):
        target.attach(f"on-{name}", bdev)
    assert target.stop() == 0
    with disks.without_answers():
        before = len(target.words())
        target.start()
        assert sorted(waiting(target)) == ["bdev bare", "bdev slow"]
        said = target.words()[before:]
        events = [
            "controller on-fast restored",
            "bdev slow waits for its disk",
            "controller on-slow restored",
        ]
        at = [said.index(event) for event in events]
        assert at == sorted(at), said
        with connected(target, "on-fast") as guest:
            guest.write(0, bytes([7]) * 4096)
    until(lambda: not target.rpc("virtlun_get_status")["restore_problems"])
    # A disk is searched for an lvstore first, and in use while it is.
    for name in ("slow", "bare"):
        with connected(target, f"on-{name}") as guest:
            guest.write(0, bytes([8]) * 4096)


def test_a_new_bdev_on_a_disk_that_does_not_answer_holds_up_no_other_change(
    disks: Disks, target: Target
) -> None:
    path = disks.path()
    with disks.without_answers():
        create = threading.Thread(
            target=lambda: target.rpc("bdev_aio_create", name="slow", filename=path), daemon=True
        )
        create.start()
        until(lambda: waiting(target) == ["bdev slow"])
        lvstore_on(target, "fast", str(target.make_file("fast.img", 64 * MIB)), "v0")
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
        target.rpc("bdev_aio_delete", name="fast")
        assert create.is_alive()
    create.join(60)
    assert not create.is_alive()
    assert [bdev["name"] for bdev in target.rpc("bdev_get_bdevs")] == ["slow"]
    assert waiting(target) == []


def test_guests_on_a_disk_that_does_not_answer_keep_no_other_guest_waiting(
    disks: Disks, target: Target
) -> None:
    """All of them are served by one reactor."""
    lvstore_on(target, "slow", disks.path())
    target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=512)
    before, written, allocated = (random.Random(n).randbytes(8192) for n in range(3))
    large = random.Random(3).randbytes(512 << 10)
    zero = bytes([0x93, 8, *(0).to_bytes(8, "big"), *(2048).to_bytes(4, "big"), 0, 0])
    read: list[bytes] = []
    work: dict[str, Callable[[Initiator], object]] = {
        "read": lambda guest: read.append(guest.read(0, 16)),
        "write": lambda guest: guest.write(8, written),
        "allocate": lambda guest: guest.write(4096, allocated),
        "flush": lambda guest: guest.cdb(bytes([0x35, *bytes(9)])),
        "unmap": lambda guest: guest.cdb(zero, data_out=bytes(512)),
        "large": lambda guest: guest.write(0, large),
    }

    def guest_on(name: str, bdev: str) -> Initiator:
        target.attach(name, bdev)
        guest = stack.enter_context(connected(target, name))
        guest.write(0, before)
        return guest

    with ExitStack() as stack:
        bystander = guest_on("other", "m0")
        guests = {}
        for name in work:
            target.rpc(
                "bdev_lvol_create",
                lvs_name="slow",
                lvol_name=name,
                size_in_mib=4,
                thin_provision=True,
            )
            guests[name] = guest_on(name, f"slow/{name}")
        with disks.without_answers():
            threads = []
            # On FUSE, of which this disk is, a flush and a hole have the file's lock, and a write
            # waits for it in the call that hands it to the kernel. So the writes come last.
            for names in (("flush", "unmap"), ("allocate",), ("write", "large", "read")):
                for name in names:
                    threads.append(threading.Thread(target=work[name], args=(guests[name],)))
                    threads[-1].start()
                for n in range(64):
                    bystander.write(16, bytes([n]) * 512)
                    assert bystander.read(16, 1) == bytes([n]) * 512
                    time.sleep(0.005)
            assert all(thread.is_alive() for thread in threads)
            target.rpc("vhost_create_scsi_controller", ctrlr="late")
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert read == [before]
        assert guests["write"].read(0, 24) == before[:4096] + written
        assert guests["allocate"].read(4096, 16) == allocated
        assert guests["allocate"].read(0, 16) == before
        assert guests["large"].read(0, 1024) == large
        assert guests["flush"].read(0, 16) == before
        assert guests["unmap"].read(0, 16) == bytes(8192)
    assert target.stop() == 0


@contextmanager
def ext4_on(path: str, folder: Path) -> Iterator[None]:
    """A file system on a file, at `folder`, that writes nothing before it is told to."""
    subprocess.run(["mkfs.ext4", "-q", "-E", "nodiscard", path], check=True)
    folder.mkdir()
    options = "loop,commit=3600,nodiscard"
    subprocess.run(["mount", "-t", "ext4", "-o", options, path, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_session_begins_while_the_disk_of_the_state_directory_does_not_answer(
    disks: Disks, make_target: MakeTarget, scratch: Path
) -> None:
    folder = scratch / "ext4"
    with ext4_on(disks.path(), folder):
        target = make_target()
        target.state_dir = folder / "state"
        target.start()
        target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=512)
        target.attach("vm", "m0")
        with Initiator(target.vhost_dir / "vm") as guest:
            with disks.without_answers():
                guest.send("connect")
                guest.ready()
                (shown,) = target.rpc("vhost_get_controllers", name="vm")
                assert shown["owner"]["pid"] == guest.pid
                # Its owner is known to the next process.
                target.kill9()
            target.start()
            with Initiator(target.vhost_dir / "vm") as stranger, pytest.raises(Refused):
                stranger.send("connect")
                stranger.ready()
            until(lambda: "belongs to process" in target.words(), "it is said")
        assert target.stop() == 0
