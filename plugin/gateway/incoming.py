"""The receiving half of a channel: bytes and descriptors that came and were not taken yet.

One task reads. What it waits for can be done for it in the event loop's own callback (`readable`
with work), without waking it for each message.
"""

from __future__ import annotations

import array
import asyncio
import mmap
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from plugin.gateway.wire import FDS_MAX, WireError

CHUNK_BYTES = 131_072
"""Size of the buffer, bytes."""

FAIRNESS_BYTES = 1 << 20
"""A reader that always finds data lets other connections run after this many bytes."""

FAIRNESS_MESSAGES = 64
"""And after this many messages."""

_ANCILLARY_BYTES = socket.CMSG_SPACE(FDS_MAX * array.array("i").itemsize)

T = TypeVar("T")


class Incoming:
    """What is received from `sock`, which another owns; it is not blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        # Anonymous pages: a connection that is idle or sends little takes no more of them.
        self._buffer = mmap.mmap(-1, CHUNK_BYTES)
        self.view = memoryview(self._buffer)
        """The buffer; `start` to `end` of it is what was received and not taken."""
        self.start = 0
        self.end = 0
        self.messages = 0
        """Messages taken since others last had a turn."""
        self._bytes = 0
        self._descriptors: deque[int] = deque()
        self._waiting: asyncio.Future[Any] | None = None
        """The reader's, while it waits for more."""
        self._work: Callable[[], object] | None = None
        """What is done with what comes, before the reader is woken."""
        self._watched = False
        """Whether the event loop looks whether the socket can be read."""
        self._closed = False

    def close(self) -> None:
        """Wakes the reader and closes the descriptors; to be called before the socket is closed."""
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._sock)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
        while self._descriptors:
            os.close(self._descriptors.popleft())

    @property
    def size(self) -> int:
        """Bytes that are buffered."""
        return self.end - self.start

    def take(self, size: int) -> memoryview:
        """Takes `size` bytes that are buffered; they stay until more is read."""
        begin = self.start
        self.start += size
        return self.view[begin : self.start]

    async def share(self) -> None:
        """Lets other connections run, where this one has had its part."""
        if self._bytes >= FAIRNESS_BYTES or self.messages >= FAIRNESS_MESSAGES:
            self._bytes = self.messages = 0
            await asyncio.sleep(0)

    async def need(self, size: int) -> None:
        """Makes `size` (at most CHUNK_BYTES) bytes be buffered or raises ConnectionError."""
        if not await self.fill(size):
            raise ConnectionResetError("the connection ended inside a message")

    async def fill(self, size: int) -> bool:
        """Reads until at least `size` bytes are buffered; False if the connection ends first."""
        if self.start == self.end:
            self.start = self.end = 0
        elif self.start + size > CHUNK_BYTES:
            self._move_down()
        while self.end - self.start < size:
            try:
                self.end += await self.receive(self.view[self.end :])
            except EOFError:
                return False
        return True

    async def receive(self, into: memoryview) -> int:
        """Reads what there is into `into`, past the buffer; returns its bytes.

        Raises:
            EOFError: the connection ended.
            WireError: too many descriptors.
        """
        while True:
            if self._closed:
                raise EOFError
            try:
                return self._receive_now(into)
            except (BlockingIOError, InterruptedError):
                await self.readable()

    async def carried(self, count: int) -> list[int]:
        """Takes the `count` carrier bytes that follow a message, and their descriptors."""
        if not count:
            return []
        await self.need(count)
        if any(self.take(count)):
            raise WireError("a descriptor's carrier byte is not zero")
        if len(self._descriptors) < count:
            raise WireError(f"{len(self._descriptors)} descriptors where {count} were announced")
        return [self._descriptors.popleft() for _ in range(count)]

    async def readable(self, work: Callable[[], T | None] | None = None) -> T | None:
        """Waits until the socket can be read, or is closed; returns None.

        With `work`, which never waits, bytes are read as they come and it is done with them, until
        it returns something else than None, which is returned, or the connection ends: None.

        Raises:
            whatever `work` raises; WireError: too many descriptors.
        """
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[T | None] = loop.create_future()
        self._waiting = waiting
        self._work = work
        if not self._watched:  # it stays so from one message to the next
            loop.add_reader(self._sock, self._on_readable)
            self._watched = True
        try:
            return await waiting
        finally:
            self._waiting = self._work = None

    def _on_readable(self) -> None:
        """The event loop's callback: reads and works, or wakes the task that waits."""
        waiting = self._waiting
        if waiting is None or waiting.done():  # nobody reads now: the other end is to wait
            self._watched = False
            asyncio.get_running_loop().remove_reader(self._sock)
            return
        if self._work is None:
            waiting.set_result(None)
            return
        try:
            if self.start == self.end:
                self.start = self.end = 0
            elif self.end == CHUNK_BYTES:
                self._move_down()
            self.end += self._receive_now(self.view[self.end :])
            self.messages = 0
            done = self._work()
        except (BlockingIOError, InterruptedError):
            return
        except EOFError:
            waiting.set_result(None)
            return
        except Exception as error:  # it is for the task
            waiting.set_exception(error)
            return
        if done is not None:
            waiting.set_result(done)

    def _move_down(self) -> None:
        kept = self.end - self.start
        self.view[:kept] = bytes(self.view[self.start : self.end])
        self.start, self.end = 0, kept

    def _receive_now(self, into: memoryview) -> int:
        """As `receive`, but raises BlockingIOError where there is nothing yet."""
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
        self._bytes += size
        return size
