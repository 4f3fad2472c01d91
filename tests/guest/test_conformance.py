"""libiscsi's SCSI conformance suite on our disks, from a real guest by SG_IO.

Its own summary counts what it skips as passed, so each test's words are read, and its outcome is
compared with the list of conformance.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.guest.conformance import BY_DAY, FIRST, LISTED
from tests.guest.conftest import MIB, add, disk
from tests.guest.image import Image, with_tools
from tests.support.qemu import Guest
from tests.support.scratch import short_directory
from tests.support.target import Target

pytestmark = pytest.mark.vm

PROGRAM = "iscsi-test-cu"
SUITE_DEADLINE_S = 600.0

#: Run with leave to sanitize; of this suite OverwriteReserved needs a session of iSCSI, and dies
#: without one.
SANITIZING = ("BlockErase", "CryptoErase", "ExitFailureMode", "InvalidServiceAction", "Overwrite")
#: Suites that tell only with -V what they skip.
TERSE = ("NoMedia", "StartStopUnit")

#: Pages of 2 MiB: 300 MiB, of which the suite takes 256 MiB at once for 4096-byte blocks. QEMU lets
#: a command have 126 parts of memory, so with pages of 4 KiB it depends on where they lie whether
#: Linux sends one of 512 KiB or more; the suite takes some that were not sent for written.
HUGE_PAGES = 150
#: All memory comes from them: nothing reaches the size that would have pages of its own.
IN_HUGE_PAGES = "GLIBC_TUNABLES=glibc.malloc.hugetlb=2:glibc.malloc.mmap_threshold=0x40000000"

#: At which targets of the guest's controller a disk is: at several, where it has several paths.
TARGETS = {
    "malloc, 512": (0,),
    "malloc, 4096": (1,),
    "thin volume, 512, two paths": (2, 3),
    "thin volume, 4096": (4,),
    "file, 512": (5,),
    "malloc, removable": (6,),
    "malloc, 512 of physical 4096": (7,),
    "malloc, write-protected": (8,),
    "file, 4096": (9,),
    "thick volume, 512": (10,),
}


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
        for number, block_size in ((5, 512), (9, 4096)):
            name = f"file{number}"
            file = target.make_file(f"{name}.img", 64 * MIB)
            target.rpc("bdev_uring_create", filename=str(file), name=name, block_size=block_size)
            add(target, number, name)
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
        target.rpc("bdev_lvol_create", lvs_name="lvs0", lvol_name="thick", size_in_mib=64)
        add(target, 10, "lvs0/thick")
        controllers = (target.vhost_dir / "vm0",)
        with Guest(
            with_tools(image, PROGRAM), scratch / "guest", controllers=controllers, memory_mib=1024
        ) as guest:
            guest.run(
                f"echo {HUGE_PAGES} > /proc/sys/vm/nr_hugepages && "
                f"grep -q 'HugePages_Free: *{HUGE_PAGES}$' /proc/meminfo"
            )
            yield guest
        assert target.stop() == 0


def generic(number: int) -> str:
    """Returns the generic device of a target's disk, for the guest's shell."""
    return f"/dev/$(ls /sys/bus/scsi/devices/0:0:{number}:0/scsi_generic)"


def all_suites(guest: Guest) -> str:
    """Returns the SCSI suites of the program, for its option -t, which takes the last first."""
    suites = re.findall(r"^SCSI\.(\w+)$", guest.run(f"{PROGRAM} -l"), re.MULTILINE)
    assert set(FIRST) < set(suites), suites
    others = [suite for suite in suites if suite not in FIRST]
    return ",".join(f"SCSI.{suite}" for suite in reversed([*FIRST, *others]))


def run(guest: Guest, name: str) -> dict[str, str]:
    """Runs the suite on a disk; returns what it said of each test, by the test's name."""
    targets = TARGETS[name]
    if name == "malloc, removable":
        # Linux prevents the removal when the first opens the disk, and the suite is not that one.
        (number,) = targets
        guest.run(f"(exec 3< /dev/{disk(guest, number)}; sleep 86400 > /dev/null 2>&1 &)")
        guest.run(f"sg_raw {generic(number)} 1e 00 00 00 00 00")
    if name == "malloc, write-protected":
        # Linux does not open it for writes, which the suite asks for.
        (number,) = targets
        paths = generic(number)
        suites = ["-v -t SCSI.ReadOnly"]
    else:
        paths = " ".join(f"/dev/{disk(guest, number)}" for number in targets)
        suites = [f"-v -t {all_suites(guest)}"]
        suites += [f"-v -S -t SCSI.Sanitize.{test}" for test in SANITIZING]
        suites += [f"-V -t SCSI.{suite}" for suite in TERSE]
    words = "".join(
        guest.run(
            f"{IN_HUGE_PAGES} {PROGRAM} -d {which} {paths} 2>&1"
            " | sed -n '/^Suite:/,/^Run Summary/p'",
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


@pytest.mark.timeout(2 * SUITE_DEADLINE_S)
@pytest.mark.parametrize(
    "name",
    [
        name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly)
        for name in LISTED.tests
    ],
)
def test_a_disk_conforms_as_listed(guest: Guest, name: str) -> None:
    expected = LISTED.expected(name)
    found = {test: LISTED.outcome(test, text) for test, text in run(guest, name).items()}
    differing = [
        f"{test}: {found.get(test, 'not run')}\n    expected: {expected.get(test, 'not listed')}"
        for test in sorted(expected.keys() | found.keys())
        if found.get(test) != expected.get(test)
    ]
    assert not differing, "\n".join([name, *differing])
