"""The gateway process: listeners, sessions, and what the sessions share."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import structlog

from plugin import translate
from plugin.config import AuthSetting, Config
from plugin.gateway import polkit
from plugin.gateway.care import Care
from plugin.gateway.events import Happening
from plugin.gateway.listen import handed_over, listen
from plugin.gateway.locks import Locks
from plugin.gateway.notes import Kept, Notes
from plugin.gateway.session import Session
from plugin.gateway.targets import Targets
from plugin.gateway.upstream import Upstream, open_arguments
from plugin.translate import Definition, Settings

STOP_S = 15.0
"""How long calls begun are given to finish at a stop, seconds."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Listener:
    """A listening socket and the socket of libvirtd behind it."""

    sock: socket.socket
    path: Path
    upstream: Path
    read_only: bool
    auth: polkit.Auth
    ours: bool
    """Whether the socket file is ours to remove at the end."""
    slots: asyncio.Semaphore
    """Connections that may still come: readers do not take those of writers."""


class Gateway:
    """Runs until `stop`."""

    def __init__(self, config: Config) -> None:
        self.config = config.gateway
        self.hook = config.hook
        self.settings = config.settings()
        self.locks = Locks()
        self.target = Targets(config)
        self.sessions: set[Session] = set()
        self.notes = Notes(config.gateway.state_dir)
        self.unsettled: list[Kept] = []
        """Changes that failed and could not be taken back yet."""
        self.care = Care(self)
        self._admin: Upstream | None = None
        self._admin_lock = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[Listener] = []

    async def define(
        self,
        xml: str,
        *,
        new_uuid: UUID,
        current_xml: str | None = None,
        uuids: Mapping[str, str] | None = None,
    ) -> Definition:
        """Translates a domain, with its controller in the target that has its volumes.

        Raises:
            GatewayError: they are of several targets.
            TranslateError: as `translate.define`.
        """

        def translated(settings: Settings) -> Definition:
            return translate.define(
                xml, settings, new_uuid=new_uuid, current_xml=current_xml, uuids=uuids
            )

        return translated(await self.target.settings(self.settings, translated))

    def open(self) -> None:
        """Makes the listening sockets.

        Raises:
            ConfigError: one of them cannot be made.
        """
        given = handed_over()
        config = self.config
        self._listen(
            given, config.listen, config.upstream, config.socket_mode, config.auth, read_only=False
        )
        if config.listen_ro is not None:
            self._listen(
                given,
                config.listen_ro,
                config.upstream_ro,
                config.socket_mode_ro,
                config.auth_ro,
                read_only=True,
            )

    def _listen(
        self,
        given: dict[str, socket.socket],
        path: Path,
        upstream: Path,
        mode: str,
        setting: AuthSetting,
        *,
        read_only: bool,
    ) -> None:
        auth = (
            polkit.configured(self.config.libvirtd_conf, read_only=read_only)
            if setting == "auto"
            else polkit.Auth(setting)
        )
        sock = given.get(str(path))
        ours = sock is None
        if sock is None:
            sock = listen(path, int(mode, 8), self.config.socket_group)
        slots = asyncio.Semaphore(self.config.max_clients)
        self._listeners.append(Listener(sock, path, upstream, read_only, auth, ours, slots))
        _log.info("listening", path=str(path), upstream=str(upstream), auth=str(auth))

    async def run(self) -> None:
        """Serves clients until `stop` is called, then lets calls begun finish."""
        accepting = [asyncio.create_task(self._accept(item)) for item in self._listeners]
        if self.config.reconcile:
            accepting.append(asyncio.create_task(self.care.run()))
        try:
            await self._stopping.wait()
        finally:
            for task in accepting:
                task.cancel()
            await asyncio.gather(*accepting, return_exceptions=True)
            for item in self._listeners:
                item.sock.close()
                if item.ours:
                    item.path.unlink(missing_ok=True)
            for session in self.sessions:
                session.end()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=STOP_S)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._admin is not None:
                await self._admin.close()
        _log.info("stopped")

    def stop(self) -> None:
        """Makes `run` come to its end."""
        self._stopping.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: Listener) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener.sock)
            except OSError as error:  # out of descriptors: some will come free
                _log.warning("a client could not be accepted", error=str(error))
                await asyncio.sleep(0.1)
                continue
            try:
                await listener.slots.acquire()
            except BaseException:
                sock.close()
                raise
            self._spawn(self._serve(listener, sock))

    async def _serve(self, listener: Listener, sock: socket.socket) -> None:
        try:
            session = Session(self, listener, sock)
        except OSError:  # it is gone again
            sock.close()
            listener.slots.release()
            return
        self.sessions.add(session)
        try:
            await session.run()
        except Exception:
            session.log.exception("a connection ended by a defect")
        finally:
            self.sessions.discard(session)
            listener.slots.release()

    async def admin(self) -> Upstream:
        """Returns the gateway's own connection to libvirtd, under its own identity.

        For questions no client asked: never for what a client wants done.

        Raises:
            UpstreamGone, UpstreamError: libvirtd is not there or refuses.
        """
        async with self._admin_lock:
            if self._admin is None or not self._admin.alive:
                if self._admin is not None:
                    await self._admin.close()
                admin = await Upstream.open(
                    self.config.upstream, open_arguments(self.config.uri), None
                )
                try:
                    await admin.watch(self.care.happened, self.care.lost)
                except BaseException:
                    await admin.close()
                    raise
                self._admin = admin
            return self._admin

    def announce(self, happening: Happening) -> None:
        """Sends an event to every client that registered for it."""
        for session in self.sessions:
            session.notify(happening)
