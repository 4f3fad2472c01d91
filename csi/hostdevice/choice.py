"""Which device a volume gets: ublk where that can do all that a loop device can, else loop.

| `--host-device` | a new device is |
| --- | --- |
| `auto` | of ublk where the kernel changes the size of one that is used (Linux 6.16), else loop |
| `ublk` | of ublk wherever the target can have one made (Linux 6.5), else loop |
| `loop` | loop |

A volume that has a device keeps it, whatever is asked for now, until it is unstaged: a driver that
is exchanged for a newer one, or is given another option, finds what pods use.
"""

from __future__ import annotations

import enum
import threading
from pathlib import Path

import structlog

from csi.host import Host
from csi.hostdevice import HostDevice, exports
from csi.hostdevice.loop import LoopDevices
from csi.hostdevice.ublk import UblkDevices, is_device
from csi.targets import Targets
from pydataplane import methods
from pydataplane.client import Client
from pydataplane.errors import METHOD_NOT_FOUND, RpcError

log = structlog.get_logger()


class Choice(enum.Enum):
    """What a new device is to be."""

    AUTO = "auto"
    UBLK = "ublk"
    LOOP = "loop"


OLDER: methods.ExportDevices = {
    "ublk": False,
    "resizes": False,
    "why": "the target is older than the driver and does not tell of ublk",
}


class ChosenDevices:
    """HostDevice by the one or the other, volume by volume."""

    def __init__(self, targets: Targets, host: Host, choice: Choice = Choice.AUTO) -> None:
        """Chooses for volumes of `targets`, and uses `host`."""
        self._targets = targets
        self._choice = choice
        self._loop = LoopDevices(targets, host)
        self._ublk = UblkDevices(targets, host)
        self._mutex = threading.Lock()
        self._told: dict[Path, tuple[str, str]] = {}  # of the size of the targets

    def attach(
        self,
        volume: str,
        *,
        read_only: bool = False,
        block_size: int = 512,
        shared: bool = False,
    ) -> Path:
        """Returns the volume's device: of the kind that it has, else of the one that is chosen."""
        devices = self._present(volume) or self._chosen(self._targets.of(volume))
        return devices.attach(volume, read_only=read_only, block_size=block_size, shared=shared)

    def device(self, volume: str, *, read_only: bool = False) -> Path | None:
        """Returns the volume's device if it is attached."""
        return self._of(volume).device(volume, read_only=read_only)

    def answers(self, volume: str) -> bool:
        """Whether the volume's devices work."""
        return self._of(volume).answers(volume)

    def grow(self, volume: str) -> None:
        """Lets the volume's devices take its size."""
        self._of(volume).grow(volume)

    def flush(self, volume: str) -> None:
        """Flushes and drops the kernel's cache of the volume."""
        self._of(volume).flush(volume)

    def detach(self, volume: str) -> None:
        """Detaches the volume's devices and ends its export."""
        self._of(volume).detach(volume)

    def attached(self) -> list[str]:
        """Returns the volumes that are attached, in either way."""
        return sorted({*self._loop.attached(), *self._ublk.attached()})

    def present(self) -> list[str]:
        """Returns the volumes that a device may be for, without waiting for any."""
        return sorted({*self._loop.present(), *self._ublk.present()})

    def _of(self, volume: str) -> HostDevice:
        return self._present(volume) or self._loop

    def _present(self, volume: str) -> HostDevice | None:
        """Returns the kind of devices that a volume has; None: it has none.

        A loop device may be left whose export is gone.
        """
        export = exports.find(self._targets.of(volume), volume)
        if export is not None:
            return self._ublk if is_device(export) else self._loop
        left = self._loop.device(volume) or self._loop.device(volume, read_only=True)
        return self._loop if left is not None else None

    def _chosen(self, client: Client) -> HostDevice:
        """Returns the kind that a new device of a target is to be; what is new of it is logged."""
        kind, why = Choice.LOOP, "--host-device loop"
        if self._choice is not Choice.LOOP:
            can = _devices(client)
            takes = can["ublk"] and (can["resizes"] or self._choice is Choice.UBLK)
            kind, why = (Choice.UBLK if takes else Choice.LOOP), can["why"]
        with self._mutex:
            new = self._told.get(client.path) != (kind.value, why)
            self._told[client.path] = kind.value, why
        if new:
            log.info("host device", kind=kind.value, why=why, target=str(client.path))
        return self._ublk if kind is Choice.UBLK else self._loop


def _devices(client: Client) -> methods.ExportDevices:
    """Returns what the target's holder and its kernel can."""
    try:
        return client.call("virtlun_export_get_devices")
    except RpcError as error:
        if error.code != METHOD_NOT_FOUND:
            raise
        return OLDER
