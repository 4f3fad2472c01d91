"""Replies with domains' statistics: our disks among block.N.*, the carrier left out.

Of a domain paused because of I/O errors of ours (plugin.gateway.ioerrors) that is the reason.

A reply that says nothing of our domains passes as it is, in the event loop's callback; for the
others the target is asked what libvirtd cannot know. A call about all domains has it asked while
libvirtd puts its own answer together, for at thousands of domains both take a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from plugin.gateway.blocklimits import BlockLimits, KnownLimits
from plugin.gateway.domaincache import NOTHING, CachedDomain, DomainCache
from plugin.gateway.errors import GatewayError
from plugin.gateway.latencies import Latencies, Room, Wanted
from plugin.gateway.locks import Locks
from plugin.gateway.messages import Domain
from plugin.gateway.statistics import (
    COUNT,
    REASON,
    Block,
    Blocks,
    Record,
    each_record,
    merged,
    uuids,
    with_reasons,
)
from plugin.gateway.targets import Targets
from plugin.gateway.thresholds import Thresholds
from plugin.gateway.usage import Unit, Usage
from plugin.gateway.xdr import XdrError
from pydataplane.domain.translate import LunPlan
from pydataplane.lvols import Sizes

K = TypeVar("K")
T = TypeVar("T")

TURN = 16
"""Records after which other clients get their turn."""

FOUND = 64
"""The same, while they are looked for."""

LONG_BYTES = 65_536
"""Replies longer than this are changed one after the other, for all clients: however many poll,
a change that is under way waits for one of them at a time."""


BINS_MAX = 131_072
"""Bins of latencies in one answer: 16 MiB, where no client takes more than 32. Those of the disks
that come behind are left out; whoever asks about one domain has them."""

DOMAIN_BINS_MAX = 8192
"""The same of one domain: 1 MiB, which takes some 40 ms in one piece."""

ROUNDS = 4
"""Calls about all domains that libvirtd has at a time. At thousands of domains each reply is some
MiB, and a poller at each of libvirtd's workers would leave none for changes."""

ROUND_WAIT_S = 5.0
"""The longest that one waits for those before it, seconds: they may be about domains that hang."""


@dataclass(frozen=True)
class Numbers:
    """What the target said about LUNs, and about volumes by the name that it was asked for."""

    usages: Mapping[Unit, Usage]
    sizes: Mapping[str, Sizes]
    latencies: Mapping[Wanted, tuple[Latencies, ...]]
    limits: Mapping[str, BlockLimits]
    """Of bdevs of domains that run."""
    about: Mapping[bytes, CachedDomain] = field(default_factory=dict)
    """The domains that it was asked about, by UUID, and what was known of them."""

    def and_of(self, others: Numbers) -> Numbers:
        """Returns these and what it said about others."""
        return Numbers(
            {**self.usages, **others.usages},
            {**self.sizes, **others.sizes},
            {**self.latencies, **others.latencies},
            {**self.limits, **others.limits},
        )


NONE = Numbers({}, {}, {}, {})


@dataclass(frozen=True, slots=True)
class _Last:
    """The disks of a domain that does not run, as they were put together the last time."""

    seen: CachedDomain
    sizes: list[Sizes | None]
    blocks: Blocks


class DomainStats:
    """The results of CONNECT_GET_ALL_DOMAIN_STATS, as clients are to see them."""

    def __init__(
        self,
        cache: DomainCache,
        target: Targets,
        locks: Locks,
        path_prefix: str,
        paused: Collection[bytes],
        thresholds: Thresholds,
    ) -> None:
        """`path_prefix` is what clients' paths of volumes begin with.

        `paused` are the domains (UUIDs) that are paused because of I/O errors, at any time.
        """
        self._cache = cache
        self._target = target
        self._locks = locks
        self._prefix = path_prefix
        self._paused = paused
        self._thresholds = thresholds
        self._limits = KnownLimits(target.block_limits)
        self._last: dict[bytes, _Last] = {}
        """By the domain's UUID."""
        self._most = TURN
        self._rounds = asyncio.Semaphore(ROUNDS)

    @asynccontextmanager
    async def round(self) -> AsyncIterator[None]:
        """Holds the right to ask about all domains, first come first served.

        Who has waited for `ROUND_WAIT_S` goes on without it.
        """
        try:
            await asyncio.wait_for(self._rounds.acquire(), ROUND_WAIT_S)
        except TimeoutError:
            yield
            return
        try:
            yield
        finally:
            self._rounds.release()

    def at_once(self, payload: bytes) -> bytes | None:
        """Returns what to answer with, at once; None: ask `translated`.

        That is `payload` itself, where it has no domain of ours.
        """
        if self._paused and REASON in payload:
            return None
        if COUNT not in payload:  # block statistics were not asked for
            return payload
        if len(payload) > LONG_BYTES:
            return None
        try:
            seen = [self._cache.cached(uuid) for uuid in uuids(payload)]
        except XdrError:
            return None
        return None if any(item is None or item.ours for item in seen) else payload

    async def translated(self, payload: bytes, ahead: Awaitable[Numbers] | None = None) -> bytes:
        """Returns what to answer with; `ahead` is what the same call had asked already.

        Raises:
            XdrError: libvirtd's reply is no such result.
        """
        if self._paused and REASON in payload:
            payload = with_reasons(payload, self._paused)
        if COUNT not in payload:
            return payload
        async with self._turn(payload):
            every, disks = await self._disks(payload)
        if not any(item.ours for item in disks):
            return payload
        # In nobody's way: a target that does not answer has all wait for one time-out, not for one
        # after the other.
        had = NONE if ahead is None else await ahead
        rest = [
            item
            for record, item in zip(every, disks, strict=True)
            if item.ours and had.about.get(record.uuid) is not item
        ]
        numbers = had.and_of(await self._numbers(rest)) if rest else had
        async with self._turn(payload):
            return await self._merged(payload, every, disks, numbers)

    async def ahead(self, *, running: bool) -> Numbers:
        """Asks the target about all domains that are known to be ours, or those that run."""
        about = {u: item for u, item in self._cache.ours().items() if item.running or not running}
        return replace(await self._numbers(about.values()), about=about)

    @asynccontextmanager
    async def _turn(self, payload: bytes) -> AsyncIterator[None]:
        """Holds the right to work on a long reply."""
        if len(payload) <= LONG_BYTES:
            yield
            return
        async with self._locks.hold("statistics"):
            yield

    async def _disks(self, payload: bytes) -> tuple[list[Record], list[CachedDomain]]:
        """Returns the records, and what each domain has of ours."""
        every = []
        for record in each_record(payload):
            every.append(record)
            if len(every) % FOUND == 0:
                await asyncio.sleep(0)
        seen = [self._cache.cached(record.uuid) for record in every]
        missing = [nth for nth, item in enumerate(seen) if item is None]
        asked = (self._seen(every[nth].domain(payload)) for nth in missing)
        for nth, item in zip(missing, await asyncio.gather(*asked), strict=True):
            seen[nth] = item
        return every, [item or NOTHING for item in seen]

    async def _merged(
        self,
        payload: bytes,
        every: Sequence[Record],
        disks: Sequence[CachedDomain],
        numbers: Numbers,
    ) -> bytes:
        """Adds to each domain's record what its disks of ours did."""
        parts = [payload[:4]]
        room = Room(BINS_MAX)
        for nth, (record, item) in enumerate(zip(every, disks, strict=True)):
            if nth % TURN == TURN - 1:
                await asyncio.sleep(0)
            if not item.ours:
                parts.append(payload[record.start : record.end])
                continue
            before = room.left
            blocks = self._blocks(record.uuid, item, numbers, room)
            parts.append(merged(payload, record, item.hidden, blocks))
            if room.left != before:  # bins take longer than all else
                await asyncio.sleep(0)
        if len(self._last) > self._most:  # half may be of domains that changed or are gone
            still = self._cache.cached
            self._last = {u: last for u, last in self._last.items() if still(u) is last.seen}
            self._most = 2 * len(self._last) + TURN
        return b"".join(parts)

    def _blocks(self, uuid: bytes, item: CachedDomain, numbers: Numbers, room: Room) -> Blocks:
        """Returns a domain's disks; those of the last time where nothing of them changed."""
        names = [lun.bdev_name for lun in item.luns]
        now = [numbers.sizes.get(name) for name in names]
        last = self._last.get(uuid)
        if last is not None and last.seen is item and last.sizes == now:
            return last.blocks
        rooms = (Room(DOMAIN_BINS_MAX), room)
        each = zip(item.luns, now, strict=True)
        blocks = Blocks([self._block(uuid, item, lun, size, numbers, rooms) for lun, size in each])
        if not item.running:  # one that runs counts on
            self._last[uuid] = _Last(item, now, blocks)
        return blocks

    def _block(
        self,
        uuid: bytes,
        item: CachedDomain,
        lun: LunPlan,
        size: Sizes | None,
        numbers: Numbers,
        rooms: Sequence[Room],
    ) -> Block:
        path = lun.volume.path(self._prefix)
        if not item.running:
            return Block(lun.dev, path, None, size)
        latencies = numbers.latencies.get((lun.bdev_name, lun.histograms), ())
        for room in rooms:
            latencies = room.take(latencies)
        usage = numbers.usages.get(item.unit(lun))
        limits = numbers.limits.get(lun.bdev_name)
        threshold = self._threshold(uuid, lun.dev)
        return Block(lun.dev, path, usage, size, threshold, latencies, limits)

    def _threshold(self, uuid: bytes, dev: str) -> int | None:
        threshold = self._thresholds.of(uuid, dev)
        return None if threshold is None else threshold.allocated

    async def _seen(self, dom: Domain) -> CachedDomain:
        """Returns what a domain has of ours, which the client may know: libvirtd listed it.

        One domain that goes in between must not spoil the others' numbers.
        """
        try:
            return await self._cache.current(dom)
        except GatewayError:
            return NOTHING

    async def _numbers(self, disks: Collection[CachedDomain]) -> Numbers:
        """Asks the target once for all; without one there are names alone, as libvirt does it."""
        used = [item.unit(lun) for item in disks if item.running for lun in item.luns]
        names = [lun.bdev_name for item in disks for lun in item.luns]
        shown = [lun.bdev_name for item in disks if item.running for lun in item.luns]
        counted = [
            (lun.bdev_name, lun.histograms)
            for item in disks
            if item.running
            for lun in item.luns
            if lun.histograms
        ]
        return Numbers(
            *await asyncio.gather(
                _if_any(self._target.usage, used),
                _if_any(self._target.sizes, names),
                _if_any(self._target.latencies, counted),
                self._limits.of(shown),
            )
        )


async def _if_any(
    ask: Callable[[list[K]], Awaitable[Mapping[K, T]]], names: list[K]
) -> Mapping[K, T]:
    """Asks about LUNs or names; of what cannot be asked nothing is known."""
    try:
        return await ask(names) if names else {}
    except GatewayError:
        return {}
