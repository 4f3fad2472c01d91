"""Bdevs with T10 protection information: a block that is not the one that was written is told."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from tests.support.encryption import give_key
from tests.support.initiator import Initiator, connected
from tests.support.target import Target
from tests.support.wait import until

CHECK, ABORTED_COMMAND = 2, 0xB
GUARD, APPLICATION_TAG, REFERENCE_TAG = (0x10, 1), (0x10, 2), (0x10, 3)
MODE_PARAMETERS_CHANGED, CAPACITY_CHANGED = (0x2A, 1), (0x2A, 9)
FLUSH = bytes([0x35, *bytes(9)])
BLOCKS = 2048


def stamped(seed: int, blocks: int, block_size: int = 512) -> bytes:
    """`blocks` blocks, each unlike any other."""
    stamps = (f"<{seed}.{number}>".encode().ljust(16, b".") for number in range(blocks))
    return b"".join(stamp * (block_size // 16) for stamp in stamps)


def make(target: Target, dif_type: int, block_size: int = 512) -> Path:
    """A file bdev with protection information, as the LUN of `vm`."""
    file = target.make_file("p0.img", BLOCKS * (block_size + 8))
    target.rpc(
        "bdev_aio_create", name="p0", filename=str(file), block_size=block_size, dif_type=dif_type
    )
    target.attach("vm", "p0")
    return file


def block_of(file: Path, lba: int, block_size: int = 512) -> bytes:
    """A block as it lies in the file."""
    with file.open("rb") as opened:
        opened.seek(lba * (block_size + 8))
        return opened.read(block_size + 8)


def put(file: Path, lba: int, block: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(lba * len(block))
        opened.write(block)


def told(vm: Initiator, lba: int, blocks: int, block_size: int = 512) -> tuple[int, ...]:
    """What a READ(10) fails with."""
    cdb = bytes([0x28, 0, *lba.to_bytes(4, "big"), 0, *blocks.to_bytes(2, "big"), 0])
    answer = vm.cdb(cdb, data_in_len=blocks * block_size)
    assert (answer["status"], answer["sense"][2] & 15) == (CHECK, ABORTED_COMMAND), answer
    # INFORMATION: the block, which is among those that were asked for.
    assert answer["sense"][0] == 0xF0
    assert int.from_bytes(answer["sense"][3:7], "big") in range(lba, lba + blocks)
    return tuple(answer["sense"][12:14])


def guard(data: bytes) -> int:
    """CRC-16 of T10 DIF, bit by bit."""
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ (0x8BB7 if crc & 0x8000 else 0)) & 0xFFFF
    return crc


def tuple_of(lba: int, data: bytes, app_tag: int = 0) -> bytes:
    """The protection information of a block, of type 1."""
    return struct.pack(">HHI", guard(data), app_tag, lba)


@pytest.mark.parametrize("block_size", [512, 4096])
def test_damaged_and_misplaced_blocks_are_told_and_stale_ones_are_not(
    target: Target, block_size: int
) -> None:
    file = make(target, 1, block_size)
    data = stamped(1, 64, block_size)
    with connected(target, "vm") as vm:
        vm.write(100, data, block_size=block_size)
        assert vm.cdb(FLUSH)["status"] == 0
    # What was not written has no room: tuples lie inverted, so that zeros are none.
    assert file.stat().st_blocks * 512 < 100 * block_size
    old = block_of(file, 140, block_size)
    assert old[:block_size] == data[40 * block_size : 41 * block_size]
    target.restart()
    with connected(target, "vm") as vm:
        assert vm.read(100, 64, block_size=block_size) == data
        damaged = bytearray(old)
        damaged[17] ^= 4
        put(file, 140, bytes(damaged))
        assert told(vm, 100, 64, block_size) == GUARD
        assert vm.read(100, 40, block_size=block_size) == data[: 40 * block_size]
        put(file, 140, old)
        one, two = block_of(file, 103, block_size), block_of(file, 105, block_size)
        put(file, 103, two)
        assert told(vm, 103, 1, block_size) == REFERENCE_TAG
        vm.write(103, data[3 * block_size : 4 * block_size], block_size=block_size)
        assert block_of(file, 103, block_size) == one
        # An older one of its own place was right once, and so it is taken.
        vm.write(140, stamped(2, 1, block_size), block_size=block_size)
        put(file, 140, old)
        assert vm.read(100, 64, block_size=block_size) == data


def test_a_guest_reads_and_writes_blocks_with_their_tuples(target: Target) -> None:
    file = make(target, 1)
    data = stamped(7, 4)
    blocks = [data[n * 512 : (n + 1) * 512] for n in range(4)]
    both = b"".join(block + tuple_of(9 + n, block, 77) for n, block in enumerate(blocks))
    write = bytes([0x2A, 0x20, 0, 0, 0, 9, 0, 0, 4, 0])
    read = bytes([0x28, 0x20, 0, 0, 0, 9, 0, 0, 4, 0])
    with connected(target, "vm") as vm:
        assert vm.cdb(bytes([0x12, 0, 0, 0, 96, 0]), data_in_len=96)["data_in"][5] & 1
        capacity = vm.cdb(bytes([0x9E, 0x10, *bytes(11), 32, 0, 0]), data_in_len=32)["data_in"]
        assert capacity[8:14] == bytes([0, 0, 2, 0, 1, 0])
        assert vm.cdb(write, data_out=both)["status"] == 0
        assert vm.cdb(read, data_in_len=len(both))["data_in"] == both
        inverted = bytes(~byte & 0xFF for byte in tuple_of(10, blocks[1], 77))
        assert block_of(file, 10) == blocks[1] + inverted
        for at, code in ((600, GUARD), (520 + 519, REFERENCE_TAG)):
            bad = bytearray(both)
            bad[at] ^= 1
            answer = vm.cdb(write, data_out=bytes(bad))
            assert (answer["status"], answer["sense"][2] & 15) == (CHECK, ABORTED_COMMAND)
            assert (answer["sense"][3:7], tuple(answer["sense"][12:14])) == (
                bytes([0, 0, 0, 10]),
                code,
            )
        assert vm.read(9, 4) == data
    target.make_file("other.img", BLOCKS * 512)
    target.rpc("bdev_aio_create", name="o0", filename=str(target.directory / "other.img"))
    copied = {"ctrlr": "vm", "scsi_target_num": 0, "dst_bdev_name": "o0"}
    why = target.fails("virtlun_lun_copy_start", **copied).args[0]
    assert "bdev p0 has protection information, and bdev o0 has none" in why


def test_type_3_knows_no_places(target: Target) -> None:
    file = make(target, 3)
    data = stamped(1, 8)
    with connected(target, "vm") as vm:
        vm.write(0, data)
        put(file, 3, block_of(file, 5))
        assert vm.read(3, 1) == data[5 * 512 : 6 * 512]
        put(file, 4, bytes([1]) + block_of(file, 4)[1:])
        assert told(vm, 0, 8) == GUARD


def test_it_grows_with_its_file_and_is_shown_as_by_spdk(target: Target) -> None:
    file = make(target, 1)
    (shown,) = target.rpc("bdev_get_bdevs", name="p0")
    of_metadata = {
        "block_size": 520,
        "num_blocks": BLOCKS,
        "md_size": 8,
        "md_interleave": True,
        "dif_type": 1,
        "dif_is_head_of_md": False,
        "enabled_dif_check_types": {"reftag": True, "apptag": False, "guard": True},
        "dif_pi_format": 0,
    }
    assert {name: shown[name] for name in of_metadata} == of_metadata
    with connected(target, "vm") as vm:
        vm.write(BLOCKS - 1, stamped(1, 1))
        with file.open("r+b") as opened:
            opened.truncate(2 * BLOCKS * 520)
        target.rpc("bdev_aio_rescan", name="p0")
        (shown,) = target.rpc("bdev_get_bdevs", name="p0")
        assert shown["num_blocks"] == 2 * BLOCKS
        vm.ready()
        vm.write(2 * BLOCKS - 1, stamped(2, 1))
        assert vm.read(BLOCKS - 1, 1) == stamped(1, 1)
        assert vm.read(2 * BLOCKS - 1, 1) == stamped(2, 1)
    target.rpc("vhost_delete_controller", ctrlr="vm", force=True)
    target.rpc("bdev_aio_delete", name="p0")
    # The file is free.
    target.rpc("bdev_uring_create", name="p0", filename=str(file), dif_type=1)
    assert target.rpc("bdev_get_bdevs", name="p0")[0]["dif_type"] == 1
    target.rpc("bdev_uring_delete", name="p0")
    target.rpc("bdev_aio_create", name="p0", filename=str(file))
    assert "md_size" not in target.rpc("bdev_get_bdevs", name="p0")[0]


def test_an_lvstore_lies_on_it_and_an_upgrade_keeps_what_is_in_memory(target: Target) -> None:
    metadata = {"md_size": 8, "md_interleave": True, "dif_type": 1}
    target.rpc("bdev_malloc_create", name="m0", num_blocks=131072, block_size=512, **metadata)
    target.rpc("bdev_lvol_create_lvstore", bdev_name="m0", lvs_name="lvs0")
    target.make_thin("v0", 16)
    target.attach("vm", "lvs0/v0")
    with connected(target, "vm") as vm:
        vm.write(1000, stamped(1, 300))
        assert vm.cdb(FLUSH)["status"] == 0
    target.upgrade()
    with connected(target, "vm") as vm:
        assert vm.read(1000, 300) == stamped(1, 300)
    (shown,) = target.rpc("bdev_get_bdevs", name="m0")
    assert (shown["block_size"], shown["dif_type"]) == (520, 1)


@pytest.fixture
def volume(target: Target) -> Path:
    """The file of an lvstore with protection information; `vm` has its thin volume lvs0/v0."""
    file = target.make_file("p0.img", (64 << 20) // 512 * 520)
    target.rpc("bdev_aio_create", name="p0", filename=str(file), dif_type=1)
    store = {"bdev_name": "p0", "lvs_name": "lvs0", "cluster_sz": 1 << 20}
    target.rpc("bdev_lvol_create_lvstore", **store)
    target.make_thin("v0", 16)
    target.attach("vm", "lvs0/v0")
    return file


def places(file: Path, block: bytes) -> list[int]:
    """The numbers of the blocks of a file that have this data."""
    content = file.read_bytes()
    return [at // 520 for at in range(0, len(content), 520) if content[at : at + 512] == block]


def tupled(data: bytes, lba: int) -> bytes:
    """Blocks from `lba` on with their tuples behind them."""
    blocks = [data[at : at + 512] for at in range(0, len(data), 512)]
    return b"".join(block + tuple_of(lba + n, block, 77) for n, block in enumerate(blocks))


def field(lba: int, blocks: int, opcode: int) -> bytes:
    """A READ(10) or WRITE(10) of blocks with their tuples behind them."""
    return bytes([opcode, 0x20, *lba.to_bytes(4, "big"), 0, *blocks.to_bytes(2, "big"), 0])


def refused(vm: Initiator, cdb: bytes, **data: Any) -> tuple[tuple[int, int], int]:
    """What a command fails with, and at which block."""
    answer = vm.cdb(cdb, **data)
    assert (answer["status"], answer["sense"][2] & 15) == (CHECK, ABORTED_COMMAND), answer
    assert answer["sense"][0] == 0xF0
    lba = int.from_bytes(answer["sense"][3:7], "big")
    return (answer["sense"][12], answer["sense"][13]), lba


def test_a_volume_carries_what_a_guest_has_and_tells_its_own_blocks(
    target: Target, volume: Path
) -> None:
    (shown,) = target.rpc("bdev_get_bdevs", name="lvs0/v0")
    of_metadata = {"block_size": 512, "md_size": 8, "md_interleave": False, "dif_type": 1}
    assert {name: shown[name] for name in of_metadata} == of_metadata
    # Over the end of a cluster.
    lba, data = 2044, stamped(5, 8)
    blocks = [data[n * 512 : (n + 1) * 512] for n in range(8)]
    both = tupled(data, lba)
    with connected(target, "vm") as vm:
        # What nobody wrote is not checked.
        nothing = vm.cdb(field(lba, 1, 0x28), data_in_len=520)["data_in"]
        assert nothing == bytes(512) + b"\xff" * 8
        assert vm.cdb(field(lba, 8, 0x2A), data_out=both)["status"] == 0
        assert vm.cdb(field(lba, 8, 0x28), data_in_len=len(both))["data_in"] == both
        bad = bytearray(both)
        bad[6 * 520 + 519] ^= 1
        assert refused(vm, field(lba, 8, 0x2A), data_out=bytes(bad)) == (REFERENCE_TAG, lba + 6)
        # In the file it is a block of the file's; damaged, it is one of the volume's.
        (at,) = places(volume, blocks[5])
        assert at != lba + 5
        inverted = bytes(~byte & 0xFF for byte in tuple_of(at, blocks[5], 77))
        assert block_of(volume, at) == blocks[5] + inverted
        put(volume, at, bytes([1]) + block_of(volume, at)[1:])
        read = bytes([0x28, 0, *lba.to_bytes(4, "big"), 0, 0, 8, 0])
        wrong = (GUARD, lba + 5)
        assert refused(vm, read, data_in_len=8 * 512) == wrong
        assert refused(vm, field(lba, 8, 0x28), data_in_len=len(both)) == wrong
        # It comes along with its neighbours, and does not become right by that.
        target.rpc("bdev_lvol_snapshot", lvol_name="lvs0/v0", snapshot_name="s0")
        vm.write(lba + 4, blocks[0])
        assert len(places(volume, blocks[6])) == 2
        assert refused(vm, read, data_in_len=8 * 512) == wrong
        assert vm.cdb(field(lba + 6, 2, 0x28), data_in_len=2 * 520)["data_in"] == both[6 * 520 :]
    target.upgrade()
    with connected(target, "vm") as vm:
        assert refused(vm, read, data_in_len=8 * 512) == wrong
        assert vm.cdb(field(lba, 4, 0x28), data_in_len=4 * 520)["data_in"] == both[: 4 * 520]
    target.rpc("vhost_delete_controller", ctrlr="vm", force=True)
    with target.exported("lvs0/v0") as exported, exported.open("rb", 0) as opened:
        opened.seek(lba * 512)
        assert opened.read(2048) == data[:2048]


def test_a_copy_takes_tuples_along_right_or_wrong(target: Target, volume: Path) -> None:
    lba, data = 2044, stamped(5, 8)
    both = tupled(data, lba)
    with connected(target, "vm") as vm:
        assert vm.cdb(field(lba, 8, 0x2A), data_out=both)["status"] == 0
        (at,) = places(volume, data[5 * 512 : 6 * 512])
        put(volume, at, bytes([1]) + block_of(volume, at)[1:])
        of = {"ctrlr": "vm", "scsi_target_num": 0}
        target.rpc("bdev_malloc_create", name="m0", num_blocks=32768, block_size=512)
        why = target.fails("virtlun_lun_copy_start", **of, dst_bdev_name="m0").args[0]
        assert "has protection information, and bdev m0 has none" in why
        second = target.make_file("p1.img", (64 << 20) // 512 * 520)
        target.rpc("bdev_aio_create", name="p1", filename=str(second), dif_type=1)
        store = {"bdev_name": "p1", "lvs_name": "lvs1", "cluster_sz": 1 << 20}
        target.rpc("bdev_lvol_create_lvstore", **store)
        target.make_thin("v1", 16, "lvs1")
        target.rpc("virtlun_lun_copy_start", **of, dst_bdev_name="lvs1/v1")
        until(lambda: target.rpc("virtlun_lun_copy_check", **of)[0]["state"] == "ready", "ready")
        written = tupled(data, 20)
        assert vm.cdb(field(20, 8, 0x2A), data_out=written)["status"] == 0
        target.rpc("virtlun_lun_copy_pivot", **of)
        for first, there in ((lba, both[: 4 * 520]), (lba + 6, both[6 * 520 :]), (20, written)):
            read = field(first, len(there) // 520, 0x28)
            assert vm.cdb(read, data_in_len=len(there))["data_in"] == there
        assert refused(vm, field(lba, 8, 0x28), data_in_len=len(both)) == (GUARD, lba + 5)


def test_volumes_whose_data_is_not_what_lies_there_have_none_to_show(
    target: Target, volume: Path
) -> None:
    """Neither encrypted ones nor those of an lvstore with checksums, whatever lies below them."""
    give_key(target)
    encrypted = {"lvs_name": "lvs0", "lvol_name": "secret", "size_in_mib": 4, "key_name": "k0"}
    target.rpc("bdev_lvol_create", thin_provision=True, **encrypted)
    metadata = {"md_size": 8, "dif_type": 1}
    target.rpc("bdev_malloc_create", name="m1", num_blocks=131072, block_size=512, **metadata)
    target.rpc("virtlun_integrity_create", base_bdev_name="m1", name="checked")
    target.rpc("bdev_lvol_create_lvstore", bdev_name="checked", lvs_name="lvs1")
    target.make_thin("v1", 4, "lvs1")
    for number, name in enumerate(("lvs0/secret", "lvs1/v1"), 1):
        assert "md_size" not in target.rpc("bdev_get_bdevs", name=name)[0]
        target.add_lun("vm", name, number)
    with connected(target, "vm") as vm:
        for number in (1, 2):
            vm.ready(target=number)
            vm.write(3, stamped(number, 4), target=number)
            assert vm.read(3, 4, target=number) == stamped(number, 4)
    assert not places(volume, stamped(1, 1)), "it is not encrypted"


def place(file: Path, data: bytes) -> int:
    """Where a block with this data lies in a file, in bytes."""
    content = file.read_bytes()
    (at,) = [at for at in range(0, len(content), 512) if content[at : at + 512] == data]
    return at


LBA = 2044
DATA = [stamped(5, 8)[n * 512 : (n + 1) * 512] for n in range(8)]
BOTH = b"".join(block + tuple_of(LBA + n, block, 77) for n, block in enumerate(DATA))


@pytest.fixture
def own(target: Target) -> Path:
    """The plain file of an lvstore; `vm` has its volume lvs0/v0, which keeps its tuples itself."""
    file = target.make_file("plain.img", 64 << 20)
    target.rpc("bdev_aio_create", name="f0", filename=str(file), block_size=512)
    target.rpc("bdev_lvol_create_lvstore", bdev_name="f0", lvs_name="lvs0", cluster_sz=1 << 16)
    new = {"lvs_name": "lvs0", "size_in_mib": 16, "thin_provision": True}
    why = target.fails("bdev_lvol_create", lvol_name="v2", dif_type=2, **new).args[0]
    assert 'has no "dif_type" 2' in why
    target.rpc("bdev_lvol_create", lvol_name="v0", dif_type=1, **new)
    target.attach("vm", "lvs0/v0", shareable=True)
    return file


def test_a_volume_on_any_disk_keeps_its_tuples_itself(target: Target, own: Path) -> None:
    (shown,) = target.rpc("bdev_get_bdevs", name="lvs0/v0")
    of_metadata = {"num_blocks": 32768, "md_size": 8, "md_interleave": False, "dif_type": 1}
    assert {name: shown[name] for name in of_metadata} == of_metadata
    (listed,) = target.rpc("bdev_lvol_get_lvols", lvs_name="lvs0")
    assert (listed["dif_type"], listed["size"]) == (1, 16 << 20)
    with connected(target, "vm") as vm:
        assert vm.cdb(field(LBA, 8, 0x2A), data_out=BOTH)["status"] == 0
        assert vm.cdb(field(LBA, 8, 0x28), data_in_len=len(BOTH))["data_in"] == BOTH
        bad = bytearray(BOTH)
        bad[6 * 520 + 519] ^= 1
        assert refused(vm, field(LBA, 8, 0x2A), data_out=bytes(bad)) == (REFERENCE_TAG, LBA + 6)
        assert vm.cdb(FLUSH)["status"] == 0
    # Nothing is lost with the process, and nothing looks damaged; nor after an upgrade.
    target.crash()
    with connected(target, "vm") as vm:
        assert vm.cdb(field(LBA, 8, 0x28), data_in_len=len(BOTH))["data_in"] == BOTH
        vm.write(LBA + 8, stamped(6, 4))
    target.upgrade()
    with connected(target, "vm") as vm:
        assert vm.cdb(field(LBA, 8, 0x28), data_in_len=len(BOTH))["data_in"] == BOTH
        assert vm.read(LBA + 8, 4) == stamped(6, 4)


def test_what_goes_bad_below_such_a_volume_is_told(target: Target, own: Path) -> None:
    with connected(target, "vm") as vm:
        assert vm.cdb(field(LBA, 8, 0x2A), data_out=BOTH)["status"] == 0
    # Closed in order: nobody is writing.
    target.restart()
    read = bytes([0x28, 0, *LBA.to_bytes(4, "big"), 0, 0, 8, 0])
    at = place(own, DATA[5])
    with connected(target, "vm") as vm:
        for wrong in (
            bytes([DATA[5][0] ^ 1]) + DATA[5][1:],
            DATA[6],  # another one's data, without its tuple
            stamped(4, 6)[5 * 512 :],  # what it had before: a write that was lost
        ):
            put(own, at // 512, wrong)
            assert refused(vm, read, data_in_len=8 * 512) == (GUARD, LBA + 5)
            assert refused(vm, field(LBA, 8, 0x28), data_in_len=len(BOTH)) == (GUARD, LBA + 5)
        put(own, at // 512, DATA[6])
        content = own.read_bytes()
        its, other = (
            content.index(bytes(~byte & 0xFF for byte in tuple_of(LBA + n, DATA[n], 77)))
            for n in (5, 6)
        )
        with own.open("r+b") as opened:
            opened.seek(its)
            opened.write(content[other : other + 8])
        assert refused(vm, read, data_in_len=8 * 512) == (REFERENCE_TAG, LBA + 5)
        # A write of the whole block mends it, but for a snapshot that was taken before.
        target.rpc("bdev_lvol_snapshot", lvol_name="lvs0/v0", snapshot_name="s0")
        target.rpc("bdev_lvol_clone", snapshot_name="lvs0/s0", clone_name="c0")
        vm.write(LBA + 5, DATA[5])
        assert vm.read(LBA, 8) == b"".join(DATA)
    (clone,) = target.rpc("bdev_get_bdevs", name="lvs0/c0")
    assert clone["dif_type"] == 1
    target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm", scsi_target_num=0)
    target.add_lun("vm", "lvs0/c0")
    with connected(target, "vm") as vm:
        assert refused(vm, read, data_in_len=8 * 512) == (REFERENCE_TAG, LBA + 5)


def tags_page(*ranges: tuple[int, int]) -> bytes:
    """The Application Tag mode page: tags, and how many blocks have each, from block 0 on."""
    page, lba = bytes([0x4A, 2, 0, 108]) + bytes(12), 0
    for nth in range(4):
        tag, blocks = ranges[nth] if nth < len(ranges) else (0, 0)
        last = 0x80 if nth == max(len(ranges), 1) - 1 else 0
        page += struct.pack(">B5xHQQ", last, tag, lba if blocks else 0, blocks)
        lba += blocks
    return page


def select(vm: Initiator, *pages: bytes, target: int = 0) -> None:
    """MODE SELECT(10) with SP."""
    pages_of = bytes(8) + b"".join(pages)
    cdb = bytes([0x55, 0x11, *bytes(5), *len(pages_of).to_bytes(2, "big"), 0])
    answer = vm.cdb(cdb, data_out=pages_of, target=target)
    assert answer["status"] == 0, answer


def shown_tags(vm: Initiator, values: int = 0, target: int = 0) -> bytes:
    """The page, current (0) or saved (3), as one that is set."""
    cdb = bytes([0x1A, 8, values << 6 | 10, 2, 255, 0])
    page: bytes = vm.cdb(cdb, data_in_len=255, target=target)["data_in"][4:116]
    assert page[0] & 0x80, "PS"
    return bytes([page[0] & 0x7F]) + page[1:]


def control(*, tags: bool) -> bytes:
    """The Control mode page, with ATMPE or without."""
    return bytes([10, 10, 0x22, 0x10, 0, 0xE0 if tags else 0xC0, *bytes(6)])


def attention(vm: Initiator, target: int = 0) -> list[tuple[int, int]]:
    """The unit attentions that there are."""
    found = []
    while (answer := vm.cdb(bytes(6), target=target))["status"]:
        assert answer["sense"][2] & 15 == 6
        found.append((answer["sense"][12], answer["sense"][13]))
    return found


def test_application_tags_are_those_that_were_set_and_saved(target: Target, own: Path) -> None:
    # Of the blocks of BOTH, the first four are to have one tag and the others another.
    ranges = ((77, LBA + 4), (0x0B0B, 100))
    target.attach("other", "lvs0/v0", shareable=True)
    write, read = field(LBA, 8, 0x2A), field(LBA, 8, 0x28)
    plain = bytes([0x28, 0, *LBA.to_bytes(4, "big"), 0, 0, 8, 0])
    tagged = BOTH[: 4 * 520] + b"".join(
        block + tuple_of(LBA + n, block, 0x0B0B) for n, block in enumerate(DATA[4:], 4)
    )
    with connected(target, "vm") as vm, Initiator(target.vhost_dir / "other") as other:
        other.send("connect")
        other.ready()
        assert vm.cdb(bytes([0x12, 1, 0x86, 0, 64, 0]), data_in_len=64)["data_in"][4] == 7
        select(vm, tags_page(*ranges), control(tags=True))
        assert attention(other) == [MODE_PARAMETERS_CHANGED]
        # On WRITE, and nothing of it is written.
        assert refused(vm, write, data_out=BOTH) == (APPLICATION_TAG, LBA + 4)
        # Without tuples it gets the tags, and so does what the other writes.
        other.write(LBA, b"".join(DATA))
        assert vm.cdb(read, data_in_len=len(BOTH))["data_in"] == tagged
        # On READ: what was written unchecked, and what was damaged below, in file and area alike.
        unchecked = bytes([0x2A, 0x60, *write[2:]])
        assert vm.cdb(unchecked, data_out=BOTH)["status"] == 0
        for cdb, length in ((plain, 8 * 512), (read, len(BOTH))):
            assert refused(vm, cdb, data_in_len=length) == (APPLICATION_TAG, LBA + 4)
            assert refused(other, cdb, data_in_len=length) == (APPLICATION_TAG, LBA + 4)
        assert vm.cdb(write, data_out=tagged)["status"] == 0
        assert vm.read(LBA, 8) == b"".join(DATA)
        assert vm.cdb(FLUSH)["status"] == 0
    # The page, saved, is there after a crash, and after an upgrade.
    for again in ("crash", "upgrade"):
        if again == "crash":
            target.crash()
        else:
            target.upgrade()
        with connected(target, "vm") as vm:
            assert shown_tags(vm) == shown_tags(vm, 3) == tags_page(*ranges)
            assert refused(vm, write, data_out=BOTH) == (APPLICATION_TAG, LBA + 4)
            assert vm.cdb(read, data_in_len=len(tagged))["data_in"] == tagged
    # Closed in order, so that what differs is damage, a tag in the volume's area.
    target.restart()
    content = own.read_bytes()
    its = content.index(bytes(~byte & 0xFF for byte in tagged[5 * 520 + 512 : 6 * 520]))
    with own.open("r+b") as opened:
        opened.seek(its + 3)
        opened.write(bytes([content[its + 3] ^ 1]))
    with connected(target, "vm") as vm:
        assert refused(vm, plain, data_in_len=8 * 512) == (APPLICATION_TAG, LBA + 5)
        select(vm, control(tags=False))
        assert vm.read(LBA, 8) == b"".join(DATA)


def test_application_tags_are_of_the_blocks_that_there_are(target: Target, own: Path) -> None:
    """A volume that is made smaller shows less of its ranges, and a larger one none beyond them."""
    blocks = 32768
    ranges = ((1, 1000), (2, blocks - 1000))
    with connected(target, "vm") as vm:
        select(vm, tags_page(*ranges), control(tags=True))
        vm.write(blocks - 4, stamped(1, 4))
        target.rpc("bdev_lvol_resize", name="lvs0/v0", size_in_mib=8)
        assert sorted(attention(vm)) == [MODE_PARAMETERS_CHANGED, CAPACITY_CHANGED]
        assert shown_tags(vm) == tags_page((1, 1000), (2, blocks // 2 - 1000))
        target.rpc("bdev_lvol_resize", name="lvs0/v0", size_in_mib=32)
        assert sorted(attention(vm)) == [MODE_PARAMETERS_CHANGED, CAPACITY_CHANGED]
        assert shown_tags(vm) == tags_page(*ranges)
        vm.write(blocks - 4, stamped(2, 8))
        answer = vm.cdb(field(blocks - 4, 8, 0x28), data_in_len=8 * 520)
        found = [answer["data_in"][n * 520 + 514 : n * 520 + 516] for n in range(8)]
        assert found == [bytes([0, 2])] * 4 + [bytes(2)] * 4
        # Growth alone changes nothing of the page.
        target.rpc("bdev_lvol_resize", name="lvs0/v0", size_in_mib=40)
        assert attention(vm) == [CAPACITY_CHANGED]


def test_a_volume_on_a_disk_with_tuples_compares_application_tags(
    target: Target, volume: Path
) -> None:
    """The disk below knows nothing of them, and has other numbers for the blocks."""
    ranges = ((77, LBA + 6), (0x0B0B, 2))
    with connected(target, "vm") as vm:
        select(vm, tags_page(*ranges), control(tags=True))
        # Over the end of a cluster, where it is cut.
        assert refused(vm, field(LBA, 8, 0x2A), data_out=BOTH) == (APPLICATION_TAG, LBA + 6)
        vm.write(LBA, b"".join(DATA))
        read = vm.cdb(field(LBA, 8, 0x28), data_in_len=len(BOTH))["data_in"]
        assert read[: 6 * 520] == BOTH[: 6 * 520]
        assert read[6 * 520 + 514 : 6 * 520 + 516] == bytes([0x0B, 0x0B])
        # The same blocks as a snapshot has them, of a volume that is another one.
        target.rpc("bdev_lvol_snapshot", lvol_name="lvs0/v0", snapshot_name="s0")
        vm.write(LBA + 5, DATA[0] + DATA[1])
        (at,) = places(volume, DATA[1])[1:]
        block = bytearray(block_of(volume, at))
        block[515] ^= 1
        put(volume, at, bytes(block))
        plain = bytes([0x28, 0, *LBA.to_bytes(4, "big"), 0, 0, 8, 0])
        assert refused(vm, plain, data_in_len=8 * 512) == (APPLICATION_TAG, LBA + 6)
