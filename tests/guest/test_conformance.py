"""libiscsi's SCSI conformance suite on our disks, from a real guest by SG_IO.

Its own summary counts what it skips as passed, so each test's words are read: what really passes
is counted apart, what is skipped has its reason here, and of what fails nothing but the suite's
own mistakes is let through.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.guest.conftest import MIB, add, disk
from tests.guest.image import Image, with_tools
from tests.support.qemu import Guest
from tests.support.scratch import short_directory
from tests.support.target import Target

pytestmark = pytest.mark.vm

PROGRAM = "iscsi-test-cu"
SUITE_DEADLINE_S = 600.0

#: What the suite says where it skips a test, and why it does.
SKIPPED = {
    "only supported for iSCSI backends": "it needs an initiator of iSCSI, or two",
    "Non-iSCSI multipath": "it needs sessions of iSCSI",
    "Multipath unavailable": "it needs two paths, which one of the disks here has",
    "--allow-sanitize flag is not set": "the suite dies in it without a session of iSCSI",
    "SANITIZE CRYPTO_ERASE is not implemented": "the keys of an encrypted volume are not ours",
    "SANITIZE BLOCK_ERASE is not implemented": "it does not tell which blocks it has",
    "Logical unit is not removable": "none of these is",
    "Media is not removable": "none of these is",
    "Logical unit is not write-protected": "none of these is",
    "Target is SPC-4+": "the bit that it tests is obsolete",
    "LBPPB < 2": "its physical blocks are its logical ones",
    "WRITESAME10 does not support 0-blocks": "0 blocks are refused, as page B0h says (WSNZ)",
    "WRITESAME16 does not support 0-blocks": "0 blocks are refused, as page B0h says (WSNZ)",
    "LUN is fully provisioned": "it has no UNMAP",
}

#: Mistakes of the suite's release 1.19, all of them.
MISTAKEN = {
    "CompareAndWrite.Simple": "256 blocks, which the byte in the CDB tells as 0, are to be refused",
    "CompareAndWrite.Miscompare": "as Simple",
    "ExtendedCopy.Simple": "reads more at once than Linux takes of memory as it lies",
    "GetLBAStatus.UnmapSingle": "asks for block 9 and expects 16 where a physical block is 8",
    "ReceiveCopyResults.CopyStatus": "expects nothing held of copies before it",
    "StartStopUnit.PwrCnd": "takes every power condition for one that a disk must have",
    "WriteAtomic16.Simple": "up to 256 blocks, whatever page B0h says",
    "MultipathIO.Simple": "a MODE SELECT on the one path is told on the other",
    "MultipathIO.CompareAndWrite": "expects zeros in block 256, having zeroed those before it",
}


#: What a removable disk fails: Linux prevents its removal while the suite has it open.
PREVENTED = ("NoMedia.NoMediaSBC", "PreventAllow.Eject", "StartStopUnit.Simple")

#: Run with leave to sanitize; of this suite OverwriteReserved needs a session of iSCSI, and dies
#: without one.
SANITIZING = ("BlockErase", "CryptoErase", "ExitFailureMode", "InvalidServiceAction", "Overwrite")


class Variant(NamedTuple):
    """A disk, at which targets it is, and how many tests pass on it at least."""

    targets: tuple[int, ...]
    passing: int
    suites: tuple[str, ...] = ("SCSI",)


VARIANTS = {
    "malloc, 512": Variant((0,), 162),
    "malloc, 4096": Variant((1,), 162),
    "thin volume, 512, two paths": Variant((2, 3), 166),
    "thin volume, 4096": Variant((4,), 163),
    "file, 512": Variant((5,), 165),
    "malloc, removable": Variant((6,), 161),
    "malloc, 512 of physical 4096": Variant((7,), 165),
    # All that can be of a disk that refuses writes: what it reads and tells.
    "malloc, write-protected": Variant((8,), 1, ("SCSI.ReadOnly",)),
}
#: The others are of the night.
BY_DAY = ("thin volume, 512, two paths",)


@pytest.fixture(scope="module")
def guest(image: Image) -> Iterator[Guest]:
    """A guest with the suite and all of the disks."""
    with short_directory("vg-") as scratch:
        target = Target(scratch).start()
        target.rpc("vhost_create_scsi_controller", ctrlr="vm0")
        target.make_lvstore(size=256 * MIB)
        for number, block_size in ((0, 512), (1, 4096)):
            blocks = 64 * MIB // block_size
            name = f"malloc{number}"
            target.rpc("bdev_malloc_create", name=name, num_blocks=blocks, block_size=block_size)
            add(target, number, name)
        target.make_thin("shared", 64)
        add(target, 2, "lvs0/shared", shareable=True)
        add(target, 3, "lvs0/shared", shareable=True)
        target.make_thin("large", 64)
        add(target, 4, "lvs0/large", block_size=4096)
        file = target.make_file("file.img", 64 * MIB)
        target.rpc("bdev_uring_create", filename=str(file), name="file", block_size=512)
        add(target, 5, "file")
        options: tuple[dict[str, object], ...] = (
            {"removable": True},
            {"physical_block_size": 4096},
            {"read_only": True},
        )
        for number, shown in enumerate(options, 6):
            physical = shown.pop("physical_block_size", 512)
            target.rpc(
                "bdev_malloc_create",
                name=f"malloc{number}",
                num_blocks=64 * MIB // 512,
                block_size=512,
                physical_block_size=physical,
            )
            add(target, number, f"malloc{number}", **shown)
        controllers = (target.vhost_dir / "vm0",)
        with Guest(
            with_tools(image, PROGRAM), scratch / "guest", controllers=controllers, memory_mib=512
        ) as guest:
            yield guest
        assert target.stop() == 0


def run(guest: Guest, variant: Variant) -> dict[str, str]:
    """Runs the suite; returns what it said of each test, by its name."""
    paths = " ".join(f"/dev/{disk(guest, number)}" for number in variant.targets)
    if "SCSI" not in variant.suites:
        # A disk that refuses writes Linux does not open for them, which the suite asks for.
        (number,) = variant.targets
        paths = f"/dev/$(ls /sys/bus/scsi/devices/0:0:{number}:0/scsi_generic)"
    suites = [f"-t {suite}" for suite in variant.suites]
    if "SCSI" in variant.suites:
        suites += [f"-S -t SCSI.Sanitize.{test}" for test in SANITIZING]
    words = "".join(
        guest.run(
            f"{PROGRAM} -d -v {which} {paths} 2>&1 | sed -n '/^Suite:/,/^Run Summary/p'",
            deadline_s=SUITE_DEADLINE_S,
            check=False,  # its status says that a test failed, as its words do
        )
        for which in suites
    )
    said: dict[str, str] = {}
    suite = ""
    # SUITE, or TEST with what follows it.
    for of_suite, test, text in re.findall(
        r"Suite: (\S+)\n|  Test: (\S+) \.\.\.(.*?)(?=\nSuite: |\n  Test: |\nRun Summary)",
        words,
        re.S,
    ):
        suite = of_suite or suite
        if test:
            said[f"{suite}.{test}"] = text
    return said


@pytest.mark.parametrize(
    "name",
    [
        name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly)
        for name in VARIANTS
    ],
)
def test_a_disk_conforms(guest: Guest, name: str) -> None:
    variant = VARIANTS[name]
    said = run(guest, variant)
    passed = {
        test for test, text in said.items() if re.fullmatch(r"(?s)(?!.*SKIPPED).*passed\s*", text)
    }
    skipped = {test for test, text in said.items() if "[SKIPPED]" in text}
    failed = set(said) - passed - skipped
    print(f"{name}: {len(passed)} pass, {len(skipped)} are skipped, {len(failed)} fail")
    assert len(said) == (215 if "SCSI" in variant.suites else variant.passing)
    known = {*MISTAKEN, *PREVENTED}
    assert failed <= known, {test: said[test] for test in failed - known}
    for test in skipped:
        assert any(words in said[test] for words in SKIPPED), (test, said[test])
    assert len(passed) >= variant.passing, (
        f"{len(passed)} of {len(said)}; skipped: {sorted(skipped)}"
    )
