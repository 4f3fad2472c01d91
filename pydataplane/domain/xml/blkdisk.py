"""The vhostuser disk that a virtio-blk disk of ours is to libvirtd: a device of QEMU's as any.

libvirt plugs it, gives it PCI address and alias, and knows it by the client's target dev. What it
does not know of such a disk (serial, readonly, discard, ...) stands in our metadata and is the
target's. It is ours by its socket, which is named after the domain's controller and the disk's
number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydataplane.domain.model import RECONNECT_S, LunPlan, Settings
from pydataplane.domain.names import CONTROLLER_PREFIX, blk_controller_name
from pydataplane.domain.xml import disk as disks
from pydataplane.domain.xml.carrier import source_lines
from pydataplane.domain.xml.document import (
    Document,
    Edits,
    Lines,
    Node,
    escape,
    layout,
    number,
)

MAX_QUEUES = 64
"""Request queues that a controller of the target's has."""
QUEUE_SIZES = frozenset((128, 256, 512, 1024))
"""Entries that a queue can have: QEMU's most, and no fewer than the descriptors that a request of
`seg_max` segments takes (virtio 1.3, 2.7.5.3.1)."""
_SOCKET = re.compile(rf".*/({CONTROLLER_PREFIX}[0-9a-f-]{{36}})\.(\d{{1,3}})")


def number_of(node: Node) -> int | None:
    """Returns the number of a <disk> that is a virtio-blk disk of ours; None of any other."""
    if node.attrs.get("type") != "vhostuser":
        return None
    found = _SOCKET.fullmatch(node.value("source", "path") or "")
    return None if found is None else int(found[2])


def is_of(node: Node, lun: LunPlan) -> bool:
    """Returns whether a <disk> at libvirtd is this disk of ours."""
    return (
        lun.front == "blk"
        and number_of(node) == lun.target
        and node.value("target", "dev") == lun.dev
    )


def reconnect_s(settings: Settings) -> int:
    """Returns how often QEMU is to connect again, seconds; 0: not. Any version of it can."""
    return RECONNECT_S if settings.reconnect_s is None else settings.reconnect_s


def count(asked: Mapping[str, str], queues: int) -> int:
    """Returns the request queues of a device whose <disk> asks for these; else `queues`.

    0 is as libvirt's: it does not ask. Of more than MAX_QUEUES it has so many.
    """
    return min(number(asked.get("queues")) or queues, MAX_QUEUES)


def disk_lines(
    document: Document,
    node: Node,
    lun: LunPlan,
    controller_socket: str,
    queues: int,
    again_s: int,
    had: Mapping[str, str] | None = None,
) -> Lines:
    """Returns what libvirtd gets for a client's <disk>.

    Of the client's it has what is libvirt's to do: boot order, alias and PCI address.

    Args:
        document: the client's XML, of the disk or its domain.
        node: the disk in it.
        lun: what it is planned to be.
        controller_socket: path of the domain's own controller's socket.
        queues: request queues of the device where the client did not choose.
        again_s: the reconnect interval, seconds; 0 for none.
        had: as `disk.queues`, of the device that a guest which goes on has.
    """
    socket = blk_controller_name(controller_socket, lun.target)
    return device_lines(document, node, lun.dev, socket, queues, again_s, had)


def device_lines(
    document: Document,
    node: Node,
    dev: str,
    socket: str,
    queues: int,
    again_s: int,
    had: Mapping[str, str] | None = None,
) -> Lines:
    """Returns the vhost-user-blk device that takes a <disk>'s place, as `disk_lines`.

    `dev` is its target dev, `socket` the path of its controller's socket.
    """
    asked = disks.queues(node) if had is None else had
    words = {"name": "qemu", "type": "raw"} | {**asked, "queues": str(count(asked, queues))}
    driver = "".join(f" {name}='{escape(value)}'" for name, value in words.items())
    result: Lines = [
        (0, "<disk type='vhostuser' device='disk'>"),
        (1, f"<driver{driver}/>"),
    ]
    result += [(depth + 1, line) for depth, line in source_lines(socket, again_s)]
    result.append((1, f"<target dev='{dev}' bus='virtio'/>"))
    boot, alias, address = node.child("boot"), node.child("alias"), node.child("address")
    if boot is not None:
        result.append((1, document.source(boot)))
    if alias is not None and alias.attrs.get("name", "").startswith("ua-"):
        result.append((1, document.source(alias)))
    if address is not None and address.attrs.get("type") == "pci":
        result.append((1, document.source(address)))
    return [*result, (0, "</disk>")]


def shown(text: str, own: Document, node: Node) -> str:
    """Returns a client's <disk> with the alias and PCI address that libvirtd has given it.

    `text` is the client's, `node` libvirtd's disk in `own`.
    """
    document = Document(text)
    edits = Edits(document)
    given = [
        (name, own.source(child))
        for name in ("alias", "address")
        if (child := node.child(name)) is not None
    ]
    kept = [child for name, _ in given for child in document.root.every(name)]
    for child in kept:
        edits.remove(child)
    rest = [child for child in document.root.children if child not in kept]
    words: Lines = [(0, source) for _, source in given]
    if rest and words:
        indent = document.indent(rest[-1])
        edits.insert(rest[-1].end, "".join(indent + layout([line], indent) for line in words))
    return edits.apply()
