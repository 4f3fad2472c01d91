"""attach, detach and update of one side of a domain."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.translate import (
    MAX_TARGETS,
    NAMESPACE,
    PREFIX,
    Change,
    attach,
    define,
    detach,
    detach_alias,
    element,
    find,
    has_controller,
    is_marked,
    moved,
    plan,
    present,
    update,
)
from pydataplane.domain.xml import disk as disk_xml
from pydataplane.domain.xml import metadata as metadata_xml
from pydataplane.domain.xml import view as views
from pydataplane.domain.xml.document import Document
from tests.unit.translate.domains import (
    NAMES,
    NEW_UUID,
    SETTINGS,
    canonical,
    carrier,
    devs,
    domain,
    lvol,
    overrides,
    plain,
    text,
    translated,
    tree,
    with_drivers,
)

LARGE = "<blockio logical_block_size='4096'/>"
BASE = translated(domain(plain("vda", "virtio") + lvol("sdb", "b"))).xml
VIRSH = """\
<disk type='file' device='disk'>
  <source file='/dev/virtlun/lvs0/new'/>
  <target dev='sdc'/>
</disk>
"""


def set_metadata(xml: str, change: Change) -> str:
    """Does what libvirtd's virDomainSetMetadata does with a change's element."""
    root = tree(xml)
    name = f"{{{NAMESPACE}}}disks"
    metadata = root.find("metadata")
    assert metadata is not None
    old = metadata.find(name)
    if old is not None:
        metadata.remove(old)
    # virXMLInjectNamespace: a declaration on the root, and every element into it.
    assert "xmlns" not in change.metadata_xml.split(">", 1)[0]
    new = tree(change.metadata_xml)
    for node in new.iter():
        node.tag = f"{{{NAMESPACE}}}{node.tag}"
    metadata.append(new)
    from lxml import etree  # noqa: PLC0415

    return etree.tostring(root, encoding="unicode")


def attached(xml: str, disk: str, *, live: bool = True, peer: str | None = None) -> Change:
    change = attach(xml, disk, SETTINGS, live=live, peer_xml=peer)
    assert change is not None
    return change


def test_a_live_attach_changes_the_metadata_only() -> None:
    change = attached(BASE, VIRSH)
    assert (change.lun.target, change.lun.dev, change.lun.volume.alias) == (1, "sdc", "lvs0/new")
    assert change.alias == "virtlun-disk-sdc"
    assert change.domain_xml is None
    assert not change.redefine
    after = set_metadata(BASE, change)
    assert plan(after) == change.plan
    assert devs(present(after, live=True)) == ["vda", "sdb", "sdc"]
    shown = tree(present(after, live=True)).findall("devices/disk")[2]
    assert shown.find("alias").get("name") == change.alias  # type: ignore[union-attr]
    found = find(after, "sdc", SETTINGS)
    assert found == change.lun


def test_the_disk_comes_back_as_given() -> None:
    disk = lvol(
        "sdx",
        "x",
        more="<serial>S</serial><wwn>5000c50015ea71ad</wwn><address type='drive' unit='4'/>",
    )
    change = attached(BASE, disk, live=False)
    assert change.domain_xml is not None
    back = tree(present(change.domain_xml, live=False)).findall("devices/disk")
    from lxml import etree  # noqa: PLC0415

    assert canonical(etree.tostring(back[-1], encoding="unicode")) == canonical(with_drivers(disk))


@pytest.mark.parametrize("prefix", [PREFIX, ""])
def test_metadata_that_libvirtd_set_is_read_like_that_of_a_define(prefix: str) -> None:
    change = attached(BASE, VIRSH, live=False)
    assert change.domain_xml is not None
    after = set_metadata(BASE, change)
    if prefix:
        after = after.replace("ns0:", f"{prefix}:").replace("xmlns:ns0", f"xmlns:{prefix}")
    assert plan(after) == plan(change.domain_xml)
    assert canonical(present(after, live=False)) == canonical(
        present(change.domain_xml, live=False)
    )


def test_a_persistent_attach_needs_a_redefinition_only_if_the_boot_disk_changes() -> None:
    change = attached(BASE, VIRSH, live=False)
    assert not change.redefine
    assert change.domain_xml is not None
    first = attached(BASE, lvol("sda", "a"), live=False)
    assert first.redefine  # sda is our first disk now; the controller must boot it
    assert first.domain_xml is not None
    assert overrides(first.domain_xml)["boot_tpgt"] == "1"
    order = attached(BASE, lvol("sdz", "z", more="<boot order='1'/>"), live=False)
    assert order.redefine
    assert order.domain_xml is not None
    assert carrier(order.domain_xml).find("boot").get("order") == "1"  # type: ignore[union-attr]


def test_a_persistent_attach_brings_the_controller() -> None:
    raw = domain(plain("vda", "virtio"))
    change = attached(raw, VIRSH, live=False)
    assert change.redefine
    assert change.domain_xml is not None
    assert change.plan == plan(change.domain_xml)
    assert [lun.target for lun in change.plan.luns] == [0]  # type: ignore[union-attr]
    back = present(change.domain_xml, live=False)
    assert devs(back) == ["vda", "sdc"]
    assert canonical(present(translated(back).xml, live=False)) == canonical(back)


def test_a_live_attach_without_a_controller_says_what_to_do() -> None:
    with pytest.raises(TranslateError, match=r"without a virtlun controller.*attach with --config"):
        attach(domain(plain("vda", "virtio")), VIRSH, SETTINGS, live=True)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(
    ("disk", "words"),
    [
        (lvol("vda", "n", bus="virtio"), "target vda already exists"),
        (lvol("sdb", "n"), "target sdb already exists"),
        (lvol("sdc", "b"), "volume lvs0/b is already attached to this domain as sdb"),
    ],
)
def test_what_is_there_already_is_refused(disk: str, words: str, live: bool) -> None:
    with pytest.raises(TranslateError, match=words) as caught:
        attach(BASE, disk, SETTINGS, live=live)
    assert caught.value.refusal is Refusal.TARGET_EXISTS
    assert (caught.value.libvirt.domain, caught.value.libvirt.code) == (10, 55)


def test_serials_and_aliases_must_differ() -> None:
    disk = lvol("sdc", "c", more="<serial>S</serial><alias name='ua-c'/>")
    after = set_metadata(BASE, attached(BASE, disk))
    with pytest.raises(TranslateError, match="serial 'S' of sdd is already that of disk sdc"):
        attach(after, lvol("sdd", "d", more="<serial>S</serial>"), SETTINGS, live=True)
    with pytest.raises(TranslateError, match="alias 'ua-c' of sdd is already that of disk sdc"):
        attach(after, lvol("sdd", "d", more="<alias name='ua-c'/>"), SETTINGS, live=True)


def test_other_devices_are_left_to_libvirtd() -> None:
    for xml in (plain("sdc", "scsi"), "<interface type='user'/>", "<disk", ""):
        assert attach(BASE, xml, SETTINGS, live=True) is None
        assert detach(BASE, xml, SETTINGS, live=True) is None
        assert update(BASE, xml, SETTINGS, live=True) is None
    assert detach(BASE, plain("vda", "virtio"), SETTINGS, live=True) is None
    assert detach_alias(BASE, "virtio-disk0", SETTINGS, live=True) is None


def test_the_target_number_is_the_same_on_both_sides() -> None:
    live = set_metadata(BASE, attached(BASE, lvol("sdc", "c")))
    config = attached(BASE, lvol("sdd", "d"), live=False, peer=live)
    assert config.lun.target == 2  # 1 is free here, but taken in the running domain
    assert config.domain_xml is not None
    again = attached(live, lvol("sdd", "d"), peer=config.domain_xml)
    assert again.lun.target == 2


def test_255_disks_and_no_more() -> None:
    disks = "".join(lvol(f"sd{'a' * (1 + n // 26)}{chr(97 + n % 26)}", f"v{n}") for n in range(254))
    xml = translated(domain(disks)).xml
    xml = set_metadata(xml, attached(xml, lvol("vda", "last")))
    assert len(plan(xml).luns) == MAX_TARGETS  # type: ignore[union-attr]
    with pytest.raises(TranslateError, match=r"has 255 virtlun disks already.*detach one first"):
        attach(xml, lvol("vdb", "more"), SETTINGS, live=True)


@pytest.mark.parametrize(
    "disk",
    [
        "<disk type='block'><target dev='sdb'/></disk>",
        "<disk type='block' device='disk'><target dev='sdb' bus='scsi'/></disk>",
        lvol("sdb", "b"),
        tree(present(BASE, live=True)).findall("devices/disk")[1],
    ],
    ids=["minimal", "python", "full", "dumpxml"],
)
@pytest.mark.parametrize("live", [True, False])
def test_detach_goes_by_target_dev(disk: object, live: bool) -> None:
    from lxml import etree  # noqa: PLC0415

    xml = disk if isinstance(disk, str) else etree.tostring(disk, encoding="unicode")  # type: ignore[call-overload]
    change = detach(BASE, xml, SETTINGS, live=live)
    assert change is not None
    assert (change.lun.target, change.alias) == (0, "virtlun-disk-sdb")
    after = set_metadata(BASE, change) if live else change.domain_xml
    assert after is not None
    assert devs(present(after, live=live)) == ["vda"]
    outcome = plan(after)
    if not live:  # of a definition only the mark stays: an empty controller is no condition
        assert outcome is None and is_marked(after) and change.redefine
        return
    assert outcome is not None  # the controller stays for the next attach
    assert outcome.luns == ()


def test_detach_of_an_unknown_disk_of_ours_is_refused() -> None:
    with pytest.raises(TranslateError, match="disk sdq not found") as caught:
        detach(BASE, lvol("sdq", "q"), SETTINGS, live=True)
    assert caught.value.libvirt.code == 99
    with pytest.raises(TranslateError, match="disk sdq not found"):
        detach(domain(), lvol("sdq", "q"), SETTINGS, live=False)


def test_detach_leaves_libvirtds_own_disk_to_libvirtd_whatever_its_source() -> None:
    """One that names a volume of ours was defined at libvirtd itself."""
    raw = BASE.replace("<devices>", f"<devices>{lvol('sdq', 'q')}")
    for live in (True, False):
        assert detach(raw, lvol("sdq", "q"), SETTINGS, live=live) is None
        assert detach(raw, lvol("sdb", "b"), SETTINGS, live=live) is not None
    with pytest.raises(TranslateError, match="disk sdq not found"):
        update(raw, lvol("sdq", "q"), SETTINGS, live=False)


def test_detach_by_alias() -> None:
    xml = translated(domain(lvol("sda", "a", more="<alias name='ua-x'/>") + lvol("sdb", "b"))).xml
    for alias, dev in (("ua-x", "sda"), ("virtlun-disk-sdb", "sdb")):
        change = detach_alias(xml, alias, SETTINGS, live=True)
        assert change is not None
        assert change.lun.dev == dev
    assert detach_alias(xml, "virtlun-disk-sda", SETTINGS, live=True) is None


def test_update_of_a_running_domain_takes_what_the_guest_does_not_see() -> None:
    same = lvol("sdb", "b", more="<driver name='qemu' type='raw' cache='none'/>")
    change = update(BASE, same, SETTINGS, live=True)
    assert change is not None
    assert change.lun.target == 0
    shown = present(set_metadata(BASE, change), live=False)
    assert "cache='none'" in shown
    for disk, field in (
        (lvol("sdb", "other"), "source"),
        (lvol("sdb", "b", more="<readonly/>"), "readonly"),
        (lvol("sdb", "b", more="<shareable/>"), "shareable"),
        (lvol("sdb", "b", more="<serial>s</serial>"), "serial"),
        (lvol("sdb", "b", more=LARGE), "blockio logical_block_size"),
    ):
        with pytest.raises(TranslateError, match=f"cannot modify field '{field}'") as caught:
            update(BASE, disk, SETTINGS, live=True)
        assert caught.value.libvirt.code == 84
    with pytest.raises(TranslateError, match="no virtlun volume; detach the disk"):
        update(BASE, plain("sdb", "scsi"), SETTINGS, live=True)


def test_the_block_size_of_a_disk_that_was_attached_stays() -> None:
    change = attached(BASE, lvol("sdc", "new", more=LARGE))
    assert change.lun.block_size == 4096
    assert 'blocksize="4096"' in change.metadata_xml
    xml = set_metadata(BASE, change)
    assert plan(xml) == change.plan
    assert LARGE in present(xml, live=False)
    same = update(xml, lvol("sdc", "new", more=LARGE + "<boot order='9'/>"), SETTINGS, live=True)
    assert same is not None
    assert same.lun.block_size == 4096
    for other in ("", "<blockio logical_block_size='512'/>"):
        with pytest.raises(TranslateError, match="field 'blockio logical_block_size'"):
            update(xml, lvol("sdc", "new", more=other), SETTINGS, live=True)
        config = update(xml, lvol("sdc", "new", more=other), SETTINGS, live=False)
        assert config is not None
        assert config.lun.block_size == (512 if other else None)
    # Where there was none, 512 says the same.
    small = lvol("sdb", "b", more="<blockio logical_block_size='512'/>")
    change = update(BASE, small, SETTINGS, live=True)  # type: ignore[assignment]
    assert change is not None
    assert change.lun.block_size == 512


@pytest.mark.parametrize(
    ("disk", "to", "kind", "source"),
    [
        (
            lvol("sdb", "b", more="<driver name='qemu' cache='none'/><serial>s</serial>"),
            "<disk type='file'><source file='/dev/virtlun/lvs1/c'/></disk>",
            "file",
            {"file": "/dev/virtlun/lvs1/c"},
        ),
        (
            "<disk><source file='/dev/virtlun/lvs0/b'><seclabel relabel='no'/></source>"
            "<!-- mine --><target dev='sdb'/></disk>",
            "<disk type='network' x:y='z' xmlns:x='urn:x'>"
            "<source protocol='lvol' name='lvs1/c'/></disk>",
            "network",
            {"protocol": "lvol", "name": "lvs1/c"},
        ),
    ],
)
@pytest.mark.parametrize("live", [True, False])
def test_a_disk_whose_volume_was_copied_has_the_copys_source(
    disk: str, to: str, kind: str, source: dict[str, str], live: bool
) -> None:
    before = translated(domain(plain("vda", "virtio") + disk)).xml
    old = ("the old one's UUID", "lvs0/b")
    change = moved(before, "sdb", old, to, "U", SETTINGS, live=live)
    assert change is not None
    assert (change.lun.volume.alias, change.lun.uuid, change.lun.target) == ("lvs1/c", "U", 0)
    assert not change.redefine
    after = set_metadata(before, change)
    shown = tree(present(after, live=live))
    _, found = shown.findall("devices/disk")
    assert found.get("type") == kind
    assert dict(found.find("source").attrib) == source  # type: ignore[union-attr]
    kept = tree(disk)
    for each in kept:
        if isinstance(each.tag, str) and each.tag != "source":
            assert found.find(each.tag) is not None
    # Done again it is none of the old volume's, and so it is with another disk.
    for dev, name in (("sdb", old), ("sdq", old), ("sdb", ("x", "lvs0/x"))):
        there = after if name == old and dev == "sdb" else before
        assert moved(there, dev, name, to, "U", SETTINGS, live=live) is None


def test_update_of_the_persistent_side_takes_any_change() -> None:
    change = update(BASE, lvol("sdb", "other", more="<readonly/>"), SETTINGS, live=False)
    assert change is not None
    assert change.lun.read_only
    assert change.lun.volume.lvol == "other"
    with pytest.raises(TranslateError, match="not found"):
        update(BASE, lvol("sdq", "q"), SETTINGS, live=False)


def test_damaged_metadata_stops_changes() -> None:
    broken = BASE.replace('target="0"', 'target="x"')
    for call in (attach, detach, update):
        with pytest.raises(TranslateError, match="metadata is damaged"):
            call(broken, lvol("sdc", "c"), SETTINGS, live=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("live", [True, False])
def test_detach_undoes_attach(name: str, live: bool) -> None:
    before = translated(text(name)).xml
    disk = lvol("sdm", "brand-new")
    change = attach(before, disk, SETTINGS, live=live)
    assert change is not None
    middle = set_metadata(before, change) if live else change.domain_xml
    assert middle is not None
    assert "sdm" in devs(present(middle, live=live))
    back = detach(middle, disk, SETTINGS, live=live)
    assert back is not None
    after = set_metadata(middle, back) if live else back.domain_xml
    assert after is not None
    expected = plan(before)
    # No definition has an empty controller.
    if expected is not None and not live and all(lun.front == "blk" for lun in expected.luns):
        expected = replace(expected, has_scsi=False) if expected.luns else None
    assert plan(after) == expected
    assert canonical(present(after, live=False)) == canonical(present(before, live=False))


def boots(xml: str) -> object:
    """What of our controller says what the firmware boots."""
    view = views.required(xml)
    found = view.carrier
    return None if found is None else (found.boot, found.boot_target)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=25))
@settings(max_examples=40)
def test_any_sequence_of_changes_keeps_numbers_unique_and_disks_in_order(
    steps: list[tuple[int, bool]],
) -> None:
    xml = translated(domain(plain("vda", "virtio") + plain("sde", "scsi"))).xml
    expected: set[str] = set()
    for number, wanted in steps:
        live = wanted and has_controller(xml)
        dev = f"sd{'abcdfghijk'[number]}"
        disk = with_drivers(lvol(dev, f"v{number}"))
        change = (detach if dev in expected else attach)(xml, disk, SETTINGS, live=live)
        assert change is not None
        expected ^= {dev}
        if not live:  # whichever way it was made, it is what a definition of it would be
            assert change.domain_xml is not None
            whole = define(change.domain_xml, SETTINGS, new_uuid=UUID(int=1)).xml
            assert element(change.domain_xml) == element(whole)
            assert plan(change.domain_xml) == plan(whole)
            assert boots(change.domain_xml) == boots(whole)
        following = set_metadata(xml, change) if live or not change.redefine else change.domain_xml
        assert following is not None
        xml = following
        outcome = plan(xml)
        luns = outcome.luns if outcome is not None else ()
        assert {lun.dev for lun in luns} == expected
        assert len({lun.target for lun in luns}) == len(expected)
        shown = devs(present(xml, live=live))
        assert [dev for dev in shown if dev != "vda"] == sorted(expected | {"sde"})


def test_a_domain_without_a_uuid_cannot_be_libvirtds() -> None:
    for old, new in (
        ("<uuid>6d", "<uuid>?"),
        ("<uuid>6d1f9c52-0000-4000-8000-00000000aaaa</uuid>", ""),
    ):
        broken = domain().replace(old, new)
        with pytest.raises(TranslateError, match="has no UUID") as caught:
            attach(broken, VIRSH, SETTINGS, live=False)
        assert caught.value.refusal is Refusal.INTERNAL


@pytest.mark.parametrize("live", [True, False])
def test_what_an_attach_parses_does_not_grow_with_the_disks(
    live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the domain's disks is parsed once at most, and not again for the next change."""
    parsed = 0
    parse = Document.__init__

    def counting(self: Document, text: str) -> None:
        nonlocal parsed
        parsed += 1
        parse(self, text)

    monkeypatch.setattr(Document, "__init__", counting)

    def documents(disks: int) -> tuple[int, int]:
        """Parsed by a first attach to a domain with so many disks, and by another one."""
        nonlocal parsed
        given = "".join(
            lvol(f"sd{chr(98 + n // 26)}{chr(97 + n % 26)}", f"v{n}") for n in range(disks)
        )
        xml = define(domain(given), SETTINGS, new_uuid=UUID(int=1), controller=True).xml
        for kept in (disk_xml._stored, disk_xml._shown, metadata_xml._entry_of):
            kept.cache_clear()
        counts = []
        for name in ("x", "y"):
            parsed = 0
            views._kept.cache_clear()
            assert attached(xml, lvol("sdzz", name), live=live, peer=xml).redefine is False
            counts.append(parsed)
        return counts[0], counts[1]

    few, many = documents(10), documents(120)
    assert few[1] == many[1] <= 4
    assert many[0] <= 120 + 4


def test_a_text_is_parsed_once_for_what_an_attach_asks_about_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    xml = define(domain(lvol("sdb", "a")), SETTINGS, new_uuid=UUID(int=1), controller=True).xml
    views._kept.cache_clear()
    parsed: list[str] = []
    parse = Document.__init__

    def noting(self: Document, text: str) -> None:
        parsed.append(text)
        parse(self, text)

    monkeypatch.setattr(Document, "__init__", noting)
    attached(xml, lvol("sdc", "b"), live=True, peer=xml)
    assert element(xml) and plan(xml)
    assert parsed.count(xml) == 1
    long = xml.replace("<devices>", f"<!--{'x' * views.KEPT_CHARS}--><devices>")
    for _ in range(2):
        assert plan(long)
    assert parsed.count(long) == 2, "that would take much memory"


@pytest.mark.parametrize("theirs", [(), ("sdz",), ("vda", "sdz")])
def test_a_guest_that_goes_on_has_its_controller_as_it_is(theirs: tuple[str, ...]) -> None:
    """It was started without a disk of ours: a new controller would boot the one that it has."""
    others = "".join(plain(dev, "scsi" if dev == "sdz" else "virtio") for dev in theirs)
    started = translated(domain(others)).xml
    # One of libvirtd's own came after the controller did.
    late = plain("hdc", "ide")
    started = started.replace("</devices>", f"{late}</devices>")
    after = set_metadata(started, attached(started, VIRSH))
    shown = present(after, live=True)

    def again(*, running: bool) -> str:
        return define(
            shown, SETTINGS, new_uuid=NEW_UUID, current_xml=after, controller=True, running=running
        ).xml

    assert devs(again(running=True)) == devs(after)
    assert overrides(again(running=True)) == overrides(after)
    assert plan(again(running=True)) == plan(after)
    if not theirs:
        assert devs(again(running=False)) != devs(after)
    # The destination reads what the source sends.
    there = define(again(running=True), SETTINGS, new_uuid=NEW_UUID, controller=True, running=True)
    assert devs(there.xml) == devs(after)


def test_the_controller_of_a_guest_that_goes_on_is_no_more_than_its_own_disk() -> None:
    """Whoever sends the XML chooses the controller's target dev: it stays one attribute."""
    started = translated(domain("")).xml
    after = set_metadata(started, attached(started, VIRSH))
    (dev,) = set(devs(after)) - set(devs(present(after, live=True)))
    sent = "x&apos;/>&lt;/disk>&lt;disk type=&apos;vhostuser&apos;>"
    hostile = after.replace(f'<target dev="{dev}" bus', f'<target dev="{sent}" bus')
    assert hostile != after
    xml = define(
        present(hostile, live=True),
        SETTINGS,
        new_uuid=NEW_UUID,
        current_xml=hostile,
        controller=True,
        running=True,
    ).xml
    assert devs(xml) == devs(hostile)
    assert len(tree(xml).findall("devices/disk")) == len(devs(hostile))
