"""Snapshots, checkpoints and backups: what clients see and what libvirtd gets."""

from __future__ import annotations

import re
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydataplane.domain import translate
from pydataplane.domain.errors import TranslateError
from pydataplane.domain.translate import Settings, listing
from pydataplane.domain.translate.snapshotrequests import snapshot_requested
from tests.unit.translate.domains import domain, translated

SETTINGS = Settings()
THEIRS = (
    "<disk type='file' device='disk'><driver type='qcow2'/><source file='/x.qcow2'/>"
    "<target dev='vda' bus='virtio'/></disk>"
)
CDROM = "<disk type='file' device='cdrom'><target dev='sdz' bus='sata'/><readonly/></disk>"
OURS = (
    "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/v'/>"
    "<target dev='sdc' bus='scsi'/></disk>"
)


def libvirts(*disks: str) -> str:
    """Returns libvirtd's XML of a domain."""
    given = domain("".join(disks))
    return translate.define(given, SETTINGS, new_uuid=UUID(int=1), controller=True).xml


def carrier(xml: str) -> str:
    found = re.search(r"<target dev='(\w+)' bus='virtio'/>\s*(?:<boot[^>]*>\s*)?<alias", xml)
    assert found is not None
    return found[1]


def names(xml: str) -> list[str]:
    return re.findall(r"<disk name='(\w+)'", xml)


WITH, WITHOUT = libvirts(THEIRS, CDROM, OURS), libvirts(THEIRS, CDROM)


@pytest.mark.parametrize(
    "xml",
    [
        "<domaincheckpoint/>",
        "<domaincheckpoint><disks><disk name='sdc'/></disks></domaincheckpoint>",
        "<domainbackup/>",
        "<domainbackup><disks><disk name='lvs0/v' backup='yes'/></disks></domainbackup>",
    ],
)
def test_a_disk_of_ours_that_is_not_left_out_is_named(xml: str) -> None:
    with pytest.raises(TranslateError, match=r"cannot include its virtlun disks \(sdc\)"):
        listing.leave_out(xml, WITH, SETTINGS)
    listing.leave_out(xml, WITHOUT, SETTINGS)


@pytest.mark.parametrize(
    ("kind", "attribute", "value"),
    [
        ("domaincheckpoint", "checkpoint", "no"),
        ("domainbackup", "backup", "no"),
    ],
)
@pytest.mark.parametrize("name", ["sdc", "lvs0/v", "/dev/virtlun/lvs0/v"])
def test_what_is_left_out_is_not_libvirtds_to_know(
    kind: str, attribute: str, value: str, name: str
) -> None:
    xml = (
        f"<{kind}><disks><disk name='vda'/><disk name='{name}' {attribute}='{value}'/></disks>"
        f"</{kind}>"
    )
    assert names(listing.leave_out(xml, WITH, SETTINGS)) == ["vda"]


@pytest.mark.parametrize("kind", ["domaincheckpoint", "domainbackup"])
def test_where_nothing_is_left_libvirtd_must_not_take_all(kind: str) -> None:
    attribute = kind.removeprefix("domain")
    xml = f"<{kind}><disks><disk name='sdc' {attribute}='no'/></disks></{kind}>"
    made = listing.leave_out(xml, WITH, SETTINGS)
    assert names(made) == [carrier(WITH)] and f"{attribute}='no'" in made


def test_by_default_all_others_are_taken_without_the_carrier() -> None:
    made = listing.leave_out("<domaincheckpoint/>", WITHOUT, SETTINGS)
    assert "<disk name='vda' checkpoint='bitmap'/>" in made and names(made) == ["vda"]
    made = listing.leave_out("<domainbackup/>", WITHOUT, SETTINGS, "7")
    assert "<target file='/x.qcow2.7'/>" in made and names(made) == ["vda"]
    made = listing.leave_out("<domainbackup mode='pull'/>", WITHOUT, SETTINGS, "7")
    assert "<scratch file='/x.qcow2.7'/>" in made


@pytest.mark.parametrize("live", [WITH, WITHOUT])
def test_a_snapshot_defined_again_is_what_it_was(live: str) -> None:
    other = live.replace("<domain ", "<inactiveDomain ").replace("</domain>", "</inactiveDomain>")
    inside = (
        f"<domainsnapshot><name>s</name><disks><disk name='vda' snapshot='external'/>"
        f"<disk name='{carrier(live)}' snapshot='no'/></disks>{live}{other}</domainsnapshot>"
    )
    shown = listing.present_listing(inside, SETTINGS)
    assert names(shown) == ["vda", *(["sdc"] if live is WITH else [])]
    assert not re.search("vhostuser|virtlun.dev", shown)
    defined = listing.define_inside(shown, live, SETTINGS)
    assert (defined.name, defined.luns) == ("s", ())
    again = defined.xml
    assert names(again) == ["vda"]
    assert again.count("vhost-user-scsi-pci") == 2
    # What is defined again says what the client left out.
    shown = translate.present(live, live=False)
    whole = translated(shown, current=live).xml
    assert (whole == live) == (live is WITHOUT)
    other = whole.replace("<domain ", "<inactiveDomain ").replace("</domain>", "</inactiveDomain>")
    assert whole in again and other in again


def test_a_backup_has_no_domain_inside_and_is_shown_by_the_present_one() -> None:
    xml = f"<domainbackup><disks><disk name='{carrier(WITH)}' backup='no'/></disks></domainbackup>"
    assert names(listing.present_listing(xml, SETTINGS, domain_xml=WITH)) == ["sdc"]
    assert listing.present_listing(xml, SETTINGS) == xml


PIECES = st.sampled_from(
    [
        *("<domainsnapshot>", "</domainsnapshot>", "<domainbackup/>", "<domaincheckpoint>"),
        *("<disks>", "</disks>", "<disk name='sdc'/>", "<disk snapshot='no'/>"),
        *("<domain>", "</domain>", "<", "<a:b/>", "\0", "é"),
    ]
)


@given(st.lists(PIECES, max_size=8).map("".join))
def test_nothing_makes_it_fail_otherwise(xml: str) -> None:
    for current in (WITH, WITHOUT, xml):
        for change in (listing.leave_out, listing.define_inside, snapshot_requested):
            try:
                change(xml, current, SETTINGS)
            except TranslateError as error:
                assert str(error)
        listing.present_listing(xml, SETTINGS, domain_xml=current)
