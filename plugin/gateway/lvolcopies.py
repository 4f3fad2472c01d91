"""Copies of volumes that guests use, as the target makes them: blocking calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from pydataplane.client import Client
from pydataplane.errors import NO_DEVICE, RpcError, VolumeError, VolumeNotFoundError
from pydataplane.lvols import Lvol
from pydataplane.volumes import Volumes

State = Literal["copying", "ready", "failed"]


@dataclass(frozen=True)
class Disk:
    """A target of a controller."""

    controller: str
    target: int


@dataclass(frozen=True)
class Copy:
    """How far one is."""

    state: State
    destination: str
    """UUID of the volume that is copied to."""
    done: int
    """Bytes that were dealt with."""
    total: int
    limit: int
    """Bytes a second, 0: as many as the disks can."""
    error: str | None
    """Why it failed."""


def destination(volumes: Volumes, path: str, source: Lvol, *, reuse: bool) -> Lvol:
    """Returns the volume LVSTORE/NAME that `source` is to be copied to.

    With `reuse` it is there; else it is made, as large and as thin.

    Raises:
        VolumeError: it is not as it should be, or cannot be made.
    """
    try:
        present = volumes.lvol(path)
    except VolumeNotFoundError:
        if reuse:
            raise
        return volumes.create(path, source.size, thin=source.thin)
    if not reuse:
        raise VolumeError(
            f"volume {path} exists already: name another one, or overwrite it (--reuse-external)"
        )
    if present.uuid == source.uuid:
        raise VolumeError(f"volume {path} cannot be copied to itself: name another one")
    if present.size < source.size:
        raise VolumeError(
            f"volume {path} has {present.size} bytes, and {source.size} are needed: resize it, or"
            " name another one"
        )
    return present


def start(client: Client, of: Disk, to: str, limit: int) -> None:
    """Begins to copy a disk to a volume (its UUID)."""
    client.call(
        "virtlun_lun_copy_start",
        ctrlr=of.controller,
        scsi_target_num=of.target,
        dst_bdev_name=to,
        bytes_per_second=limit,
    )


def found(client: Client, of: Disk) -> Copy | None:
    """Returns the copy of a disk; None: there is none."""
    all_ = client.call("virtlun_lun_copy_check", ctrlr=of.controller, scsi_target_num=of.target)
    for each in all_:
        return Copy(
            cast(State, each["state"]),
            each["dst_bdev_name"],
            each["copied_bytes"],
            each["total_bytes"],
            each["bytes_per_second"],
            each["error"],
        )
    return None


def limit(client: Client, of: Disk, bytes_per_second: int) -> None:
    """Limits a copy to so many bytes a second; 0: as many as the disks can."""
    client.call(
        "virtlun_lun_copy_set_limit",
        ctrlr=of.controller,
        scsi_target_num=of.target,
        bytes_per_second=bytes_per_second,
    )


def pivot(client: Client, of: Disk) -> None:
    """Has a disk go on with its copy."""
    client.call("virtlun_lun_copy_pivot", ctrlr=of.controller, scsi_target_num=of.target)


def abort(client: Client, of: Disk) -> None:
    """Ends the copy of a disk, one that failed as well, if there is one."""
    try:
        client.call("virtlun_lun_copy_abort", ctrlr=of.controller, scsi_target_num=of.target)
    except RpcError as error:
        if error.code != NO_DEVICE:
            raise
