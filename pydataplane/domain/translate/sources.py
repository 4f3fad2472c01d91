"""The disks of a client's domain that are on a volume, and the same on another one."""

from __future__ import annotations

from collections.abc import Iterator

from pydataplane.domain.errors import TranslateError
from pydataplane.domain.model import Settings
from pydataplane.domain.xml import disk as disks
from pydataplane.domain.xml.document import Document, Edits, Node, NotXmlError, attributes


def devs_on(domain_xml: str, volume: str, settings: Settings) -> list[str]:
    """Returns the target devs of the disks that name a volume, LVSTORE/LVOL.

    `domain_xml` is the domain's as its clients see it.
    """
    return [disk.value("target", "dev") or "" for disk in _on(domain_xml, volume, settings)]


def volumes_named(domain_xml: str, settings: Settings) -> list[str]:
    """Returns the volumes, LVSTORE/LVOL, that a domain's disks name; the domain as for `devs_on`.

    Images of other hosts are none.
    """
    found = []
    for disk in _all(domain_xml):
        try:
            ref = disks.volume(disk, settings)
        except TranslateError:
            continue
        if ref is not None and ref.source is None:
            found.append(ref.alias)
    return found


def disk_on(domain_xml: str, dev: str, volume: str, settings: Settings) -> str | None:
    """Returns a <disk> whose source names a volume, in the way in which that of `dev` names its.

    Where libvirtd would not read that, by its path. None: there is no such disk. The domain is as
    for `devs_on`.
    """
    for disk in _all(domain_xml):
        if disk.value("target", "dev") == dev and disk.child("source") is not None:
            kind = disk.attrs.get("type", "file")
            given = attributes(_naming(disk, volume, settings))
            if kind == "network" and disk.value("source", "protocol") != "rbd":
                kind, given = "file", attributes({"file": settings.path_prefix + volume})
            return f"<disk{attributes({'type': kind})}><source{given}/></disk>"
    return None


def on_another(domain_xml: str, old: str, new: str, settings: Settings) -> str:
    """Returns a domain with its disks that name `old` (LVSTORE/LVOL) on `new`; all else is kept."""
    try:
        document = Document(domain_xml)
    except NotXmlError:
        return domain_xml
    edits = Edits(document)
    for disk in _on_in(document, old, settings):
        source = disk.child("source")
        assert source is not None
        tail = "/" if source.end == source.inner_start else ""
        tag = f"<{source.raw_name}{attributes(_naming(disk, new, settings))}{tail}>"
        edits.replace(source.start, source.inner_start, tag)
    return edits.apply()


def _all(domain_xml: str) -> Iterator[Node]:
    try:
        document = Document(domain_xml)
    except NotXmlError:
        return iter(())
    return _disks(document)


def _disks(document: Document) -> Iterator[Node]:
    devices = document.root.child("devices")
    return devices.every("disk") if devices is not None else iter(())


def _on(domain_xml: str, volume: str, settings: Settings) -> list[Node]:
    try:
        return list(_on_in(Document(domain_xml), volume, settings))
    except NotXmlError:
        return []


def _on_in(document: Document, volume: str, settings: Settings) -> Iterator[Node]:
    for disk in _disks(document):
        try:
            ref = disks.volume(disk, settings)
        except TranslateError:
            continue  # it names none
        if ref is not None and ref.source is None and ref.alias == volume:
            yield disk


def _naming(disk: Node, volume: str, settings: Settings) -> dict[str, str | None]:
    """Returns the attributes of a disk's source with another volume."""
    source = disk.child("source")
    assert source is not None
    given: dict[str, str | None] = {k: v for k, v in source.attrs.items() if " " not in k}
    kind = disk.attrs.get("type", "file")
    store, _, lvol = volume.partition("/")
    if kind == "volume":
        return given | {"pool": settings.pool_prefix + store, "volume": lvol}
    if kind == "network":
        prefix = settings.rbd_prefix if source.attrs.get("protocol") == "rbd" else ""
        return given | {"name": prefix + volume}
    return given | {"dev" if kind == "block" else "file": settings.path_prefix + volume}
