"""The VmVolume controller of one node: three watches fill a queue, one worker empties it.

    VmVolumes (all) ----------+
    machines of this node ----+--> cache, queue of keys --> Reconciler --> API server, target
    claims (all; few kept) ---+

VmVolumes are watched whole. A node knows which are for it by its machines, which move; a watch that
the server narrows by `status.node` tells of one that goes to another node as of one that is
deleted, and of none that a node which is gone has left behind. There are as many as disks that were
attached to running machines. Claims have no label of ours before a VmVolume names them, so that of
them the metadata alone is watched (csi.apitransport).

It is level-triggered: a key in the queue says only that something may be different. Nothing is
done before VmVolumes and machines are known, so a controller that starts anew takes nothing away.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Literal, NamedTuple

import structlog
from prometheus_client import CollectorRegistry

from csi.cluster import Change, Cluster
from csi.clustererrors import ClusterError
from csi.errors import Failure
from csi.follow import follow
from csi.hosterrors import HostError
from csi.kinds import CLAIM, VM_VOLUME, VMI, Kind
from csi.kubevirt.controllers import VmControllers
from csi.kubevirt.vmvolume.cache import Cache, Name
from csi.kubevirt.vmvolume.metrics import PhaseCollector, VmVolumeMetrics
from csi.kubevirt.vmvolume.model import FINALIZER, VmVolume
from csi.kubevirt.vmvolume.reconcile import Reconciler
from csi.locks import VolumeLocks
from csi.moves import Moves
from csi.objects import Object, Vmi
from csi.queue import Due, Queue
from csi.volumes import OwnedVolumes
from pydataplane.errors import TargetError

NODE_LABEL = "kubevirt.io/nodeName"
"""On a VirtualMachineInstance, by KubeVirt: the node that it is on; virt-handler watches by it."""
RESYNC_S = 300.0
"""What this node has is looked at so often although nothing told of a change."""
STRANGER_S = (0.2, 1.0)
"""A VmVolume of a machine that is not here is looked at after so long: most likely another node
says whose it is until then."""
LEFT_S = (60.0, 120.0)
"""One that another node is to let go of is looked at after so long: that node may be gone."""
ORPHAN_S = 2.0
"""A claim with our finalizer and no VmVolume is looked at after so long."""
REMIND = 30
"""A failure is a warning the first time, and then each so many times, which is 5 minutes."""
STOP_S = 5.0

log = structlog.get_logger()


class Key(NamedTuple):
    """What is to be looked at: a VmVolume, or a claim that may have been left behind."""

    what: Literal["volume", "claim"]
    name: Name


class VmVolumeController:
    """Acts on the VmVolumes of one node's machines, in threads of its own."""

    def __init__(
        self,
        cluster: Cluster,
        controllers: VmControllers,
        volumes: OwnedVolumes,
        locks: VolumeLocks,
        node: str,
        registry: CollectorRegistry,
        moves: Moves | None = None,
    ) -> None:
        """Uses them for `node`; the locks are those of the driver's services."""
        self._cluster = cluster
        self._node = node
        self._cache = Cache()
        self._queue: Queue[Key] = Queue()
        self._metrics = VmVolumeMetrics(registry)
        registry.register(PhaseCollector(self._cache, node))
        self._reconciler = Reconciler(
            *(cluster, controllers, volumes, locks, node, self._cache, self._metrics),
            lambda name: self._queue.put(Key("volume", name)),
            self._queue.waiting,
            moves,
        )
        self._stop = threading.Event()
        self._known = {VM_VOLUME: threading.Event(), VMI: threading.Event()}
        watches: list[tuple[Kind, dict[str, str] | None, Callable[[Change], None]]] = [
            (VM_VOLUME, None, self._volume_changed),
            (VMI, {NODE_LABEL: node}, self._machine_changed),
            (CLAIM, None, self._claim_changed),
        ]
        self._threads = [
            threading.Thread(target=self._watch, args=each, name=each[0].plural, daemon=True)
            for each in watches
        ]
        self._worker = threading.Thread(target=self._work, name="vmvolume worker", daemon=True)

    def start(self) -> None:
        """Begins; it goes on by itself when the API server or the target is away."""
        for thread in (*self._threads, self._worker):
            thread.start()

    def stop(self) -> None:
        """Lets what is being done finish; LUNs stay as they are."""
        self._stop.set()
        self._queue.close()
        self._worker.join(STOP_S)

    # Watches

    def _watch(
        self, kind: Kind, labels: dict[str, str] | None, note: Callable[[Change], None]
    ) -> None:
        def changed(change: Change) -> None:
            if change.what != "complete":
                note(change)
            elif kind in self._known:
                self._known[kind].set()

        follow(lambda: self._cluster, kind, self._stop, changed, labels=labels)

    def _volume_changed(self, change: Change) -> None:
        if change.what == "gone":
            if (old := self._cache.drop_volume(_name(change.object))) is None:
                return
            self._reconciler.forget(old)
            for other in self._cache.of_claim(old.claim_key):
                self._queue.put(Key("volume", other.key))
            if old.finalizer and old.status.node in (None, self._node):
                self._queue.put(Key("claim", old.claim_key), ORPHAN_S)
            return
        volume = VmVolume.of(change.object)
        if not self._cache.put_volume(volume):
            return
        self._queue.put(Key("volume", volume.key), self._delay(volume))

    def _delay(self, volume: VmVolume) -> float:
        """Returns how long to leave a VmVolume to the node that has most to do with it."""
        if volume.deleted_at is not None and volume.status.node not in (None, self._node):
            return random.uniform(*LEFT_S)  # noqa: S311 - not a secret
        unsaid = volume.status.node is None and (volume.status.phase is None or volume.finalizer)
        if unsaid and not self._cache.machine(volume.vm_key):
            return random.uniform(*STRANGER_S)  # noqa: S311 - not a secret
        return 0.0

    def _machine_changed(self, change: Change) -> None:
        name = _name(change.object)
        if change.what == "gone":
            self._cache.drop_machine(name)
        elif not self._cache.put_machine(Vmi.of(change.object)):
            return
        for volume in self._cache.of_machine(name):
            self._queue.put(Key("volume", volume.key))

    def _claim_changed(self, change: Change) -> None:
        name = _name(change.object)
        version = change.object["metadata"].get("resourceVersion")
        if not self._cache.drop_claim(name, version):
            return
        users = self._cache.of_claim(name)
        for volume in users:
            self._queue.put(Key("volume", volume.key))
        left = FINALIZER in (change.object["metadata"].get("finalizers") or ())
        if left and not users and change.what == "present":
            self._queue.put(Key("claim", name), ORPHAN_S)

    # The worker

    def _work(self) -> None:
        for known in self._known.values():
            while not known.wait(1.0):
                if self._stop.is_set():
                    return
        log.info("looking after VmVolumes", count=len(self._cache.volumes()))
        while (due := self._queue.get()) is not None:
            try:
                self._look_at(due)
            except (ClusterError, TargetError, Failure, HostError) as error:
                self._fail(due.key, str(error))
            except Exception as error:
                log.exception("the VmVolume controller failed unexpectedly", name=due.key.name)
                self._fail(due.key, str(error))

    def _look_at(self, due: Due[Key]) -> None:
        key = due.key
        if key.what == "claim":
            self._reconciler.orphan(key.name)
            self._queue.done(key)
            return
        volume = self._cache.volume(key.name)
        if volume is None:
            self._queue.done(key)
            return
        decision = self._reconciler.volume(volume, due.since)
        result = decision.say.phase if decision.say else "none"
        self._metrics.reconciles.labels(result).inc()
        if decision.retry:
            self._queue.retry(key)
        else:
            self._queue.done(key)
        if decision.again_s is not None:
            self._queue.put(key, decision.again_s)
        elif decision.say and decision.say.node == self._node:
            self._queue.put(key, RESYNC_S)

    def _fail(self, key: Key, reason: str) -> None:
        self._metrics.reconciles.labels("error").inc()
        wait = self._queue.retry(key)
        failures = self._queue.failures(key)
        loud = failures == 1 or failures % REMIND == 0
        bound = log.bind(what=key.what, name=key.name, reason=reason)
        say = bound.warning if loud else bound.debug
        say("cannot look after it now", failures=failures, again_s=round(wait, 3))


def _name(found: Object) -> Name:
    meta = found["metadata"]
    return meta["namespace"], meta["name"]
