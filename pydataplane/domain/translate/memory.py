"""Guest memory that another process can map, which every vhost-user device needs.

libvirt wants <access mode='shared'/> (or memAccess='shared' on each NUMA cell) and memory with a
file descriptor behind it. The target takes memfd and huge pages, and no file of a disk, which is
what <source type='file'/> is unless libvirt's memory_backing_dir says otherwise: a page that has to
be read from a disk would keep all other guests waiting. What is there stays; what is missing is
added; what contradicts is refused.
"""

from __future__ import annotations

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.xml.document import Edits, Node

BACKING = "backing"
SOURCE = "source"
ACCESS = "access"
"""What we added: the whole <memoryBacking>, its <source>, its <access>."""

_SOURCE_XML = "<source type='memfd'/>"
_ACCESS_XML = "<access mode='shared'/>"


def missing(domain: Node) -> list[str]:
    """Returns which of SOURCE and ACCESS the domain lacks.

    Raises:
        TranslateError: UNSUPPORTED, the domain explicitly asks for memory that is not shared, or
            that is on a disk.
    """
    backing = domain.child("memoryBacking")
    access = domain.value("memoryBacking/access", "mode")
    source = domain.value("memoryBacking/source", "type")
    numa = domain.at("cpu", "numa")
    cells = list(numa.every("cell")) if numa is not None else []
    modes = [cell.attrs.get("memAccess") for cell in cells]
    devices = domain.child("devices")
    modules = list(devices.every("memory")) if devices is not None else []
    if "private" in modes or any(m.attrs.get("access") == "private" for m in modules):
        raise _refused("a NUMA cell or memory module is private", "memAccess='shared' there")
    explicit = bool(modes) and all(mode == "shared" for mode in modes)
    if access == "private" and not explicit:
        raise _refused("<access mode='private'/>", "<access mode='shared'/>")
    hugepages = backing.child("hugepages") if backing is not None else None
    everywhere = hugepages is not None and not any(
        page.attrs.get("nodeset") for page in hugepages.every("page")
    )
    if source == "anonymous" and not everywhere:
        raise _refused("<source type='anonymous'/>", "<source type='memfd'/>")
    if source == "file" and not everywhere:
        raise _refused("<source type='file'/>, whose pages are on a disk", "<source type='memfd'/>")
    lacks = []
    if source is None and not everywhere:
        lacks.append(SOURCE)
    if access is None and not explicit:
        lacks.append(ACCESS)
    return lacks


def is_private(domain: Node) -> bool:
    """Whether the domain explicitly asks for memory that no other process can have."""
    try:
        missing(domain)
    except TranslateError:
        return True
    return False


def _refused(what: str, instead: str) -> TranslateError:
    return TranslateError(
        Refusal.UNSUPPORTED,
        "virtlun disks need shared guest memory, but the domain's memoryBacking or NUMA says"
        f" otherwise ({what}); use {instead}",
    )


def share(domain: Node, edits: Edits) -> list[str]:
    """Adds what is missing; returns what was added, for `unshare`.

    Raises:
        TranslateError: as `missing`.
    """
    lacks = missing(domain)
    if not lacks:
        return []
    children = [
        (1, xml) for key, xml in ((SOURCE, _SOURCE_XML), (ACCESS, _ACCESS_XML)) if key in lacks
    ]
    backing = domain.child("memoryBacking")
    if backing is not None:
        edits.append(backing, [(0, xml) for _, xml in children])
        return lacks
    anchor = next(
        (
            node
            for name in ("currentMemory", "memory", "maxMemory", "uuid", "name")
            if (node := domain.child(name)) is not None
        ),
        None,
    )
    lines = [(0, "<memoryBacking>"), *children, (0, "</memoryBacking>")]
    if anchor is not None:
        edits.insert_after(anchor, lines)
    else:
        edits.append(domain, lines)
    return [BACKING, *lacks]


def unshare(domain: Node, added: list[str], edits: Edits) -> None:
    """Takes out again what `share` said that it added, as far as it still stands there."""
    backing = domain.child("memoryBacking")
    if backing is None:
        return
    ours = []
    if SOURCE in added:
        ours += [n for n in backing.every("source") if n.attrs == {"type": "memfd"}]
    if ACCESS in added:
        ours += [n for n in backing.every("access") if n.attrs == {"mode": "shared"}]
    if BACKING in added and len(ours) == len(backing.children):
        edits.remove(backing)
        return
    for node in ours:
        edits.remove(node)
