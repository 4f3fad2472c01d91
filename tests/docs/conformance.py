"""The page on libiscsi's SCSI suite: made from the list of what it says of each disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.guest.conformance import BY_DAY, FIRST, LISTED, Kind, Reason

FOLDER = "tests/guest"


def scsi_suite() -> str:
    """Returns the page, without the note on how it was made."""
    every, passing, nowhere = len(LISTED.every), len(LISTED.passing()), LISTED.nowhere()
    parts = [
        "# SCSI conformance\n\nWhat the SCSI tests of libiscsi's `iscsi-test-cu` (release "
        f"{LISTED.release}) say of our disks, from a Linux guest by SG_IO. Of its {every} tests "
        f"{passing} pass on one of these disks at least. "
        f"[conformance.yaml](../../../{FOLDER}/conformance.yaml) has what is expected of each test "
        f"on each disk, and [a test](../../../{FOLDER}/test_conformance.py) compares each. Those "
        f"of {' and '.join(FIRST)} are run first: they expect a disk that no other has used. "
        "A test of which all is skipped counts as skipped, though the suite itself says that "
        f"it passed. `make test` runs {', '.join(map(_code, BY_DAY))}, `make nightly` all.\n",
        "| disk | passed | skipped | failed by a mistake of the suite | deviates by design |\n"
        "| --- | --- | --- | --- | --- |",
        *(_disk(disk) for disk in LISTED.tests),
        "\nOf a write-protected disk the other tests are not begun, as they write.\n",
        f"## What passes nowhere\n\nThe {len(nowhere)} other tests, and why.\n\n"
        "| tests | outcome | because |\n| --- | --- | --- |",
        *_nowhere(),
        "\n## What is skipped on some disks\n\nEach passes on another disk, or fails there as "
        "above.\n\n| disks | tests | because |\n| --- | --- | --- |",
        *_elsewhere(),
        "\n## What fails on some disks\n\nOthers pass, or skip it.\n\n"
        "| disks | tests | because |\n| --- | --- | --- |",
        *_partly(),
        "\n## What no test of it asks\n\nThe mode pages Control Extension and Informational "
        "Exceptions Control are shown, and can be given to MODE SELECT as they are: nothing in "
        "them can be changed, nor saved, as SPC-4 lets a device have it. What could be set there "
        "is of what there is not: a clock that a guest sets (TCMOS, SCSIP), priorities of "
        "commands, a limit of how long sense data is, and warnings of a disk's wear or heat "
        "(DEXCPT says that there are none, so that MRIE would have nothing to choose a way for, "
        "and TEST would report one of a disk that has no trouble); how full a volume becomes its "
        "host watches. Of SBC-4's pages of vital product data there is no B5h (a disk's "
        "utilization tells of its wear, which is not the target's to tell) and no B6h (no zones).\n"
        "\nWRITE ATOMIC is of one physical block. Of more no disk below says that a loss of power "
        "leaves all of it or nothing, and a disk in memory, which has no such loss to survive, is "
        "copied to while another reactor may read it.\n\nPower conditions are refused, as START "
        "STOP UNIT's reserved ones are: nothing here stands by, so that there are neither mode "
        "page 1Ah nor page 8Ah of vital product data.\n\nA removable disk's medium that its "
        "guest has ejected (START STOP UNIT with LOEJ) is a volume that stays where it is: nothing "
        "but INQUIRY and the like is answered until the guest loads it or its driver starts "
        "afresh, and after a restart or an upgrade of the target it is in again. Who prevents the "
        "removal, as Linux does while the disk is open, prevents the eject. A target that is "
        "killed and a migration lose that, and Linux does not say it again: an eject takes the "
        "medium from a mounted file system then, until the disk is closed and opened. A write in "
        "flight when an eject is answered may end after it, and is not flushed. "
        "`vhost_get_controllers` shows `ejected`; to libvirt and virsh the disk is there as "
        "before, as is the volume's user.\n\nPersistent reservations whose record in the state "
        "directory is damaged are lost (SPC-4 5.13.5.3): every command but INQUIRY, LOG SENSE, "
        "REPORT LUNS, REPORT TARGET PORT GROUPS, REQUEST SENSE and a START ends as DATA PROTECT, "
        "PERSISTENT RESERVATION INFORMATION LOST (7h, 44h/01h), on all disks of the volume, "
        "until an initiator says by REPLACE LOST RESERVATION (`sg_persist --out --replace-lost`) "
        "what holds instead, and that is saved. A record that cannot be read for now leaves the "
        "volume NOT READY (2h, 04h/01h). Either is read again each second. Who has not learned "
        "the capacity by the time that it is known is told 2Ah/09h, and all drivers virtio's "
        "event VIRTIO_SCSI_T_PARAM_CHANGE, upon which Linux asks its disk again; so is who could "
        "not ask the program before, when a new one takes over and knows it at once. One that "
        "replaced what was lost and says so once more is told that nothing is lost (26h/04h), as "
        "all others are: READ RESERVATION shows that it holds.\n\nRECEIVE COPY FAILURE DETAILS "
        "tells once why an EXTENDED COPY(LID1) failed, until a reset or the end of the session.",
    ]
    return "\n".join(parts) + "\n"


def _disk(disk: str) -> str:
    reasons = (LISTED.reason(disk, test) for test in LISTED.tests[disk])
    counted = Counter(reason.kind if reason else None for reason in reasons)
    skipped = counted[Kind.ELSEWHERE] + counted[Kind.SKIPPED]
    counts = (counted[None], skipped, counted[Kind.MISTAKES], counted[Kind.DIFFERS])
    return f"| {_code(disk)} | {' | '.join(map(str, counts))} |"


_WORDS = {
    Kind.SKIPPED: "skipped",
    Kind.MISTAKES: "failed by a mistake of the suite",
    Kind.DIFFERS: "deviates by design",
}


def _nowhere() -> Iterator[str]:
    tests: dict[tuple[str, str], list[str]] = {}
    for test, reason in LISTED.nowhere().items():
        tests.setdefault((_WORDS[reason.kind], reason.why), []).append(test)
    for (outcome, why), names in tests.items():
        yield f"| {_tests(names)} | {outcome} | {why} |"


def _elsewhere() -> Iterator[str]:
    for reason in LISTED.reasons:
        if reason.kind is Kind.ELSEWHERE:
            names = [test for test in LISTED.every if test in reason.tests]
            yield f"| {_disks(reason)} | {_tests(names)} | {reason.why} |"


def _partly() -> Iterator[str]:
    passing = LISTED.passing()
    for reason in LISTED.reasons:
        names = [test for test in LISTED.every if test in reason.tests & passing]
        if names and not reason.kind.skips:
            yield f"| {_disks(reason)} | {_tests(names)} | {reason.why} |"


def _disks(reason: Reason) -> str:
    """Returns the disks of a reason that run one of its tests."""
    running = [disk for disk, tests in LISTED.tests.items() if reason.tests & set(tests)]
    others = [disk for disk in running if disk not in reason.disks]
    if len(others) < len(running) / 2:
        return f"all but {', '.join(map(_code, others))}"
    return ", ".join(_code(disk) for disk in running if disk in reason.disks)


def _code(disk: str) -> str:
    """Returns a name that has commas, as a whole."""
    return f"`{disk}`"


def _tests(names: list[str]) -> str:
    """Returns tests by their suites, each of which is named once."""
    suites: dict[str, list[str]] = {}
    for name in names:
        suite, _, test = name.partition(".")
        suites.setdefault(suite, []).append(test)
    return "; ".join(f"{suite}: {', '.join(tests)}" for suite, tests in suites.items())
