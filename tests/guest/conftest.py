"""A target and real guests on it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.guest.emulator import Emulator, newer, stock
from tests.guest.image import Image, build
from tests.support.qemu import Guest
from tests.support.scratch import short_directory
from tests.support.target import Target

MIB = 1 << 20

BootGuest = Callable[..., Guest]


@pytest.fixture(scope="session")
def image() -> Image:
    """Debian's kernel and the test initramfs."""
    return build()


@pytest.fixture(scope="session", params=["stock", "newer"])
def emulator(request: pytest.FixtureRequest) -> Emulator:
    """The machine's own QEMU, and one that reconnects: a test that takes it runs with both."""
    return stock() if request.param == "stock" else newer()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory with a path short enough for sockets."""
    with short_directory("vg-") as path:
        yield path


@pytest.fixture
def target(scratch: Path) -> Iterator[Target]:
    """A running target with the controller `vm0`."""
    target = Target(scratch)
    target.start()
    target.rpc("vhost_create_scsi_controller", ctrlr="vm0")
    yield target
    status = target.stop()
    words = target.words()
    assert status == 0, f"exit status {status} of the target:\n{words}"
    assert "panicked" not in words, words


@pytest.fixture
def boot(scratch: Path, target: Target, image: Image) -> Iterator[BootGuest]:
    """Boots guests on controllers of the target; they are stopped before it is.

    Takes the names of the controllers (default: `vm0`; with `none`, no device at all) and the
    options of `Guest`.
    """
    guests: list[Guest] = []

    def start(*controllers: str, none: bool = False, **options: object) -> Guest:
        names = () if none else controllers or ("vm0",)
        paths = tuple(target.vhost_dir / name for name in names)
        folder = scratch / f"guest{len(guests)}"
        guests.append(Guest(image, folder, controllers=paths, **options))  # type: ignore[arg-type]
        return guests[-1]

    yield start
    for guest in guests:
        guest.stop()


def add_malloc(target: Target, number: int, mib: int, block_size: int = 512) -> str:
    """Shows a new RAM disk as target `number` of `vm0`; returns the bdev's name."""
    name = f"malloc{number}"
    target.rpc(
        "bdev_malloc_create",
        name=name,
        num_blocks=mib * MIB // block_size,
        block_size=block_size,
    )
    add(target, number, name)
    return name


def add(target: Target, number: int, bdev: str, **options: object) -> None:
    """Shows a bdev as target `number` of `vm0`."""
    result = target.rpc(
        "vhost_scsi_controller_add_target",
        ctrlr="vm0",
        scsi_target_num=number,
        bdev_name=bdev,
        **options,
    )
    assert result == number


def remove(target: Target, number: int) -> None:
    """Takes target `number` of `vm0` away."""
    target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm0", scsi_target_num=number)


def disk(guest: Guest, number: int) -> str:
    """Returns the guest's name of the disk at target `number`, such as `sda`, once it is there."""
    return guest.agent.wait_for(f"ls /sys/bus/scsi/devices/0:0:{number}:0/block | grep .").strip()


def add_known(target: Target, number: int, mib: int) -> str:
    """Shows a file of random bytes as target `number` of `vm0`; returns its MD5 sum."""
    data = random.Random(number).randbytes(mib * MIB)
    name = f"known{number}"
    file = target.make_file(f"{name}.img", len(data))
    file.write_bytes(data)
    target.rpc("bdev_uring_create", filename=str(file), name=name, block_size=512)
    add(target, number, name)
    return hashlib.md5(data).hexdigest()


def checksum(guest: Guest, name: str, mib: int | None = None) -> str:
    """Returns the MD5 sum of a disk, or of its first `mib`, read past the guest's page cache.

    Raises:
        GuestError: a read failed; the text is what dd said.
    """
    count = "" if mib is None else f" count={mib}"
    return guest.run(
        f"dd if=/dev/{name} bs=1M iflag=direct{count} 2> /tmp/dd | md5sum"
        " || { cat /tmp/dd; false; }"
    ).split()[0]
