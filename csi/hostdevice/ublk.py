"""A device of the kernel's ublk driver, which the target serves: nothing lies between the two.

It outlives its target: whoever uses it waits, and the next target goes on with it, also after a
crash. It has no second device that is read-only, as each of the kernel's is one or the other, so a
read-only one is a loop device over it.
"""

from __future__ import annotations

from pathlib import Path

from csi import sysblock
from csi.host import Host
from csi.host.local import READ_ONLY_SUFFIX
from csi.hostdevice import exports, ublkctl
from csi.hostdevice.loopctl import Loop
from csi.hosterrors import HostError, OfflineOnly
from csi.targets import Targets
from pydataplane import methods


class UblkDevices:
    """HostDevice by virtlun_export_create with `device`."""

    def __init__(self, targets: Targets, host: Host) -> None:
        """Has the one of `targets` export a volume that has it, and uses `host`."""
        self._targets = targets
        self._host = host

    def attach(
        self,
        volume: str,
        *,
        read_only: bool = False,
        block_size: int = 512,
        shared: bool = False,
    ) -> Path:
        """Returns the volume's device; HostError where the target made a file instead."""
        made = self._targets.of(volume).call(
            "virtlun_export_create",
            bdev_name=volume,
            read_only=False,
            device=True,
            block_size=block_size,
            shareable=shared or None,
        )
        device = Path(made["path"])
        if not ublkctl.is_device(device):
            raise HostError(f"the target has made {device}, which is no device of ublk: try again")
        if not read_only:
            return device
        for loop in self._read_only(volume):
            if not loop.leaving:
                return loop.device
        return self._host.attach(volume, device, read_only=True, block_size=block_size)

    def device(self, volume: str, *, read_only: bool = False) -> Path | None:
        """Returns the volume's device if it is exported as one."""
        export = self._exported(volume)
        if export is None:
            return None
        if not read_only:
            return Path(export["path"])
        return next((loop.device for loop in self._read_only(volume)), None)

    def answers(self, volume: str) -> bool:
        """Whether the device that the target serves is there."""
        export = self._exported(volume)
        return export is None or (sysblock.BLOCK / Path(export["path"]).name).exists()

    def grow(self, volume: str) -> None:
        """Lets the volume's devices take its size.

        Raises:
            OfflineOnly: the kernel changes no size of a device that is used.
        """
        export = self._exported(volume)
        if export is None:
            return
        device = Path(export["path"])
        # once more: nobody may have answered the target when the volume grew
        self._targets.of(volume).call(
            "virtlun_export_create", bdev_name=volume, read_only=False, device=True
        )
        if sysblock.size_of(device) < export["size"] - export["size"] % sysblock.PAGE_BYTES:
            raise OfflineOnly(
                f"{device} keeps its size while it is used: ublk changes it on Linux 6.16 and "
                "newer (--host-device auto takes loop devices before); it grows when the volume "
                "is staged next"
            )
        for loop in self._read_only(volume):
            self._host.resize(volume, loop.device)

    def flush(self, volume: str) -> None:
        """Empties the page cache of the volume's devices."""
        export = self._exported(volume)
        if export is not None:
            self._host.flush(volume, Path(export["path"]))
        for loop in self._read_only(volume):
            self._host.flush(volume, loop.device)

    def detach(self, volume: str) -> None:
        """Frees the read-only device, then takes the other one away."""
        for loop in self._read_only(volume):
            self._host.detach(volume, loop.device)
        exports.delete(self._targets, volume)

    def attached(self) -> list[str]:
        """Returns the volumes that are exported as devices."""
        return sorted(
            each["bdev_name"] for each in exports.all_of(self._targets) if is_device(each)
        )

    def present(self) -> list[str]:
        """Returns the volumes that a holder has made a device for."""
        return sorted(self._host.disks())

    def _exported(self, volume: str) -> methods.Export | None:
        export = exports.find(self._targets.of(volume), volume)
        return export if export is not None and is_device(export) else None

    def _read_only(self, volume: str) -> list[Loop]:
        """Returns the volume's loop devices, which are read-only."""
        found = self._host.loops(volume)
        return [loop for loop in found if loop.name.endswith(f"{volume}{READ_ONLY_SUFFIX}")]


def is_device(export: methods.Export) -> bool:
    """Whether an export is a device of ublk; else it is a file."""
    return ublkctl.is_device(Path(export["path"]))
