"""The vhost face: a volume for a virtual machine, as a folder with a vhost-user-scsi socket.

A volume of this face has a controller of its own with the volume as LUN 0 of target 0, whose
folder is what a pod gets. Who has it stands in the kernel's table of mounts; the controller goes
when the volume is unstaged.
"""

from __future__ import annotations

from pathlib import Path

from csi import handles, mounts
from csi.targets import Targets
from csi.vhostcontroller import BLOCK_BYTES, VhostControllers
from pydataplane.errors import EXISTS, RpcError

PREFIX = "csi-"


class VhostFace:
    """Controllers of volumes. Each method may be repeated after a crash at any point.

    They raise pydataplane.errors for the target's refusals (BUSY: another face has the volume, or
    a virtual machine is connected).
    """

    def __init__(self, targets: Targets) -> None:
        """Makes each volume's controller on the one of `targets` that has it."""
        self._targets = targets
        self._controllers = {id(client): VhostControllers(client) for client in targets.clients}

    def attach(self, volume: str, *, block_size: int = BLOCK_BYTES) -> Path:
        """Returns the folder of the volume's socket, made with its controller if need be.

        The machine's disk has logical blocks of `block_size` bytes, or of the volume's own if
        those are larger.
        """
        name = _name(volume)
        controllers = self._of(volume)
        made = controllers.create(name)
        try:
            controllers.add(name, volume, target=0, block_size=block_size)
        except RpcError as error:
            if error.code != EXISTS:
                if made:
                    controllers.delete(name)
                raise
        return controllers.folder(name)

    def folder(self, volume: str) -> Path:
        """Returns where the folder of the volume's socket is, if it is attached."""
        return self._of(volume).folder(_name(volume))

    def attached(self, volume: str) -> bool:
        """Whether the volume has its controller."""
        return self._of(volume).find(_name(volume)) is not None

    def detach(self, volume: str) -> None:
        """Deletes the volume's controller, idempotent; one with a guest is refused."""
        for client in self._targets.holders(volume):
            self._controllers[id(client)].delete(_name(volume))

    def published(self) -> set[str]:
        """Returns the volumes whose folders are mounted somewhere, without asking the target."""
        names = {Path(each.root).name for each in mounts.table()}
        found = {name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)}
        return {each for each in found if handles.is_uuid(each)}

    def mounted(self, volume: str) -> set[str]:
        """Returns where the folder is mounted."""
        end = f"/{_name(volume)}"
        return {each.target for each in mounts.table() if each.root.endswith(end)}

    def _of(self, volume: str) -> VhostControllers:
        return self._controllers[id(self._targets.of(volume))]


def _name(volume: str) -> str:
    return f"{PREFIX}{volume}"
