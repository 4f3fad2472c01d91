"""The XDR codec and message framing, with values and bytes nobody chose."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugin.gateway.channel import Channel, Look, Pass
from plugin.gateway.errors import Code, Refused, UpstreamError, error_payload
from plugin.gateway.incoming import CHUNK_BYTES
from plugin.gateway.messages import (
    DiskNumberCall,
    Domain,
    DomainCall,
    TypedParam,
    XmlCall,
)
from plugin.gateway.outgoing import PeerGone
from plugin.gateway.statistics import records
from plugin.gateway.wire import (
    FDS_MAX,
    HEADER,
    HEADER_BYTES,
    MESSAGE_MAX_BYTES,
    STRING_MAX_BYTES,
    Header,
    MessageType,
    Status,
    WireError,
    message,
    unpack_header,
)
from plugin.gateway.xdr import Reader, Writer, XdrError
from tests.unit.gateway.decoded import StatsRecord

QUICK = settings(max_examples=60, deadline=None)
U32 = st.integers(0, 2**32 - 1)
I32 = st.integers(-(2**31), 2**31 - 1)
U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
DOMAINS = st.builds(Domain, TEXTS, st.binary(min_size=16, max_size=16), I32)
VALUES = st.one_of(
    st.tuples(st.just(1), I32),
    st.tuples(st.just(2), U32),
    st.tuples(st.just(3), I64),
    st.tuples(st.just(4), U64),
    st.tuples(st.just(5), st.floats(allow_nan=False)),
    st.tuples(st.just(6), st.integers(0, 1)),
    st.tuples(st.just(7), TEXTS),
)

PARAMS = st.builds(lambda name, pair: TypedParam(name, *pair), TEXTS, VALUES)


@QUICK
@given(U32, I32, U64, I64, st.floats(allow_nan=False), TEXTS, st.binary(), TEXTS | st.none())
def test_values_come_back(
    a: int, b: int, c: int, d: int, e: float, f: str, g: bytes, h: str | None
) -> None:
    writer = Writer().u32(a).i32(b).u64(c).i64(d).double(e).string(f).opaque(g)
    writer.optional(h, writer.string)
    raw = bytes(writer)
    assert len(raw) % 4 == 0
    reader = Reader(raw)
    assert (reader.u32(), reader.i32(), reader.u64(), reader.i64()) == (a, b, c, d)
    assert (reader.double(), reader.string(), reader.opaque()) == (e, f, g)
    assert reader.optional(reader.string) == h
    reader.end()


@QUICK
@given(DOMAINS, TEXTS, U32, U64)
def test_arguments_come_back(dom: Domain, text: str, flags: int, size: int) -> None:
    call = DomainCall(dom, text, flags)
    assert DomainCall.read(call.pack(text=True, flags=True), text=True, flags=True) == call
    xml = XmlCall(text, flags, 2)
    assert XmlCall.read(xml.pack(), flags=True, descriptors=True) == xml
    packed = bytes(dom.write(Writer()).string(text).u64(size).u32(flags))
    assert DiskNumberCall.read(packed) == DiskNumberCall(dom, text, size, flags)


@QUICK
@given(st.lists(st.builds(StatsRecord, DOMAINS, st.lists(PARAMS, max_size=5)), max_size=5))
def test_statistics_come_back(every: list[StatsRecord]) -> None:
    assert StatsRecord.read_all(StatsRecord.pack_all(every)) == every


@QUICK
@given(st.binary(max_size=200))
def test_garbage_is_an_xdr_error_or_a_value_never_another_exception(raw: bytes) -> None:
    for read in (
        lambda: DomainCall.read(raw, text=True, flags=True),
        lambda: XmlCall.read(raw, flags=True, descriptors=True),
        lambda: DiskNumberCall.read(raw),
        lambda: StatsRecord.read_all(raw),
        lambda: records(raw),
    ):
        try:
            read()
        except XdrError:
            continue


@pytest.mark.parametrize("flag", [b"\0\0\0\1", b"\1\0\0\0"])  # go-libvirt's is the second one
def test_a_pointer_whose_flag_is_not_0_is_there(flag: bytes) -> None:
    reader = Reader(flag + bytes(Writer().string("qemu:///system")) + bytes(4))
    assert reader.optional(reader.string) == "qemu:///system"
    assert reader.optional(reader.string) is None


def test_limits_of_the_codec() -> None:
    with pytest.raises(XdrError, match="at most"):
        Reader(bytes(Writer().u32(STRING_MAX_BYTES + 1))).string()
    with pytest.raises(XdrError, match="at most"):
        Writer().string("x" * (STRING_MAX_BYTES + 1))
    with pytest.raises(XdrError, match="values"):
        reader = Reader(bytes(Writer().u32(3)))
        reader.array(reader.u32, 2)
    with pytest.raises(XdrError, match="padding"):
        Reader(b"\0\0\0\x01aXXX").string()
    with pytest.raises(XdrError, match="UTF-8"):
        Reader(b"\0\0\0\x01\xff\0\0\0").string()
    with pytest.raises(XdrError, match="NUL"):
        Reader(bytes(Writer().string("<domain/>\0<"))).string()
    with pytest.raises(XdrError, match="too many"):
        Reader(b"\0\0\0\0").end()


@QUICK
@given(U32, U32, I32.filter(lambda v: v >= 0), st.integers(0, 6), U32, st.integers(0, 2))
def test_headers_come_back(
    program: int, version: int, procedure: int, kind: int, serial: int, status: int
) -> None:
    header = Header(28, program, version, procedure, kind, serial, status)
    assert unpack_header(header.pack()) == header


@pytest.mark.parametrize("length", [0, 27, MESSAGE_MAX_BYTES + 1, 2**32 - 1])
def test_impossible_lengths_are_refused(length: int) -> None:
    with pytest.raises(WireError, match="bytes"):
        unpack_header(HEADER.pack(length, 1, 1, 1, 0, 1, 0))


def test_impossible_types_and_statuses_are_refused() -> None:
    with pytest.raises(WireError, match="type 7"):
        unpack_header(HEADER.pack(28, 1, 1, 1, 7, 1, 0))
    with pytest.raises(WireError, match="status 3"):
        unpack_header(HEADER.pack(28, 1, 1, 1, 0, 1, 3))


def test_errors_read_like_libvirts_own() -> None:
    raw = Refused(Code.OPERATION_INVALID, "domain is not running").payload()
    error = UpstreamError(raw)
    assert error.code == Code.OPERATION_INVALID
    assert str(error) == "Requested operation is not valid: domain is not running"
    assert error.payload() == raw
    assert UpstreamError(b"\0").code == Code.INTERNAL_ERROR
    assert UpstreamError(error_payload(Code.NO_DOMAIN_METADATA, "")).is_no_metadata


Body = Callable[[Channel, socket.socket, Channel, Channel], Awaitable[None]]


def channels(body: Body) -> None:
    """Runs `body(near, raw, out, far)`: raw feeds near; what near relays to out, far reads."""

    async def scene() -> None:
        a, raw = socket.socketpair()
        b, c = socket.socketpair()
        raw.setblocking(False)
        near, out, far = Channel(a), Channel(b), Channel(c)
        try:
            async with asyncio.timeout(90):
                await body(near, raw, out, far)
        finally:
            raw.close()
            for channel in (near, out, far):
                channel.close()

    asyncio.run(scene())


TURNS = 1000
"""Of the event loop, in which something changes unless all tasks wait."""


async def at_rest(figure: Callable[[], int]) -> int:
    """Returns `figure` when no task gets any further, which it is to show.

    All of them run in this thread, and a socket pair hands on at once: no time has to pass.
    """
    quiet, last = 0, figure()
    while quiet < TURNS:
        await asyncio.sleep(0)
        now = figure()
        quiet, last = (quiet + 1, now) if now == last else (0, now)
    return last


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3 * CHUNK_BYTES), min_size=1, max_size=4), st.integers(1, 200))
def test_messages_pass_whole_however_they_are_cut(sizes: list[int], pieces: int) -> None:
    sent = [
        message(MessageType.STREAM, n, n, os.urandom(size), status=Status.CONTINUE)
        for n, size in enumerate(sizes)
    ]

    async def body(near: Channel, raw: socket.socket, out: Channel, far: Channel) -> None:
        async def feed() -> None:
            loop, data = asyncio.get_running_loop(), b"".join(sent)
            cut = -(-len(data) // pieces)
            for start in range(0, len(data), cut):
                await loop.sock_sendall(raw, data[start : start + cut])

        async def relay() -> None:
            for _ in sent:
                header = await near.header()
                assert header is not None
                await near.relay(header, out)

        async def check() -> None:
            for expected in sent:
                header = await far.header()
                assert header is not None
                payload, _ = await far.payload(header, MESSAGE_MAX_BYTES)
                assert header.pack() + payload == expected

        await asyncio.gather(feed(), relay(), check())

    channels(body)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([0, 40, 3000, CHUNK_BYTES - 30, 2 * CHUNK_BYTES]), max_size=12),
    st.integers(1, 200),
    st.randoms(use_true_random=False),
)
def test_routed_messages_pass_in_order_and_the_others_are_returned(
    sizes: list[int], pieces: int, random: Random
) -> None:
    """Procedures: 0 passes, 1 is changed on the way, 2 is not known yet, 3 is the reader's own."""
    procedures = [random.randrange(4) for _ in sizes]
    sent = [
        message(MessageType.STREAM, procedure, n, bytes([n]) * size, status=Status.CONTINUE)
        for n, (procedure, size) in enumerate(zip(procedures, sizes, strict=True))
    ]

    async def body(near: Channel, raw: socket.socket, out: Channel, far: Channel) -> None:
        looks: dict[int, Look] = {1: lambda given: given + b"more", 2: lambda _: None}

        def route(header: Header) -> Pass | None:
            return None if header.procedure == 3 else Pass(out, looks.get(header.procedure))

        async def feed() -> None:
            loop, data = asyncio.get_running_loop(), b"".join(sent)
            cut = -(-len(data) // pieces) or 1
            for start in range(0, len(data), cut):
                await loop.sock_sendall(raw, data[start : start + cut])
            raw.shutdown(socket.SHUT_WR)

        async def relay() -> None:
            while (header := await near.next(route)) is not None:
                # One that is longer than the buffer is looked into by the reader.
                assert header.procedure >= 2 or header.length > CHUNK_BYTES
                payload, _ = await near.payload(header, MESSAGE_MAX_BYTES)
                await out.send(header.resized(len(payload) + 1).pack() + b"!" + payload)
            out.shutdown()

        async def check() -> None:
            for n, (procedure, size) in enumerate(zip(procedures, sizes, strict=True)):
                header = await far.header()
                assert header is not None
                payload, _ = await far.payload(header, MESSAGE_MAX_BYTES)
                assert (header.serial, header.procedure) == (n, procedure)
                plain = bytes([n]) * size
                too_long = size + HEADER_BYTES > CHUNK_BYTES
                returned = procedure >= 2 or (procedure == 1 and too_long)
                changed = plain + b"more" if procedure == 1 else plain
                assert payload == (b"!" + plain if returned else changed)
            assert await far.header() is None

        await asyncio.gather(feed(), relay(), check())

    channels(body)


def test_a_message_that_passes_wakes_no_task() -> None:
    async def body(near: Channel, raw: socket.socket, out: Channel, far: Channel) -> None:
        reader = asyncio.create_task(near.next(lambda _: Pass(out)))
        await asyncio.sleep(0)
        waits = near._in._waiting
        for n in range(5):
            raw.send(message(MessageType.CALL, 1, n))
            header = await far.header()
            assert header is not None and header.serial == n
        assert near._in._waiting is waits, "the reader was woken"
        raw.shutdown(socket.SHUT_WR)
        assert await reader is None

    channels(body)


def test_an_end_that_takes_no_more_stops_the_reader_and_loses_nothing() -> None:
    count, size = 40, CHUNK_BYTES // 2

    async def body(near: Channel, raw: socket.socket, out: Channel, far: Channel) -> None:
        sent = 0

        async def feed() -> None:
            nonlocal sent
            for n in range(count):
                data = message(MessageType.CALL, 1, n, bytes([n]) * size)
                await asyncio.get_running_loop().sock_sendall(raw, data)
                sent += 1

        reader = asyncio.create_task(near.next(lambda _: Pass(out)))
        feeding = asyncio.create_task(feed())
        # Nobody reads `far`: all the buffers between fill.
        assert await at_rest(lambda: sent) < count
        await out_is_busy_for_others(out)
        for n in range(count):
            header = await far.header()
            assert header is not None and header.serial == n
            payload, _ = await far.payload(header, MESSAGE_MAX_BYTES)
            assert payload == bytes([n]) * size
        await feeding
        raw.shutdown(socket.SHUT_WR)
        assert await reader is None

    async def out_is_busy_for_others(out: Channel) -> None:
        assert not out._out.is_free, "a message of another task would be put into the middle"

    channels(body)


def test_a_route_to_a_closed_channel_is_told_and_the_reader_goes_on() -> None:
    async def body(near: Channel, raw: socket.socket, out: Channel, far: Channel) -> None:
        far.close()
        raw.send(message(MessageType.CALL, 1, 1) + message(MessageType.CALL, 2, 2))
        with pytest.raises(PeerGone):
            await near.next(lambda _: Pass(out))
        header = await near.next(lambda _: None)
        assert header is not None and header.serial == 2

    channels(body)


def test_descriptors_pass_with_their_carrier_bytes() -> None:
    async def body(near: Channel, raw: socket.socket, out: Channel, far: Channel) -> None:
        files = [tempfile.TemporaryFile() for _ in range(FDS_MAX)]  # noqa: SIM115
        for number, file in enumerate(files):
            file.write(b"x" * number)
            file.flush()
        feeder = Channel(raw)
        payload = bytes(Writer().u32(len(files)).string("args"))
        await feeder.send(
            message(MessageType.CALL_WITH_FDS, 309, 5, payload), [os.dup(f.fileno()) for f in files]
        )
        await feeder.send(message(MessageType.CALL, 1, 6))
        for _ in range(2):
            header = await near.header()
            assert header is not None
            await near.relay(header, out)
        header = await far.header()
        assert header is not None and header.with_fds
        data, descriptors = await far.payload(header, 1000)
        assert data == payload
        assert [os.fstat(fd).st_size for fd in descriptors] == list(range(FDS_MAX))
        for fd in descriptors:
            os.close(fd)
        header = await far.header()
        assert header is not None and header.serial == 6

    channels(body)


@pytest.mark.parametrize(
    ("raw_bytes", "cause"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "bytes"),
        (message(MessageType.CALL_WITH_FDS, 1, 1), "how many"),
        (message(MessageType.CALL_WITH_FDS, 1, 1, bytes(Writer().u32(33))), "33 descriptors"),
        (message(MessageType.CALL_WITH_FDS, 1, 1, bytes(Writer().u32(1))) + b"\0", "announced"),
        (message(MessageType.CALL_WITH_FDS, 1, 1, bytes(Writer().u32(1))) + b"x", "carrier"),
    ],
)
def test_a_broken_protocol_is_told_apart(raw_bytes: bytes, cause: str) -> None:
    async def body(near: Channel, raw: socket.socket, out: Channel, far: Channel) -> None:
        raw.send(raw_bytes)
        with pytest.raises(WireError, match=cause):
            header = await near.header()
            assert header is not None
            await near.payload(header, 1000)

    channels(body)


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_too_many_stray_descriptors_are_refused_and_closed() -> None:
    async def body(near: Channel, raw: socket.socket, out: Channel, far: Channel) -> None:
        before = _open_descriptors()
        with tempfile.TemporaryFile() as file:
            for byte in message(MessageType.CALL, 1, 1, bytes(100))[: FDS_MAX + 1]:
                socket.send_fds(raw, [bytes([byte])], [file.fileno()])
        header = await near.header()
        assert header is not None
        with pytest.raises(WireError, match="descriptors"):
            await near.payload(header, 1000)
        near.close()
        assert _open_descriptors() < before

    channels(body)


def test_an_end_inside_a_message_is_an_error_and_between_messages_is_none() -> None:
    async def body(near: Channel, raw: socket.socket, out: Channel, far: Channel) -> None:
        raw.send(message(MessageType.CALL, 1, 1))
        raw.send(message(MessageType.CALL, 1, 2, b"1234")[:-2])
        raw.shutdown(socket.SHUT_WR)
        header = await near.header()
        assert header is not None
        await near.relay(header, out)
        header = await near.header()
        assert header is not None
        with pytest.raises(ConnectionError, match="inside"):
            await near.payload(header, 100)
        first = await far.header()
        assert first is not None and first.serial == 1

    channels(body)


def test_a_reader_that_stalls_holds_the_sender_back() -> None:
    async def body(near: Channel, raw: socket.socket, out: Channel, far: Channel) -> None:
        pushed = 0

        async def feed() -> None:
            nonlocal pushed
            loop = asyncio.get_running_loop()
            while True:
                await loop.sock_sendall(raw, message(MessageType.STREAM, 1, 1, bytes(60000)))
                pushed += 1

        async def relay() -> None:
            while (header := await near.header()) is not None:
                await near.relay(header, out)

        tasks = [asyncio.create_task(feed()), asyncio.create_task(relay())]
        stalled = await at_rest(lambda: pushed)
        assert 0 < stalled < 40, "only what the kernel's buffers hold"
        for _ in range(stalled):
            header = await far.header()
            assert header is not None
            await far.discard(header)
        assert await at_rest(lambda: pushed) > stalled
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    channels(body)


def test_a_receiver_that_leaves_does_not_spoil_the_senders_messages() -> None:
    async def body(near: Channel, raw: socket.socket, out: Channel, far: Channel) -> None:
        far.close()
        feeder = Channel(raw)
        big = message(MessageType.STREAM, 1, 1, bytes(CHUNK_BYTES * 3))

        async def feed() -> None:
            await feeder.send(big)
            await feeder.send(message(MessageType.CALL, 2, 2))

        feeding = asyncio.create_task(feed())
        header = await near.header()
        assert header is not None
        with pytest.raises(PeerGone):
            await near.relay(header, out)
        header = await near.header()
        assert header is not None and (header.procedure, header.length) == (2, HEADER_BYTES)
        await feeding

    channels(body)


def test_closing_wakes_who_waits() -> None:
    async def body(near: Channel, raw: socket.socket, out: Channel, far: Channel) -> None:
        waiting = asyncio.create_task(near.header())
        await asyncio.sleep(0)
        near.close()
        assert await waiting is None
        writing = asyncio.create_task(out.send(message(MessageType.STREAM, 1, 1, bytes(4 << 20))))
        await asyncio.sleep(0)
        out.close()
        with pytest.raises(ConnectionError):
            await writing

    channels(body)


def test_nothing_follows_a_message_that_broke_off() -> None:
    async def body(near: Channel, raw: socket.socket, out: Channel, far: Channel) -> None:
        raw.send(message(MessageType.CALL, 1, 1, bytes(1000))[:500])
        raw.shutdown(socket.SHUT_WR)
        header = await near.header()
        assert header is not None
        with pytest.raises(ConnectionError, match="inside"):
            await near.relay(header, out)
        with pytest.raises(ConnectionError, match="inside"):
            await out.send(message(MessageType.CALL, 2, 2))
        out.close()
        header = await far.header()
        assert header is not None and header.serial == 1
        with pytest.raises(ConnectionError):
            await far.payload(header, 1000)

    channels(body)
