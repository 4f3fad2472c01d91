"""Events of a claim whose volume is out of order on this node, and when it is in order again.

The kubelet does not ask for NodeGetVolumeHealth up to Kubernetes 1.36, and a user sees no more than
a pod that stands still. So the driver looks by itself and says it, where `kubectl describe pvc`
shows it. What lasts for less than two looks, as a restart of the target does, is not told; and of
one volume at most one event in six looks, which by default is one a minute, so that one that comes
and goes floods nobody.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from csi import handles
from csi.cluster import Cluster
from csi.clustererrors import ClusterError, NotFoundError
from csi.hosterrors import HostError
from csi.kinds import CLAIM
from csi.volumehealth import Entry, VolumeHealth
from csi.volumenodes import IN_POD
from pydataplane.errors import TargetError

LOOK_S = 10.0
"""Between two looks, seconds, where nothing else is asked for."""
SAME_TIMES = 2
"""A state that is seen so often in a row is told."""
QUIET_LOOKS = 6
"""Least time between two events of one volume, in times between two looks."""
HEALTHY = "VolumeHealthy"
"""Reason of the event of a volume that is in order again; others are NodeGetVolumeHealth's."""

log = structlog.get_logger()


@dataclass
class State:
    """What was seen and told of one volume; a reason, or HEALTHY."""

    told: str = HEALTHY
    seen: str = HEALTHY
    times: int = 0
    """In a row."""
    told_at: float | None = None
    """Of time.monotonic(): the last attempt."""

    def is_due(self, reason: str, now: float, quiet_s: float) -> bool:
        """Notes what is seen now, and returns whether it is to be told.

        `quiet_s` is the least time between two events, seconds.
        """
        self.times = self.times + 1 if reason == self.seen else 1
        self.seen = reason
        if reason == self.told or self.times < SAME_TIMES:
            return False
        return self.told_at is None or now - self.told_at >= quiet_s

    def tried(self, now: float, *, told: bool) -> None:
        """Notes that what was seen last is told, or could not be: then it is tried again."""
        self.told_at = now
        if told:
            self.told = self.seen


class HealthEvents:
    """Looks at the volumes that pods of this node have."""

    def __init__(
        self,
        health: VolumeHealth,
        node: str,
        connect: Callable[[], Cluster] | None = None,
        *,
        look_s: float = LOOK_S,
    ) -> None:
        """Uses `connect` when there is something to tell; by default only in a pod.

        `look_s` is the time between two looks, seconds.
        """
        self._health = health
        self._look_s = look_s
        self._node = node
        self._connect = connect or (Cluster.connect if IN_POD in os.environ else None)
        self._cluster: Cluster | None = None
        self._states: dict[str, State] = {}

    def start(self) -> None:
        """Looks from now on, in a thread of its own, where there is an API server."""
        if self._connect is not None:
            threading.Thread(target=self._work, name="health events", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                self.look(time.monotonic())
            except (TargetError, HostError, OSError) as error:
                log.warning("cannot look at the health of volumes", reason=str(error))
            except (LookupError, TypeError, ValueError):  # the next look may make sense
                log.exception("the health of volumes makes no sense")
            time.sleep(self._look_s)

    def look(self, now: float) -> None:
        """Looks once, at `now` of time.monotonic(), and tells what is due.

        Raises:
            TargetError: the target refuses to tell.
        """
        volumes = self._health.volumes()
        self._states = {each: self._states.get(each, State()) for each in volumes}
        if not volumes:
            return
        found = self._health.entries_of(volumes)
        for volume, entries in found.items():
            state = self._states[volume]
            reason = entries[0].reason if entries else HEALTHY
            if state.is_due(reason, now, QUIET_LOOKS * self._look_s):
                state.tried(now, told=self._tell(volume, entries))

    def _tell(self, volume: str, entries: list[Entry]) -> bool:
        """Makes the event; False if the API server does not take it now."""
        if not handles.is_made(volume):
            return True  # inline, or somebody else's: there is no claim
        assert self._connect is not None
        reason, message = HEALTHY, "the volume is in order again"
        if entries:
            reason, message = entries[0].reason, entries[0].message
        try:
            self._cluster = self._cluster or self._connect()
            claim = self._cluster.volume_by_handle(volume).claim
            if claim is None:
                return True
            about = self._cluster.get(CLAIM, claim[1], claim[0])
            said = f"on node {self._node}: {message}"
            warning = bool(entries)
            self._cluster.event(about, reason, said, warning=warning, node=self._node)
            log.info("told the claim", volume=volume, reason=reason, claim="/".join(claim))
        except NotFoundError:
            pass  # it was made for no claim, or that is gone
        except ClusterError as error:
            log.warning("cannot tell a claim of its volume's health", reason=str(error))
            return False
        return True
