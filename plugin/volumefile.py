"""A volume as an open file, which takes whole blocks alone.

All of it blocks, and raises OSError where it fails.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence

PIECE_BYTES = 1 << 20
"""Zeros that are written at a time."""

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""FALLOC_FL_*."""

_libc = ctypes.CDLL(None, use_errno=True)


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
