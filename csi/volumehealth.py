"""What is wrong with a volume on this node: NodeGetVolumeHealth's entries.

Nothing here waits for the volume: while its target is away, I/O on it, and even stat(2) of its
file, waits, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from csi.hostdevice import HostDevice
from csi.proto import csi_pb2 as pb
from csi.targets import Targets
from csi.vhostface import VhostFace
from pydataplane import methods
from pydataplane.client import Client
from pydataplane.errors import NO_DEVICE, RpcError, TargetTimeout, TargetUnavailable

log = structlog.get_logger()
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


class VolumeHealth:
    """Looks at this node's volumes, of both faces."""

    def __init__(self, targets: Targets, devices: HostDevice, vhost: VhostFace) -> None:
        """Asks the `targets` of this node, each for its own volumes."""
        self._targets = targets
        self._devices = devices
        self._vhost = vhost

    def volumes(self) -> list[str]:
        """Returns the volumes that pods of this node may have, without asking the target."""
        return [*self._devices.present(), *self._vhost.published()]

    def entries(self, volume: str) -> list[Entry]:
        """Returns what is wrong with a volume; mostly nothing.

        Raises:
            TargetError: the target refuses to tell.
        """
        return self.entries_of([volume])[volume]

    def entries_of(self, volumes: list[str]) -> dict[str, list[Entry]]:
        """Returns what is wrong with each of these volumes.

        Raises:
            TargetError: all targets refuse to tell. Volumes of one that does are left out.
        """
        found: dict[str, list[Entry]] = {}
        refused: RpcError | None = None
        for group, answer in self._targets.by_target(volumes):
            try:
                found |= self._entries_of(answer.get(), group)
            except RpcError as error:
                log.warning("a target refuses to tell of its volumes", reason=str(error))
                refused = error
            except (TargetTimeout, TargetUnavailable) as error:
                away = _entry("INACCESSIBLE", "TargetAway", f"I/O waits for its target: {error}")
                found |= {each: [away] for each in group}
        if refused is not None and not found:
            raise refused
        return found

    def _entries_of(self, client: Client, volumes: list[str]) -> dict[str, list[Entry]]:
        """Returns what is wrong with volumes of one target."""
        exports = {each["bdev_name"]: each for each in client.call("virtlun_export_list")}
        published = self._vhost.published() if set(volumes) - set(exports) else set()
        return {
            each: self._of_machine(client, each)
            if each in published and each not in exports
            else self._of_pod(each, exports.get(each))
            for each in volumes
        }

    def _of_pod(self, volume: str, export: methods.Export | None) -> list[Entry]:
        """Returns the same of one on the kernel face, or a claim that a machine has now."""
        if export is None:
            devices = self._devices
            if devices.device(volume) is None and devices.device(volume, read_only=True) is None:
                return []
            why = "its target does not export it: virtlun_get_status of the target says why"
            return [_entry("INACCESSIBLE", "NotExported", why)]
        if not self._devices.answers(volume):
            why = (
                "its device has lost its file: delete the pod, and the next one gets a working "
                "device"
            )
            return [_entry("INACCESSIBLE", "DeviceDead", why)]
        found = []
        if error := export.get("flush_error"):
            found.append(_flush_failed(error))
        if weaker := WEAKER.get(export["survives"]):
            found.append(_entry("DEGRADED", *weaker))
        return found

    def _of_machine(self, client: Client, volume: str) -> list[Entry]:
        """Returns the same of one on the vhost face, which a pod has the folder of."""
        if not self._vhost.attached(volume):
            why = "its target has no controller of it: virtlun_get_status of the target says why"
            return [_entry("INACCESSIBLE", "NoController", why)]
        try:
            (bdev,) = client.call("bdev_get_bdevs", name=volume)
        except RpcError as error:
            if error.code != NO_DEVICE:
                raise
            why = "it is not there: virtlun_get_status of its target says why"
            return [_entry("INACCESSIBLE", "NoController", why)]
        failed = bdev.get("flush_error")
        return [_flush_failed(failed)] if failed else []


def _flush_failed(error: str) -> Entry:
    why = f"fsync fails with EIO, and what was written may be lost: on its node's disk {error}"
    return _entry("DATA_LOSS", "FlushFailed", why)


def _entry(kind: str, reason: str, message: str) -> Entry:
    return Entry(status=kind, reason=reason, message=message)
