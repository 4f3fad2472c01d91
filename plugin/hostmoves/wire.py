"""What the two hosts of a move say to each other: lines of JSON, and streams in chunks.

A chunk has its length before it, four bytes, the lowest first; one of 0 bytes ends the stream, and
the SHA-256 of all that it had follows. So a stream that was cut off or changed is told from a whole
one before what it has is taken for whole, and another request may follow on the same connection. A
length of `STILL_THERE` has no bytes: the sender reads zeros, of which there is nothing to send.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import select
import struct
import time
from pathlib import Path
from typing import Any, BinaryIO

from pydataplane.errors import VolumeError

PROTOCOL = 2
"""Of both sides; one of another is refused."""
LINE_MAX = 4 << 20
"""Bytes of a line: the XML of a domain is in one."""
CHUNK_MAX = 1 << 20
READ_BYTES = 1 << 16
STILL_THERE = 0xFFFF_FFFF
PING_S = 10.0
"""How long a sender may have nothing to say before it says that it is there, seconds."""
IDLE_S = 120.0
"""How long nothing may come from one before the connection is taken for lost, seconds."""
_LENGTH = struct.Struct("<I")

Message = dict[str, Any]


class Input(io.RawIOBase):
    """What comes from the other side, by a file descriptor that somebody else closes."""

    def __init__(self, descriptor: int, idle_s: float | None = None) -> None:
        """`idle_s`: how long nothing may come, seconds; None: any time."""
        self._descriptor, self._idle_s = descriptor, idle_s
        self._begun = b""

    def readable(self) -> bool:
        """Whether it can be read: always."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Returns `size` bytes, or what is left where that is fewer.

        Raises:
            VolumeError: nothing came for too long.
        """
        parts = [self._begun[:size]]
        self._begun = self._begun[size:]
        missing = size - len(parts[0])
        while missing > 0 and (more := self._some(missing)):
            parts.append(more)
            missing -= len(more)
        return b"".join(parts)

    def message(self) -> Message | None:
        """Returns what is said next; None: nothing more.

        Raises:
            VolumeError: it is nothing that the other side says.
        """
        while b"\n" not in self._begun:
            more = self._some(READ_BYTES) if len(self._begun) <= LINE_MAX else b""
            if not more and not self._begun:
                return None
            if not more:
                raise VolumeError(f"what came is no answer: {shown(self._begun)}")
            self._begun += more
        line, _, self._begun = self._begun.partition(b"\n")
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise VolumeError(f"what came is no answer: {shown(line)}")
        return found

    def _some(self, most: int) -> bytes:
        if self._idle_s is not None:
            ready, _, _ = select.select([self._descriptor], [], [], self._idle_s)
            if not ready:
                raise VolumeError(f"nothing came for {self._idle_s:.0f} s")
        return os.read(self._descriptor, most)


def identity(socket: Path) -> str:
    """Returns what tells one target from another, by its RPC socket; empty: it is not there."""
    try:
        found = socket.stat()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return f"{boot}:{found.st_dev}:{found.st_ino}"


def shown(text: bytes) -> str:
    """Returns the beginning of what came, for a sentence: without what a terminal would obey."""
    return ascii(text[:80].decode(errors="replace"))


def say(file: BinaryIO, message: Message) -> None:
    """Says something; an OSError of `file` passes through."""
    file.write(json.dumps(message).encode() + b"\n")
    file.flush()


class ChunkWriter(io.RawIOBase):
    """Writes a stream in chunks; an OSError of its file passes through."""

    def __init__(self, file: BinaryIO) -> None:
        """Writes to `file`."""
        self._file = file
        self._sum = hashlib.sha256()
        self._waits = bytearray()
        self._wrote = time.monotonic()
        self.count = 0
        """Bytes that it was given."""

    def writable(self) -> bool:
        """Whether it can be written: always."""
        return True

    def write(self, data: Any) -> int:
        """Takes all of `data`, bytes."""
        self._waits += data
        self.count += len(data)
        if len(self._waits) >= CHUNK_MAX:
            self._put()
        return len(data)

    def flush(self) -> None:
        """Does nothing: `end` writes what waits."""

    def still_there(self) -> None:
        """Says that the sender is there, if it has said nothing for long."""
        if time.monotonic() - self._wrote > PING_S:
            self._file.write(_LENGTH.pack(STILL_THERE))
            self._file.flush()
            self._wrote = time.monotonic()

    def end(self) -> None:
        """Ends it: all was written."""
        self._put()
        self._file.write(_LENGTH.pack(0) + self._sum.digest())
        self._file.flush()

    def _put(self) -> None:
        for at in range(0, len(self._waits), CHUNK_MAX):
            chunk = bytes(self._waits[at : at + CHUNK_MAX])
            self._sum.update(chunk)
            self._file.write(_LENGTH.pack(len(chunk)))
            self._file.write(chunk)
        self._waits.clear()
        self._wrote = time.monotonic()


class ChunkReader(io.RawIOBase):
    """Reads a stream of chunks, to its end."""

    def __init__(self, file: Input) -> None:
        """Reads `file` from where a stream begins."""
        self._file = file
        self._sum = hashlib.sha256()
        self._left = memoryview(b"")
        self._is_over = False

    def readable(self) -> bool:
        """Whether it can be read: always."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Returns some bytes, at most `size`; none: it is whole, and is over.

        Raises:
            VolumeError: it was cut off, or changed on its way.
        """
        if not self._left and not self._is_over:
            self._next()
        part = self._left[:size]
        self._left = self._left[size:]
        return bytes(part)

    def _next(self) -> None:
        length = STILL_THERE
        while length == STILL_THERE:
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > CHUNK_MAX:
            raise VolumeError(f"the stream is damaged: it has a chunk of {length} bytes")
        if length:
            chunk = self._exactly(length)
            self._sum.update(chunk)
            self._left = memoryview(chunk)
            return
        if self._exactly(self._sum.digest_size) != self._sum.digest():
            raise VolumeError("the stream was changed on its way: its SHA-256 is another one")
        self._is_over = True

    def _exactly(self, count: int) -> bytes:
        found = self._file.read(count)
        if len(found) < count:
            raise VolumeError("the connection ended before the stream did")
        return found
