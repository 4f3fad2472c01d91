"""Every element and attribute of a <disk>: what it means on a disk of ours.

One table, after libvirt's own schema (domaincommon.rng, `disk`): what a client asks for is done, or
is known to make no difference here, or is refused in one sentence that names it. What the table
does not have is refused, too. examples/libvirt/disk.md is made from it:

    python -c 'from pydataplane.domain.translate import fields; print(fields.document())'
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.model import VolumeRef
from pydataplane.domain.xml.disk import BLOCK_SIZES, Disk
from pydataplane.domain.xml.document import Node

_SERIAL = re.compile(r"[A-Za-z0-9_. +-]{1,255}")
"""libvirt's own rule for <serial>."""
_DEV_NAME = re.compile(r"(hd|sd|vd|xvd|ubd)[A-Za-z0-9_]{1,60}")
"""libvirt's own rule for <target dev=>, and a bound."""
_WWN = re.compile(r"[235][0-9a-f]{15}")
_PRINTABLE = re.compile(r"[ -~]*")


class Effect(enum.Enum):
    """What becomes of a field whose value is accepted."""

    HONOURED = "honoured"
    NONE = "without effect"
    """It speaks of how QEMU would do what the target does."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Field:
    """An element (`a/b`) or attribute (`a/b@c`) below <disk>."""

    path: str
    effect: Effect
    means: str
    """What it does, why it has no effect, or what to do instead of a refused one."""
    values: frozenset[str] | None = None
    """Those that are accepted; None: any, or such as `check` looks at. Others are refused."""
    instead: str = ""
    """Why the other values are refused, and what to do."""
    whole: bool = False
    """It speaks for all that is inside of the element."""


def _done(path: str, means: str, values: str | None = None, instead: str = "") -> Field:
    return Field(path, Effect.HONOURED, means, _split(values), instead)


def _same(
    path: str, means: str, values: str | None = None, instead: str = "", *, whole: bool = False
) -> Field:
    return Field(path, Effect.NONE, means, _split(values), instead, whole)


def _never(path: str, instead: str) -> Field:
    return Field(path, Effect.REFUSED, instead, frozenset(), instead, whole=True)


def _split(values: str | None) -> frozenset[str] | None:
    return None if values is None else frozenset(values.split())


_OWN_IO = "the target does the I/O, with io_uring; QEMU does none"
_ENCRYPTION = (
    "the target encrypts, with a key of the volume or its lvstore "
    "(`--key` when that is made), not QEMU; remove it"
)
_QUEUES = "the controller has a queue for each vCPU (`max_queues`), of 128 entries"
_CONTROLLER = "is of the controller, which all virtlun disks of the domain share; remove it"
_CACHE = (
    "the target never takes the host's page cache for durable: `none`, `writeback` and `unsafe` are"
    " a volatile cache that the guest flushes (`unsafe` is flushed, too); with `writethrough` and"
    " `directsync` each write is durable before it is completed"
)
_POLICY = (
    "`report`: the guest gets each error. `enospace`, as without it: a write for which there is no"
    " room waits, and the gateway pauses the domain. `stop`: so does whatever can be mended, reads"
    " too where `rerror_policy` does not say otherwise. A flush that failed is told always: what it"
    " was to make durable may be lost. What waits is tried again when the domain is resumed, and"
    " every few seconds where nobody paused it; a running domain takes another policy at its next"
    " start"
)
_READ_POLICY = "of reads: `report`, as without it, or `stop`"
_IGNORE = "a write that failed and is said to be done is lost data; use 'stop' or 'report'"

_NO_DRIVE = "a virtlun disk is a SCSI disk; remove the <address>"
_OTHER_ADDRESSES = (
    *("domain", "slot", "function", "multifunction", "port", "reg", "iobase", "irq", "base"),
    *("cssid", "ssid", "devno"),
)

FIELDS: tuple[Field, ...] = (
    _done("@type", "with <source>, the way to name a volume", "file block network volume"),
    _done("@device", "`lun` is the same as `disk`: the guest has a SCSI disk", "disk lun"),
    _same("@model", "the controller is of virtio 1", "virtio", "the controller is of virtio 1"),
    _same("@rawio", "QEMU needs no right for it", "no", "commands go to the target, not to a host"),
    _same("@sgio", "the target knows each command", "filtered", "the target has no others to pass"),
    _done(
        "@snapshot",
        "with `no` or `manual` a snapshot of the domain leaves the disk out unless it names it",
        "internal no manual",
        "a volume holds its snapshots itself, in no file; use 'internal' or 'no', or remove it",
    ),
    _done("source", "names the volume"),
    _done("source@file", "the path prefix and LVSTORE/LVOL"),
    _done("source@dev", "the path prefix and LVSTORE/LVOL"),
    _done("source@protocol", "`lvol`, or `rbd` with the prefix"),
    _done("source@name", "LVSTORE/LVOL"),
    _done("source@pool", "the prefix and LVSTORE"),
    _done("source@volume", "LVOL"),
    _same("source@mode", "is of iSCSI pools"),
    _same("source@index", "libvirt's own number"),
    _same("source@tls", "nothing goes over a network", "no", "nothing goes over a network"),
    _same("source/host", "the volume is on this host", whole=True),
    _same("source/auth", "the target asks for no secret", whole=True),
    _same("source/config", "is of Ceph", whole=True),
    _same("source/seclabel", "QEMU opens no file for it", whole=True),
    _same("source/privateData", "libvirt's own", whole=True),
    _done(
        "source@startupPolicy",
        "a volume that is not there fails the start",
        "mandatory",
        "a volume that is not there always fails the start; use 'mandatory', or remove it",
    ),
    _never("source@fdgroup", "the target opens volumes by name; remove it"),
    _never("source@query", "is of HTTP; remove it"),
    _never("source@tlsHostname", "nothing goes over a network; remove it"),
    _never("source@dir", "is of disks that are folders; remove it"),
    _never("source@path", "is of NVMe and vhost-user disks; remove it"),
    _never("source@type", "is of NVMe and vhost-user disks; remove it"),
    _never("source@managed", "is of NVMe disks; remove it"),
    _never("source@namespace", "is of NVMe disks; remove it"),
    _never("source/address", "is of NVMe disks; remove it"),
    _never("source/reconnect", "`reconnect_s` in virtlun.toml says it for all; remove it"),
    _never(
        "source/snapshot",
        "is of a snapshot inside of a file; name a volume, or its snapshot VOLUME@NAME",
    ),
    _never("source/reservations", "virtlun disks have no persistent reservations yet; remove it"),
    _never("source/slices", "a virtlun disk is a whole volume; make one of that size"),
    _never("source/encryption", _ENCRYPTION),
    _never("source/initiator", "is of iSCSI; remove it"),
    _never("source/ssl", "is of HTTP; remove it"),
    _never("source/cookies", "is of HTTP; remove it"),
    _never("source/readahead", "is of HTTP; remove it"),
    _never("source/timeout", "is of HTTP; remove it"),
    _never("source/identity", "is of NFS; remove it"),
    _done("target", ""),
    _done("target@dev", "the name by which libvirt's calls know the disk"),
    _done(
        "target@bus",
        "`virtio` as well gives a SCSI disk: a virtio-blk device is plugged by QEMU, a LUN by an"
        " event of the controller that is there already",
        "scsi virtio",
    ),
    _same("target@tray", "a disk has no tray", "closed", "a disk has no tray; remove it"),
    _done("target@removable", "INQUIRY's RMB; its guest reads a new size only when it rescans"),
    _done("target@rotation_rate", "in VPD page B1h; 1, or 1025 to 65534"),
    _done("driver", ""),
    _done("driver@name", "shown where it is left out", "qemu", "use 'qemu', or remove it"),
    _done("driver@type", "volumes are raw; shown as `raw`, also where it is left out", "raw aio"),
    _done("driver@cache", _CACHE, "default none writeback writethrough directsync unsafe"),
    _done("driver@error_policy", _POLICY, "report enospace stop", _IGNORE),
    _done(
        "driver@rerror_policy",
        _READ_POLICY,
        "report stop",
        "data that could not be read and is said to be there is invented; use 'stop' or 'report'",
    ),
    _same("driver@io", _OWN_IO, "native threads io_uring"),
    _same("driver@ioeventfd", "kicks always come by eventfd"),
    _same("driver@event_idx", "is agreed between guest and target"),
    _done("driver@copy_on_read", "a volume has nothing below it", "off", "remove it"),
    _done(
        "driver@discard",
        "`ignore`: the guest sees a disk without UNMAP. Else a thin volume takes UNMAP and gives"
        " back the room, a thick one has none",
        "unmap ignore",
    ),
    _same("driver@iothread", _OWN_IO),
    Field("driver/iothreads", Effect.NONE, _OWN_IO, whole=True),
    _done(
        "driver@detect_zeroes",
        "zeros are written as any data",
        "off",
        "the target writes zeros as any data; use fstrim in the guest, and remove it",
    ),
    _same("driver@queues", _QUEUES),
    _same("driver@queue_size", _QUEUES),
    _done("driver@iommu", "the guest reaches all of its memory", "off", _CONTROLLER),
    _done("driver@ats", "", "off", _CONTROLLER),
    _done("driver@packed", "rings are split ones", "off", _CONTROLLER),
    _done("driver@page_per_vq", "", "off", _CONTROLLER),
    _never("driver@discard_no_unref", "is of qcow2; remove it"),
    _never("driver/metadata_cache", "is of qcow2; remove it"),
    _same("auth", "the target asks for no secret", whole=True),
    _done("boot", ""),
    _done("boot@order", "boots from the LUN"),
    _never("boot@loadparm", "is of s390; remove it"),
    _done("readonly", "the guest sees a write-protected disk; the target refuses writes"),
    _done("shareable", "other domains may have the volume, too, if they say the same"),
    _done("serial", "VPD page 80h, and in 83h; /dev/disk/by-id in the guest"),
    _done("wwn", "the NAA designator of VPD page 83h; /dev/disk/by-id/wwn-0x... in the guest"),
    _done("vendor", "of INQUIRY"),
    _done("product", "of INQUIRY"),
    _done("alias", ""),
    _done("alias@name", "as libvirt: `ua-` ones are kept"),
    _done("address", "kept and shown"),
    _same(
        "address@type",
        "a `drive` address is kept and shown; the guest finds the disk by serial or WWN, at a"
        " target number of virtlun's own, LUN 0",
        "drive unassigned",
        _NO_DRIVE,
    ),
    *(
        _same(f"address@{name}", "kept and shown")
        for name in ("controller", "bus", "target", "unit")
    ),
    *(_never(f"address@{name}", _NO_DRIVE) for name in _OTHER_ADDRESSES),
    _never("address/zpci", _NO_DRIVE),
    _done("blockio", ""),
    _done("blockio@logical_block_size", "512 or 4096, no less than the volume's own"),
    _same("blockio@physical_block_size", "512 or 4096; the guest sees the volume's"),
    _never(
        "blockio@discard_granularity",
        "the guest sees the volume's own in VPD page B0h; remove it",
    ),
    _done("backingStore", "there is none"),
    _same("backingStore@index", "libvirt's own number"),
    _same("privateData", "libvirt's own", whole=True),
    _never("backingStore@type", "volumes have nothing below them yet; remove it"),
    _never("backingStore/format", "volumes have nothing below them yet; remove it"),
    _never("backingStore/source", "volumes have nothing below them yet; remove it"),
    _never("backingStore/backingStore", "volumes have nothing below them yet; remove it"),
    _never("mirror", "block copy jobs are not possible on virtlun disks; remove it"),
    _never("iotune", "I/O limits are not possible on virtlun disks yet; remove it"),
    _never("throttlefilters", "I/O limits are not possible on virtlun disks yet; remove it"),
    _never("encryption", _ENCRYPTION),
    _never("transient", "what is written to a volume stays; remove it, or copy the volume"),
    _never("geometry", "is of IDE disks; remove it"),
    _never("acpi", "a LUN is no device of the host bridge; remove it"),
    _never("backenddomain", "is of Xen; remove it"),
)

_BY_PATH = {field.path: field for field in FIELDS}


def find(path: str) -> Field | None:
    """Returns what the table says of an element or attribute, by itself or what it stands in."""
    field = _BY_PATH.get(path)
    outer = path.partition("@")[0] if "@" in path else path.rpartition("/")[0]
    while field is None and outer:
        around = _BY_PATH.get(outer)
        field = around if around is not None and around.whole else None
        outer = outer.rpartition("/")[0]
    return field


def check(node: Node, disk: Disk, ref: VolumeRef) -> None:
    """Refuses what a disk of ours cannot be.

    Raises:
        TranslateError: BAD_XML or UNSUPPORTED, one sentence.
    """
    what = f"disk '{disk.dev}' (volume {ref.alias})"
    if not disk.dev:
        raise _bad(f"the disk of volume {ref.alias} has no target dev; give it one")
    if not _DEV_NAME.fullmatch(disk.dev):
        raise _bad(f"'{disk.dev}' is no target dev for volume {ref.alias}; use one like sda or vda")
    if disk.device not in ("disk", "lun"):
        raise _unsupported(f"{what} cannot be a {disk.device}; use device='disk'")
    if disk.bus not in ("scsi", "virtio"):
        raise _unsupported(
            f"{what} cannot be on bus '{disk.bus}'; virtlun disks are SCSI disks, use bus='scsi'"
        )
    kind = node.value("driver", "type")
    if kind not in (None, "raw", "aio"):
        raise _unsupported(f"{what} cannot have driver type '{kind}'; virtlun volumes are raw")
    _check_fields(node, "", what)
    _check_blockio(node, what)
    if disk.serial is not None and not _SERIAL.fullmatch(disk.serial):
        raise _bad(f"{what}: the serial may have letters, digits, space and _.+- only, up to 255")
    _check_characteristics(node, disk, what)


def _check_fields(node: Node, path: str, what: str) -> None:
    """Refuses what the table refuses, or does not have, in an element and all inside of it.

    Raises:
        TranslateError: UNSUPPORTED.
    """
    for name, value in node.attrs.items():
        field = None if " " in name else find(f"{path}@{name}")
        if " " in name or (field is not None and field.values is None):
            continue  # of a namespace of somebody else's, or any value will do
        if field is None or value not in (field.values or ()):
            why = field.instead if field is not None else "virtlun does not know it; remove it"
            element = path.rpartition("/")[2] or "disk"
            raise _unsupported(f"{what}: {name}='{value}' of <{element}> is not possible: {why}")
    for child in node.children:
        if child.namespace:
            continue
        inner = f"{path}/{child.name}".lstrip("/")
        field = find(inner)
        if field is None or field.effect is Effect.REFUSED:
            why = field.instead if field is not None else "virtlun does not know it; remove it"
            raise _unsupported(f"{what}: <{child.name}> is not possible: {why}")
        if not field.whole:
            _check_fields(child, inner, what)


def _check_characteristics(node: Node, disk: Disk, what: str) -> None:
    """Refuses a name or rate that SCSI has no room for.

    Raises:
        TranslateError: BAD_XML.
    """
    own = disk.characteristics
    if own.wwn is not None and not _WWN.fullmatch(own.wwn):
        raise _bad(f"{what}: the wwn must have 16 hexadecimal digits, the first 2, 3 or 5")
    for name, text, longest in (("vendor", own.vendor, 8), ("product", own.product, 16)):
        if text is not None and (len(text) > longest or not _PRINTABLE.fullmatch(text)):
            raise _bad(f"{what}: the {name} may have up to {longest} printable ASCII characters")
    rate = node.value("target", "rotation_rate")
    if rate is not None and own.rotation_rate not in (1, *range(1025, 65535)):
        raise _bad(f"{what}: rotation_rate {rate} is none; use 1, or 1025 to 65534")


def _check_blockio(node: Node, what: str) -> None:
    """Refuses block sizes that no disk of ours has.

    Whether the volume's own blocks are small enough for the logical ones, the target says.

    Raises:
        TranslateError: UNSUPPORTED.
    """
    sizes = {}
    for name in ("logical_block_size", "physical_block_size"):
        size = node.value("blockio", name)
        if size is not None and size not in BLOCK_SIZES:
            raise _unsupported(
                f"{what}: {name} {size} is not possible; use 512 or 4096, or remove it"
            )
        sizes[name] = BLOCK_SIZES.get(size or "")
    logical, physical = sizes.values()
    if logical is not None and physical is not None and physical < logical:
        raise _unsupported(
            f"{what}: a physical_block_size of {physical} is less than the logical_block_size of"
            f" {logical}; make it {logical}, or remove it"
        )


def _bad(message: str) -> TranslateError:
    return TranslateError(Refusal.BAD_XML, message)


def _unsupported(message: str) -> TranslateError:
    return TranslateError(Refusal.UNSUPPORTED, message)


_HEAD = """# What a `<disk>` of virtlun may say

Made from the table that decides (`pydataplane/domain/translate/fields.py`). What is not in it is
refused in one sentence that names it.
"""


def document() -> str:
    """Returns the table for people, in Markdown."""
    return "\n".join((_HEAD, *_lines()))


def _lines() -> Iterable[str]:
    yield "| of `<disk>` | values | what becomes of it |"
    yield "| --- | --- | --- |"
    for field in FIELDS:
        path, _, attribute = field.path.partition("@")
        name = f"`<{path.rpartition('/')[2]}>`" if path else ""
        if "/" in path:
            name += f" of `<{path.rpartition('/')[0].rpartition('/')[2]}>`"
        name = f"`{attribute}`" + (f" of {name}" if name else "") if attribute else name
        if not field.means and field.values is None:
            continue
        values = "" if field.values is None else ", ".join(f"`{v}`" for v in sorted(field.values))
        effect = field.effect.value
        text = f"{effect}: {field.means}" if field.means else effect
        if field.values and field.instead and field.instead != field.means:
            text += f". Others are refused: {field.instead}"
        yield f"| {name} | {values} | {text} |"
