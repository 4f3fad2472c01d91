"""sg3_utils' and util-linux' programs against our disks, from a real guest.

What they ask for is what they get, and what they say of it.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.guest.conftest import MIB, add, add_malloc, disk
from tests.guest.emulator import stock
from tests.guest.image import Image
from tests.guest.test_blk import options
from tests.support.night import by_day
from tests.support.qemu import Guest
from tests.support.scratch import short_directory
from tests.support.target import Target

pytestmark = pytest.mark.vm

SIZE_MIB = 32
SMALL_MIB = 8
#: The programs look devices up by their numbers there.
DEVICES = (
    "mkdir -p /dev/block; for disk in /sys/block/sd*; do"
    " ln -sf ../$(basename $disk) /dev/block/$(cat $disk/dev); done"
)
#: Files of 16 blocks, /tmp/a and so on, with nothing but that letter in them.
FILES = "for name in a b x y; do head -c 8192 /dev/zero | tr '\\0' $name > /tmp/$name; done"

#: Exit statuses, from sg3_utils(8).
ILLEGAL_REQUEST = 5
INVALID_OPERATION_CODE = 9
MISCOMPARE = 14
OUT_OF_RANGE = 22
RESERVATION_CONFLICT = 24


class Small(NamedTuple):
    """A disk of `SMALL_MIB` on a volume.

    `place` is the number of a LUN's target, or the guest's name of a virtio-blk disk.
    """

    volume: str
    thin: bool
    place: int | str


SMALL = (
    Small("lun-thin", True, 3),
    Small("lun-thick", False, 4),
    Small("blk-thin", True, "vda"),
    Small("blk-thick", False, "vdb"),
)


class Step(NamedTuple):
    """A command, and what it says and leaves; one that has no `says` says nothing.

    In `command` stand the names of disks, such as `{thin}`. `holds` has a letter for each block of
    the thin volume from `at` on, with which all of that block is filled; `.` means zeros.
    """

    command: str
    says: str = ""
    status: int = 0
    at: int = 0
    holds: str = ""


def put(letter: str, at: int) -> Step:
    """Fills 16 blocks of the thin volume from block `at` on."""
    return Step(
        f"dd if=/tmp/{letter} of={{thin}} bs=512 seek={at} oflag=direct",
        r"16\+0 records out",
        at=at,
        holds=16 * letter,
    )


UNMAP_ALL = Step(f"sg_unmap --lba=0 --num={SIZE_MIB * 2048} --force {{thin}}", holds=16 * ".")

#: What each does; none needs what another did before.
PROGRAMS = {
    "sg_readcap": (
        Step(
            "sg_readcap {thin}",
            r"Last LBA=65535 .*=65536\n   Logical block length=512 bytes\n",
        ),
        Step(
            "sg_readcap --16 {thin}",
            r"prot_en=0(?s:.*)lbpme=1, lbprz=1\n(?s:.*)=65536\n(?s:.*)block length=4096 bytes",
        ),
        Step("sg_readcap --16 {thick}", "lbpme=0, lbprz=0"),
    ),
    "sg_opcodes": (
        Step(
            "sg_opcodes {thin}",
            "(?s:.*)\\n".join(
                (
                    " 00 +6 .* Test Unit Ready",
                    " 42 +10 .* Unmap",
                    " 89 +16 .* Compare and write",
                    r" 9e +12 +16 .* Get LBA status\(16\)",
                    " a3 +f +12 .* Report timestamp",
                )
            ),
        ),
        Step("sg_opcodes --opcode=0x42 {thick}", "Unmap\n  Command is NOT supported"),
        Step(
            "sg_opcodes --opcode=0x93 {thin}", r"is supported(?s:.*)Usage data: 93 09( ff){12} 3f"
        ),
        Step("sg_opcodes --tmf {thin}", r"Logical unit reset\n    Query task\n"),
    ),
    "sg_turs": (
        Step("sg_turs --number=2 {thin}", "Completed 2 Test Unit Ready commands with 0 errors"),
    ),
    "sg_requests": (
        Step("sg_requests {thin}", "Fixed format, current; Sense key: No Sense"),
        Step("sg_requests --desc {thin}", "Descriptor format, current; Sense key: No Sense"),
    ),
    "sg_sync": (
        Step("sg_sync --16 --lba=8 --count=8 {thin}"),
        Step("sg_sync --lba=65536 --count=1 {thin}", "LBA out of range", OUT_OF_RANGE),
    ),
    "sg_unmap": (
        put("x", 2040),
        Step("sg_unmap --lba=2042 --num=12 --force {thin}", at=2040, holds="xx............xx"),
        # Two ranges.
        Step(
            "sg_unmap --lba=0,2055 --num=2041,9 --force {thin}", at=2040, holds=".x............x."
        ),
        Step("sg_unmap --lba=65535 --num=2 --force {thin}", "LBA out of range", OUT_OF_RANGE),
        Step("sg_unmap --anchor --lba=0 --num=8 --force {thin}", "bad field", ILLEGAL_REQUEST),
        Step("sg_unmap --lba=0 --num=8 --force {thick}", "not supported", INVALID_OPERATION_CODE),
    ),
    "sg_get_lba_status": (
        UNMAP_ALL,
        Step("sg_get_lba_status {thin}", r"LBA: 0x0+  blocks: +65536  deallocated\n"),
        put("x", 2048),
        Step(
            "sg_get_lba_status --maxlen=200 {thin}",
            r"0x0+  blocks: +2048  deallocated\n"
            r".*0x0+800  blocks: +2048  mapped \(or unknown\)\n"
            r".*0x0+1000  blocks: +61440  deallocated\n",
        ),
        Step("sg_get_lba_status --lba=2050 -bb {thin}", r"^0\n$"),
        Step("sg_get_lba_status --brief {thick}", r"0x0+  0x4000  0  0\n"),
        Step("sg_get_lba_status --lba=65536 {thin}", "LBA out of range", OUT_OF_RANGE),
    ),
    "sg_write_same": (
        UNMAP_ALL,
        put("x", 96),
        Step(
            "sg_write_same --10 --in=/tmp/y --xferlen=512 --lba=100 --num=8 {thin}",
            at=96,
            holds="xxxxyyyyyyyyxxxx",
        ),
        Step(
            "sg_write_same --16 --in=/tmp/a --xferlen=512 --lba=102 --num=2 {thin}",
            at=96,
            holds="xxxxyyaayyyyxxxx",
        ),
        Step("sg_write_same --16 --ndob --lba=97 --num=3 {thin}", at=96, holds="x...yyaayyyyxxxx"),
        # What is not zero is written, with UNMAP as well.
        Step(
            "sg_write_same --unmap --in=/tmp/b --xferlen=512 --lba=98 --num=1 {thin}",
            at=96,
            holds="x.b.yyaayyyyxxxx",
        ),
        Step("sg_write_same --10 --unmap --lba=0 --num=2048 {thin}", at=96, holds=16 * "."),
        put("x", 2048),
        # As many as page B0h says that one takes, and one more.
        Step("sg_write_same --unmap --lba=2048 --num=32768 {thin}", at=2048, holds=16 * "."),
        Step("sg_get_lba_status {thin}", r"LBA: 0x0+  blocks: +65536  deallocated\n"),
        Step(
            "sg_write_same --unmap --lba=0 --num=32769 {thin}", "Illegal request", ILLEGAL_REQUEST
        ),
        Step("sg_write_same --lba=0 --num=0 {thin}", "Illegal request", ILLEGAL_REQUEST),
        Step("sg_write_same --anchor --lba=0 --num=8 {thin}", "Illegal request", ILLEGAL_REQUEST),
        Step("sg_write_same --32 --lba=0 --num=8 {thin}", "Invalid opcode", INVALID_OPERATION_CODE),
    ),
    "sg_verify": (
        put("x", 96),
        Step("sg_verify --lba=96 --count=16 {thin}"),
        Step("sg_verify --lba=65530 --count=7 {thin}", "LBA out of range", OUT_OF_RANGE),
        Step("sg_verify --in=/tmp/x --ndo=8192 --count=16 --lba=96 {thin}"),
        Step("sg_verify --16 --in=/tmp/x --ndo=8192 --count=16 --lba=96 {thin}"),
        # One block for all.
        Step("sg_verify --in=/tmp/x --ebytchk=3 --ndo=512 --count=16 --lba=96 {thin}"),
        Step("sg_write_same --in=/tmp/y --xferlen=512 --lba=111 --num=1 {thin}"),
        *(
            Step(
                f"sg_verify {option} --in=/tmp/x --count=16 --lba=96 {{thin}}",
                "MISCOMPARE",
                MISCOMPARE,
            )
            for option in ("--ndo=8192", "--16 --ndo=8192", "--16 --ebytchk=3 --ndo=512")
        ),
    ),
    "sg_write_verify": (
        put("x", 96),
        Step(
            "sg_write_verify --in=/tmp/y --ilen=2048 --num=4 --lba=98 {thin}",
            at=96,
            holds="xxyyyyxxxxxxxxxx",
        ),
        Step(
            "sg_write_verify --16 --bytchk=1 --in=/tmp/a --ilen=1024 --num=2 --lba=99 {thin}",
            at=96,
            holds="xxyaayxxxxxxxxxx",
        ),
        Step(
            "sg_write_verify --in=/tmp/y --num=16 --lba=65530 {thin}",
            "LBA out of range",
            OUT_OF_RANGE,
        ),
    ),
    "sg_compare_and_write": (
        put("x", 96),
        Step(
            "sg_compare_and_write --in=/tmp/x --inw=/tmp/y --num=15 --lba=96 {thin}",
            at=96,
            holds="yyyyyyyyyyyyyyyx",
        ),
        # They differ in the last block.
        Step(
            "sg_compare_and_write --in=/tmp/y --inw=/tmp/a --num=16 --lba=96 {thin}",
            "Miscompare reported",
            MISCOMPARE,
            at=96,
            holds="yyyyyyyyyyyyyyyx",
        ),
    ),
    "sg_write_x --or": (
        put("a", 96),
        # 61h and 62h are 63h.
        Step(
            "sg_write_x --or --in=/tmp/b --lba=98 --num=4 {thin}", at=96, holds="aaccccaaaaaaaaaa"
        ),
    ),
    "sg_dd": (
        put("x", 96),
        *(
            step
            for size, letter in ((6, "a"), (10, "b"), (12, "x"), (16, "y"))
            for step in (
                Step(
                    f"sg_dd if=/tmp/{letter} of={{thin}} bs=512 seek=96 oflag=sgio cdbsz={size}",
                    r"16\+0 records out",
                    at=96,
                    holds=16 * letter,
                ),
                Step(
                    f"sg_dd if={{thin}} of=/tmp/read bs=512 skip=96 count=16 iflag=sgio"
                    f" cdbsz={size} && cmp /tmp/read /tmp/{letter}",
                    r"16\+0 records in",
                ),
            )
        ),
    ),
    "sg_read": (
        Step(
            "sg_read if={thin} bs=512 count=64 blk_sgio=1 cdbsz=16",
            r"64\+0 records in, SCSI READ commands issued: 1\n",
        ),
    ),
    "sg_seek --pre-fetch": (
        Step("sg_seek --pre-fetch --10 --lba=65535 {thin}"),
        Step("sg_seek --pre-fetch --lba=65535 {thin}"),
        Step("sg_seek --pre-fetch --lba=65536 {thin}", "LBA out of range", OUT_OF_RANGE),
    ),
    "sg_start": (
        put("x", 96),
        # It is ready all the same: there is nothing to be stopped.
        Step("sg_start --stop {thin}", at=96, holds=16 * "x"),
        Step("sg_turs --number=2 {thin}", "with 0 errors"),
        Step("sg_start --start {thin}", at=96, holds=16 * "x"),
        Step("sg_start --eject --verbose {thin}", "byte 4 bit 1", ILLEGAL_REQUEST),
        Step("sg_start --pc=3 --verbose {thin}", "byte 4 bit 5", ILLEGAL_REQUEST),
    ),
    # By the generic device: when the last one closes a disk, Linux allows its removal.
    "sg_prevent": (
        Step("sg_prevent {removable}"),
        Step("sg_start --eject --verbose {removable}", "removal prevented", ILLEGAL_REQUEST),
        Step("sg_prevent --allow {removable}"),
        Step("sg_start --eject {removable}"),
        Step("sg_start --load {removable}"),
        Step("sg_prevent --prevent=3 --verbose {removable}", "byte 4 bit 1", ILLEGAL_REQUEST),
    ),
    "sg_copy_results": (
        Step(
            "sg_copy_results --params {thin}",
            r"Maximum segment descriptor count: 64\n(?s:.*)Copy from block device to block device",
        ),
        put("x", 96),
        Step(
            "sg_xcopy if={thin} of={thin} bs=512 count=16 skip=96 seek=200 list_id=7 id_usage=hold",
            "16 blocks, 1 command",
            at=200,
            holds=16 * "x",
        ),
        Step(
            "sg_copy_results --status --list_id=7 {thin}",
            "without errors\n.*: 1\n    Transfer count units: 0\n    Transfer count: 8192\n",
        ),
        Step("sg_copy_results --status --list_id=8 --verbose {thin}", "byte 2", ILLEGAL_REQUEST),
        # Nothing of it has failed.
        Step("sg_copy_results --failed --list_id=7 {thin}", "response data length 0"),
        Step("sg_copy_results --failed --list_id=8 --verbose {thin}", "byte 2", ILLEGAL_REQUEST),
    ),
    "sg_reassign": (
        Step("sg_reassign --grown {thin}", "Elements in grown defect list: 0"),
        Step("sg_reassign --primary {thin}", "Elements in primary defect list: 0"),
        Step("sg_reassign --address=1 {thin}", "Invalid opcode", INVALID_OPERATION_CODE),
    ),
    "sg_format": (
        put("x", 96),
        # The size that it has; --wait is IMMED 0.
        Step(
            "sg_format --format --wait --quick --mode=8 {thin}",
            "Number of blocks=65536",
            at=96,
            holds=16 * ".",
        ),
        Step("sg_get_lba_status {thin}", r"LBA: 0x0+  blocks: +65536  deallocated\n"),
        put("x", 96),
        Step(
            "sg_format --format --wait --quick --mode=8 --fmtpinfo=2 --verbose {thin}",
            "byte 1 bit 7",
            ILLEGAL_REQUEST,
            at=96,
            holds=16 * "x",
        ),
    ),
    "sg_senddiag": (
        Step("sg_senddiag --test {thin}", "returned GOOD status"),
        Step("sg_senddiag --selftest=1 --verbose {thin}", "byte 1 bit 5", ILLEGAL_REQUEST),
        Step("sg_senddiag --list {thin}", "Illegal request", ILLEGAL_REQUEST),
    ),
    "sg_persist": (
        Step(
            "sg_persist -n --in --report-capabilities {thin}",
            r"\(RLR_C\): 1\n(?s:.*)Write Exclusive, all reg.*: 1",
        ),
        # Nothing is lost.
        Step(
            "sg_persist -n --out --replace-lost --param-sark=0xabc --prout-type=5 {thin}",
            r"\(Replace lost reservation\): bad field",
            ILLEGAL_REQUEST,
        ),
        Step("sg_persist -n --out --register --param-sark=0xabc {thin}", ""),
        Step("sg_persist -n --out --reserve --param-rk=0xabc --prout-type=5 {thin}", ""),
        Step(
            "sg_persist -n --in --read-full-status {thin}",
            r"Key=0xabc\n(?s:.*)Reservation holder(?s:.*)Write Exclusive, registrants only",
        ),
        Step("sg_persist -n --out --release --param-rk=0xabc --prout-type=5 {thin}", ""),
        Step("sg_persist -n --in --read-reservation {thin}", "NO reservation held"),
        Step("sg_persist -n --out --clear --param-rk=0xabc {thin}", ""),
        Step("sg_persist -n --in --read-keys {thin}", "NO registered reservation keys"),
    ),
    "sg_persist --preempt": (
        Step("sg_persist -n --out --register --param-sark=0xabc {thin}"),
        Step("sg_persist -n --out --reserve --param-rk=0xabc --prout-type=5 {thin}"),
        Step(
            "sg_persist -n --out --register --param-sark=0xdef {thin}",
            "Reservation conflict",
            RESERVATION_CONFLICT,
        ),
        Step("sg_persist -n --out --register-ignore --param-sark=0xdef {thin}"),
        # Nobody has that key.
        Step(
            "sg_persist -n --out --preempt --param-rk=0xdef --param-sark=1 --prout-type=1 {thin}",
            "Reservation conflict",
            RESERVATION_CONFLICT,
        ),
        Step(
            "sg_persist -n --out --preempt --param-rk=0xdef --param-sark=0xdef --prout-type=1"
            " {thin}"
        ),
        # No VM is called that.
        Step(
            "sg_persist -n --out --register-move --param-rk=0xdef --param-sark=2"
            " --relative-target-port=1 --transport-id=sas,3000000000000001 {thin}",
            r"\(register and move\): bad field",
            ILLEGAL_REQUEST,
        ),
        Step(
            "sg_persist -n --in --read-reservation {thin}", r"Key=0xdef\n.* type: Write Exclusive\n"
        ),
        Step("sg_persist -n --out --clear --param-rk=0xdef {thin}"),
    ),
    "sg_reset": (
        Step("sg_reset --device {thin}"),
        Step("sg_turs --number=2 {thin}", "bus device reset occurred\n.* with 1 errors"),
    ),
    # One group, whose state is its own; the program's status says nothing of that.
    "sg_stpg": (
        Step(
            "sg_stpg --optimized {thin}",
            r"Invalid opcode\n(?s:.*)New target port groups:\n.*\n.*access state : 0x00\n",
        ),
    ),
    # There is no firmware, and no buffer.
    "sg_read_buffer": (
        Step("sg_read_buffer --mode=desc {thin}", "Invalid opcode", INVALID_OPERATION_CODE),
    ),
    "sg_write_buffer": (
        Step(
            "sg_write_buffer --mode=dmc_save --in=/tmp/a --length=512 {thin}",
            "Invalid opcode",
            INVALID_OPERATION_CODE,
        ),
    ),
    "sg_timestamp": (
        Step("sg_timestamp --origin {thin}", "initialized by other method"),
        Step("sg_timestamp --seconds=1 {thin}", "not supported", INVALID_OPERATION_CODE),
    ),
}


def status(guest: Guest, command: str) -> tuple[int, str]:
    """Exit status and words of a command."""
    words = guest.run(f"{command} 2>&1; echo status=$?")
    said, _, code = words.rpartition("status=")
    return int(code), said


def works(guest: Guest, command: str) -> str:
    code, said = status(guest, command)
    assert code == 0, said
    return said


def first_mib(guest: Guest, device: str) -> str:
    return guest.run(f"dd if={device} bs=1M count=1 iflag=direct 2> /dev/null | md5sum")


def letters(guest: Guest, device: str, at: int, count: int) -> str:
    """Returns the letters that blocks are filled with, as `Step.holds` has them."""
    read = f"dd if={device} bs=512 skip={at} count={count} iflag=direct 2> /dev/null"
    data = guest.run(read).replace("\0", ".")
    each = [data[begin : begin + 512] for begin in range(0, len(data), 512)]
    assert all(block == 512 * block[0] for block in each), each
    return "".join(block[0] for block in each)


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """A running target for all of these tests, with the controller `vm0`."""
    with short_directory("vg-") as scratch:
        target = Target(scratch).start()
        target.rpc("vhost_create_scsi_controller", ctrlr="vm0")
        yield target
        status, words = target.stop(), target.words()
        assert status == 0, words
        assert "panicked" not in words, words


@pytest.fixture(scope="module")
def guest(target: Target, image: Image) -> Iterator[Guest]:
    """A guest with LUNs and virtio-blk disks: RAM disks, thin and thick volumes."""
    add_malloc(target, 0, SIZE_MIB)
    target.make_lvstore(size=2 * SIZE_MIB * MIB + 4 * SMALL_MIB * MIB)
    add(target, 1, target.make_thin("thin", SIZE_MIB))
    target.rpc("bdev_malloc_create", name="removable", num_blocks=2048, block_size=512)
    add(target, 2, "removable", removable=True)
    virtio_blk: list[str] = []
    for small in SMALL:
        bdev = f"lvs0/{small.volume}"
        target.rpc(
            "bdev_lvol_create",
            lvs_name="lvs0",
            lvol_name=small.volume,
            size_in_mib=SMALL_MIB,
            thin_provision=small.thin,
        )
        if isinstance(small.place, int):
            add(target, small.place, bdev)
        else:
            target.rpc("vhost_create_blk_controller", ctrlr=small.volume, dev_name=bdev)
            virtio_blk += options(target, stock(), controller=small.volume, queues=1)
    with Guest(
        image,
        target.directory / "guest",
        controllers=(target.vhost_dir / "vm0",),
        extra=tuple(virtio_blk),
    ) as guest:
        for number in range(5):
            disk(guest, number)
        guest.run(DEVICES)
        # Till then Linux itself prevents and allows the removal.
        guest.agent.wait_for("dmesg | grep 'Attached SCSI removable disk'")
        guest.run(FILES)
        yield guest


@pytest.fixture
def devices(guest: Guest) -> tuple[Guest, str, str]:
    """The guest with a RAM disk and a thin volume, as its devices."""
    ram, thin = (f"/dev/{disk(guest, number)}" for number in (0, 1))
    return guest, ram, thin


@pytest.mark.nightly
def test_blocks_are_copied_without_the_guest(devices: tuple[Guest, str, str]) -> None:
    guest, ram, thin = devices
    guest.run(
        f"head -c 1048576 /dev/urandom > /tmp/data; dd if=/tmp/data of={ram} oflag=direct bs=1M"
    )
    works(guest, f"sg_xcopy if={ram} of={thin} bs=512 count=2048")
    expected = guest.run("md5sum < /tmp/data")
    assert first_mib(guest, thin) == expected
    # Within a disk, to where it overlaps.
    works(guest, f"sg_xcopy if={thin} of={thin} bs=512 count=2048 seek=7")
    moved = f"dd if={thin} bs=512 skip=7 count=2048 iflag=direct 2> /dev/null | md5sum"
    assert guest.run(moved) == expected
    told = works(guest, f"sg_vpd --page=tpc {thin}")
    assert "Extended copy(LID1)" in told
    assert "CSCD: Identification Descriptor" in told


class Tokens(NamedTuple):
    """POPULATE TOKEN and WRITE USING TOKEN in a guest, by sg_raw.

    ddpt 0.97 puts the ranges of both a byte too early (`do_pop_tok`, `do_wut` of ddpt_xcopy.c), so
    that it asks for what is 256 times as far and as long. What it reads is right: pages, tokens,
    and what has become of a copy.
    """

    guest: Guest

    def order(self, device: str, action: int, list_id: int, *parts: bytes | str) -> tuple[int, str]:
        """Sends a parameter list of bytes and of the guest's files, each a token."""
        words = [
            f"cat {part}"
            if isinstance(part, str)
            else "printf '" + "".join(f"\\{byte:03o}" for byte in part) + "'"
            for part in parts
        ]
        length = sum(512 if isinstance(part, str) else len(part) for part in parts)
        cdb = struct.pack(">BB4xIIxx", 0x83, action, list_id, length).hex(" ")
        send = f"sg_raw --send={length} --infile=/tmp/list {device} {cdb}"
        return status(self.guest, f"{{ {'; '.join(words)}; }} > /tmp/list; {send}")

    def make(self, device: str, token: str, *ranges: tuple[int, int]) -> None:
        """Makes a token of ranges, each a block's number and how many, and puts it into a file."""
        head = struct.pack(">HBxII2xH", 14 + 16 * len(ranges), 0, 0, 0, 16 * len(ranges))
        code, said = self.order(device, 0x10, 257, head, descriptors(*ranges))
        assert code == 0, said
        said = works(self.guest, f"ddptctl --receive --verbose --rtf={token} {device}")
        assert "completed without errors" in said, said
        assert f"transfer count of {sum(count for _, count in ranges)} " in said, said

    def write(
        self,
        device: str,
        token: str | bytes,
        *ranges: tuple[int, int],
        offset: int = 0,
        immediate: bool = False,
    ) -> tuple[int, str]:
        """Writes what the token stands for, from block `offset` of it on."""
        length = 16 * len(ranges)
        head = struct.pack(">HB5xQ", 534 + length, immediate, offset)
        tail = struct.pack(">6xH", length)
        return self.order(device, 0x11, 258, head, token, tail, descriptors(*ranges))


def descriptors(*ranges: tuple[int, int]) -> bytes:
    """Block device range descriptors (SBC-3 5.8.3)."""
    return b"".join(struct.pack(">QI4x", lba, count) for lba, count in ranges)


@pytest.mark.nightly
def test_blocks_are_copied_by_tokens(devices: tuple[Guest, str, str]) -> None:
    guest, ram, thin = devices
    tokens = Tokens(guest)
    guest.run(
        f"head -c 4194304 /dev/urandom > /tmp/data; dd if=/tmp/data of={ram} oflag=direct bs=1M"
    )
    expected = guest.run("md5sum < /tmp/data")
    told = works(guest, f"ddptctl --info {thin}")
    assert "Write using token" in told
    assert "Maximum Range Descriptors: 64\n" in told
    assert re.search(r"change vulnerable .*\n.*\n +Token In: yes\n +Token Out: yes", told), told
    # From one disk to the other, in ranges that differ.
    tokens.make(ram, "/tmp/token", (0, 5000), (5000, 3192))
    assert "point in time copy - change vulnerable" in works(
        guest, "ddptctl --info --rtf=/tmp/token"
    )
    code, said = tokens.write(thin, "/tmp/token", (8192, 1000), (9192, 7192))
    assert code == 0, said
    read = f"dd if={thin} bs=8k skip={{}} count=512 iflag=direct 2> /dev/null | md5sum"
    assert guest.run(read.format(512)) == expected
    # Zeros need none.
    zeros = struct.pack(">I2xH504x", 0xFFFF0001, 504)
    code, said = tokens.write(thin, zeros, (8192, 8192))
    assert code == 0, said
    assert guest.run(read.format(512)) == guest.run("head -c 4194304 /dev/zero | md5sum")
    # A part of it; and in the background.
    code, said = tokens.write(thin, "/tmp/token", (0, 16), offset=100)
    assert code == 0, said
    part = guest.run(f"dd if={thin} bs=512 count=16 iflag=direct 2> /dev/null | md5sum")
    assert part == guest.run("dd if=/tmp/data bs=512 skip=100 count=16 2> /dev/null | md5sum")
    code, said = tokens.write(thin, "/tmp/token", (16, 8192), immediate=True)
    assert code == 0, said
    works(guest, f"ddptctl --poll --list_id=258 {thin}")
    assert guest.run(read.format(1)) == expected
    # It is good until one of its blocks is written, and no other one.
    tokens.make(ram, "/tmp/other", (0, 8), (8192, 8))
    guest.run(f"dd if=/dev/zero of={ram} bs=512 seek=8000 count=1 oflag=direct")
    code, said = tokens.write(thin, "/tmp/token", (0, 1))
    assert code != 0
    assert "token revoked" in said, said
    code, said = tokens.write(thin, "/tmp/other", (0, 16))
    assert code == 0, said


@pytest.mark.nightly
def test_a_disk_is_sanitized(target: Target, devices: tuple[Guest, str, str]) -> None:
    guest, ram, thin = devices
    zeros = guest.run("head -c 1048576 /dev/zero | md5sum")
    for device in (ram, thin):
        guest.run(f"head -c 1048576 /dev/urandom | dd of={device} oflag=direct bs=512 2> /dev/null")
        assert first_mib(guest, device) != zeros
    works(guest, f"sg_sanitize --overwrite --count=2 --zero --quick --wait {ram}")
    works(guest, f"sg_sanitize --block --quick --wait {thin}")
    assert first_mib(guest, ram) == first_mib(guest, thin) == zeros
    (bdev,) = target.rpc("bdev_get_bdevs", name="lvs0/thin")
    assert bdev["driver_specific"]["lvol"]["num_allocated_clusters"] == 0
    # Which blocks a RAM disk has nobody knows, and keys are not ours.
    assert status(guest, f"sg_sanitize --block --quick --wait {ram}")[0] != 0
    assert status(guest, f"sg_sanitize --crypto --quick --wait {thin}")[0] != 0
    works(guest, f"sg_sanitize --fail --quick --wait {thin}")


@pytest.mark.nightly
def test_mode_pages_are_set_and_saved(target: Target, devices: tuple[Guest, str, str]) -> None:
    guest, _, thin = devices
    write = f"dd if=/dev/zero of={thin} bs=512 count=1 oflag=direct"
    page = "8a,a,22,10,{swp},40,0,0,0,0,0,0"
    works(guest, f"sg_wr_mode --save --page=a --contents={page.format(swp=8)} {thin}")
    assert status(guest, write)[0] != 0
    for control in (0, 3):
        told = works(guest, f"sg_modes --control={control} --page=0xa {thin}")
        assert re.search(r"8a 0a 22 10 08 40", told), told
    assert "WP=1" in told
    assert len(list((target.state_dir / "mode").glob("*.json"))) == 1
    works(guest, f"sg_wr_mode --save --page=a --contents={page.format(swp=0)} {thin}")
    works(guest, write)
    assert list((target.state_dir / "mode").glob("*.json")) == []
    # What cannot be changed is not.
    refused = page.format(swp=0).replace("10", "20", 1)
    assert status(guest, f"sg_wr_mode --page=a --contents={refused} {thin}")[0] != 0
    # As Linux has the cache turned off.
    cache = guest.run(f"ls -d /sys/block/{thin[5:]}/device/scsi_disk/*/cache_type").strip()
    assert guest.run(f"cat {cache}").strip() == "write back"
    guest.run(f"echo write through > {cache}")
    assert guest.run(f"cat {cache}").strip() == "write through"
    assert "88 12 00" in works(guest, f"sg_modes --page=8 {thin}")
    works(guest, write)


def test_ports_groups_logs_and_atomic_writes_are_told(
    target: Target, devices: tuple[Guest, str, str]
) -> None:
    guest, _, thin = devices
    told = works(guest, f"sg_rtpg --decode {thin}")
    assert "active/optimized" in told
    (group,) = re.findall(r"target port group id : 0x(\w+)", told)
    (port,) = re.findall(r"port ids:\s+0x(\w+)", told)
    identity = works(guest, f"sg_vpd --page=di {thin}")
    assert re.search(rf"Target port group: 0x0*{group}\n", identity), identity
    assert re.search(rf"Relative target port: 0x0*{port}\n", identity), identity
    assert f"Relative port={int(port, 16)}" in works(guest, f"sg_vpd --page=sp {thin}")
    assert "Policy: shared" in works(guest, f"sg_vpd --page=mpp {thin}")
    assert "ORDSUP=1" in works(guest, f"sg_vpd --page=ei {thin}")
    logs = works(guest, f"sg_logs --all {thin}")
    assert "Temperature page" in logs
    assert "IE asc = 0x0, ascq = 0x0" in logs
    # The room of the volume and of its lvstore, in MiB, as page B2h says.
    assert "Threshold exponent: 11" in works(guest, f"sg_vpd --page=lbpv {thin}")
    (free,) = re.findall(r"Available LBA mapping threshold resource count: (\d+)", logs)
    (store,) = target.rpc("bdev_lvol_get_lvstores")
    assert int(free) == store["free_clusters"] * store["cluster_size"] >> 20
    limits = works(guest, f"sg_vpd --page=bl {thin}")
    (blocks,) = map(int, re.findall(r"Maximum atomic transfer length: (\d+)", limits))
    guest.run(f"head -c {512 * blocks * 2} /dev/urandom > /tmp/data")
    atomic = f"sg_write_x --atomic=0 --in=/tmp/data --lba={blocks} --num={{}} {thin}"
    works(guest, atomic.format(blocks))
    assert status(guest, atomic.format(2 * blocks))[0] != 0
    read = f"dd if={thin} bs=512 skip={blocks} count={blocks} iflag=direct 2> /dev/null | md5sum"
    assert guest.run(read) == guest.run(f"head -c {512 * blocks} /tmp/data | md5sum")


@by_day(
    "sg_dd", "sg_persist", "sg_get_lba_status", "sg_unmap", "sg_write_same", "sg_opcodes", "sg_sync"
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_does_what_it_should_and_says_so(guest: Guest, program: str) -> None:
    thin, thick = (f"/dev/{disk(guest, number)}" for number in (1, 4))
    removable = f"/dev/{guest.run('ls /sys/bus/scsi/devices/0:0:2:0/scsi_generic').strip()}"
    for step in PROGRAMS[program]:
        command = step.command.format(thin=thin, thick=thick, removable=removable)
        code, said = status(guest, command)
        assert code == step.status, f"{command}: {code}\n{said}"
        matches = re.search(step.says, said) if step.says else not said
        assert matches, f"{command}\n{said}"
        if step.holds:
            assert letters(guest, thin, step.at, len(step.holds)) == step.holds, command


def test_a_disks_clock_is_the_hosts(devices: tuple[Guest, str, str]) -> None:
    guest, _, thin = devices
    before = time.time()
    told = int(works(guest, f"sg_timestamp {thin}")) / 1000
    assert before - 0.001 <= told <= time.time()


def test_the_cache_is_flushed(target: Target, devices: tuple[Guest, str, str]) -> None:
    guest, _, thin = devices

    def flushes() -> int:
        (controller,) = target.rpc("virtlun_vhost_get_stats", name="vm0")
        (of_thin,) = (each for each in controller["targets"] if each["scsi_target_num"] == 1)
        count: int = of_thin["flushes"]
        return count

    for command in ("sg_sync", "sg_sync --16"):
        before = flushes()
        works(guest, f"{command} {thin}")
        assert flushes() == before + 1


@by_day("lun-thin", "blk-thick")
@pytest.mark.parametrize("small", SMALL, ids=lambda small: small.volume)
def test_zeroes_are_written_and_space_is_given_back(
    target: Target, guest: Guest, small: Small
) -> None:
    name = disk(guest, small.place) if isinstance(small.place, int) else small.place

    def attribute(path: str) -> str:
        return guest.run(f"cat /sys/block/{name}/queue/{path}").strip()

    def counts() -> tuple[int, int]:
        """Bytes that are not zero, and clusters that the volume has."""
        read = f"dd if=/dev/{name} bs=1M iflag=direct 2> /dev/null | tr -d '\\0' | wc -c"
        (bdev,) = target.rpc("bdev_get_bdevs", name=f"lvs0/{small.volume}")
        return int(guest.run(read)), bdev["driver_specific"]["lvol"]["num_allocated_clusters"]

    def clusters(written: int) -> int:
        return written if small.thin else SMALL_MIB

    assert attribute("zoned") == "none"
    assert int(attribute("write_zeroes_max_bytes")) > 0
    assert (int(attribute("discard_max_bytes")) > 0) == small.thin
    guest.run(
        f"head -c {3 * MIB} /dev/zero | tr '\\0' x | dd of=/dev/{name} bs=1M iflag=fullblock"
        " oflag=direct"
    )
    assert counts() == (3 * MIB, clusters(3))
    # The middle one of three clusters, and a part of both others. The shell has a blkdiscard of its
    # own, without -z.
    offset, length = MIB - 65536, MIB + 2 * 65536
    guest.run(f"/tools/blkdiscard -z -o {offset} -l {length} /dev/{name}")
    assert counts() == (3 * MIB - length, clusters(2))
    zeroed = f"dd if=/dev/{name} bs=64k skip={offset >> 16} count={length >> 16} iflag=direct"
    assert guest.run(f"{zeroed} 2> /dev/null | tr -d '\\0' | wc -c").strip() == "0"
    # All of it, for the most part without clusters before.
    guest.run(f"/tools/blkdiscard -z /dev/{name}")
    assert counts() == (0, clusters(0))
