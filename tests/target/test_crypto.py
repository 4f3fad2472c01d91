"""Encrypted bdevs: what their guests read, and what lies on the medium."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests.support.encryption import (
    KEY,
    KEY2,
    MARK,
    encrypt,
    give_key,
    make_encrypted,
    marked,
)
from tests.support.initiator import connected
from tests.support.night import by_day
from tests.support.target import Target

MIB = 1 << 20


def unmap(lba: int, blocks: int) -> dict[str, Any]:
    """UNMAP of one range (SBC-4 5.35)."""
    data = bytes([0, 22, 0, 16, 0, 0, 0, 0, *lba.to_bytes(8, "big"), *blocks.to_bytes(4, "big")])
    data += bytes(4)
    return {"cdb": bytes([0x42, *bytes(6), 0, len(data), 0]), "data_out": data}


@by_day("4096")
@pytest.mark.parametrize("block", [512, 4096])
def test_a_guest_reads_what_it_wrote_and_the_medium_shows_none_of_it(
    target: Target, block: int
) -> None:
    file = target.make_file("base.img", 32 * MIB)
    target.rpc("bdev_aio_create", filename=str(file), name="a0", block_size=block)
    give_key(target)
    encrypt(target, "a0")
    base, ours = (target.rpc("bdev_get_bdevs", name=name)[0] for name in ("a0", "c0"))
    for same in ("block_size", "num_blocks", "supported_io_types", "preferred_unmap_granularity"):
        assert ours[same] == base[same], same
    assert ours["product_name"] == "crypto"
    assert ours["driver_specific"] == {
        "crypto": {"base_bdev_name": "a0", "name": "c0", "key_name": "k0"}
    }
    assert base["claimed_by"] == ["crypto bdev c0"]
    target.attach("vm-1", "c0")
    # One block, some at an odd place, more than is done at once, and more than 1 MiB.
    writes = [(5, 1), (1001, 7), (2000, 65536 // block + 3), (3000, 5 * MIB // 4 // block + 1)]
    with connected(target, "vm-1") as vm:
        for nth, (lba, blocks) in enumerate(writes):
            vm.write(lba, marked(blocks * block, nth), block_size=block)
        for nth, (lba, blocks) in enumerate(writes):
            read = vm.read(lba, blocks, block_size=block)
            assert read == marked(blocks * block, nth), (lba, blocks)
        flush = vm.cdb(bytes([0x35, *bytes(9)]))
        assert (flush["response"], flush["status"]) == (0, 0)
        # What was never written is zeros, on the medium as in the guest.
        assert vm.read(100, 3, block_size=block) == bytes(3 * block)
    medium = file.read_bytes()
    assert MARK not in medium
    for lba, blocks in writes:
        assert any(medium[lba * block : (lba + blocks) * block])
    assert not any(medium[100 * block : 103 * block])
    iostat = target.rpc("bdev_get_iostat", name="c0")["bdevs"][0]
    assert iostat["num_write_ops"] == len(writes)


def test_a_thin_volume_stays_thin_and_unmapped_blocks_read_as_zeros(target: Target) -> None:
    file = target.make_lvstore(size=128 * MIB)
    volume = target.make_thin("v0", 64)
    give_key(target)
    encrypt(target, "lvs0/v0")
    target.attach("vm-1", "c0")

    def allocated() -> int:
        (bdev,) = target.rpc("bdev_get_bdevs", name=volume)
        count: int = bdev["driver_specific"]["lvol"]["num_allocated_clusters"]
        return count

    with connected(target, "vm-1") as vm:
        assert vm.read(0, 4096) == bytes(4096 * 512)
        assert allocated() == 0
        data = marked(2 * MIB)
        vm.write(2048, data)
        assert allocated() == 2
        # A part of a cluster, then the other one as a whole.
        for lba, blocks in ((2048 + 8, 16), (4096, 2048)):
            answer = vm.cdb(**unmap(lba, blocks))
            assert (answer["response"], answer["status"]) == (0, 0), answer
        assert allocated() == 1
        read = vm.read(2048, 4096)
        assert read[MIB:] == bytes(MIB)
        assert read[: 8 * 512] == data[: 8 * 512]
        assert read[24 * 512 : MIB] == data[24 * 512 : MIB]
        # WRITE SAME(16) with UNMAP and NDOB writes zeros (SBC-4 5.50).
        zero = bytes([0x93, 0b1001, *(2048).to_bytes(8, "big"), *(100).to_bytes(4, "big"), 0, 0])
        answer = vm.cdb(zero)
        assert (answer["response"], answer["status"]) == (0, 0), answer
        assert vm.read(2048, 100) == bytes(100 * 512)
        assert vm.read(2148, 100) == data[100 * 512 : 200 * 512]
    # READ CAPACITY(16): LBPME and LBPRZ.
    with connected(target, "vm-1") as vm:
        answer = vm.cdb(bytes([0x9E, 0x10, *bytes(11), 32, 0, 0]), data_in_len=32)
        assert answer["data_in"][14] & 0xC0 == 0xC0
    assert MARK not in file.read_bytes()


def test_a_volume_grows_under_its_guest(target: Target) -> None:
    make_encrypted(target, 8, size=128 * MIB)
    target.attach("vm-1", "c0")
    with connected(target, "vm-1") as vm:
        vm.write(8 * MIB // 512 - 8, marked(4096))
        target.rpc("bdev_lvol_resize", name="lvs0/v0", size_in_mib=16)
        assert target.rpc("bdev_get_bdevs", name="c0")[0]["num_blocks"] == 16 * MIB // 512
        vm.ready()
        vm.write(16 * MIB // 512 - 8, marked(4096, 2))
        assert vm.read(16 * MIB // 512 - 8, 8) == marked(4096, 2)
        assert vm.read(8 * MIB // 512 - 8, 8) == marked(4096)


def test_a_clone_of_encrypted_data_reads_the_same_with_the_same_key(target: Target) -> None:
    make_encrypted(target, size=128 * MIB)
    data = marked(3 * MIB)
    with target.exported("c0") as path, path.open("r+b") as file:
        file.write(data)
    target.rpc("bdev_lvol_snapshot", lvol_name="lvs0/v0", snapshot_name="s0")
    with target.exported("c0") as path, path.open("r+b") as file:
        file.write(bytes(4096))
    target.rpc("bdev_lvol_clone", snapshot_name="lvs0/s0", clone_name="v1")
    encrypt(target, "lvs0/v1", "c1")
    encrypt(target, "lvs0/s0", "of-snapshot")
    for name in ("c1", "of-snapshot"):
        with target.exported(name) as path:
            assert path.read_bytes()[: len(data)] == data, name
    with target.exported("c0") as path:
        assert path.read_bytes()[: len(data)] == bytes(4096) + data[4096:]


def test_an_lvstore_lies_encrypted_and_goes_and_comes_with_its_bdev(target: Target) -> None:
    file = target.make_file("base.img", 64 * MIB)
    target.rpc("bdev_aio_create", filename=str(file), name="a0", block_size=512)
    give_key(target)
    encrypt(target, "a0")
    target.rpc("bdev_lvol_create_lvstore", bdev_name="c0", lvs_name="hidden-store")
    target.make_thin("v0", 16, "hidden-store")
    target.attach("vm-1", "hidden-store/v0")
    encrypted_twice = target.make_thin("v1", 8, "hidden-store")
    encrypt(target, encrypted_twice, "c1")
    with connected(target, "vm-1") as vm:
        vm.write(0, marked(MIB))
    assert b"hidden-store" not in file.read_bytes()
    target.crash()
    assert target.rpc("bdev_lvol_get_lvstores") == []
    give_key(target)
    assert [store["name"] for store in target.rpc("bdev_lvol_get_lvstores")] == ["hidden-store"]
    assert target.rpc("bdev_get_bdevs", name="c1")[0]["product_name"] == "crypto"
    assert target.rpc("virtlun_get_status")["restore_problems"] == []
    with connected(target, "vm-1") as vm:
        assert vm.read(0, 2048) == marked(MIB)
    # With the base all that is on it goes, and is forgotten.
    target.rpc("bdev_aio_delete", name="a0")
    assert target.rpc("bdev_get_bdevs") == []
    assert target.configuration()["bdev"] == []
    target.rpc("accel_crypto_key_destroy", key_name="k0")


def ecb(key: str, data: bytes) -> bytes:
    """AES-256 of each 16 bytes, by OpenSSL's program."""
    command = ["openssl", "enc", "-aes-256-ecb", "-nopad", "-K", key]
    return subprocess.run(command, input=data, capture_output=True, check=True).stdout


def xts(data: bytes, lba: int) -> bytes:
    """AES-256-XTS of one block, as IEEE 1619-2018 5.3 says, by its number as SPDK's SIMPLE_LBA."""
    tweak = int.from_bytes(ecb(KEY2, lba.to_bytes(16, "little")), "little")
    tweaks = []
    for _ in range(len(data) // 16):
        tweaks.append(tweak)
        tweak = (tweak << 1) ^ (0x87 if tweak >> 127 else 0)
        tweak &= (1 << 128) - 1
    mask = b"".join(each.to_bytes(16, "little") for each in tweaks)

    def masked(of: bytes) -> bytes:
        return bytes(a ^ b for a, b in zip(of, mask, strict=True))

    return masked(ecb(KEY, masked(data)))


@pytest.mark.parametrize("block", [512, 4096])
def test_the_data_lies_as_the_standard_says(target: Target, block: int) -> None:
    file = target.make_file("base.img", 8 * MIB)
    target.rpc("bdev_aio_create", filename=str(file), name="a0", block_size=block)
    give_key(target)
    encrypt(target, "a0")
    target.attach("vm-1", "c0")
    data, lba = marked(3 * block), 0x123
    with connected(target, "vm-1") as vm:
        vm.write(lba, data, block_size=block)
        vm.cdb(bytes([0x35, *bytes(9)]))
    expected = b"".join(xts(data[n * block :][:block], lba + n) for n in range(3))
    assert file.read_bytes()[lba * block :][: 3 * block] == expected
