"""XML that lists a domain's disks by name: snapshots, checkpoints, backups.

libvirtd lists the carrier there, which clients do not know, and knows nothing of the disks of
ours, which they may name. None of the three can include a disk of ours, so a client must leave each
out in so many words: what silently lacks a disk is no snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.model import Settings
from pydataplane.domain.translate.operations import define, has_controller
from pydataplane.domain.translate.presenting import take_out
from pydataplane.domain.translate.recognising import check_encoding
from pydataplane.domain.xml import carrier as carriers
from pydataplane.domain.xml import view as views
from pydataplane.domain.xml.disk import parse_device, read
from pydataplane.domain.xml.document import Document, Edits, Node, NotXmlError, escape
from pydataplane.domain.xml.view import View


@dataclass(frozen=True, slots=True)
class _Kind:
    """One of the three documents."""

    what: str
    """For sentences."""
    attribute: str
    """Of <disk name=>: whether it is included."""
    without: frozenset[str]
    """Values with which it is not."""
    included: str | None
    """The value with which it is, where libvirt takes all disks only if none is listed."""
    hint: str
    """How to leave a disk out."""


_KINDS: Mapping[str, _Kind] = {
    "domainsnapshot": _Kind(
        "snapshot",
        "snapshot",
        frozenset({"no", "manual"}),
        None,
        "with virsh --diskspec {dev},snapshot=no",
    ),
    "domaincheckpoint": _Kind(
        "checkpoint",
        "checkpoint",
        frozenset({"no"}),
        "bitmap",
        "with virsh --diskspec {dev},checkpoint=no",
    ),
    "domainbackup": _Kind(
        "backup",
        "backup",
        frozenset({"no"}),
        "yes",
        "<disks> in its XML lists those to take",
    ),
}


def leave_out(xml: str, domain_xml: str, settings: Settings, suffix: str = "backup") -> str:
    """Returns a client's snapshot, checkpoint or backup as libvirtd gets it: without disks of ours.

    `domain_xml` is libvirtd's XML (untranslated) of the domain; `suffix` ends the names of backup
    files that libvirt would choose. What is no such document, and what a domain without our
    controller gets, comes back as it is.

    Raises:
        TranslateError: UNSUPPORTED, a disk of ours is not left out.
    """
    domain = views.parse(domain_xml)
    document = _parse(xml)
    if domain is None or domain.carrier is None or document is None:
        return xml
    kind, root = _KINDS[document.root.name], document.root
    listed = _listed(root)
    ours = _ours(domain, settings)
    left = {
        names[0]
        for names in ours
        for node in listed
        if node.attrs.get("name") in names and node.attrs.get(kind.attribute) in kind.without
    }
    named = {names[0] for names in ours for node in listed if node.attrs.get("name") in names}
    # Of the later two kinds libvirt takes all disks only where none is listed.
    wanted = named if kind.included and listed else {names[0] for names in ours}
    if kind.attribute == "snapshot":
        left |= _left_out_by_themselves(domain, kind.without) - named
    if wanted - left:
        raise TranslateError(
            Refusal.UNSUPPORTED,
            f"domain '{domain.name}': a {kind.what} cannot include its virtlun disks"
            f" ({', '.join(sorted(wanted - left))}); leave them out:"
            f" {kind.hint.format(dev=min(wanted - left))}",
        )
    edits = Edits(document)
    every = {name for names in ours for name in names}
    mine = [node for node in listed if node.attrs.get("name") in every]
    for node in mine:
        edits.remove(node)
    if kind.included is not None and not listed:
        _list_theirs(root, domain, kind, suffix, edits)
    elif kind.included is not None and len(mine) == len(listed):
        # None is left to take; without any listed, libvirt would take them all.
        carrier = carriers.disk(domain.domain)
        name = carrier.value("target", "dev") if carrier is not None else None
        edits.insert(mine[-1].end, _disk(name or "", {kind.attribute: "no"}))
    return edits.apply()


def _list_theirs(root: Node, domain: View, kind: _Kind, suffix: str, edits: Edits) -> None:
    """Lists the disks that libvirtd would take by itself, for it would take the carrier, too."""
    lines = [
        (1, line)
        for node in domain.disk_nodes()
        if (disk := read(node)).device in ("disk", "lun")
        and not disk.read_only
        and node.child("source") is not None
        for line in _included(root, kind, node, disk.dev or "", suffix)
    ]
    disks = root.child("disks")
    if disks is not None:
        edits.remove(disks)
    if lines:
        edits.append(root, [(0, "<disks>"), *lines, (0, "</disks>")])


def _included(root: Node, kind: _Kind, node: Node, dev: str, suffix: str) -> list[str]:
    """Returns the lines that include a disk, with the file that libvirt would choose (backups)."""
    start = _disk(dev, {kind.attribute: kind.included or ""})
    if kind.attribute != "backup":
        return [start]
    store = "scratch" if root.attrs.get("mode") == "pull" else "target"
    path = node.value("source", "file")
    if path is None:  # libvirt says that it does not choose one for this disk
        return [start.replace("/>", " type='block'/>")]
    file = escape(f"{path}.{suffix}")
    return [start.replace("/>", " type='file'>"), f"  <{store} file='{file}'/>", "</disk>"]


def present_listing(xml: str, settings: Settings, *, domain_xml: str | None = None) -> str:
    """Returns libvirtd's snapshot, checkpoint or backup as the client is to see it.

    The domains inside are the client's, the carrier is not listed, disks of ours are, as left out.
    A document without a domain inside needs `domain_xml`. Never fails.
    """
    document = _parse(xml)
    if document is None:
        return xml
    inside = [view for view in views.domains(document) if view.has_traces]
    domain = inside[0] if inside else (views.parse(domain_xml) if domain_xml else None)
    carrier = carriers.disk(domain.domain) if domain is not None else None
    if domain is None or carrier is None:
        return xml
    kind = _KINDS[document.root.name]
    edits = Edits(document)
    for view in inside:
        take_out(view, edits, live=False)
    name = carrier.value("target", "dev")
    hidden = [node for node in _listed(document.root) if node.attrs.get("name") == name]
    devs = [names[0] for names in _ours(domain, settings)]
    lines = [_disk(dev, {kind.attribute: "no"}) for dev in devs]
    for node in hidden:
        indent = document.indent(node)
        edits.replace(document.lead(node), node.end, "".join(indent + line for line in lines))
        lines = []
    return edits.apply()


def define_inside(xml: str, current_xml: str, settings: Settings) -> str:
    """Translates the domains inside a snapshot that a client defines anew, as `define` does.

    Raises:
        TranslateError: as `define`.
    """
    document = _parse(xml)
    if document is None:
        return xml
    edits = Edits(document)
    for view in views.domains(document):
        node = view.domain
        inner = document.data[node.start + 1 + len(node.raw_name) : node.end].decode()
        inner = inner.removesuffix(f"</{node.raw_name}>")
        made = define(
            f"<domain{inner}</domain>",
            settings,
            new_uuid=UUID(int=0),
            current_xml=current_xml,
            controller=has_controller(current_xml),
        ).xml
        made = made.removeprefix("<domain").removesuffix("</domain>")
        edits.replace(node.start, node.end, f"<{node.raw_name}{made}</{node.raw_name}>")
    return leave_out(edits.apply(), current_xml, settings)


def is_internal(xml: str) -> bool:
    """Whether a snapshot's XML asks for one inside the disks' own files, by default it does."""
    document = _parse(xml)
    return document is not None and document.root.value("memory", "snapshot") in (None, "internal")


def _parse(xml: str) -> Document | None:
    """Parses one of the three documents; None if it is something else, or not well formed.

    Raises:
        TranslateError: as `check_encoding`.
    """
    check_encoding(xml)
    try:
        document = Document(xml)
    except NotXmlError:
        return None
    return document if document.root.name in _KINDS and not document.root.namespace else None


def _disk(name: str, more: Mapping[str, str]) -> str:
    values = {"name": name, **more}
    return "<disk" + "".join(f" {key}='{escape(value)}'" for key, value in values.items()) + "/>"


def _listed(root: Node) -> list[Node]:
    disks = root.child("disks")
    return list(disks.every("disk")) if disks is not None else []


def _left_out_by_themselves(domain: View, without: frozenset[str]) -> set[str]:
    """Returns the target devs of disks of ours whose own <disk snapshot=> leaves them out."""
    metadata = domain.salvaged
    read_again = ((e.lun.dev, parse_device(e.text)) for e in (metadata.entries if metadata else ()))
    return {
        dev
        for dev, document in read_again
        if document is not None and document.root.attrs.get("snapshot") in without
    }


def _ours(domain: View, settings: Settings) -> list[tuple[str, ...]]:
    """Returns the names of each disk of ours: target dev first, then the paths that mean it."""
    metadata = domain.salvaged
    return [
        (e.lun.dev, e.lun.volume.alias, settings.path_prefix + e.lun.volume.alias)
        for e in (metadata.entries if metadata is not None else ())
    ]
