"""Copies by the target between volumes of one lvstore: EXTENDED COPY and WRITE USING TOKEN."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from tests.support.initiator import Initiator
from tests.support.night import by_day
from tests.support.target import Target

MIB = 1 << 20
SIZE_MIB = 16
BLOCKS = SIZE_MIB * MIB // 512
DATA_MIB = 5
"""Where the source has data, a cluster of it."""
OLD_MIB = 9
"""Where the destination has some."""
SOURCE, DESTINATION = 0, 1

Copy = Callable[[Initiator, list[str]], None]


def _ordered(
    vm: Initiator, target: int, cdb: list[bytes], data: bytes = b"", data_in: int = 0
) -> bytes:
    """Does a command of 16 bytes, whose data is as long as its bytes 10 to 13 say."""
    length = (len(data) or data_in).to_bytes(4, "big")
    whole = b"".join(cdb).ljust(10, bytes(1)) + length + bytes(2)
    answer = vm.cdb(whole, target=target, data_out=data, data_in_len=data_in)
    assert (answer["response"], answer["status"]) == (0, 0), answer
    read: bytes = answer["data_in"]
    return read


def extended_copy(vm: Initiator, volumes: list[str]) -> None:
    units = [
        bytes([0xE4, 0, 0, 0, 1, 0xA, 0, 18, 0x10, 0])
        + uuid.UUID(of).bytes
        + bytes([0, 0, 0, 0, 2, 0])
        for of in volumes
    ]
    step = BLOCKS // 2
    segments = [
        bytes([2, 0, 0, 0x18, 0, SOURCE, 0, DESTINATION, 0, 0])
        + step.to_bytes(2, "big")
        + lba.to_bytes(8, "big") * 2
        for lba in (0, step)
    ]
    header = bytes([1, 0, 0, 64, 0, 0, 0, 0]) + (28 * 2).to_bytes(4, "big") + bytes(4)
    _ordered(vm, SOURCE, [b"\x83"], b"".join([header, *units, *segments]))


def by_token(vm: Initiator, _volumes: list[str]) -> None:
    every = bytes(8) + BLOCKS.to_bytes(4, "big") + bytes(4)
    populate = bytes([0, 30, *bytes(12), 0, 16]) + every
    _ordered(vm, SOURCE, [b"\x83\x10", bytes(7), b"\x01"], populate)
    told = _ordered(vm, SOURCE, [b"\x84\x07", bytes(3), b"\x01"], data_in=1024)
    token = told[38 : 38 + 512]
    write = (534 + 16).to_bytes(2, "big") + bytes(14) + token + bytes(6) + b"\x00\x10" + every
    _ordered(vm, DESTINATION, [b"\x83\x11", bytes(7), b"\x02"], write)


@pytest.fixture
def volumes(target: Target) -> list[str]:
    """A source and a destination, of which each has one cluster, on one controller."""
    target.make_lvstore(size=64 * MIB)
    target.rpc("vhost_create_scsi_controller", ctrlr="vm")
    made = [target.make_thin(name, SIZE_MIB) for name in ("source", "destination")]
    for number, name in enumerate(("source", "destination")):
        target.add_lun("vm", f"lvs0/{name}", number)
    return made


@pytest.fixture
def vm(target: Target, volumes: list[str]) -> Iterator[Initiator]:
    with Initiator(target.vhost_dir / "vm") as initiator:
        initiator.send("connect")
        for number, _ in enumerate(volumes):
            initiator.ready(number)
        yield initiator


def allocated(target: Target, name: str) -> int:
    (bdev,) = target.rpc("bdev_get_bdevs", name=f"lvs0/{name}")
    clusters: int = bdev["driver_specific"]["lvol"]["num_allocated_clusters"]
    return clusters


def bytes_of(target: Target, name: str, kind: str) -> int:
    (bdev,) = target.rpc("bdev_get_iostat", name=f"lvs0/{name}")["bdevs"]
    count: int = bdev[f"bytes_{kind}"]
    return count


@by_day("by_token")
@pytest.mark.parametrize("copy", [extended_copy, by_token])
def test_what_a_thin_volume_has_no_room_for_is_not_copied_but_unmapped(
    target: Target, vm: Initiator, volumes: list[str], copy: Copy
) -> None:
    data = bytes(range(256)) * 2048
    vm.write(DATA_MIB * MIB // 512, data, target=SOURCE)
    vm.write(OLD_MIB * MIB // 512, data, target=DESTINATION)
    before = bytes_of(target, "source", "read"), bytes_of(target, "destination", "written")
    copy(vm, volumes)
    after = bytes_of(target, "source", "read"), bytes_of(target, "destination", "written")
    assert (after[0] - before[0], after[1] - before[1]) == (MIB, MIB)
    assert allocated(target, "destination") == 1
    for mib in range(SIZE_MIB):
        first = data if mib == DATA_MIB else bytes(len(data))
        assert vm.read(mib * MIB // 512, len(data) // 512, target=DESTINATION) == first
