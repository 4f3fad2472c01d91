"""The domains that the translation's tests share, and how they compare XML."""

from __future__ import annotations

import re
from pathlib import Path
from uuid import UUID

from lxml import etree

from pydataplane.domain.translate import Definition, Settings, define

ROOT = Path(__file__).parents[3]
SETTINGS = Settings()
NEW_UUID = UUID("11111111-2222-4333-8444-555555555555")
FOLDERS = (Path(__file__).parent / "domains", ROOT / "examples/libvirt")
FILES = sorted(
    path
    for folder in FOLDERS
    for path in folder.glob("*.xml")
    if etree.parse(path).getroot().tag == "domain"
)
NAMES = [path.stem for path in FILES]


def text(name: str) -> str:
    """Returns a domain's XML by file name."""
    return FILES[NAMES.index(name)].read_text()


def translated(
    xml: str,
    settings: Settings = SETTINGS,
    current: str | None = None,
    *,
    controller: bool = True,
) -> Definition:
    """Calls `define` as the gateway does for a run; without `controller` as for a definition."""
    return define(xml, settings, new_uuid=NEW_UUID, current_xml=current, controller=controller)


def tree(xml: str) -> etree._Element:
    """Parses XML with lxml, which the code under test does not use."""
    return etree.fromstring(xml.encode())


def canonical(xml: str) -> bytes:
    """Returns XML without what white space between elements, quotes and CDATA make different."""
    parser = etree.XMLParser(remove_blank_text=True, strip_cdata=True, resolve_entities=False)
    root = etree.fromstring(xml.encode(), parser)
    text = etree.tostring(root, encoding="unicode")
    return etree.canonicalize(text, strip_text=True).encode()  # type: ignore[no-any-return]


def pretty(xml: str) -> str:
    """Writes XML anew as libvirtd does: its own quotes, indentation and declarations."""
    parser = etree.XMLParser(remove_blank_text=True, strip_cdata=False)
    root = etree.fromstring(xml.encode(), parser)
    return etree.tostring(root, pretty_print=True, encoding="unicode").replace('"', "'") + "\n"


def disk_sources(xml: str) -> list[bytes]:
    """Returns the disks of a domain in order, each canonical."""
    disks = tree(xml).findall("devices/disk")
    return [canonical(etree.tostring(disk, with_tail=False).decode()) for disk in disks]


def devs(xml: str) -> list[str | None]:
    """Returns the target devs of a domain's disks in order."""
    return [target.get("dev") for target in tree(xml).findall("devices/disk/target")]


def qemu(name: str) -> str:
    """Returns a name in libvirt's QEMU namespace as lxml writes it."""
    return f"{{http://libvirt.org/schemas/domain/qemu/1.0}}{name}"


def overrides(xml: str) -> dict[str, str | None]:
    """Returns the properties that the domain sets on our controller."""
    root = tree(xml)
    path = f"{qemu('override')}/{qemu('device')}[@alias='ua-virtlun-scsi0']"
    return {
        node.get("name", ""): node.get("value")
        for device in root.iterfind(path)
        for node in device.iter(qemu("property"))
    }


def carrier(xml: str) -> etree._Element:
    """Returns the one carrier disk."""
    found = [
        disk
        for disk in tree(xml).findall("devices/disk")
        if disk.find("alias") is not None and disk.find("alias").get("name") == "ua-virtlun-scsi0"  # type: ignore[union-attr]
    ]
    assert len(found) == 1
    return found[0]


def domain(devices: str = "", *, extra: str = "", os: str = "", kind: str = "qemu") -> str:
    """Returns a small domain; `devices` inside <devices>, `extra` before it, `os` inside <os>."""
    return f"""<domain type='{kind}'>
  <name>small</name>
  <uuid>6d1f9c52-0000-4000-8000-00000000aaaa</uuid>
  <memory unit='MiB'>512</memory>
  <vcpu>2</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type>{os}</os>
  {extra}
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    {devices}
  </devices>
</domain>
"""


def lvol(dev: str, name: str = "v", *, more: str = "", bus: str = "scsi") -> str:
    """Returns a disk of ours."""
    return (
        f"<disk type='block' device='disk'><source dev='/dev/virtlun/lvs0/{name}'/>"
        f"<target dev='{dev}' bus='{bus}'/>{more}</disk>"
    )


def plain(dev: str, bus: str, *, more: str = "") -> str:
    """Returns a disk that is not ours."""
    return (
        f"<disk type='file' device='disk'><source file='/tmp/{dev}.img'/>"
        f"<target dev='{dev}' bus='{bus}'/>{more}</disk>"
    )


_DISK = re.compile(r"(<disk[^>]*>(?:<!--.*?-->)?)(\s*)(.*?</disk>)", re.DOTALL)
_OURS = re.compile(r"/dev/virtlun/|'virtlun[-/]|\"virtlun[-/]|protocol=.lvol")


def with_drivers(xml: str) -> str:
    """Returns a domain as a client sees it that left the <driver> of disks of ours to libvirt."""

    def complete(match: re.Match[str]) -> str:
        start, space, rest = match.groups()
        if not _OURS.search(rest):
            return match[0]
        if "<driver" not in rest:
            return f"{start}{space}<driver name='qemu' type='raw'/>{space}{rest}"
        given = re.search("<driver[^>]*>", rest)
        assert given is not None
        driver = given[0]
        if " name=" not in driver:
            driver = driver.replace("<driver", "<driver name='qemu'")
        if " type=" not in driver:
            driver = re.sub("( name=(['\"])qemu\\2)", r"\1 type='raw'", driver)
        return start + space + rest.replace(given[0], driver)

    before, devices, after = xml.rpartition("<devices>")
    return before + devices + _DISK.sub(complete, after)
