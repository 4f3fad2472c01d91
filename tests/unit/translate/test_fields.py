"""Every element and attribute of a <disk> is honoured, has no effect, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from lxml import etree

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.model import Characteristics
from pydataplane.domain.translate import attach, define, fields, plan, recognise, update
from pydataplane.domain.translate.fieldkinds import Effect
from pydataplane.domain.translate.fields import FIELDS
from pydataplane.domain.xml.disk import QUEUES, parse_device, read
from tests.support.examples import used
from tests.unit.translate.domains import NEW_UUID, ROOT, SETTINGS, domain, lvol

SCHEMAS = Path("/usr/share/libvirt/schemas")
RNG = "{http://relaxng.org/ns/structure/1.0}"


@cache
def definitions() -> dict[str, list[etree._Element]]:
    """Returns each named pattern of libvirt's schema of a domain, with its overrides."""
    found: dict[str, list[etree._Element]] = {}
    waiting, read_files = ["domain.rng"], set()
    while waiting:
        name = waiting.pop()
        if name in read_files:
            continue
        read_files.add(name)
        root = etree.parse(SCHEMAS / name).getroot()
        waiting += [node.get("href", "") for node in root.iter(RNG + "include")]
        for node in root.iter(RNG + "define"):
            found.setdefault(node.get("name", ""), []).append(node)
    return found


def walk(node: etree._Element, path: str, inside: frozenset[str]) -> Iterator[tuple[str, set[str]]]:
    """Yields each element and attribute of a pattern, with the values that the schema lists."""
    for child in node.iterchildren(RNG + "*"):
        kind, name = str(child.tag).removeprefix(RNG), child.get("name", "")
        if kind == "element":
            below = f"{path}/{name}".lstrip("/")
            yield below, set()
            yield from walk(child, below, inside)
        elif kind == "attribute":
            values = [value.text or "" for value in child.iter(RNG + "value")]
            values += [
                value.text or ""
                for ref in child.iter(RNG + "ref")
                for pattern in definitions()[ref.get("name", "")]
                for value in pattern.iter(RNG + "value")
            ]
            yield f"{path}@{name}", set(values)
        elif kind == "ref":
            if name not in inside:
                for pattern in definitions()[name]:
                    yield from walk(pattern, path, inside | {name})
        else:
            yield from walk(child, path, inside)


@cache
def libvirts() -> dict[str, set[str]]:
    """Returns what libvirt's schema lets stand in a <disk>: paths to values, as FIELDS has them."""
    found: dict[str, set[str]] = {}
    for pattern in definitions()["disk"]:
        for whole, values in walk(pattern, "", frozenset({"disk"})):
            path = whole.removeprefix("disk").removeprefix("/")
            found.setdefault(path, set()).update(values)
    del found[""]
    return found


def test_the_schema_was_read() -> None:
    assert {"@sgio", "driver@cache", "source/reservations", "wwn", "mirror"} <= set(libvirts())
    assert libvirts()["driver@discard"] == {"unmap", "ignore"}
    assert len(libvirts()) > 200


def test_no_element_or_attribute_of_libvirts_is_forgotten() -> None:
    assert [path for path in sorted(libvirts()) if fields.find(path) is None] == []


def test_values_that_are_accepted_are_libvirts() -> None:
    known = libvirts()
    for field in FIELDS:
        if field.values and (listed := known.get(field.path)):
            assert field.values <= listed, field.path


def test_the_table_is_whole() -> None:
    assert len({field.path for field in FIELDS}) == len(FIELDS)
    for field in FIELDS:
        assert (field.effect is Effect.REFUSED) == (field.values == frozenset()), field.path
        if field.effect is Effect.NONE:
            assert field.means, f"{field.path}: why does it make no difference?"
        if field.effect is Effect.REFUSED:
            assert field.instead, f"{field.path}: what is to be done instead?"


def test_the_document_for_people_is_the_table() -> None:
    assert used(ROOT / "examples/libvirt/disk.md").read_text() == fields.document() + "\n"


def of(path: str, value: str) -> str:
    """Returns a <disk> of ours in which one attribute or element is set."""
    document = etree.fromstring(lvol("sda"))
    place, _, attribute = path.partition("@")
    node = document
    for name in filter(None, place.split("/")):
        there = node.find(name)
        node = there if there is not None else etree.SubElement(node, name)
    if attribute:
        node.set(attribute, value)
    else:
        node.text = value
    return etree.tostring(document, encoding="unicode")


HISTOGRAM = "driver/statistics/latency-histogram@type"
SPECIAL = {"@type", "@device", "target@bus", "driver@type", HISTOGRAM}
"""Have sentences of their own, in test_disk.py and test_histogram.py."""


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (path, value)
        for path in sorted(libvirts())
        if (field := fields.find(path)) is not None and path not in SPECIAL
        for value in sorted(libvirts()[path]) or (["x"] if field.values == frozenset() else [])
        if field.values is not None and value not in field.values
    ],
)
def test_each_value_that_we_have_not_is_refused_by_name(path: str, value: str) -> None:
    with pytest.raises(TranslateError) as caught:
        if path.removeprefix("driver@") in QUEUES:  # a guest that has it may go on with it
            define(domain(of(path, value)), SETTINGS, new_uuid=NEW_UUID)
        else:
            recognise(of(path, value), SETTINGS)
    assert caught.value.refusal is Refusal.UNSUPPORTED
    names = [name for part in path.split("/") for name in part.split("@")]
    assert any(name in caught.value.message for name in names)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("path", "value"),
    [(f.path, v) for f in FIELDS if f.path not in SPECIAL for v in sorted(f.values or ())],
)
def test_each_value_that_we_have_is_taken(path: str, value: str) -> None:
    assert recognise(of(path, value), SETTINGS) is not None


@pytest.mark.parametrize("path", ["future", "driver@future", "source/future", "@future"])
def test_what_nobody_knows_is_refused(path: str) -> None:
    with pytest.raises(TranslateError, match=r"future.* is not possible: virtlun does not know it"):
        recognise(of(path, "1"), SETTINGS)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("wwn", "6000c50015ea71ad", "16 hexadecimal digits, the first 2, 3 or 5"),
        ("wwn", "5000", "16 hexadecimal digits"),
        ("vendor", "123456789", "vendor may have up to 8"),
        ("product", "Ünknown", "product may have up to 16 printable ASCII"),
        ("target@rotation_rate", "7", "rotation_rate 7 is none; use 1, or 1025 to 65534"),
        ("target@rotation_rate", "65535", "rotation_rate 65535 is none"),
    ],
)
def test_what_scsi_has_no_room_for_is_refused(path: str, value: str, words: str) -> None:
    with pytest.raises(TranslateError, match=words) as caught:
        recognise(of(path, value), SETTINGS)
    assert caught.value.refusal is Refusal.BAD_XML


@pytest.mark.parametrize(
    ("path", "value", "characteristics"),
    [
        ("wwn", "5000C50015EA71AD", Characteristics(wwn="5000c50015ea71ad")),
        ("wwn", "0x5000c50015ea71ad", Characteristics(wwn="5000c50015ea71ad")),
        ("vendor", "ACME", Characteristics(vendor="ACME")),
        ("product", " two words", Characteristics(product=" two words")),
        ("product", "", Characteristics()),
        ("target@rotation_rate", "7200", Characteristics(rotation_rate=7200)),
        ("blockio@physical_block_size", "8192", Characteristics(physical_block_size=8192)),
        ("target@removable", "on", Characteristics(removable=True)),
        ("driver@discard", "ignore", Characteristics(discard=False)),
        ("driver@discard", "unmap", Characteristics()),
        ("driver@cache", "writethrough", Characteristics(write_cache=False)),
        ("driver@cache", "directsync", Characteristics(write_cache=False)),
        ("driver@cache", "none", Characteristics()),
    ],
)
def test_what_the_guest_is_told_goes_into_the_plan_and_comes_back_from_the_metadata(
    path: str, value: str, characteristics: Characteristics
) -> None:
    disk = of(path, value)
    document = parse_device(disk)
    assert document is not None
    assert read(document.root).characteristics == characteristics
    definition = define(domain(disk), SETTINGS, new_uuid=NEW_UUID)
    again = plan(definition.xml)
    for found in (definition.plan, again):
        assert found is not None
        assert [lun.characteristics for lun in found.luns] == [characteristics]


def test_a_running_domains_disk_keeps_what_its_guest_was_told() -> None:
    defined = define(domain(lvol("sdb", "w")), SETTINGS, new_uuid=NEW_UUID).xml
    change = attach(defined, of("wwn", "5000c50015ea71ad"), SETTINGS, live=False)
    assert change is not None and change.domain_xml is not None
    assert change.lun.characteristics.wwn == "5000c50015ea71ad"
    with pytest.raises(TranslateError, match="cannot modify field 'wwn'"):
        update(change.domain_xml, lvol("sda"), SETTINGS, live=True)
    with pytest.raises(TranslateError, match="cannot modify field 'blockio physical_block_size'"):
        update(
            change.domain_xml,
            of("blockio@physical_block_size", "4096").replace(
                "</disk>", "<wwn>5000c50015ea71ad</wwn></disk>"
            ),
            SETTINGS,
            live=True,
        )
    with pytest.raises(TranslateError, match="cannot modify field 'cache'"):
        update(
            change.domain_xml,
            of("driver@cache", "directsync").replace(
                "</disk>", "<wwn>5000c50015ea71ad</wwn></disk>"
            ),
            SETTINGS,
            live=True,
        )


PHYSICAL = ' physicalblocksize="4096"'
"""What an earlier version, which took the size and did not show it, kept nothing of."""


def test_a_guest_keeps_the_physical_block_that_it_sees_whatever_its_client_asked_for() -> None:
    asked = of("blockio@physical_block_size", "4096")
    defined = define(domain(asked), SETTINGS, new_uuid=NEW_UUID).xml
    earlier = defined.replace(PHYSICAL, "")
    assert earlier != defined
    change = update(earlier, asked, SETTINGS, live=True)
    assert change is not None
    moved = define(domain(asked), SETTINGS, new_uuid=NEW_UUID, current_xml=earlier, running=True)
    assert moved.plan is not None
    for lun in (change.lun, *moved.plan.luns):
        assert lun.characteristics.physical_block_size is None
    with pytest.raises(TranslateError, match="blockio physical_block_size"):
        update(earlier, of("blockio@physical_block_size", "8192"), SETTINGS, live=True)
    anew = define(domain(asked), SETTINGS, new_uuid=NEW_UUID, current_xml=earlier)
    assert anew.plan is not None
    assert anew.plan.luns[0].characteristics.physical_block_size == 4096


@pytest.mark.parametrize("wrong", ["0", "3000", "many", "4194304"])
def test_a_physical_block_that_cannot_be_is_damage(wrong: str) -> None:
    asked = of("blockio@physical_block_size", "4096")
    defined = define(domain(asked), SETTINGS, new_uuid=NEW_UUID).xml
    with pytest.raises(
        TranslateError, match=r"damaged .a physicalblocksize is not one of a disk's"
    ):
        plan(defined.replace(PHYSICAL, PHYSICAL.replace("4096", wrong)))
