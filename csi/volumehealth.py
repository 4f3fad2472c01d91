"""What is wrong with a pod's volume on this node: NodeGetVolumeHealth's entries.

Nothing here waits for the volume: while its target is away, I/O on it, and even stat(2) of its
file, waits, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from csi.hostdevice import HostDevice
from csi.proto import csi_pb2 as pb
from pydataplane.client import Client
from pydataplane.errors import TargetUnavailable

Entry = pb.VolumeHealth.VolumeHealthEntry

WEAKER: Mapping[str, tuple[str, str]] = {
    "restart": (
        "NoCrashRecovery",
        "it waits through an orderly restart of its target, but a crash of it would end in I/O "
        "errors until the pod is deleted: that needs Linux 6.9",
    ),
    "nothing": (
        "NoHolder",
        "the end of its target would end in I/O errors until the pod is deleted: no virtlun-holder "
        "answers the target",
    ),
}
"""By `survives` of virtlun_export_list: reason and sentence."""


def entries(client: Client, devices: HostDevice, volume: str) -> list[Entry]:
    """Returns what is wrong with a volume that a device of this node is for; mostly nothing."""
    try:
        return judged(client.call("virtlun_export_list"), devices, volume)
    except TargetUnavailable as error:
        return [away(error)]


def away(error: TargetUnavailable) -> Entry:
    """Returns what is wrong with all volumes of a target that does not answer."""
    return _entry("INACCESSIBLE", "TargetAway", f"I/O waits for its target: {error}")


def judged(exports: list[dict[str, Any]], devices: HostDevice, volume: str) -> list[Entry]:
    """Returns the same of a target that answered: virtlun_export_list with `exports`.

    Raises:
        TargetError: the target does not answer any more.
    """
    export = next((each for each in exports if each["bdev_name"] == volume), None)
    if export is None:
        if devices.device(volume) is None and devices.device(volume, read_only=True) is None:
            return []
        why = "its target does not export it: virtlun_get_status of the target says why"
        return [_entry("INACCESSIBLE", "NotExported", why)]
    if not devices.answers(volume):
        why = "its device has lost its file: delete the pod, and the next one gets a working device"
        return [_entry("INACCESSIBLE", "DeviceDead", why)]
    found = []
    if error := export.get("flush_error"):
        why = f"fsync fails with EIO, and what was written may be lost: on its node's disk {error}"
        found.append(_entry("DATA_LOSS", "FlushFailed", why))
    if weaker := WEAKER.get(export["survives"]):
        found.append(_entry("DEGRADED", *weaker))
    return found


def _entry(kind: str, reason: str, message: str) -> Entry:
    return Entry(status=kind, reason=reason, message=message)
