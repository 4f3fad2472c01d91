"""The volumes of a pool, in its target; what blocks runs in the target's threads."""

from __future__ import annotations

import re
import uuid as uuids

from plugin import volumefile
from plugin.gateway.errors import Code, Refused
from plugin.gateway.storage import exports
from plugin.gateway.storage.leftovers import Leftovers
from plugin.gateway.storage.pools import Pool
from pydataplane.errors import RpcError, TargetError, VolumeError, VolumeNotFoundError
from pydataplane.lvols import Volume
from pydataplane.volumes import Volumes

_SHARED = "vol-clone-"
_SHARED_SNAPSHOT = re.compile(f"[^@]+@{_SHARED}[0-9a-f]{{12}}")
"""An lvol snapshot that a volume and its copies have in common; what people take is called so by
nobody who does not mean it."""


def is_shown(volume: Volume) -> bool:
    """Whether clients see a volume: lvol snapshots belong to what took them."""
    return not volume.snapshot and "@" not in volume.name


async def every(pool: Pool) -> list[Volume]:
    """Returns the volumes of a pool, by name."""

    def work(volumes: Volumes) -> list[Volume]:
        return [volume for volume in volumes.volumes(pool.store.uuid) if is_shown(volume)]

    return await pool.target.do(work)


async def find(pool: Pool, name: str) -> Volume | None:
    """Returns one volume by its name; None: the pool has none of that name."""

    def work(volumes: Volumes) -> Volume | None:
        try:
            found = volumes.volume(f"{pool.store.name}/{name}")
        except (VolumeNotFoundError, VolumeError):
            return None
        return found if is_shown(found) else None

    return await pool.target.do(work)


async def create(pool: Pool, name: str, size: int, *, thin: bool) -> Volume:
    """Makes a volume of at least `size` bytes; a thick one is there when all of it is zeroed.

    Raises:
        Refused: there is one of that name, or it cannot be made.
    """
    path = f"{pool.store.name}/{name}"

    def work(volumes: Volumes) -> Volume:
        return volumes.create(path, size, thin=thin)

    await _check_free(pool, name)
    return await pool.target.do(work, copies=True)


async def clone(pool: Pool, source: Volume, name: str, size: int) -> Volume:
    """Makes a volume that reads as another one of its lvstore, which may be in use, does now.

    It shares what neither of them changes: its lvol snapshot goes with the first of them that is
    deleted. It has at least `size` bytes, and takes nothing yet.

    Raises:
        Refused: there is one of that name, or it cannot be made.
    """

    def work(volumes: Volumes) -> Volume:
        moment = f"{_SHARED}{uuids.uuid4().hex[:12]}"
        (snapshot,) = volumes.snapshot([source.uuid], moment)
        try:
            made = volumes.clone(snapshot.uuid, name)
        except (TargetError, VolumeError):
            volumes.delete(snapshot.uuid, missing_ok=True)
            raise
        if size <= made.size:
            return made
        try:
            return volumes.resize(made.uuid, size)
        except (TargetError, VolumeError):
            volumes.delete(made.uuid, missing_ok=True)
            volumes.delete(snapshot.uuid, missing_ok=True)
            raise

    await _check_free(pool, name)
    return await pool.target.do(work, copies=True)


async def _check_free(pool: Pool, name: str) -> None:
    """Refuses a name that is taken, as libvirt does."""

    def work(volumes: Volumes) -> bool:
        try:
            volumes.deletable(f"{pool.store.name}/{name}")
        except VolumeNotFoundError:
            return False
        return True

    if await pool.target.do(work):
        raise Refused(Code.STORAGE_VOL_EXIST, f"storage volume '{name}' exists already")


async def delete(pool: Pool, volume: Volume) -> None:
    """Deletes a volume that nobody uses, and what only it and its copies had need of."""

    def work(volumes: Volumes) -> None:
        volumes.delete(volume.uuid)
        parent = volume.parent
        while parent is not None and _SHARED_SNAPSHOT.fullmatch(parent):
            path = f"{pool.store.name}/{parent}"
            try:
                if len(volumes.clones(path)) > 1:
                    return
                above = volumes.volume(path).parent
                volumes.delete(path)
            except (RpcError, VolumeNotFoundError):
                return  # it is in use, or another one's deletion has done it
            parent = above

    await pool.target.do(work, copies=True)


async def wipe(pool: Pool, volume: Volume, leftovers: Leftovers) -> None:
    """Writes zeros to all that a volume may have; of a thin one that is given back then.

    Raises:
        Refused: it is in use, or an I/O fails.
    """

    def work(volumes: Volumes) -> list[tuple[int, int]]:
        return [each for page in volumes.ranges(volume.uuid) for each in page]

    async with exports.opened(pool, volume, leftovers, write=True) as file:
        ranges = await pool.target.do(work)  # which nobody adds to from now on
        try:
            await pool.target.file_io(
                lambda: volumefile.wipe(file, ranges, volume.block_size, give_back=volume.thin)
            )
        except OSError as error:
            raise Refused(
                Code.SYSTEM_ERROR, f"volume {volume.path}: {error.strerror or error}"
            ) from error
