"""SHA-256 of what is in images, and of the files that they are."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from plugin.images import pieces, qemuimg
from plugin.images.qemuimg import Image
from pydataplane.errors import VolumeError

BLOCK = 16 << 20
"""Bytes that are read and compared in one go."""
ZEROS = bytes(BLOCK)


def check(path: Path, wanted: str, progress: pieces.Progress) -> None:
    """Compares the bytes of a file, as `sha256sum` reads them, with a published checksum in hex.

    Raises:
        VolumeError: they have another.
    """
    found = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        while part := file.read(BLOCK):
            found.update(part)
            progress(file.tell(), size)
    if found.hexdigest() != wanted:
        raise VolumeError(
            f"{path} has the SHA-256 {found.hexdigest()}, not {wanted}: nothing was written; get "
            "the file again, or the checksum that belongs to it"
        )


def contents(one: Image, other: Image, progress: pieces.Progress) -> tuple[str, str]:
    """Reads two images and returns the SHA-256 of the contents of each.

    They are equal where all bytes are, each of which is compared. The shorter image is read as if
    zeros came after it, as many as the other one has more.
    """
    size = max(one.size, other.size)
    mine = yours = hashlib.sha256()
    done = 0
    for left, right in zip(_blocks(one, size), _blocks(other, size), strict=True):
        if mine is yours and left != right:
            yours = mine.copy()
        mine.update(left)
        if yours is not mine:
            yours.update(right)
        done += len(left)
        progress(done, size)
    return mine.hexdigest(), yours.hexdigest()


def _blocks(image: Image, size: int) -> Iterator[bytes]:
    """Yields what an image holds, and zeros up to `size` bytes, in BLOCKs; holes are not read."""
    data = iter(qemuimg.data_of(image))
    begin = end = 0
    for at in range(0, size, BLOCK):
        while end <= at:
            begin, length = next(data, (size + BLOCK, 1))
            end = begin + length
        stop = min(at + BLOCK, size)
        if begin >= stop:
            yield ZEROS[: stop - at]
        else:
            there = qemuimg.read(image, at, min(stop, image.size) - at)
            yield there.ljust(stop - at, b"\0")
