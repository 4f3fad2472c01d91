"""The streams of `virtlun volume send` and `receive`: those of Ceph's `rbd export-diff`.

Version 1 of "RBD Incremental Backup" (doc/dev/rbd-diff.rst of Ceph). After a first line come what
the stream is of, then data, then an end. Numbers have their lowest byte first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from pydataplane.errors import VolumeError
from pydataplane.volumenames import BYTES_MAX

FIRST = b"rbd diff v1\n"
PIECE_BYTES = 1 << 20
"""Data that a reader gives at a time."""
NAME_MAX = 255
"""Bytes of a snapshot's name that are read: a volume's are shorter."""

SINCE, TO, SIZE, DATA, ZEROS, END = b"f", b"t", b"s", b"w", b"z", b"e"
_LENGTH, _NUMBER, _PART = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<QQ")


@dataclass(frozen=True)
class Header:
    """What a stream is of."""

    size: int
    """Bytes of the volume."""
    since: str | None = None
    """The name of the snapshot that the rest is as in; None: nothing, zeros."""
    to: str | None = None
    """The name of the snapshot that it is of; None: of none."""


@dataclass(frozen=True)
class Part:
    """A part of a volume: where it is in bytes, and what is there."""

    offset: int
    length: int
    data: bytes | None
    """None: zeros."""


class Writer:
    """Writes a stream; an OSError of its file passes through."""

    def __init__(self, file: BinaryIO, header: Header) -> None:
        """Begins it."""
        self._file = file
        file.write(FIRST)
        for tag, name in ((SINCE, header.since), (TO, header.to)):
            if name is not None:
                text = name.encode()
                file.write(tag + _LENGTH.pack(len(text)) + text)
        file.write(SIZE + _NUMBER.pack(header.size))

    def data(self, offset: int, data: bytes | memoryview) -> None:
        """What is at `offset`, bytes."""
        self._file.write(DATA + _PART.pack(offset, len(data)))
        self._file.write(data)

    def zeros(self, offset: int, length: int) -> None:
        """`length` bytes at `offset` are zeros."""
        self._file.write(ZEROS + _PART.pack(offset, length))

    def end(self) -> None:
        """Ends it: a reader takes no stream for whole that has no end."""
        self._file.write(END)
        self._file.flush()


class Reader:
    """Reads a stream, which anybody may have written; an OSError of its file passes through."""

    def __init__(self, file: BinaryIO) -> None:
        """Reads what it is of.

        Raises:
            VolumeError: it is no such stream, or not whole.
        """
        self._file = file
        begin = self._some(len(FIRST))
        if begin == FIRST.replace(b"1", b"2"):
            raise VolumeError(
                "the stream is of version 2 of rbd's format: have it made in version 1, as "
                "`rbd export-diff` does without --export-format"
            )
        if begin != FIRST:
            raise VolumeError(
                "that is no stream of a volume: it does not begin as those of `virtlun volume "
                "send` and `rbd export-diff`"
            )
        names: dict[bytes, str] = {}
        size: int | None = None
        while (tag := self._bytes(1)) in (SINCE, TO, SIZE):
            if tag in names or (tag == SIZE and size is not None):
                raise VolumeError(f"the stream is damaged: it has '{tag.decode()}' twice")
            if tag == SIZE:
                (size,) = _NUMBER.unpack(self._bytes(_NUMBER.size))
            else:
                names[tag] = self._name()
        if size is None or not 0 < size <= BYTES_MAX:
            raise VolumeError("the stream is damaged: it does not say how large its volume is")
        self.header = Header(size, names.get(SINCE), names.get(TO))
        self._tag = tag

    def parts(self) -> Iterator[Part]:
        """Yields what it has, to its end; of data at most PIECE_BYTES at a time.

        Raises:
            VolumeError: it is damaged, or not whole.
        """
        while self._tag != END:
            if self._tag not in (DATA, ZEROS):
                raise VolumeError(f"the stream is damaged: it has {self._tag!r} in place of data")
            offset, length = _PART.unpack(self._bytes(_PART.size))
            if offset > self.header.size or length > self.header.size - offset:
                raise VolumeError(
                    f"the stream is damaged: it has {length} bytes at {offset}, and its volume "
                    f"{self.header.size}"
                )
            if self._tag == ZEROS and length:
                yield Part(offset, length, None)
            elif self._tag == DATA:
                yield from self._data(offset, length)
            self._tag = self._bytes(1)
        if self._some(1):
            raise VolumeError("more follows the end of the stream: give one stream at a time")

    def _data(self, offset: int, length: int) -> Iterator[Part]:
        end = offset + length
        while offset < end:
            data = self._bytes(min(PIECE_BYTES, end - offset))
            yield Part(offset, len(data), data)
            offset += len(data)

    def _name(self) -> str:
        (length,) = _LENGTH.unpack(self._bytes(_LENGTH.size))
        if length > NAME_MAX:
            raise VolumeError(
                f"the stream names a snapshot by {length} bytes: {NAME_MAX} at most are read"
            )
        try:
            return self._bytes(length).decode()
        except UnicodeDecodeError as error:
            raise VolumeError("the stream names a snapshot by what is no text (UTF-8)") from error

    def _bytes(self, count: int) -> bytes:
        found = self._some(count)
        if len(found) < count:
            raise VolumeError(
                "the stream ended before its end: see what its sender said, and send it again"
            )
        return found

    def _some(self, count: int) -> bytes:
        """Returns `count` bytes, or what is left where that is fewer."""
        found = b""
        while len(found) < count and (more := self._file.read(count - len(found))):
            found += more
        return found
