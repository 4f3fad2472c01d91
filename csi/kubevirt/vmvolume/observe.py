"""What is the case with one VmVolume, as cache, API server and target have it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from csi.cluster import Cluster
from csi.clustererrors import NotFoundError
from csi.errors import Code, Failure
from csi.kubevirt.controllers import VmControllers
from csi.kubevirt.lun import Lun
from csi.kubevirt.vmvolume.cache import Cache
from csi.kubevirt.vmvolume.decide import Seen
from csi.kubevirt.vmvolume.model import VmVolume
from csi.locks import VolumeLocks
from csi.moves import Moves
from csi.objects import Claim, StorageClass, Vmi
from csi.volumes import OwnedVolume, OwnedVolumes


@dataclass
class Work:
    """One VmVolume while it is worked on."""

    volume: VmVolume
    since: float
    """When the change came that it is looked at for, epoch seconds."""
    claim: Claim | None = None
    ours: bool = False
    """It is this node's: its machine is here, or its LUN may be."""
    attached: bool = False
    """Its LUN was made just now."""
    refused: str = ""
    not_grown: str = ""


class Observer:
    """Looks from one node, and asks for no more than is needed."""

    def __init__(
        self,
        cluster: Cluster,
        controllers: VmControllers,
        volumes: OwnedVolumes,
        node: str,
        cache: Cache,
        locks: VolumeLocks,
        moves: Moves,
    ) -> None:
        """Asks them; `moves` of volumes that came from another node."""
        self._moves = moves
        self._locks = locks
        self._cluster = cluster
        self._controllers = controllers
        self._volumes = volumes
        self._node = node
        self._cache = cache

    def seen(self, work: Work) -> Seen:
        """Returns it, and notes in `work` the claim and whether it is this node's."""
        volume = work.volume
        seen = Seen(self._node, time.time(), volume, self._machine(volume))
        seen = self._without_gone(seen)
        if not seen.concerns_us:
            return seen
        claim = self._claim(work)
        seen = self._without_gone(replace(seen, claim=claim))
        if seen.other is not None:
            return seen
        work.ours = seen.here or seen.in_charge == self._node
        handle = claim.handle if claim else None
        pod, luns = self._luns(seen, {handle, volume.status.volume})
        here = claim is not None and claim.node == self._node
        new = not luns and not volume.deleted_at
        owned = self._owned(handle, new=new) if handle and here else None
        refused = work.refused
        if claim and handle and seen.here and not luns and not refused and owned:
            refused = self._users(claim, handle)
        unbound = claim if claim and claim.volume is None else None
        return replace(
            seen,
            storage_class=self._class(unbound.storage_class) if unbound else None,
            rival=self._rival(volume),
            pod=pod,
            absent=self._controllers.absent(pod) if pod and not luns else None,
            luns=luns,
            size=owned.volume.size if owned else None,
            refused=refused,
            not_grown=work.not_grown,
        )

    def _owned(self, handle: str, *, new: bool) -> OwnedVolume | None:
        """Returns the volume of a claim of this node, if it is there.

        What was received is taken over for a `new` LUN. Whether it counts is asked before that is
        made (Reconciler).

        Raises:
            Failure: it cannot be taken over.
        """
        owned = self._volumes.find(handle)
        if not new or owned is not None:
            return owned
        with self._locks.hold(handle):
            return self._moves.find(handle)

    def _without_gone(self, seen: Seen) -> Seen:
        """Returns it with the node that there is no use in waiting for."""
        other = seen.waits_for
        if other is None or self._cluster.has_node(other):
            return seen
        return replace(seen, gone_node=other)

    def _machine(self, volume: VmVolume) -> Vmi | None:
        """Returns the VmVolume's machine.

        One that is not among this node's is asked for where an answer matters: before a LUN is
        taken away because its machine is not here any more, and for a VmVolume of which nobody
        has said whose it is.
        """
        known = self._cache.machine(volume.vm_key)
        if known is not None:
            return known
        node = volume.status.node
        unsaid = volume.status.phase is None or volume.finalizer
        if node != self._node and not (node is None and unsaid):
            return None
        try:
            return self._cluster.vmi(*volume.vm_key)
        except NotFoundError:
            return None

    def _claim(self, work: Work) -> Claim | None:
        """Returns the VmVolume's claim, and asks for it only after a change."""
        name = work.volume.claim_key

        def ask() -> Claim | None:
            try:
                return self._cluster.claim(*name)
            except NotFoundError:
                return None

        work.claim = self._cache.claim(name, ask)
        return work.claim

    def _class(self, name: str | None) -> StorageClass | None:
        try:
            return self._cluster.storage_class(name) if name else None
        except NotFoundError:
            return None

    def _luns(
        self, seen: Seen, handles: set[str | None]
    ) -> tuple[str | None, tuple[tuple[str, Lun], ...]]:
        """Returns the machine's pod here that has a controller, and the volumes' LUNs.

        Where a LUN may have been made of which the status does not tell (whoever made it has died
        before), every pod here is looked at.
        """
        pods = seen.machine.pods_on(self._node) if seen.machine else ()
        named = seen.volume.status.pod
        main: str | None = None
        found: list[tuple[str, Lun]] = []
        for pod in [*pods, *([named] if named and named not in pods else [])]:
            luns = self._luns_of(pod)
            main = pod if main is None and luns is not None and pod in pods else main
            found += [(pod, lun) for lun in luns or () if lun.volume in handles]
        if not found and named is None and seen.volume.finalizer and seen.in_charge == self._node:
            found = self.luns_anywhere(handles)
        return main, tuple(found)

    def _luns_of(self, pod: str) -> list[Lun] | None:
        """Returns the LUNs of a pod's controller; None if it has none."""
        try:
            return self._controllers.luns(pod)
        except Failure as failure:
            if failure.code not in (Code.NOT_FOUND, Code.INVALID_ARGUMENT):
                raise
            return None

    def luns_anywhere(self, handles: set[str | None]) -> list[tuple[str, Lun]]:
        """Returns the LUNs of volumes in all pods of this node."""
        return [found for each in handles if each for found in self._controllers.shown(each)]

    def _rival(self, volume: VmVolume) -> str | None:
        """Returns another VmVolume that has the claim, or would be first to get it here."""
        for other in self._cache.of_claim(volume.claim_key):
            if other.key == volume.key or volume.finalizer:
                continue
            machine = self._cache.machine(other.vm_key)
            waits = machine is not None and machine.phase == "Running" and not other.deleted_at
            first = (other.created, other.uid) < (volume.created, volume.uid)
            if other.finalizer or (waits and first):
                return other.name
        return None

    def _users(self, claim: Claim, handle: str) -> str:
        """Returns why a claim cannot become a LUN, if it is in use by pods."""
        if not self._volumes.has_kernel_face(handle):
            return ""
        pods = self._cluster.pods_of_claim(claim.namespace, claim.name)
        if not pods:
            return f"claim {claim.name} is still in use on this node: its pod has not ended yet"
        return f"claim {claim.name} is in use by pod {', '.join(pods)}: delete it first"
