"""Data of a call, streamed after its reply (virnetprotocol.x, VIR_NET_STREAM).

What the client sends waits here for the call's handler, one message at a time: the client is read
on when it is taken.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from plugin.gateway.wire import Header, MessageType, Status, WireError, message
from plugin.gateway.xdr import Reader, Writer

STREAM_MAX_BYTES = 4_194_304
"""The longest message of a client's stream; libvirt's own send 256 KiB at most."""

STREAMS = (MessageType.STREAM, MessageType.STREAM_HOLE)


class StreamEnded(Exception):
    """The client aborted the stream, or left."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What came: data, or a hole of so many bytes."""

    data: bytes
    hole: int = 0


class Stream:
    """Of one call."""

    def __init__(self, call: Header) -> None:
        """`call` is the header of the call that it belongs to."""
        self._call = call
        self._come: asyncio.Queue[tuple[Header, bytes] | None] = asyncio.Queue(1)
        self._lost = asyncio.Event()

    async def put(self, header: Header, payload: bytes) -> None:
        """Gives it a message of the client's, when the one before is taken, or nobody does it."""
        waits = (
            asyncio.create_task(self._come.put((header, payload))),
            asyncio.create_task(self._lost.wait()),
        )
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def end(self) -> None:
        """Says that nothing comes any more, and that nothing is taken."""
        self._lost.set()
        if self._come.empty():
            self._come.put_nowait(None)

    async def next(self) -> Piece | None:
        """Returns what comes next; None: the client has said all.

        Raises:
            StreamEnded: it aborts, or left.
            WireError: it sent what no stream has.
        """
        if self._lost.is_set() and self._come.empty():
            raise StreamEnded  # the last piece was taken after `end`
        given = await self._come.get()
        if given is None:
            raise StreamEnded
        header, payload = given
        if header.status == Status.ERROR:
            raise StreamEnded
        if header.status == Status.OK:
            return None
        if header.type == MessageType.STREAM:
            return Piece(payload)
        reader = Reader(payload)
        length, flags = reader.i64(), reader.u32()
        reader.end()
        if length < 0 or flags:
            raise WireError(f"a hole of {length} bytes with flags {flags}")
        return Piece(b"", length)

    def data(self, payload: bytes) -> bytes:
        """Returns a message with data for the client; without any it is the end of them."""
        return self._message(MessageType.STREAM, payload, Status.CONTINUE)

    def hole(self, length: int) -> bytes:
        """Returns a message that says that so many bytes are zeros."""
        body = bytes(Writer().i64(length).u32(0))
        return self._message(MessageType.STREAM_HOLE, body, Status.CONTINUE)

    def confirmed(self) -> bytes:
        """Returns the answer to the client's end."""
        return self._message(MessageType.STREAM, b"", Status.OK)

    def failed(self, error: bytes) -> bytes:
        """Returns a message that ends it with an error (remote_error)."""
        return self._message(MessageType.STREAM, error, Status.ERROR)

    def _message(self, kind: MessageType, payload: bytes, status: Status) -> bytes:
        call = self._call
        return message(kind, call.procedure, call.serial, payload, status=status)
