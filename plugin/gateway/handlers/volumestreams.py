"""Volumes of ours up- and downloaded: their data streamed, with holes where the client takes them.

What is downloaded is a volume as it was at the beginning, by an lvol snapshot that goes at the end;
one that a running domain has is not written.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import structlog

from plugin.gateway.call import Call
from plugin.gateway.errors import Code, Refused
from plugin.gateway.handlers.pools import check_flags
from plugin.gateway.handlers.storage import volume_of
from plugin.gateway.handlers.volumechanges import check_unused
from plugin.gateway.storage import exports
from plugin.gateway.storage.events import PoolEvent
from plugin.gateway.storage.pools import Pool
from plugin.gateway.storage.refs import StorageVol
from plugin.gateway.streams import Stream, StreamEnded
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


async def _asked(call: Call, right: str) -> _Asked | None:
    """Returns what a call is about; None: it is not ours."""
    args = Reader(call.payload)
    found = await volume_of(call, StorageVol.read(args), right)
    if found is None:
        return None
    pool, volume = found
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


async def upload(call: Call) -> None:
    """STORAGE_VOL_UPLOAD."""
    asked = await _asked(call, "data-write")
    if asked is None:
        await call.pass_on()
        return
    pool, volume = asked.pool, asked.volume
    async with call.services.locks.hold(f"volume:{pool.store.uuid}/{volume.name}"):
        await check_unused(call, pool, volume)
        async with _opened(call, asked, write=True) as file, _answered(call) as stream:
            await _take(stream, file, asked)
    call.services.announce(PoolEvent(pool.ref))
    _log.info("volume changed", volume=volume.path, what="uploaded")


def _opened(call: Call, asked: _Asked, *, write: bool) -> AbstractAsyncContextManager[int]:
    leftovers = call.services.pools.leftovers
    return exports.opened(asked.pool, asked.volume, leftovers, write=write)


@asynccontextmanager
async def _answered(call: Call) -> AsyncIterator[Stream]:
    """Answers a call and gives its stream; an error of the body ends that."""
    with call.stream() as stream:
        await call.answer()
        try:
            yield stream
        except StreamEnded:
            error = Refused(Code.RPC, "stream aborted at client request")
            await call.connection.send(stream.failed(error.payload()))
        except Refused as error:
            await call.connection.send(stream.failed(error.payload()))
        except OSError as error:
            refused = Refused(Code.SYSTEM_ERROR, f"the volume's data: {error.strerror or error}")
            await call.connection.send(stream.failed(refused.payload()))
        else:
            await call.connection.send(stream.confirmed())


async def _take(stream: Stream, file: int, asked: _Asked) -> None:
    """Writes what the client sends, to its end."""
    offset, block = asked.offset, asked.volume.block_size
    while (piece := await stream.next()) is not None:
        length = piece.hole or len(piece.data)
        if offset + length > asked.end:
            raise Refused(
                Code.OPERATION_FAILED,
                f"volume {asked.pool.name}/{asked.volume.name} takes {asked.end - asked.offset}"
                " bytes here, and more are sent",
            )
        if piece.hole:
            await asyncio.to_thread(exports.clear, file, offset, piece.hole, block)
        else:
            await asyncio.to_thread(exports.write, file, offset, piece.data, block)
        offset += length
    await asyncio.to_thread(os.fsync, file)


async def download(call: Call) -> None:
    """STORAGE_VOL_DOWNLOAD."""
    asked = await _asked(call, "data-read")
    if asked is None:
        await call.pass_on()
        return
    async with _opened(call, asked, write=False) as file:
        with call.stream() as stream:
            await call.answer()
            stopping = asyncio.Event()
            sending = asyncio.create_task(_send(call, stream, file, asked, stopping))
            hearing = asyncio.create_task(_until_said(stream))
            try:
                await asyncio.wait((sending, hearing), return_when=asyncio.FIRST_COMPLETED)
                if hearing.done() or sending.result():
                    error = await hearing
                    # A message that is being sent comes to its end: others follow it.
                    stopping.set()
                    await sending
                    await call.connection.send(
                        stream.confirmed() if error is None else stream.failed(error.payload())
                    )
            finally:
                stopping.set()
                hearing.cancel()
                await asyncio.gather(sending, hearing, return_exceptions=True)


async def _until_said(stream: Stream) -> Refused | None:
    """Returns when the client has said that it has enough; with an error where it aborts."""
    try:
        while await stream.next() is not None:
            pass  # it has nothing to send
    except StreamEnded:
        return Refused(Code.RPC, "stream aborted at client request")
    return None


async def _send(
    call: Call, stream: Stream, file: int, asked: _Asked, stopping: asyncio.Event
) -> bool:
    """Sends a part of a volume, holes as such where the client asked for them.

    Returns whether that went well; else the client was told.
    """
    offset, block = asked.offset, asked.volume.block_size
    try:
        while offset < asked.end and not stopping.is_set():
            upto = asked.end
            if asked.sparse:
                begin = await asyncio.to_thread(exports.next_data, file, offset, asked.end)
                if begin > offset:
                    await call.connection.send(stream.hole(begin - offset))
                    offset = begin
                    continue
                upto = await asyncio.to_thread(exports.next_hole, file, offset, asked.end)
            length = min(PIECE_BYTES, upto - offset)
            data = await asyncio.to_thread(exports.read, file, offset, length, block)
            if not data:
                raise OSError("it ends too early")
            await call.connection.send(stream.data(data))
            offset += len(data)
        if not stopping.is_set():
            await call.connection.send(stream.data(b""))
    except ConnectionError:
        return False  # the client left
    except OSError as error:
        refused = Refused(Code.SYSTEM_ERROR, f"the volume's data: {error.strerror or error}")
        await call.connection.send(stream.failed(refused.payload()))
        return False
    return True
