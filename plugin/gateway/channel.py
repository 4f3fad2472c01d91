"""One connected UNIX socket that carries libvirt messages, with their file descriptors.

Reading and writing wait for the other end, so memory stays bounded: a channel holds one buffer of
CHUNK_BYTES, and a message that is only passed on streams through it in pieces.

Most messages are passed on unread, so these cost the least: `next` sends each from the buffer in
the event loop's own callback, several with one system call, without waking a task. What that cannot
do (a longer message, descriptors, an end that takes no more) the task does.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from plugin.gateway.incoming import CHUNK_BYTES, FAIRNESS_MESSAGES, Incoming
from plugin.gateway.outgoing import Outgoing, PeerGone
from plugin.gateway.wire import FDS_MAX, HEADER_BYTES, Header, WireError, unpack_header

Look = Callable[[bytes], bytes | None]
"""From a message's payload to the one to pass on in its place; None: a task is to find that."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Where a message is to go, as it is or with the payload that `look` makes of its own."""

    to: Channel
    look: Look | None = None


Route = Callable[[Header], Pass | None]
"""From a message's header to where it goes; None: it is for the reader itself. Never waits."""


class Channel:
    """Messages in both directions over `sock`, which it owns. One task reads; any may write.

    With `stall_s` the other end is given so many seconds to take at least a byte.
    """

    def __init__(self, sock: socket.socket, stall_s: float | None = None) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._in = Incoming(sock)
        self._out = Outgoing(sock, stall_s)
        self.closed = False

    def close(self) -> None:
        """Closes the socket and every descriptor received but not passed on."""
        if self.closed:
            return
        self.closed = True
        self._in.close()
        self._out.close()
        self._sock.close()

    def shutdown(self) -> None:
        """Ends the connection from within: its reader finds the end, its writers an error."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    # Writing: any task, one message at a time

    async def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Sends a whole message, then its descriptors, which it closes in any case.

        Raises:
            ConnectionError: the other end went away.
        """
        await self._out.send(data, descriptors)

    # Reading: one task

    async def speaks(self) -> bool:
        """Waits until the other end has sent something; False if it ended without a word."""
        return await self._in.fill(1)

    async def header(self) -> Header | None:
        """Reads the next message's header; None at the end of the connection.

        The message's payload must be taken with `payload`, `relay` or `discard` before the next.

        Raises:
            WireError: the peer broke the protocol.
            ConnectionError: the connection ended inside a message.
        """
        come = self._in
        await come.share()
        if not await come.fill(HEADER_BYTES):
            if come.size:
                raise ConnectionResetError("the connection ended inside a message")
            return None
        header = unpack_header(come.view, come.start)
        come.start += HEADER_BYTES
        come.messages += 1
        return header

    async def payload(self, header: Header, limit: int) -> tuple[bytes, list[int]]:
        """Reads the rest of the message: its payload of at most `limit` bytes and descriptors.

        The descriptors are the caller's to pass on or close.
        """
        length = header.payload_bytes
        if length > limit:
            raise WireError(f"a payload of {length} bytes where {limit} are the most")
        if length <= CHUNK_BYTES:
            await self._in.need(length)
            data = bytes(self._in.take(length))
        else:
            data = await self._long_payload(length)
        count = _descriptor_count(header, data)
        return data, await self._in.carried(count)

    async def _long_payload(self, length: int) -> bytes:
        """Reads a payload that the buffer does not hold."""
        target = bytearray(length)
        view = memoryview(target)
        have = min(length, self._in.size)
        view[:have] = self._in.take(have)
        while have < length:
            try:
                have += await self._in.receive(view[have:])
            except EOFError:
                raise ConnectionResetError("the connection ended inside a message") from None
        return bytes(target)

    async def discard(self, header: Header) -> None:
        """Reads the rest of the message and drops it."""
        await self.relay(header, None)

    async def relay(self, header: Header, to: Channel | None) -> None:
        """Passes the message on as it comes, in pieces, without keeping it.

        Raises:
            PeerGone: `to` went away; the message was read to its end all the same.
            ConnectionError: this end went away.
        """
        come, count = self._in, 0
        if header.with_fds:
            await come.need(min(4, header.payload_bytes))
            count = _descriptor_count(header, come.view[come.start : come.end])
        if to is None:
            await self._pieces(header.payload_bytes, None)
            for descriptor in await come.carried(count):
                os.close(descriptor)
            return
        out = to._out
        async with out.whole_message():
            length = header.payload_bytes
            if come.start >= HEADER_BYTES and come.size >= length:
                # The header still stands in the buffer before its payload: one send for both.
                come.start -= HEADER_BYTES
                broken = await out.try_write(come.take(HEADER_BYTES + length))
            else:
                broken = await out.try_write(header.pack())
                broken = await self._pieces(length, None if broken else out) or broken
            descriptors = await come.carried(count)
            try:
                if broken is None:
                    await out.write_descriptors(descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        if broken is not None:
            raise PeerGone from broken

    async def _pieces(self, length: int, out: Outgoing | None) -> OSError | None:
        """Moves `length` bytes on in pieces; the caller holds `out.whole_message`.

        Where the other end breaks the rest is read and dropped, so that the next message can be
        read; the error is returned.
        """
        come = self._in
        broken: OSError | None = None
        while length:
            if not come.size:
                await come.need(1)
            piece = come.take(min(length, come.size))
            length -= len(piece)
            if out is not None and broken is None:
                broken = await out.try_write(piece)
        return broken

    # Passing on what needs no reader

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
            await self._until_routed(route)
            header = await self.header()
            if header is None:
                return None
            way = route(header)
            if way is None or way.look is not None:
                return header
            await self.relay(header, way.to)

    async def _until_routed(self, route: Route) -> None:
        """Returns when there is a message that `_pass_on` cannot pass on, or the end."""

        def work() -> Channel | None:
            return self._pass_on(route)

        behind = work()
        while behind is not self and not self.closed:
            if behind is None:
                behind = await self._in.readable(work)
                if behind is None:
                    return  # the end, which `header` finds
                continue
            try:
                await behind._out.finish()
            except OSError as error:
                raise PeerGone from error
            behind = work()

    def _pass_on(self, route: Route) -> Channel | None:
        """Passes whole messages on from the buffer, as long as that can be done at once.

        Returns None where only more bytes help; this channel where its task has to go on; another
        where that has not taken all of a message.
        """
        come = self._in
        while (have := come.end - come.start) >= HEADER_BYTES:
            header = unpack_header(come.view, come.start)
            way = route(header)
            if (
                way is None
                or header.with_fds
                or header.length > CHUNK_BYTES
                or come.messages >= FAIRNESS_MESSAGES
                or not way.to._out.is_free
            ):
                return self
            if have < header.length:
                return None
            data = come.view[come.start : come.start + header.length]
            if way.look is not None:
                payload = bytes(data[HEADER_BYTES:])
                changed = way.look(payload)
                if changed is None:
                    return self
                if changed is not payload:
                    data = memoryview(header.resized(len(changed)).pack() + changed)
            come.start += header.length
            come.messages += 1
            if not way.to._out.send_now(data):
                return way.to
        return None


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
