"""XML that lists a domain's disks by name: snapshots, checkpoints, backups.

libvirtd lists the carrier there, which clients do not know, and knows nothing of the disks of
ours, which they may name. A snapshot can include these: see `requested` and `taken`. Checkpoints
and backups cannot, so a client must leave each out in so many words: what silently lacks a disk is
none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.model import LunPlan, Settings
from pydataplane.domain.translate import networkchoice
from pydataplane.domain.translate.operations import define, has_controller
from pydataplane.domain.translate.presenting import take_out
from pydataplane.domain.translate.recognising import check_encoding
from pydataplane.domain.translate.snapshotrequests import check_inside, listed, names_of
from pydataplane.domain.translate.snapshotxml import parse_snapshot, without_note
from pydataplane.domain.xml import view as views
from pydataplane.domain.xml.disk import read
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
    included: str
    """The value with which it is."""
    hint: str
    """How to leave a disk out."""


_KINDS: Mapping[str, _Kind] = {
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


_ATTRIBUTES: Mapping[str, str] = {
    "domainsnapshot": "snapshot",
    **{name: kind.attribute for name, kind in _KINDS.items()},
}
"""Of <disk name=> in each of the documents: whether the disk is included."""


def leave_out(xml: str, domain_xml: str, settings: Settings, suffix: str = "backup") -> str:
    """Returns a client's checkpoint or backup as libvirtd gets it: without disks of ours.

    `domain_xml` is libvirtd's XML (untranslated) of the domain; `suffix` ends the names of backup
    files that libvirt would choose. What is no such document, and what a domain without our
    controller gets, comes back as it is.

    Raises:
        TranslateError: UNSUPPORTED, a disk of ours is not left out.
    """
    domain = views.parse(domain_xml)
    document = _parse(xml)
    if domain is None or not domain.hidden or document is None:
        return xml
    if document.root.name not in _KINDS:
        return xml
    kind, root = _KINDS[document.root.name], document.root
    given = listed(root)
    ours = _ours(domain, settings)
    left = {
        names[0]
        for names in ours
        for node in given
        if node.attrs.get("name") in names and node.attrs.get(kind.attribute) in kind.without
    }
    named = {names[0] for names in ours for node in given if node.attrs.get("name") in names}
    # libvirt takes all disks only where none is listed.
    wanted = named if given else {names[0] for names in ours}
    if wanted - left:
        raise TranslateError(
            Refusal.UNSUPPORTED,
            f"domain '{domain.name}': a {kind.what} cannot include its virtlun disks"
            f" ({', '.join(sorted(wanted - left))}); leave them out:"
            f" {kind.hint.format(dev=min(wanted - left))}",
        )
    edits = Edits(document)
    every = {name for names in ours for name in names}
    mine = [node for node in given if node.attrs.get("name") in every]
    for node in mine:
        edits.remove(node)
    if not given:
        _list_theirs(root, domain, kind, suffix, edits)
    elif len(mine) == len(given):
        # None is left to take; without any listed, libvirt would take them all.
        edits.insert(mine[-1].end, _disk(min(domain.hidden), {kind.attribute: "no"}))
    return edits.apply()


def _list_theirs(root: Node, domain: View, kind: _Kind, suffix: str, edits: Edits) -> None:
    """Lists the disks that libvirtd would take by itself, for it would take the carrier, too."""
    lines = [
        (1, line)
        for node in domain.their_nodes()
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
    start = _disk(dev, {kind.attribute: kind.included})
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

    The domains inside are the client's, the carrier is not listed, disks of ours are: as held
    inside of their volumes, or as left out. A document without a domain inside needs `domain_xml`.
    Never fails.
    """
    snapshot = parse_snapshot(xml)
    document = _parse(without_note(xml))
    if document is None:
        return xml
    inside = [view for view in views.domains(document) if view.has_traces]
    domain = inside[0] if inside else (views.parse(domain_xml) if domain_xml else None)
    hidden_devs = domain.hidden if domain is not None else frozenset()
    if domain is None or not hidden_devs:
        return xml
    attribute = _ATTRIBUTES[document.root.name]
    edits = Edits(document)
    for view in inside:
        take_out(view, edits, live=False)
    hidden = [node for node in listed(document.root) if node.attrs.get("name") in hidden_devs]
    held = {each.dev for each in snapshot.held} if snapshot is not None else set()
    lines = [
        _disk(names[0], {attribute: "internal" if names[0] in held else "no"})
        for names in _ours(domain, settings)
    ]
    for node in hidden:
        indent = document.indent(node)
        edits.replace(document.lead(node), node.end, "".join(indent + line for line in lines))
        lines = []
    return edits.apply()


@dataclass(frozen=True, slots=True)
class Redefinition:
    """A snapshot or checkpoint that a client defines anew, as libvirtd gets it."""

    xml: str
    name: str
    luns: tuple[LunPlan, ...]
    """The disks of ours that it is to have, inside of their volumes."""


def name_of(xml: str) -> str:
    """Returns the name in one of the three documents; '' where there is none.

    Raises:
        TranslateError: as `check_encoding`.
    """
    document = _parse(xml)
    name = document.root.child("name") if document is not None else None
    return name.text.strip() if name is not None else ""


def define_inside(
    xml: str, current_xml: str, settings: Settings, held_in: str | None = None
) -> Redefinition:
    """Translates the domains inside what a client defines anew, as `define` does.

    Disks over the network stay whose they are in `held_in`, the definition inside what is replaced
    (libvirtd's XML). Without it they are as the domain inside says, else as in `current_xml`.

    Raises:
        TranslateError: as `define`; UNSUPPORTED, a disk of ours is not where it can be.
    """
    document = _parse(xml)
    if document is None:
        return Redefinition(xml, "", ())
    edits = Edits(document)
    for view in views.domains(document):
        node = view.domain
        inner = document.data[node.start + 1 + len(node.raw_name) : node.end].decode()
        inner = inner.removesuffix(f"</{node.raw_name}>")
        says = networkchoice.of(node).asked is not None
        made = define(
            f"<domain{inner}</domain>",
            settings,
            new_uuid=UUID(int=0),
            current_xml=current_xml,
            controller=has_controller(current_xml),
            served_in=held_in if held_in is not None else None if says else current_xml,
        ).xml
        made = made.removeprefix("<domain").removesuffix("</domain>")
        edits.replace(node.start, node.end, f"<{node.raw_name}{made}</{node.raw_name}>")
    text = without_note(edits.apply())
    if document.root.name != "domainsnapshot":
        return Redefinition(leave_out(text, current_xml, settings), "", ())
    return _without_ours(Document(text), current_xml, settings)


def _without_ours(document: Document, current_xml: str, settings: Settings) -> Redefinition:
    """Takes the disks of ours out of the list of a snapshot, whose domain is translated."""
    inside = [view for view in views.domains(document) if view.domain.name == "domain"]
    domain = inside[0] if inside else views.required(current_xml)
    metadata = domain.salvaged
    edits, luns = Edits(document), []
    for entry in metadata.entries if metadata is not None else ():
        for node in listed(document.root):
            if node.attrs.get("name") not in names_of(entry.lun, settings):
                continue
            check_inside(node, entry.lun.dev)
            if node.attrs.get("snapshot") == "internal":
                luns.append(entry.lun)
            edits.remove(node)
    text = edits.apply()
    return Redefinition(text, name_of(text), tuple(luns))


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
    return document if document.root.name in _ATTRIBUTES and not document.root.namespace else None


def _disk(name: str, more: Mapping[str, str]) -> str:
    values = {"name": name, **more}
    return "<disk" + "".join(f" {key}='{escape(value)}'" for key, value in values.items()) + "/>"


def _ours(domain: View, settings: Settings) -> list[tuple[str, ...]]:
    """Returns the names of each disk of ours: target dev first, then the paths that mean it."""
    metadata = domain.salvaged
    return [names_of(e.lun, settings) for e in (metadata.entries if metadata is not None else ())]
