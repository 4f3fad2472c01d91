"""Reads a client's request for a snapshot: which disks of ours it takes, and what libvirtd takes.

libvirtd knows nothing of the disks of ours: what it gets lists none of them. Where there is nothing
in a snapshot but them, libvirtd has nothing to take; it is told of the snapshot then by a
definition of one that exists (VIR_DOMAIN_SNAPSHOT_CREATE_REDEFINE).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.model import LunPlan, Settings
from pydataplane.domain.translate.recognising import check_encoding
from pydataplane.domain.translate.snapshotxml import DiskSnapshot, note, renamed, text_of
from pydataplane.domain.xml import metadata as metadatas
from pydataplane.domain.xml import view as views
from pydataplane.domain.xml.disk import parse_device, read
from pydataplane.domain.xml.document import Document, Edits, Node, NotXmlError, escape
from pydataplane.domain.xml.view import View

WITHOUT = ("no", "manual")
"""virDomainSnapshotLocation of disks that are left out."""


@dataclass(frozen=True, slots=True)
class Request:
    """A client's <domainsnapshot> of a domain with a controller of ours."""

    name: str | None
    description: str | None
    luns: tuple[LunPlan, ...]
    """The disks of ours that are in it."""
    others: tuple[str, ...]
    """Target devs of libvirtd's own disks that are in it."""
    left: tuple[str, ...]
    """Target devs of those that a guest can write and that are not."""
    memory: str | None
    """What the client says of the memory: no, internal, external."""
    memory_file: str | None
    xml: str
    """What libvirtd is to get: without disks of ours."""

    def named(self, name: str) -> Request:
        """Returns a copy with this name, also in its XML."""
        return self if self.name else replace(self, name=name, xml=_with(self.xml, "name", name))

    def with_memory(self, file: str) -> Request:
        """Returns a copy that has the memory in a file, also in its XML."""
        if self.memory is not None:
            return self
        text = f"<memory snapshot='external' file='{escape(file)}'/>"
        document = Document(self.xml)
        edits = Edits(document)
        old = document.root.child("memory")
        if old is not None:
            edits.remove(old)
        edits.append(document.root, [(0, text)])
        return replace(self, memory="external", memory_file=file, xml=edits.apply())


def snapshot_requested(xml: str, domain_xml: str, settings: Settings) -> Request | None:
    """Reads what a client asks for.

    Args:
        xml: the client's <domainsnapshot>.
        domain_xml: libvirtd's XML (untranslated) of the domain as it is.
        settings: of the configuration.

    Returns:
        None if either is something else: libvirtd's answer to the call itself says why.

    Raises:
        TranslateError: UNSUPPORTED, a disk of ours is to be held in a file.
    """
    check_encoding(xml)
    domain = views.parse(domain_xml)
    try:
        document = Document(xml)
    except NotXmlError:
        return None
    root = document.root
    if domain is None or root.name != "domainsnapshot" or root.namespace:
        return None
    luns, mine = _ours(domain, listed(root), settings)
    edits = Edits(document)
    for node in mine:
        edits.remove(node)
    others, left = _others(domain, [node for node in listed(root) if node not in mine])
    file = root.value("memory", "file")
    return Request(
        name=text_of(root, "name"),
        description=text_of(root, "description"),
        luns=luns,
        others=others,
        left=left,
        memory=root.value("memory", "snapshot") or (None if file is None else "external"),
        memory_file=file,
        xml=edits.apply(),
    )


def listed(root: Node) -> list[Node]:
    """Returns the disks that a <domainsnapshot> lists."""
    disks = root.child("disks")
    return list(disks.every("disk")) if disks is not None else []


def names_of(lun: LunPlan, settings: Settings) -> tuple[str, ...]:
    """Returns what may name a disk of ours in a snapshot: its target dev, and the paths."""
    return lun.dev, lun.volume.alias, lun.volume.path(settings.path_prefix)


def check_inside(node: Node, dev: str) -> None:
    """Refuses a disk of ours that a snapshot lists as one in a file of its own.

    Raises:
        TranslateError: UNSUPPORTED.
    """
    if node.attrs.get("snapshot") == "external" or node.child("source") is not None:
        raise TranslateError(
            Refusal.UNSUPPORTED,
            f"disk {dev}: a virtlun volume holds its snapshots itself, in no file: leave"
            f" snapshot=external and file= out, or the disk (--diskspec {dev},snapshot=no)",
        )


def compose(
    request: Request,
    held: Sequence[DiskSnapshot],
    *,
    state: str,
    parent: str | None,
    created_s: int,
    domain_xml: str,
    inactive_xml: str | None,
) -> str:
    """Returns a snapshot of disks of ours alone as libvirtd takes it: as one that exists.

    Args:
        request: what the client asked for, with a name.
        held: the lvol snapshots.
        state: virDomainSnapshotState.
        parent: name of the domain's current snapshot.
        created_s: when it was taken, seconds since the epoch.
        domain_xml: libvirtd's XML of the domain with its passwords, of the running one if it runs.
        inactive_xml: the persistent definition of one that runs; None of others.
    """
    theirs = Document(request.xml)
    domain = views.required(domain_xml)
    edits = Edits(domain.document)
    metadatas.add(domain.domain, note(held), edits)
    noted = Document(edits.apply())
    parts = [f"<domainsnapshot><name>{escape(request.name or '')}</name>"]
    if request.description:
        parts.append(f"<description>{escape(request.description)}</description>")
    parts.append(f"<state>{state}</state>")
    if parent is not None:
        parts.append(f"<parent><name>{escape(parent)}</name></parent>")
    parts.append(f"<creationTime>{created_s}</creationTime><memory snapshot='no'/><disks>")
    parts += [theirs.source(node) for node in listed(theirs.root)]
    parts.append("</disks>" + renamed(noted, noted.root, "domain"))
    if inactive_xml is not None:
        inactive = Document(inactive_xml)
        parts.append(renamed(inactive, inactive.root, "inactiveDomain"))
    return "".join(parts) + "</domainsnapshot>"


def _ours(
    domain: View, disks: Sequence[Node], settings: Settings
) -> tuple[tuple[LunPlan, ...], list[Node]]:
    """Returns the disks of ours that are in it, and the elements that list some, in it or not."""
    metadata = domain.salvaged
    luns, mine = [], []
    for entry in metadata.entries if metadata is not None else ():
        names = names_of(entry.lun, settings)
        naming = [node for node in disks if node.attrs.get("name") in names]
        mine += naming
        own = parse_device(entry.text)
        way = own.root.attrs.get("snapshot") if own is not None else None
        if way is None and entry.lun.read_only:
            way = "no"
        for node in naming:
            check_inside(node, entry.lun.dev)
            way = node.attrs.get("snapshot", way)
        if way not in WITHOUT:
            luns.append(entry.lun)
    return tuple(luns), mine


def _others(domain: View, disks: Sequence[Node]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the target devs of libvirtd's own disks that are in it, and of those that are not.

    As virDomainSnapshotAlignDisks: read-only and empty ones are not by themselves.
    """
    others, left = [], []
    for node in domain.their_nodes():
        disk, source = read(node), node.child("source")
        dev = disk.dev or ""
        names = {dev, *(source.attrs.values() if source is not None else ())}
        way = node.attrs.get("snapshot")
        if way is None and (disk.read_only or disk.device == "cdrom"):
            way = "no"
        fixed = way in WITHOUT
        for each in disks:
            if each.attrs.get("name") in names:
                way = each.attrs.get("snapshot", way)
        if source is None or node.attrs.get("type") == "vhostuser":
            continue
        if way not in WITHOUT:
            others.append(dev)
        elif not fixed:
            left.append(dev)
    return tuple(others), tuple(left)


def _with(xml: str, name: str, text: str) -> str:
    """Returns a snapshot's XML with an element of this text, in the place of an empty one."""
    document = Document(xml)
    edits = Edits(document)
    old = document.root.child(name)
    if old is not None:
        edits.remove(old)
    edits.append(document.root, [(0, f"<{name}>{escape(text)}</{name}>")])
    return edits.apply()
