"""How a client sees the block copy of a disk: <mirror>, in the XML of a running domain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydataplane.domain.xml.disk import parse_device
from pydataplane.domain.xml.document import Document, Edits, Lines, NotXmlError, attributes, layout


@dataclass(frozen=True, slots=True)
class Mirror:
    """A copy under way."""

    disk_xml: str
    """A <disk> of the client's, whose source is the destination."""
    ready: bool
    """All is copied: the disk can go on with its copy."""


def mirrored(domain_xml: str, mirrors: Mapping[str, Mirror]) -> str:
    """Returns a running domain's XML, as clients see it, with the copies of its disks.

    `mirrors` are by target dev. Nova pivots when an attribute says that a copy is ready.
    """
    try:
        document = Document(domain_xml)
    except NotXmlError:
        return domain_xml
    edits = Edits(document)
    devices = document.root.child("devices")
    for disk in devices.every("disk") if devices is not None else ():
        target = disk.child("target")
        mirror = mirrors.get(target.attrs.get("dev", "")) if target is not None else None
        if target is None or mirror is None:
            continue
        indent = document.indent(target)
        edits.insert(document.lead(target), indent + layout(_lines(mirror), indent))
    return edits.apply()


def _lines(mirror: Mirror) -> Lines:
    """Returns the element as in libvirt's dumpxml; a file's has attributes of old, too."""
    given = parse_device(mirror.disk_xml)
    source = given.root.child("source") if given is not None else None
    if given is None or source is None:
        return []
    kind = given.root.attrs.get("type", "file")
    own: dict[str, str | None] = {"type": kind}
    if kind == "file":
        own |= {"file": source.attrs.get("file"), "format": "raw"}
    own |= {"job": "copy", "ready": "yes" if mirror.ready else None}
    return [
        (0, f"<mirror{attributes(own)}>"),
        (1, "<format type='raw'/>"),
        (1, f"<source{attributes(dict(source.attrs))}/>"),
        (0, "</mirror>"),
    ]
