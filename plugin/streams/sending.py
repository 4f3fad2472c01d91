"""A volume's snapshot becomes a stream: `virtlun volume send`.

What is read is a clone of the snapshot that nobody else uses, so that its export is nobody's else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from plugin import volumefile
from plugin.images.pieces import Progress
from plugin.signals import uninterrupted
from plugin.streams.form import Header, Writer
from plugin.volumelocks import locked
from pydataplane.errors import RpcError, VolumeError, VolumeNotFoundError
from pydataplane.lvols import Volume
from pydataplane.volumes import Volumes

XATTR = "virtlun.send"
"""Of a clone that is made to be sent."""
PREFIX = "send-"
"""Of its name, before the UUID of its snapshot."""
READ_BYTES = 1 << 20
GRAIN_BYTES = 64 << 10
"""Zeros of fewer bytes are sent as data."""
_NOTHING = bytes(GRAIN_BYTES)


def send(
    volumes: Volumes, snapshot: str, since: str | None, out: BinaryIO, progress: Progress
) -> None:
    """Writes what a snapshot has to `out`, or what changed since an older one, `since`.

    That is LVSTORE/NAME, a UUID, or what follows the `@`. Safe to repeat after any interruption.

    Raises:
        VolumeError: one of them is no such snapshot.
        OSError: `out` does not take it.
    """
    of = volumes.volume(snapshot)
    _check_snapshot(volumes, of)
    base = None
    if since is not None:
        base = volumes.snapshot_of(of.path.split("@")[0], since)
        _check_snapshot(volumes, base)
        _check_older(volumes, base, of)
    header = Header(of.size, since=name_of(base) if base else None, to=name_of(of))
    ranges = chain.from_iterable(volumes.ranges(of.uuid, base.uuid if base else None))
    sweep(volumes, of.lvstore)
    with _alone(volumes, of.uuid, of.path), _shown(volumes, of) as path:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            stream = Writer(out, header)
            for offset, length in ranges:
                for at, data in _read(file, offset, length, of.block_size):
                    progress(at, of.size)
                    _write(stream, at, data, zeros=base is not None)
            stream.end()
        finally:
            os.close(file)
    progress(of.size, of.size)


def name_of(snapshot: Volume) -> str:
    """Returns what a stream calls a snapshot: what follows the `@`, as Ceph names its own."""
    return snapshot.name.split("@")[-1]


def _check_snapshot(volumes: Volumes, of: Volume) -> None:
    if volumes.lvstore(of.lvstore).is_pool:
        raise VolumeError(f"{of.path} is of a pool: send it by `rbd export-diff`")
    if not of.snapshot:
        raise VolumeError(
            f"{of.path} is no snapshot, which does not change while it is sent: take one by "
            f"`virtlun volume snapshot {of.path} NAME`"
        )


def _check_older(volumes: Volumes, base: Volume, of: Volume) -> None:
    """Checks that a stream may say what a snapshot is since: it is known by that name alone."""
    parent = of.parent
    while parent is not None and parent != base.name:
        parent = volumes.volume(f"{of.lvstore}/{parent}").parent
    of_another = "@" in base.name and base.name.split("@")[0] != of.name.split("@")[0]
    if parent is None or base.lvstore != of.lvstore or of_another:
        raise VolumeError(f"{base.path} is no older snapshot of what {of.path} is one of")


def _alone(volumes: Volumes, uuid: str, path: str) -> AbstractContextManager[None]:
    folder = volumes.client.path.parent
    return locked(folder, (f"send {uuid}", f"{path} is being sent"))


def sweep(volumes: Volumes, lvstore: str) -> None:
    """Deletes the clones of commands that were killed."""
    for each in volumes.client.call("bdev_lvol_get_lvols", lvs_name=lvstore):
        uuid = each["name"].removeprefix(PREFIX)
        if uuid == each["name"]:
            continue
        with suppress(VolumeError, RpcError), _alone(volumes, uuid, each["name"]):
            _end(volumes, f"{lvstore}/{each['name']}")


@contextmanager
def _shown(volumes: Volumes, of: Volume) -> Iterator[Path]:
    """Shows a snapshot as a file that is nobody's else."""
    name = f"{PREFIX}{of.uuid}"
    clone = f"{of.lvstore}/{name}"
    try:
        volumes.client.call(
            "bdev_lvol_clone", snapshot_name=of.uuid, clone_name=name, xattrs={XATTR: of.path}
        )
        yield volumes.export(volumes.volume(clone).uuid, read_only=True)
    finally:
        with uninterrupted(), suppress(VolumeNotFoundError):
            _end(volumes, clone)


def _end(volumes: Volumes, clone: str) -> None:
    """Deletes a clone that was made to be sent; leaves anything else."""
    uuid = volumes.volume(clone).uuid
    if XATTR in volumes.xattrs(uuid):
        volumes.end_export(uuid)
        volumes.delete(uuid)


def _read(file: int, offset: int, length: int, block: int) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, data) of a part of the volume."""
    end = offset + length
    while offset < end:
        data = volumefile.read(file, offset, min(READ_BYTES, end - offset), block)
        if not data:
            raise VolumeError(f"the snapshot ended at {offset} bytes")
        yield offset, data
        offset += len(data)


def _write(stream: Writer, offset: int, data: bytes, *, zeros: bool) -> None:
    """Writes what is at `offset`; where it has zeros only if they count."""
    for empty, begin, stop in _runs(data):
        if not empty:
            stream.data(offset + begin, memoryview(data)[begin:stop])
        elif zeros:
            stream.zeros(offset + begin, stop - begin)


def _runs(data: bytes) -> Iterator[tuple[bool, int, int]]:
    """Yields (is of zeros, from, to) of what alternates in `data`."""
    begin, kind = 0, False
    for at in range(0, len(data), GRAIN_BYTES):
        grain = data[at : at + GRAIN_BYTES]
        empty = grain == _NOTHING[: len(grain)]
        if empty != kind and at > begin:
            yield kind, begin, at
            begin = at
        kind = empty
    yield kind, begin, len(data)
