"""Caches which disks of ours each domain has, so that few calls need a question to libvirtd.

libvirtd's events invalidate an entry: definition, start, stop and removal are lifecycle events, a
change of our metadata is one of its own. They come on the gateway's own connection, which is open
before a domain is read; when it ends, the cache is cleared. A domain that changes while it is read
is read again for the next caller. What an operation of ours changes is invalidated at its end, as
the event may come after the client's next call.

It does not replace libvirtd's permission: code that shows a client what is cached asks first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from plugin.gateway.domains import is_running
from plugin.gateway.messages import Domain
from plugin.gateway.upstream import Upstream
from plugin.gateway.usage import Unit
from plugin.gateway.wire import WireError
from plugin.gateway.xdr import Reader
from pydataplane.domain import translate
from pydataplane.domain.errors import TranslateError
from pydataplane.domain.translate import PREFIX, LunPlan, Plan, controller_name
from pydataplane.domain.xml import carrier as carriers
from pydataplane.domain.xml import view as views

AT_A_TIME = 5
"""Domains read at a time: libvirtd's own limit for one client (max_client_requests)."""

AGE_S = 600.0
"""An entry is read again after so many seconds, should an event have been missed."""


@dataclass(frozen=True, slots=True)
class CachedDomain:
    """What libvirtd's XML of a domain says: of the running one if it runs."""

    ours: bool = False
    """Whether it has metadata of ours."""
    running: bool = False
    carrier: str | None = None
    """Target dev of the disk that stands for our controller."""
    hidden: frozenset[str] = frozenset()
    """Target devs of that and of the devices that virtio-blk disks of ours are to libvirtd."""
    controller: str = ""
    """Name of that controller in the target, whatever the metadata says."""
    luns: tuple[LunPlan, ...] = ()
    """The disks of ours, in their order; of damaged metadata those that can be read."""
    plan: Plan | None = None
    """What the target must have; None if nothing, or if the metadata is damaged."""

    def unit(self, lun: LunPlan) -> Unit:
        """Returns what a disk of the running domain is in the target."""
        return lun.address(self.controller)

    def find(self, path: str, settings: translate.Settings) -> LunPlan | None:
        """Returns the disk of ours that `path` means, or None; see `translate.find`."""
        return translate.meant(self.luns, path, settings)


NOTHING = CachedDomain()


def read(xml: str) -> CachedDomain:
    """Returns what libvirtd's XML of a domain says of us; parses it only if it has our name."""
    view = views.parse(xml) if PREFIX in xml else None
    metadata = view.salvaged if view is not None else None
    if view is None or metadata is None:
        return NOTHING
    node = carriers.disk(view.domain)
    try:
        plan = view.plan()
    except TranslateError:
        plan = None
    entries = sorted(metadata.entries, key=lambda entry: entry.lun.target)
    return CachedDomain(
        ours=True,
        running=is_running(xml),
        carrier=None if node is None else node.value("target", "dev"),
        hidden=view.hidden,
        controller=controller_name(view.uuid),
        luns=tuple(entry.lun for entry in entries),
        plan=plan,
    )


class DomainCache:
    """The domains of one libvirtd."""

    def __init__(
        self,
        watching: Callable[[], Awaitable[Upstream]],
        reading: Callable[[], Awaitable[Upstream]],
        workers: ThreadPoolExecutor,
        prefetch: Callable[[str], Coroutine[None, None, None]],
    ) -> None:
        """`watching` returns the connection with the events, `reading` the one to ask on.

        Two, so that many questions do not hold up what finishes a change. XML is parsed in
        `workers`. `prefetch` is given each XML that has something of ours, and is not waited for.
        """
        self._watching, self._asking = watching, reading
        self._workers = workers
        self._prefetch = prefetch
        self._prefetching: set[asyncio.Task[None]] = set()
        self._domains: dict[bytes, tuple[CachedDomain, float]] = {}
        self._reading: dict[bytes, asyncio.Task[CachedDomain]] = {}
        self._slots = asyncio.Semaphore(AT_A_TIME)

    async def current(self, dom: Domain) -> CachedDomain:
        """Returns what a domain has of ours now.

        Raises:
            GatewayError: libvirtd has no such domain, or cannot be asked.
        """
        found = self.cached(dom.uuid)
        if found is not None:
            return found
        task = self._reading.get(dom.uuid)
        if task is None:
            task = asyncio.create_task(self._read(dom))
            self._reading[dom.uuid] = task
            task.add_done_callback(lambda done: self._done(dom.uuid, done))
        return await asyncio.shield(task)

    def cached(self, uuid: bytes) -> CachedDomain | None:
        """Returns the entry of a domain, None where there is none: ask `current`."""
        found = self._domains.get(uuid)
        return found[0] if found is not None and time.monotonic() - found[1] < AGE_S else None

    def ours(self) -> dict[bytes, CachedDomain]:
        """Returns the cached domains that have something of ours, by UUID."""
        oldest = time.monotonic() - AGE_S
        return {u: seen for u, (seen, at) in self._domains.items() if seen.ours and at > oldest}

    async def _read(self, dom: Domain) -> CachedDomain:
        async with self._slots:
            await self._watching()
            xml = await (await self._asking()).xml(dom, 0)
        if PREFIX not in xml:
            return NOTHING
        seen = await asyncio.get_running_loop().run_in_executor(self._workers, read, xml)
        task = asyncio.create_task(self._prefetch(xml))
        self._prefetching.add(task)
        task.add_done_callback(self._prefetching.discard)
        return seen

    def _done(self, uuid: bytes, task: asyncio.Task[CachedDomain]) -> None:
        """Keeps what was read, unless the domain changed meanwhile."""
        if self._reading.get(uuid) is not task:
            return
        del self._reading[uuid]
        if not task.cancelled() and task.exception() is None:
            self._domains[uuid] = (task.result(), time.monotonic())

    def changed(self, uuid: bytes) -> None:
        """Forgets a domain; what is being read of it is not kept."""
        self._domains.pop(uuid, None)
        self._reading.pop(uuid, None)

    def event(self, payload: bytes) -> None:
        """Takes an event of libvirtd's about a domain: callback, domain and more."""
        reader = Reader(payload)
        try:
            reader.i32()  # the callback
            self.changed(Domain.read(reader).uuid)
        except WireError:
            self.forget()

    def forget(self) -> None:
        """Forgets all: events may be missing."""
        self._domains.clear()
        self._reading.clear()
