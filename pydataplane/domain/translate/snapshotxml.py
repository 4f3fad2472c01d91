"""Reads libvirtd's XML of a snapshot, and which lvol snapshots hold its disks of ours.

libvirtd keeps the snapshot's XML and, in it, the domain as it was. Which lvol snapshots belong to
it is noted in the metadata of that domain, in a namespace of its own, so that it lasts as long as
libvirtd knows the snapshot (schemas/snapshot-metadata.rng). No client sees the note, and no domain
that is defined has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydataplane.domain.names import SNAPSHOT_NAMESPACE, SNAPSHOT_PREFIX
from pydataplane.domain.xml import metadata as metadatas
from pydataplane.domain.xml import view as views
from pydataplane.domain.xml.document import (
    Document,
    Edits,
    Lines,
    Node,
    NotXmlError,
    attributes,
    escape,
)


@dataclass(frozen=True, slots=True)
class DiskSnapshot:
    """A disk of ours in a snapshot: the lvol snapshot that holds what it had."""

    dev: str
    """Target dev of the disk."""
    volume: str
    """UUID of its volume."""
    lvstore: str
    snapshot: str
    """Name of the lvol snapshot, VOLUME@NAME."""
    uuid: str
    """UUID of the lvol snapshot."""

    @property
    def path(self) -> str:
        """`LVSTORE/VOLUME@NAME`, as people write it."""
        return f"{self.lvstore}/{self.snapshot}"


@dataclass(frozen=True, slots=True)
class SnapshotXml:
    """What libvirtd's XML of a snapshot says."""

    name: str
    state: str
    """virDomainSnapshotState as libvirt writes it: running, paused, shutoff, disk-snapshot."""
    memory_file: str | None
    """Where the memory is; None if the snapshot has none, or has it inside of a disk."""
    external: tuple[str, ...]
    """Target devs of libvirtd's own disks that it holds by files of their own."""
    internal: tuple[str, ...]
    """Of those that it holds inside of their files."""
    left: tuple[str, ...]
    """Target devs of the disks that a guest can write, of ours or not, and that it lacks."""
    held: tuple[DiskSnapshot, ...]
    """Its disks of ours."""
    has_memory: bool = False
    """Wherever that is."""
    left_of_ours: tuple[str, ...] = ()
    """Those of `left` that are ours: volumes, and disks over the network."""


def parse_snapshot(xml: str) -> SnapshotXml | None:
    """Reads libvirtd's XML of a snapshot; None if it is none. Never fails."""
    document = _parse(xml)
    if document is None:
        return None
    root = document.root
    disks = root.child("disks")
    by_way: dict[str, list[str]] = {}
    for node in disks.every("disk") if disks is not None else ():
        by_way.setdefault(node.attrs.get("snapshot", ""), []).append(node.attrs.get("name", ""))
    inside = [view for view in views.domains(document) if view.domain.name == "domain"]
    writable = {
        node.value("target", "dev")
        for view in inside
        for node in view.their_nodes()
        if node.child("readonly") is None and node.child("source") is not None
    }
    held = tuple(held for view in inside for held in _held(view.domain))
    within = {each.dev for each in held}
    lacking = tuple(
        entry.lun.dev
        for view in inside
        if (metadata := view.salvaged) is not None
        for entry in metadata.entries
        if not entry.lun.read_only and entry.lun.dev not in within
    )
    theirs = tuple(dev for dev in by_way.get("no", ()) if dev in writable)
    file, memory = root.value("memory", "file"), root.value("memory", "snapshot")
    return SnapshotXml(
        name=text_of(root, "name") or "",
        state=text_of(root, "state") or "",
        memory_file=file,
        external=tuple(by_way.get("external", ())),
        internal=tuple(by_way.get("internal", ())),
        left=theirs + lacking,
        held=held,
        has_memory=file is not None or memory in ("internal", "external"),
        left_of_ours=lacking,
    )


def with_note(xml: str, held: Sequence[DiskSnapshot], *, state: str | None = None) -> str:
    """Returns libvirtd's XML of a snapshot with a note of its lvol snapshots, for a redefinition.

    `state` is put in the place of the one it has. What is no snapshot comes back as it is.
    """
    document = _parse(without_note(xml))
    if document is None:
        return xml
    edits = Edits(document)
    for view in views.domains(document):
        if view.domain.name == "domain" and held:
            metadatas.add(view.domain, note(held), edits)
    present = document.root.child("state")
    if state is not None and present is not None:
        edits.replace(present.start, present.end, f"<state>{escape(state)}</state>")
    return edits.apply()


def without_note(xml: str) -> str:
    """Returns a snapshot, or a domain out of one, without the note; others as they are."""
    if SNAPSHOT_NAMESPACE not in xml:
        return xml
    try:
        document = Document(xml)
    except NotXmlError:
        return xml
    edits = Edits(document)
    for view in views.domains(document):
        metadata = view.domain.child("metadata")
        if metadata is None:
            continue
        nodes = [node for node in metadata.children if node.namespace == SNAPSHOT_NAMESPACE]
        for node in [metadata] if nodes and nodes == list(metadata.children) else nodes:
            edits.remove(node)
    return edits.apply()


def domain_of(xml: str) -> str | None:
    """Returns the definition that a snapshot was taken of, as libvirtd has it, without the note.

    Of a domain that ran that is its persistent definition. None if there is none in the XML.
    """
    document = _parse(without_note(xml))
    if document is None:
        return None
    found = {view.domain.name: view.domain for view in views.domains(document)}
    node = found.get("inactiveDomain") or found.get("domain")
    return None if node is None else renamed(document, node, "domain")


def renamed(document: Document, node: Node, name: str) -> str:
    """Returns an element as it was written, under another name without a prefix."""
    text = document.source(node)
    inner = text.removeprefix(f"<{node.raw_name}").removesuffix(f"</{node.raw_name}>")
    return f"<{name}{inner}</{name}>"


def note(held: Sequence[DiskSnapshot]) -> Lines:
    """Returns the note as text."""
    prefix = SNAPSHOT_PREFIX
    body = [
        attributes(
            {
                "dev": each.dev,
                "volume": each.volume,
                "lvstore": each.lvstore,
                "snapshot": each.snapshot,
                "uuid": each.uuid,
            }
        )
        for each in held
    ]
    return [
        (0, f'<{prefix}:volumes xmlns:{prefix}="{SNAPSHOT_NAMESPACE}">'),
        *((1, f"<{prefix}:volume{line}/>") for line in body),
        (0, f"</{prefix}:volumes>"),
    ]


def text_of(node: Node, name: str) -> str | None:
    """Returns the text of a child element, without the space around it; None without one."""
    child = node.child(name)
    return None if child is None else child.text.strip()


def _held(domain: Node) -> list[DiskSnapshot]:
    """Reads the note in a domain; entries that somebody damaged are left out."""
    metadata = domain.child("metadata")
    node = metadata.child("volumes", SNAPSHOT_NAMESPACE) if metadata is not None else None
    found = []
    for each in node.every("volume", SNAPSHOT_NAMESPACE) if node is not None else ():
        values = [each.attrs.get(key) for key in ("dev", "volume", "lvstore", "snapshot", "uuid")]
        texts = [value for value in values if value]
        if len(texts) == len(values):
            found.append(DiskSnapshot(*texts))
    return found


def _parse(xml: str) -> Document | None:
    try:
        document = Document(xml)
    except NotXmlError:
        return None
    root = document.root
    return document if root.name == "domainsnapshot" and not root.namespace else None
