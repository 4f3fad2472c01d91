"""What is copied in one go, and how far a copy has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from plugin.images import qemuimg
from plugin.images.qemuimg import SECTOR, Image

PIECE = 256 << 20
"""Bytes that are copied at most before it is noted how far the copy has come."""

Progress = Callable[[int, int], None]
"""Told the bytes of an image that are done, and all."""


def pieces(data: Iterable[tuple[int, int]], size: int, begin: int) -> Iterator[tuple[int, int]]:
    """Yields (offset, length) of what is to be copied from `begin` bytes on, in order.

    `data` are parts of the source with anything but zeros; each piece lies within one PIECE of the
    image, and is of whole sectors.
    """
    end = begin
    for offset, length in data:
        at, stop = max(offset, end), min(offset + length, size)
        while at < stop:
            at -= at % SECTOR
            end = min(at - at % PIECE + PIECE, -(-stop // SECTOR) * SECTOR, size)
            yield at, end - at
            at = end


def joined(parts: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields parts, those of one PIECE as one: fewer copies, each of which finds the zeros."""
    last: tuple[int, int] | None = None
    for offset, length in parts:
        if last is not None and last[0] // PIECE == offset // PIECE:
            last = (last[0], offset + length - last[0])
            continue
        if last is not None:
            yield last
        last = (offset, length)
    if last is not None:
        yield last


def copy(
    source: Image,
    target: Image,
    data: Iterable[tuple[int, int]],
    begin: int,
    note: Callable[[int], None],
    progress: Progress,
) -> None:
    """Copies what `data` names from `begin` bytes on; `note` is told the bytes durably done."""
    for offset, length in joined(pieces(data, source.size, begin)):
        progress(offset, source.size)
        qemuimg.copy(source, target, offset, length)
        note(offset + length)
    progress(source.size, source.size)
