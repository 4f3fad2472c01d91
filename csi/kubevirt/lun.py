"""What a launcher pod's machine has of its volumes, as the driver sees it, and why not one."""

from __future__ import annotations

from dataclasses import dataclass

from csi.errors import Code, Failure


class StaysOnKernelFace(Failure):
    """A claim that cannot become a LUN now, and that the machine can use as a block device."""

    def __init__(self, message: str) -> None:
        """Keeps the sentence."""
        super().__init__(Code.FAILED_PRECONDITION, message)


class InUse(Failure):
    """A LUN that the guest has in use, so that it was not taken away."""

    def __init__(self, message: str) -> None:
        """Keeps the sentence."""
        super().__init__(Code.FAILED_PRECONDITION, message)


@dataclass(frozen=True)
class Lun:
    """LUN 0 of one target of a pod's controller. Times are seconds since the epoch."""

    target: int
    """SCSI target number, 0 to 254."""
    volume: str
    """UUID of the volume."""
    serial: str | None
    """Serial number that the guest sees."""
    read_only: bool
    removable: bool
    block_size: int
    """Bytes of a logical block, as the guest sees it."""
    removal_prevented: bool
    """The guest has it in use: PREVENT ALLOW MEDIUM REMOVAL (SPC-4 6.22) is in force."""
    handed_over: bool
    """It is a claim of the pod on the kernel face as well, which is parked."""
    attached_at: float | None
    event_at: float | None
    """The guest was told: the event is in its ring."""
    guest_seen_at: float | None
    """The guest has read its capacity, for the first time in this session."""
    resize_event_at: float | None


@dataclass(frozen=True)
class BlkDisk:
    """A claim of the pod that is a virtio-blk disk, by a controller of its own."""

    number: int
    """From 0; its controller is the pod's with this behind it."""
    volume: str | None
    """UUID of the volume; None if its bdev is gone."""
