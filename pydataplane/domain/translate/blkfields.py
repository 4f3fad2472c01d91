"""The fields of a <disk> that a virtio-blk disk of ours takes otherwise than a LUN.

A row here goes before the one of the same path in `fields`.
"""

from __future__ import annotations

from pydataplane.domain.translate.fieldkinds import Field, done, never, same

_SCSI = "is of SCSI disks; remove it, or use bus='scsi'"
_PCI = ("domain", "bus", "slot", "function", "multifunction")

FIELDS: tuple[Field, ...] = (
    done("@device", "", "disk", "a virtio-blk disk takes no SCSI commands; use bus='scsi'"),
    same("target@removable", "a virtio-blk disk never is", "off", _SCSI),
    never("target@rotation_rate", _SCSI),
    done(
        "driver@cache",
        "a volatile cache that the guest flushes",
        "default none writeback unsafe",
        "a virtio-blk disk has the cache of its volume; use 'none', or bus='scsi'",
    ),
    done(
        "driver@discard",
        "`ignore`: the guest sees a disk without discard. Else as a thin or thick volume has it",
        "unmap ignore",
    ),
    done(
        "driver@queues",
        "request queues, up to 64, which is what it has of more; one for each vCPU up to"
        " `max_queues` where it is left out or 0",
    ),
    done(
        "driver@queue_size",
        "entries of each queue: 128, 256, 512 or 1024, 128 without it; no fewer than the"
        " descriptors of the longest request",
    ),
    done(
        "driver@event_idx",
        "`off`: QEMU does not offer its guest VIRTIO_F_EVENT_IDX; it does otherwise",
        "on off",
    ),
    done("boot@order", "libvirt's: boots from the disk"),
    done("serial", "the first 20 characters; /dev/disk/by-id/virtio-... in the guest"),
    never("wwn", _SCSI),
    never("vendor", _SCSI),
    never("product", _SCSI),
    done("address", "the PCI address; libvirt gives one where there is none"),
    done(
        "address@type",
        "`pci`; others are replaced by the one that libvirt gives",
        "pci drive unassigned",
    ),
    *(done(f"address@{name}", "libvirt's") for name in _PCI),
)

BY_PATH = {field.path: field for field in FIELDS}

HEAD = """
## As a virtio-blk disk

What a disk with `bus='virtio'`, or one of a QEMU without vhost-user-scsi, takes otherwise.
"""
