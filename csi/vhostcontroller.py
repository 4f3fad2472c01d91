"""Controllers of the target, each with a folder of its own that its socket is in.

The folder is what a pod gets: it stays the same when the target restarts, where a socket that was
mounted by itself would be a dead one.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pydataplane import methods
from pydataplane.client import Client
from pydataplane.errors import EXISTS, NO_DEVICE, RpcError

SOCKET = "vhost.sock"
BLOCK_BYTES = 512
"""Logical block of what nobody asked for anything else."""


class _Answer(NamedTuple):
    """The folder of all controllers, as one run of the target has it."""

    run: tuple[int, int, int] | None
    """Its RPC socket, which every run makes anew: device, inode, time of its last change in ns.
    None: it was not seen."""
    directory: Path


class VhostControllers:
    """Makes, finds and deletes them. Each method may be repeated; threads may share it.

    All raise pydataplane.errors for what the target refuses, beside what they name as fine.
    """

    def __init__(self, client: Client) -> None:
        """Uses `client` for every call."""
        self._client = client
        self._answer: _Answer | None = None

    def create(
        self, name: str, *, socket_gid: int | None = None, owner_uid: int | None = None
    ) -> bool:
        """Makes a controller, with its folder, without LUNs; whether it was not there yet.

        Members of group `socket_gid` may connect, of which a process of the user `owner_uid` has to
        be the first.
        """
        try:
            self._client.call(
                "vhost_create_scsi_controller",
                ctrlr=name,
                own_folder=True,
                socket_gid=socket_gid,
                owner_uid=owner_uid,
            )
        except RpcError as error:
            if error.code != EXISTS:
                raise
            return False
        return True

    def add(
        self,
        name: str,
        volume: str,
        *,
        target: int = -1,
        block_size: int = BLOCK_BYTES,
        serial: str | None = None,
        read_only: bool | None = None,
        removable: bool | None = None,
        physical_block_size: int | None = None,
    ) -> int:
        """Makes a volume LUN 0 of a target, the lowest free one for -1, and returns its number.

        Its logical blocks have `block_size` bytes, or the volume's own size if that is larger and
        nobody asked for another than BLOCK_BYTES; its physical blocks have `physical_block_size`,
        a power of two, or the volume's own size.
        """
        number: int = self._client.call(
            "vhost_scsi_controller_add_target",
            ctrlr=name,
            scsi_target_num=target,
            bdev_name=volume,
            serial=serial,
            read_only=read_only,
            removable=removable,
            block_size=block_size if block_size != BLOCK_BYTES else None,
            physical_block_size=physical_block_size,
        )
        return number

    def create_disk(
        self,
        name: str,
        volume: str,
        *,
        socket: str,
        socket_gid: int,
        owner_uid: int,
        block_size: int = BLOCK_BYTES,
        serial: str | None = None,
        read_only: bool = False,
        physical_block_size: int | None = None,
    ) -> None:
        """Makes a controller whose guest has a volume as a virtio-blk disk, if it is not there.

        Its socket is `socket`, in the folder of another controller: FOLDER/NAME. The rest as of
        `create` and `add`.
        """
        try:
            self._client.call(
                "vhost_create_blk_controller",
                ctrlr=name,
                dev_name=volume,
                readonly=read_only,
                serial=serial,
                block_size=block_size if block_size != BLOCK_BYTES else None,
                physical_block_size=physical_block_size,
                socket=socket,
                socket_gid=socket_gid,
                owner_uid=owner_uid,
            )
        except RpcError as error:
            if error.code != EXISTS:
                raise

    def find(self, name: str) -> methods.Controller | None:
        """Returns what vhost_get_controllers tells of one; None if it is not there."""
        try:
            (found,) = self._client.call("vhost_get_controllers", name=name)
        except RpcError as error:
            if error.code != NO_DEVICE:
                raise
            return None
        return found

    def all(self) -> list[methods.Controller]:
        """Returns what vhost_get_controllers tells of all."""
        return self._client.call("vhost_get_controllers")

    def folder(self, name: str) -> Path:
        """Returns where a controller's folder is, whether there is one or not.

        The target is asked once in each of its runs: the next may have another directory.
        """
        run, answer = self._run(), self._answer
        if run is None or answer is None or answer.run != run:
            status = self._client.call("virtlun_get_status")
            # A run that began meanwhile has another socket, so that it is asked again.
            answer = self._answer = _Answer(run, Path(status["vhost_dir"]))
        return answer.directory / name

    def delete(self, name: str, *, force: bool = False) -> None:
        """Deletes a controller, and its folder if nothing else is in it.

        Idempotent; one with a guest is refused, but with `force`.
        """
        try:
            self._client.call("vhost_delete_controller", ctrlr=name, force=force or None)
        except RpcError as error:
            if error.code != NO_DEVICE:
                raise

    def _run(self) -> tuple[int, int, int] | None:
        """Returns what tells this run of the target from others; None: there is no target."""
        try:
            found = self._client.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_ctime_ns
