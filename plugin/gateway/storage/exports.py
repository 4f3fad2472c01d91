"""Volumes as files, for what is read and written by us."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path

from plugin.gateway.errors import Code, GatewayError, Refused
from plugin.gateway.storage.begun import Begun
from plugin.gateway.storage.leftovers import Leftovers
from plugin.gateway.storage.pools import Pool
from pydataplane.lvols import Volume

PIECE_BYTES = 1 << 20
"""Zeros that are written at a time."""

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""FALLOC_FL_*."""

_libc = ctypes.CDLL(None, use_errno=True)


@asynccontextmanager
async def opened(
    pool: Pool, volume: Volume, leftovers: Leftovers, *, write: bool
) -> AsyncIterator[int]:
    """Gives a volume as an open file for the body.

    To be written it must not be in use, and nobody else can use it meanwhile. It is read as it is
    at the beginning, in use or not, by an lvol snapshot that goes at the end, where its store has
    such; so whoever reads it keeps no domain from starting.

    Raises:
        GatewayError: it cannot be opened, or what is written is not at its end.
    """
    begun = Begun.of(pool.store.uuid, volume, snapshot=not write and pool.store.makes_volumes)
    await pool.target.do(begun.check_free)
    note = leftovers.add(begun)
    opening = asyncio.ensure_future(
        pool.target.do(lambda volumes: _open(begun.begin(volumes, write=write), volume, write))
    )
    try:
        yield await asyncio.shield(opening)
    finally:
        await asyncio.wait((opening,))  # the target's thread goes on where this task is cancelled
        if not opening.exception():
            os.close(opening.result())
        # Who has written may not be told that all is well; who has read is done.
        with nullcontext() if write else suppress(GatewayError):
            await leftovers.end(pool.target, note, begun)


def _open(path: Path, volume: Volume, write: bool) -> int:
    try:
        return os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        raise Refused(
            Code.SYSTEM_ERROR, f"volume {volume.path}: {path}: {error.strerror}"
        ) from error


# What follows blocks, for `Target.file_io`, and raises OSError where it fails.


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
