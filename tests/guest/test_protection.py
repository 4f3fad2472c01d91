"""Linux on disks with T10 protection information, which goes with each block to the file.

QEMU's property `t10_pi` lets the guest's driver have VIRTIO_SCSI_F_T10_PI.
"""

from __future__ import annotations

import random
import re
import struct
from pathlib import Path

import pytest

from tests.guest.conftest import BootGuest, add, disk
from tests.support.qemu import Guest
from tests.support.target import Target

pytestmark = pytest.mark.vm

MIB = 1 << 20
#: What Linux's error of a check that failed (EILSEQ) is called by dd.
ILSEQ = "Invalid or incomplete multibyte or wide character"
T10_PI = ("-global", "vhost-user-scsi-pci.t10_pi=on")


def guard(data: bytes) -> int:
    """CRC-16 of T10 DIF, bit by bit."""
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ (0x8BB7 if crc & 0x8000 else 0)) & 0xFFFF
    return crc


def make(target: Target, number: int, dif_type: int, mib: int = 16, block_size: int = 512) -> Path:
    """Shows a file with protection information as target `number` of `vm0`."""
    name = f"pi{number}"
    file = target.make_file(f"{name}.img", mib * MIB // block_size * (block_size + 8))
    target.rpc(
        "bdev_aio_create", name=name, filename=str(file), block_size=block_size, dif_type=dif_type
    )
    add(target, number, name)
    return file


def make_volume(target: Target, number: int, dif_type: int) -> str:
    """Shows a thin volume of an lvstore on such a file as target `number` of `vm0`."""
    name, store = f"base{number}", f"lvs{number}"
    file = target.make_file(f"{name}.img", 40 * MIB // 512 * 520)
    target.rpc("bdev_aio_create", name=name, filename=str(file), dif_type=dif_type)
    target.rpc("bdev_lvol_create_lvstore", bdev_name=name, lvs_name=store, cluster_sz=MIB)
    target.make_thin("v", 16, store)
    add(target, number, f"{store}/v")
    return f"{store}/v"


def make_own(target: Target, number: int, dif_type: int) -> str:
    """Shows a thin volume that keeps its tuples itself as target `number` of `vm0`."""
    name, store = f"base{number}", f"lvs{number}"
    target.rpc("bdev_malloc_create", name=name, num_blocks=40 * MIB // 512, block_size=512)
    target.rpc("bdev_lvol_create_lvstore", bdev_name=name, lvs_name=store)
    new = {"lvol_name": "v", "size_in_mib": 16, "thin_provision": True}
    target.rpc("bdev_lvol_create", lvs_name=store, dif_type=dif_type, **new)
    add(target, number, f"{store}/v")
    return f"{store}/v"


def block_of(file: Path, lba: int, block_size: int = 512) -> bytes:
    """A block as it lies in the file, with its tuple, whose bits are inverted."""
    with file.open("rb") as opened:
        opened.seek(lba * (block_size + 8))
        return opened.read(block_size + 8)


def put(file: Path, lba: int, block: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(lba * len(block))
        opened.write(block)


def integrity(guest: Guest, name: str, field: str) -> str:
    """What Linux says of a disk's protection information."""
    return guest.run(f"cat /sys/block/{name}/integrity/{field}").strip()


def read(guest: Guest, name: str, lba: int, blocks: int = 8) -> str:
    """What dd says, of blocks that are read past the page cache."""
    skip = f"skip={lba * 512} iflag=direct,skip_bytes"
    return guest.run(
        f"dd if=/dev/{name} of=/dev/null bs={blocks * 512} count=1 {skip}", check=False
    )


def check_tuple(guest: Guest, name: str, lba: int, ref_tag: int) -> None:
    """Has a program in the guest read a block with its tuple, which are what they should be."""
    cdb = " ".join(re.findall("..", f"2820{lba:08x}00000100"))  # RDPROTECT 001b
    guest.run(f"sg_raw --request=520 --outfile=/tmp/raw /dev/{name} {cdb}")
    block = bytes.fromhex(guest.run("hexdump -v -e '1/1 \"%02x\"' /tmp/raw"))
    assert len(block) == 520
    assert struct.unpack(">HHI", block[512:]) == (guard(block[:512]), 0, ref_tag)


@pytest.mark.nightly
def test_linux_writes_and_reads_with_it(target: Target, boot: BootGuest) -> None:
    """It is the guest's own tuple that lies beside a block, and that it gets back and verifies."""
    files = {1: make(target, 1, 1), 2: make(target, 2, 3), 3: make(target, 3, 1, block_size=4096)}
    target.rpc("bdev_malloc_create", name="plain", num_blocks=32768, block_size=512)
    add(target, 4, "plain")
    volumes = {5: make_volume(target, 5, 1), 6: make_own(target, 6, 1)}
    guest = boot(extra=T10_PI)
    formats = {1: "T10-DIF-TYPE1-CRC", 2: "T10-DIF-TYPE3-CRC", 3: "T10-DIF-TYPE1-CRC"}
    formats[5] = formats[6] = "T10-DIF-TYPE1-CRC"
    for number, format_ in formats.items():
        name = disk(guest, number)
        assert integrity(guest, name, "format") == format_
        assert integrity(guest, name, "device_is_integrity_capable") == "1"
        assert (
            integrity(guest, name, "read_verify"),
            integrity(guest, name, "write_generate"),
        ) == (("1", "1"))
        # What it reads before it writes: nothing was written, so nothing is checked.
        guest.run(f"dd if=/dev/{name} of=/dev/null bs=1M iflag=direct")
        guest.run(f"mkfs.ext4 -q /dev/{name} && mount /dev/{name} /mnt")
        guest.run("dd if=/dev/urandom of=/mnt/file bs=1M count=4 && sync")
        written = guest.run("md5sum < /mnt/file")
        guest.run("umount /mnt && echo 3 > /proc/sys/vm/drop_caches")
        guest.run(f"mount /dev/{name} /mnt")
        assert guest.run("md5sum < /mnt/file") == written
        if number in volumes:
            # From here on what is written goes into clusters that are copied first.
            target.rpc("bdev_lvol_snapshot", lvol_name=volumes[number], snapshot_name="s")
            guest.run("dd if=/dev/urandom of=/mnt/file bs=4k count=9 seek=50 conv=notrunc && sync")
            written = guest.run("md5sum < /mnt/file")
            guest.run("umount /mnt && echo 3 > /proc/sys/vm/drop_caches")
            guest.run(f"mount /dev/{name} /mnt")
            assert guest.run("md5sum < /mnt/file") == written
            guest.run("umount /mnt")
            check_tuple(guest, name, 2, 2)
            continue
        guest.run("umount /mnt")
        block_size = 4096 if number == 3 else 512
        # The superblock, 1024 bytes from the beginning.
        lba = 0 if number == 3 else 2
        block = block_of(files[number], lba, block_size)
        tuple_ = struct.unpack(">HHI", bytes(~byte & 0xFF for byte in block[block_size:]))
        assert (tuple_[0], tuple_[1]) == (guard(block[:block_size]), 0)
        # With type 3 it is the guest's to say, and it is what Linux says.
        assert tuple_[2] == (lba if number != 2 else 0)
    plain = disk(guest, 4)
    guest.run(f"dd if=/dev/urandom of=/dev/{plain} bs=1M count=16 oflag=direct")
    assert "DIF" in guest.run("dmesg | grep -i 'Enabling DI[FX]'")


@pytest.mark.nightly
def test_linux_has_it_in_memory_and_of_type_3_in_volumes(target: Target, boot: BootGuest) -> None:
    interleaved = {"md_size": 8, "md_interleave": True}
    for number, dif_type in ((1, 1), (2, 3)):
        target.rpc(
            "bdev_malloc_create",
            name=f"ram{number}",
            num_blocks=16 * MIB // 512,
            block_size=512,
            dif_type=dif_type,
            **interleaved,
        )
        add(target, number, f"ram{number}")
    make_volume(target, 3, 3)
    make_own(target, 4, 3)
    guest = boot(extra=T10_PI)
    for number, dif_type in ((1, 1), (2, 3), (3, 3), (4, 3)):
        name = disk(guest, number)
        assert integrity(guest, name, "format") == f"T10-DIF-TYPE{dif_type}-CRC"
        guest.run("dd if=/dev/urandom of=/tmp/data bs=1M count=4")
        guest.run(f"dd if=/tmp/data of=/dev/{name} bs=1M oflag=direct")
        guest.run(f"dd if=/dev/{name} of=/tmp/back bs=1M count=4 iflag=direct")
        guest.run("cmp /tmp/data /tmp/back")
        for lba in (0, 4711):
            # With type 3 it is the guest's to say, and it is what Linux says.
            check_tuple(guest, name, lba, lba if dif_type == 1 else 0)


@pytest.mark.nightly
def test_what_goes_bad_in_the_file_is_an_error_in_the_guest(
    target: Target, boot: BootGuest
) -> None:
    file = make(target, 1, 1)
    guest = boot(extra=T10_PI)
    name = disk(guest, 1)
    guest.run(f"dd if=/dev/urandom of=/dev/{name} bs=1M count=16 oflag=direct && sync")
    assert "1+0 records out" in read(guest, name, 0)

    def told(lba: int) -> str:
        """The sense of a READ(10) of a block, with its tuple."""
        cdb = f"28 20 {lba:08x} 00 0001 00"
        words = " ".join(re.findall("..", cdb.replace(" ", "")))
        return guest.run(f"sg_raw -r 520 /dev/{name} {words}", check=False)

    kept = {lba: block_of(file, lba) for lba in (100, 200, 201, 300)}
    # A bit of the data; two blocks in each other's place, with their tuples.
    damaged = bytearray(kept[100])
    damaged[random.Random(1).randrange(512)] ^= 0x20
    put(file, 100, bytes(damaged))
    put(file, 200, kept[201])
    put(file, 201, kept[200])
    for lba, what in ((100, "guard"), (200, "reference tag"), (201, "reference tag")):
        assert ILSEQ in read(guest, name, lba - 3)
        words = told(lba)
        assert f"Logical block {what} check failed" in words, words
        assert "Aborted Command" in words
        log = guest.run("dmesg | tail -n 40")
        assert re.search(rf"protection error, dev {name}, sector {lba - 3}\b", log), log
    # Beside them all is well, and what is written anew is, too.
    assert "1+0 records out" in read(guest, name, 101)
    guest.run(f"dd if=/dev/urandom of=/dev/{name} bs=512 seek=100 count=1 oflag=direct")
    assert "1+0 records out" in read(guest, name, 100, 1)
    # An old block in its own place, with the tuple that it had, was right once: nobody can tell.
    guest.run(f"dd if=/dev/urandom of=/dev/{name} bs=512 seek=300 count=1 oflag=direct")
    assert block_of(file, 300) != kept[300]
    put(file, 300, kept[300])
    assert "1+0 records out" in read(guest, name, 300, 1)


@pytest.mark.nightly
def test_a_guest_without_it_is_told_as_well(target: Target, boot: BootGuest) -> None:
    """The target compares what is in the file by itself, also where nothing is carried."""
    file = make(target, 1, 1)
    guest = boot()
    name = disk(guest, 1)
    guest.run(f"dd if=/dev/urandom of=/dev/{name} bs=1M count=16 oflag=direct && sync")
    assert guest.run(f"cat /sys/block/{name}/integrity/device_is_integrity_capable").strip() == "0"
    put(file, 77, bytes([1]) + block_of(file, 77)[1:512] + block_of(file, 77)[512:])
    put(file, 900, block_of(file, 901))
    assert "1+0 records out" not in read(guest, name, 77, 1)
    assert "1+0 records out" not in read(guest, name, 900, 1)
    assert "1+0 records out" in read(guest, name, 901, 1)


@pytest.mark.nightly
def test_application_tags_that_a_guest_sets(target: Target, boot: BootGuest) -> None:
    """Linux gives its blocks tag 0: where another one is to be, its writes are refused."""
    make(target, 1, 1)
    make_own(target, 2, 1)
    guest = boot(extra=T10_PI)
    half = 8 * MIB // 512
    page = bytes([0x4A, 2, 0, 108]) + bytes(12)
    page += struct.pack(">B5xHQQ", 0, 0, 0, half) + struct.pack(">B5xHQQ", 0x80, 0x1234, half, half)
    page += bytes(48)
    contents = ",".join(f"{byte:02x}" for byte in page)
    control = "0a,0a,22,10,00,e0,00,00,00,00,00,00"  # ATMPE
    for number in (1, 2):
        name = disk(guest, number)
        guest.run(f"sg_wr_mode --page=a,2 --contents={contents} --save /dev/{name}")
        guest.run(f"sg_wr_mode --page=a --contents={control} --save /dev/{name}")
        assert "12 34" in guest.run(f"sg_modes --page=0xa,2 --hex /dev/{name}")

        def write(lba: int, name: str = name) -> str:
            there = f"of=/dev/{name} bs=4k count=1 seek={lba * 512} oflag=direct,seek_bytes"
            return guest.run(f"dd if=/dev/urandom {there}", check=False)

        assert "1+0 records out" in write(half - 8)
        assert "1+0 records out" in read(guest, name, half - 8)
        assert ILSEQ in write(half)
        # Nobody has written there, and without tuples the target gives blocks the tag.
        assert "1+0 records out" in read(guest, name, half)
        guest.run("head -c 512 /dev/urandom > /tmp/block")
        cdb = " ".join(re.findall("..", f"2a00{half:08x}00000100"))
        guest.run(f"sg_raw --send=512 --infile=/tmp/block /dev/{name} {cdb}")
        assert "1+0 records out" in read(guest, name, half, 1)
        cdb = " ".join(re.findall("..", f"2a60{half:08x}00000100"))
        guest.run("head -c 520 /dev/zero > /tmp/both")
        guest.run(f"sg_raw --send=520 --infile=/tmp/both /dev/{name} {cdb}")
        assert ILSEQ in read(guest, name, half, 1)
        cdb = " ".join(re.findall("..", f"2820{half:08x}00000100"))
        words = guest.run(f"sg_raw -r 520 /dev/{name} {cdb}", check=False)
        assert "Logical block application tag check failed" in words, words
