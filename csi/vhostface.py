"""The vhost face: a volume for a virtual machine, as a folder with a vhost-user-scsi socket.

A volume of this face has a controller of its own with the volume as LUN 0 of target 0. The folder
of the controller's socket is what a pod gets: a folder stays the same when the target restarts,
where a socket that was mounted by itself would be a dead one. Who has it stands in the kernel's
table of mounts; the controller goes when the volume is unstaged.
"""

from __future__ import annotations

from pathlib import Path

from csi import mounts
from pydataplane.client import Client
from pydataplane.errors import RpcError
from pydataplane.volumes import EXISTS, NO_DEVICE

PREFIX = "csi-"
SOCKET = "vhost.sock"
BLOCK_BYTES = 512
"""Logical block of what nobody asked for anything else."""


class VhostFace:
    """Controllers of volumes. Each method may be repeated after a crash at any point.

    They raise pydataplane.errors for the target's refusals (-16: another face has the volume, or
    a virtual machine is connected).
    """

    def __init__(self, client: Client) -> None:
        """Uses `client` for every call to the target."""
        self._client = client

    def attach(self, volume: str, *, block_size: int = BLOCK_BYTES) -> Path:
        """Returns the folder of the volume's socket, made with its controller if need be.

        The machine's disk has logical blocks of `block_size` bytes, or of the volume's own if
        those are larger.
        """
        name = _name(volume)
        made = self._create(name)
        try:
            self._client.call(
                "vhost_scsi_controller_add_target",
                ctrlr=name,
                scsi_target_num=0,
                bdev_name=volume,
                block_size=block_size if block_size != BLOCK_BYTES else None,
            )
        except RpcError as error:
            if error.code != EXISTS:
                if made:
                    self.detach(volume)
                raise
        return self.folder(volume)

    def folder(self, volume: str) -> Path:
        """Returns where the folder of the volume's socket is, if it is attached."""
        status = self._client.call("virtlun_get_status")
        return Path(status["vhost_dir"]) / _name(volume)

    def attached(self, volume: str) -> bool:
        """Whether the volume has its controller."""
        try:
            return bool(self._client.call("vhost_get_controllers", name=_name(volume)))
        except RpcError as error:
            if error.code != NO_DEVICE:
                raise
            return False

    def detach(self, volume: str) -> None:
        """Takes the volume's controller away; none is fine, one with a guest is refused."""
        try:
            self._client.call("vhost_delete_controller", ctrlr=_name(volume))
        except RpcError as error:
            if error.code != NO_DEVICE:
                raise

    def mounted(self, volume: str) -> set[str]:
        """Returns where the folder is mounted."""
        end = f"/{_name(volume)}"
        return {each.target for each in mounts.table() if each.root.endswith(end)}

    def _create(self, name: str) -> bool:
        """Makes a controller; whether it was not there yet."""
        try:
            self._client.call("vhost_create_scsi_controller", ctrlr=name, own_folder=True)
        except RpcError as error:
            if error.code != EXISTS:
                raise
            return False
        return True


def _name(volume: str) -> str:
    return f"{PREFIX}{volume}"
