"""Brings one VmVolume to where `decide` wants it: look, decide, act, and look again.

It keeps nothing that it cannot do without: the objects are the API server's, the LUNs the target's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from csi.cluster import Cluster, backoff
from csi.clustererrors import ClusterError, ConflictError, NotFoundError
from csi.errors import Code, Failure, describe
from csi.hosterrors import HostError
from csi.kinds import CLAIM, VM_VOLUME, Kind
from csi.kubevirt.controllers import VmControllers
from csi.kubevirt.lun import InUse
from csi.kubevirt.vmvolume import decide as step
from csi.kubevirt.vmvolume.cache import Cache, Name
from csi.kubevirt.vmvolume.decide import Decision, Say, Seen, decide
from csi.kubevirt.vmvolume.metrics import VmVolumeMetrics
from csi.kubevirt.vmvolume.model import FINALIZER, VmVolume
from csi.kubevirt.vmvolume.observe import Observer, Work
from csi.kubevirt.vmvolume.status import change, is_news, status
from csi.locks import VolumeLocks
from csi.moves import Moves
from csi.objects import Claim, Object
from csi.proto import csi_pb2 as pb
from csi.volumes import OwnedVolumes
from pydataplane.errors import RpcError, TargetError

ROUNDS_MAX = 12
"""Looks at one object in one go; each acts, so more of them means that something undoes it."""
SELECT_S = (2.0, 60.0)
"""Waits before a node is selected again for a claim that could not be made there."""
KEEP_REFUSAL = (Code.FAILED_PRECONDITION, Code.NOT_FOUND, Code.ALREADY_EXISTS)

log = structlog.get_logger()


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
        moves: Moves | None = None,
    ) -> None:
        """Uses them; `look_at` asks for a look at another VmVolume, which this one let go for.

        While `others_wait` a new LUN's status is left for later: they get their LUNs first.
        """
        self._moves = moves or Moves(volumes)
        self._observer = Observer(*(cluster, controllers, volumes, node, cache, locks), self._moves)
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
        #: By VmVolume's UID: how often this node was selected for its claim, and not before when
        #: again, monotonic. Of those whose claims are not bound yet.
        self._selected: dict[str, tuple[int, float]] = {}

    def volume(self, volume: VmVolume, since: float) -> Decision:
        """Does all that can be done now, and returns the last decision, whose waits are the rest.

        Raises:
            ClusterError, TargetError, Failure, HostError: it is to be tried again.
        """
        work = Work(volume, since)
        try:
            return self._reconcile(work)
        except (TargetError, Failure, HostError) as error:
            code, text = describe(error)
            if work.ours and code is not Code.ABORTED:
                self._say_failure(work, text)
            raise

    def forget(self, volume: VmVolume) -> None:
        """Forgets a VmVolume that is gone."""
        self._begun.pop(volume.uid, None)
        self._selected.pop(volume.uid, None)

    def _reconcile(self, work: Work) -> Decision:
        for _ in range(ROUNDS_MAX):
            try:
                decision = decide(self._seen(work))
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

    def _seen(self, work: Work) -> Seen:
        _, selected_again = self._selected.get(work.volume.uid, (0, 0.0))
        wait = max(0.0, selected_again - time.monotonic())
        return replace(self._observer.seen(work), select_wait_s=wait)

    # What is done about it

    def _do(self, action: step.Action, work: Work) -> None:
        log.debug("vmvolume", name=work.volume.name, action=str(action))
        volume, claim = work.volume, work.claim
        match action:
            case step.TakeCharge():
                self._took(work, self._write(volume, {"node": self._node}))
            case step.HoldClaim():
                assert claim is not None
                self._took_claim(work, self._held(CLAIM, claim.object))
            case step.Hold():
                self._took(work, VmVolume.of(self._held(VM_VOLUME, volume.object)))
            case step.Attach():
                self._attach(action, work)
            case step.Detach():
                self._detach(action, work)
            case step.LetGoOfClaim():
                self._let_go_of_claim(work)
            case step.LetGo():
                self._let_go(work)
            case step.SelectNode():
                self._select_node(work)
            case step.Grow():
                self._grow(action, work)
            case step.FinishExpansion():
                assert claim is not None
                self._cluster.finish_expansion(claim)
                self._cache.drop_claim(volume.claim_key)

    def _let_go_of_claim(self, work: Work) -> None:
        """Takes the finalizer off the claim, unless another VmVolume has its LUN."""
        others = self._cache.of_claim(work.volume.claim_key)
        if not any(other.finalizer for other in others if other.key != work.volume.key):
            left = self._released(CLAIM, work.claim.object) if work.claim else None
            self._took_claim(work, left)

    def _let_go(self, work: Work) -> None:
        """Takes the finalizer off the VmVolume, and lets the next one of its claim look."""
        volume = work.volume
        left = self._released(VM_VOLUME, volume.object)
        self._took(work, VmVolume.of(left) if left else replace(volume, finalizer=False))
        for other in self._cache.of_claim(volume.claim_key):
            if other.key != volume.key:
                self._look_at(other.key)

    def _select_node(self, work: Work) -> None:
        assert work.claim is not None
        self._cluster.select_node(work.claim, self._node)
        count = self._selected.get(work.volume.uid, (0, 0.0))[0] + 1
        self._selected[work.volume.uid] = count, time.monotonic() + backoff(count, *SELECT_S)
        self._cache.drop_claim(work.volume.claim_key)

    def _held(self, kind: Kind, found: Object) -> Object:
        """Puts our finalizer onto an object and returns it."""
        return self._cluster.set_finalizers(kind, found, [*_finalizers(found), FINALIZER])

    def _released(self, kind: Kind, found: Object) -> Object | None:
        """Takes our finalizer off an object and returns it; None if it is gone."""
        left = [each for each in _finalizers(found) if each != FINALIZER]
        if left == _finalizers(found):
            return found
        try:
            return self._cluster.set_finalizers(kind, found, left)
        except NotFoundError:
            return None

    def _attach(self, action: step.Attach, work: Work) -> None:
        spec = work.volume.spec
        self._selected.pop(work.volume.uid, None)
        try:
            target = self._controllers.attach(
                action.pod,
                action.handle,
                serial=spec.serial,
                read_only=action.read_only,
                removable=spec.removable,
                check=lambda: self._check_counts(work, action.handle),
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

    def _check_counts(self, work: Work, handle: str) -> None:
        """Raises unless a volume is this node's at this moment: claims are known from before.

        Its lock is held.

        Raises:
            Failure: FAILED_PRECONDITION, it was sent to another node; UNAVAILABLE, the API server
                does not say.
        """
        try:
            self._moves.get(handle)
        except Failure:
            self._cache.drop_claim(work.volume.claim_key)
            raise

    def _detach(self, action: step.Detach, work: Work) -> None:
        try:
            self._controllers.detach(action.pod, action.handle, unless_used=action.unless_used)
        except InUse as error:  # since it was looked at; the next look sees it
            name = "/".join(work.volume.key)
            log.debug("not released", vmvolume=name, pod=action.pod, reason=str(error))
            return
        self._tell_of_release(action, work)

    def _grow(self, action: step.Grow, work: Work) -> None:
        try:
            with self._locks.hold(action.handle):
                wanted = pb.CapacityRange(required_bytes=action.size)
                self._moves.get(action.handle)  # what does not count is left alone
                self._volumes.grow(action.handle, wanted)
        except (Failure, RpcError) as error:
            if isinstance(error, Failure) and error.code is Code.ABORTED:
                raise
            work.not_grown = describe(error)[1]

    def _tell_of_release(self, action: step.Detach, work: Work) -> None:
        volume = work.volume
        bound = log.bind(vmvolume="/".join(volume.key), pod=action.pod, volume=action.handle)
        if not action.forced:
            bound.info("released")
            return
        self._metrics.forced.inc()
        text = (
            f"the guest had not released the disk {volume.spec.release_timeout_seconds} s after "
            "the deletion: it was taken away by force, and what the guest had not written is lost"
        )
        bound.warning("released by force", reason=text)
        self._say(work, Say("Releasing", "ForcedRelease", text, self._node, warning=True))

    # What is said about it

    def _say(self, work: Work, say: Say) -> None:
        old = work.volume
        made = status(old, say, time.time())
        different = change(old.status, made)
        if different:
            try:
                self._took(work, self._write(old, different))
            except NotFoundError:
                return
        self._measure(old, say)
        if is_news(old.status, say) and (say.warning or say.phase in ("Attached", "Releasing")):
            self._tell(old, say)

    def _write(self, volume: VmVolume, different: Object) -> VmVolume:
        """Merges what is different into a VmVolume's status; ConflictError if it has changed."""
        meta = {"resourceVersion": volume.resource_version}
        given = {"metadata": meta, "status": different}
        found = self._cluster.patch(VM_VOLUME, volume.name, volume.namespace, given, status=True)
        return VmVolume.of(found)

    def _say_failure(self, work: Work, text: str) -> None:
        """Says why nothing can be done, unless the guest has the disk and is to keep it."""
        phase = work.volume.status.phase
        if work.volume.deleted_at is not None and work.volume.finalizer:
            self._say(
                work,
                Say("Releasing", "TargetFailed", text, self._node, warning=True, keeps_lun=True),
            )
        elif phase in (None, "Pending", "Failed"):
            self._say(work, Say("Pending", "TargetFailed", text, self._node, warning=True))

    def _tell(self, volume: VmVolume, say: Say) -> None:
        """Makes it an Event; the status says the same, so without one nothing is amiss."""
        try:
            self._cluster.event(
                volume.object, say.reason, say.message, warning=say.warning, node=self._node
            )
        except ClusterError as error:
            log.warning("no event", vmvolume="/".join(volume.key), reason=str(error))

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
        work.volume = self._cache.refresh_volume(volume)

    def _took_claim(self, work: Work, found: Object | None) -> None:
        """Keeps what the server answered to a change, so that the watch's word of it is no news."""
        name = work.volume.claim_key
        work.claim = Claim.of(found, work.claim.volume) if found and work.claim else None
        self._cache.keep_claim(name, work.claim)

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
        if FINALIZER not in claim.finalizers:
            return
        if claim.node not in (None, self._node) and self._cluster.has_node(claim.node):
            return
        for found in self._cluster.items(VM_VOLUME, namespace):
            if found["spec"].get("claimName") == name:
                return  # the watch is about to tell
        for pod, lun in self._observer.luns_anywhere({claim.handle}):
            if not lun.handed_over:
                self._controllers.detach(pod, lun.volume)
        self._released(CLAIM, claim.object)
        log.warning("freed a claim that no VmVolume names", claim="/".join(claim_key))


def _finalizers(found: Object) -> list[str]:
    return list(found["metadata"].get("finalizers") or ())
