"""From libvirtd's domain back to the client's."""

from __future__ import annotations

from collections.abc import Iterable

from pydataplane.domain.translate import memory
from pydataplane.domain.xml import blkdisk
from pydataplane.domain.xml import carrier as carriers
from pydataplane.domain.xml.disk import shown
from pydataplane.domain.xml.document import Document, Edits, Node, NotXmlError
from pydataplane.domain.xml.metadata import Entry, Metadata
from pydataplane.domain.xml.view import View


def restore(
    document: Document, views: Iterable[View], *, live: bool, metadata: Metadata | None = None
) -> str:
    """Takes our traces out of domains of one document and puts the client's disks back.

    Those are the disks of `metadata`; without it, of what each domain has.
    """
    edits = Edits(document)
    for view in views:
        take_out(view, edits, live=live, metadata=metadata)
    return edits.apply()


def take_out(view: View, edits: Edits, *, live: bool, metadata: Metadata | None = None) -> None:
    """Takes our traces out of one domain and puts the client's disks back; see `restore`."""
    document, domain = view.document, view.domain
    metadata = metadata or view.salvaged
    carrier = carriers.disk(domain)
    _put_back(view, carrier, metadata, edits, live=live)
    if metadata is not None:
        memory.unshare(domain, list(metadata.added), edits)
    if carrier is not None:
        edits.remove(carrier)
    carriers.remove_override(document, domain, edits)
    element = view.element
    if element is not None and element.parent is not None:
        whole = element.parent
        edits.remove(whole if len(whole.children) == 1 else element)


def _put_back(
    view: View, carrier: Node | None, metadata: Metadata | None, edits: Edits, *, live: bool
) -> None:
    """Puts each disk back at its place among the disks that libvirtd has."""
    document = view.document
    devices = view.domain.child("devices")
    placed = view.placed(metadata)
    kept = {id(node) for node, _ in placed if node is not None}
    for present in view.disk_nodes():
        if id(present) not in kept:  # a device of ours that our metadata knows nothing of
            edits.remove(present)
    # A LUN is written before the next disk that libvirtd has, or behind the last.
    last: Node | None = None
    waiting: list[Entry] = []
    for node, entry in placed:
        if node is None:
            assert entry is not None
            waiting.append(entry)
            continue
        indent = document.indent(node)
        for lun in waiting:
            edits.insert(document.lead(node), indent + _text(view, lun, None, indent, live=live))
        waiting = []
        if entry is not None:
            edits.replace(node.start, node.end, _text(view, entry, node, indent, live=live))
        last = node
    for lun in waiting:
        if last is not None:
            indent = document.indent(last)
            edits.insert(last.end, indent + _text(view, lun, None, indent, live=live))
        elif carrier is not None:
            indent = document.indent(carrier)
            text = indent + _text(view, lun, None, indent, live=live)
            edits.insert(document.lead(carrier), text)
        elif devices is not None:
            edits.append(devices, [(0, _text(view, lun, None, "", live=live))])


def _text(view: View, entry: Entry, node: Node | None, indent: str, *, live: bool) -> str:
    """Returns the client's <disk>, completed, moved to `indent` and, if it runs, with an alias.

    `node` is libvirtd's device of one that is a virtio-blk disk: address and alias are as there.
    """
    try:
        if node is None:
            return shown(entry.text, entry.lun.dev, indent, live=live)
        given = blkdisk.shown(entry.text, view.document, node)
        return shown(given, entry.lun.dev, indent, live=live)
    except NotXmlError:
        return ""
