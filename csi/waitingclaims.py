"""What a claim is told, and claims without room: told why, and looked at again in time.

csi-provisioner asks for this node's capacity before it takes such a claim. Where that is too little
on every node it passes over the claim without a word, and looks again when the claim changes or
after 15 minutes. So the driver says why, as an event of the claim, and notes on the claim, which is
a change, that there is room now. A claim that asks for what no volume can do is passed over in the
same way, and told why as well.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from queue import SimpleQueue

import structlog

from csi import DRIVER_NAME
from csi.cluster import Cluster
from csi.clustererrors import ClusterError, NotFoundError, UnreachableError
from csi.kinds import CLAIM
from csi.objects import SELECTED_NODE, quantity_bytes
from csi.volumenodes import IN_POD

ROOM = f"{DRIVER_NAME}/room"
"""On a claim: the node that has got room for it, and when."""
WAIT_S = 5.0
"""How long another node may take to find that it has room, seconds."""
RETRY_S = 5.0
"""How long to wait for an API server that does not answer, seconds."""

log = structlog.get_logger()


@dataclass(frozen=True)
class Asked:
    """A claim's class was asked about on this node."""

    claim: str
    """NAMESPACE/NAME."""
    lvstore: str
    free: int
    """Bytes that there were."""
    due: float
    """When to look whether somebody took it, of time.monotonic()."""


@dataclass(frozen=True)
class Said:
    """A claim is to be told something."""

    claim: str
    """NAMESPACE/NAME."""
    reason: str
    message: str


class WaitingClaims:
    """Does its work in a thread of its own: no call waits for the API server."""

    def __init__(
        self,
        node: str,
        connect: Callable[[], Cluster] | None = None,
        wait_s: float = WAIT_S,
        retry_s: float = RETRY_S,
    ) -> None:
        """Begins; `connect` is by default of the pod that it runs in, elsewhere it does nothing."""
        self._node = node
        self._connect = connect or (Cluster.connect if IN_POD in os.environ else None)
        self._wait_s = wait_s
        self._retry_s = retry_s
        self._queue: SimpleQueue[Asked | Said | str] = SimpleQueue()
        self._mutex = threading.Lock()
        self._waiting: dict[
            str, tuple[str, int]
        ] = {}  # claim -> lvstore and bytes that it asks for
        self._looked_at: set[str] = set()
        self._free: dict[str, int] = {}  # lvstore -> what was told last; of the size of the classes
        if self._connect is not None:
            threading.Thread(target=self._work, name="waiting claims", daemon=True).start()

    def tell(self, claim: str, reason: str, message: str) -> None:
        """Has a claim told something, as an event of it; once, whoever else tells it too."""
        if self._connect is not None:
            self._queue.put(Said(claim, reason, message))

    def asked(self, claim: str, lvstore: str, free: int) -> None:
        """Notes that a provisioner asked whether `claim` has room, and was told `free` bytes."""
        with self._mutex:
            self._free[lvstore] = free
            if self._connect is None or claim in self._looked_at:
                return
            self._looked_at.add(claim)
        self._queue.put(Asked(claim, lvstore, free, time.monotonic() + self._wait_s))

    def room(self, lvstore: str, free: int) -> None:
        """Notes that an lvstore has so many bytes free."""
        with self._mutex:
            self._free[lvstore] = free
            found = [
                claim
                for claim, (store, wanted) in self._waiting.items()
                if store == lvstore and wanted <= free
            ]
            for claim in found:
                del self._waiting[claim]
        for claim in found:
            self._queue.put(claim)

    def _work(self) -> None:
        assert self._connect is not None
        cluster: Cluster | None = None
        while True:
            job = self._queue.get()
            try:
                cluster = cluster or self._connect()
                if isinstance(job, Asked):
                    self._look(cluster, job)
                elif isinstance(job, Said):
                    self._say(cluster, job)
                else:
                    self._touch(cluster, job)
            except NotFoundError:
                pass  # it was deleted
            except ClusterError as error:
                log.warning("cannot look after a claim that waits for room", reason=str(error))
                if isinstance(error, UnreachableError):
                    time.sleep(self._retry_s)
                    self._queue.put(job)
            except (LookupError, TypeError, ValueError):  # the others are still looked after
                log.exception("a claim that waits for room makes no sense", job=str(job))

    def _look(self, cluster: Cluster, job: Asked) -> None:
        """Tells why, if nobody took the claim and it asks for more than there was."""
        time.sleep(max(0.0, job.due - time.monotonic()))
        with self._mutex:
            self._looked_at.discard(job.claim)
        namespace, name = job.claim.split("/")
        found = cluster.get(CLAIM, name, namespace)
        taken = SELECTED_NODE in (found["metadata"].get("annotations") or {})
        if taken or found["spec"].get("volumeName"):
            return
        wanted = quantity_bytes(found["spec"]["resources"]["requests"]["storage"])
        if wanted <= job.free:
            return
        with self._mutex:
            meanwhile = wanted <= self._free[job.lvstore]
            if not meanwhile:
                self._waiting[job.claim] = job.lvstore, wanted
        if meanwhile:
            self._touch(cluster, job.claim)
            return
        cluster.event(
            found,
            "WaitForRoom",
            f"waiting for a node with {wanted} bytes free in lvstore {job.lvstore}: delete "
            "volumes, add to an lvstore, or ask for less",
            warning=True,
            node=self._node,
        )

    def _say(self, cluster: Cluster, job: Said) -> None:
        namespace, name = job.claim.split("/")
        found = cluster.get(CLAIM, name, namespace)
        cluster.event(found, job.reason, job.message, warning=True, node=self._node, once=True)

    def _touch(self, cluster: Cluster, claim: str) -> None:
        namespace, name = claim.split("/")
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        note = {"metadata": {"annotations": {ROOM: f"{self._node} {now}"}}}
        cluster.patch(CLAIM, name, namespace, note)
        log.info("there is room for a claim that waited", claim=claim)
