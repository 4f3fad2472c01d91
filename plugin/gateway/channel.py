"""One connected UNIX socket that carries libvirt messages, with their file descriptors.

Reading and writing wait for the other end, so memory stays bounded: a channel holds one buffer of
CHUNK_BYTES, and a message that is only passed on streams through it in pieces.
"""

from __future__ import annotations

import array
import asyncio
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from plugin.gateway.wire import FDS_MAX, HEADER_BYTES, Header, WireError, unpack_header

CHUNK_BYTES = 131_072
"""Size of a channel's read buffer, bytes."""

FAIRNESS_BYTES = 1 << 20
"""A reader that always finds data lets other connections run after this many bytes."""

FAIRNESS_MESSAGES = 64
"""And after this many messages."""

_ANCILLARY_BYTES = socket.CMSG_SPACE(FDS_MAX * array.array("i").itemsize)


class PeerGone(ConnectionError):
    """The channel that a message was passed on to is closed; the one it came from is not."""


class Stalled(ConnectionError):
    """The other end took nothing for too long; the connection is ended, for it broke off."""


class Channel:
    """Messages in both directions over `sock`, which it owns. One task reads; any may write.

    With `stall_s` the other end is given so many seconds to take at least a byte.
    """

    def __init__(self, sock: socket.socket, stall_s: float | None = None) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._stall_s = stall_s
        # Anonymous pages: a connection that is idle or sends little takes no more of them.
        self._buffer = mmap.mmap(-1, CHUNK_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._descriptors: deque[int] = deque()
        self._write_lock = asyncio.Lock()
        self._waiters: set[asyncio.Future[None]] = set()
        self._read_bytes = 0
        self._read_messages = 0
        self._spoiled = False
        self.closed = False

    def close(self) -> None:
        """Closes the socket and every descriptor received but not passed on."""
        if self.closed:
            return
        self.closed = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock)
        loop.remove_writer(self._sock)
        self._sock.close()
        for waiter in self._waiters:
            _set(waiter)
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def shutdown(self) -> None:
        """Ends the connection from within: its reader finds the end, its writers an error."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    # Reading: one task

    async def header(self) -> Header | None:
        """Reads the next message's header; None at the end of the connection.

        The message's payload must be taken with `payload`, `relay` or `discard` before the next.

        Raises:
            WireError: the peer broke the protocol.
            ConnectionError: the connection ended inside a message.
        """
        if self._read_bytes >= FAIRNESS_BYTES or self._read_messages >= FAIRNESS_MESSAGES:
            self._read_bytes = self._read_messages = 0
            await asyncio.sleep(0)
        if not await self._fill(HEADER_BYTES):
            if self._end > self._start:
                raise ConnectionResetError("the connection ended inside a message")
            return None
        found = unpack_header(self._view, self._start)
        self._start += HEADER_BYTES
        self._read_messages += 1
        return found

    async def speaks(self) -> bool:
        """Waits until the other end has sent something; False if it ended without a word."""
        return await self._fill(1)

    async def payload(self, header: Header, limit: int) -> tuple[bytes, list[int]]:
        """Reads the rest of the message: its payload of at most `limit` bytes and descriptors.

        The descriptors are the caller's to pass on or close.
        """
        length = header.payload_bytes
        if length > limit:
            raise WireError(f"a payload of {length} bytes where {limit} are the most")
        if length <= CHUNK_BYTES:
            await self._need(length)
            data = bytes(self._view[self._start : self._start + length])
            self._start += length
        else:
            target = bytearray(length)
            view = memoryview(target)
            have = self._take(view)
            while have < length:
                try:
                    have += await self._receive(view[have:])
                except EOFError:
                    raise ConnectionResetError("the connection ended inside a message") from None
            data = bytes(target)
        count = _descriptor_count(header, data)
        return data, await self._carried(count)

    async def discard(self, header: Header) -> None:
        """Reads the rest of the message and drops it."""
        await self.relay(header, None)

    async def relay(self, header: Header, to: Channel | None) -> None:
        """Passes the message on as it comes, in pieces, without keeping it.

        Raises:
            PeerGone: `to` went away; the message was read to its end all the same.
            ConnectionError: this end went away.
        """
        count = 0
        if header.with_fds:
            await self._need(min(4, header.payload_bytes))
            count = _descriptor_count(header, self._view[self._start : self._end])
        if to is None:
            await self._pieces(header.payload_bytes, None)
            for descriptor in await self._carried(count):
                os.close(descriptor)
            return
        async with to._whole_message():
            length = header.payload_bytes
            if self._start >= HEADER_BYTES and self._end - self._start >= length:
                # The header still stands in the buffer before its payload: one send for both.
                first = self._start - HEADER_BYTES
                self._start += length
                broken = await to._try_write(self._view[first : self._start])
            else:
                broken = await to._try_write(header.pack())
                broken = await self._pieces(length, None if broken else to) or broken
            descriptors = await self._carried(count)
            try:
                if broken is None:
                    await to._write_descriptors(descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        if broken is not None:
            raise PeerGone from broken

    async def _pieces(self, length: int, to: Channel | None) -> OSError | None:
        """Moves `length` bytes on in pieces; the caller holds the other end's write lock.

        Where the other end breaks the rest is read and dropped, so that the next message can be
        read; the error is returned.
        """
        broken: OSError | None = None
        while length:
            if self._start == self._end and not await self._fill(1):
                raise ConnectionResetError("the connection ended inside a message")
            size = min(length, self._end - self._start)
            piece = self._view[self._start : self._start + size]
            self._start += size
            length -= size
            if to is not None and broken is None:
                broken = await to._try_write(piece)
        return broken

    def _take(self, target: memoryview) -> int:
        """Moves what is buffered into `target`; returns how many bytes."""
        size = min(len(target), self._end - self._start)
        target[:size] = self._view[self._start : self._start + size]
        self._start += size
        return size

    async def _need(self, size: int) -> None:
        """Makes `size` (at most CHUNK_BYTES) bytes be buffered or raises ConnectionError."""
        if not await self._fill(size):
            raise ConnectionResetError("the connection ended inside a message")

    async def _fill(self, size: int) -> bool:
        """Reads until at least `size` bytes are buffered; False if the connection ends first."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start + size > CHUNK_BYTES:
            kept = self._end - self._start
            self._view[:kept] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, kept
        while self._end - self._start < size:
            try:
                self._end += await self._receive(self._view[self._end :])
            except EOFError:
                return False
        return True

    async def _receive(self, into: memoryview) -> int:
        """One recvmsg into `into`; returns its bytes, raises EOFError at the end."""
        while True:
            if self.closed:
                raise EOFError
            try:
                size, ancillary, flags, _ = self._sock.recvmsg_into(
                    [into], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
                break
            except (BlockingIOError, InterruptedError):
                await self._readable()
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                self._descriptors.extend(received)
        if flags & socket.MSG_CTRUNC or len(self._descriptors) > FDS_MAX:
            raise WireError(f"more than {FDS_MAX} file descriptors")
        if not size:
            raise EOFError
        self._read_bytes += size
        return size

    async def _carried(self, count: int) -> list[int]:
        """Takes the `count` carrier bytes that follow a message, and their descriptors."""
        if not count:
            return []
        await self._need(count)
        if any(self._view[self._start : self._start + count]):
            raise WireError("a descriptor's carrier byte is not zero")
        self._start += count
        if len(self._descriptors) < count:
            raise WireError(f"{len(self._descriptors)} descriptors where {count} were announced")
        return [self._descriptors.popleft() for _ in range(count)]

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        await self._ready(loop.add_reader, loop.remove_reader)

    # Writing: any task, one message at a time

    async def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Sends a whole message, then its descriptors, which it closes in any case.

        Raises:
            ConnectionError: the other end went away.
        """
        try:
            async with self._whole_message():
                await self._write(memoryview(data))
                await self._write_descriptors(descriptors)
        finally:
            for descriptor in descriptors:
                with suppress(OSError):
                    os.close(descriptor)

    @asynccontextmanager
    async def _whole_message(self) -> AsyncIterator[None]:
        """Holds the right to write for one message.

        Where the message does not come to its end, what followed would be taken for the rest of
        it: nothing more can be sent on this channel.
        """
        async with self._write_lock:
            if self._spoiled:
                raise BrokenPipeError("the connection ended inside a message")
            try:
                yield
            except BaseException:
                self._spoiled = True
                raise

    async def _try_write(self, data: bytes | memoryview) -> OSError | None:
        try:
            await self._write(data)
        except OSError as error:
            return error
        return None

    async def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            if self.closed:
                raise BrokenPipeError("the connection is closed")
            try:
                view = view[self._sock.send(view) :]
            except (BlockingIOError, InterruptedError):
                await self._writable()

    async def _write_descriptors(self, descriptors: Sequence[int]) -> None:
        """Sends each descriptor with a carrier byte of its own, as libvirt reads them."""
        for descriptor in descriptors:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
            while True:
                if self.closed:
                    raise BrokenPipeError("the connection is closed")
                try:
                    self._sock.sendmsg([b"\0"], rights)
                    break
                except (BlockingIOError, InterruptedError):
                    await self._writable()

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._stall_s):
                await self._ready(loop.add_writer, loop.remove_writer)
        except TimeoutError:
            self.shutdown()
            raise Stalled("the other end does not read") from None

    async def _ready(
        self, add: Callable[..., object], remove: Callable[[socket.socket], object]
    ) -> None:
        """Waits for the socket, or for its close."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(ready)
        add(self._sock, _set, ready)
        try:
            await ready
        finally:
            self._waiters.discard(ready)
            if not self.closed:
                remove(self._sock)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _descriptor_count(header: Header, payload: bytes | memoryview) -> int:
    """Returns how many descriptors follow the message; its payload begins with the number."""
    if not header.with_fds:
        return 0
    if len(payload) < 4:
        raise WireError("a message with descriptors that does not say how many")
    (count,) = struct.unpack_from(">I", payload)
    if count > FDS_MAX:
        raise WireError(f"{count} descriptors where {FDS_MAX} are the most")
    return int(count)
