"""Copies by metadata alone: EXTENDED COPY between volumes of an lvstore that shares clusters."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from pydataplane.client import Client
from pydataplane.errors import VolumeError
from pydataplane.volumes import Volumes
from tests.support.initiator import Initiator
from tests.support.target import Target

MIB = 1 << 20
SIZE_MIB = 1024
SEGMENT_BLOCKS = 31 * MIB // 512
"""Whole clusters, of which a segment holds no more than 65535 blocks."""
SOURCE, DESTINATION = 0, 1
METADATA_BYTES = 4 * MIB
"""More than the records of all segments take, and much less than a copy would."""


def extended_copy(vm: Initiator, volumes: list[str], mib: int) -> None:
    """Copies so many MiB from the beginning of one to that of the other."""
    units = [
        bytes([0xE4, 0, 0, 0, 1, 0xA, 0, 18, 0x10, 0])
        + uuid.UUID(of).bytes
        + bytes([0, 0, 0, 0, 2, 0])
        for of in volumes
    ]
    blocks = mib * MIB // 512
    segments = [
        bytes([2, 0, 0, 0x18, 0, SOURCE, 0, DESTINATION, 0, 0])
        + min(SEGMENT_BLOCKS, blocks - lba).to_bytes(2, "big")
        + lba.to_bytes(8, "big") * 2
        for lba in range(0, blocks, SEGMENT_BLOCKS)
    ]
    header = bytes([1, 0, 0, 64, 0, 0, 0, 0]) + (28 * len(segments)).to_bytes(4, "big") + bytes(4)
    data = b"".join([header, *units, *segments])
    cdb = b"\x83".ljust(10, bytes(1)) + len(data).to_bytes(4, "big") + bytes(2)
    answer = vm.cdb(cdb, target=SOURCE, data_out=data)
    assert (answer["response"], answer["status"]) == (0, 0), answer


@pytest.fixture
def volumes(target: Target) -> list[str]:
    """A source and a destination of 1 GiB on one controller."""
    file = target.make_file("lvs0.img", 3 << 30)
    target.rpc("bdev_uring_create", filename=str(file), name="lvs0-base", block_size=512)
    target.rpc(
        "bdev_lvol_create_lvstore",
        bdev_name="lvs0-base",
        lvs_name="lvs0",
        cluster_sz=MIB,
        share_clusters=True,
    )
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


def written(target: Target, bdev: str) -> int:
    (stat,) = target.rpc("bdev_get_iostat", name=bdev)["bdevs"]
    count: int = stat["bytes_written"]
    return count


def block(number: int) -> bytes:
    return number.to_bytes(4, "big") * 128


def allocated(target: Target, name: str) -> int:
    (bdev,) = target.rpc("bdev_get_bdevs", name=f"lvs0/{name}")
    clusters: int = bdev["driver_specific"]["lvol"]["num_allocated_clusters"]
    return clusters


def test_a_copy_of_a_gigabyte_moves_no_data_and_survives_a_kill(
    target: Target, vm: Initiator, volumes: list[str]
) -> None:
    for mib in range(SIZE_MIB):
        vm.write(mib * MIB // 512, block(mib + 1), target=SOURCE)
    before = written(target, "lvs0-base"), written(target, "lvs0/destination")
    extended_copy(vm, volumes, SIZE_MIB)
    after = written(target, "lvs0-base"), written(target, "lvs0/destination")
    assert after[0] - before[0] < METADATA_BYTES
    assert after[1] == before[1]
    assert allocated(target, "destination") == SIZE_MIB
    (store,) = target.rpc("bdev_lvol_get_lvstores")
    assert store["share_clusters"] is True
    free = store["total_data_clusters"] - 2 * SIZE_MIB
    assert store["free_clusters"] == free, "what a write to either may take is kept"

    changed = {SOURCE: {34: 7000, 51: 7000}, DESTINATION: {68: 9000, 85: 9000}}
    for of, its in changed.items():
        for mib, number in its.items():
            vm.write(mib * MIB // 512, block(number), target=of)

    def are_apart() -> None:
        for of, its in changed.items():
            for mib in range(0, SIZE_MIB, 17):
                found = vm.read(mib * MIB // 512, 1, target=of)
                assert found == block(its.get(mib, mib + 1)), (of, mib)
        checked = target.rpc("virtlun_lvstore_check", lvs_name="lvs0")
        assert checked["problems"] == []

    are_apart()
    target.kill9()
    target.start()
    vm.send("connect")
    for number, _ in enumerate(volumes):
        vm.ready(number)
    are_apart()


def test_an_lvstore_that_is_there_and_does_not_share_is_not_taken_for_one(target: Target) -> None:
    volumes, file = Volumes(Client(target.rpc_socket)), target.directory / "plain.img"
    made = volumes.create_lvstore("plain", file, 1 << 30)
    with pytest.raises(VolumeError) as refused:
        volumes.create_lvstore("plain", file, share_clusters=True)
    assert str(refused.value) == (
        "lvstore plain is there already, and shares no clusters: have it do so with "
        "'virtlun lvstore upgrade plain --share-clusters'"
    )
    volumes.upgrade_lvstore(made.uuid, share_clusters=True)
    assert volumes.create_lvstore("plain", file, share_clusters=True).uuid == made.uuid
