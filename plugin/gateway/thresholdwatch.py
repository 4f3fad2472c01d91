"""Tells clients when a volume has more allocated than the threshold of its disk.

A target tells nothing by itself (its notifications are asked for, too), so it is asked: each
second, in one call for all disks with a threshold, and not at all while there is none. It answers
from counters that it keeps for each volume. SPDK's own target can be asked, too, where a message of
ours would need one of our own.

What is exceeded when it is set is told within that second, also if nothing is written any more:
QEMU waits for the next write. Who grows a store or a volume upon the event (oVirt's vdsm, for one)
and was too late to set the next threshold would else never hear of a guest that had stopped for
want of room. While no client listens, as just after a restart of this gateway, a threshold stays,
and the first that does is told. As in QEMU it is gone when it was told of. A disk that goes on with
another volume (a pivot, `virtlun volume move`) keeps its threshold, against what that one has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import structlog

from plugin.gateway.errors import Code, GatewayError, UpstreamError
from plugin.gateway.events import Announced, ThresholdEvent, lifecycle
from plugin.gateway.messages import Domain
from plugin.gateway.services import Services
from plugin.gateway.thresholds import Run, Threshold
from pydataplane.domain.translate import LunPlan

POLL_S = 1.0
"""How often the target is asked, seconds."""

_STOPPED = 5
"""VIR_DOMAIN_EVENT_STOPPED: also of one that crashed, or left for another host."""

_log = structlog.get_logger(__name__)


class ThresholdWatch:
    """What the targets have allocated, against what clients want to hear of."""

    def __init__(self, services: Services, is_heard: Callable[[Announced], bool]) -> None:
        """Does nothing before `run`; `is_heard` tells whether a client listens to an event."""
        self._services, self._is_heard = services, is_heard
        self._thresholds = services.thresholds
        self._said: dict[str, str] = {}

    async def run(self) -> None:
        """Goes on until it is cancelled."""
        while True:
            await self._thresholds.any.wait()
            try:
                await self.look()
                self._said.pop("all", None)
            except GatewayError as error:
                self._say("all", str(error))
            except Exception:
                _log.exception("looking for exceeded thresholds failed by a defect")
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """Asks the targets once, and tells of what is exceeded.

        Raises:
            GatewayError: neither a target answers, nor libvirtd.
        """
        watched: list[tuple[bytes, LunPlan, Threshold]] = []
        for uuid, run in list(self._thresholds.runs.items()):
            for lun in await self._luns(uuid, run):
                threshold = self._thresholds.of(uuid, lun.dev)
                if threshold is not None:
                    watched.append((uuid, lun, threshold))
        if not watched:
            return
        sizes = await self._services.target.sizes([lun.bdev_name for _, lun, _ in watched])
        for uuid, lun, threshold in watched:
            found = sizes.get(lun.bdev_name)
            if found is not None and found.allocated > threshold.allocated:
                await self._tell(uuid, lun, threshold, found.allocated)

    async def _luns(self, uuid: bytes, run: Run) -> tuple[LunPlan, ...]:
        """Returns the disks of a domain; forgets thresholds of those that went, or of its run."""
        try:
            if not run.checked:
                if await self._running(uuid, run) is None:
                    return ()
                run.checked = True
            seen = await self._services.domain_cache.current(run.dom)
        except UpstreamError as error:  # others are not to wait for it
            self._say(run.dom.name, str(error))
            return ()
        self._said.pop(run.dom.name, None)
        if seen.plan is not None and self._thresholds.runs.get(uuid) is run:
            for dev in run.by_dev.keys() - {lun.dev for lun in seen.luns}:
                self._thresholds.forget(uuid, dev)
        return seen.luns

    async def _running(self, uuid: bytes, run: Run) -> Domain | None:
        """Returns the domain if its run is still that one; else its thresholds are forgotten."""
        try:
            dom = await (await self._services.admin()).lookup(uuid)
        except UpstreamError as error:
            if error.code != Code.NO_DOMAIN:
                raise
            dom = None
        if dom is not None and dom.id == run.dom.id:
            return dom
        if self._thresholds.runs.get(uuid) is run:
            self._thresholds.domain_stopped(uuid)
        return None

    async def _tell(self, uuid: bytes, lun: LunPlan, threshold: Threshold, allocated: int) -> None:
        """Tells of a threshold that is exceeded, unless it is another by now, or nobody listens."""
        run = self._thresholds.runs.get(uuid)
        if run is None:
            return
        path = lun.volume.path(self._services.settings.path_prefix)
        excess = allocated - threshold.allocated
        event = ThresholdEvent(run.dom, threshold.name, path, threshold.allocated, excess)
        if not self._is_heard(event):
            return
        dom = await self._running(uuid, run)
        if dom is None or self._thresholds.of(uuid, lun.dev) is not threshold:
            return
        self._services.announce(replace(event, dom=dom))
        self._thresholds.forget(uuid, lun.dev)
        _log.info("threshold exceeded", domain=dom.name, dev=lun.dev, allocated=allocated)

    def lifecycle_event(self, payload: bytes) -> None:
        """Takes a lifecycle event of libvirtd's."""
        told = lifecycle(payload)
        if told is not None and told[1] == _STOPPED:
            self._thresholds.domain_stopped(told[0].uuid)

    def connection_lost(self) -> None:
        """Is told that libvirtd closed the connection: events may be missed."""
        self._thresholds.uncheck()

    def _say(self, what: str, text: str) -> None:
        """Logs a sentence once, until it is another."""
        if self._said.get(what) != text:
            self._said[what] = text
            _log.warning("thresholds not looked at", of=what, error=text)
