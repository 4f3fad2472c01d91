"""One <disk> of a client: is it ours, which volume is it, and can we do what it asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.histograms import Histograms
from pydataplane.domain.limits import NONE, Limits
from pydataplane.domain.model import (
    ON_ERROR,
    OWN,
    Characteristics,
    ErrorPolicy,
    Settings,
    VolumeRef,
)
from pydataplane.domain.xml import histogram, iotune, network
from pydataplane.domain.xml.document import (
    Document,
    Edits,
    Node,
    NotXmlError,
    attributes,
    escape,
    number,
    reindent,
)

_NAME = re.compile(r"[!-.0-~]{1,63}")
"""lvstore and lvol names: 1 to 63 printable ASCII characters without space and slash."""
DEV_LETTERS_MAX = 6
"""Behind the prefix of a target dev: 26 to the power of 7 is no int any more."""
_DEV = re.compile(r"(fd|hd|sd|vd|xvd|ubd)([a-z]+)")
BLOCK_SIZES = {"512": 512, "4096": 4096}
"""Bytes of a logical block that a disk of ours can have, as written."""
PHYSICAL_BLOCK_SIZES = frozenset(1 << shift for shift in range(9, 22))
"""Bytes of a physical block that one can have, up to the largest that QEMU's own disks have."""
KEPT = 1024
"""Disks of which it is kept what their XML says: several domains' with as many as there can be.

A change of one disk looks at all of its domain, several times, and they stay the same texts.
"""
KEPT_CHARS = 4096
"""Longer texts are no disk's, and are not kept."""
DRIVER = {"name": "qemu", "type": "raw"}
"""What libvirt makes of a <driver> that says neither, in the order in which it writes it."""
_DRIVER_HEAD = re.compile(rb"<[^\s/>]+(\s+name\s*=\s*('[^']*'|\"[^\"]*\"))?")
"""The start tag up to where the type stands."""
_DRIVER_AIO = re.compile(rb"\stype\s*=\s*['\"](aio)['\"]")
_SOURCE = re.compile(
    r"<source\s[^<>]*?\b(?:file|dev|name|volume)\s*=\s*(['\"])([A-Za-z0-9_./+-]+)\1"
)
_ANY = "/a/name/./of/./any/./source"
"""In the place of a disk's own: see `_alike`."""
WRITE_THROUGH = frozenset({"writethrough", "directsync"})
"""Values of <driver cache=> with which a write is durable when it is completed."""
QUEUES = ("queues", "queue_size", "event_idx")
"""Attributes of <driver> by which a client chooses the queues of a virtio-blk disk."""


@dataclass(frozen=True, slots=True)
class Disk:
    """What we read of a <disk>, ours or not."""

    dev: str | None
    """<target dev=>."""
    bus: str
    """<target bus=>, or what libvirt makes of dev."""
    device: str
    """disk, lun, cdrom or floppy."""
    serial: str | None
    alias: str | None
    boot: int | None
    """<boot order=>."""
    read_only: bool
    shareable: bool
    block_size: int | None = None
    """<blockio logical_block_size=>, if it is one of BLOCK_SIZES."""
    characteristics: Characteristics = OWN
    error_policy: ErrorPolicy = ON_ERROR
    limits: Limits = NONE
    histograms: Histograms = ()
    queues: tuple[tuple[str, str], ...] = ()
    """Those of QUEUES that it has, with their values."""


def read(node: Node) -> Disk:
    """Reads a <disk> element; never fails, whatever it holds."""
    dev = node.value("target", "dev")
    serial = node.child("serial")
    return Disk(
        dev=dev,
        bus=node.value("target", "bus") or _bus(dev or ""),
        device=node.attrs.get("device", "disk"),
        serial=(serial.text.strip() or None) if serial is not None else None,
        alias=node.value("alias", "name"),
        boot=number(node.value("boot", "order")),
        read_only=node.child("readonly") is not None,
        shareable=node.child("shareable") is not None,
        block_size=BLOCK_SIZES.get(node.value("blockio", "logical_block_size") or ""),
        characteristics=_characteristics(node),
        error_policy=_error_policy(node),
        limits=iotune.read(node),
        histograms=histogram.read(node),
        queues=tuple(queues(node).items()),
    )


def queues(node: Node) -> dict[str, str]:
    """Returns what a <disk> says of queues; of a device at libvirtd, what its guest has."""
    return {name: value for name in QUEUES if (value := node.value("driver", name)) is not None}


def _error_policy(node: Node) -> ErrorPolicy:
    """Reads error_policy and rerror_policy; the first is of reads, too, where it can be."""
    write = node.value("driver", "error_policy")
    read = node.value("driver", "rerror_policy") or write
    return ErrorPolicy(
        write=write if write in ("report", "stop") else ON_ERROR.write,
        read=read if read in ("report", "stop") else ON_ERROR.read,
    )


def _characteristics(node: Node) -> Characteristics:
    """Reads what the guest sees of a disk; what is not possible is left for the check."""
    wwn = _text(node, "wwn")
    return Characteristics(
        wwn=wwn.strip().lower().removeprefix("0x") if wwn is not None else None,
        vendor=_text(node, "vendor"),
        product=_text(node, "product"),
        rotation_rate=number(node.value("target", "rotation_rate")),
        physical_block_size=number(node.value("blockio", "physical_block_size")),
        removable=node.value("target", "removable") == "on",
        discard=node.value("driver", "discard") != "ignore",
        write_cache=node.value("driver", "cache") not in WRITE_THROUGH,
    )


def _text(node: Node, name: str) -> str | None:
    child = node.child(name)
    return child.text if child is not None and child.text.strip() else None


def _bus(dev: str) -> str:
    """Returns the bus that libvirt takes for a target dev without one."""
    for prefix, bus in (("fd", "fdc"), ("hd", "ide"), ("sd", "scsi"), ("vd", "virtio")):
        if dev.startswith(prefix):
            return bus
    return "xen" if dev.startswith("xvd") else "uml" if dev.startswith("ubd") else ""


def index(dev: str | None) -> int:
    """Returns the disk number in a target dev (sda 0, sdb 1, sdaa 26), -1 if there is none.

    Nor is there one of more letters than libvirt's int has room for.
    """
    match = _DEV.match(dev or "")
    if match is None or len(match[2]) > DEV_LETTERS_MAX:
        return -1
    number = 0
    for letter in match[2]:
        number = number * 26 + ord(letter) - ord("a") + 1
    return number - 1


def volume(node: Node, settings: Settings) -> VolumeRef | None:
    """Returns the volume that a <disk> names, or None if its source is not of ours.

    Raises:
        TranslateError: BAD_XML, the source begins as one of ours but is no LVSTORE/LVOL; or as
            `network.volume`.
    """
    source = node.child("source")
    if source is None:
        return None
    kind = node.attrs.get("type", "file")
    far = network.volume(node, _far(source, settings.network, settings), settings.allowed)
    if far is not None:
        return far
    name: str | None = None
    if kind in ("file", "block"):
        path = source.attrs.get("file" if kind == "file" else "dev", "")
        name = _after(path, settings.path_prefix)
    elif kind == "network":
        protocol, full = source.attrs.get("protocol"), source.attrs.get("name", "")
        if settings.protocol and protocol == settings.protocol:
            name = full
        elif protocol == "rbd":
            name = _after(full, settings.rbd_prefix)
    elif kind == "volume":
        store = _after(source.attrs.get("pool", ""), settings.pool_prefix)
        if store is not None:
            name = f"{store}/{source.attrs.get('volume', '')}"
    return None if name is None else parse_volume(name, kind)


def may_be_far(node: Node, settings: Settings, protocols: frozenset[str]) -> bool:
    """Whether a <disk> is over the network, by one of `protocols`, and QEMU need not have it."""
    source = node.child("source")
    return source is not None and network.can_be_ours(node, _far(source, protocols, settings))


def _far(source: Node, protocols: frozenset[str], settings: Settings) -> frozenset[str]:
    """Returns those by which a source is of another host; volumes are here."""
    prefix = settings.rbd_prefix
    if prefix and source.attrs.get("name", "").startswith(prefix):
        return protocols - {"rbd"}
    return protocols


def _after(text: str, prefix: str) -> str | None:
    """Returns what follows `prefix`, None if `text` does not begin so or the way is off."""
    return text[len(prefix) :] if prefix and text.startswith(prefix) else None


def parse_volume(name: str, kind: str = "disk") -> VolumeRef:
    """Splits LVSTORE/LVOL.

    Raises:
        TranslateError: BAD_XML, it is not that.
    """
    store, slash, lvol = name.partition("/")
    if not slash or not all(_NAME.fullmatch(n) and n not in (".", "..") for n in (store, lvol)):
        raise TranslateError(
            Refusal.BAD_XML,
            f"source of type '{kind}': '{name}' is not LVSTORE/LVOL, two names of 1 to 63 printable"
            " ASCII characters without space and slash",
        )
    return VolumeRef(store, lvol)


def parse_device(xml: str) -> Document | None:
    """Parses a device's XML; None if it is not exactly one well-formed <disk>."""
    try:
        document = Document(xml)
    except NotXmlError:
        return None
    root = document.root
    return document if root.name == "disk" and not root.namespace else None


def _alike(text: str) -> tuple[str, str]:
    """Returns a stored <disk> with _ANY in the place of what its <source> names, and that.

    Disks of thousands of domains differ in nothing else, and nothing that is read of a <disk>, or
    written into it, depends on it: what is kept of one is right for all. With markup in which there
    may be more than elements, or another name than a plain one, the text as it is, and ''.
    """
    found = _SOURCE.search(text)
    if found is None or "<!" in text or "<?" in text or _ANY in text:
        return text, ""
    start, end = found.span(2)
    return text[:start] + _ANY + text[end:], found[2]


def stored(text: str) -> Disk | None:
    """Returns what a stored <disk> says, None if it is none."""
    return _stored(_alike(text)[0]) if len(text) <= KEPT_CHARS else _stored.__wrapped__(text)


@lru_cache(KEPT)
def _stored(text: str) -> Disk | None:
    document = parse_device(text)
    return None if document is None else read(document.root)


def stored_network(text: str) -> VolumeRef | None:
    """Returns what a stored <disk> names over the network; None if it names nothing so."""
    document = parse_device(text)
    try:
        return None if document is None else network.stored_volume(document.root)
    except TranslateError:
        return None


def stored_text(document: Document, node: Node) -> str:
    """Returns a <disk> as it is kept: as written, without what libvirt would not keep.

    That is an alias of its own, and what shows a block copy.

    Prefixes that are declared outside and used inside are declared in it, so that it can stand
    alone.
    """
    text = document.source(node)
    if _is_stored(text):
        return text
    inner = parse_device(text)
    if inner is None:
        declared = "".join(
            f' xmlns{":" + prefix if prefix else ""}="{escape(uri)}"'
            for prefix, uri in node.scope().items()
            if prefix not in node.declares and (not prefix or f"{prefix}:" in text)
        )
        name_end = 1 + len(node.raw_name)
        text = text[:name_end] + declared + text[name_end:]
        inner = Document(text)
    alias = node.value("alias", "name")
    edits = Edits(inner)
    if alias is not None and not alias.startswith("ua-"):
        for child in inner.root.every("alias"):
            edits.remove(child)
    for child in inner.root.every("mirror"):
        edits.remove(child)
    return edits.apply()


def with_source(document: Document, other: Document) -> str:
    """Returns a <disk> with the type and the source of another one; the rest is as it was."""
    root, source = document.root, document.root.child("source")
    wanted = other.root.child("source")
    if source is None or wanted is None:
        return document.source(root)
    declared = {f"xmlns:{p}" if p else "xmlns": uri for p, uri in root.declares.items()}
    given = {**declared, **root.attrs, "type": other.root.attrs.get("type", "file")}
    edits = Edits(document)
    edits.replace(root.start, root.inner_start, f"<{root.raw_name}{attributes(dict(given))}>")
    edits.replace(source.start, source.end, f"<source{attributes(dict(wanted.attrs))}/>")
    return edits.apply()


def _is_stored(text: str) -> bool:
    """Whether a <disk> is known to be one that is kept as it is written."""
    disk = None if "mirror" in text else stored(text)
    return disk is not None and (disk.alias is None or disk.alias.startswith("ua-"))


def shown_alias(dev: str, given: str | None) -> str:
    """Returns the alias that clients see on a running domain's disk."""
    return given if given and given.startswith("ua-") else f"virtlun-disk-{dev}"


def shown(text: str, dev: str, indent: str, *, live: bool) -> str:
    """Returns a stored <disk> as clients see it: completed, moved to `indent`.

    That is a line break and spaces, or nothing. A running domain's has an alias.

    Raises:
        NotXmlError: it is none.
    """
    if len(text) > KEPT_CHARS:
        return _shown.__wrapped__(text, dev, indent, live)
    alike, source = _alike(text)
    made = _shown(alike, dev, indent, live)
    return made.replace(_ANY, source, 1) if source else made


@lru_cache(KEPT)
def _shown(text: str, dev: str, indent: str, live: bool) -> str:
    text = completed(text)
    return reindent(with_alias(text, dev) if live else text, indent)


def completed(text: str) -> str:
    """Returns a stored <disk> with type, device, driver and bus where the client left them out.

    libvirt's own dumpxml always has them, and clients read them: `virsh domblklist --details` fails
    without `device`, virt-manager and Nova go by `bus`, virtnbdbackup by the driver's type.
    """
    document = Document(text)
    root = document.root
    disk = read(root)
    edits = Edits(document)
    own = {"type": "file", "device": disk.device}
    edits.add_attributes(root, {k: v for k, v in own.items() if k not in root.attrs})
    _complete_driver(document, edits)
    target = root.child("target")
    if target is not None and "bus" not in target.attrs and disk.bus:
        edits.add_attributes(target, {"bus": disk.bus})
    return edits.apply()


def _complete_driver(document: Document, edits: Edits) -> None:
    """Writes the driver's name and type where libvirt would, and `raw` for its old word `aio`.

    libvirt knows the type of a storage pool's volume only while the domain runs; ours are all raw.
    """
    root = document.root
    driver = root.child("driver")
    given = driver.attrs if driver is not None else {}
    lacking = "".join(f" {k}='{v}'" for k, v in DRIVER.items() if k not in given)
    if driver is None:
        first = next(iter(root.children), None)
        if first is None:
            edits.append(root, [(0, f"<driver{lacking}/>")])
            return
        edits.insert(document.lead(first), f"{document.indent(first)}<driver{lacking}/>")
        return
    tag = document.data[driver.start : driver.inner_start]
    head, old = _DRIVER_HEAD.match(tag), _DRIVER_AIO.search(tag)
    assert head is not None
    if lacking:
        edits.insert(driver.start + head.end(), lacking)
    if given.get("type") == "aio" and old is not None:
        edits.replace(driver.start + old.start(1), driver.start + old.end(1), DRIVER["type"])


def with_alias(text: str, dev: str) -> str:
    """Returns a stored <disk> with an <alias>, where libvirt would write it."""
    document = Document(text)
    root = document.root
    if root.child("alias") is not None:
        return text
    edits = Edits(document)
    alias = f"<alias name='{shown_alias(dev, None)}'/>"
    address = root.child("address")
    if address is not None:
        edits.insert(document.lead(address), document.indent(address) + alias)
    else:
        edits.append(root, [(0, alias)])
    return edits.apply()
