"""A real guest on vhost-user-blk, with the machine's own QEMU, which connects again by itself."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guest.conftest import checksum
from tests.guest.emulator import Emulator, newer, stock
from tests.guest.image import Image
from tests.support.migration import is_over, passes
from tests.support.qemu import CMDLINE, Guest, reconnect_option
from tests.support.restarts import choose_seed
from tests.support.target import Target
from tests.support.verified_io import VerifiedIo, audit
from tests.support.wait import until

pytestmark = pytest.mark.vm

MIB = 1 << 20
VCPUS = 2
SIZE_MIB = 48
RESTARTS = 4
NAME = "vda"
"""The guest's name of its only virtio-blk disk."""


def options(
    target: Target, emulator: Emulator, *, controller: str = "b0", queues: int = VCPUS
) -> tuple[str, ...]:
    """QEMU's options for the disk of a controller."""
    again = reconnect_option(emulator, 1000)
    return (
        *("-chardev", f"socket,id={controller},path={target.vhost_dir / controller},{again}"),
        *(
            "-device",
            f"vhost-user-blk-pci,id=disk-{controller},chardev={controller},num-queues={queues}",
        ),
    )


class Machine:
    """A target with a thin volume, and a guest whose disk it is."""

    def __init__(self, target: Target, image: Image, scratch: Path, emulator: Emulator) -> None:
        """Boots the guest."""
        self.target, self.emulator = target, emulator
        target.make_lvstore("lvs0", 128 * MIB)
        self.volume = target.make_thin("v", SIZE_MIB)
        target.rpc("vhost_create_blk_controller", ctrlr="b0", dev_name="lvs0/v", serial="disk-0")
        self.guest = Guest(
            image,
            scratch / "guest",
            vcpus=VCPUS,
            emulator=emulator,
            extra=options(target, emulator),
        )

    def attribute(self, name: str) -> str:
        """Returns what the guest's kernel says of the disk."""
        return self.guest.run(f"cat /sys/block/{NAME}/{name}").strip()

    def allocated(self) -> int:
        """Returns the clusters that the volume has."""
        (bdev,) = self.target.rpc("bdev_get_bdevs", name="lvs0/v")
        count: int = bdev["driver_specific"]["lvol"]["num_allocated_clusters"]
        return count


@pytest.fixture
def target(scratch: Path) -> Iterator[Target]:
    """A running target without controllers."""
    target = Target(scratch).start()
    yield target
    status, words = target.stop(), target.words()
    assert status == 0, words
    assert "panicked" not in words, words


@pytest.fixture(params=["stock", pytest.param("newer", marks=pytest.mark.nightly)], ids=str)
def machine(
    scratch: Path, image: Image, target: Target, request: pytest.FixtureRequest
) -> Iterator[Machine]:
    """The machine at work."""
    emulator = stock() if request.param == "stock" else newer()
    machine = Machine(target, image, scratch, emulator)
    yield machine
    machine.guest.stop()


@pytest.mark.nightly
def test_a_guest_reads_writes_discards_and_sees_its_disk_grow(machine: Machine) -> None:
    guest, target = machine.guest, machine.target
    assert machine.attribute("size") == str(SIZE_MIB * MIB // 512)
    assert machine.attribute("serial") == "disk-0"
    assert machine.attribute("ro") == "0"
    assert int(machine.attribute("queue/discard_max_bytes")) > 0
    assert int(machine.attribute("queue/write_zeroes_max_bytes")) > 0
    assert machine.attribute("queue/write_cache") == "write back"
    assert len(guest.run(f"ls /sys/block/{NAME}/mq").split()) == VCPUS
    guest.run(f"dd if=/dev/urandom of=/dev/{NAME} bs=1M count=8 oflag=direct conv=fsync")
    before = checksum(guest, NAME, 8)
    assert checksum(guest, NAME, 8) == before
    had = machine.allocated()
    assert had >= 8
    guest.run(f"blkdiscard -o 0 -l {4 * MIB} /dev/{NAME}")
    assert machine.allocated() == had - 4
    zeros = guest.run(
        f"dd if=/dev/{NAME} bs=1M count=4 iflag=direct 2>/dev/null | tr -d '\\0' | wc -c"
    )
    assert zeros.strip() == "0"
    # Seen in the guest without a word from it.
    target.rpc("bdev_lvol_resize", name="lvs0/v", size_in_mib=64)
    guest.agent.wait_for(f"grep -x {64 * MIB // 512} /sys/block/{NAME}/size")
    guest.run(f"dd if=/dev/zero of=/dev/{NAME} bs=1M seek=63 count=1 oflag=direct")
    # And what changed while nobody was there.
    assert target.stop() == 0
    target.start()
    guest.agent.wait_for(f"dd if=/dev/{NAME} of=/dev/null bs=4k count=1 iflag=direct && echo read")
    target.rpc("bdev_lvol_resize", name="lvs0/v", size_in_mib=80)
    guest.agent.wait_for(f"grep -x {80 * MIB // 512} /sys/block/{NAME}/size")
    assert "I/O error" not in guest.run("dmesg")
    shown = target.rpc("vhost_get_controllers")[0]["backend_specific"]["block"]
    assert shown["resize_event_at"] is not None


@pytest.mark.nightly
def test_a_guest_notices_only_a_pause(machine: Machine) -> None:
    """Crashes, orderly ends and an upgrade of the target under verified I/O."""
    target, guest, seed = machine.target, machine.guest, choose_seed()
    moments = random.Random(seed)
    io = VerifiedIo(guest, NAME, seed=seed, threads=VCPUS, depth=8)
    ways = ["kill"] * RESTARTS + ["terminate"] * 2 + ["upgrade"]
    moments.shuffle(ways)
    for way in ways:
        done = io.status().requests
        if way == "kill":
            target.crash()
        elif way == "terminate":
            assert target.stop() == 0, target.words()
            target.start()
        else:
            target.upgrade()
        io.goes_on(done)
        time.sleep(moments.uniform(0, 0.4))
    ledger = io.finish()
    log = guest.run("dmesg")
    assert "I/O error" not in log, log
    guest.stop()
    target.rpc("vhost_delete_controller", ctrlr="b0", force=True)
    target.attach("audit", "lvs0/v")
    audit(target, "audit", ledger, seed)


@pytest.mark.nightly
def test_what_the_target_writes_during_live_migration_arrives(
    scratch: Path, image: Image, target: Target
) -> None:
    """Pages that only the target wrote reach the other side, as in test_migration.py."""
    mib = 24
    target.rpc("bdev_malloc_create", name="disk", num_blocks=mib * 2048, block_size=512)
    for name in ("b0", "b1"):
        target.rpc("vhost_create_blk_controller", ctrlr=name, dev_name="disk", shareable=True)
    # QEMU before 9.0 loses writes of the guest itself (test_migration_many.py).
    emulator = newer()
    socket = scratch / "migration"
    with contextlib.ExitStack() as stack:

        def start(controller: str, *extra: str, incoming: str | None = None) -> Guest:
            folder = scratch / controller
            guest = Guest(
                image,
                folder,
                emulator=emulator,
                incoming=incoming,
                extra=(*options(target, emulator, controller=controller, queues=1), *extra),
            )
            stack.callback(guest.stop)
            return guest

        source = start("b0", "-append", f"{CMDLINE} init_on_alloc=0")
        source.run(f"dd if=/dev/urandom of=/dev/{NAME} bs=1M count={mib} oflag=direct")
        written = checksum(source, NAME)
        arriving = start("b1", incoming=f"unix:{socket}")
        # As long as somebody has the disk open, its page cache stays.
        source.run(f"sleep 10000 < /dev/{NAME} > /dev/null 2>&1 &")
        source.run("head -c 8000000 /dev/urandom > /tmp/noise")
        source.run(
            "(while :; do cat /tmp/noise > /tmp/busy; done) > /dev/null 2>&1 & echo $! > /tmp/pid"
        )
        source.qmp("migrate-set-parameters", **{"max-bandwidth": 32 << 20, "downtime-limit": 1})
        source.qmp("migrate", uri=f"unix:{socket}")
        until(lambda: passes(source) >= 2, "a pass over all memory")
        source.qmp("migrate-set-parameters", **{"max-bandwidth": 2 << 20})
        source.run(f"cat /dev/{NAME} > /dev/null")
        assert not is_over(source), "it must not switch before the pages are written"
        source.qmp("migrate-set-parameters", **{"max-bandwidth": 1 << 32, "downtime-limit": 30000})
        until(lambda: is_over(source), "migrated")
        source.stop()
        arriving.arrived()
        arriving.run("kill $(cat /tmp/pid)")
        sectors = f"awk '{{print $3}}' /sys/block/{NAME}/stat"
        before = arriving.run(sectors)
        assert arriving.run(f"md5sum < /dev/{NAME}").split()[0] == written
        assert arriving.run(sectors) == before, "the sum was taken from the page cache"
        assert checksum(arriving, NAME) == written
        arriving.run(f"dd if=/dev/zero of=/dev/{NAME} bs=1M count=1 oflag=direct")
