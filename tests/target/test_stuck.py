"""A disk that does not answer: whoever is not on it goes on."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from tests.support.initiator import Initiator
from tests.support.target import Target
from tests.target.conftest import MakeTarget

MIB = 1 << 20


def disk_of(backing: Target, size_in_mib: int = 64) -> str:
    """Exports a RAM disk of one target, as a file for another; needs root and /dev/fuse."""
    name = backing.rpc("bdev_malloc_create", num_blocks=size_in_mib * MIB // 512, block_size=512)
    path: str = backing.rpc("virtlun_export_create", bdev_name=name)["path"]
    return path


@contextmanager
def without_answers(backing: Target) -> Iterator[None]:
    """Stops the process that serves a disk: all I/O to it waits."""
    os.kill(backing.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(backing.pid, signal.SIGCONT)


def test_an_lvstore_whose_disk_does_not_answer_keeps_nobody_else_waiting(
    make_target: MakeTarget,
) -> None:
    backing, target = make_target().start(), make_target().start()
    target.rpc("bdev_aio_create", name="slow", filename=disk_of(backing), block_size=512)
    target.rpc("bdev_lvol_create_lvstore", bdev_name="slow", lvs_name="slow")
    for name in ("v0", "v1"):
        target.rpc("bdev_lvol_create", lvs_name="slow", lvol_name=name, size_in_mib=4)
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    with without_answers(backing):
        delete = threading.Thread(
            target=lambda: target.rpc("bdev_lvol_delete", name="slow/v0"), daemon=True
        )
        delete.start()
        end = time.monotonic() + 20
        while "slow/v0" in str(target.rpc("bdev_get_bdevs")):
            assert time.monotonic() < end, "the delete does not begin"
            time.sleep(0.01)
        target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=512)
        add = {"ctrlr": "vm-1", "scsi_target_num": 0}
        target.rpc("vhost_scsi_controller_add_target", **add, bdev_name="m0")
        target.rpc("vhost_scsi_controller_remove_target", **add)
        target.rpc("virtlun_export_create", bdev_name="m0")
        target.rpc("virtlun_export_delete", bdev_name="m0")
        assert delete.is_alive()
    delete.join(60)
    assert not delete.is_alive()
    (left,) = target.rpc("bdev_lvol_get_lvols", lvs_name="slow")
    assert left["name"] == "v1"
    target.rpc("bdev_lvol_delete", name="slow/v1")
    assert target.stop() == 0


def test_guests_on_a_disk_that_does_not_answer_keep_no_other_guest_waiting(
    make_target: MakeTarget,
) -> None:
    """All of them are served by one reactor."""
    backing, target = make_target().start(), make_target().start()
    target.rpc("bdev_aio_create", name="slow", filename=disk_of(backing), block_size=512)
    target.rpc("bdev_lvol_create_lvstore", bdev_name="slow", lvs_name="slow")
    target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=512)
    before, written, allocated = (random.Random(n).randbytes(8192) for n in range(3))
    zero = bytes([0x93, 8, *(0).to_bytes(8, "big"), *(2048).to_bytes(4, "big"), 0, 0])
    read: list[bytes] = []
    work: dict[str, Callable[[Initiator], object]] = {
        "read": lambda guest: read.append(guest.read(0, 16)),
        "write": lambda guest: guest.write(8, written),
        "allocate": lambda guest: guest.write(4096, allocated),
        "flush": lambda guest: guest.cdb(bytes([0x35, *bytes(9)])),
        "unmap": lambda guest: guest.cdb(zero, data_out=bytes(512)),
    }

    def controller(name: str, bdev: str) -> Initiator:
        target.rpc("vhost_create_scsi_controller", ctrlr=name)
        target.rpc(
            "vhost_scsi_controller_add_target", ctrlr=name, scsi_target_num=0, bdev_name=bdev
        )
        guest = stack.enter_context(Initiator(target.vhost_dir / name))
        guest.send("connect")
        guest.ready()
        guest.write(0, before)
        return guest

    with ExitStack() as stack:
        bystander = controller("other", "m0")
        guests = {}
        for name in work:
            target.rpc(
                "bdev_lvol_create",
                lvs_name="slow",
                lvol_name=name,
                size_in_mib=4,
                thin_provision=True,
            )
            guests[name] = controller(name, f"slow/{name}")
        with without_answers(backing):
            threads = [
                threading.Thread(target=work[name], args=(guest,)) for name, guest in guests.items()
            ]
            for thread in threads:
                thread.start()
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
        assert guests["flush"].read(0, 16) == before
        assert guests["unmap"].read(0, 16) == bytes(8192)
    assert target.stop() == 0
