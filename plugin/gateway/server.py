"""The gateway process: listeners, sessions, and what the sessions share."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog

from plugin.config import LIBVIRTDS_PLACES, AuthSetting, Config
from plugin.gateway import libvirtdconf, runningbackups
from plugin.gateway.admin import AdminConnection
from plugin.gateway.autoresume import AutoResume
from plugin.gateway.blockjobs import BlockJobs
from plugin.gateway.budget import Budget
from plugin.gateway.domaincache import DomainCache
from plugin.gateway.domstats import DomainStats
from plugin.gateway.events import Announced
from plugin.gateway.imagegrants import ImageGrants
from plugin.gateway.ioerrors import IoErrors
from plugin.gateway.journal import Journal
from plugin.gateway.listen import Admission, Listener, as_at, handed_over, in_place_of, listen
from plugin.gateway.locks import Locks
from plugin.gateway.loop import ReconcileLoop
from plugin.gateway.parsing import Parsers
from plugin.gateway.procs import Proc
from plugin.gateway.services import Services
from plugin.gateway.session import Session
from plugin.gateway.storage.pools import Pools
from plugin.gateway.targets import Targets
from plugin.gateway.thresholds import Thresholds
from plugin.gateway.thresholdwatch import ThresholdWatch
from plugin.gateway.xmlcache import XmlCache

STOP_S = 15.0
"""How long calls begun are given to finish at a stop, seconds."""

_log = structlog.get_logger(__name__)


class Gateway:
    """Runs until `stop`."""

    def __init__(self, config: Config) -> None:
        """Makes no connection and no socket yet: see `open` and `run`."""
        self.config = config.gateway
        self.sessions: set[Session] = set()
        libvirtd = (self.config.upstream, self.config.uri, self.config.auth_conf)
        self.admin = AdminConnection(*libvirtd)
        self.asking = AdminConnection(*libvirtd)
        settings = config.settings()
        locks = Locks()
        target = Targets(config)
        self._parsers = Parsers()
        paused: dict[bytes, dict[str, str]] = {}
        block_jobs = BlockJobs(self.announce)
        xml_cache = XmlCache(self._parsers.replies, block_jobs)
        domain_cache = DomainCache(
            self.admin.get, self.asking.get, self._parsers.domains, xml_cache.prefetch
        )
        thresholds = Thresholds(config.gateway.state_dir)
        self.services = Services(
            config=config.gateway,
            hook=config.hook,
            settings=settings,
            budget=Budget(),
            parsers=self._parsers,
            xml_cache=xml_cache,
            domain_cache=domain_cache,
            domain_stats=DomainStats(
                domain_cache, target, locks, settings.path_prefix, paused, thresholds
            ),
            target=target,
            locks=locks,
            journal=Journal(config.gateway.state_dir),
            admin=self.admin.get,
            announce=self.announce,
            hold_back=self.hold_back,
            block_jobs=block_jobs,
            backups={},
            ended_backups={},
            paused=paused,
            auto_resume=AutoResume(config.gateway.state_dir),
            image_grants=ImageGrants(config.gateway.state_dir),
            thresholds=thresholds,
            pools=Pools(target, settings, config.gateway.state_dir),
        )
        self.loop = ReconcileLoop(self.services)
        self.io_errors = IoErrors(self.services)
        self.thresholds = ThresholdWatch(self.services, self.is_heard)
        events = {
            Proc.CALLBACK_LIFECYCLE.value: self._lifecycle_event,
            Proc.CALLBACK_METADATA_CHANGE.value: self.services.domain_cache.event,
            Proc.CALLBACK_DEVICE_REMOVED.value: self._device_removed,
        }
        self.admin.watch(events, self._connection_lost)
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[Listener] = []

    def _lifecycle_event(self, payload: bytes) -> None:
        self.services.domain_cache.event(payload)
        self.loop.lifecycle_event(payload)
        self.io_errors.lifecycle_event(payload)
        self.thresholds.lifecycle_event(payload)

    def _device_removed(self, payload: bytes) -> None:
        self.services.domain_cache.event(payload)
        self.loop.device_removed(payload)

    def _connection_lost(self) -> None:
        self.services.domain_cache.forget()
        self.loop.connection_lost()
        self.thresholds.connection_lost()

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
            libvirtdconf.configured(
                libvirtdconf.configuration_of(self.config.libvirtd_conf, upstream),
                read_only=read_only,
            )
            if setting == "auto"
            else libvirtdconf.Auth(setting)
        )
        sock = given.get(str(path))
        ours = sock is None
        if sock is None:
            sock = listen(path, self._admission(upstream, mode, read_only=read_only))
        slots = asyncio.Semaphore(self.config.max_clients)
        self._listeners.append(Listener(sock, path, upstream, read_only, auth, ours, slots))
        _log.info("listening", path=str(path), upstream=str(upstream), auth=str(auth))

    def _admission(self, upstream: Path, mode: str, *, read_only: bool) -> Admission:
        """Returns who may connect, by the configuration and by libvirtd's own socket.

        In libvirtd's place nobody is to use libvirtd's own: there its configuration counts.
        """
        if self.config.listen.parent in LIBVIRTDS_PLACES:
            conf = libvirtdconf.configuration_of(self.config.libvirtd_conf, upstream)
            found = in_place_of(upstream, conf, read_only=read_only)
        else:
            found = as_at(upstream, read_only=read_only)
        given = self.config.socket_group
        return Admission(
            found.mode if mode == "auto" else int(mode, 8),
            found.group if given == "auto" else given,
        )

    async def run(self) -> None:
        """Serves clients until `stop` is called, then lets calls begun finish."""
        accepting = [asyncio.create_task(self._accept(item)) for item in self._listeners]
        leftovers = self.services.pools.leftovers
        accepting.append(
            asyncio.create_task(leftovers.clean(self.services.target, self.services.locks))
        )
        accepting.append(asyncio.create_task(self.thresholds.run()))
        if self.config.reconcile:
            accepting.append(asyncio.create_task(self.loop.run()))
            accepting.append(asyncio.create_task(self.io_errors.run()))
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
            await runningbackups.stop_all(self.services)
            await self.services.block_jobs.close()
            await self.admin.close()
            await self.asking.close()
            self._parsers.close()
            self.services.target.close()
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
            session = Session(self.services, listener, sock)
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

    def announce(self, change: Announced) -> None:
        """Sends an event to every client that registered for it."""
        for session in self.sessions:
            session.notify(change)

    def is_heard(self, change: Announced) -> bool:
        """Whether a client registered for an event."""
        return any(session.hears(change) for session in self.sessions)

    def hold_back(self, uuid: bytes, begins: bool) -> None:
        """Keeps the next event of a definition that is replaced from all clients of now."""
        for session in self.sessions:
            if begins:
                session.event_filter.expect(uuid)
            else:
                session.event_filter.cancel(uuid)
