"""A stream becomes a volume, or what a volume has changed: `virtlun volume receive`.

Until all of it is there the volume has another name, so that nobody takes a part for the whole, and
a xattr says what is being received. What an interrupted command left, the next one of the same
volume takes back: the volume is its last snapshot again, or is not there.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass

from plugin import volumefile
from plugin.alone import alone, uninterrupted
from plugin.images.pieces import Progress
from plugin.streams.form import Header, Reader
from pydataplane.errors import VolumeError, VolumeNotFoundError
from pydataplane.lvols import Volume
from pydataplane.volumenames import NAME_MAX, split_path, with_suffix
from pydataplane.volumes import Volumes

XATTR = "virtlun.receive"
SUFFIX = ".receive"
"""Of its name until all is there."""


@dataclass(frozen=True)
class New:
    """How a volume is made that is not there yet."""

    thin: bool = False
    key: str | None = None
    """The name of what it is encrypted with."""
    uuid: str | None = None
    """None: a random one."""


def receive(
    volumes: Volumes,
    reference: str,
    stream: Reader,
    new: New,
    progress: Progress,
) -> Volume:
    """Makes the volume `reference` of a stream, or changes it as one says; returns it.

    It has the snapshot that the stream is of then. If anything fails, the volume is as it was
    before, or is not there.

    Raises:
        VolumeError: the stream is damaged, or does not begin with what the volume has.
    """
    header = stream.header
    lvstore, name = split_path(reference)
    path = f"{lvstore}/{name}"
    _check_names(path, name, header)
    if volumes.lvstore(lvstore).is_pool:
        raise VolumeError(f"{path} is of a pool: have `rbd import-diff` read the stream")
    with alone(volumes.client.path.parent, (path, f"{path} is being received, or moved")):
        if (done := _left(volumes, path, header)) is not None:
            for _ in stream.parts():  # its sender has it read to the end
                pass
            return done
        if header.since is None:
            volume = _made(volumes, path, header, new)
        else:
            if new != New():
                raise VolumeError(
                    f"the stream is of what changed in {path}: --thin, --key and --uuid are of new "
                    "volumes"
                )
            volume = _old(volumes, path, header)
        try:
            _write(volumes, volume, stream, progress)
        except BaseException:
            with uninterrupted():
                _take_back(volumes, volume, name)
            raise
        with uninterrupted():
            return _finish(volumes, volume, name, header.to)


def _check_names(path: str, name: str, header: Header) -> None:
    if "@" in name:
        raise VolumeError(f"{path} is a snapshot: name the volume that is to have it")
    for snapshot in (header.since, header.to):
        if snapshot is not None:
            split_path(f"{path}@{snapshot}")
            if len(f"{name}@{snapshot}") > NAME_MAX:
                raise VolumeError(
                    f"{name}@{snapshot} would be longer than {NAME_MAX} characters: name the "
                    "volume or the snapshot shorter"
                )


def _noted(volumes: Volumes, volume: Volume) -> Header | None:
    """Returns of what stream a volume is being made; None: of none."""
    text = volumes.xattrs(volume.uuid).get(XATTR)
    return None if text is None else Header(**json.loads(text))


def _left(volumes: Volumes, path: str, header: Header) -> Volume | None:
    """Ends what an interrupted command left; returns the volume if that was of the same stream.

    Raises:
        VolumeError: a volume is in the way that no such command has made.
    """
    name = path.split("/")[1]
    for reference in (_partial(path), path):
        try:
            present = volumes.volume(reference)
        except VolumeNotFoundError:
            continue
        noted = _noted(volumes, present)
        if noted is None and reference != path:
            raise VolumeError(
                f"volume {present.path} exists already, and is of no stream: rename or delete it"
            )
        if noted is None:
            continue
        if noted.to is not None and present.parent == f"{name}@{noted.to}":
            done = _finish(volumes, present, name, None)
            return done if noted == header else None
        if reference != path:
            _take_back(volumes, present, name)
        else:
            volumes.remove_xattr(present.uuid, XATTR)
    return None


def _partial(path: str) -> str:
    lvstore, name = path.split("/")
    return f"{lvstore}/{with_suffix(name, SUFFIX)}"


def _made(volumes: Volumes, path: str, header: Header, new: New) -> Volume:
    """Makes the volume that a whole stream is written to."""
    with suppress(VolumeNotFoundError):
        present = volumes.volume(path)
        raise VolumeError(
            f"volume {present.path} exists already, and the stream is of a whole one: choose "
            "another name, or send what changed since a snapshot that both have (--since)"
        )
    noted = {XATTR: json.dumps(asdict(header))}
    return volumes.create(_partial(path), header.size, **asdict(new), xattrs=noted)


def _old(volumes: Volumes, path: str, header: Header) -> Volume:
    """Prepares the volume that has what a stream begins with, and nothing else."""
    base = f"{path}@{header.since}"
    try:
        volume, snapshot = volumes.volume(path), volumes.volume(base)
    except VolumeNotFoundError as error:
        raise VolumeError(
            f"the stream is of what changed since {base}, which is not there: receive that first"
        ) from error
    if volume.parent != snapshot.name:
        last = f"that is {volume.lvstore}/{volume.parent}" if volume.parent else "it has none"
        raise VolumeError(
            f"the stream is of what changed since {base}, which is not the last snapshot of "
            f"{path}: {last}"
        )
    if any(volumes.ranges(volume.uuid, snapshot.uuid)):
        raise VolumeError(
            f"{path} was written to since {base}, which the stream is of what changed since: "
            f"give that up by `virtlun volume rollback {path} @{header.since}`"
        )
    volume = volumes.roll_back(volume.uuid, snapshot.uuid)  # refused while somebody uses it
    volumes.set_xattr(volume.uuid, XATTR, json.dumps(asdict(header)))
    volume = volumes.rename(volume.uuid, _partial(path).split("/")[1])
    try:
        return _resized(volumes, volume, header.size)
    except BaseException:
        with uninterrupted():
            _take_back(volumes, volume, path.split("/")[1])
        raise


def _resized(volumes: Volumes, volume: Volume, size: int) -> Volume:
    """Gives a volume the size of the stream's, in whole clusters."""
    cluster = volumes.lvstore(volume.lvstore).cluster_size
    if -(-size // cluster) * cluster == volume.size:
        return volume
    return volumes.resize(volume.uuid, size)


def _write(volumes: Volumes, volume: Volume, stream: Reader, progress: Progress) -> None:
    """Writes what a stream has, durably."""
    path = volumes.export(volume.uuid)
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for part in stream.parts():
                progress(part.offset, stream.header.size)
                if part.data is None:
                    volumefile.clear(file, part.offset, part.length, volume.block_size)
                else:
                    volumefile.write(file, part.offset, part.data, volume.block_size)
            os.fsync(file)
        finally:
            os.close(file)
    finally:
        volumes.end_export(volume.uuid)
    progress(stream.header.size, stream.header.size)


def _finish(volumes: Volumes, volume: Volume, name: str, to: str | None) -> Volume:
    """Gives a volume the snapshot that it is as, `to`, and its name."""
    if to is not None:
        volumes.client.call(
            "bdev_lvol_snapshot", lvol_name=volume.uuid, snapshot_name=f"{name}@{to}"
        )
    if volume.name != name:
        volume = volumes.rename(volume.uuid, name)
    volumes.remove_xattr(volume.uuid, XATTR)
    return volumes.volume(volume.uuid)


def _take_back(volumes: Volumes, volume: Volume, name: str) -> None:
    """Has a volume be as it was: its last snapshot, or nothing."""
    volumes.end_export(volume.uuid)
    if volume.parent is None:
        volumes.delete(volume.uuid)
        return
    snapshot = volumes.volume(f"{volume.lvstore}/{volume.parent}")
    volumes.roll_back(volume.uuid, snapshot.uuid)
    volumes.rename(volume.uuid, name)
    volumes.remove_xattr(volume.uuid, XATTR)
