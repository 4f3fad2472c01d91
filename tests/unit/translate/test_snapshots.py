"""What a client's snapshot asks for, and the note of its lvol snapshots."""

from __future__ import annotations

import re
from pathlib import Path
from uuid import UUID

import pytest
from lxml import etree

from pydataplane.domain import translate
from pydataplane.domain.errors import TranslateError
from pydataplane.domain.translate import Settings, listing
from pydataplane.domain.translate.snapshotrequests import Request, compose, snapshot_requested
from pydataplane.domain.translate.snapshotxml import (
    DiskSnapshot,
    domain_of,
    parse_snapshot,
    with_note,
    without_note,
)
from tests.unit.translate.domains import domain, lvol
from tests.unit.translate.test_listing import CDROM, OURS, THEIRS, libvirts, names

ROOT = Path(__file__).parents[3]
NOTE_RNG = etree.RelaxNG(etree.parse(ROOT / "schemas/snapshot-metadata.rng"))
SETTINGS = Settings()
HELD = (DiskSnapshot("sdc", str(UUID(int=1)), "lvs0", "v@s", str(UUID(int=2))),)
READ_ONLY = OURS.replace("</disk>", "<readonly/></disk>")


def asked(disks: str, *, there: str = "", more: str = "") -> Request:
    """Returns what is asked for with this list of disks, of a domain with `there`."""
    xml = f"<domainsnapshot><name>s</name>{more}<disks>{disks}</disks></domainsnapshot>"
    found = snapshot_requested(xml, there or libvirts(THEIRS, CDROM, OURS), SETTINGS)
    assert found is not None
    return found


def devs(request: Request) -> list[str]:
    return [lun.dev for lun in request.luns]


@pytest.mark.parametrize(
    "disks", ["", "<disk name='sdc'/>", "<disk name='sdc' snapshot='internal'/>"]
)
def test_disks_of_ours_are_in_it_and_libvirtd_hears_of_none(disks: str) -> None:
    request = asked(disks + "<disk name='vda'/>")
    assert (devs(request), request.others, request.left) == (["sdc"], ("vda",), ())
    assert names(request.xml) == ["vda"]


@pytest.mark.parametrize("word", ["no", "manual"])
@pytest.mark.parametrize("name", ["sdc", "lvs0/v", "/dev/virtlun/lvs0/v"])
def test_a_disk_is_left_out_under_each_of_its_names(word: str, name: str) -> None:
    request = asked(f"<disk name='{name}' snapshot='{word}'/>")
    assert (devs(request), names(request.xml)) == ([], [])


@pytest.mark.parametrize("word", ["no", "manual"])
def test_a_disk_that_leaves_itself_out_is_in_it_where_it_is_named(word: str) -> None:
    there = libvirts(THEIRS, OURS.replace("<disk ", f"<disk snapshot='{word}' ", 1))
    assert devs(asked("", there=there)) == []
    assert devs(asked("<disk name='sdc' snapshot='internal'/>", there=there)) == ["sdc"]
    assert devs(asked("", there=libvirts(THEIRS, READ_ONLY))) == []


@pytest.mark.parametrize(
    "disk",
    ["<disk name='sdc' snapshot='external'/>", "<disk name='sdc'><source file='/x'/></disk>"],
)
def test_a_volume_has_no_snapshot_in_a_file(disk: str) -> None:
    with pytest.raises(TranslateError, match=r"disk sdc: a virtlun volume holds its snapshots"):
        asked(disk)


@pytest.mark.parametrize("name", ["vda", "/x.qcow2"])
def test_what_a_guest_can_write_and_is_left_out(name: str) -> None:
    request = asked(f"<disk name='{name}' snapshot='no'/>")
    assert (request.others, request.left) == ((), ("vda",))
    there = libvirts(THEIRS.replace("<disk ", "<disk snapshot='no' ", 1), OURS)
    assert (asked("", there=there).others, asked("", there=there).left) == ((), ())


@pytest.mark.parametrize(
    ("memory", "found"),
    [
        ("", (None, None)),
        ("<memory file='/m'/>", ("external", "/m")),
        ("<memory snapshot='external' file='/m'/>", ("external", "/m")),
        ("<memory snapshot='no'/>", ("no", None)),
    ],
)
def test_memory(memory: str, found: tuple[str | None, str | None]) -> None:
    request = asked("", more=memory)
    assert (request.memory, request.memory_file) == found
    given = request.with_memory("/chosen").memory_file
    assert given == (found[1] if memory else "/chosen")


def test_a_name_that_is_chosen_stands_in_the_xml() -> None:
    request = snapshot_requested(
        "<domainsnapshot><name/></domainsnapshot>", libvirts(OURS), SETTINGS
    )
    assert request is not None
    named = request.named("17").with_memory("/m&m")
    snapshot = parse_snapshot(named.xml)
    assert snapshot is not None and snapshot.name == "17"
    assert named.xml.count("<name") == 1 and "file='/m&amp;m'" in named.xml


@pytest.mark.parametrize(
    "xml", ["", "<domain/>", "<domainsnapshot", "<a:domainsnapshot xmlns:a='b'/>"]
)
def test_what_is_no_snapshot_is_libvirtds_to_refuse(xml: str) -> None:
    assert snapshot_requested(xml, libvirts(OURS), SETTINGS) is None
    assert parse_snapshot(xml) is None and domain_of(xml) is None and with_note(xml, HELD) == xml


def composed(live: str, inactive: str | None) -> str:
    return compose(
        asked("<disk name='vda' snapshot='no'/>", there=live),
        HELD,
        state="disk-snapshot",
        parent="p&q",
        created_s=17,
        domain_xml=live,
        inactive_xml=inactive,
    )


def test_a_snapshot_of_disks_of_ours_alone() -> None:
    live, inactive = libvirts(THEIRS, OURS), libvirts(OURS)
    xml = composed(live, inactive)
    found = parse_snapshot(xml)
    assert found is not None
    assert (found.name, found.state, found.memory_file) == ("s", "disk-snapshot", None)
    assert (found.external, found.internal, found.left) == ((), (), ("vda",))
    assert found.held == HELD and found.held[0].path == "lvs0/v@s"
    assert "<name>p&amp;q</name>" in xml and "<creationTime>17<" in xml
    assert domain_of(xml) == inactive.strip()
    assert domain_of(composed(live, None)) == live.strip()
    (note,) = re.findall(r"<virtlun-snapshot:volumes.*?</virtlun-snapshot:volumes>", xml, re.DOTALL)
    NOTE_RNG.assertValid(etree.fromstring(note))


def test_what_of_ours_a_guest_can_write_and_is_not_in_it() -> None:
    there = libvirts(OURS + lvol("sdy", "w") + lvol("sdz", "r", more="<readonly/>"))
    found = parse_snapshot(
        with_note(f"<domainsnapshot><name>s</name>{there}</domainsnapshot>", HELD)
    )
    assert found is not None
    assert (found.left, found.left_of_ours) == (("sdy",), ("sdy",))
    assert not found.has_memory


def test_a_note_is_taken_out_again_and_no_client_sees_it() -> None:
    live = libvirts(THEIRS, OURS)
    plain = f"<domainsnapshot><name>s</name><state>paused</state><disks/>{live}</domainsnapshot>"
    annotated = with_note(plain, HELD, state="running")
    assert with_note(annotated, HELD) == annotated
    assert without_note(annotated) == plain.replace("paused", "running")
    shown = listing.present_listing(annotated, SETTINGS)
    assert "virtlun.dev" not in shown and "virtlun-snapshot" not in shown
    bare = f"<domainsnapshot>{domain('')}</domainsnapshot>"
    assert without_note(with_note(bare, HELD)) == bare, "with <metadata> of the note's own"


def test_a_damaged_note_is_of_no_disk() -> None:
    xml = with_note(f"<domainsnapshot>{libvirts(OURS)}</domainsnapshot>", HELD)
    found = parse_snapshot(xml.replace(' uuid="', ' other="'))
    assert found is not None and found.held == ()


def test_a_snapshot_that_is_shown_and_defined_again() -> None:
    live = libvirts(THEIRS, OURS)
    carrier = translate.plan(live)
    assert carrier is not None
    names_of = re.search(r"<target dev='(\w+)' bus='virtio'/>\s*(?:<boot[^>]*>\s*)?<alias", live)
    assert names_of is not None
    xml = with_note(
        f"<domainsnapshot><name>s</name><disks><disk name='vda' snapshot='no'/>"
        f"<disk name='{names_of[1]}' snapshot='no'/></disks>{live}</domainsnapshot>",
        HELD,
    )
    shown = listing.present_listing(xml, SETTINGS)
    assert "<disk name='sdc' snapshot='internal'/>" in shown
    defined = listing.define_inside(shown, live, SETTINGS)
    assert [lun.dev for lun in defined.luns] == ["sdc"]
    assert names(defined.xml) == ["vda"]
    with pytest.raises(TranslateError, match="disk sdc"):
        listing.define_inside(shown.replace("'internal'", "'external'"), live, SETTINGS)
