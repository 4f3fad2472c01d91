"""Domains whose disks of ours cannot go on: paused as libvirt pauses one for an I/O error.

QEMU does not see the errors of our disks. Where a disk's error policy says so, the target keeps the
request that failed and tells of it (virtlun_vhost_get_suspended). It is asked each second, which
also finds what happened while no gateway ran. A domain that runs is paused; libvirtd takes that for
a client's wish, so what it says of the domain then is changed where clients see it: the state's
reason, the event, the list of disks with errors. Clients that registered for them get the IO_ERROR
events that QEMU would have sent.

QEMU stops its rings with the domain, upon which the target has the guest send again what it kept,
or takes it again when they go on; so whoever resumes the domain, through us or not, has it tried
again. If it fails again, so does all of this. We do it where it was for want of room and there is
some again, unless when_room_returns of virtlun.toml says otherwise (plugin.gateway.autoresume).
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from uuid import UUID

import structlog

from plugin.gateway.autoresume import failures
from plugin.gateway.errors import Code, GatewayError, UpstreamError
from plugin.gateway.events import DEFINED, SUSPENDED, UNDEFINED, IoErrorEvent, lifecycle
from plugin.gateway.services import NO_SPACE, Services
from plugin.gateway.target import Room, Suspended
from plugin.gateway.upstream import PAUSED, PAUSED_BY_USER, RUNNING
from pydataplane.domain.model import DiskAddress
from pydataplane.domain.names import domain_of
from pydataplane.domain.xml import view as views
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
        await self._resume(found)
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
        entries, aliases = await services.parse(lambda: _entries(xml))
        failed = [(item, entries[_address(item)]) for item in items if _address(item) in entries]
        disks = {entry.lun.dev: item.error for item, entry in failed}
        state, _ = await admin.state(dom)
        if state not in (RUNNING, PAUSED) or not disks:
            return
        # Before it is paused: libvirtd tells of that at once.
        self.paused.setdefault(uuid, {}).update(disks)
        if state == PAUSED:
            return
        for item, entry in failed:
            if item not in self._told:
                self._told.add(item)
                path = entry.lun.volume.path(services.settings.path_prefix)
                reason = "enospc" if item.error == NO_SPACE else ""
                services.announce(IoErrorEvent(dom, path, aliases[_address(item)], reason))
        rooms = await self._rooms(failed)
        try:
            await admin.suspend(dom)
        except GatewayError:
            self.paused.pop(uuid, None)
            raise
        if rooms:
            services.auto_resume.paused(uuid, items, rooms, time.monotonic())
        _log.warning("domain paused: I/O errors", domain=dom.name, disks=disks)

    async def _rooms(self, failed: list[tuple[Suspended, Entry]]) -> dict[str, Room]:
        """Returns what room there is in lvstores that had none; nothing if all was not for that."""
        services = self._services
        lvstores = {entry.lun.volume.lvstore for _, entry in failed}
        only_room = all(item.error == NO_SPACE for item, _ in failed)
        if not only_room or services.config.when_room_returns != "resume":
            return {}
        with suppress(GatewayError):
            rooms = await services.target.rooms(lvstores)
            return rooms if rooms.keys() == lvstores else {}
        return {}

    async def _resume(self, found: list[Suspended]) -> None:
        """Resumes what we paused, where there is room again.

        Raises:
            GatewayError: no target answers.
        """
        services, returns = self._services, self._services.auto_resume
        if not returns.waiting:
            return
        for uuid, note in list(returns.waiting.items()):
            own = failures(item for item in found if _uuid(item.controller) == uuid)
            if note.is_over(own) or services.config.when_room_returns != "resume":
                returns.forget(uuid)
        wanted = {name for note in returns.waiting.values() for name in note.rooms}
        rooms = await services.target.rooms(wanted) if wanted else {}
        for uuid, note in list(returns.waiting.items()):
            errors = self.paused.get(uuid, {}).values()
            if not note.may_go_on(rooms, time.monotonic()) or set(errors) != {NO_SPACE}:
                continue
            if uuid in self._pausing or services.is_locked(uuid):
                continue
            try:
                await self._go_on(uuid)
            except GatewayError as error:
                self._say(str(UUID(bytes=uuid)), str(error))
                returns.put_off(uuid, time.monotonic())

    async def _go_on(self, uuid: bytes) -> None:
        """Resumes a domain that is still paused as we left it.

        Raises:
            GatewayError: libvirtd cannot be asked, or refuses.
        """
        returns = self._services.auto_resume
        async with self._services.domain_lock(uuid):
            admin = await self._services.admin()
            try:
                dom = await admin.lookup(uuid)
                state = await admin.state(dom)
            except UpstreamError as error:
                if error.code != Code.NO_DOMAIN:
                    raise
                returns.forget(uuid)
                return
            if uuid not in returns.waiting:  # somebody said otherwise just now
                return
            if state != (PAUSED, PAUSED_BY_USER):
                returns.forget(uuid)
                return
            await admin.resume(dom)
            returns.resumed(uuid, time.monotonic())
            _log.info("domain resumed: there is room again", domain=dom.name)

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
            self._services.auto_resume.forget(told[0].uuid)

    def _say(self, what: str, text: str) -> None:
        """Logs a sentence once, until it is another."""
        if self._said.get(what) != text:
            self._said[what] = text
            _log.warning("I/O errors not dealt with", of=what, error=text)


def _entries(xml: str) -> tuple[dict[DiskAddress, Entry], dict[DiskAddress, str]]:
    """Returns the disks of ours in libvirtd's XML of a domain, and the aliases that clients see."""
    view = views.parse(xml)
    metadata = view.salvaged if view is not None else None
    if view is None or metadata is None:
        return {}, {}
    entries = {entry.lun.address(metadata.controller): entry for entry in metadata.entries}
    return entries, {address: view.alias(entry) for address, entry in entries.items()}


def _address(item: Suspended) -> DiskAddress:
    return DiskAddress(item.controller, item.target)


def _uuid(controller: str) -> bytes | None:
    """Returns the UUID of the domain that a controller is of, or None."""
    try:
        return UUID(domain_of(controller)).bytes
    except ValueError:
        return None
