"""The kernel face: a volume as a block device of this host, for ordinary pods.

One small interface, `HostDevice`. What there is: `loop`, a loop device over a file that the
target exports through FUSE, which needs nothing but Linux 5.8; `ublk`, a device that the target
serves without either; and `choice`, which of them a volume gets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class HostDevice(Protocol):
    """Makes block devices of volumes. Each method may be repeated after a crash at any point.

    They raise pydataplane.errors for the target's refusals (BUSY: another face has the volume) and
    csi.errors.HostError for the host's.
    """

    def attach(
        self,
        volume: str,
        *,
        read_only: bool = False,
        block_size: int = 512,
        shared: bool = False,
    ) -> Path:
        """Returns the volume's device, made if need be and working; `block_size` in bytes.

        An image of a pool of Ceph is locked for this node, unless it is `shared` with others.
        """

    def device(self, volume: str, *, read_only: bool = False) -> Path | None:
        """Returns the volume's device if it is attached, working or not."""

    def answers(self, volume: str) -> bool:
        """Whether all devices of a volume have the file that the target exports."""

    def grow(self, volume: str) -> None:
        """Lets the devices of a volume that has grown show its size; nothing to do without one."""

    def flush(self, volume: str) -> None:
        """Flushes and drops the kernel's cache of a volume; nothing to do without a device."""

    def detach(self, volume: str) -> None:
        """Detaches a volume's devices and ends its export; idempotent."""

    def attached(self) -> list[str]:
        """Returns the volumes that are attached."""

    def present(self) -> list[str]:
        """Returns the volumes that a device may be for, working or not, without waiting for any."""
