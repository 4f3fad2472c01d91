"""Which front end a disk of ours gets, and what it is planned to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pydataplane.domain.model import FrontEnd, KnownAs, LunPlan, Settings, VolumeRef
from pydataplane.domain.translate import fields
from pydataplane.domain.xml import network
from pydataplane.domain.xml.carrier import qemu_of
from pydataplane.domain.xml.disk import Disk
from pydataplane.domain.xml.document import Node
from pydataplane.domain.xml.metadata import Metadata

Identity = tuple[str | None, tuple[object, ...], str]
"""What makes a disk the same as before: target dev, `VolumeRef.image` and bus."""

Fronts = Mapping[Identity, FrontEnd]
"""What disks are that a domain has."""


def identity(disk: Disk, ref: VolumeRef) -> Identity:
    """Returns by what a disk is known to be the same as before."""
    return disk.dev, ref.image, disk.bus


def of(metadata: Metadata | None) -> Fronts:
    """Returns what the disks of a domain are."""
    entries = metadata.entries if metadata is not None else ()
    return {
        identity(disk, entry.lun.volume): entry.lun.front
        for entry in entries
        if (disk := entry.disk) is not None
    }


def choose(
    node: Node, disk: Disk, ref: VolumeRef, domain: Node, settings: Settings, before: Fronts
) -> FrontEnd:
    """Returns what a disk is to be; one that the domain has stays what it is.

    Where nobody chose, one of bus virtio that asks for what a SCSI disk alone has is a LUN, as all
    of them were in earlier versions.

    Args:
        node: the client's.
        disk: what it says.
        ref: its volume.
        domain: that it is of.
        settings: of the configuration.
        before: the disks that the domain has.
    """
    kept = before.get(identity(disk, ref))
    if kept is not None:
        return kept
    if settings.front_end != "auto":
        return settings.front_end
    if settings.qemu_lacks_scsi(*qemu_of(domain)):
        return "blk"
    return "blk" if disk.bus == "virtio" and fields.can_be_blk(node, ref) else "scsi"


def can_have_scsi(domain: Node, settings: Settings) -> bool:
    """Whether a domain that has no LUN is to have the controller for them."""
    return settings.front_end != "blk" and not settings.qemu_lacks_scsi(*qemu_of(domain))


def check_any(node: Node, disk: Disk, ref: VolumeRef) -> None:
    """Refuses what a disk of ours cannot be, whatever its front end, and whoever may have it.

    Raises:
        TranslateError: as `fields.check`.
    """
    is_blk = disk.bus == "virtio" and fields.can_be_blk(node, ref)
    fields.check(node, disk, ref, "blk" if is_blk else "scsi", goes_on=True)


def known_as(ref: VolumeRef, before: LunPlan | None, *, running: bool) -> KnownAs | None:
    """Returns as what its guest goes on to know a disk over the network; None: as it is.

    So what it sees of the disk does not hang on the way to a cluster or server. One that several
    guests may have is taken anew where its guest does not run: reservations are of those that know
    it as the same.

    Args:
        ref: what it is on now.
        before: what it was, None if it is new.
        running: its guest goes on.
    """
    was = before.volume if before is not None else None
    if before is None or was is None or was.image != ref.image:
        return None
    if ref.source is None or was.source is None or (ref.source.shared and not running):
        return None
    known = before.known_as or network.known_as(was.source)
    return None if known.uuid == network.identity(ref.source) else known


def as_shown(new: LunPlan, lun: LunPlan) -> LunPlan:
    """Returns what a disk is planned to be, with the physical block that its guest sees."""
    size = lun.characteristics.physical_block_size
    return replace(new, characteristics=replace(new.characteristics, physical_block_size=size))


def as_asked(new: LunPlan, lun: LunPlan, written: Disk | None) -> LunPlan:
    """Returns `new`, or as the guest sees it where its client asks for what it always did.

    An earlier version took a physical_block_size, and showed the volume's own.

    Args:
        new: what the disk would be.
        lun: what it is.
        written: what its client wrote before; None if that cannot be read.
    """
    asked = new.characteristics.physical_block_size
    if written is None or written.characteristics.physical_block_size != asked:
        return new
    return as_shown(new, lun)


def planned(
    disk: Disk,
    ref: VolumeRef,
    *,
    target: int,
    uuid: str | None,
    front: FrontEnd,
    known_as: KnownAs | None = None,
) -> LunPlan:
    """Returns what a disk that was checked is planned to be."""
    return LunPlan(
        target=target,
        dev=disk.dev or "",
        volume=ref,
        uuid=uuid if ref.source is None else network.identity(ref.source),
        serial=disk.serial,
        read_only=disk.read_only,
        shareable=disk.shareable,
        block_size=disk.block_size,
        characteristics=disk.characteristics,
        error_policy=disk.error_policy,
        limits=disk.limits,
        histograms=disk.histograms,
        front=front,
        known_as=known_as,
    )
