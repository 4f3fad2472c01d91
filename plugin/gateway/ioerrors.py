"""Domains whose disks of ours cannot go on: paused as libvirt pauses one for an I/O error.

QEMU does not see the errors of our disks. Where a disk's error policy says so, the target keeps the
request that failed and tells of it (virtlun_vhost_get_suspended). It is asked each second, which
also finds what happened while no gateway ran. A domain that runs is paused; libvirtd takes that for
a client's wish, so what it says of the domain then is changed where clients see it: the state's
reason, the event, the list of disks with errors. Clients that registered for them get the IO_ERROR
events that QEMU would have sent.

QEMU stops its rings with the domain, upon which the target has the guest send again what it kept;
so whoever resumes the domain, through us or not, has it tried again. If it fails again, so does all
of this.
"""

from __future__ import annotations

import asyncio
from uuid import UUID

import structlog

from plugin.gateway.errors import Code, GatewayError, UpstreamError
from plugin.gateway.events import DEFINED, SUSPENDED, UNDEFINED, IoErrorEvent, lifecycle
from plugin.gateway.services import NO_SPACE, Services
from plugin.gateway.target import Suspended
from plugin.gateway.upstream import PAUSED, RUNNING
from pydataplane.domain.translate import CONTROLLER_PREFIX
from pydataplane.domain.xml import view as views
from pydataplane.domain.xml.disk import shown_alias
from pydataplane.domain.xml.metadata import Entry

POLL_S = 1.0
"""How often the target is asked, seconds."""

STILL_PAUSED = {DEFINED, UNDEFINED, SUSPENDED}
"""Events after which a paused domain is as paused as before: the first two are of definitions."""

_log = structlog.get_logger(__name__)


class IoErrors:
    """What the targets keep, and which domains are paused for it."""

    def __init__(self, services: Services) -> None:
        """Does nothing before `run`."""
        self._services = services
        self.paused = services.paused
        self._done: set[Suspended] = set()
        """What was dealt with; the same disk's next error is another."""
        self._told: set[Suspended] = set()
        """What clients were told of: once, also where libvirtd does not pause the domain then."""
        self._pausing: dict[bytes, asyncio.Task[None]] = {}
        """By domain, as libvirtd may wait for one whose QEMU does not answer."""
        self._said: dict[str, str] = {}

    async def run(self) -> None:
        """Goes on until it is cancelled."""
        try:
            while True:
                try:
                    await self.look()
                except GatewayError as error:
                    self._say("target", str(error))
                except Exception:
                    _log.exception("looking for I/O errors failed by a defect")
                await asyncio.sleep(POLL_S)
        finally:
            for task in self._pausing.values():
                task.cancel()
            await asyncio.gather(*self._pausing.values(), return_exceptions=True)

    async def look(self) -> None:
        """Asks the targets once, and deals with what is new, for POLL_S at most; that goes on.

        Raises:
            GatewayError: no target answers.
        """
        found = await self._services.target.suspended()
        self._said.pop("target", None)
        self._done &= set(found)
        self._told &= set(found)
        domains: dict[bytes, list[Suspended]] = {}
        for item in found:
            uuid = _uuid(item.controller)
            if uuid is not None and item not in self._done:
                domains.setdefault(uuid, []).append(item)
        for uuid, items in domains.items():
            if uuid not in self._pausing:
                self._pausing[uuid] = asyncio.create_task(self._deal(uuid, items))
        if self._pausing:
            await asyncio.wait(self._pausing.values(), timeout=POLL_S)
        there = {_uuid(item.controller) for item in found}
        for uuid in self.paused.keys() - there:
            # A target that was killed knows nothing of what it kept: the guest still has it.
            if not await self._is_paused(uuid):
                self.paused.pop(uuid, None)

    async def _deal(self, uuid: bytes, items: list[Suspended]) -> None:
        """Pauses a domain, and notes that it is dealt with."""
        try:
            await self._pause(uuid, items)
        except GatewayError as error:
            self._say(items[0].controller, str(error))
        except Exception:
            _log.exception("pausing a domain for I/O errors failed by a defect")
        else:
            self._said.pop(items[0].controller, None)
            self._done.update(items)
        finally:
            del self._pausing[uuid]

    async def _pause(self, uuid: bytes, items: list[Suspended]) -> None:
        """Pauses a domain, unless it is paused already, and tells of it.

        Raises:
            GatewayError: libvirtd cannot be asked, or refuses.
        """
        services = self._services
        admin = await services.admin()
        try:
            dom = await admin.lookup(uuid)
        except UpstreamError as error:
            if error.code == Code.NO_DOMAIN:  # another libvirtd's, or it just went
                return
            raise
        xml = await admin.xml(dom, 0)
        entries = await services.parse(lambda: _entries(xml))
        disks = {entries[i.target].lun.dev: i.error for i in items if i.target in entries}
        state, _ = await admin.state(dom)
        if state not in (RUNNING, PAUSED) or not disks:
            return
        # Before it is paused: libvirtd tells of that at once.
        self.paused.setdefault(uuid, {}).update(disks)
        if state == PAUSED:
            return
        for item in items:
            entry = entries.get(item.target)
            if entry is not None and item not in self._told:
                self._told.add(item)
                path = services.settings.path_prefix + entry.lun.volume.alias
                given = entry.disk.alias if entry.disk is not None else None
                reason = "enospc" if item.error == NO_SPACE else ""
                alias = shown_alias(entry.lun.dev, given)
                services.announce(IoErrorEvent(dom, path, alias, reason))
        try:
            await admin.suspend(dom)
        except GatewayError:
            self.paused.pop(uuid, None)
            raise
        _log.warning("domain paused: I/O errors", domain=dom.name, disks=disks)

    async def _is_paused(self, uuid: bytes) -> bool:
        """Whether a domain is still paused.

        Raises:
            GatewayError: libvirtd cannot be asked.
        """
        admin = await self._services.admin()
        try:
            state, _ = await admin.state(await admin.lookup(uuid))
        except UpstreamError as error:
            if error.code == Code.NO_DOMAIN:
                return False
            raise
        return state == PAUSED

    def lifecycle_event(self, payload: bytes) -> None:
        """Takes a lifecycle event of libvirtd's: one of the guest's own ends a pause."""
        told = lifecycle(payload)
        if told is not None and told[1] not in STILL_PAUSED:
            self.paused.pop(told[0].uuid, None)

    def _say(self, what: str, text: str) -> None:
        """Logs a sentence once, until it is another."""
        if self._said.get(what) != text:
            self._said[what] = text
            _log.warning("I/O errors not dealt with", of=what, error=text)


def _entries(xml: str) -> dict[int, Entry]:
    """Returns the disks of ours in libvirtd's XML of a domain, by target number."""
    view = views.parse(xml)
    metadata = view.salvaged if view is not None else None
    return {} if metadata is None else {entry.lun.target: entry for entry in metadata.entries}


def _uuid(controller: str) -> bytes | None:
    """Returns the UUID of the domain that a controller is of, or None."""
    try:
        return UUID(controller.removeprefix(CONTROLLER_PREFIX)).bytes
    except ValueError:
        return None
