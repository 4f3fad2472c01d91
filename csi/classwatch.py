"""Limits by VolumeAttributesClasses that other nodes' drivers were asked for.

csi-resizer, which is one for all nodes, asks the driver beside it to modify a volume, and then
notes the class at the PersistentVolume. By that the driver of the volume's own node is told:

    PersistentVolumes (all; of the node's own the class) --> queues --> claim, class --> target

A PersistentVolume has no label that tells its node, so all are watched, as csi-provisioner of each
node does anyway. The claim and the class are read where the class of a volume of this node, or of
an image of Ceph, is another one than before. When the driver begins it looks at all of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import structlog

from csi.cluster import Change, Cluster
from csi.clustererrors import ClusterError
from csi.errors import Code, Failure, describe
from csi.follow import follow
from csi.kinds import VOLUME
from csi.locks import VolumeLocks
from csi.objects import PersistentVolume, is_released
from csi.queue import Queue
from csi.volumelimits import VolumeLimits
from csi.volumenodes import IN_POD, VolumeNodes
from csi.volumes import OwnedVolumes
from csi.waitingclaims import WaitingClaims
from pydataplane.errors import TargetError

AGAIN_S = 60.0
"""Until a volume is looked at again whose claim asks for another class, or whose class makes no
sense; and at most between two attempts where something is away."""
WORKERS = 4
"""Of volumes of lvstores, and as many of images: those that wait for a cluster of Ceph which hangs
keep volumes of lvstores from nothing."""
TOLD_AFTER = 5
"""Failures in a row, half a second, after which the claim is told."""

log = structlog.get_logger()


class ClassWatch:
    """Limits the volumes of one node by the classes of their claims, in threads of its own."""

    def __init__(
        self,
        volumes: OwnedVolumes,
        limits: VolumeLimits,
        locks: VolumeLocks,
        nodes: VolumeNodes,
        waiting: WaitingClaims,
        connect: Callable[[], Cluster] | None = None,
        queue: Callable[[], Queue[str]] = lambda: Queue(AGAIN_S),
    ) -> None:
        """Uses `connect` to watch; by default only in a pod (elsewhere it does nothing).

        The locks are those of the driver's services; `waiting` tells claims what went wrong;
        `queue` makes one of names of volumes that are to be looked at.
        """
        self._volumes = volumes
        self._limits = limits
        self._locks = locks
        self._nodes = nodes
        self._waiting = waiting
        self._connect = connect or (Cluster.connect if IN_POD in os.environ else None)
        self._queues = {False: queue(), True: queue()}  # of lvstores' volumes, of images
        self._found: dict[str, PersistentVolume] = {}  # by name; of the size of what is here
        self._told: set[str] = set()  # names whose claims know that they are not limited

    def begin(self, stopped: threading.Event) -> None:
        """Begins, until `stopped`; it goes on by itself when the API server or a target is away."""
        if self._connect is None:
            return
        of_queues = [partial(self._work, queue) for queue in self._queues.values()]
        for work in (partial(self._watch, stopped), *of_queues * WORKERS):
            threading.Thread(target=work, name="classes of volumes", daemon=True).start()

    def _watch(self, stopped: threading.Event) -> None:
        follow(self._watched, VOLUME, stopped, self.note)
        for queue in self._queues.values():
            queue.close()

    def _watched(self) -> Cluster:
        """Returns who watches, of whom the index hears whether that goes on."""
        assert self._connect is not None
        cluster = self._connect()
        self._nodes.index.heard = partial(cluster.heard, VOLUME)
        return cluster

    def note(self, change: Change) -> None:
        """Takes one change of a PersistentVolume."""
        self._nodes.index.note(change)
        if change.what == "complete":
            return
        name = change.object["metadata"]["name"]
        if change.what == "gone" or is_released(change.object):
            self._found.pop(name, None)
            self._told.discard(name)
            return
        volume = PersistentVolume.of(change.object)
        here = volume.in_pool or volume.node == self._volumes.lvols.node
        if not (volume.ours and here) or volume.attributes_class is None or volume.deleting:
            return
        before = self._found.get(name)
        self._found[name] = replace(volume, context={})  # which nobody here asks for
        if before is None or before.attributes_class != volume.attributes_class:
            self._queues[volume.in_pool].put(name)

    def _work(self, queue: Queue[str]) -> None:
        while (due := queue.get()) is not None:
            try:
                self.look_at(due.key)
            except Exception:  # which look_at has no answer to
                log.exception("a look at a class failed unexpectedly", name=due.key)
                queue.put(due.key, AGAIN_S)

    def look_at(self, name: str) -> None:
        """Limits one volume, or has it looked at again later."""
        volume = self._found.get(name)
        if volume is None:
            for each in self._queues.values():
                each.done(name)
            return
        queue = self._queues[volume.in_pool]
        try:
            if not self._limit(volume):
                queue.put(name, AGAIN_S)
            queue.done(name)
            self._told.discard(name)
        except Exception as error:
            self._fail(name, volume, error)

    def _limit(self, volume: PersistentVolume) -> bool:
        """Limits a volume; False if its claim is to be asked again.

        Raises:
            ClusterError, TargetError, Failure: it is to be tried again.
        """
        owned = self._volumes.find(volume.handle)  # first: while it is away nobody else is asked
        if owned is None:
            # A pool need not be here; a volume of this node's is not there yet, or waits for its
            # key.
            return volume.in_pool
        if not self._nodes.fits(volume, owned):
            log.warning("a volume is not of the node or pool that it names", name=volume.name)
            return True
        if not self._nodes.counts(volume, owned):
            return False  # the other one may go
        wanted = self._nodes.class_for(volume)
        if wanted is None:
            return False
        self._limits.check_answers(owned.volume)
        with self._locks.hold(volume.handle):
            now = self._found.get(volume.name)
            if now is None or now.attributes_class != volume.attributes_class:
                return True  # the queue has it, if it is still there
            self._limits.give(owned.volume, wanted)
        return True

    def _fail(self, name: str, volume: PersistentVolume, error: Exception) -> None:
        if not isinstance(error, ClusterError | Failure | TargetError):
            log.exception("limits by a class failed unexpectedly", name=name)
        code, why = describe(error)
        lasts, queue = code is Code.INVALID_ARGUMENT, self._queues[volume.in_pool]
        if lasts:
            queue.put(name, AGAIN_S)
        else:
            queue.retry(name)
            lasts = queue.failures(name) >= TOLD_AFTER and code is not Code.ABORTED
        if not lasts or name in self._told:
            return
        self._told.add(name)
        log.warning("a volume is not limited by its class", name=name, reason=why)
        if volume.claim is not None:
            text = f"the limits of VolumeAttributesClass {volume.attributes_class} are not set on "
            text += f"node {self._volumes.lvols.node} yet: {why}"
            self._waiting.tell("/".join(volume.claim), "NotLimited", text)
