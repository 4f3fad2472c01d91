"""Keeps target and domains together while the gateway runs: settles, reconciles, cleans up.

At the start, after libvirtd came back, and every `reconcile_s` seconds all is looked at. Between
that, libvirtd's own events say which domain stopped; its controller is released, as the hook does
where that is installed. They also say which came from another host, with a definition that has the
controller's socket where it is there.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from plugin.errors import TranslateError
from plugin.gateway.errors import GatewayError
from plugin.gateway.messages import Domain
from plugin.gateway.reconcile import Reconciler, move_socket, put_right
from plugin.gateway.recovery import settle_left
from plugin.gateway.wire import WireError
from plugin.gateway.xdr import Reader

if TYPE_CHECKING:
    from plugin.gateway.server import Gateway
    from plugin.gateway.upstream import Upstream

RETRY_S = 1.0
"""Pause before libvirtd is tried again, seconds."""

LEAVE_S = 0.2
LEAVE_TRIES = 25
"""How often, and how many seconds apart, a stopped domain's QEMU is given to let go."""

_DEFINED = 0
_STOPPED = {5, 6, 8}
"""VIR_DOMAIN_EVENT_DEFINED, _STOPPED, _SHUTDOWN, _CRASHED."""

_log = structlog.get_logger(__name__)


class Care:
    """The task; `Gateway.admin` feeds it libvirtd's events."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._reconciler = Reconciler(gateway)
        self._stopped: dict[bytes, tuple[Domain, int]] = {}
        self._defined: dict[bytes, Domain] = {}
        self._wake = asyncio.Event()

    def happened(self, payload: bytes) -> None:
        """Takes a lifecycle event of libvirtd's (remote_domain_event_callback_lifecycle_msg)."""
        reader = Reader(payload)
        try:
            reader.i32()  # the callback
            dom = Domain.read(reader)
            event = reader.i32()
        except WireError:
            return
        if event in _STOPPED:
            self._stopped[dom.uuid] = (dom, LEAVE_TRIES)
        elif event == _DEFINED:
            self._defined[dom.uuid] = dom
        self._wake.set()

    def lost(self) -> None:
        """Is told that libvirtd closed the connection: all is to be looked at again."""
        self._wake.set()

    async def run(self) -> None:
        """Goes on until it is cancelled."""
        silent = False
        while True:
            try:
                admin = await self._gateway.admin()
                await settle_left(self._gateway)
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
                await asyncio.sleep(self._gateway.config.reconcile_s)

    async def _until_next(self, admin: Upstream) -> None:
        """Waits for the next full round, releasing controllers of domains that stop meanwhile."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._gateway.config.reconcile_s
        while admin.alive and (remaining := end - loop.time()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(LEAVE_S, remaining) if self._stopped else remaining):
                    await self._wake.wait()
            self._wake.clear()
            while self._defined:
                await self._move_socket(self._defined.popitem()[1])
            await self._release_stopped()

    async def _move_socket(self, dom: Domain) -> None:
        """Puts right where a definition that came from another host has the controller's socket."""
        try:
            async with self._gateway.locks.hold(f"domain:{dom.uuid.hex()}"):
                await move_socket(self._gateway, dom)
        except (GatewayError, TranslateError) as error:
            _log.warning("definition not looked at", domain=dom.name, error=str(error))

    async def _release_stopped(self) -> None:
        """Looks once at each domain that stopped; one that does so again meanwhile is kept."""
        for uuid in list(self._stopped):
            await self._release(*self._stopped.pop(uuid))

    async def _release(self, dom: Domain, tries: int) -> None:
        """Releases a stopped domain's controller, now or in one of the next rounds."""
        gateway = self._gateway
        done = tries <= 1
        try:
            async with gateway.locks.hold(f"domain:{dom.uuid.hex()}"):
                done = await put_right(gateway, dom, only_stopped=True) or done
        except (GatewayError, TranslateError) as error:
            _log.warning("not released", domain=dom.name, error=str(error))
            done = True
        if not done:
            self._stopped.setdefault(dom.uuid, (dom, tries - 1))
