"""Caches replies with a domain's XML as clients are to see it, as each translation costs a parse.

What a client sees is a function of libvirtd's bytes alone, except while a disk is being copied: the
same reply always gives the same answer. So the key is a digest of libvirtd's reply, and nothing
invalidates an entry: libvirtd formats the XML anew for each call, and judges each call. What the
gateway itself reads of a domain is translated before a client asks, so that a client that asks for
all domains first, as monitoring does, waits no longer than one that asks later.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from plugin.gateway.blockjobs import BlockJobs
from plugin.gateway.domains import is_running
from plugin.gateway.messages import pack_string, read_string
from pydataplane.domain import translate
from pydataplane.domain.translate import PREFIX, Mirror

MAX_BYTES = 8 << 20
"""Most bytes of translated replies, as compressed; the least recently used goes first."""

MAX_REPLY_BYTES = 256 << 10
"""The longest reply that is kept: to unpack it takes the event loop a millisecond at most."""

DIGEST_BYTES = 16

_TRACE = PREFIX.encode()

_Result = TypeVar("_Result")


class XmlCache:
    """Translates replies, and keeps the results of the last ones."""

    def __init__(self, workers: ThreadPoolExecutor, block_jobs: BlockJobs) -> None:
        """`workers` are the threads that translate what is not cached."""
        self._workers = workers
        self._block_jobs = block_jobs
        self._made: OrderedDict[bytes, bytes] = OrderedDict()
        self._size = 0
        self._making: dict[bytes, asyncio.Task[bytes]] = {}
        self._prefetching = asyncio.Lock()

    def at_once(self, payload: bytes) -> bytes | None:
        """Returns what to answer with, at once; None: ask `translated`.

        `payload` itself where nothing of ours is in it.
        """
        if _TRACE not in payload:
            return payload
        return None if self._mirrors(payload) else self._cached(_digest(payload))

    async def translated(self, payload: bytes) -> bytes:
        """Returns what to answer with, made in a thread if need be.

        Raises:
            WireError: libvirtd's reply is not one string.
        """
        if _TRACE not in payload:
            return payload
        if mirrors := self._mirrors(payload):
            return await self._in_thread(partial(self._translate, payload, mirrors))
        return await self._made_once(_digest(payload), payload)

    async def _made_once(self, key: bytes, payload: bytes) -> bytes:
        """Returns what to answer with: what is kept, what is being made, or made now."""
        found = self._cached(key)
        if found is not None:
            return found
        making = self._making.get(key)
        if making is None:
            making = asyncio.create_task(self._make(key, payload))
            self._making[key] = making
        # One who leaves must not take it from others who want the same.
        return await asyncio.shield(making)

    async def prefetch(self, xml: str) -> None:
        """Translates what libvirtd said of a domain before a client asks for it.

        One at a time: a client that asks meanwhile waits for one of them at most.
        """
        payload = pack_string(xml)
        if _TRACE not in payload:
            return
        key = _digest(payload)
        async with self._prefetching:
            # What is answered while a disk is copied is not kept.
            if key not in self._made and not self._mirrors(payload):
                await self._made_once(key, payload)

    async def _make(self, key: bytes, payload: bytes) -> bytes:
        try:
            made, compressed = await self._in_thread(partial(self._compressed, payload))
            if len(made) <= MAX_REPLY_BYTES:
                self._store(key, compressed)
            return made
        finally:
            del self._making[key]

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    def _compressed(self, payload: bytes) -> tuple[bytes, bytes]:
        """Returns what to answer with, and that as it is kept."""
        made = self._translate(payload, {})
        return made, zlib.compress(made, 1)

    def _translate(self, payload: bytes, mirrors: dict[str, Mirror]) -> bytes:
        text = read_string(payload)
        live = is_running(text)
        made = translate.present(text, live=live)
        return pack_string(translate.mirrored(made, mirrors) if live and mirrors else made)

    def _mirrors(self, payload: bytes) -> dict[str, Mirror]:
        """Returns the copies of the disks of the domain that a reply speaks of, by target dev."""
        return {
            job.dev: Mirror(job.destination_xml, ready)
            for job, ready in self._block_jobs.copies()
            if job.dom.uuid_text.encode() in payload
        }

    def _cached(self, key: bytes) -> bytes | None:
        found = self._made.get(key)
        if found is None:
            return None
        self._made.move_to_end(key)
        return zlib.decompress(found)

    def _store(self, key: bytes, compressed: bytes) -> None:
        if key in self._made:
            return
        self._made[key] = compressed
        self._size += len(compressed)
        while self._size > MAX_BYTES:
            self._size -= len(self._made.popitem(last=False)[1])


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()
