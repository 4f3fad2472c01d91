"""A domain of KubeVirt's shape with a controller in the place of its disks."""

from __future__ import annotations

import pytest

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.translate import Settings, carry, carry_blk
from tests.unit.translate.domains import tree

SOCKET = "/var/run/virtlun/vhost.sock"
QEMU = "{http://libvirt.org/schemas/domain/qemu/1.0}"
SETTINGS = Settings()

ROOT_DISK = """\
    <disk type="block" device="disk">
      <source dev="/dev/rootdisk"></source>
      <target dev="vda" bus="virtio"></target>
      <driver name="qemu" type="raw" cache="none" error_policy="stop" discard="unmap"></driver>
      <alias name="ua-rootdisk"></alias>
    </disk>
"""
DATA_DISK = """\
    <disk type="block" device="disk">
      <source dev="/dev/data"></source>
      <target dev="vdb" bus="virtio"></target>
      <alias name="ua-data"></alias>
    </disk>
"""
CLOUD_INIT = """\
    <disk device="disk" type="file"><source file="/var/run/noCloud.iso"/>
      <target bus='virtio' dev='vdc'/><alias name='ua-cloudinit'/></disk>
"""
DOMAIN = f"""\
<domain type="kvm" xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0">
  <name>default_vm</name>
  <memory unit="b">1073741824</memory>
  <os><type arch="x86_64" machine="q35">hvm</type></os>
  <metadata><kubevirt xmlns="http://kubevirt.io"><uid>ab &amp; c</uid></kubevirt></metadata>
  <vcpu placement="static">4</vcpu>
  <devices>
    <!-- kept -->
{ROOT_DISK}{DATA_DISK}{CLOUD_INIT}  </devices>
  <qemu:commandline><qemu:arg value="-fw_cfg"/></qemu:commandline>
</domain>
"""


def carried(xml: str = DOMAIN, settings: Settings = SETTINGS, **luns: int) -> str:
    return carry(xml, SOCKET, {f"ua-{name}": target for name, target in luns.items()}, settings)


def properties(xml: str) -> dict[str | None, str | None]:
    found = tree(xml).findall(f"{QEMU}override/{QEMU}device/{QEMU}frontend/{QEMU}property")
    return {each.get("name"): each.get("value") for each in found}


def disks(xml: str) -> list[str | None]:
    return [each.get("name") for each in tree(xml).findall("devices/disk/alias")]


def test_luns_leave_the_domain_and_the_rest_keeps_its_bytes() -> None:
    xml = carried(rootdisk=0, data=1)
    assert disks(xml) == ["ua-virtlun-scsi0", "ua-cloudinit"]
    start, end = DOMAIN.split(ROOT_DISK + DATA_DISK)
    for line in (start + CLOUD_INIT).splitlines():
        assert line in xml.splitlines()
    assert end.split("</devices>")[1].rsplit("\n</domain>", 1)[0] in xml
    root = tree(xml)
    assert root.find("memoryBacking/source[@type='memfd']") is not None
    assert root.find("memoryBacking/access[@mode='shared']") is not None
    source = root.find("devices/disk/source[@path]")
    assert source is not None
    assert (source.get("type"), source.get("path")) == ("unix", SOCKET)
    assert properties(xml) == {"driver": "vhost-user-scsi-pci", "num_queues": "4"}


MANGLED = """\
    <disk type="vhostuser" device="disk">
      <driver name="qemu" type="raw"></driver>
      <target dev="vdzzzz" bus="virtio"></target>
      <boot order="1"></boot>
      <alias name="ua-virtlun-scsi0"></alias>
      <address type="pci" domain="0x0000" bus="0x04" slot="0x00" function="0x0"></address>
    </disk>
"""


def test_a_carrier_that_kubevirt_has_read_back_is_made_whole() -> None:
    """Its source and the override are lost there, and the disks are gone already."""
    start, end = DOMAIN.split(ROOT_DISK + DATA_DISK)
    luns = {"ua-rootdisk": 0, "ua-data": 1}
    xml = carry(start + MANGLED + end, SOCKET, luns, SETTINGS, "ua-data")
    found = tree(xml).find("devices/disk")
    assert found is not None
    assert {child.tag for child in found} >= {"source", "target", "boot", "alias", "address"}
    source, address = found.find("source"), found.find("address")
    assert source is not None and source.get("path") == SOCKET
    assert address is not None and address.get("bus") == "0x04"
    assert properties(xml)["boot_tpgt"] == "1"
    assert properties(xml)["driver"] == "vhost-user-scsi-pci"
    assert tree(xml).find("memoryBacking/access[@mode='shared']") is not None
    assert CLOUD_INIT in xml
    assert carry(xml, SOCKET, luns, SETTINGS) == xml


def test_what_was_put_in_can_be_cut_out_again() -> None:
    xml = carried()
    root = tree(xml)
    assert disks(xml) == ["ua-rootdisk", "ua-data", "ua-cloudinit", "ua-virtlun-scsi0"]
    assert root.find(f"{QEMU}override") is not None
    for part in (ROOT_DISK, DATA_DISK, CLOUD_INIT, "<!-- kept -->", "<uid>ab &amp; c</uid>"):
        assert part in xml


def test_a_second_hook_changes_nothing() -> None:
    xml = carried(rootdisk=0)
    assert carried(xml, rootdisk=0) == xml


def test_the_controller_boots_what_the_firmware_would() -> None:
    assert carried(rootdisk=3, data=0).index("virtlun-scsi0") < carried().index("cloudinit")
    assert properties(carried(rootdisk=3, data=0))["boot_tpgt"] == "3"
    second = DOMAIN.replace(
        '<alias name="ua-data">', '<boot order="2"></boot><alias name="ua-data">'
    ).replace('<alias name="ua-rootdisk">', '<boot order="5"></boot><alias name="ua-rootdisk">')
    xml = carried(second, rootdisk=0, data=7)
    assert properties(xml)["boot_tpgt"] == "7"
    found = [(disk.find("alias"), disk.find("boot")) for disk in tree(xml).findall("devices/disk")]
    assert [
        (alias.get("name"), boot.get("order"))
        for alias, boot in found
        if alias is not None and boot is not None
    ] == [("ua-virtlun-scsi0", "2")]


def test_a_boot_disk_that_stays_is_first() -> None:
    xml = carried(data=0)
    assert disks(xml)[0] == "ua-rootdisk"
    names = [t.get("dev") or "" for t in tree(xml).findall("devices/disk/target")]
    assert min(names, key=lambda name: (len(name), name)) == "vda"


def test_hugepages_are_kept_and_shared() -> None:
    backed = "<memoryBacking><hugepages/><source type='memfd'/></memoryBacking>\n  <vcpu"
    xml = carried(DOMAIN.replace("<vcpu", backed), rootdisk=0)
    root = tree(xml)
    assert len(root.findall("memoryBacking")) == 1
    assert [each.tag for each in root.findall("memoryBacking/*")] == [
        "hugepages",
        "source",
        "access",
    ]


def test_qemu_connects_again_where_it_can() -> None:
    source = tree(carried(settings=Settings(reconnect_s=1))).find("devices/disk/source/reconnect")
    assert source is not None
    assert (source.get("enabled"), source.get("timeout")) == ("yes", "1")
    assert "<reconnect" not in carried()


def test_queues_follow_the_vcpus_up_to_the_bound() -> None:
    many = DOMAIN.replace(">4</vcpu>", ">64</vcpu>")
    assert properties(carried(many, Settings(max_queues=6)))["num_queues"] == "6"


@pytest.mark.parametrize(
    ("xml", "refusal", "words"),
    [
        ("<domain", Refusal.BAD_XML, "not given the XML of a QEMU domain"),
        ("<domain type='xen'><os><type>hvm</type></os></domain>", Refusal.BAD_XML, "QEMU domain"),
        (DOMAIN.replace("ua-rootdisk", "ua-x"), Refusal.BAD_XML, "has no disk ua-rootdisk"),
        (DOMAIN.replace("x86_64", "s390x"), Refusal.UNSUPPORTED, "no PCI"),
        (
            DOMAIN.replace("<vcpu", "<memoryBacking><access mode='private'/></memoryBacking><vcpu"),
            Refusal.UNSUPPORTED,
            "shared guest memory",
        ),
    ],
)
def test_what_cannot_be_done_is_said(xml: str, refusal: Refusal, words: str) -> None:
    with pytest.raises(TranslateError, match=words) as error:
        carried(xml, rootdisk=0)
    assert error.value.refusal is refusal


def test_a_socket_that_is_too_deep_is_refused() -> None:
    with pytest.raises(TranslateError, match="mount the folder at a shorter one"):
        carry(DOMAIN, f"/{'x' * 107}", {}, SETTINGS)


REWRITTEN = """\
<domain type="kvm">
  <name>default_vm</name>
  <memoryBacking>
    <source type="memfd"></source>
    <access mode="shared"></access>
  </memoryBacking>
  <os>
    <type arch="x86_64" machine="q35">hvm</type>
  </os>
  <devices>
    <disk type="vhostuser" device="disk">
      <driver name="qemu" type="raw"></driver>
      <source type="unix" path="/var/run/virtlun/vhost.sock">
        <reconnect enabled="yes" timeout="1"></reconnect>
      </source>
      <target dev="ubda" bus="virtio"></target>
      <alias name="ua-virtlun-scsi0"></alias>
    </disk>
  </devices>
  <override xmlns="http://libvirt.org/schemas/domain/qemu/1.0">
    <device alias="ua-virtlun-scsi0">
      <frontend>
        <property name="driver" type="string" value="vhost-user-scsi-pci"></property>
        <property name="num_queues" type="unsigned" value="4"></property>
        <property name="boot_tpgt" type="unsigned" value="2"></property>
      </frontend>
    </device>
  </override>
</domain>
"""
"""What libvirtxml, by which KubeVirt reads a plugin's answer, writes of a domain with a carrier."""


def test_what_kubevirt_makes_of_the_answer_is_still_the_controller() -> None:
    assert properties(REWRITTEN) == properties(carried(rootdisk=2, data=0))
    xml = carried(REWRITTEN, rootdisk=2)
    assert disks(xml) == ["ua-virtlun-scsi0"]
    assert properties(xml) == properties(REWRITTEN)


SOCKETS = {"ua-rootdisk": f"{SOCKET}.0", "ua-data": f"{SOCKET}.1"}
READ_BACK = """\
    <disk type="vhostuser" device="disk">
      <driver name="qemu" type="raw"></driver>
      <target dev="vdb" bus="virtio"></target>
      <boot order="1"></boot>
      <alias name="ua-data"></alias>
      <address type="pci" domain="0x0000" bus="0x04" slot="0x00" function="0x0"></address>
    </disk>
"""


def test_disks_become_vhost_user_blk_devices_where_they_stand() -> None:
    booted = DOMAIN.replace('<alias name="ua-data">', '<boot order="1"/><alias name="ua-data">')
    xml = carry_blk(booted, SOCKETS, Settings(max_queues=3))
    root = tree(xml)
    assert disks(xml) == ["ua-rootdisk", "ua-data", "ua-cloudinit"]
    assert root.find(f"{QEMU}override") is None
    assert root.find("memoryBacking/source[@type='memfd']") is not None
    assert root.find("memoryBacking/access[@mode='shared']") is not None
    for disk, dev, socket in zip(
        root.findall("devices/disk"), ("vda", "vdb"), SOCKETS.values(), strict=False
    ):
        source, target = disk.find("source"), disk.find("target")
        driver, again = disk.find("driver"), disk.find("source/reconnect")
        assert disk.get("type") == "vhostuser"
        assert source is not None and dict(source.items()) == {"type": "unix", "path": socket}
        assert target is not None and dict(target.items()) == {"dev": dev, "bus": "virtio"}
        assert driver is not None and driver.get("queues") == "3"
        # vhost-user-blk connects again, whatever the version.
        assert again is not None and again.get("timeout") == "1"
    assert [each.get("order") for each in root.findall("devices/disk/boot")] == ["1"]
    assert CLOUD_INIT in xml and "<!-- kept -->" in xml
    assert carry_blk(xml, SOCKETS, Settings(max_queues=3)) == xml


@pytest.mark.parametrize(("asked", "queues"), [(1, 1), (12, 12), (200, 64)])
def test_the_queues_of_blockmultiqueue_are_as_many_as_the_target_has(
    asked: int, queues: int
) -> None:
    read_back = READ_BACK.replace('type="raw"', f'type="raw" queues="{asked}"')
    xml = carry_blk(DOMAIN.replace(DATA_DISK, read_back), SOCKETS, Settings(max_queues=3))
    found = tree(xml).findall("devices/disk[@type='vhostuser']/driver")
    assert [driver.get("queues") for driver in found] == ["3", str(queues)]


def test_a_vhost_user_blk_device_that_kubevirt_has_read_back_is_made_whole() -> None:
    xml = carry_blk(DOMAIN.replace(DATA_DISK, READ_BACK), SOCKETS, SETTINGS)
    (found,) = [
        disk
        for disk in tree(xml).findall("devices/disk")
        if disk.find("alias[@name='ua-data']") is not None
    ]
    assert {child.tag for child in found} >= {"driver", "source", "boot", "alias", "address"}
    source, address = found.find("source"), found.find("address")
    assert source is not None and source.get("path") == SOCKETS["ua-data"]
    assert address is not None and address.get("bus") == "0x04"


@pytest.mark.parametrize(
    ("sockets", "xml", "words"),
    [
        ({"ua-gone": SOCKET}, DOMAIN, "has no disk ua-gone"),
        ({"ua-data": f"/{'x' * 107}"}, DOMAIN, "mount the folder at a shorter one"),
        ({"ua-data": SOCKET}, DOMAIN.replace("x86_64", "s390x"), "no PCI"),
        ({"ua-data": SOCKET}, "<domain", "not given the XML of a QEMU domain"),
    ],
)
def test_what_cannot_be_a_vhost_user_blk_device_is_said(
    sockets: dict[str, str], xml: str, words: str
) -> None:
    with pytest.raises(TranslateError, match=words):
        carry_blk(xml, sockets, SETTINGS)
