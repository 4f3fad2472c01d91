"""One connected UNIX socket that carries libvirt messages, with their file descriptors.

Reading and writing wait for the other end, so memory stays bounded: a channel holds one buffer of
CHUNK_BYTES, and a message that is only passed on streams through it in pieces.

Most messages are passed on unread, so these cost the least: `next` sends each from the buffer in
the event loop's own callback, several with one system call, without waking a task. What that cannot
do (a longer message, descriptors, an end that takes no more) the task does.
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
from dataclasses import dataclass

from plugin.gateway.wire import FDS_MAX, HEADER_BYTES, Header, WireError, unpack_header

CHUNK_BYTES = 131_072
"""Size of a channel's read buffer, bytes."""

FAIRNESS_BYTES = 1 << 20
"""A reader that always finds data lets other connections run after this many bytes."""

FAIRNESS_MESSAGES = 64
"""And after this many messages."""

_ANCILLARY_BYTES = socket.CMSG_SPACE(FDS_MAX * array.array("i").itemsize)


Look = Callable[[bytes], bytes | None]
"""From a message's payload to the one to pass on in its place; None: a task is to find that."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Where a message is to go, as it is or with the payload that `look` makes of its own."""

    to: Channel
    look: Look | None = None


Route = Callable[[Header], Pass | None]
"""From a message's header to where it goes; None: it is for the reader itself. Never waits."""


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
        self._rest = b""
        """What is to be sent before anything else: the end of a message that `next` passed on."""
        self._route: Route | None = None
        self._waiting: asyncio.Future[Channel | None] | None = None
        """The reader's, while it waits for more."""
        self._watched = False
        """Whether the event loop looks whether the socket can be read."""
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
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
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

    async def next(self, route: Route) -> Header | None:
        """Passes messages on as `route` says, up to one for which it says None; returns its header.

        A message whose `look` does not know what to pass on is returned as well. As with `header`,
        its payload must be taken before the next; None is the end of the connection. `route` may
        be asked more than once about a message.

        Raises:
            PeerGone: the channel to pass a message on to is closed; this one can be read on.
            WireError, ConnectionError: as `header`.
        """
        while True:
            self._route = route
            try:
                await self._until_routed()
            finally:
                self._route = None
            header = await self.header()
            if header is None:
                return None
            way = route(header)
            if way is None or way.look is not None:
                return header
            await self.relay(header, way.to)

    async def _until_routed(self) -> None:
        """Returns when there is a message that `_pass_on` cannot pass on, or the end."""
        behind = self._pass_on()
        while behind is not self and not self.closed:
            if behind is None:
                behind = await self._readable()
                continue
            try:
                async with behind._whole_message():
                    await behind._write(b"")  # what is left of the last one
            except OSError as error:
                raise PeerGone from error
            behind = self._pass_on()

    def _pass_on(self) -> Channel | None:
        """Passes whole messages on from the buffer, as long as that can be done at once.

        Returns None where only more bytes help; this channel where its task has to go on; another
        where that has not taken all of a message.
        """
        assert self._route is not None
        while (have := self._end - self._start) >= HEADER_BYTES:
            header = unpack_header(self._view, self._start)
            way = self._route(header)
            if (
                way is None
                or header.with_fds
                or header.length > CHUNK_BYTES
                or self._read_messages >= FAIRNESS_MESSAGES
                or not way.to._is_free
            ):
                return self
            if have < header.length:
                return None
            end = self._start + header.length
            data = self._view[self._start : end]
            if way.look is not None:
                payload = bytes(data[HEADER_BYTES:])
                changed = way.look(payload)
                if changed is None:
                    return self
                if changed is not payload:
                    data = memoryview(header.resized(len(changed)).pack() + changed)
            self._start = end
            self._read_messages += 1
            if not way.to._send_now(data):
                return way.to
        return None

    def _on_readable(self) -> None:
        """The event loop's callback: reads and passes on, or wakes the task that waits."""
        waiting = self._waiting
        if waiting is None or waiting.done():  # nobody reads now: the other end is to wait
            self._watched = False
            asyncio.get_running_loop().remove_reader(self._sock)
            return
        if self._route is None:
            waiting.set_result(None)
            return
        try:
            self._make_room()
            self._end += self._receive_now(self._view[self._end :])
            self._read_messages = 0
            behind = self._pass_on()
        except (BlockingIOError, InterruptedError):
            return
        except EOFError:
            behind = self
        except Exception as error:  # it is for the task
            waiting.set_exception(error)
            return
        if behind is not None:
            waiting.set_result(behind)

    def _make_room(self) -> None:
        """Moves what is buffered to the buffer's start, where that is needed to read on."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == CHUNK_BYTES:
            self._move_down()

    def _move_down(self) -> None:
        kept = self._end - self._start
        self._view[:kept] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, kept

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
            self._move_down()
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
                return self._receive_now(into)
            except (BlockingIOError, InterruptedError):
                await self._readable()

    def _receive_now(self, into: memoryview) -> int:
        """As `_receive`, but raises BlockingIOError where there is nothing yet."""
        size, ancillary, flags, _ = self._sock.recvmsg_into(
            [into], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
        )
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

    async def _readable(self) -> Channel | None:
        """Waits for bytes; returns what `_pass_on` did where there is a route, else None."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[Channel | None] = loop.create_future()
        self._waiting = waiting
        if not self._watched:  # it stays so from one message to the next
            loop.add_reader(self._sock, self._on_readable)
            self._watched = True
        try:
            return await waiting
        finally:
            self._waiting = None

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

    @property
    def _is_free(self) -> bool:
        """Whether a message can be sent at once, unless the other end takes no more."""
        return not (self.closed or self._spoiled or self._rest or self._write_lock.locked())

    def _send_now(self, data: memoryview) -> bool:
        """Sends a message while `_is_free`; False where its end is still to be sent.

        Raises:
            PeerGone: the other end went away.
        """
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            raise PeerGone from error
        if sent == len(data):
            return True
        self._rest = bytes(data[sent:])
        return False

    async def _write(self, data: bytes | memoryview) -> None:
        if self._rest:
            rest, self._rest = self._rest, b""
            await self._write(rest)
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
                ready: asyncio.Future[None] = loop.create_future()
                self._waiters.add(ready)
                loop.add_writer(self._sock, _set, ready)
                try:
                    await ready
                finally:
                    self._waiters.discard(ready)
                    if not self.closed:
                        loop.remove_writer(self._sock)
        except TimeoutError:
            self.shutdown()
            raise Stalled("the other end does not read") from None


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
