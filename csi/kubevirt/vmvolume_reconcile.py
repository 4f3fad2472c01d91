"""Brings one VmVolume to where `decide` wants it: look, decide, act, and look again.

It keeps nothing that it cannot do without: the objects are the API server's, the LUNs the target's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from csi.cluster import (
    CLAIM,
    VM_VOLUME,
    Cluster,
    ClusterError,
    ConflictError,
    NotFoundError,
    backoff,
)
from csi.errors import Code, Failure, HostError, describe
from csi.kubevirt import vmvolume_decide as step
from csi.kubevirt.controllers import Lun, VmControllers
from csi.kubevirt.vmvolume import FINALIZER, VmVolume
from csi.kubevirt.vmvolume_cache import Cache, Name
from csi.kubevirt.vmvolume_decide import Decision, Say, Seen, decide
from csi.kubevirt.vmvolume_metrics import VmVolumeMetrics
from csi.kubevirt.vmvolume_status import change, is_news, status
from csi.locks import VolumeLocks
from csi.objects import Claim, Object, StorageClass, Vmi
from csi.proto import csi_pb2 as pb
from csi.volumes import OwnedVolumes
from pydataplane.errors import RpcError, TargetError

ROUNDS_MAX = 12
"""Looks at one object in one go; each acts, so more of them means that something undoes it."""
SELECT_S = (2.0, 60.0)
"""Waits before a node is selected again for a claim that could not be made there."""
KEEP_REFUSAL = (Code.FAILED_PRECONDITION, Code.NOT_FOUND, Code.ALREADY_EXISTS)

log = structlog.get_logger()


@dataclass
class Work:
    """One VmVolume while it is worked on."""

    volume: VmVolume
    since: float
    """When the change came that it is looked at for, epoch seconds."""
    claim: Claim | None = None
    attached: bool = False
    """Its LUN was made just now."""
    refused: str = ""
    not_grown: str = ""


class Reconciler:
    """Acts for one node."""

    def __init__(
        self,
        cluster: Cluster,
        controllers: VmControllers,
        volumes: OwnedVolumes,
        locks: VolumeLocks,
        node: str,
        cache: Cache,
        metrics: VmVolumeMetrics,
        look_at: Callable[[Name], None],
        others_wait: Callable[[], bool],
    ) -> None:
        """Uses them; `look_at` asks for a look at another VmVolume, which this one let go for.

        While `others_wait` a new LUN's status is left for later: they get their LUNs first.
        """
        self._cluster = cluster
        self._controllers = controllers
        self._volumes = volumes
        self._locks = locks
        self._node = node
        self._cache = cache
        self._metrics = metrics
        self._look_at = look_at
        self._others_wait = others_wait
        #: By VmVolume's UID: when what made it possible came. Of those that the guest has not seen.
        self._begun: dict[str, float] = {}
        #: By claim's UID: how often this node was selected for it, and when. Of unbound claims.
        self._selected: dict[str, tuple[int, float]] = {}

    def volume(self, volume: VmVolume, since: float) -> Decision:
        """Does all that can be done now, and returns the last decision, whose waits are the rest.

        Raises:
            ClusterError, TargetError, Failure, HostError: it is to be tried again.
        """
        work = Work(volume, since)
        try:
            return self._settle(work)
        except (TargetError, Failure, HostError) as error:
            if work.volume.status.phase in (None, "Pending", "Failed"):
                code, text = describe(error)
                if code is not Code.ABORTED and work.volume.deleted_at is None:
                    say = Say("Pending", "TargetFailed", text, self._node, warning=True)
                    self._say(work, say)
            raise

    def forget(self, volume: VmVolume) -> None:
        """Forgets a VmVolume that is gone."""
        self._begun.pop(volume.uid, None)

    def _settle(self, work: Work) -> Decision:
        for _ in range(ROUNDS_MAX):
            try:
                decision = decide(self._look(work))
                for action in decision.actions:
                    self._do(action, work)
                if decision.say is not None:
                    self._say(work, decision.say)
            except ConflictError:
                self._cache.drop_claim(work.volume.claim_key)
                try:
                    found = self._cluster.get(VM_VOLUME, work.volume.name, work.volume.namespace)
                except NotFoundError:
                    return step.NOTHING
                self._took(work, VmVolume.of(found))
                continue
            if not decision.actions:
                return decision
            if work.attached and self._others_wait():
                return Decision(again_s=0.0)
        raise ClusterError(
            f"VmVolume {'/'.join(work.volume.key)} does not come to rest: somebody undoes what "
            "its controller does"
        )

    # What is the case

    def _look(self, work: Work) -> Seen:
        volume = work.volume
        seen = Seen(self._node, time.time(), volume, self._machine(volume))
        other = seen.waits_for
        if other is not None and not self._cluster.has_node(other):
            seen = replace(seen, gone_node=other)
        if not seen.concerns_us:
            return seen
        claim = self._claim(work)
        handle = claim.handle if claim else None
        pod, luns = self._luns(seen, {handle, volume.status.volume})
        here = claim is not None and claim.node == self._node
        owned = self._volumes.find(handle) if handle and here else None
        refused = work.refused
        if claim and handle and seen.here and not luns and not refused and owned:
            refused = self._users(claim, handle)
        unbound = claim if claim and claim.volume is None else None
        return replace(
            seen,
            claim=claim,
            storage_class=self._class(unbound.storage_class) if unbound else None,
            rival=self._rival(volume),
            pod=pod,
            absent=self._controllers.absent(pod) if pod and not luns else None,
            luns=luns,
            size=owned.volume.size if owned else None,
            refused=refused,
            not_grown=work.not_grown,
            select_wait_s=self._select_wait(unbound) if unbound else 0.0,
        )

    def _machine(self, volume: VmVolume) -> Vmi | None:
        """Returns the VmVolume's machine.

        One that is not among this node's is asked for where an answer matters: before a LUN is
        taken away because its machine is not here any more, and for a VmVolume that nobody has
        said anything about yet.
        """
        known = self._cache.machine(volume.vm_key)
        if known is not None:
            return known
        if volume.status.node != self._node and volume.status.phase is not None:
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
        """Returns the machine's pod here that has a controller, and the volumes' LUNs."""
        pods = seen.machine.pods_on(self._node) if seen.machine else ()
        before = seen.volume.status.pod
        main, found = None, []
        for pod in [*pods, *([before] if before and before not in pods else [])]:
            try:
                luns = self._controllers.luns(pod)
            except Failure as failure:
                if failure.code not in (Code.NOT_FOUND, Code.INVALID_ARGUMENT):
                    raise
                continue
            main = pod if main is None and pod in pods else main
            found += [(pod, lun) for lun in luns if lun.volume in handles]
        return main, tuple(found)

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

    def _select_wait(self, claim: Claim) -> float:
        count, last = self._selected.get(claim.uid, (0, 0.0))
        return max(0.0, last + backoff(count, *SELECT_S) - time.time()) if count else 0.0

    # What is done about it

    def _do(self, action: step.Action, work: Work) -> None:
        log.debug("vmvolume", name=work.volume.name, action=str(action))
        volume, claim = work.volume, work.claim
        match action:
            case step.HoldClaim():
                assert claim is not None
                wanted = [*claim.finalizers, FINALIZER]
                self._took_claim(work, self._cluster.set_finalizers(CLAIM, claim.object, wanted))
            case step.Hold():
                wanted = [*(volume.object["metadata"].get("finalizers") or ()), FINALIZER]
                found = self._cluster.set_finalizers(VM_VOLUME, volume.object, wanted)
                self._took(work, VmVolume.of(found))
            case step.Attach():
                self._attach(action, work)
            case step.Detach():
                self._controllers.detach(action.pod, action.handle)
                self._tell_of_release(action, work)
            case step.LetGoOfClaim():
                others = self._cache.of_claim(volume.claim_key)
                if not any(other.finalizer for other in others if other.key != volume.key):
                    name = volume.spec.claim_name
                    self._took_claim(
                        work,
                        self._cluster.set_finalizer(
                            CLAIM, name, volume.namespace, FINALIZER, present=False
                        ),
                    )
            case step.LetGo():
                left = self._cluster.set_finalizer(
                    VM_VOLUME, volume.name, volume.namespace, FINALIZER, present=False
                )
                self._took(work, VmVolume.of(left) if left else replace(volume, finalizer=False))
                for other in self._cache.of_claim(volume.claim_key):
                    if other.key != volume.key:
                        self._look_at(other.key)
            case step.SelectNode():
                assert claim is not None
                self._cluster.select_node(claim, self._node)
                count, _ = self._selected.get(claim.uid, (0, 0.0))
                self._selected[claim.uid] = count + 1, time.time()
                self._cache.drop_claim(volume.claim_key)
            case step.Grow():
                self._grow(action, work)
            case step.FinishExpansion():
                assert claim is not None
                self._cluster.finish_expansion(claim)
                self._cache.drop_claim(volume.claim_key)

    def _attach(self, action: step.Attach, work: Work) -> None:
        spec, claim = work.volume.spec, work.claim
        assert claim is not None
        self._selected.pop(claim.uid, None)
        try:
            target = self._controllers.attach(
                action.pod,
                action.handle,
                serial=spec.serial,
                read_only=spec.read_only or claim.read_only,
                removable=spec.removable,
            )
        except (Failure, RpcError) as error:
            if isinstance(error, Failure) and error.code not in KEEP_REFUSAL:
                raise
            work.refused = describe(error)[1]
            return
        work.attached = True
        self._begun[work.volume.uid] = work.since
        log.info(
            "attached",
            vmvolume="/".join(work.volume.key),
            pod=action.pod,
            volume=action.handle,
            target=target,
            milliseconds=round((time.time() - work.since) * 1000, 1),
        )

    def _grow(self, action: step.Grow, work: Work) -> None:
        try:
            with self._locks.hold(action.handle):
                wanted = pb.CapacityRange(required_bytes=action.size)
                self._volumes.grow(action.handle, wanted)
        except (Failure, RpcError) as error:
            if isinstance(error, Failure) and error.code is Code.ABORTED:
                raise
            work.not_grown = describe(error)[1]

    def _tell_of_release(self, action: step.Detach, work: Work) -> None:
        volume = work.volume
        words = log.bind(vmvolume="/".join(volume.key), pod=action.pod, volume=action.handle)
        if not action.forced:
            words.info("released")
            return
        self._metrics.forced.inc()
        text = (
            f"the guest had not released the disk {volume.spec.release_timeout_seconds} s after "
            "the deletion: it was taken away by force, and what the guest had not written is lost"
        )
        words.warning("released by force", reason=text)
        self._say(work, Say("Releasing", "ForcedRelease", text, self._node, warning=True))

    # What is said about it

    def _say(self, work: Work, say: Say) -> None:
        old = work.volume
        made = status(old, say, time.time())
        different = change(old.status, made)
        if different:
            given = {
                "metadata": {"resourceVersion": old.resource_version},
                "status": different,
            }
            try:
                found = self._cluster.patch(VM_VOLUME, old.name, old.namespace, given, status=True)
            except NotFoundError:
                return
            self._took(work, VmVolume.of(found))
        if is_news(old.status, say) and (say.warning or say.phase in ("Attached", "Releasing")):
            self._cluster.event(
                old.object, say.reason, say.message, warning=say.warning, node=self._node
            )
        self._measure(old, say)

    def _measure(self, old: VmVolume, say: Say) -> None:
        begun = self._begun.get(old.uid)
        if begun is None or say.lun is None:
            return
        _, lun = say.lun
        if lun.event_at and old.status.phase != "Attached":
            self._metrics.event_seconds.observe(max(0.0, lun.event_at - begun))
        if lun.guest_seen_at:
            self._metrics.seen_seconds.observe(max(0.0, lun.guest_seen_at - begun))
            self._begun.pop(old.uid, None)

    def _took(self, work: Work, volume: VmVolume) -> None:
        work.volume = volume
        self._cache.refresh_volume(volume)

    def _took_claim(self, work: Work, found: Object | None) -> None:
        """Keeps what the server answered to a change, so that the watch's word of it is no news."""
        self._cache.drop_claim(work.volume.claim_key)
        if found is not None and work.claim is not None:
            taken = Claim.of(found, work.claim.volume)
            work.claim = self._cache.claim(work.volume.claim_key, lambda: taken)

    # What was left behind

    def orphan(self, claim_key: Name) -> None:
        """Frees a claim that has our finalizer while no VmVolume names it.

        That is so after somebody took a VmVolume's finalizer off by hand.
        """
        if self._cache.of_claim(claim_key):
            return
        namespace, name = claim_key
        try:
            claim = self._cluster.claim(namespace, name)
        except NotFoundError:
            return
        if FINALIZER not in claim.finalizers or claim.node not in (None, self._node):
            return
        for found in self._cluster.items(VM_VOLUME, namespace):
            if found["spec"].get("claimName") == name:
                return  # the watch is about to tell
        for pod in self._controllers.pods() if claim.handle else ():
            for lun in self._controllers.luns(pod):
                if lun.volume == claim.handle and not lun.handed_over:
                    self._controllers.detach(pod, lun.volume)
        self._cluster.set_finalizer(CLAIM, name, namespace, FINALIZER, present=False)
        log.warning("freed a claim that no VmVolume names", claim="/".join(claim_key))
