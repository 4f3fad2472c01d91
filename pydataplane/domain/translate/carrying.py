"""A domain whose disks are the target's already, for callers that keep account of them elsewhere.

KubeVirt's hook: the disks leave the domain, the carrier and shared memory come in, or each becomes
a vhost-user-blk device; everything else keeps its bytes. Nothing is written into <metadata>, which
is KubeVirt's, so there is no way back; a domain is made anew for each run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.model import Settings
from pydataplane.domain.names import MAX_SOCKET_PATH_BYTES
from pydataplane.domain.translate import memory
from pydataplane.domain.translate.current import Current
from pydataplane.domain.translate.defining import place, queues
from pydataplane.domain.xml import blkdisk
from pydataplane.domain.xml import boot as boots
from pydataplane.domain.xml import carrier as carriers
from pydataplane.domain.xml import disk as disks
from pydataplane.domain.xml import view as views
from pydataplane.domain.xml.carrier import Carrier
from pydataplane.domain.xml.disk import Disk
from pydataplane.domain.xml.document import Edits, layout
from pydataplane.domain.xml.view import View


def carry(
    domain_xml: str,
    socket: str,
    luns: Mapping[str, int],
    settings: Settings,
    boot_disk: str | None = None,
) -> str:
    """Puts a controller into a domain, in the place of the disks that are its LUNs.

    The controller boots what the firmware would boot of those disks. A domain that has the carrier
    comes back with a whole one: KubeVirt defines a domain that it starts up to three times, each
    time made from what libvirt had of it before, and its own types know neither the source of such
    a disk nor qemu:override.

    Args:
        domain_xml: of a QEMU or KVM domain with PCI.
        socket: the controller's, as QEMU sees it.
        luns: alias of each disk to take out (`ua-...`), and its SCSI target.
        settings: how many queues, and how QEMU reconnects.
        boot_disk: alias of the one that the controller boots, for a domain that has the carrier
            already and the disks no more; None: target 0.

    Raises:
        TranslateError: BAD_XML, it is no such domain or lacks one of the disks; UNSUPPORTED, its
            memory cannot be shared, or the path is too long for a socket.
    """
    view = _read(domain_xml)
    domain = view.domain
    _check_path(socket)
    if view.carrier is not None:
        return _renewed(view, view.carrier, socket, luns.get(boot_disk or "", 0), settings)
    nodes = view.disk_nodes()
    read = [disks.read(node) for node in nodes]
    _check_all_there(view, luns.keys(), read)
    edits = Edits(view.document)
    memory.share(domain, edits)
    boot = boots.choose([(disk, disk.alias in luns) for disk in read])
    booted = next((disk.alias for disk in read if disk.dev == boot.dev), None)
    target = luns.get(booted or "", 0)
    carrier = Carrier(socket, queues(domain, settings), target, boot)
    for node, disk in zip(nodes, read, strict=True):
        if disk.alias in luns:
            edits.remove(node)
    place(view, nodes, carrier, read, Current(), settings, edits)
    carriers.add_override(domain, carrier, edits)
    return edits.apply()


def carry_blk(domain_xml: str, sockets: Mapping[str, str], settings: Settings) -> str:
    """Makes vhost-user-blk devices of disks, where QEMU has no vhost-user-scsi.

    Each keeps its place, boot order, alias and address. One that is a vhostuser disk already comes
    back whole, as `carry` says of the carrier.

    Args:
        domain_xml: of a QEMU or KVM domain with PCI.
        sockets: alias of each disk (`ua-...`), and its socket as QEMU sees it.
        settings: how many queues, and how QEMU reconnects.

    Raises:
        TranslateError: as `carry`.
    """
    view = _read(domain_xml)
    nodes = view.disk_nodes()
    read = [disks.read(node) for node in nodes]
    _check_all_there(view, sockets.keys(), read)
    edits = Edits(view.document)
    memory.share(view.domain, edits)
    again_s = blkdisk.reconnect_s(settings)
    count = queues(view.domain, settings)
    for node, disk in zip(nodes, read, strict=True):
        socket = sockets.get(disk.alias or "")
        if socket is None:
            continue
        _check_path(socket)
        dev = node.value("target", "dev") or "vda"
        lines = blkdisk.device_lines(view.document, node, dev, socket, count, again_s)
        edits.replace(node.start, node.end, layout(lines, view.document.indent(node)))
    return edits.apply()


def _read(domain_xml: str) -> View:
    """Returns a domain that can have devices of ours."""
    view = views.parse(domain_xml)
    kind = view.domain.at("os", "type") if view is not None else None
    if view is None or kind is None or view.domain.attrs.get("type") not in ("qemu", "kvm"):
        raise TranslateError(
            Refusal.BAD_XML, "the hook was not given the XML of a QEMU domain; see its caller's log"
        )
    if kind.attrs.get("arch", "").startswith("s390"):
        raise TranslateError(
            Refusal.UNSUPPORTED,
            f"domain '{view.name}' cannot have a virtlun controller: {kind.attrs['arch']} has no"
            " PCI; use volumes of the kernel face alone",
        )
    return view


def _check_path(socket: str) -> None:
    if len(socket.encode()) > MAX_SOCKET_PATH_BYTES:
        raise TranslateError(
            Refusal.UNSUPPORTED,
            f"the socket's path {socket} is longer than {MAX_SOCKET_PATH_BYTES} bytes; mount the"
            " folder at a shorter one",
        )


def _check_all_there(view: View, aliases: Set[str], read: Sequence[Disk]) -> None:
    if missing := aliases - {disk.alias for disk in read if disk.alias}:
        raise TranslateError(
            Refusal.BAD_XML,
            f"domain '{view.name}' has no disk {', '.join(sorted(missing))}, whose volume its pod's"
            " target serves; has another hook taken it out?",
        )


def _renewed(view: View, present: Carrier, socket: str, target: int, settings: Settings) -> str:
    """Returns the domain with a whole carrier, where the one that it has was."""
    node = carriers.disk(view.domain)
    assert node is not None
    if present.socket == socket and carriers.override(view.domain) is not None:
        return view.document.data.decode()
    carrier = Carrier(socket, queues(view.domain, settings), target, present.boot)
    edits = Edits(view.document)
    memory.share(view.domain, edits)
    address = carriers.address(view.document, view.domain)
    dev = node.value("target", "dev") or "vdzzzz"
    again_s = carriers.reconnect_s(view.domain, settings)
    lines = carriers.disk_lines(carrier, dev, address, again_s)
    edits.replace(node.start, node.end, layout(lines, view.document.indent(node)))
    if carriers.override(view.domain) is None:
        carriers.add_override(view.domain, carrier, edits)
    return edits.apply()
