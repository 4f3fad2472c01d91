"""What handlers and the reconcile loop share; it knows neither clients nor sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from uuid import UUID

from plugin.config import GatewaySection, HookSection
from plugin.gateway.autoresume import AutoResume
from plugin.gateway.backup.job import Backup
from plugin.gateway.backup.progress import Progress
from plugin.gateway.blockjobs import BlockJobs
from plugin.gateway.budget import Budget
from plugin.gateway.domaincache import DomainCache
from plugin.gateway.domstats import DomainStats
from plugin.gateway.events import Announced
from plugin.gateway.imagegrants import ImageGrants
from plugin.gateway.journal import Journal
from plugin.gateway.locks import Locks
from plugin.gateway.parsing import ClientParser, Parsers
from plugin.gateway.storage.pools import Pools
from plugin.gateway.targets import Targets
from plugin.gateway.thresholds import Thresholds
from plugin.gateway.upstream import Upstream
from plugin.gateway.xmlcache import XmlCache
from pydataplane.domain import translate
from pydataplane.domain.translate import Definition, Settings

T = TypeVar("T")

NO_SPACE = "no_space"
"""The target's word for an I/O error: there was no room."""


@dataclass
class Services:
    """One gateway's."""

    config: GatewaySection
    hook: HookSection
    settings: Settings
    """Of the translation."""
    target: Targets
    locks: Locks
    journal: Journal
    budget: Budget
    """Memory for calls that are read whole."""
    parsers: Parsers
    """The threads in which XML is read."""
    xml_cache: XmlCache
    domain_cache: DomainCache
    domain_stats: DomainStats
    admin: Callable[[], Awaitable[Upstream]]
    """The gateway's own connection to libvirtd; raises UpstreamGone, UpstreamError."""
    announce: Callable[[Announced], None]
    """Sends an event to every client that registered for it; never waits."""
    hold_back: Callable[[bytes, bool], None]
    """Has no client told that a domain (its UUID) is defined anew, or (False) that undone."""
    block_jobs: BlockJobs
    """Of disks of ours."""
    backups: dict[bytes, Backup]
    """Backups of disks of ours that run, by domain (its UUID)."""
    ended_backups: dict[bytes, Progress]
    """How the last one of each domain ended, until a client asks."""
    paused: dict[bytes, dict[str, str]]
    """Domains that are paused because of I/O errors, by UUID: target dev to the target's word for
    the error; see plugin.gateway.ioerrors."""
    auto_resume: AutoResume
    """Which of them go on by themselves."""
    image_grants: ImageGrants
    thresholds: Thresholds
    """Of what disks have allocated; see plugin.gateway.thresholdwatch."""
    pools: Pools
    """The lvstores as libvirt's pools."""

    async def parse(self, work: Callable[[], T]) -> T:
        """Does what parses XML of libvirtd's in a thread; `Call.parse` is for a client's."""
        return await asyncio.get_running_loop().run_in_executor(self.parsers.domains, work)

    @asynccontextmanager
    async def domain_lock(self, uuid: bytes) -> AsyncIterator[None]:
        """Holds a domain (its UUID, 16 bytes) while one operation of the body changes it."""
        async with self.locks.hold(f"domain:{uuid.hex()}"):
            try:
                yield
            finally:
                self.domain_cache.changed(uuid)

    async def redefine(self, upstream: Upstream, uuid: bytes, xml: str) -> None:
        """Replaces a definition for a change of disks, of which libvirt has no event.

        Raises:
            UpstreamError, UpstreamGone: libvirtd refuses, or is gone.
        """
        self.hold_back(uuid, True)
        try:
            await upstream.define(xml)
        except BaseException:
            self.hold_back(uuid, False)
            raise

    def is_locked(self, uuid: bytes) -> bool:
        """Whether an operation holds the domain now, or waits for it."""
        return self.locks.is_held(f"domain:{uuid.hex()}")

    async def define(
        self,
        xml: str,
        *,
        new_uuid: UUID,
        current_xml: str | None = None,
        uuids: Mapping[str, str] | None = None,
        controller: bool = False,
        client: ClientParser | None = None,
        served_in: str | None = None,
        running: bool = False,
        as_stored: bool = False,
    ) -> Definition:
        """Translates a domain, with its controller in the target that has its volumes.

        `client` reads what one has sent; None: the XML is libvirtd's. `served_in` is given where it
        is not the client that defines the domain, `running` where its guest goes on, `as_stored`
        where nobody defines it anew.

        Raises:
            GatewayError: they are of several targets.
            TranslateError: as `translate.define`.
        """

        async def translated(settings: Settings) -> Definition:
            work = partial(
                translate.define,
                xml,
                settings,
                new_uuid=new_uuid,
                current_xml=current_xml,
                uuids=uuids,
                controller=controller,
                served_in=served_in,
                running=running,
                as_stored=as_stored,
            )
            return await (self.parse(work) if client is None else client.parse(work, len(xml)))

        return await translated(await self.target.settings(self.settings, translated))
