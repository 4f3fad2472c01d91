"""A VM's disk is its own: no other process gets it while that VM's QEMU is there."""

from __future__ import annotations

import socket

import pytest

from tests.guest.conftest import BootGuest, checksum, disk
from tests.guest.emulator import Emulator
from tests.support.initiator import Initiator, Refused
from tests.support.night import at_night
from tests.support.target import Target

pytestmark = pytest.mark.vm

RECONNECT_MS = 100


def is_refused(stranger: Initiator) -> bool:
    """Tries to connect, and to use the disk."""
    try:
        stranger.send("connect")
        stranger.ready()
    except Refused:
        return True
    return False


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("emulator", "rounds"),
    [("newer", 2), at_night("newer", 10), at_night("stock", 10)],
    indirect=["emulator"],
)
def test_nobody_else_gets_the_disk_of_a_vm_when_the_target_restarts(
    target: Target, boot: BootGuest, emulator: Emulator, rounds: int
) -> None:
    file = target.make_file("disk.img", 4 << 20)
    target.rpc("bdev_uring_create", filename=str(file), name="d0", block_size=512)
    target.add_lun("vm0", "d0")
    options = {"emulator": emulator}
    if emulator.reconnects:
        options["reconnect_ms"] = RECONNECT_MS  # type: ignore[assignment]
    path = target.vhost_dir / "vm0"
    # Connected, but silent: whoever looks whether somebody listens keeps no VM from its disks.
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(path))
        guest = boot(**options)
    name = disk(guest, 0)
    guest.run(f"dd if=/dev/urandom of=/dev/{name} bs=1M count=4 oflag=direct")
    written = checksum(guest, name)
    with Initiator(path) as stranger:
        assert is_refused(stranger)
        for _ in range(rounds):
            target.crash()
            # Before QEMU: it comes again some time later, or, as an older one, never.
            assert is_refused(stranger)
            assert is_refused(stranger)
            if emulator.reconnects:
                assert checksum(guest, name) == written
        assert is_refused(stranger)
        (controller,) = target.rpc("vhost_get_controllers")
        assert controller["owner"]["pid"] == guest.process.pid
        # A VM that is started again is another process.
        guest.stop()
        again = boot(**options)
        assert checksum(again, disk(again, 0)) == written
        assert is_refused(stranger)
    assert f"refused process {stranger.pid} (virtlun-bench)" in target.words()
    assert f"belongs to process {guest.process.pid} (" in target.words()
