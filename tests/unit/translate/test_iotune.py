"""<iotune> of a disk of ours: read, kept as it was given, and written anew when it changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lxml import etree

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.limits import NAMES, NONE, Limits
from pydataplane.domain.translate import (
    attach,
    define,
    detach,
    plan,
    present,
    recognise,
    settable,
    tuned,
    update,
)
from pydataplane.domain.xml import metadata as metadatas
from pydataplane.domain.xml import view as views
from pydataplane.domain.xml.document import Document
from tests.unit.translate.domains import (
    NEW_UUID,
    ROOT,
    SETTINGS,
    canonical,
    domain,
    lvol,
    translated,
    with_drivers,
)

SLOW = Limits(total_iops_sec=100, total_iops_sec_max=200)
GIVEN = (
    "<iotune><total_iops_sec>100</total_iops_sec>"
    "<total_iops_sec_max> 200 </total_iops_sec_max><read_bytes_sec>0</read_bytes_sec></iotune>"
)


def tune(**values: object) -> str:
    inside = "".join(f"<{name}>{value}</{name}>" for name, value in values.items())
    return f"<iotune>{inside}</iotune>"


def limits(xml: str) -> Limits:
    found = plan(xml)
    assert found is not None
    return found.luns[0].limits


def running(xml: str) -> str:
    return xml.replace("<domain ", "<domain id='1' ", 1)


@pytest.mark.parametrize(("dev", "bus"), [("sdb", "scsi"), ("vdb", "virtio")])
def test_it_is_planned_and_comes_back_as_it_was_given(dev: str, bus: str) -> None:
    client = domain(lvol(dev, bus=bus, more=GIVEN))
    made = translated(client)
    assert made.plan is not None and made.plan.luns[0].limits == limits(made.xml) == SLOW
    for live in (False, True):
        shown = present(running(made.xml) if live else made.xml, live=live)
        assert GIVEN in shown
    assert canonical(present(made.xml, live=False)) == canonical(with_drivers(client))
    again = define(made.xml, SETTINGS, new_uuid=NEW_UUID)
    assert limits(again.xml) == SLOW


def test_every_one_of_the_nineteen_is_taken_and_noted() -> None:
    for name in NAMES:
        rate = name.removesuffix("_length").removesuffix("_max")
        given = {rate: 5} if name != "size_iops_sec" else {"read_iops_sec": 5, name: 7}
        if name.endswith(("_max", "_length")):
            given[f"{rate}_max"] = 6
        if name.endswith("_length"):
            given[name] = 9
        xml = translated(domain(lvol("sdb", more=tune(**given)))).xml
        assert limits(xml).given == given
        view = views.required(xml)
        assert view.element is not None
        settable(view.document.source(view.element))


def test_what_is_noted_is_what_the_schema_has() -> None:
    grammar = etree.RelaxNG(etree.parse(ROOT / "schemas/domain-metadata.rng"))
    everything = {n: 1 for n in NAMES if not n.startswith("total")}
    xml = translated(domain(lvol("sdb", more=tune(**everything)))).xml
    (element,) = etree.fromstring(xml).iter("{https://virtlun.dev/xmlns/domain/1}disks")
    grammar.assertValid(etree.fromstring(etree.tostring(element)))
    assert b'limits="read_bytes_sec=1 ' in etree.tostring(element)


@pytest.mark.parametrize("word", ["total_iops_sec=x", "total_iops_sec", "none=1"])
def test_damaged_metadata_is_said(word: str) -> None:
    xml = translated(domain(lvol("sdb", more=tune(total_iops_sec=1)))).xml
    with pytest.raises(TranslateError, match="metadata is damaged"):
        plan(xml.replace("total_iops_sec=1", word, 1))


@pytest.mark.parametrize(
    ("more", "refusal", "says"),
    [
        (
            tune(total_bytes_sec=1, write_bytes_sec=1),
            Refusal.UNSUPPORTED,
            "disk 'sdb' .*<iotune>: total and read/write of bytes_sec cannot be set at the same",
        ),
        (tune(read_iops_sec_max=1), Refusal.UNSUPPORTED, "'read_iops_sec' is not set"),
        (tune(size_iops_sec=1), Refusal.UNSUPPORTED, "'size_iops_sec' cannot be set"),
        (
            tune(total_iops_sec="fast"),
            Refusal.BAD_XML,
            "disk iotune field 'total_iops_sec' must be an integer",
        ),
        (tune(total_iops_sec=-1), Refusal.BAD_XML, "must be an integer, 0 or more"),
        (tune(group_name="g"), Refusal.UNSUPPORTED, "<group_name> is not possible: each volume"),
        (tune(speed=1), Refusal.UNSUPPORTED, "<speed> is not possible: virtlun does not know it"),
        (
            "<shareable/>" + tune(total_iops_sec=1),
            Refusal.UNSUPPORTED,
            "<iotune> is not possible with <shareable/>",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(more: str, refusal: Refusal, says: str) -> None:
    for bus, dev in (("scsi", "sdb"), ("virtio", "vdb")):
        with pytest.raises(TranslateError, match=says.replace("sdb", dev)) as caught:
            recognise(lvol(dev, more=more, bus=bus), SETTINGS)
        assert caught.value.refusal is refusal


def test_zeros_and_none_limit_nothing() -> None:
    for more in ("<iotune/>", tune(total_iops_sec=0), "<shareable/><iotune/>"):
        assert limits(translated(domain(lvol("sdb", more=more))).xml) == NONE


@pytest.mark.parametrize(("dev", "bus"), [("sdb", "scsi"), ("vdb", "virtio")])
@pytest.mark.parametrize("live", [False, True])
def test_other_limits_are_written_where_libvirt_has_them(dev: str, bus: str, live: bool) -> None:
    xml = translated(domain(lvol(dev, bus=bus, more="<serial>S</serial>"))).xml
    if live:
        xml = running(xml)
    for path in (dev, "/dev/virtlun/lvs0/v", "lvs0/v"):
        change = tuned(xml, path, SLOW, SETTINGS, live=live)
        assert change is not None and not change.redefine and change.device_xml is None
        assert change.lun.limits == SLOW
        assert 'limits="total_iops_sec=100 total_iops_sec_max=200"' in (
            change.metadata_xml.replace("'", '"')
        )
    assert change is not None and (change.domain_xml is None) == live
    assert f"bus='{bus}'/><iotune><total_iops_sec>100</total_iops_sec>" in change.metadata_xml
    assert "</iotune><serial>" in change.metadata_xml
    if not live:
        assert limits(change.domain_xml or "") == SLOW
        none = tuned(change.domain_xml or "", dev, NONE, SETTINGS, live=False)
        assert none is not None and "iotune" not in (none.domain_xml or "")
        assert canonical(none.domain_xml or "") == canonical(xml)


def test_they_are_laid_out_as_the_disk_is() -> None:
    disk = (
        "<disk type='file' device='disk'>\n      <source file='/dev/virtlun/lvs0/v'/>\n"
        "      <target dev='sdb' bus='scsi'/>\n      <iotune>\n"
        "        <read_iops_sec>1</read_iops_sec>\n      </iotune>\n    </disk>"
    )
    change = tuned(translated(domain(disk)).xml, "sdb", SLOW, SETTINGS, live=False)
    assert change is not None and change.domain_xml is not None
    shown = present(change.domain_xml, live=False)
    assert (
        "\n      <target dev='sdb' bus='scsi'/>\n      <iotune>\n"
        "        <total_iops_sec>100</total_iops_sec>\n"
        "        <total_iops_sec_max>200</total_iops_sec_max>\n      </iotune>\n    </disk>"
    ) in shown


def test_a_disk_that_is_not_ours_has_none() -> None:
    xml = translated(domain(lvol("sdb"))).xml
    assert tuned(xml, "sdc", SLOW, SETTINGS, live=False) is None
    assert tuned(domain(), "sdb", SLOW, SETTINGS, live=False) is None


def test_attach_brings_them_and_a_detach_needs_not_name_them() -> None:
    """Nova detaches by XML of its own, without what the volume's type has set."""
    before = running(translated(domain()).xml)
    change = attach(before, lvol("sdb", more=GIVEN), SETTINGS, live=True)
    assert change is not None and change.lun.limits == SLOW
    assert change.plan is not None and change.plan.luns[0].limits == SLOW
    after = running(translated(domain(lvol("sdb", more=GIVEN))).xml)
    gone = detach(after, lvol("sdb"), SETTINGS, live=True)
    assert gone is not None and gone.lun.limits == SLOW
    assert gone.plan is not None and gone.plan.luns == ()


def test_an_update_of_the_running_side_keeps_them_and_changes_none() -> None:
    xml = running(translated(domain(lvol("sdb", more=GIVEN))).xml)
    kept = update(xml, lvol("sdb"), SETTINGS, live=True)
    assert kept is not None and kept.lun.limits == SLOW
    assert "<total_iops_sec>100</total_iops_sec>" in kept.metadata_xml
    same = update(xml, lvol("sdb", more=GIVEN), SETTINGS, live=True)
    assert same is not None and same.lun.limits == SLOW
    with pytest.raises(TranslateError, match="cannot modify field 'iotune' of the disk 'sdb'"):
        update(xml, lvol("sdb", more=tune(total_iops_sec=5)), SETTINGS, live=True)
    config = translated(domain(lvol("sdb", more=GIVEN))).xml
    other = update(config, lvol("sdb", more=tune(total_iops_sec=5)), SETTINGS, live=False)
    assert other is not None and other.lun.limits == Limits(total_iops_sec=5)
    none = update(config, lvol("sdb"), SETTINGS, live=False)
    assert none is not None and none.lun.limits == NONE


def test_an_entry_that_is_written_is_read_as_the_same() -> None:
    entry = views.required(translated(domain(lvol("sdb", more=GIVEN))).xml).metadata
    assert entry is not None
    (one,) = entry.entries
    many = replace(one, lun=replace(one.lun, limits=Limits(read_bytes_sec=1, size_iops_sec=0)))
    text = "".join(line for _, line in metadatas.lines(replace(entry, entries=(many,)), bare=False))
    (again,) = metadatas.parse(Document(text).root).entries
    assert again == many
