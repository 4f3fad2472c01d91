"""From libvirtd's domain back to the client's."""

from __future__ import annotations

from collections.abc import Iterable

from pydataplane.domain.translate import memory
from pydataplane.domain.xml import carrier as carriers
from pydataplane.domain.xml.disk import shown
from pydataplane.domain.xml.document import Document, Edits, Node, NotXmlError
from pydataplane.domain.xml.metadata import Entry, places
from pydataplane.domain.xml.view import View


def restore(document: Document, views: Iterable[View], *, live: bool) -> str:
    """Takes our traces out of domains of one document and puts the client's disks back."""
    edits = Edits(document)
    for view in views:
        take_out(view, edits, live=live)
    return edits.apply()


def take_out(view: View, edits: Edits, *, live: bool) -> None:
    """Takes our traces out of one domain and puts the client's disks back."""
    document, domain = view.document, view.domain
    metadata = view.salvaged
    carrier = carriers.disk(domain)
    if metadata is not None:
        _insert(view, carrier, metadata.entries, edits, live=live)
        memory.unshare(domain, list(metadata.added), edits)
    if carrier is not None:
        edits.remove(carrier)
    carriers.remove_override(document, domain, edits)
    element = view.element
    if element is not None and element.parent is not None:
        whole = element.parent
        edits.remove(whole if len(whole.children) == 1 else element)


def _insert(
    view: View, carrier: Node | None, entries: Iterable[Entry], edits: Edits, *, live: bool
) -> None:
    """Puts each disk back at its place among the disks that libvirtd has."""
    document = view.document
    present = view.disk_nodes()
    devices = view.domain.child("devices")
    ordered = places(entries, [node.value("target", "dev") for node in present])
    if not present and carrier is None:
        if devices is not None and ordered:
            edits.append(devices, [(0, _text(entry, "", live=live)) for _, entry in ordered])
        return
    for place, entry in ordered:
        anchor = present[min(place, len(present) - 1)] if present else carrier
        assert anchor is not None
        indent = document.indent(anchor)
        text = indent + _text(entry, indent, live=live)
        at_end = bool(present) and place == len(present)
        edits.insert(anchor.end if at_end else document.lead(anchor), text)


def _text(entry: Entry, indent: str, *, live: bool) -> str:
    """Returns the client's <disk>, completed, moved to `indent` and, if it runs, with an alias."""
    try:
        return shown(entry.text, entry.lun.dev, indent, live=live)
    except NotXmlError:
        return ""
