"""XDR (RFC 4506) as libvirt uses it: a reader that trusts nothing and a writer.

Only the types of the calls we touch: 32 and 64 bit integers, double, strings, opaque data, and
pointers (a word that says whether the value follows).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Self, TypeVar

from plugin.gateway.wire import STRING_MAX_BYTES, WireError

T = TypeVar("T")

_U32 = struct.Struct(">I")
_I32 = struct.Struct(">i")
_U64 = struct.Struct(">Q")
_I64 = struct.Struct(">q")
_F64 = struct.Struct(">d")


class XdrError(WireError):
    """The bytes are not a value of the type asked for."""


class Reader:
    """Reads values one after another; every method raises XdrError on malformed data."""

    def __init__(self, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Starts `offset` bytes into `data`."""
        self._data = data
        self.offset = offset

    def _number(self, form: struct.Struct) -> int:
        end = self.offset + form.size
        if end > len(self._data):
            raise XdrError(f"{len(self._data)} bytes end inside a number at {self.offset}")
        (value,) = form.unpack_from(self._data, self.offset)
        self.offset = end
        return int(value)

    def u32(self) -> int:
        """Reads an unsigned int."""
        return self._number(_U32)

    def i32(self) -> int:
        """Reads an int."""
        return self._number(_I32)

    def u64(self) -> int:
        """Reads an unsigned hyper."""
        return self._number(_U64)

    def i64(self) -> int:
        """Reads a hyper."""
        return self._number(_I64)

    def double(self) -> float:
        """Reads a double."""
        raw = self.fixed(_F64.size)
        return float(_F64.unpack(raw)[0])

    def fixed(self, length: int) -> bytes:
        """Reads opaque data of a fixed length in bytes, with its padding."""
        end = self.offset + length
        padded = end + (-length % 4)
        if length < 0 or padded > len(self._data):
            raise XdrError(f"{len(self._data)} bytes end inside {length} bytes at {self.offset}")
        value = bytes(self._data[self.offset : end])
        if any(self._data[end:padded]):
            raise XdrError(f"padding at {end} is not zero")
        self.offset = padded
        return value

    def opaque(self, limit: int = STRING_MAX_BYTES) -> bytes:
        """Reads opaque data of at most `limit` bytes."""
        length = self.u32()
        if length > limit:
            raise XdrError(f"{length} bytes where at most {limit} are allowed")
        return self.fixed(length)

    def string(self) -> str:
        """Reads a string of at most 4 MiB; libvirt's are UTF-8.

        libvirt reads one up to its first NUL. One that goes on behind it is refused: what is
        judged here would not be what libvirtd takes.
        """
        raw = self.opaque()
        if b"\0" in raw:
            raise XdrError("a string with a NUL in it")
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise XdrError("a string that is not UTF-8") from error

    def optional(self, read: Callable[[], T]) -> T | None:
        """Reads a pointer: nothing, or what `read` reads.

        Its flag is 0 or 1 (RFC 4506, 4.19); to libvirtd all but 0 is 1, and go-libvirt sends more.
        """
        return read() if self.u32() else None

    def array(self, read: Callable[[], T], limit: int) -> list[T]:
        """Reads at most `limit` values with `read`."""
        count = self.u32()
        if count > limit:
            raise XdrError(f"{count} values where at most {limit} are allowed")
        return [read() for _ in range(count)]

    def end(self) -> None:
        """Checks that nothing is left."""
        if self.offset != len(self._data):
            raise XdrError(f"{len(self._data) - self.offset} bytes too many")


class Writer:
    """Appends values; `bytes(writer)` is the result. Methods return the writer, for chaining."""

    def __init__(self) -> None:
        self._data = bytearray()

    def __bytes__(self) -> bytes:
        return bytes(self._data)

    def u32(self, value: int) -> Self:
        """Writes an unsigned int."""
        self._data += _U32.pack(value)
        return self

    def i32(self, value: int) -> Self:
        """Writes an int."""
        self._data += _I32.pack(value)
        return self

    def u64(self, value: int) -> Self:
        """Writes an unsigned hyper."""
        self._data += _U64.pack(value)
        return self

    def i64(self, value: int) -> Self:
        """Writes a hyper."""
        self._data += _I64.pack(value)
        return self

    def double(self, value: float) -> Self:
        """Writes a double."""
        self._data += _F64.pack(value)
        return self

    def fixed(self, value: bytes) -> Self:
        """Writes opaque data whose length both sides know."""
        self._data += value
        self._data += bytes(-len(value) % 4)
        return self

    def opaque(self, value: bytes) -> Self:
        """Writes opaque data with its length."""
        if len(value) > STRING_MAX_BYTES:
            raise XdrError(f"{len(value)} bytes where at most {STRING_MAX_BYTES} are allowed")
        return self.u32(len(value)).fixed(value)

    def string(self, value: str) -> Self:
        """Writes a string; XdrError if it is longer than 4 MiB."""
        return self.opaque(value.encode())

    def optional(self, value: T | None, write: Callable[[T], object]) -> Self:
        """Writes a pointer: nothing, or `value` with `write`."""
        self.u32(0 if value is None else 1)
        if value is not None:
            write(value)
        return self

    def array(self, values: list[T], write: Callable[[T], object]) -> Self:
        """Writes the number of `values` and each with `write`."""
        self.u32(len(values))
        for value in values:
            write(value)
        return self
