"""Virtio-blk disks: devices of libvirtd's, whose other half stands in our metadata."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pydataplane.domain.errors import TranslateError
from pydataplane.domain.translate import (
    Settings,
    attach,
    define,
    detach,
    detach_alias,
    plan,
    present,
    update,
)
from pydataplane.domain.xml import view as views
from tests.unit.translate.domains import (
    NEW_UUID,
    SETTINGS,
    canonical,
    devs,
    domain,
    lvol,
    overrides,
    plain,
    translated,
    tree,
    with_drivers,
)

CONTROLLER = "vm-6d1f9c52-0000-4000-8000-00000000aaaa"
SOCKET = f"{SETTINGS.vhost_dir}/{CONTROLLER}"
FULL = (
    "<disk type='block' device='disk'>"
    "<driver name='qemu' type='raw' cache='none' discard='ignore'/>"
    "<source dev='/dev/virtlun/lvs0/v'/><target dev='vdb' bus='virtio'/><readonly/><shareable/>"
    "<serial>abc</serial><boot order='2'/><alias name='ua-x'/>"
    "<address type='pci' domain='0x0000' bus='0x05' slot='0x00' function='0x0'/></disk>"
)
SHARED = "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>"


def defined(*disks: str, settings: Settings = SETTINGS, extra: str = "") -> str:
    """Returns a definition at libvirtd."""
    return translated(domain("".join(disks), extra=extra), settings, controller=False).xml


def running(xml: str) -> str:
    """Returns libvirtd's XML of the domain as it runs."""
    return xml.replace("<domain type='qemu'", "<domain type='qemu' id='1'")


def test_libvirtd_gets_what_is_its_own_to_do() -> None:
    made = translated(domain(plain("vda", "virtio") + FULL), controller=False)
    theirs, ours = tree(made.xml).findall("devices/disk")
    assert theirs.find("target").get("dev") == "vda"  # type: ignore[union-attr]
    assert [(node.tag, dict(node.attrib)) for node in ours] == [
        ("driver", {"name": "qemu", "type": "raw", "queues": "2"}),
        ("source", {"type": "unix", "path": f"{SOCKET}.0"}),
        ("target", {"dev": "vdb", "bus": "virtio"}),
        ("boot", {"order": "2"}),
        ("alias", {"name": "ua-x"}),
        (
            "address",
            {
                "type": "pci",
                "domain": "0x0000",
                "bus": "0x05",
                "slot": "0x00",
                "function": "0x0",
            },
        ),
    ]
    assert dict(ours.find("source/reconnect").attrib) == {"enabled": "yes", "timeout": "1"}  # type: ignore[union-attr]
    assert overrides(made.xml) == {}, "no vhost-user-scsi controller"
    assert tree(made.xml).find("memoryBacking/access").get("mode") == "shared"  # type: ignore[union-attr]
    assert made.plan is not None
    assert made.plan == plan(made.xml)
    assert not made.plan.has_scsi
    assert made.plan.sockets == [f"{SOCKET}.0"]
    (lun,) = made.plan.luns
    assert lun.address(CONTROLLER) == (f"{CONTROLLER}.0", 0)
    assert (lun.front, lun.dev, lun.serial) == ("blk", "vdb", "abc")
    assert lun.read_only and lun.shareable and not lun.characteristics.discard


def test_the_client_sees_its_own_disk_again() -> None:
    client = domain(plain("vda", "virtio") + FULL + lvol("sda", "w"))
    assert canonical(present(defined_of(client), live=False)) == canonical(with_drivers(client))


def defined_of(client: str) -> str:
    return translated(client, controller=False).xml


def test_alias_and_address_are_those_that_libvirtd_gave() -> None:
    xml = defined(lvol("vda", bus="virtio"))
    at = "<address type='pci' domain='0x0000' bus='0x04' slot='0x00' function='0x0'/>"
    target = "<target dev='vda' bus='virtio'/>"
    given = running(xml).replace(f"{target}\n", f"{target}<alias name='virtio-disk0'/>{at}\n")
    (shown,) = tree(present(given, live=True)).findall("devices/disk")
    assert shown.find("alias").get("name") == "virtio-disk0"  # type: ignore[union-attr]
    assert shown.find("address").get("bus") == "0x04"  # type: ignore[union-attr]
    change = detach_alias(given, "virtio-disk0", SETTINGS, live=True)
    assert change is not None
    assert change.lun.dev == "vda"
    assert change.device_xml is not None
    assert f"{SOCKET}.0" in change.device_xml and at in change.device_xml


@pytest.mark.parametrize(
    ("settings", "disk", "front"),
    [
        (SETTINGS, lvol("vda", bus="virtio"), "blk"),
        (SETTINGS, lvol("sda"), "scsi"),
        (replace(SETTINGS, front_end="scsi"), lvol("vda", bus="virtio"), "scsi"),
        (replace(SETTINGS, front_end="blk"), lvol("sda"), "blk"),
        (replace(SETTINGS, qemu_lacks_scsi=lambda *_: True), lvol("sda"), "blk"),
        # What only a SCSI disk has, which was a LUN with this bus before there were others.
        (SETTINGS, lvol("vda", bus="virtio", more="<wwn>5000c50015ea71ad</wwn>"), "scsi"),
    ],
)
def test_the_front_end_of_a_new_disk(settings: Settings, disk: str, front: str) -> None:
    asked: list[object] = []
    if settings.qemu_lacks_scsi(None, None):
        settings = replace(settings, qemu_lacks_scsi=lambda *of: not asked.append(of))  # type: ignore[func-returns-value]
    made = translated(domain(disk), settings, controller=False)
    assert made.plan is not None
    assert [lun.front for lun in made.plan.luns] == [front]
    assert made.plan.has_scsi == (front == "scsi")
    assert not asked or asked[0] == ("/usr/bin/qemu-system-x86_64", "x86_64")


def test_what_a_disk_is_stays() -> None:
    """Whatever the settings say now, until it gets another bus."""
    as_lun = replace(SETTINGS, front_end="scsi")
    before = defined(lvol("vda", bus="virtio"), settings=as_lun)
    shown = present(before, live=False)
    again = define(shown, SETTINGS, new_uuid=NEW_UUID, current_xml=before)
    assert again.plan is not None
    assert again.plan.luns[0].front == "scsi"
    other = define(
        shown.replace("bus='virtio'", "bus='scsi'"),
        replace(SETTINGS, front_end="blk"),
        new_uuid=NEW_UUID,
        current_xml=before,
    )
    assert other.plan is not None
    assert other.plan.luns[0].front == "blk"


def test_a_qemu_without_the_controller_gets_none() -> None:
    settings = replace(SETTINGS, qemu_lacks_scsi=lambda *_: True)
    made = translated(domain(lvol("sda")), settings, controller=True)
    assert overrides(made.xml) == {}
    # But what a first virtio-blk disk needs, which no client sees.
    client = domain(plain("vda", "virtio"))
    empty = translated(client, settings, controller=True)
    assert empty.plan is not None and empty.plan.controllers == {}
    assert plan(empty.xml) is None
    assert canonical(present(empty.xml, live=False)) == canonical(client)
    assert attach(running(empty.xml), lvol("sda"), settings, live=True) is not None
    assert translated(client, settings, controller=False).xml == client


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("<wwn>5000c50015ea71ad</wwn>", "wwn"),
        ("<vendor>V</vendor>", "vendor"),
        ("<driver cache='writethrough'/>", "cache='writethrough'"),
        ("<driver error_policy='ignore'/>", "error_policy='ignore'"),
        ("<driver rerror_policy='ignore'/>", "rerror_policy='ignore'"),
        ("<iotune><group_name>g</group_name></iotune>", "group_name"),
    ],
)
def test_what_a_virtio_blk_disk_cannot_be_is_refused(more: str, words: str) -> None:
    settings = replace(SETTINGS, front_end="blk")
    with pytest.raises(TranslateError, match=words):
        translated(domain(lvol("vda", bus="virtio", more=more)), settings)


def test_a_lun_has_no_pci_address() -> None:
    at = "<address type='pci' bus='0x05' slot='0x00'/>"
    with pytest.raises(TranslateError, match="type='pci' of <address> is not possible"):
        translated(domain(lvol("sda", more=at)))


def test_attach_and_detach_of_the_running_side() -> None:
    before = running(defined(extra=SHARED))
    change = attach(before, FULL, SETTINGS, live=True)
    assert change is not None
    assert change.plan is not None and not change.plan.has_scsi
    device = tree(change.device_xml or "")
    assert device.find("source").get("path") == f"{SOCKET}.0"  # type: ignore[union-attr]
    assert device.find("readonly") is None, "libvirt takes none of a vhostuser disk"
    # libvirtd has the metadata first, and then the device.
    noted = with_metadata(before, change.metadata_xml)
    assert devs(present(noted, live=True)) == []
    assert plan(noted) is None
    there = noted.replace("</devices>", (change.device_xml or "") + "</devices>")
    assert devs(present(there, live=True)) == ["vdb"]
    assert plan(there) == change.plan
    back = detach(there, FULL, SETTINGS, live=True)
    assert back is not None
    assert back.plan is None
    assert back.device_xml == change.device_xml


def with_metadata(xml: str, bare: str) -> str:
    """Returns a domain with our element as virDomainSetMetadata puts it there."""
    ours = bare.replace(
        "<disks", "<virtlun:disks xmlns:virtlun='https://virtlun.dev/xmlns/domain/1'"
    )
    ours = ours.replace("<disk ", "<virtlun:disk ", 1).replace("</disks>", "</virtlun:disks>")
    ours = ours.replace("]]></disk>", "]]></virtlun:disk>")
    return xml.replace("</uuid>", f"</uuid><metadata>{ours}</metadata>")


def test_attach_to_memory_that_is_not_shared_is_refused() -> None:
    with pytest.raises(TranslateError, match="runs without shared memory"):
        attach(running(domain()), lvol("vda", bus="virtio"), SETTINGS, live=True)


def test_a_lun_for_a_domain_that_runs_with_virtio_blk_alone_is_refused() -> None:
    with pytest.raises(TranslateError, match=r"use bus='virtio' \(a target like vdb\)"):
        attach(running(defined(lvol("vda", bus="virtio"))), lvol("sda", "w"), SETTINGS, live=True)


def test_attach_and_detach_of_the_persistent_side() -> None:
    before = defined(lvol("vda", "a", bus="virtio"))
    change = attach(before, lvol("vdb", "b", bus="virtio"), SETTINGS, live=False)
    assert change is not None
    assert change.redefine and change.domain_xml is not None
    assert change.device_xml is None
    assert devs(present(change.domain_xml, live=False)) == ["vda", "vdb"]
    assert plan(change.domain_xml) == change.plan
    lun = attach(change.domain_xml, lvol("sda", "c"), SETTINGS, live=False)
    assert lun is not None
    assert lun.redefine and lun.domain_xml is not None, "the controller comes with the first LUN"
    assert overrides(lun.domain_xml)["driver"] == "vhost-user-scsi-pci"
    assert devs(present(lun.domain_xml, live=False)) == ["vda", "vdb", "sda"]
    back = detach(lun.domain_xml, lvol("sda", "c"), SETTINGS, live=False)
    assert back is not None and back.domain_xml is not None
    assert overrides(back.domain_xml) == {}
    gone = detach(back.domain_xml, lvol("vdb", "b", bus="virtio"), SETTINGS, live=False)
    assert gone is not None and gone.domain_xml is not None
    assert plan(gone.domain_xml) == plan(before)
    assert devs(present(gone.domain_xml, live=False)) == ["vda"]


def test_both_sides_number_a_disk_alike() -> None:
    config = defined(lvol("vda", "a", bus="virtio"), lvol("vdc", "c", bus="virtio"))
    live = running(defined(lvol("vda", "a", bus="virtio")))
    new = lvol("vdb", "b", bus="virtio")
    changes = [
        attach(live, new, SETTINGS, live=True, peer_xml=config),
        attach(config, new, SETTINGS, live=False, peer_xml=live),
    ]
    assert [change.lun.target for change in changes if change is not None] == [2, 2]


def test_a_running_disk_takes_another_front_end_only_at_a_start() -> None:
    xml = defined(lvol("vda", bus="virtio"))
    new = lvol("vda", bus="scsi")
    with pytest.raises(TranslateError, match="cannot modify field 'target bus'"):
        update(running(xml), new, SETTINGS, live=True)
    change = update(xml, new, SETTINGS, live=False)
    assert change is not None
    assert change.redefine and change.plan is not None
    assert change.plan.luns[0].front == "scsi"
    assert change.domain_xml is not None
    assert overrides(change.domain_xml)["driver"] == "vhost-user-scsi-pci"


def test_a_device_that_our_metadata_does_not_know_is_kept_and_not_shown() -> None:
    """Its controller is not taken for one that is left over."""
    xml = defined(lvol("vda", "a", bus="virtio"), lvol("sda", "b"))
    view = views.required(xml)
    metadata = view.metadata
    assert metadata is not None
    blk = metadata.by_dev("vda")
    assert blk is not None
    found = view.plan_with(metadata.without(blk))
    assert found is not None
    assert found.others == (f"{CONTROLLER}.0",)


def test_a_vhostuser_disk_of_a_clients_own_is_left_alone() -> None:
    """Also one whose socket is called as ours are."""
    own = (
        f"<disk type='vhostuser' device='disk'><source type='unix' path='{SOCKET}.3'/>"
        "<target dev='vdq' bus='virtio'/></disk>"
    )
    client = domain(own)
    assert translated(client, controller=False).xml == client
    assert present(client, live=False) == client


QUEUED = "<driver name='qemu' type='raw' queues='{}' queue_size='{}' event_idx='off'/>"


def queued(queues: object, size: object, dev: str = "vda") -> str:
    """Returns a virtio-blk disk of ours whose client chooses its queues."""
    return lvol(dev, dev, bus="virtio", more=QUEUED.format(queues, size))


def drivers(xml: str) -> list[dict[str, str]]:
    """Returns the <driver> of each disk at libvirtd, without what all have."""
    found = [dict(node.attrib) for node in tree(xml).findall("devices/disk/driver")]
    assert all((each.pop("name"), each.pop("type")) == ("qemu", "raw") for each in found)
    return found


CHOSEN = {"queues": "4", "queue_size": "256", "event_idx": "off"}


def test_queues_are_as_the_client_chose() -> None:
    xml = defined(queued(4, 256), lvol("vdb", bus="virtio"))
    assert drivers(xml) == [CHOSEN, {"queues": "2"}]
    made = plan(xml)
    assert made is not None and made.num_queues == 4
    assert drivers(translated(present(xml, live=False), controller=False).xml) == drivers(xml)
    change = attach(running(xml), queued(4, 256, "vdc"), SETTINGS, live=True)
    assert change is not None and change.device_xml is not None
    assert drivers(f"<d><devices>{change.device_xml}</devices></d>") == [CHOSEN]


@pytest.mark.parametrize(
    ("queues", "size", "name"),
    [
        ("many", 128, "queues='many' of <driver> is not possible; use 1 to 64, or remove it"),
        (1, 64, "queue_size='64' of <driver> is not possible; use a power of two from 128 to 1024"),
        (1, 200, "queue_size='200' of <driver> is not possible"),
        (1, 2048, "queue_size='2048' of <driver> is not possible"),
    ],
)
def test_queues_that_no_disk_has_are_refused(queues: object, size: object, name: str) -> None:
    for check in (
        defined,
        lambda disk: attach(
            running(defined(lvol("vdb", "w", bus="virtio"))), disk, SETTINGS, live=True
        ),
    ):
        with pytest.raises(TranslateError, match=name):
            check(queued(queues, size))


@pytest.mark.parametrize(("asked", "queues"), [(0, "2"), (64, "64"), (65, "64"), (200, "64")])
def test_queues_are_up_to_those_that_the_target_has(asked: int, queues: str) -> None:
    assert drivers(defined(queued(asked, 128)))[0]["queues"] == queues


@pytest.mark.parametrize("name", ["queues", "queue_size", "event_idx"])
def test_a_lun_has_no_queues_of_its_own(name: str) -> None:
    """As libvirt says of its own SCSI disks."""
    value = CHOSEN[name]
    disk = lvol("sda", more=f"<driver {name}='{value}'/>")
    with pytest.raises(TranslateError, match=f"{name}='{value}' of <driver> is not possible: "):
        defined(disk)


@pytest.mark.parametrize(
    ("more", "settings"),
    [
        ("<vendor>ACME</vendor>", SETTINGS),
        ("<wwn>5000c50015ea71ad</wwn>", SETTINGS),
        ("", replace(SETTINGS, front_end="scsi")),
    ],
    ids=["vendor", "wwn", "setting"],
)
def test_one_of_bus_virtio_that_is_a_lun_may_ask_for_queues(more: str, settings: Settings) -> None:
    """It asks for what a virtio-blk disk has, and its client need not know that it is none."""
    disk = lvol("vda", bus="virtio", more=more + QUEUED.format(4, 100))
    made = plan(defined(disk, settings=settings))
    assert made is not None and [lun.front for lun in made.luns] == ["scsi"]


def test_what_an_update_does_not_name_stays_while_the_guest_runs() -> None:
    blocks = "<blockio physical_block_size='4096'/>"
    for dev, bus, more, kept in (
        ("vda", "virtio", blocks + QUEUED.format(4, 256), CHOSEN),
        ("sda", "scsi", blocks, {}),
    ):
        now = running(defined(lvol(dev, bus=bus, more=more)))
        change = update(now, lvol(dev, bus=bus), SETTINGS, live=True)
        assert change is not None
        assert change.lun.characteristics.physical_block_size == 4096
        shown = tree(present(now, live=True)).find("devices/disk")
        metadata = tree(change.metadata_xml)
        text = next(node.text for node in metadata.iter() if node.text and "<disk" in node.text)
        disk = tree(text)
        assert shown is not None and shown.find("blockio").attrib == disk.find("blockio").attrib  # type: ignore[union-attr]
        driver = disk.find("driver")
        given = {name: driver.get(name) for name in CHOSEN} if driver is not None else {}
        assert {name: value for name, value in given.items() if value} == kept


def test_a_guest_that_goes_on_keeps_its_queues() -> None:
    client = domain(queued(4, 256))
    now = running(defined_of(client))
    # An earlier version had one queue for each vCPU, whatever its client asked for.
    metadata, of_device, rest = now.rpartition(" queues='4' queue_size='256' event_idx='off'")
    assert of_device
    earlier = f"{metadata} queues='2'{rest}"
    other = replace(SETTINGS, max_queues=1)
    for had, settings, shown in (
        (now, SETTINGS, CHOSEN),
        (earlier, SETTINGS, {"queues": "2"}),
        (earlier, other, {"queues": "2"}),
    ):
        gone_on = define(client, settings, new_uuid=NEW_UUID, current_xml=had, running=True)
        assert drivers(gone_on.xml) == [shown]
    for wrong in (queued(2, 256), lvol("vda", "vda", bus="virtio")):
        with pytest.raises(TranslateError, match="driver queue"):
            define(domain(wrong), SETTINGS, new_uuid=NEW_UUID, current_xml=now, running=True)
    for wrong in (queued(2, 256), queued(4, 512)):
        with pytest.raises(TranslateError, match="cannot modify field 'queue"):
            update(now, wrong, SETTINGS, live=True)


def test_a_lun_that_goes_on_may_say_of_queues_what_it_always_did() -> None:
    before, said = lvol("sda"), lvol("sda", more="<driver queues='100'/>")
    had = running(defined(before)).replace("bus='scsi'/>", "bus='scsi'/><driver queues='100'/>", 1)
    assert define(domain(said), SETTINGS, new_uuid=NEW_UUID, current_xml=had, running=True).plan
    assert update(had, said, SETTINGS, live=True) is not None
    with pytest.raises(TranslateError, match="queues='100' of <driver> is not possible"):
        update(had, said, SETTINGS, live=False)
