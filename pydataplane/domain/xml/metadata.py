"""Our element in a domain's <metadata>: the disks of ours, as the client wrote them.

    <virtlun:disks xmlns:virtlun="https://virtlun.dev/xmlns/domain/1" version="1"
                   controller="vm-UUID" added="backing source access">
      <virtlun:disk target="0" order="1" before="vda" dev="sdb" lvstore="lvs0"
                    lvol="db"><![CDATA[<disk ...>...</disk>]]></virtlun:disk>
    </virtlun:disks>

The client's XML is character data, not elements: virDomainSetMetadata puts every element without a
namespace into ours, and libvirt reformats elements. schemas/domain-metadata.rng has each attribute.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.histograms import Histograms, parsed, text_of
from pydataplane.domain.limits import NAMES, NONE, Limits
from pydataplane.domain.model import (
    ON_ERROR,
    OWN,
    Characteristics,
    ErrorPolicy,
    FrontEnd,
    KnownAs,
    LunPlan,
    VolumeRef,
)
from pydataplane.domain.names import CONTROLLER_PREFIX, MAX_TARGETS, NAMESPACE, PREFIX
from pydataplane.domain.xml.disk import (
    BLOCK_SIZES,
    KEPT,
    KEPT_CHARS,
    PHYSICAL_BLOCK_SIZES,
    Disk,
    stored,
    stored_network,
)
from pydataplane.domain.xml.document import Edits, Lines, Node, attributes, escape, number
from pydataplane.domain.xml.network import identity, known_by

VERSION = "1"
CONTROLLER = re.compile(CONTROLLER_PREFIX + r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One disk of ours."""

    lun: LunPlan
    order: int
    """Its place among all disks that the client sees, from 0."""
    before: str | None
    """Target dev of the next disk that is libvirt's own, None behind the last of them."""
    text: str
    """The client's <disk>."""

    @property
    def disk(self) -> Disk | None:
        """Returns what `text` says, None if it is no well-formed <disk>."""
        return stored(self.text)


@dataclass(frozen=True, slots=True)
class Metadata:
    """The whole element."""

    controller: str
    added: tuple[str, ...] = ()
    """What else we put into the domain: see memory.py."""
    entries: tuple[Entry, ...] = field(default_factory=tuple)

    def by_dev(self, dev: str | None) -> Entry | None:
        """Returns the entry with this target dev, or None."""
        return next((e for e in self.entries if e.lun.dev == dev), None)

    def with_entry(self, entry: Entry) -> Metadata:
        """Returns a copy with one more entry, later ones moved up by one place."""
        moved = tuple(
            replace(e, order=e.order + 1) if e.order >= entry.order else e for e in self.entries
        )
        return replace(self, entries=(*moved, entry))

    def without(self, entry: Entry) -> Metadata:
        """Returns a copy without `entry`, later ones moved down by one place."""
        kept = tuple(
            replace(e, order=e.order - 1) if e.order > entry.order else e
            for e in self.entries
            if e is not entry
        )
        return replace(self, entries=kept)

    def identified(self, uuids: Mapping[str, str]) -> Metadata:
        """Returns a copy in which disks without a UUID have those of `uuids` (by LVSTORE/LVOL)."""
        entries = tuple(
            e
            if e.lun.uuid is not None
            else replace(e, lun=replace(e.lun, uuid=uuids.get(e.lun.volume.alias)))
            for e in self.entries
        )
        return replace(self, entries=entries)


def places(entries: Iterable[Entry], theirs: Sequence[str | None]) -> list[tuple[int, Entry]]:
    """Returns where each disk of ours stands: before which number of libvirt's own disks.

    `theirs` are the target devs of those. libvirt sorts its disks, and some come and go; so the
    next neighbour counts, and the number only if that has gone. In the order of the result.
    """
    result = []
    for done, entry in enumerate(sorted(entries, key=lambda e: e.order)):
        if entry.before is None:
            place = len(theirs)
        elif entry.before in theirs:
            place = theirs.index(entry.before)
        else:
            place = min(max(entry.order - done, 0), len(theirs))
        result.append((place, entry))
    return sorted(result, key=lambda item: item[0])


def element(domain: Node) -> Node | None:
    """Returns our element of a <domain>, or None."""
    metadata = domain.child("metadata")
    return None if metadata is None else metadata.child("disks", NAMESPACE)


def parse(node: Node) -> Metadata:
    """Reads our element.

    Raises:
        TranslateError: BAD_XML, somebody damaged it.
    """
    controller = node.attrs.get("controller", "")
    if node.attrs.get("version") != VERSION or not CONTROLLER.fullmatch(controller):
        raise _damaged("version or controller is wrong")
    entries = tuple(_entry(child) for child in node.every("disk", NAMESPACE))
    for what in ({e.lun.target for e in entries}, {e.lun.dev for e in entries}):
        if len(what) != len(entries):
            raise _damaged("two disks have the same number or target dev")
    return Metadata(controller, tuple(node.attrs.get("added", "").split()), entries)


def salvage(node: Node) -> Metadata:
    """Reads our element as far as it can be read, for dumpxml, which must not fail.

    Of disks with the same number the first counts, so that there are no more than can be.
    """
    entries: dict[int, Entry] = {}
    for child in node.every("disk", NAMESPACE):
        try:
            entry = _entry(child)
        except TranslateError:
            continue
        if entry.lun.target not in entries and entry.disk is not None:
            entries[entry.lun.target] = entry
    return Metadata(
        node.attrs.get("controller", ""),
        tuple(node.attrs.get("added", "").split()),
        tuple(entries.values()),
    )


def _entry(node: Node) -> Entry:
    """Reads one disk; what was read is kept, as `disk.stored` is.

    Raises:
        TranslateError: BAD_XML, somebody damaged it.
    """
    text = node.text
    given = tuple(node.attrs.items())
    if len(text) > KEPT_CHARS or sum(len(value) for _, value in given) > KEPT_CHARS:
        return _entry_of.__wrapped__(given, text)
    return _entry_of(given, text)


@lru_cache(KEPT)
def _entry_of(given: tuple[tuple[str, str], ...], text: str) -> Entry:
    attrs = dict(given)
    target, order = number(attrs.get("target")), number(attrs.get("order"))
    dev, volume = attrs.get("dev", ""), _volume(attrs, text)
    if target is None or order is None or not dev or volume is None:
        raise _damaged("a disk lacks target, order, dev, or what names its volume")
    uuid = attrs.get("uuid")
    if volume.source is not None and uuid != identity(volume.source):
        raise _damaged(f"the uuid of disk {dev} is not that of its source")
    if target >= MAX_TARGETS:
        raise _damaged(f"target {target} is not below {MAX_TARGETS}")
    lun = LunPlan(
        target=target,
        # The same in thousands of domains, like most of what follows.
        dev=sys.intern(dev),
        volume=volume,
        uuid=uuid,
        serial=attrs.get("serial"),
        read_only=attrs.get("readonly") == "yes",
        shareable=attrs.get("shareable") == "yes",
        block_size=_block_size(attrs.get("blocksize")),
        characteristics=_characteristics(attrs),
        error_policy=_error_policy(attrs),
        limits=_limits(attrs.get("limits")),
        histograms=_histograms(attrs.get("histograms")),
        front=_front(attrs.get("front", "scsi")),
        known_as=_known_as(volume, attrs.get("knownby")),
    )
    return Entry(lun, order, attrs.get("before"), text)


def _volume(attrs: Mapping[str, str], text: str) -> VolumeRef | None:
    """Reads what a disk is on; what is on another host, the client's <disk> alone says."""
    if "network" in attrs:
        far = stored_network(text)
        protocol = far.source.protocol if far is not None and far.source is not None else None
        return far if protocol == attrs["network"] else None
    lvstore, lvol = attrs.get("lvstore"), attrs.get("lvol")
    return VolumeRef(sys.intern(lvstore), lvol) if lvstore and lvol else None


def _known_as(volume: VolumeRef, way: str | None) -> KnownAs | None:
    """Reads as what the guest knows a disk whose image is reached otherwise by now."""
    if way is None:
        return None
    found = known_by(volume.source, way) if volume.source is not None else None
    if found is None:
        raise _damaged("what a disk is known by is none of its image")
    return found


def _characteristics(attrs: Mapping[str, str]) -> Characteristics:
    rate = number(attrs.get("rotationrate"))
    if rate is None and "rotationrate" in attrs:
        raise _damaged("a rotationrate is no number")
    physical = number(attrs.get("physicalblocksize"))
    if physical not in PHYSICAL_BLOCK_SIZES and "physicalblocksize" in attrs:
        raise _damaged("a physicalblocksize is not one of a disk's")
    found = Characteristics(
        wwn=attrs.get("wwn"),
        vendor=attrs.get("vendor"),
        product=attrs.get("product"),
        rotation_rate=rate,
        physical_block_size=physical,
        removable=attrs.get("removable") == "yes",
        discard=attrs.get("discard") != "no",
        write_cache=attrs.get("writecache") != "no",
    )
    return OWN if found == OWN else found


def _error_policy(attrs: Mapping[str, str]) -> ErrorPolicy:
    write = attrs.get("errorpolicy", ON_ERROR.write)
    read = attrs.get("rerrorpolicy", ON_ERROR.read)
    if write not in ("report", "enospc", "stop") or read not in ("report", "stop"):
        raise _damaged(f"errorpolicy {write} or rerrorpolicy {read} is none")
    found = ErrorPolicy(write, read)
    return ON_ERROR if found == ON_ERROR else found


def _limits(text: str | None) -> Limits:
    if text is None:
        return NONE
    values = {}
    for word in text.split():
        name, _, value = word.partition("=")
        known = number(value) if name in NAMES else None
        if known is None:
            raise _damaged(f"limit {word} is none")
        values[name] = known
    return Limits(**values)


def _histograms(text: str | None) -> Histograms:
    found = parsed(text) if text is not None else ()
    if found is None:
        raise _damaged(f"histograms {text} are none")
    return found


def _front(text: str) -> FrontEnd:
    if text == "scsi":
        return "scsi"
    if text == "blk":
        return "blk"
    raise _damaged(f"front {text} is none")


def _block_size(text: str | None) -> int | None:
    if text is None:
        return None
    if text not in BLOCK_SIZES:
        raise _damaged(f"blocksize {text} is not one of a disk's")
    return BLOCK_SIZES[text]


def _damaged(why: str) -> TranslateError:
    return TranslateError(
        Refusal.BAD_XML,
        f"the domain's virtlun metadata is damaged ({why}); define the domain again through the"
        " gateway",
    )


def lines(metadata: Metadata, *, bare: bool) -> Lines:
    """Returns our element as text; `bare` without namespace, as virDomainSetMetadata wants it."""
    prefix = "" if bare else f"{PREFIX}:"
    head = attributes(
        {
            "version": VERSION,
            "controller": metadata.controller,
            "added": " ".join(metadata.added) or None,
        }
    )
    declared = "" if bare else f' xmlns:{PREFIX}="{NAMESPACE}"'
    if not metadata.entries:
        return [(0, f"<{prefix}disks{declared}{head}/>")]
    body = [(1, _entry_text(e, prefix)) for e in sorted(metadata.entries, key=lambda e: e.order)]
    return [(0, f"<{prefix}disks{declared}{head}>"), *body, (0, f"</{prefix}disks>")]


def _entry_text(entry: Entry, prefix: str) -> str:
    made = _text_of if len(entry.text) <= KEPT_CHARS else _text_of.__wrapped__
    return made(entry, prefix)


@lru_cache(2 * KEPT)
def _text_of(entry: Entry, prefix: str) -> str:
    far = entry.lun.volume.source
    lun, shown, policy = entry.lun, entry.lun.characteristics, entry.lun.error_policy
    rate, physical = shown.rotation_rate, shown.physical_block_size
    limits = " ".join(f"{name}={value}" for name, value in lun.limits.given.items())
    head = attributes(
        {
            "target": str(lun.target),
            "order": str(entry.order),
            "before": entry.before,
            "dev": lun.dev,
            "lvstore": lun.volume.lvstore if far is None else None,
            "lvol": lun.volume.lvol if far is None else None,
            "network": far.protocol if far is not None else None,
            "uuid": lun.uuid,
            "serial": lun.serial,
            "readonly": "yes" if lun.read_only else None,
            "shareable": "yes" if lun.shareable else None,
            "blocksize": str(lun.block_size) if lun.block_size is not None else None,
            "wwn": shown.wwn,
            "vendor": shown.vendor,
            "product": shown.product,
            "rotationrate": str(rate) if rate is not None else None,
            "physicalblocksize": str(physical) if physical is not None else None,
            "removable": "yes" if shown.removable else None,
            "discard": None if shown.discard else "no",
            "writecache": None if shown.write_cache else "no",
            "errorpolicy": policy.write if policy.write != ON_ERROR.write else None,
            "rerrorpolicy": policy.read if policy.read != ON_ERROR.read else None,
            "limits": limits or None,
            "histograms": text_of(lun.histograms) or None,
            "front": lun.front if lun.front != "scsi" else None,
            "knownby": lun.known_as.way if lun.known_as is not None else None,
        }
    )
    plain = "]]>" in entry.text or "\r" in entry.text
    text = escape_text(entry.text) if plain else f"<![CDATA[{entry.text}]]>"
    return f"<{prefix}disk{head}>{text}</{prefix}disk>"


def add(domain: Node, lines: Lines, edits: Edits) -> None:
    """Adds our element to a domain that has none, and <metadata> around it if need be."""
    parent = domain.child("metadata")
    if parent is not None:
        edits.append(parent, lines)
        return
    whole = [(0, "<metadata>"), *((depth + 1, line) for depth, line in lines), (0, "</metadata>")]
    for name in ("description", "title", "genid", "uuid", "name"):
        anchor = domain.child(name)
        if anchor is not None:
            edits.insert_after(anchor, whole)
            return
    edits.append(domain, whole)


def escape_text(text: str) -> str:
    """Returns character data with its line breaks kept readable, carriage returns kept at all."""
    return escape(text).replace("&#10;", "\n").replace("&#9;", "\t")
