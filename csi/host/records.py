"""Which volume a path of kubelet's is for: what kubelet notes beside it before it calls a driver.

The driver sees kubelet's folder read-only, so that nothing that it says of itself makes a path one
of its volumes: not another driver's, on which a pod may rely, nor another claim's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from csi import DRIVER_NAME
from csi.host.rootedpaths import RootedPaths
from csi.hosterrors import HostError

NAME = "vol_data.json"
"""kubelet's note of a volume (pkg/volume/csi): a JSON object of texts."""
DRIVER, HANDLE = "driverName", "volumeHandle"
BYTES_MAX = 64 << 10
DEVICES = "volumeDevices"
"""Below it a block volume called PV has PV/data, and is published at publish/PV/POD."""


class Records:
    """The notes below kubelet's folder."""

    def __init__(self, kubelet: Path) -> None:
        """Reads below kubelet's folder, without following links."""
        self._mount_points = RootedPaths(kubelet, ())

    def check(self, target: Path, volume: str) -> None:
        """Raises HostError for a mount point that kubelet did not make for this volume of ours."""
        path = _beside(target)
        with self._mount_points.folder(path.parent) as folder:
            try:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                number = os.open(NAME, flags, dir_fd=folder)
                with os.fdopen(number, "rb") as file:
                    found = json.loads(file.read(BYTES_MAX))
            except (OSError, ValueError, RecursionError) as error:
                raise HostError(f"kubelet's note {path} cannot be read: {error}") from error
        if not isinstance(found, dict) or found.get(DRIVER) != DRIVER_NAME:
            raise HostError(f"{target} is not for a volume of this driver, says {path}")
        if found.get(HANDLE) != volume:
            raise HostError(f"{target} is not for volume {volume}, says {path}")


def _beside(target: Path) -> Path:
    """Returns where kubelet has its note of a mount point."""
    devices = target.parent.parent.parent
    if devices.name == DEVICES and target.parent.parent.name == "publish":
        return devices / target.parent.name / "data" / NAME
    return target.parent / NAME
