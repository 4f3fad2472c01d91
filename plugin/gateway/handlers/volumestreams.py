"""Volumes of ours up- and downloaded: their data streamed, with holes where the client takes them.

What is downloaded is a volume as it was at the beginning, by an lvol snapshot that goes at the end;
one that a running domain has is not written.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import structlog

from plugin import volumefile
from plugin.gateway.call import Call
from plugin.gateway.errors import Code, GatewayError, Refused
from plugin.gateway.handlers.pools import check_flags
from plugin.gateway.handlers.storage import changing, of_volume
from plugin.gateway.handlers.volumechanges import check_unused
from plugin.gateway.storage import exports
from plugin.gateway.storage.events import PoolEvent
from plugin.gateway.storage.pools import Pool
from plugin.gateway.streams import Stream, StreamEnded
from plugin.gateway.wire import WireError
from plugin.gateway.xdr import Reader
from pydataplane.lvols import Volume

SPARSE = 1
"""VIR_STORAGE_VOL_UPLOAD_SPARSE_STREAM, VIR_STORAGE_VOL_DOWNLOAD_SPARSE_STREAM."""

PIECE_BYTES = 256 << 10
"""Data in a message to a client; libvirt's own have 262,120 bytes at most."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _Asked:
    """Arguments {vol, offset, length, flags} about a volume of ours; bytes."""

    pool: Pool
    volume: Volume
    offset: int
    end: int
    sparse: bool


def _asked(pool: Pool, volume: Volume, args: Reader) -> _Asked:
    """Reads the arguments behind the volume.

    Raises:
        Refused: it has no such bytes.
    """
    offset, length, flags = args.u64(), args.u64(), args.u32()
    check_flags(flags, SPARSE)
    end = offset + length if length else volume.size
    if not offset <= end <= volume.size:
        raise Refused(
            Code.INVALID_ARG,
            f"volume {pool.name}/{volume.name} has {volume.size} bytes, and no {length or 'bytes'}"
            f" from {offset} on",
        )
    return _Asked(pool, volume, offset, end, bool(flags & SPARSE))


@of_volume("data-write")
async def upload(call: Call, pool: Pool, volume: Volume, args: Reader) -> None:
    """STORAGE_VOL_UPLOAD."""
    asked = _asked(pool, volume, args)
    async with changing(call, pool, volume.name):
        await check_unused(call, pool, volume)
        async with _streamed(call, asked, write=True) as (stream, file):
            await _take(stream, file, asked)
    call.services.announce(PoolEvent(pool.ref))
    _log.info("volume changed", volume=volume.path, what="uploaded")


@asynccontextmanager
async def _streamed(call: Call, asked: _Asked, *, write: bool) -> AsyncIterator[tuple[Stream, int]]:
    """Opens a volume, answers the call, and gives its stream and the file.

    From then on an error ends the stream. What the client is told at the end is so when the volume
    is as free as it was.

    Raises:
        GatewayError: it cannot be opened.
    """
    leftovers, held = call.services.pools.leftovers, AsyncExitStack()
    opened = exports.opened(asked.pool, asked.volume, leftovers, write=write)
    with call.stream() as stream:
        file = await held.enter_async_context(opened)
        try:
            async with held:
                await call.answer()
                yield stream, file
        except Exception as error:
            await call.connection.send(stream.failed(_said(error)))
        else:
            await call.connection.send(stream.confirmed())


def _said(error: Exception) -> bytes:
    """Returns the remote_error that ends a stream."""
    match error:
        case GatewayError():
            return error.payload()
        case StreamEnded():
            return Refused(Code.RPC, "stream aborted at client request").payload()
        case WireError():
            return Refused(Code.RPC, f"the volume's data: {error}").payload()
        case OSError():
            text = f"the volume's data: {error.strerror or error}"
            return Refused(Code.SYSTEM_ERROR, text).payload()
        case _:
            _log.error("a stream failed by a defect", exc_info=error)
            return Refused(Code.INTERNAL_ERROR, "virtlun-gateway failed: see its log").payload()


async def _take(stream: Stream, file: int, asked: _Asked) -> None:
    """Writes what the client sends, to its end."""
    offset, block, run = asked.offset, asked.volume.block_size, asked.pool.target.file_io
    while (piece := await stream.next()) is not None:
        length = piece.hole or len(piece.data)
        if offset + length > asked.end:
            raise Refused(
                Code.OPERATION_FAILED,
                f"volume {asked.pool.name}/{asked.volume.name} takes {asked.end - asked.offset}"
                " bytes here, and more are sent",
            )
        if piece.hole:
            await run(partial(volumefile.clear, file, offset, piece.hole, block))
        else:
            await run(partial(volumefile.write, file, offset, piece.data, block))
        offset += length
    await run(partial(os.fsync, file))


@of_volume("data-read")
async def download(call: Call, pool: Pool, volume: Volume, args: Reader) -> None:
    """STORAGE_VOL_DOWNLOAD."""
    asked = _asked(pool, volume, args)
    async with _streamed(call, asked, write=False) as (stream, file):
        stopping = asyncio.Event()
        sending = asyncio.create_task(_send(call, stream, file, asked, stopping))
        hearing = asyncio.create_task(_until_said(stream))
        try:
            await asyncio.wait((sending, hearing), return_when=asyncio.FIRST_COMPLETED)
            if hearing.done():
                stopping.set()
            await sending  # a message that is being sent comes to its end: others follow it
            await hearing
        finally:
            stopping.set()
            hearing.cancel()
            await asyncio.gather(sending, hearing, return_exceptions=True)


async def _until_said(stream: Stream) -> None:
    """Returns when the client has said that it has enough; raises StreamEnded where it aborts."""
    while await stream.next() is not None:
        pass  # it has nothing to send


async def _send(
    call: Call, stream: Stream, file: int, asked: _Asked, stopping: asyncio.Event
) -> None:
    """Sends a part of a volume, holes as such where the client asked for them.

    Raises:
        OSError: it cannot be read, or the client left.
    """
    offset, block, run = asked.offset, asked.volume.block_size, asked.pool.target.file_io
    while offset < asked.end and not stopping.is_set():
        upto = asked.end
        if asked.sparse:
            begin = await run(partial(volumefile.next_data, file, offset, asked.end))
            if begin > offset:
                await call.connection.send(stream.hole(begin - offset))
                offset = begin
                continue
            upto = await run(partial(volumefile.next_hole, file, offset, asked.end))
        length = min(PIECE_BYTES, upto - offset)
        data = await run(partial(volumefile.read, file, offset, length, block))
        if not data:
            raise OSError("it ends too early")
        await call.connection.send(stream.data(data))
        offset += len(data)
    if not stopping.is_set():
        await call.connection.send(stream.data(b""))
