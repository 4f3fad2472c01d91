"""Every element and attribute of a <disk>: what it means on a disk of ours.

One table, after libvirt's own schema (domaincommon.rng, `disk`): what a client asks for is done, or
is known to make no difference here, or is refused in one sentence that names it. What the table
does not have is refused, too. examples/libvirt/disk.md is made from it:

    python -c 'from pydataplane.domain.translate import fields; print(fields.document())'
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.limits import NAMES
from pydataplane.domain.model import FrontEnd, VolumeRef
from pydataplane.domain.translate import blkfields, networks
from pydataplane.domain.translate.fieldkinds import Effect, Field, done, never, same
from pydataplane.domain.xml import histogram, iotune
from pydataplane.domain.xml.blkdisk import MAX_QUEUES, QUEUE_SIZES
from pydataplane.domain.xml.disk import BLOCK_SIZES, PHYSICAL_BLOCK_SIZES, QUEUES, Disk
from pydataplane.domain.xml.document import Node, number

_SERIAL = re.compile(r"[A-Za-z0-9_. +-]{1,255}")
"""libvirt's own rule for <serial>."""
_DEV_NAME = re.compile(r"(hd|sd|vd|xvd|ubd)[A-Za-z0-9_]{1,60}")
"""libvirt's own rule for <target dev=>, and a bound."""
_WWN = re.compile(r"[235][0-9a-f]{15}")
_PRINTABLE = re.compile(r"[ -~]*")


_OWN_IO = "the target does the I/O, with io_uring; QEMU does none"
_ENCRYPTION = (
    "the target encrypts, with a key of the volume or its lvstore "
    "(`--key` when that is made), not QEMU; remove it"
)
_QUEUES = (
    "a LUN shares the request queues of its domain's controller, one for each vCPU up to"
    " `max_queues`, of 128 entries; remove it, or make it a virtio-blk disk (bus='virtio')"
)
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

_LIMITS = (
    "the target keeps the limits, which are of the volume, from before the guest sees the disk"
    " until it has gone; not with `<shareable/>`. `virsh blkdeviotune` shows and changes them"
)
_LIMIT = {
    **dict.fromkeys(NAMES, ""),
    "total_bytes_sec": "bytes a second; or `read_bytes_sec` and `write_bytes_sec`",
    "total_iops_sec": "operations a second; or `read_iops_sec` and `write_iops_sec`",
    "total_bytes_sec_max": "the rate of a burst, of each of the six (`total_iops_sec_max`, ...)",
    "total_bytes_sec_max_length": "its seconds, of each of the six; 1 where it is left out",
    "size_iops_sec": "bytes that count as one operation",
}

_HISTOGRAM = (
    "the target counts the latencies of the volume from when the guest has the disk, and"
    " `domstats --block` has them; libvirt need not know it (12.1 and newer do). XML that has it"
    " begins anew by `update-device --live`, also with other bins"
    " ([what to know](../../docs/pages/how-to/latencies.md#what-to-know))"
)
_NO_DRIVE = "a virtlun disk is a SCSI disk; remove the <address>"
_OTHER_ADDRESSES = (
    *("domain", "slot", "function", "multifunction", "port", "reg", "iobase", "irq", "base"),
    *("cssid", "ssid", "devno"),
)

FIELDS: tuple[Field, ...] = (
    done("@type", "with <source>, the way to name a volume", "file block network volume"),
    done("@device", "`lun` is the same as `disk`: the guest has a SCSI disk", "disk lun"),
    same("@model", "the controller is of virtio 1", "virtio", "the controller is of virtio 1"),
    same("@rawio", "QEMU needs no right for it", "no", "commands go to the target, not to a host"),
    same("@sgio", "the target knows each command", "filtered", "the target has no others to pass"),
    done(
        "@snapshot",
        "with `no` or `manual` a snapshot of the domain leaves the disk out unless it names it",
        "internal no manual",
        "a volume holds its snapshots itself, in no file; use 'internal' or 'no', or remove it",
    ),
    done("source", "names the volume"),
    done("source@file", "the path prefix and LVSTORE/LVOL"),
    done("source@dev", "the path prefix and LVSTORE/LVOL"),
    done("source@protocol", "`lvol`, or `rbd` with the prefix"),
    done("source@name", "LVSTORE/LVOL"),
    done("source@pool", "the prefix and LVSTORE"),
    done("source@volume", "LVOL"),
    same("source@mode", "is of iSCSI pools"),
    same("source@index", "libvirt's own number"),
    same("source@tls", "nothing goes over a network", "no", "nothing goes over a network"),
    same("source/host", "the volume is on this host", whole=True),
    same("source/auth", "the target asks for no secret", whole=True),
    same("source/config", "is of Ceph", whole=True),
    same("source/seclabel", "QEMU opens no file for it", whole=True),
    same("source/privateData", "libvirt's own", whole=True),
    done(
        "source@startupPolicy",
        "a volume that is not there fails the start",
        "mandatory",
        "a volume that is not there always fails the start; use 'mandatory', or remove it",
    ),
    never("source@fdgroup", "the target opens volumes by name; remove it"),
    never("source@query", "is of HTTP; remove it"),
    never("source@tlsHostname", "nothing goes over a network; remove it"),
    never("source@dir", "is of disks that are folders; remove it"),
    never("source@path", "is of NVMe and vhost-user disks; remove it"),
    never("source@type", "is of NVMe and vhost-user disks; remove it"),
    never("source@managed", "is of NVMe disks; remove it"),
    never("source@namespace", "is of NVMe disks; remove it"),
    never("source/address", "is of NVMe disks; remove it"),
    never("source/reconnect", "`reconnect_s` in virtlun.toml says it for all; remove it"),
    never(
        "source/snapshot",
        "is of a snapshot inside of a file; name a volume, or its snapshot VOLUME@NAME",
    ),
    never(
        "source/reservations",
        "virtlun disks have persistent reservations without a helper; remove it",
    ),
    never("source/slices", "a virtlun disk is a whole volume; make one of that size"),
    never("source/encryption", _ENCRYPTION),
    never("source/initiator", "is of iSCSI; remove it"),
    never("source/ssl", "is of HTTP; remove it"),
    never("source/cookies", "is of HTTP; remove it"),
    never("source/readahead", "is of HTTP; remove it"),
    never("source/timeout", "is of HTTP; remove it"),
    never("source/identity", "is of NFS; remove it"),
    done("target", ""),
    done("target@dev", "the name by which libvirt's calls know the disk"),
    done(
        "target@bus",
        "`scsi`: a LUN, which an event of the controller plugs that is there already. `virtio`: a"
        " virtio-blk disk, a device that QEMU plugs ([below](#as-a-virtio-blk-disk)), unless"
        " `front_end` of virtlun.toml says otherwise",
        "scsi virtio",
    ),
    same("target@tray", "a disk has no tray", "closed", "a disk has no tray; remove it"),
    done(
        "target@removable",
        "INQUIRY's RMB; its guest reads a new size only when it rescans, and what it ejects is in"
        " again when it loads that, boots anew or the target starts",
    ),
    done("target@rotation_rate", "in VPD page B1h; 1, or 1025 to 65534"),
    done("driver", ""),
    done("driver@name", "shown where it is left out", "qemu", "use 'qemu', or remove it"),
    done("driver@type", "volumes are raw; shown as `raw`, also where it is left out", "raw aio"),
    done("driver@cache", _CACHE, "default none writeback writethrough directsync unsafe"),
    done("driver@error_policy", _POLICY, "report enospace stop", _IGNORE),
    done(
        "driver@rerror_policy",
        _READ_POLICY,
        "report stop",
        "data that could not be read and is said to be there is invented; use 'stop' or 'report'",
    ),
    same("driver@io", _OWN_IO, "native threads io_uring"),
    same("driver@ioeventfd", "kicks always come by eventfd"),
    never(
        "driver@event_idx",
        "is of virtio-blk disks, and agreed between a LUN's controller and its guest; remove it",
    ),
    done("driver@copy_on_read", "a volume has nothing below it", "off", "remove it"),
    done(
        "driver@discard",
        "`ignore`: the guest sees a disk without UNMAP. Else a thin volume takes UNMAP and gives"
        " back the room, a thick one has none",
        "unmap ignore",
    ),
    same("driver@iothread", _OWN_IO),
    Field("driver/iothreads", Effect.NONE, _OWN_IO, whole=True),
    done(
        "driver@detect_zeroes",
        "zeros are written as any data",
        "off",
        "the target writes zeros as any data; use fstrim in the guest, and remove it",
    ),
    never("driver@queues", _QUEUES),
    never("driver@queue_size", _QUEUES),
    done("driver@iommu", "the guest reaches all of its memory", "off", _CONTROLLER),
    done("driver@ats", "", "off", _CONTROLLER),
    done("driver@packed", "rings are split ones", "off", _CONTROLLER),
    done("driver@page_per_vq", "", "off", _CONTROLLER),
    never("driver@discard_no_unref", "is of qcow2; remove it"),
    done("driver/statistics", ""),
    done("driver/statistics/latency-histogram", _HISTOGRAM),
    done(
        "driver/statistics/latency-histogram@type",
        "of which operations; without it of each that has no histogram of its own",
        "read write flush",
        "a virtlun disk has no such operation; use 'read', 'write' or 'flush', or no type",
    ),
    done(
        "driver/statistics/latency-histogram/bin", "one more is there from 0 on, if none starts so"
    ),
    done("driver/statistics/latency-histogram/bin@start", "nanoseconds"),
    never(
        "driver/statistics/statistic",
        "the target counts no intervals; use <latency-histogram>, or `virtlun top`",
    ),
    never("driver/metadata_cache", "is of qcow2; remove it"),
    same("auth", "the target asks for no secret", whole=True),
    done("boot", ""),
    done("boot@order", "boots from the LUN"),
    never("boot@loadparm", "is of s390; remove it"),
    done("readonly", "the guest sees a write-protected disk; the target refuses writes"),
    done(
        "shareable",
        "other domains may have the volume, too, if they say the same. A reset of the disk by one"
        " of them (SCSI's LOGICAL UNIT RESET) is one to all: what the others have under way ends as"
        " TASK ABORTED, which may be after the reset's answer",
    ),
    done("serial", "VPD page 80h, and in 83h; /dev/disk/by-id in the guest"),
    done("wwn", "the NAA designator of VPD page 83h; /dev/disk/by-id/wwn-0x... in the guest"),
    done("vendor", "of INQUIRY"),
    done("product", "of INQUIRY"),
    done("alias", ""),
    done("alias@name", "as libvirt: `ua-` ones are kept"),
    done("address", "kept and shown"),
    same(
        "address@type",
        "a `drive` address is kept and shown; the guest finds the disk by serial or WWN, at a"
        " target number of virtlun's own, LUN 0",
        "drive unassigned",
        _NO_DRIVE,
    ),
    *(
        same(f"address@{name}", "kept and shown")
        for name in ("controller", "bus", "target", "unit")
    ),
    *(never(f"address@{name}", _NO_DRIVE) for name in _OTHER_ADDRESSES),
    never("address/zpci", _NO_DRIVE),
    done("blockio", ""),
    done("blockio@logical_block_size", "512 or 4096, no less than the volume's own"),
    done(
        "blockio@physical_block_size",
        "a power of two, from the logical block to 2097152; the volume's own where it is left out."
        " With a larger one than the volume's, a disk has no WRITE ATOMIC",
    ),
    never(
        "blockio@discard_granularity",
        "the guest sees the volume's own in VPD page B0h; remove it",
    ),
    done("backingStore", "there is none"),
    same("backingStore@index", "libvirt's own number"),
    same("privateData", "libvirt's own", whole=True),
    never("backingStore@type", "the target knows what is below a volume; remove it"),
    never("backingStore/format", "the target knows what is below a volume; remove it"),
    never("backingStore/source", "the target knows what is below a volume; remove it"),
    never("backingStore/backingStore", "the target knows what is below a volume; remove it"),
    same("mirror", "shows a block copy under way; not read, as by libvirt", whole=True),
    done("iotune", _LIMITS),
    *(done(f"iotune/{name}", means) for name, means in _LIMIT.items()),
    never("iotune/group_name", "each volume has limits of its own; give the disks one each"),
    never("throttlefilters", "is of QEMU's throttle groups; use <iotune>"),
    never("encryption", _ENCRYPTION),
    never("transient", "what is written to a volume stays; remove it, or copy the volume"),
    never("geometry", "is of IDE disks; remove it"),
    never("acpi", "a LUN is no device of the host bridge; remove it"),
    never("backenddomain", "is of Xen; remove it"),
)

_BY_PATH = {field.path: field for field in FIELDS}


def find(path: str, front: FrontEnd = "scsi", *, far: bool = False) -> Field | None:
    """Returns what the table says of an element or attribute, by itself or what it stands in.

    `far`: the disk is one over the network.
    """
    if far and (of_far := networks.BY_PATH.get(path)) is not None:
        return of_far
    if front == "blk" and (own := blkfields.BY_PATH.get(path)) is not None:
        return own
    field = _BY_PATH.get(path)
    outer = path.partition("@")[0] if "@" in path else path.rpartition("/")[0]
    while field is None and outer:
        around = _BY_PATH.get(outer)
        field = around if around is not None and around.whole else None
        outer = outer.rpartition("/")[0]
    return field


def check(
    node: Node, disk: Disk, ref: VolumeRef, front: FrontEnd, *, goes_on: bool = False
) -> None:
    """Refuses what a disk of ours cannot be, if it is to be a LUN, or a virtio-blk disk.

    `goes_on`: its guest has it, and what its client asks for of queues is what it did before: an
    earlier version took that of a LUN.

    Raises:
        TranslateError: BAD_XML or UNSUPPORTED, one sentence.
    """
    far = ref.source is not None
    what = f"disk '{disk.dev}' ({'image' if far else 'volume'} {ref.alias})"
    if not disk.dev:
        raise _bad(f"the disk of volume {ref.alias} has no target dev; give it one")
    if not _DEV_NAME.fullmatch(disk.dev):
        raise _bad(f"'{disk.dev}' is no target dev for volume {ref.alias}; use one like sda or vda")
    if disk.device not in ("disk", "lun"):
        raise _unsupported(
            f"{what} cannot be a {disk.device}, nor its medium: attach the volume as a disk"
            f" (device='disk'), or give the {disk.device} a file"
        )
    if disk.bus not in ("scsi", "virtio"):
        raise _unsupported(f"{what} cannot be on bus '{disk.bus}'; use bus='scsi', or bus='virtio'")
    kind = node.value("driver", "type")
    if kind not in (None, "raw", "aio"):
        raise _unsupported(f"{what} cannot have driver type '{kind}'; virtlun volumes are raw")
    # One of bus virtio that is a LUN asks for what a virtio-blk disk has, which says nothing here.
    unseen = goes_on or (front == "scsi" and disk.bus == "virtio")
    _check_fields(node, "", what, front, far=far, taken=QUEUES if unseen else ())
    _check_blockio(node, what)
    if not unseen:
        _check_queues(node, what)
    iotune.check(node, what)
    histogram.check(node, what)
    if disk.serial is not None and not _SERIAL.fullmatch(disk.serial):
        raise _bad(f"{what}: the serial may have letters, digits, space and _.+- only, up to 255")
    _check_characteristics(node, disk, what)


def can_be_blk(node: Node, ref: VolumeRef) -> bool:
    """Whether nothing that a <disk> says is of LUNs alone."""
    try:
        _check_fields(node, "", "", "blk", far=ref.source is not None)
    except TranslateError:
        return False
    return True


def _check_fields(
    node: Node,
    path: str,
    what: str,
    front: FrontEnd,
    *,
    far: bool,
    taken: Container[str] = (),
) -> None:
    """Refuses what the table refuses, or does not have, in an element and all inside of it.

    `taken`: attributes of <driver> that are not looked at.

    Raises:
        TranslateError: UNSUPPORTED.
    """
    for name, value in node.attrs.items():
        if path == "driver" and name in taken:
            continue
        field = None if " " in name else find(f"{path}@{name}", front, far=far)
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
        field = find(inner, front, far=far)
        if field is None or field.effect is Effect.REFUSED:
            why = field.instead if field is not None else "virtlun does not know it; remove it"
            raise _unsupported(f"{what}: <{child.name}> is not possible: {why}")
        if not field.whole:
            _check_fields(child, inner, what, front, far=far, taken=taken)


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
    size = node.value("blockio", "logical_block_size")
    if size is not None and size not in BLOCK_SIZES:
        raise _unsupported(
            f"{what}: logical_block_size {size} is not possible; use 512 or 4096, or remove it"
        )
    logical, size = BLOCK_SIZES.get(size or ""), node.value("blockio", "physical_block_size")
    physical = number(size)
    if size is not None and physical not in PHYSICAL_BLOCK_SIZES:
        raise _unsupported(
            f"{what}: physical_block_size {size} is not possible; use a power of two from 512 to"
            f" {max(PHYSICAL_BLOCK_SIZES)}, or remove it"
        )
    if logical is not None and physical is not None and physical < logical:
        raise _unsupported(
            f"{what}: a physical_block_size of {physical} is less than the logical_block_size of"
            f" {logical}; make it {logical}, or remove it"
        )


def _check_queues(node: Node, what: str) -> None:
    """Refuses queues that no virtio-blk disk of ours has.

    Raises:
        TranslateError: UNSUPPORTED.
    """
    queues, size = node.value("driver", "queues"), node.value("driver", "queue_size")
    if queues is not None and number(queues) is None:
        raise _unsupported(
            f"{what}: queues='{queues}' of <driver> is not possible; use 1 to {MAX_QUEUES}, or"
            " remove it"
        )
    if size is not None and number(size) not in QUEUE_SIZES:
        raise _unsupported(
            f"{what}: queue_size='{size}' of <driver> is not possible; use a power of two from"
            f" {min(QUEUE_SIZES)} to {max(QUEUE_SIZES)}, or remove it"
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
    blk, far = _lines(blkfields.FIELDS), _lines(networks.FIELDS)
    return "\n".join((_HEAD, *_lines(FIELDS), blkfields.HEAD, *blk, networks.HEAD, *far))


def _lines(fields: Iterable[Field]) -> Iterable[str]:
    yield "| of `<disk>` | values | what becomes of it |"
    yield "| --- | --- | --- |"
    for field in fields:
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
