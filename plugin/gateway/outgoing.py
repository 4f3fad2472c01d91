"""The sending half of a channel: whole messages, one after the other, to an end that may be slow.

Any task may send; who sends holds the right to for a whole message. Sending waits for the other
end, so nothing is queued here, but for the end of one message that `send_now` began.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress


class PeerGone(ConnectionError):
    """The channel that a message was passed on to is closed; the one it came from is not."""


class Stalled(ConnectionError):
    """The other end took nothing for too long; the connection is ended, for it broke off."""


class Outgoing:
    """What is sent over `sock`, which another owns; it is not blocking.

    With `stall_s` the other end is given so many seconds to take at least a byte.
    """

    def __init__(self, sock: socket.socket, stall_s: float | None) -> None:
        self._sock = sock
        self._stall_s = stall_s
        self._lock = asyncio.Lock()
        self._waiters: set[asyncio.Future[None]] = set()
        self._spoiled = False
        self._rest = b""
        """What is to be sent before anything else: the end of a message that `send_now` began."""
        self._closed = False

    def close(self) -> None:
        """Has all who send or want to find an error; to be called before the socket is closed."""
        self._closed = True
        asyncio.get_running_loop().remove_writer(self._sock)
        for waiter in self._waiters:
            _set(waiter)

    @property
    def is_free(self) -> bool:
        """Whether a message can be sent at once, unless the other end takes no more."""
        return not (self._closed or self._spoiled or self._rest or self._lock.locked())

    def send_now(self, data: memoryview) -> bool:
        """Sends a message while `is_free`; False where its end is still to be sent: see `finish`.

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

    async def finish(self) -> None:
        """Sends the end of what `send_now` began; raises ConnectionError as `send`."""
        async with self.whole_message():
            await self.write(b"")

    async def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Sends a whole message, then its descriptors, which it closes in any case.

        Raises:
            ConnectionError: the other end went away.
        """
        try:
            async with self.whole_message():
                await self.write(memoryview(data))
                await self.write_descriptors(descriptors)
        finally:
            for descriptor in descriptors:
                with suppress(OSError):
                    os.close(descriptor)

    @asynccontextmanager
    async def whole_message(self) -> AsyncIterator[None]:
        """Holds the right to write for one message.

        Where the message does not come to its end, what followed would be taken for the rest of
        it: nothing more can be sent on this channel.
        """
        async with self._lock:
            if self._spoiled:
                raise BrokenPipeError("the connection ended inside a message")
            try:
                yield
            except BaseException:
                self._spoiled = True
                raise

    async def try_write(self, data: bytes | memoryview) -> OSError | None:
        """As `write`, but returns the error."""
        try:
            await self.write(data)
        except OSError as error:
            return error
        return None

    async def write(self, data: bytes | memoryview) -> None:
        """Sends a part of a message; the caller holds `whole_message`.

        Raises:
            ConnectionError: the other end went away, or took nothing for too long.
        """
        if self._rest:
            rest, self._rest = self._rest, b""
            await self.write(rest)
        view = memoryview(data)
        while view:
            self._check_open()
            try:
                view = view[self._sock.send(view) :]
            except (BlockingIOError, InterruptedError):
                await self._writable()

    async def write_descriptors(self, descriptors: Sequence[int]) -> None:
        """Sends each descriptor with a carrier byte of its own, as libvirt reads them."""
        for descriptor in descriptors:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
            while True:
                self._check_open()
                try:
                    self._sock.sendmsg([b"\0"], rights)
                    break
                except (BlockingIOError, InterruptedError):
                    await self._writable()

    def _check_open(self) -> None:
        if self._closed:
            raise BrokenPipeError("the connection is closed")

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
                    if not self._closed:
                        loop.remove_writer(self._sock)
        except TimeoutError:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            raise Stalled("the other end does not read") from None


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
