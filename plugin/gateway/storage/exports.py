"""Volumes as files, for what is read and written by us."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import uuid as uuids
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from plugin.gateway.errors import Code, GatewayError, Refused
from plugin.gateway.storage.leftovers import Leftovers
from plugin.gateway.storage.pools import Pool
from pydataplane.errors import VolumeError
from pydataplane.lvols import Volume
from pydataplane.volumes import Volumes

PIECE_BYTES = 1 << 20
"""Zeros that are written at a time."""

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""FALLOC_FL_*."""

_libc = ctypes.CDLL(None, use_errno=True)

_LIST: Final = "virtlun_export_list"


@asynccontextmanager
async def opened(
    pool: Pool, volume: Volume, leftovers: Leftovers, *, write: bool
) -> AsyncIterator[int]:
    """Gives a volume as an open file for the body.

    To be written it must not be in use. It is read as it is at the beginning, in use or not, by an
    lvol snapshot that goes at the end, where its store has such.

    Raises:
        Refused: it cannot be opened.
    """
    snapshot = not write and pool.store.makes_volumes

    def work(volumes: Volumes) -> tuple[str, Path]:
        of = volume.uuid
        if snapshot:
            (taken,) = volumes.snapshot([of], f"vol-download-{uuids.uuid4().hex[:12]}")
            of = taken.uuid
        elif any(of in (e["uuid"], e["bdev_name"]) for e in volumes.client.call(_LIST)):
            raise VolumeError(
                f"volume {volume.path} is in use as a file of this host: end that first"
                " (virtlun_export_delete)"
            )
        leftovers.add(of, snapshot=snapshot)
        return of, volumes.export(of, read_only=not write)

    uuid, path = await pool.target.do(work)
    file = None
    try:
        file = await asyncio.to_thread(_open, path, volume, write)
        yield file
    finally:
        if file is not None:
            os.close(file)

        def end(volumes: Volumes) -> None:
            volumes.end_export(uuid)
            if snapshot:
                volumes.delete(uuid, missing_ok=True)

        with suppress(GatewayError):
            await pool.target.do(end)
            leftovers.remove(uuid)


def _open(path: Path, volume: Volume, write: bool) -> int:
    try:
        return os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        raise Refused(
            Code.SYSTEM_ERROR, f"volume {volume.path}: {path}: {error.strerror}"
        ) from error


# What follows blocks, and raises OSError where it fails.


def write(file: int, offset: int, data: bytes, block: int) -> None:
    """Writes data at an offset, bytes; the file takes whole blocks of `block` bytes alone."""
    before, after = offset % block, -(offset + len(data)) % block
    if before or after:
        start, end = offset - before, offset + len(data) + after
        first = os.pread(file, block, start)[:before] if before else b""
        last = os.pread(file, block, end - block)[block - after :] if after else b""
        offset, data = start, first + data + last
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, offset)
        view, offset = view[done:], offset + done


def clear(file: int, offset: int, length: int, block: int) -> None:
    """Has a part (bytes) read as zeros; whole blocks of it need not take room any more."""
    end = offset + length
    start, stop = min(end, offset + -offset % block), end - end % block
    if start >= stop:
        write(file, offset, bytes(length), block)
        return
    if start > offset:
        write(file, offset, bytes(start - offset), block)
    if end > stop:
        write(file, stop, bytes(end - stop), block)
    mode = _KEEP_SIZE | _PUNCH_HOLE
    if _libc.fallocate(file, mode, ctypes.c_int64(start), ctypes.c_int64(stop - start)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def read(file: int, offset: int, length: int, block: int) -> bytes:
    """Returns what is at an offset, bytes; as for `write`, in whole blocks."""
    before, after = offset % block, -(offset + length) % block
    data = os.pread(file, before + length + after, offset - before)
    return data[before : before + length]


def wipe(file: int, ranges: Sequence[tuple[int, int]], block: int, *, give_back: bool) -> None:
    """Writes zeros to ranges (offset and length, bytes), on the medium when it returns.

    With `give_back` they take no room any more then.
    """
    nothing = bytes(PIECE_BYTES)
    for offset, length in ranges:
        done = 0
        while done < length:
            done += os.pwrite(file, nothing[: length - done], offset + done)
    os.fsync(file)
    if give_back:
        for offset, length in ranges:
            clear(file, offset, length, block)
        os.fsync(file)


def next_data(file: int, offset: int, end: int) -> int:
    """Returns where data begins that may not be zeros, at `offset` or behind it; `end`: nowhere."""
    try:
        return min(end, os.lseek(file, offset, os.SEEK_DATA))
    except OSError as error:
        if error.errno == errno.ENXIO:
            return end
        raise


def next_hole(file: int, offset: int, end: int) -> int:
    """Returns where the data ends that is at `offset`."""
    return min(end, os.lseek(file, offset, os.SEEK_HOLE))
