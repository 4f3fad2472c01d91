"""define, present and plan on whole domains: the fixtures, odd ones and made-up ones."""

from __future__ import annotations

import re
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import etree

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.translate import (
    MAX_TARGETS,
    Settings,
    define,
    find,
    has_controller,
    is_marked,
    listing,
    plan,
    present,
    recognise,
    with_target,
    without_target,
)
from pydataplane.domain.xml import disk as disks
from pydataplane.domain.xml.boot import libvirt_order
from pydataplane.domain.xml.document import MAX_DOCUMENT_BYTES, MAX_ELEMENTS, Document
from tests.unit.translate.domains import (
    FILES,
    NAMES,
    NEW_UUID,
    ROOT,
    SETTINGS,
    canonical,
    carrier,
    devs,
    disk_sources,
    domain,
    lvol,
    overrides,
    plain,
    pretty,
    qemu,
    text,
    translated,
    tree,
    with_drivers,
)

METADATA_RNG = etree.RelaxNG(etree.parse(ROOT / "schemas/domain-metadata.rng"))
LIBVIRT_RNG = Path("/usr/share/libvirt/schemas/domain.rng")
ELEMENT = "metadata/{https://virtlun.dev/xmlns/domain/1}disks"


def check_schemas(xml: str) -> None:
    element = tree(xml).find(ELEMENT)
    assert element is not None
    METADATA_RNG.assertValid(element)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_what_libvirtd_gets_is_valid(path: Path) -> None:
    xml = translated(path.read_text()).xml
    check_schemas(xml)
    assert LIBVIRT_RNG.exists(), "install libvirt-daemon-system, which has libvirt's schemas"
    etree.RelaxNG(etree.parse(LIBVIRT_RNG)).assertValid(tree(xml))


def test_libvirts_schema_does_refuse_what_is_wrong() -> None:
    wrong = translated(text("plain")).xml.replace("type='vhostuser'", "type='nonsense'")
    assert not etree.RelaxNG(etree.parse(LIBVIRT_RNG)).validate(tree(wrong))


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_what_libvirtd_gets_has_one_controller_and_no_disk_of_ours(path: Path) -> None:
    definition = translated(path.read_text())
    assert definition.plan is not None
    disk = carrier(definition.xml)
    source = disk.find("source")
    assert source is not None
    assert source.get("path") == definition.plan.socket
    assert definition.plan.socket == f"/run/virtlun/vhost/{definition.plan.controller}"
    assert overrides(definition.xml)["driver"] == "vhost-user-scsi-pci"
    outside = etree.tostring(tree(definition.xml).find("devices"))  # type: ignore[arg-type]
    assert b"lvs0" not in outside
    targets = [lun.target for lun in definition.plan.luns]
    assert targets == list(range(len(targets)))
    assert plan(definition.xml) == definition.plan


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if p.stem != "other-prefix"],
    ids=[n for n in NAMES if n != "other-prefix"],
)
def test_the_client_gets_back_every_byte(path: Path) -> None:
    client = path.read_text()
    there = translated(client).xml
    back = present(there, live=False)
    if "<uuid>" not in client:
        client = client.replace("</name>", f"</name>\n  <uuid>{NEW_UUID}</uuid>", 1)
    assert back == with_drivers(client)
    whole = translated(back).xml
    assert plan(whole) == plan(there)
    assert present(whole, live=False) == back
    assert translated(back, current=whole).xml == whole


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_after_libvirtd_wrote_it_anew_the_client_gets_the_same_domain(path: Path) -> None:
    client = path.read_text()
    there = translated(client).xml
    back = present(pretty(there), live=False)
    assert disk_sources(back) == disk_sources(with_drivers(client))
    assert "virtlun.dev" not in back
    assert "ua-virtlun" not in back
    again = translated(back, current=there)
    assert again.plan == plan(there)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_translating_twice_is_translating_once(path: Path) -> None:
    there = translated(path.read_text()).xml
    again = translated(there).xml
    assert plan(again) == plan(there)
    assert overrides(again) == overrides(there)
    assert disk_sources(again) == disk_sources(there)


def test_namespaces_comments_and_other_metadata_survive() -> None:
    there = translated(text("many-devices")).xml
    assert "<!-- the system disk stays a file -->" in there
    assert """<x:note xmlns:x='urn:example:note' kind='a "quoted" one'/>""" in there
    assert """<qemu:env name='X' value='"1"'/>""" in there
    assert len(tree(there).findall(qemu("override"))) == 1
    aliases = [d.get("alias") for d in tree(there).iter(qemu("device"))]
    assert aliases == ["video0", "ua-virtlun-scsi0"]
    back = present(there, live=False)
    assert [d.get("alias") for d in tree(back).iter(qemu("device"))] == ["video0"]
    there = translated(text("comments-cdata")).xml
    assert '<![CDATA[5 < 6 && "quotes" <disk>]]>' in there
    assert '<a:a xmlns:a="urn:a"><![CDATA[<disk>]]> ä € 😀</a:a>' in there
    assert "<memory   unit = 'MiB' >512</memory>" in there


def test_the_qemu_namespace_goes_with_our_override() -> None:
    there = pretty(translated(text("plain")).xml)
    # libvirtd declares it on <domain>, whatever prefix we had.
    declared = there.replace(
        " xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'", ""
    ).replace("<domain ", "<domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0' ", 1)
    assert tree(declared).find(qemu("override")) is not None
    assert "qemu/1.0" not in present(declared, live=False)
    used = declared.replace(
        "</domain>", "<qemu:commandline><qemu:arg value='-x'/></qemu:commandline></domain>"
    )
    back = present(used, live=False)
    assert tree(back).find(qemu("commandline")) is not None
    assert tree(back).find(qemu("override")) is None


@pytest.mark.parametrize(
    "xml",
    [
        "",
        "no XML",
        "<domain type='qemu'>",
        "<domain type='qemu'><name>a</name></domain>",
        "<!DOCTYPE domain><domain type='qemu'/>",
        "<network><name>a</name></network>",
        domain(lvol("sda"), kind="lxc"),
        domain(lvol("sda"), kind="xen"),
        domain(lvol("sda")).replace(">hvm<", ">exe<"),
        domain(lvol("sda")).replace("<uuid>6d", "<uuid>xx"),
        domain(lvol("sda")).replace("<name>small</name>", ""),
        domain(lvol("sda")).replace("<name>", "<e:name>"),
    ],
)
def test_what_is_libvirtds_to_judge_passes_as_it_is(xml: str) -> None:
    definition = translated(xml)
    assert definition.xml is xml
    assert definition.plan is None


@pytest.mark.parametrize(
    ("xml", "says"),
    [
        (f"<!DOCTYPE domain>{domain(lvol('sda'))}", "a document type declaration"),
        (
            "<!DOCTYPE domain [<!ENTITY v '/dev'>]><domain><name>&v;</name></domain>",
            "a document type declaration",
        ),
        (domain(lvol("sda") + "<a/>" * MAX_ELEMENTS), f"more than {MAX_ELEMENTS} elements"),
        (domain(lvol("sda") + " " * MAX_DOCUMENT_BYTES), f"more than {MAX_DOCUMENT_BYTES} bytes"),
    ],
)
def test_what_is_not_read_and_may_have_our_disks_is_not_left_to_libvirtd(
    xml: str, says: str
) -> None:
    """It would become a disk of libvirtd's own, and the disks that the domain has would go."""
    with pytest.raises(TranslateError, match=says) as caught:
        translated(xml)
    assert caught.value.refusal is Refusal.BAD_XML
    assert translated(f"<domain>{'<a/>' * MAX_ELEMENTS}</domain>").plan is None, "not ours"


def test_without_our_disks_the_controller_is_added_only_if_asked_for() -> None:
    client = text("no-disks")
    assert translated(client, controller=False).xml is client
    there = define(client, SETTINGS, new_uuid=NEW_UUID, controller=True)
    assert there.plan is not None
    assert there.plan.luns == ()
    assert has_controller(there.xml) and is_marked(there.xml)
    assert present(there.xml, live=False) == client
    # A domain that has one and is defined again loses it, and keeps the mark.
    for again, current in ((client, there.xml), (there.xml, None), (there.xml, there.xml)):
        marked = translated(again, current=current, controller=False)
        assert marked.plan is None and plan(marked.xml) is None
        assert is_marked(marked.xml) and not has_controller(marked.xml)
        assert present(marked.xml, live=False) == client
        assert tree(marked.xml).find("memoryBacking") is None
        METADATA_RNG.assertValid(tree(marked.xml).find(ELEMENT))
    assert not is_marked(client)


def test_a_stand_in_is_the_same_device_without_a_target() -> None:
    there = define(text("no-disks"), SETTINGS, new_uuid=NEW_UUID, controller=True)
    assert there.plan is not None
    alone = without_target(there.xml)
    assert alone is not None and without_target(alone) is None
    assert there.plan.socket not in alone and plan(alone) is None and has_controller(alone)
    given = overrides(alone)
    assert given == {
        "driver": "virtio-scsi-pci",
        "num_queues": "1",
        "chardev": None,
        "bootindex": None,
    }
    before, after = carrier(there.xml), carrier(alone)
    for path in ("target", "alias", "address", "boot"):
        assert [canonical(etree.tostring(n).decode()) for n in before.findall(path)] == [
            canonical(etree.tostring(n).decode()) for n in after.findall(path)
        ]
    check_schemas(pretty(alone))
    assert present(alone, live=False) == text("no-disks")
    assert with_target(alone, SETTINGS) == there.xml
    elsewhere = with_target(alone, Settings(vhost_dir="/elsewhere/"))
    assert elsewhere is not None
    assert carrier(elsewhere).find("source").get("path") == f"/elsewhere/{there.plan.controller}"  # type: ignore[union-attr]
    assert with_target(there.xml, SETTINGS) is None
    # Never for a domain with a disk of ours, nor for one that has nothing of ours.
    assert without_target(translated(text("plain")).xml) is None
    assert without_target(text("no-disks")) is None


def test_the_mark_alone_is_nobodys_controller_also_in_a_copy() -> None:
    there = define(text("no-disks"), SETTINGS, new_uuid=NEW_UUID, controller=True)
    assert there.plan is not None
    marked = translated(text("no-disks"), current=there.xml, controller=False).xml
    own = there.plan.controller.removeprefix("vm-")
    copy = marked.replace(f"<uuid>{own}</uuid>", f"<uuid>{UUID(int=5)}</uuid>")
    assert copy != marked and there.plan.controller in copy
    assert plan(copy) is None
    given = define(copy, SETTINGS, new_uuid=NEW_UUID, controller=True)
    assert given.plan is not None
    assert given.plan.controller == f"vm-{UUID(int=5)}"


@pytest.mark.parametrize(
    "extra",
    [
        "<memoryBacking><access mode='private'/></memoryBacking>",
        "<memoryBacking><source type='anonymous'/></memoryBacking>",
        "<memoryBacking><source type='file'/><access mode='shared'/></memoryBacking>",
        "<cpu><numa><cell id='0' cpus='0-1' memory='524288' memAccess='private'/></numa></cpu>",
    ],
)
def test_private_memory_is_refused_only_for_disks_of_ours(extra: str) -> None:
    with pytest.raises(TranslateError, match=r"shared guest memory.*; use <?[a-z]") as caught:
        translated(domain(lvol("sda"), extra=extra))
    assert caught.value.refusal is Refusal.UNSUPPORTED
    client = domain(plain("sda", "scsi"), extra=extra)
    assert translated(client).xml is client


@pytest.mark.parametrize(
    ("name", "source", "access", "added"),
    [
        ("plain", "memfd", "shared", "backing source access"),
        ("numa", "memfd", None, "backing source"),
        ("hugepages", None, "shared", "access"),
        ("other-prefix", "memfd", "shared", "source access"),
    ],
)
def test_only_missing_memory_settings_are_added(
    name: str, source: str | None, access: str | None, added: str | None
) -> None:
    root = tree(translated(text(name)).xml)
    found = root.find("memoryBacking/source")
    assert (found.get("type") if found is not None else None) == source
    found = root.find("memoryBacking/access")
    assert (found.get("mode") if found is not None else None) == access
    element = root.find(ELEMENT)
    assert element is not None
    assert element.get("added") == added


def test_queues_follow_vcpus_up_to_the_limit() -> None:
    assert overrides(translated(text("plain")).xml)["num_queues"] == "2"
    assert overrides(translated(text("every-way")).xml)["num_queues"] == "8"
    assert overrides(translated(text("no-disks")).xml)["num_queues"] == "1"
    four = translated(text("every-way"), Settings(max_queues=4))
    assert four.plan is not None
    assert four.plan.num_queues == 4


def test_a_uuid_is_given_to_a_domain_without_one() -> None:
    client = re.sub(r"\s*<uuid>.*</uuid>", "", text("plain"))
    there = translated(client)
    assert there.plan is not None
    assert there.plan.controller == f"vm-{NEW_UUID}"
    assert tree(there.xml).findtext("uuid") == str(NEW_UUID)
    spelled = text("plain").replace(
        "6d1f9c52-0000-4000-8000-000000000001", "6D1F9C52000040008000000000000001"
    )
    there = translated(spelled)
    assert there.plan is not None
    assert there.plan.controller == "vm-6d1f9c52-0000-4000-8000-000000000001"


def test_a_second_definition_keeps_target_numbers_and_the_pci_address() -> None:
    first = translated(domain(lvol("sda", "a") + lvol("sdb", "b") + lvol("sdc", "c"))).xml
    address = "<address type='pci' domain='0x0000' bus='0x04' slot='0x00' function='0x0'/>"
    there = first.replace(
        "<alias name='ua-virtlun-scsi0'/>", f"<alias name='ua-virtlun-scsi0'/>{address}"
    )
    second = translated(
        domain(lvol("sdd", "d") + lvol("sdc", "c") + lvol("sda", "a")), current=there
    )
    assert second.plan is not None
    assert {lun.dev: lun.target for lun in second.plan.luns} == {"sda": 0, "sdc": 2, "sdd": 1}
    assert address in second.xml
    # Another device of the client took the place that it cannot see is taken.
    place = "<address type='pci' domain='0' bus='4' slot='0x0' function='0'/>"
    nic = f"<interface type='user'>{place}</interface>"
    third = translated(domain(lvol("sda", "a") + nic), current=there)
    assert address not in third.xml
    # Another volume at the same dev is another disk.
    fourth = translated(domain(lvol("sdb", "other") + lvol("sda", "a")), current=there)
    assert fourth.plan is not None
    assert {lun.dev: lun.target for lun in fourth.plan.luns} == {"sda": 0, "sdb": 1}


def test_known_volume_uuids_are_recorded_and_kept() -> None:
    uuid = "aaaaaaaa-0000-4000-8000-000000000000"
    there = define(text("plain"), SETTINGS, new_uuid=NEW_UUID, uuids={"lvs0/root": uuid})
    assert there.plan is not None
    assert there.plan.luns[0].bdev_name == uuid
    check_schemas(there.xml)
    again = translated(text("plain"), current=there.xml)
    assert again.plan == there.plan


def test_lun_options_come_from_the_disk() -> None:
    there = translated(text("every-way")).plan
    assert there is not None
    by_dev = {lun.dev: lun for lun in there.luns}
    assert [lun.dev for lun in there.luns] == ["sda", "sdb", "vdb", "sdc", "sdd"]
    assert by_dev["sdb"].read_only
    assert not by_dev["sda"].read_only
    assert by_dev["vdb"].shareable
    assert by_dev["vdb"].serial == "2f6f2c8a-1111-4222-8333-444455556666"
    assert by_dev["sdd"].volume.alias == "lvs0/as-volume"
    blocks = [by_dev[dev].block_size for dev in ("sda", "sdb", "vdb", "sdc", "sdd")]
    assert blocks == [None, None, None, 4096, 512]


BOOT_HD = "<boot dev='hd'/>"
CD = "<disk type='file' device='cdrom'><target dev='sdz' bus='sata'/></disk>"


@pytest.mark.parametrize(
    ("devices", "os", "first", "order", "target"),
    [
        (lvol("sda"), "", True, None, None),
        ("", "", False, None, None),
        (lvol("sdb", "b") + lvol("sda", "a"), BOOT_HD, True, None, "1"),
        (CD + lvol("sda"), "<boot dev='cdrom'/>" + BOOT_HD, True, None, None),
        (lvol("sda") + plain("vda", "virtio"), BOOT_HD, True, None, None),
        (plain("vda", "virtio") + lvol("sda"), BOOT_HD, False, None, None),
        (lvol("vdb") + plain("vda", "virtio"), BOOT_HD, True, None, None),
        (lvol("vdb", bus="virtio") + plain("vda", "virtio"), BOOT_HD, False, None, None),
        # libvirt sorts vda before vdb, and their bus stands where vdb stood: vda boots.
        (
            lvol("vdb", bus="virtio") + plain("sdb", "scsi") + plain("vda", "virtio"),
            BOOT_HD,
            False,
            None,
            None,
        ),
        (lvol("sda", more="<boot order='3'/>"), "", False, "3", None),
        (
            lvol("sda", "a", more="<boot order='3'/>") + lvol("sdb", "b", more="<boot order='2'/>"),
            "",
            False,
            "2",
            "1",
        ),
        (lvol("sda") + plain("vda", "virtio", more="<boot order='1'/>"), "", True, None, None),
    ],
)
def test_the_firmware_boots_what_the_client_asked_for(
    devices: str, os: str, first: bool, order: str | None, target: str | None
) -> None:
    xml = translated(domain(devices, os=os)).xml
    disk = carrier(xml)
    boot = disk.find("boot")
    assert (boot.get("order") if boot is not None else None) == order
    assert overrides(xml).get("boot_tpgt") == target
    dev = disk.find("target").get("dev")  # type: ignore[union-attr]
    assert dev == ("ubda" if first else "vdzzzz")
    if order is None:
        # What libvirt makes of it: the first hard disk of its own list gets the boot index.
        asked = libvirt_hard_disks(domain(devices, os=os))
        given = libvirt_hard_disks(xml)
        ours = {lun.dev for lun in plan(xml).luns}  # type: ignore[union-attr]
        assert given[0] == (dev if not asked or asked[0] in ours else asked[0])


def libvirt_hard_disks(xml: str) -> list[str | None]:
    nodes = Document(xml).root.walk()
    read = [disks.read(node) for node in nodes if node.name == "disk" and not node.namespace]
    ordered = libvirt_order((disk, False) for disk in read)
    return [disk.dev for disk, _ in ordered if disk.device in ("disk", "lun")]


def test_the_carriers_name_is_one_that_no_client_disk_has() -> None:
    taken = plain("vdzzzz", "virtio") + plain("vdzzzzz", "virtio")
    xml = translated(domain(taken)).xml
    assert carrier(xml).find("target").get("dev") == "vdzzzzzz"  # type: ignore[union-attr]
    assert len(set(devs(xml))) == 3


@pytest.mark.parametrize(
    ("devices", "words", "refusal"),
    [
        (lvol("sda", "a") + lvol("sda", "b"), "target sda already exists", Refusal.BAD_XML),
        (lvol("sda", "a") + plain("sda", "scsi"), "target sda already exists", Refusal.BAD_XML),
        (
            lvol("sda", "a") + lvol("sdb", "a"),
            "already attached to this domain as sda",
            Refusal.BAD_XML,
        ),
        (
            lvol("sda", "a", more="<serial>1</serial>")
            + plain("sdb", "scsi", more="<serial>1</serial>"),
            "serial '1' of sda is already that of disk sdb",
            Refusal.BAD_XML,
        ),
        (
            lvol("sda", "a", more="<boot order='1'/>")
            + "<interface type='user'><boot order='1'/></interface>",
            "boot order 1 used for more than one device",
            Refusal.BAD_XML,
        ),
        (
            "".join(lvol(f"sd{'a' * (n + 1)}", f"v{n}") for n in range(0)) or lvol("sda", "a/b"),
            "is not LVSTORE/LVOL",
            Refusal.BAD_XML,
        ),
    ],
)
def test_collisions_are_refused_with_a_sentence(devices: str, words: str, refusal: Refusal) -> None:
    with pytest.raises(TranslateError, match=words) as caught:
        translated(domain(devices))
    assert caught.value.refusal is refusal
    assert caught.value.libvirt.code == 27


def many(count: int) -> str:
    return "".join(lvol(f"sd{chr(97 + n // 26)}{chr(97 + n % 26)}", f"v{n}") for n in range(count))


def test_255_disks_are_possible_and_256_are_not() -> None:
    definition = translated(domain(many(MAX_TARGETS)))
    assert definition.plan is not None
    assert definition.plan.luns[-1].target == 254
    with pytest.raises(TranslateError, match="256 virtlun disks, more than the 255"):
        translated(domain(many(MAX_TARGETS + 1)))


def test_a_socket_path_that_linux_cannot_have_is_refused() -> None:
    with pytest.raises(TranslateError, match="longer than 107 bytes; shorten"):
        translated(text("plain"), Settings(vhost_dir="/" + "x" * 100))


def test_s390_is_refused_for_disks_of_ours() -> None:
    xml = domain(lvol("sda")).replace("x86_64", "s390x", 1)
    with pytest.raises(TranslateError, match="PCI"):
        translated(xml)


def test_a_running_domains_disks_have_aliases() -> None:
    there = translated(text("every-way")).xml
    aliases: dict[str, str] = {}
    for disk in tree(present(there, live=True)).findall("devices/disk"):
        target, alias = disk.find("target"), disk.find("alias")
        if target is not None and alias is not None:
            aliases[target.get("dev", "")] = alias.get("name", "")
    assert aliases == {
        "sda": "virtlun-disk-sda",
        "sdb": "virtlun-disk-sdb",
        "vdb": "virtlun-disk-vdb",
        "sdc": "ua-mine",
        "sdd": "virtlun-disk-sdd",
    }
    # What a client sends back of it is stored without them, as libvirt would.
    again = translated(present(there, live=True)).xml
    back = present(again, live=False)
    assert canonical(back) == canonical(with_drivers(text("every-way")))


def test_numbers_that_nothing_has_room_for_are_none() -> None:
    digits = "9" * 5000  # more than int() takes
    whole = domain(lvol("sda", "a", more=f"<boot order='{digits}'/>"))
    there = translated(whole.replace("<vcpu>2", f"<vcpu>{digits}")).xml
    assert devs(present(there, live=False)) == ["sda"]
    damaged = there.replace('order="0"', f'order="{digits}"')
    assert devs(present(damaged, live=False)) == []
    with pytest.raises(TranslateError, match="metadata is damaged"):
        plan(damaged)


def test_dumpxml_of_other_domains_is_the_same_string() -> None:
    for xml in (text("plain"), "<domain", "", "<a>https://virtlun.dev/xmlns/domain/1</a>"):
        assert present(xml, live=True) is xml


def test_damaged_metadata_spoils_no_dumpxml_but_is_no_plan() -> None:
    there = translated(domain(lvol("sda", "a") + lvol("sdb", "b"))).xml
    for old, new in (
        ('target="1"', 'target="999"'),
        ('target="1"', ""),
        ('dev="sdb"', 'dev=""'),
        ('target="1"', 'target="0"'),
        ('version="1"', 'version="2"'),
        ('controller="vm-', 'controller="../vm-'),
    ):
        assert old in there
        broken = there.replace(old, new)
        assert "sda" in devs(present(broken, live=False))
        with pytest.raises(TranslateError, match=r"metadata is damaged .*; define the"):
            plan(broken)
    many = re.sub(r"<virtlun:disk .*?</virtlun:disk>", lambda found: found[0] * 1000, there)
    assert devs(present(many, live=False)) == ["sda", "sdb"]
    evil = there.replace("<![CDATA[<disk ", "<![CDATA[</devices><disk ", 1)
    assert devs(present(evil, live=False)) == ["sdb"]


def test_a_plan_needs_the_controller() -> None:
    there = translated(domain(lvol("sda"))).xml
    gone = there.replace("ua-virtlun-scsi0", "ua-other")
    with pytest.raises(TranslateError, match="no controller for them; define it again"):
        plan(gone)
    # Defining it again through the gateway brings the controller back.
    healed = translated(gone.replace("<alias name='ua-other'/>", ""))
    assert healed.plan is not None
    assert plan("<domain/>") is None
    assert plan(domain(plain("sda", "scsi"))) is None


def test_snapshot_xml_is_presented_too() -> None:
    there = translated(text("plain")).xml
    snapshot = f"<domainsnapshot><name>s</name>\n{there}</domainsnapshot>"
    back = present(snapshot, live=False)
    assert back == f"<domainsnapshot><name>s</name>\n{text('plain')}</domainsnapshot>"


def test_find_knows_dev_path_and_volume() -> None:
    there = translated(text("every-way")).xml
    for path in ("sda", "/dev/virtlun/lvs0/as-file", "lvs0/as-file", "virtlun/lvs0/as-file"):
        lun = find(there, path, SETTINGS)
        assert lun is not None
        assert lun.dev == "sda"
    assert find(there, "vda", SETTINGS) is None
    assert find(text("every-way"), "sda", SETTINGS) is None


# Made-up domains ------------------------------------------------------------------------------

INDENT = "\n    "
OURS = st.sampled_from(
    [
        "<disk type='block' device='disk'>{i}  <source dev='/dev/virtlun/lvs0/{n}'/>{t}{i}</disk>",
        "<disk type='file' device='disk'>{i}  <source file=\"/dev/virtlun/lvs0/{n}\" />{t}"
        "{i}</disk>",
        "<disk type='network' device='lun'>{i}  <source protocol='lvol' name='lvs0/{n}'/>"
        "{t}{i}</disk>",
        "<disk type='volume' device='disk'>{i}  <source pool='virtlun-lvs0' volume='{n}'/>{t}"
        "<!-- ]]> -->{i}</disk>",
        "<disk type='network' device='disk'>{i}  <source protocol='rbd' name='virtlun/lvs0/{n}'>"
        "{i}    <host name='h'/>{i}  </source>{t}{i}  <wwn>5000c50015ea71ad</wwn>{i}</disk>",
    ]
)
THEIRS = st.sampled_from(
    [
        "<disk type='file' device='disk'>{i}  <source file='/tmp/{n}'/>{t}{i}</disk>",
        "<disk type='block' device='cdrom'>{i}  <source dev='/dev/sr0'/>{t}"
        "{i}  <readonly/>{i}</disk>",
    ]
)
BUSES = st.sampled_from([("sd", "scsi"), ("vd", "virtio")])


@st.composite
def domains(draw: st.DrawFn) -> str:
    """Draws a well-formatted domain with up to eight disks and other things."""
    parts, others = [], []
    letters = draw(st.permutations("abcdefgh"))
    for number in range(draw(st.integers(0, 8))):
        prefix, bus = draw(BUSES)
        template = draw(st.one_of(OURS, THEIRS))
        options = draw(
            st.lists(
                st.sampled_from(
                    [
                        "<readonly/>",
                        "<shareable/>",
                        "<blockio logical_block_size='4096'/>",
                        "<x:y xmlns:x='u'/>",
                        "<!-- c -->",
                        "<product><![CDATA[<&]]></product>",
                    ]
                ),
                unique=True,
                max_size=3,
            )
        )
        if "<readonly/>" in template:
            options = [o for o in options if o != "<readonly/>"]
        target = f"{INDENT}  <target dev='{prefix}{letters[number]}' bus='{bus}'/>"
        target += "".join(f"{INDENT}  {option}" for option in options)
        parts.append(template.format(i=INDENT, n=f"v{number}", t=target))
        others.append(draw(st.sampled_from(["", "<controller type='scsi'/>", "<hostdev/>"])))
    devices = "".join(
        f"{INDENT}{part}" for part in ["<emulator>/q</emulator>", *filter(None, parts + others)]
    )
    metadata = draw(
        st.sampled_from(["", "\n  <metadata>\n    <a:b xmlns:a='u'> x </a:b>\n  </metadata>"])
    )
    backing = draw(
        st.sampled_from(
            ["", "<locked/>", "<hugepages/>", "<source type='memfd'/>", "<access mode='shared'/>"]
        )
    )
    if backing:
        backing = f"\n  <memoryBacking>\n    {backing}\n  </memoryBacking>"
    command = draw(
        st.sampled_from(["", "<q:commandline xmlns:q='{u}'><q:arg value='-S'/></q:commandline>"])
    )
    command = command.format(u="http://libvirt.org/schemas/domain/qemu/1.0")
    return (
        "<domain type='kvm'>\n  <name>d</name>\n  <uuid>6d1f9c52-0000-4000-8000-00000000bbbb</uuid>"
        f"{metadata}\n  <memory>1</memory>{backing}\n  <vcpu>3</vcpu>\n  <os><type>hvm</type></os>"
        f"\n  <devices>{devices}\n  </devices>{command}\n</domain>\n"
    )


@given(domains())
@settings(max_examples=60)
def test_any_domain_comes_back_byte_for_byte(client: str) -> None:
    there = translated(client)
    check_schemas(there.xml)
    back = present(there.xml, live=False)
    assert back == with_drivers(client)
    whole = translated(back)
    assert whole.plan == there.plan
    assert present(whole.xml, live=False) == back
    assert translated(back, current=whole.xml) == whole


@given(domains())
@settings(max_examples=40)
def test_any_domain_survives_libvirtds_rewriting(client: str) -> None:
    there = translated(client)
    rewritten = pretty(there.xml)
    assert plan(rewritten) == there.plan
    back = present(rewritten, live=False)
    assert disk_sources(back) == disk_sources(with_drivers(client))
    assert translated(back, current=rewritten).plan == there.plan


@pytest.mark.parametrize("encoding", ["UTF-7", "IBM037", "SCSU", "shift_jis", ""])
@pytest.mark.parametrize("before", ["<?xml version='1.0' ", "\ufeff<?xml\n\tversion = '1.0' "])
def test_ascii_is_ascii(before: str, encoding: str) -> None:
    """Else libxml2 could find names of ours that nobody sees in the bytes."""
    for quote in "'\"":
        declared = f"{before}encoding = {quote}{encoding}{quote}?>"
        with pytest.raises(TranslateError, match="another encoding") as caught:
            translated(declared + domain())
        assert caught.value.refusal is Refusal.BAD_XML
        with pytest.raises(TranslateError, match="another encoding"):
            recognise(declared + plain("sdb", "scsi"), SETTINGS)
        with pytest.raises(TranslateError, match="another encoding"):
            listing.leave_out(declared + "<domainbackup/>", translated(domain()).xml, SETTINGS)


@pytest.mark.parametrize("encoding", ["UTF-8", "utf8", "US-ASCII", "ISO-8859-15", "utf-16"])
def test_encodings_that_clients_declare(encoding: str) -> None:
    text = f"<?xml version='1.0' encoding='{encoding}'?>\n{domain(lvol('sda'))}"
    assert translated(text).plan is not None
