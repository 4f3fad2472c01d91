"""The reconcile loop: recovers interrupted changes and keeps the target in line with the domains.

A full round is made at the start, after libvirtd came back, and every `reconcile_s` seconds.
Between rounds libvirtd's own events say which domain stopped; its controller is released, as the
hook does where that is installed. They also say which came from another host, with a definition
that has the controller's socket where it is there, and which guest has let a device go, that a
virtio-blk disk of ours may have been. What could not be recovered, because a target
was away, is tried again every few seconds.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import structlog

from plugin.gateway import copies, runningbackups
from plugin.gateway.errors import GatewayError
from plugin.gateway.events import DEFINED, lifecycle, subject
from plugin.gateway.messages import Domain
from plugin.gateway.reconcile import Reconciler, move_socket, reconcile_domain
from plugin.gateway.recovery import recover_all
from plugin.gateway.services import Services
from plugin.gateway.upstream import Upstream
from pydataplane.domain.errors import TranslateError

RETRY_S = 1.0
"""Pause before libvirtd is tried again, seconds."""

PENDING_S = 3.0
"""Pause before a change that could not be recovered is tried again, seconds."""

LEAVE_S = 0.2
LEAVE_TRIES = 25
"""How often, and how many seconds apart, a stopped domain's QEMU is given to let go."""

_STOPPED = {5, 6, 8}
"""VIR_DOMAIN_EVENT_STOPPED, _SHUTDOWN, _CRASHED."""

_log = structlog.get_logger(__name__)


class ReconcileLoop:
    """The task; the gateway's own connection to libvirtd feeds it events."""

    def __init__(self, services: Services) -> None:
        """Does nothing before `run`."""
        self._services = services
        self._reconciler = Reconciler(services)
        self._stopped: dict[bytes, tuple[Domain, int]] = {}
        self._defined: dict[bytes, Domain] = {}
        self._unplugged: dict[bytes, Domain] = {}
        self._wake = asyncio.Event()

    def lifecycle_event(self, payload: bytes) -> None:
        """Takes a lifecycle event of libvirtd's (remote_domain_event_callback_lifecycle_msg)."""
        told = lifecycle(payload)
        if told is None:
            return
        dom, event = told
        if event in _STOPPED:
            self._stopped[dom.uuid] = (dom, LEAVE_TRIES)
            copies.domain_stopped(self._services, dom.uuid)
        elif event == DEFINED:
            self._defined[dom.uuid] = dom
        self._wake.set()

    def device_removed(self, payload: bytes) -> None:
        """Takes a device-removed event (remote_domain_event_callback_device_removed_msg)."""
        dom = subject(payload)
        if dom is not None:
            self._unplugged[dom.uuid] = dom
            self._wake.set()

    def connection_lost(self) -> None:
        """Is told that libvirtd closed the connection: all is to be looked at again."""
        self._wake.set()

    async def run(self) -> None:
        """Goes on until it is cancelled."""
        self._services.journal.remove_unfinished()
        silent = False
        while True:
            try:
                admin = await self._services.admin()
                await copies.leave_stopped(self._services)
                await recover_all(self._services)
                await runningbackups.end_of_gone(self._services)
                await self._reconciler.run()
                silent = False
                await self._until_next(admin)
            except GatewayError as error:
                if not silent:
                    _log.warning("libvirtd cannot be asked: tried again", error=str(error))
                silent = True
                await asyncio.sleep(RETRY_S)
            except Exception:
                _log.exception("reconciliation failed by a defect")
                await asyncio.sleep(self._services.config.reconcile_s)

    async def _until_next(self, admin: Upstream) -> None:
        """Waits for the next full round, releasing controllers of domains that stop meanwhile."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._services.config.reconcile_s
        again = loop.time() + PENDING_S
        while admin.alive and (remaining := end - loop.time()) > 0:
            pause = LEAVE_S if self._stopped else PENDING_S
            with suppress(TimeoutError):
                async with asyncio.timeout(min(pause, remaining)):
                    await self._wake.wait()
            self._wake.clear()
            while self._defined:
                await self._move_socket(self._defined.popitem()[1])
            while self._unplugged:
                await self._release_disks(self._unplugged.popitem()[1])
            await self._release_stopped()
            if self._services.journal.pending and loop.time() >= again:
                await recover_all(self._services)
                again = loop.time() + PENDING_S
            await runningbackups.end_of_gone(self._services)

    async def _move_socket(self, dom: Domain) -> None:
        """Puts right where a definition that came from another host has the controller's socket."""
        try:
            async with self._services.domain_lock(dom.uuid):
                await move_socket(self._services, dom)
        except (GatewayError, TranslateError) as error:
            _log.warning("definition not looked at", domain=dom.name, error=str(error))

    async def _release_disks(self, dom: Domain) -> None:
        """Releases the controllers of disks that a running guest has let go."""
        try:
            if not (await self._services.domain_cache.current(dom)).ours:
                return
            async with self._services.domain_lock(dom.uuid):
                await reconcile_domain(self._services, dom)
        except (GatewayError, TranslateError) as error:
            _log.warning("not released", domain=dom.name, error=str(error))

    async def _release_stopped(self) -> None:
        """Looks once at each domain that stopped; one that does so again meanwhile is kept."""
        for uuid in list(self._stopped):
            await self._release(*self._stopped.pop(uuid))

    async def _release(self, dom: Domain, tries: int) -> None:
        """Releases a stopped domain's controller, now or in one of the next rounds."""
        services = self._services
        done = tries <= 1
        try:
            async with services.domain_lock(dom.uuid):
                await copies.resolve(services, dom.uuid)
                done = await reconcile_domain(services, dom, only_stopped=True) or done
        except (GatewayError, TranslateError) as error:
            _log.warning("not released", domain=dom.name, error=str(error))
            done = True
        if not done:
            self._stopped.setdefault(dom.uuid, (dom, tries - 1))
