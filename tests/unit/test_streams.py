"""The streams of volumes: Ceph's format, and what is no stream."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugin.streams.form import FIRST, PIECE_BYTES, Header, Part, Reader, Writer
from pydataplane.errors import VolumeError

SIZE = 3 * PIECE_BYTES
names = st.none() | st.text(max_size=20)
parts = st.lists(
    st.tuples(st.integers(0, SIZE), st.binary(max_size=50) | st.integers(0, 1000)), max_size=8
)


class Trickle(io.RawIOBase):
    """A pipe that gives a byte at a time."""

    def __init__(self, data: bytes) -> None:
        self._rest = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        return self._rest.read(min(1, size or 0))


def written(header: Header, data: list[tuple[int, bytes | int]]) -> bytes:
    """Returns a stream of data, and of zeros where there is a length in its place."""
    out = io.BytesIO()
    stream = Writer(out, header)
    for offset, what in data:
        if isinstance(what, int):
            stream.zeros(offset, what)
        else:
            stream.data(offset, what)
    stream.end()
    return out.getvalue()


def test_the_bytes_are_those_of_the_format() -> None:
    """As doc/dev/rbd-diff.rst of Ceph lists them."""
    assert written(Header(4096, since="a", to="bc"), [(512, b"xyz"), (1024, 512)]) == (
        b"rbd diff v1\n"
        b"f\x01\0\0\0a"
        b"t\x02\0\0\0bc"
        b"s\x00\x10\0\0\0\0\0\0"
        b"w\x00\x02\0\0\0\0\0\0\x03\0\0\0\0\0\0\0xyz"
        b"z\x00\x04\0\0\0\0\0\0\x00\x02\0\0\0\0\0\0"
        b"e"
    )


@given(names, names, parts)
def test_what_is_written_is_read(
    since: str | None, to: str | None, data: list[tuple[int, bytes | int]]
) -> None:
    header = Header(SIZE + 1000, since, to)
    reader = Reader(Trickle(written(header, data)))  # type: ignore[arg-type]
    assert reader.header == header
    expected = [
        Part(offset, what, None) if isinstance(what, int) else Part(offset, len(what), what)
        for offset, what in data
        if what
    ]
    assert list(reader.parts()) == expected


def test_long_data_is_read_in_pieces() -> None:
    data = bytes(range(256)) * (2 * PIECE_BYTES // 256) + b"rest"
    found = list(Reader(io.BytesIO(written(Header(SIZE), [(512, data)]))).parts())
    assert [part.length for part in found] == [PIECE_BYTES, PIECE_BYTES, 4]
    assert [part.offset for part in found] == [512, 512 + PIECE_BYTES, 512 + 2 * PIECE_BYTES]
    assert b"".join(part.data or b"" for part in found) == data


@given(st.binary(max_size=200), st.booleans())
def test_what_is_no_stream_is_refused_in_one_sentence(data: bytes, begins: bool) -> None:
    """Or is one: then nothing of it is outside of its volume."""
    try:
        reader = Reader(io.BytesIO(FIRST * begins + data))
        found = list(reader.parts())
    except VolumeError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert all(part.offset + part.length <= reader.header.size for part in found)


@given(parts, st.integers(0, 400), st.integers(0, 255))
def test_a_stream_with_a_byte_changed_is_refused_or_stays_inside(
    data: list[tuple[int, bytes | int]], at: int, byte: int
) -> None:
    stream = bytearray(written(Header(SIZE + 1000, "a", "b"), data))
    stream[at % len(stream)] = byte
    try:
        reader = Reader(io.BytesIO(bytes(stream)))
        found = list(reader.parts())
    except VolumeError as error:
        assert str(error)
    else:
        assert all(part.offset + part.length <= reader.header.size for part in found)


@pytest.mark.parametrize(
    ("rest", "why"),
    [
        (b"f\xff\xff\xff\xff", "255 at most are read"),
        (b"f\x01\0\0\0\xff", "no text"),
        (b"s" + bytes(8) + b"e", "how large its volume is"),
        (b"s" + b"\xff" * 8 + b"e", "how large its volume is"),
        (b"e", "how large its volume is"),
        (2 * (b"s\x01" + bytes(7)), "has 's' twice"),
        (b"s\x01" + bytes(7) + b"q", "in place of data"),
        (b"s\x01" + bytes(7) + b"z" + b"\xff" * 16, "and its volume 1"),
        (b"s\x01" + bytes(7), "ended before its end"),
    ],
)
def test_it_is_said_what_is_wrong(rest: bytes, why: str) -> None:
    with pytest.raises(VolumeError, match=why):
        list(Reader(io.BytesIO(FIRST + rest)).parts())
