"""The carrier: the vhostuser disk and the <qemu:override> that make our controller.

libvirt allocates its PCI address, owns its character device and migrates it; the override turns
the vhost-user-blk-pci that libvirt would make into vhost-user-scsi-pci. Tried with libvirt 9.0 and
11.3.

A controller without LUNs need not be the target's: QEMU's own virtio-scsi-pci takes over the state
of a vhost-user-scsi-pci at the same PCI address, and the other way round, for both are the same
virtio device to the guest and in the stream. So a guest that was saved with a controller, or comes
from another host, goes on where no target answers: the override then says virtio-scsi-pci and takes
the character device away from it. That is still made by libvirt, hence a socket that cannot be
there, and <reconnect>, with which QEMU does not mind that. Tried with QEMU 7.2 and 10.0.

QEMU's own does not offer VIRTIO_SCSI_F_T10_PI: a guest that was offered it keeps its controller.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.model import RECONNECT_S, Settings
from pydataplane.domain.names import CARRIER_ALIAS, QEMU_NAMESPACE
from pydataplane.domain.xml.boot import Boot
from pydataplane.domain.xml.document import Document, Edits, Lines, Node, attributes, escape, number

DRIVER = "vhost-user-scsi-pci"
STAND_IN = "virtio-scsi-pci"
NOWHERE = "/dev/null/virtlun"
"""The path of the socket of a stand-in: nobody can ever make it."""
NOWHERE_S = 86400
"""How often QEMU looks for that, seconds."""
STAND_IN_LACKS = ("chardev", "bootindex")
"""Properties that libvirt gives to the disk, and that virtio-scsi-pci does not have."""


@dataclass(frozen=True, slots=True)
class Carrier:
    """What a translated domain says of the controller."""

    socket: str
    num_queues: int
    boot_target: int
    """Property boot_tpgt: the SCSI target that the firmware boots."""
    boot: Boot
    """`dev` is not known from here and None."""
    stands_in: bool = False
    """It is QEMU's own virtio-scsi-pci: nothing can be attached to it."""
    protection: bool = False
    """Property t10_pi: the guest is offered VIRTIO_SCSI_F_T10_PI."""


def disk(domain: Node) -> Node | None:
    """Returns the carrier's <disk>, or None."""
    devices = domain.child("devices")
    if devices is None:
        return None
    return next((d for d in devices.every("disk") if is_carrier(d)), None)


def is_carrier(node: Node) -> bool:
    """Returns whether a <disk> is our carrier."""
    return node.attrs.get("type") == "vhostuser" and node.value("alias", "name") == CARRIER_ALIAS


def override(domain: Node) -> Node | None:
    """Returns our <qemu:device> in the domain's overrides, or None."""
    for node in domain.every("override", QEMU_NAMESPACE):
        for device in node.every("device", QEMU_NAMESPACE):
            if device.attrs.get("alias") == CARRIER_ALIAS:
                return device
    return None


def read(domain: Node) -> Carrier | None:
    """Reads disk and override; None if there is no carrier."""
    node = disk(domain)
    if node is None:
        return None
    properties: dict[str, str] = {}
    device = override(domain)
    if device is not None:
        for item in device.walk():
            if item.name == "property":
                properties[item.attrs.get("name", "")] = item.attrs.get("value", "")
    order = node.value("boot", "order")
    dev = node.value("target", "dev") or ""
    return Carrier(
        socket=node.value("source", "path") or "",
        num_queues=number(properties.get("num_queues")) or 1,
        boot_target=number(properties.get("boot_tpgt")) or 0,
        boot=Boot(None, number(order) or None, not dev.startswith("vd")),
        stands_in=properties.get("driver") == STAND_IN,
        protection=properties.get("t10_pi") == "true",
    )


def reconnect_s(domain: Node, settings: Settings) -> int:
    """Returns the reconnect interval that the domain's QEMU is to have, seconds; 0 for none."""
    if settings.reconnect_s is not None:
        return settings.reconnect_s
    return RECONNECT_S if settings.qemu_reconnects(*qemu_of(domain)) else 0


def protection(domain: Node, settings: Settings) -> bool:
    """Returns whether the domain's guest is to carry protection information; needs its QEMU."""
    return settings.protection and settings.qemu_protects(*qemu_of(domain)) is True


def check_protection(domain: Node, settings: Settings) -> None:
    """Refuses a domain whose guest carries protection information, where its QEMU does not.

    Raises:
        TranslateError: UNSUPPORTED, it is known not to.
    """
    carrier = read(domain)
    if carrier is None or not carrier.protection:
        return
    path, arch = qemu_of(domain)
    if settings.qemu_protects(path, arch) is False:
        node = domain.child("name")
        raise TranslateError(
            Refusal.UNSUPPORTED,
            f"domain '{node.text.strip() if node is not None else ''}' has a virtlun controller"
            " with protection information, which takes vhost-user-scsi's property t10_pi; its QEMU"
            f" ({path or 'the default one'}) has none: use QEMU 7.2 or newer",
        )


def qemu_of(domain: Node) -> tuple[str | None, str | None]:
    """Returns path of <emulator> and architecture of a domain, None for what it lacks."""
    emulator, kind = domain.at("devices", "emulator"), domain.at("os", "type")
    path = emulator.text.strip() if emulator is not None else ""
    arch = kind.attrs.get("arch") if kind is not None else None
    return path or None, arch or None


def reconnect_s_of(source: Node) -> int:
    """Returns the reconnect interval in a carrier's <source>, seconds; 0 for none."""
    node = source.child("reconnect")
    if node is None or node.attrs.get("enabled") != "yes":
        return 0
    return number(node.attrs.get("timeout")) or 0


def source_lines(socket: str, again_s: int) -> Lines:
    """Returns the carrier's <source>; `again_s` is the reconnect interval, seconds, 0 for none."""
    source = attributes({"type": "unix", "path": socket})
    if again_s <= 0:
        return [(0, f"<source{source}/>")]
    again = f"<reconnect enabled='yes' timeout='{again_s}'/>"
    return [(0, f"<source{source}>"), (1, again), (0, "</source>")]


def disk_lines(carrier: Carrier, dev: str, address: str | None, again_s: int) -> Lines:
    """Returns the carrier's <disk>; `again_s` is the reconnect interval, seconds, 0 for none."""
    source = source_lines(carrier.socket, NOWHERE_S if carrier.stands_in else again_s)
    result = [(0, "<disk type='vhostuser' device='disk'>"), (1, "<driver name='qemu' type='raw'/>")]
    result += [(depth + 1, line) for depth, line in source]
    result.append((1, f"<target dev='{escape(dev)}' bus='virtio'/>"))
    if carrier.boot.order is not None:
        result.append((1, f"<boot order='{carrier.boot.order}'/>"))
    result.append((1, f"<alias name='{CARRIER_ALIAS}'/>"))
    if address is not None:
        result.append((1, address))
    return [*result, (0, "</disk>")]


def add_override(domain: Node, carrier: Carrier, edits: Edits) -> None:
    """Adds our device to the domain's <qemu:override>, or adds one."""
    present = domain.child("override", QEMU_NAMESPACE)
    device = device_lines(carrier, "qemu:" if present is None else present.prefix)
    if present is not None:
        edits.append(present, device)
        return
    deeper = [(depth + 1, line) for depth, line in device]
    head = f"<qemu:override xmlns:qemu='{QEMU_NAMESPACE}'>"
    edits.append(domain, [(0, head), *deeper, (0, "</qemu:override>")])


def device_lines(carrier: Carrier, prefix: str) -> Lines:
    """Returns our <qemu:device>; `prefix` is that of QEMU_NAMESPACE there, with its colon."""
    driver = STAND_IN if carrier.stands_in else DRIVER
    device = [
        (0, f"<{prefix}device alias='{CARRIER_ALIAS}'>"),
        (1, f"<{prefix}frontend>"),
        (2, f"<{prefix}property name='driver' type='string' value='{driver}'/>"),
        (2, f"<{prefix}property name='num_queues' type='unsigned' value='{carrier.num_queues}'/>"),
    ]
    if carrier.stands_in:
        device += [(2, f"<{prefix}property name='{n}' type='remove'/>") for n in STAND_IN_LACKS]
    elif carrier.boot_target:
        value = carrier.boot_target
        device.append((2, f"<{prefix}property name='boot_tpgt' type='unsigned' value='{value}'/>"))
    if carrier.protection and not carrier.stands_in:
        device.append((2, f"<{prefix}property name='t10_pi' type='bool' value='true'/>"))
    return [*device, (1, f"</{prefix}frontend>"), (0, f"</{prefix}device>")]


def remove_override(document: Document, domain: Node, edits: Edits) -> None:
    """Takes our override out, and the declaration of the namespace if nothing else needs it.

    libvirtd declares the namespace on <domain> only for what it holds; a declaration that was
    there before us stands beside one on our own <override>, which goes with it.
    """
    device = override(domain)
    if device is None or device.parent is None:
        return
    whole = device.parent
    if len(whole.children) > 1:
        edits.remove(device)
        return
    edits.remove(whole)
    if whole.declares:
        return
    used = any(
        node.namespace == QEMU_NAMESPACE or any(a.startswith(QEMU_NAMESPACE) for a in node.attrs)
        for node in domain.walk()
        if not whole.start <= node.start < whole.end
    )
    if used:
        return
    tag = document.data[domain.start : domain.inner_start]
    uri = re.escape(QEMU_NAMESPACE.encode())
    found = re.search(rb"\s+xmlns:[^\s=]+\s*=\s*([\"'])" + uri + rb"\1", tag)
    if found is not None:
        edits.replace(domain.start + found.start(), domain.start + found.end(), "")


def address(document: Document, domain: Node) -> str | None:
    """Returns the carrier's PCI <address> as written, or None."""
    node = disk(domain)
    found = node.child("address") if node is not None else None
    return None if found is None else document.source(found)


def address_taken(domain: Node, text: str) -> bool:
    """Returns whether a device of the domain sits at the PCI address that `text` gives."""
    wanted = _pci(Document(text).root)
    devices = domain.child("devices")
    return devices is not None and any(
        node.name == "address" and node.attrs.get("type") == "pci" and _pci(node) == wanted
        for device in devices.children
        for node in device.children
    )


def _pci(node: Node) -> tuple[int, ...]:
    """Returns domain, bus, slot and function of a PCI <address>; -1 for what is no number."""
    result = []
    for name in ("domain", "bus", "slot", "function"):
        try:
            result.append(int(node.attrs.get(name, "0"), 0))
        except ValueError:
            result.append(-1)
    return tuple(result)
