"""<latency-histogram> of a disk of ours: read, kept as it was given, and changed while it runs."""

from __future__ import annotations

import pytest
from lxml import etree

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.histograms import BINS_MAX, START_MAX_NS, Histograms
from pydataplane.domain.translate import attach, define, plan, present, recognise, update
from tests.unit.translate.domains import NEW_UUID, ROOT, SETTINGS, domain, lvol, translated

EACH = ("read", "write", "flush")


def histogram(*starts: object, kind: str | None = None) -> str:
    bins = "".join(f"<bin start='{start}'/>" for start in starts)
    of = f" type='{kind}'" if kind is not None else ""
    return f"<latency-histogram{of}>{bins}</latency-histogram>"


def driver(*histograms: str) -> str:
    return f"<driver name='qemu' type='raw'><statistics>{''.join(histograms)}</statistics></driver>"


def of_disk(xml: str) -> Histograms:
    found = plan(xml)
    assert found is not None
    return found.luns[0].histograms


def running(xml: str) -> str:
    return xml.replace("<domain ", "<domain id='1' ", 1)


@pytest.mark.parametrize(("dev", "bus"), [("sdb", "scsi"), ("vdb", "virtio")])
def test_it_is_planned_and_comes_back_as_it_was_given(dev: str, bus: str) -> None:
    given = driver(histogram(0, 1000, 50_000, kind="read"), histogram(10, 20))
    made = translated(domain(lvol(dev, bus=bus, more=given)))
    assert of_disk(made.xml) == (
        ("read", (0, 1000, 50_000)),
        ("write", (0, 10, 20)),
        ("flush", (0, 10, 20)),
    )
    for live in (False, True):
        assert given in present(running(made.xml) if live else made.xml, live=live)
    again = define(made.xml, SETTINGS, new_uuid=NEW_UUID)
    assert of_disk(again.xml) == of_disk(made.xml)
    attached = attach(
        translated(domain("")).xml, lvol(dev, bus=bus, more=given), SETTINGS, live=False
    )
    assert attached is not None and attached.lun.histograms == of_disk(made.xml)


def test_a_disk_without_one_is_not_counted() -> None:
    for more in ("", "<driver name='qemu'/>", driver()):
        made = translated(domain(lvol("sdb", more=more)))
        assert of_disk(made.xml) == ()
        assert "histograms=" not in made.xml


def test_what_is_noted_is_what_the_schema_has() -> None:
    grammar = etree.RelaxNG(etree.parse(ROOT / "schemas/domain-metadata.rng"))
    most = histogram(*range(1, BINS_MAX - 1), START_MAX_NS, kind="flush")
    xml = translated(domain(lvol("sdb", more=driver(most, histogram(0, kind="write"))))).xml
    (element,) = etree.fromstring(xml).iter("{https://virtlun.dev/xmlns/domain/1}disks")
    grammar.assertValid(etree.fromstring(etree.tostring(element)))
    assert [len(starts) for _, starts in of_disk(xml)] == [1, BINS_MAX]
    padded = histogram(*(f"{start:03}" for start in range(BINS_MAX)))
    assert len(of_disk(translated(domain(lvol("sdb", more=driver(padded)))).xml)[0][1]) == BINS_MAX


@pytest.mark.parametrize(
    "word",
    [
        *("read=", "read=1", "read=0,0", "read=0,-1", "discard=0", "read", f"read=0,{2**63}"),
        *(f"read=0,{'9' * 5000}", f"read={','.join(map(str, range(BINS_MAX + 1)))}"),
    ],
)
def test_damaged_metadata_is_said(word: str) -> None:
    xml = translated(domain(lvol("sdb", more=driver(histogram(0, kind="read"))))).xml
    assert 'histograms="read=0"' in xml
    with pytest.raises(TranslateError, match="metadata is damaged"):
        plan(xml.replace("read=0", word, 1))


@pytest.mark.parametrize(
    ("histograms", "refusal", "says"),
    [
        ((histogram(),), Refusal.BAD_XML, "needs one <bin start='NANOSECONDS'/> or more"),
        ((histogram(0, 5, 5),), Refusal.BAD_XML, "a larger start than the one before it"),
        ((histogram(-1),), Refusal.BAD_XML, "needs one <bin"),
        ((histogram(1 << 63),), Refusal.BAD_XML, f"at most {START_MAX_NS}"),
        ((histogram("1e3"),), Refusal.BAD_XML, "needs one <bin"),
        ((histogram(0, ""),), Refusal.BAD_XML, "needs one <bin"),
        (
            (histogram(0), histogram(0, 1)),
            Refusal.BAD_XML,
            "more than one <latency-histogram> of no",
        ),
        (
            (histogram(0, kind="read"), histogram(0, kind="read")),
            Refusal.BAD_XML,
            "more than one <latency-histogram> of type='read'",
        ),
        (
            (histogram(*range(1, BINS_MAX + 1)),),
            Refusal.UNSUPPORTED,
            f"at most {BINS_MAX} bins with the one from 0 on",
        ),
        ((histogram(0, kind="zone"),), Refusal.UNSUPPORTED, "type='zone'.*use 'read', 'write'"),
        (("<statistic interval='1'/>",), Refusal.UNSUPPORTED, "<statistic> is not possible"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    histograms: tuple[str, ...], refusal: Refusal, says: str
) -> None:
    for bus, dev in (("scsi", "sdb"), ("virtio", "vdb")):
        with pytest.raises(TranslateError, match=says) as caught:
            recognise(lvol(dev, more=driver(*histograms), bus=bus), SETTINGS)
        assert caught.value.refusal is refusal


@pytest.mark.parametrize("live", [False, True])
def test_a_running_disk_takes_another_one_or_none(live: bool) -> None:
    xml = translated(domain(lvol("sdb", more=driver(histogram(0, 10))))).xml
    for more, wanted in (
        (driver(histogram(0, 20, kind="write")), (("write", (0, 20)),)),
        ("", ()),
    ):
        change = update(
            running(xml) if live else xml, lvol("sdb", more=more), SETTINGS, live=live, uuids={}
        )
        assert change is not None and change.lun.histograms == wanted
