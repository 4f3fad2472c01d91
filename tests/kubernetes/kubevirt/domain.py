"""The libvirt domain of a VMI, as KubeVirt's converter and launcher make it. Pure functions.

`convert` was written beside the XML that KubeVirt v1.9's own converter makes of such a VMI (block
and file disks on virtio and scsi, one masquerade interface, no hot-plugged volume), and gives the
same elements. Ours alone, since no pod network and no KVM are here: the interface is QEMU's user
network, and a second serial port carries the test guest's commands.

virt-launcher asks the domain hooks more than once for one start: to get PCIe ports for hot-plug it
defines the domain, reads what libvirt made of it, and goes on from there (`read_back`). Of a disk
its type (api.Disk) keeps what `DISK` says and no more, and it does not know qemu:override at all.
`encode` is libvirtxml's part: an XML document with the namespaces written as Go's encoder does, no
comments and no space between elements. It does not drop what libvirtxml does not know.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from lxml import etree

QEMU_NAMESPACE = "http://libvirt.org/schemas/domain/qemu/1.0"
PRIVATE = "/var/run/kubevirt-private"
MIB = 1 << 20
MODEL = "virtio-non-transitional"
#: Total PCIe ports and the least of them that stay free.
PORTS, FREE_PORTS = 8, 3

#: What api.Disk and api.DiskSource have, as attributes and elements.
DISK = (
    {"device", "snapshot", "type", "model"},
    {
        *("source", "target", "serial", "driver", "readonly", "auth", "alias", "backingStore"),
        *("boot", "address", "blockio", "filesystemOverhead", "capacity", "shareable"),
    },
)
SOURCE = (
    {"dev", "file", "startupPolicy", "protocol", "name"},
    {"host", "reservations", "slices", "dataStore"},
)

DOMAIN = """\
<domain type="qemu">
  <name>{name}</name>
  <metadata><kubevirt xmlns="http://kubevirt.io"><uid>{uid}</uid></kubevirt></metadata>
  <memory unit="b">{memory}</memory>
  <vcpu placement="static">{cores}</vcpu>
  <sysinfo type="smbios">
    <system>
      <entry name="uuid">{uuid}</entry>
      <entry name="manufacturer">KubeVirt</entry>
      <entry name="family">KubeVirt</entry>
      <entry name="product">None</entry>
    </system>
  </sysinfo>
  <os>
    <type arch="x86_64" machine="q35">hvm</type>
    <smbios mode="sysinfo"/>
  </os>
  <features><acpi/></features>
  <cpu mode="custom">
    <model>qemu64</model>
    <topology sockets="1" cores="{cores}" threads="1"/>
  </cpu>
  <devices>
    <controller type="usb" index="0" model="none"/>
    <controller type="scsi" index="0" model="{model}"/>
    <controller type="virtio-serial" index="0" model="{model}"/>
    <serial type="unix">
      <source mode="bind" path="{private}/virt-serial0"/>
      <target port="0"/>
      <log file="{private}/virt-serial0-log" append="on"/>
    </serial>
    <serial type="unix">
      <source mode="bind" path="{private}/agent"/>
      <target port="1"/>
    </serial>
    <console type="pty"><target type="serial" port="0"/></console>
    <channel type="unix"><target type="virtio" name="org.qemu.guest_agent.0"/></channel>
    <graphics type="vnc"><listen type="socket" socket="{private}/virt-vnc"/></graphics>
    <video><model type="vga" heads="1" vram="16384"/></video>
    <memballoon model="{model}" freePageReporting="on"><stats period="10"/></memballoon>
  </devices>
</domain>
"""

Element = etree._Element


def convert(vmi: Mapping[str, Any]) -> Element:
    """Returns the domain of a VMI, in whose volumes claims of mode Filesystem are hostDisks.

    KeyError or ValueError where the VMI has what this package does not know.
    """
    metadata, spec = vmi["metadata"], vmi["spec"]
    domain = parse(
        DOMAIN.format(
            name=f"{metadata['namespace']}_{metadata['name']}",
            uid=metadata["uid"],
            uuid=metadata["uid"],  # the default of spec.domain.firmware.uuid is made of the name
            memory=_bytes(spec["domain"]["memory"]["guest"]),
            cores=spec["domain"].get("cpu", {}).get("cores", 1),
            private=f"{PRIVATE}/{metadata['uid']}",
            model=MODEL,
        ).encode()
    )
    devices = _devices(domain)
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    buses: dict[str, int] = {}
    for disk in spec["domain"]["devices"].get("disks", []):
        devices.append(_disk(disk, volumes[disk["name"]], buses))
    for interface in spec["domain"]["devices"].get("interfaces", []):
        alias = f"ua-{interface['name']}"
        made = etree.SubElement(devices, "interface", type="user")
        etree.SubElement(made, "model", type=MODEL)
        etree.SubElement(made, "rom", enabled="no")
        etree.SubElement(made, "alias", name=alias)
    return domain


def _disk(disk: Mapping[str, Any], volume: Mapping[str, Any], buses: dict[str, int]) -> Element:
    name = disk["name"]
    bus = disk.get("disk", {}).get("bus", "virtio")
    prefix = {"virtio": "vd", "scsi": "sd", "sata": "sd"}[bus]
    number = buses[prefix] = buses.get(prefix, -1) + 1
    if "persistentVolumeClaim" in volume:
        kind, source = "block", {"dev": f"/dev/{name}"}
    else:
        kind, source = "file", {"file": volume["hostDisk"]["path"]}
    made = etree.Element("disk", type=kind, device="disk")
    if bus == "virtio":
        made.set("model", MODEL)
    driver = {"name": "qemu", "type": "raw", "cache": "none", "error_policy": "stop"}
    driver["discard"] = "unmap"
    if kind == "block":
        driver["io"] = "native"
    etree.SubElement(made, "driver", driver)
    etree.SubElement(made, "source", source)
    etree.SubElement(made, "target", dev=f"{prefix}{chr(ord('a') + number)}", bus=bus)
    if "serial" in disk:
        etree.SubElement(made, "serial").text = disk["serial"]
    if "bootOrder" in disk:
        etree.SubElement(made, "boot", order=str(disk["bootOrder"]))
    if custom := disk.get("blockSize", {}).get("custom"):
        sizes = {f"{kind}_block_size": str(custom[kind]) for kind in ("logical", "physical")}
        etree.SubElement(made, "blockio", sizes)
    etree.SubElement(made, "alias", name=f"ua-{name}")
    if bus != "virtio":
        unit = {"type": "drive", "controller": "0", "bus": "0", "unit": str(number)}
        etree.SubElement(made, "address", unit)
    return made


def parse(text: bytes) -> Element:
    """Returns a domain without the space between its elements, and without comments."""
    parser = etree.XMLParser(remove_blank_text=True, remove_comments=True, resolve_entities=False)
    return etree.fromstring(text, parser)


def with_placeholders(domain: Element, count: int) -> Element:
    """Returns a copy with interfaces that are only there to make libvirt add PCIe ports."""
    made = copy.deepcopy(domain)
    for number in range(count):
        interface = etree.SubElement(_devices(made), "interface", type="ethernet")
        device = f"placeholder-{number}"
        etree.SubElement(interface, "target", dev=device, managed="no")
        etree.SubElement(interface, "model", type=MODEL)
    return made


def read_back(wanted: Element, defined: str) -> Element:
    """Returns `wanted` with the devices of what libvirt has (its inactive XML), as api.Devices.

    The interfaces stay the wanted ones, so that placeholders go.
    """
    made = copy.deepcopy(wanted)
    found = _devices(parse(defined.encode()))
    for interface in found.findall("interface"):
        found.remove(interface)
    for interface in _devices(wanted).findall("interface"):
        found.append(copy.deepcopy(interface))
    made.replace(_devices(made), found)
    return as_spec(made)


def as_spec(domain: Element) -> Element:
    """Returns a copy with what KubeVirt's own types keep of it."""
    made = copy.deepcopy(domain)
    for foreign in made.findall(f"{{{QEMU_NAMESPACE}}}override"):
        made.remove(foreign)
    for disk in _devices(made).findall("disk"):
        _keep(disk, *DISK)
        source = disk.find("source")
        if source is not None:
            _keep(source, *SOURCE)
            if not source.attrib and not len(source):
                disk.remove(source)
    return made


def _keep(element: Element, attributes: set[str], children: set[str]) -> None:
    for name in list(element.attrib):
        if name not in attributes:
            del element.attrib[name]
    for child in list(element):
        if child.tag not in children:
            element.remove(child)


def with_ports(domain: Element, interfaces: int) -> Element:
    """Returns a copy with further PCIe root ports, after those that libvirt made."""
    made = copy.deepcopy(domain)
    devices = _devices(made)
    addresses = devices.findall("*/address[@type='pci']")
    used = sum(address.get("bus") not in (None, "0x00") for address in addresses)
    indices = [int(one.get("index", "0")) for one in devices.findall("controller[@type='pci']")]
    wanted = max(PORTS - used, FREE_PORTS) - placeholders(interfaces)
    for number in range(max(0, wanted)):
        index = max(indices, default=0) + 1 + number
        etree.SubElement(
            devices, "controller", type="pci", index=str(index), model="pcie-root-port"
        )
    return made


def placeholders(interfaces: int) -> int:
    """Returns how many placeholder interfaces a VM with so many interfaces gets."""
    return max(0, 4 - interfaces) if interfaces else 0


def encode(domain: Element) -> bytes:
    """Returns the document as libvirtxml writes it."""
    return _go(domain, "").encode()


def _go(element: Element, namespace: str) -> str:
    """Returns an element in Go's manner: a namespace is declared where it changes."""
    name = etree.QName(element)
    text = f"<{name.localname}"
    if (name.namespace or "") != namespace:
        text += f' xmlns="{name.namespace or ""}"'
    for key, value in element.attrib.items():
        text += f' {key!s}="{_escape(str(value))}"'
    inner = _escape(element.text or "") if not len(element) or (element.text or "").strip() else ""
    inner += "".join(
        _go(child, name.namespace or "") for child in element if isinstance(child.tag, str)
    )
    return f"{text}>{inner}</{name.localname}>"


def _escape(text: str) -> str:
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&#34;")):
        text = text.replace(character, entity)
    return text


def _devices(domain: Element) -> Element:
    found = domain.find("devices")
    assert found is not None
    return found


def _bytes(quantity: str) -> int:
    units = {"Ki": 1 << 10, "Mi": MIB, "Gi": 1 << 30}
    return int(quantity[:-2]) * units[quantity[-2:]]
