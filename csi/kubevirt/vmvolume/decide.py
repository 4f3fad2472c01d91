"""What is to be done about a VmVolume, as a pure function of what is the case.

`decide` looks at everything anew each time (it is level-triggered) and either names the next
actions, after which it is asked again, or what the status is to say and when to look again. Which
node acts: the one that the machine runs on. While the VmVolume has its finalizer, the node that
the status names (or, before it names one, the one of the claim's volume) has to let go of it first.

Before a LUN is made the claim and the VmVolume get a finalizer, in this order, and they lose it in
the same order after the LUN is gone. So whatever was cut off, a claim's finalizer is there for
whoever looks for what was left behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from csi.kubevirt.lun import Lun
from csi.kubevirt.vmvolume.model import FINALIZER, Phase, VmVolume
from csi.objects import Claim, PersistentVolume, StorageClass, Vmi

RELEASE_POLL_S = (0.05, 0.5)
"""While the guest has a disk in use that is to go: the shortest and the longest wait."""
SEEN_POLL_S = (0.02, 30.0)
"""While the guest has not looked at a new disk: likewise."""
OTHER_NODE_S = 300.0
"""While another node is to let go: whether that one is still there."""
STARTING = ("Pending", "Scheduling", "Scheduled")
ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True)
class Seen:
    """What is the case with one VmVolume, looked at from one node."""

    node: str
    """This node."""
    now: float
    """Seconds since the epoch."""
    volume: VmVolume
    machine: Vmi | None
    """The VMI of its name, wherever it is; None: there is none."""
    claim: Claim | None = None
    """None: there is none."""
    storage_class: StorageClass | None = None
    """The claim's, while it is not bound."""
    rival: str | None = None
    """Name of another VmVolume that has the claim, or gets it first. Not for one with finalizer."""
    pod: str | None = None
    """The machine's pod on this node, if it has a controller."""
    luns: tuple[tuple[str, Lun], ...] = ()
    """Pods of this node's controllers that have the claim's volume as a LUN, or the one that the
    status names; of the pods of the machine, and the one that the status names."""
    size: int | None = None
    """Bytes of the volume on this node's target; None: it is not there."""
    refused: str = ""
    """Why the volume cannot become a LUN now: it is in use, or the target did not take it."""
    select_wait_s: float = 0.0
    """So long the provisioner is left alone, which could not make the volume here before."""
    not_grown: str = ""
    """Why the volume did not grow just now."""
    gone_node: str | None = None
    """The node in charge, if the cluster has it no longer; its LUNs went with it."""
    absent: str | None = None
    """Why the machine runs without the controller that its pod has."""

    @property
    def concerns_us(self) -> bool:
        """Whether this node may have to do something, and has to look at claim and target."""
        if self.other is not None:
            return False
        return self.here or self.volume.status.node == self.node or self.volume.finalizer

    @property
    def in_charge(self) -> str | None:
        """The node whose target may have its LUN: that of its status, else that of its claim."""
        return self.volume.status.node or (self.claim.node if self.claim else None)

    @property
    def other(self) -> str | None:
        """Another node, if that one has to let go of it first."""
        node = self.in_charge
        done = not self.volume.finalizer or node in (self.node, self.gone_node)
        return None if done else node

    @property
    def waits_for(self) -> str | None:
        """The other node, if nothing can be done here before it has let go."""
        return self.other if self.here or self.volume.deleted_at is not None else None

    @property
    def read_only(self) -> bool:
        """Whether the guest may not write."""
        return self.volume.spec.read_only or (self.claim is not None and self.claim.read_only)

    @property
    def here(self) -> bool:
        """Whether the machine is on this node and has not ended."""
        machine = self.machine
        return machine is not None and machine.node == self.node and machine.phase not in ENDED


# What can be done; each may be repeated


@dataclass(frozen=True)
class TakeCharge:
    """Let the status name this node, before it has anything that another one could let go of."""


@dataclass(frozen=True)
class HoldClaim:
    """Give the claim the finalizer."""


@dataclass(frozen=True)
class Hold:
    """Give the VmVolume the finalizer."""


@dataclass(frozen=True)
class Attach:
    """Make the volume a LUN of the pod's controller."""

    pod: str
    handle: str
    read_only: bool = False


@dataclass(frozen=True)
class Detach:
    """Take the LUN away."""

    pod: str
    handle: str
    forced: bool = False
    """The guest has, or may have, it in use, which is told."""
    unless_used: bool = False
    """Leave it if the guest has begun to use it meanwhile."""


@dataclass(frozen=True)
class LetGoOfClaim:
    """Take the finalizer off the claim."""


@dataclass(frozen=True)
class LetGo:
    """Take the finalizer off the VmVolume."""


@dataclass(frozen=True)
class SelectNode:
    """Tell the provisioner to make the claim's volume on this node."""


@dataclass(frozen=True)
class Grow:
    """Grow the volume to so many bytes."""

    handle: str
    size: int


@dataclass(frozen=True)
class FinishExpansion:
    """Write into the claim's status that its volume has its new size."""


Action = (
    TakeCharge
    | HoldClaim
    | Hold
    | Attach
    | Detach
    | LetGoOfClaim
    | LetGo
    | SelectNode
    | Grow
    | FinishExpansion
)


@dataclass(frozen=True)
class Say:
    """What the status is to say."""

    phase: Phase
    reason: str
    """One word for programs."""
    message: str
    node: str | None
    """The node that goes on to be in charge; None: nobody is."""
    warning: bool = False
    """Somebody has to do something."""
    lun: tuple[str, Lun] | None = None
    """Pod and LUN, where there is one."""
    keeps_lun: bool = False
    """What the status tells of the LUN stays: now it cannot be asked for."""


@dataclass(frozen=True)
class Decision:
    """The next step. Nothing at all: another node acts, or nobody has to."""

    actions: tuple[Action, ...] = ()
    """Done in this order; then it is looked at again, unless that was the end (LetGo)."""
    say: Say | None = None
    again_s: float | None = None
    """Look again after so many seconds; None: when something changes."""
    retry: bool = field(default=False)
    """Look again soon, and less and less often: nothing will tell of the change."""


NOTHING = Decision()
LATER = Decision(again_s=OTHER_NODE_S)


def decide(seen: Seen) -> Decision:
    """Returns what is to be done now."""
    if seen.volume.deleted_at is not None:
        return _delete(seen, seen.volume.deleted_at)
    if not seen.here:
        return _without_machine(seen)
    if seen.other is not None:
        return LATER  # it lets go first, and then says so
    if seen.volume.status.node not in (None, seen.node):
        return Decision(actions=(TakeCharge(),))
    wrong = [Detach(pod, lun.volume) for pod, lun in _ours(seen) if not _is_right(seen, pod, lun)]
    if wrong:
        return Decision(actions=tuple(wrong))
    present = next(iter(_ours(seen)), None)
    return _attached(seen, *present) if present else _absent(seen)


def _delete(seen: Seen, deleted_at: float) -> Decision:
    """The VmVolume is being deleted."""
    volume = seen.volume
    if not volume.finalizer:
        return NOTHING
    if seen.other is not None:
        return LATER
    end = deleted_at + volume.spec.release_timeout_seconds
    if volume.spec.release_timeout_seconds:
        end += 1  # the server's time is rounded down
    for pod, lun in _ours(seen):
        why = _use(seen, pod, lun)
        if why and seen.now < end:
            text = (
                f"{why} (target {lun.target}): unmount it there; "
                f"{volume.spec.release_timeout_seconds} s after the deletion it is taken away by "
                "force"
            )
            wait = _between((seen.now - deleted_at) / 10, RELEASE_POLL_S)
            return Decision(
                say=Say("Releasing", "InUse", text, seen.node, lun=(pod, lun)),
                again_s=min(wait, end - seen.now),
            )
        spare = seen.here and not why
        return Decision(actions=(Detach(pod, lun.volume, forced=bool(why), unless_used=spare),))
    return Decision(actions=(LetGoOfClaim(), LetGo()))


def _use(seen: Seen, pod: str, lun: Lun) -> str:
    """Returns why the guest's release of a disk is to be waited for, if it is.

    What the guest said of its use is lost when the target restarts, as is that it saw the disk. A
    guest does not say it again, so in doubt it is waited for, too.
    """
    status = seen.volume.status
    if not seen.here:
        return ""
    if lun.removal_prevented:
        return "the guest has the disk in use"
    forgot = lun.guest_seen_at is None and status.guest_seen_at and status.tells_of(pod, lun)
    if lun.removable and forgot:
        return "the target restarted and cannot tell whether the guest has the disk in use"
    return ""


def _without_machine(seen: Seen) -> Decision:
    """The machine is not on this node."""
    volume = seen.volume
    if volume.status.node not in (None, seen.node):
        return NOTHING
    named = volume.status.node == seen.node
    if (named or volume.finalizer) and seen.other is None:
        if found := [Detach(pod, lun.volume) for pod, lun in _ours(seen)]:
            return Decision(actions=tuple(found))
        if volume.finalizer:
            return Decision(actions=(LetGoOfClaim(), LetGo()))
    elsewhere = seen.machine is not None and seen.machine.phase not in ENDED and seen.machine.node
    if not named and (elsewhere or volume.status.phase is not None):
        return NOTHING
    name = f"virtual machine {volume.spec.vm_name}"
    if elsewhere:
        text = f"{name} runs on node {elsewhere} now, whose turn it is"
    else:
        text = f"{name} does not run: it gets the disk when it does"
    return Decision(say=Say("Pending", "VmNotRunning", text, None))


def _attached(seen: Seen, pod: str, lun: Lun) -> Decision:
    """The volume is a LUN of the machine."""
    volume, claim = seen.volume, seen.claim
    warning, about = False, f"target {lun.target}, LUN 0 of the machine's controller"
    if claim is None:
        about += f"; claim {volume.spec.claim_name} is gone although the disk is there"
        warning = True
    else:
        if actions := _held(seen, claim):
            return Decision(actions=actions)
        if step := _growth(seen, claim):
            return Decision(actions=(step,))
        if seen.not_grown:
            about, warning = f"{about}; it does not grow: {seen.not_grown}", True
        if claim.volume is None:
            about, warning = f"{about}; claim {claim.name} is not bound any more", True
    known = volume.status.guest_seen_at if volume.status.tells_of(pod, lun) else None
    if lun.guest_seen_at is None and known is None:
        age = seen.now - (lun.event_at or lun.attached_at or seen.now)
        again = _between(age / 4, SEEN_POLL_S)
    else:
        again = None
    say = Say("Attached", "Attached", about, seen.node, warning=warning, lun=(pod, lun))
    return Decision(say=say, again_s=again, retry=bool(seen.not_grown))


def _growth(seen: Seen, claim: Claim) -> Grow | FinishExpansion | None:
    """Returns what is to be done for the volume to have its claim's size."""
    if claim.volume is None or seen.size is None:
        return None
    if seen.size >= claim.volume.capacity:
        return FinishExpansion() if claim.expanding else None
    return None if seen.not_grown else Grow(claim.volume.handle, claim.volume.capacity)


def _held(seen: Seen, claim: Claim) -> tuple[Action, ...]:
    """Returns what is missing of the finalizers; one that is being deleted can get none."""
    found: list[Action] = []
    if FINALIZER not in claim.finalizers and not claim.deleting:
        found.append(HoldClaim())
    if not seen.volume.finalizer:
        found.append(Hold())
    return tuple(found)


def _absent(seen: Seen) -> Decision:
    """The machine is here, and has no LUN of it: is there anything that forbids one?"""
    machine, claim = seen.machine, seen.claim
    assert machine is not None
    if machine.phase != "Running" or machine.deleting:
        doing = "is starting" if machine.phase in STARTING else "is not running properly"
        doing = "is being stopped" if machine.deleting else doing
        text = f"virtual machine {machine.name} {doing}: it gets no disk now"
        return _pending(seen, "VmNotRunning", text)
    if machine.migrating:  # the disk would stay behind
        text = f"virtual machine {machine.name} is being migrated: it gets no disk before the end"
        return _pending(seen, "VmMigrating", text)
    name = seen.volume.spec.claim_name
    if seen.rival is not None:
        text = f"VmVolume {seen.rival} has claim {name}: delete that one"
        return _pending(seen, "ClaimTaken", text, warning=True)
    if own := _disk_of(machine, name):
        text = f"claim {name} is a disk of the machine already ({own}): delete this VmVolume"
        return _failed(seen, "OwnDisk", text)
    if claim is None:
        text = f"there is no claim {name}: create it in this namespace"
        return _pending(seen, "ClaimNotFound", text, warning=True)
    return _claim(seen, claim)


def _claim(seen: Seen, claim: Claim) -> Decision:
    """Nothing but the claim can forbid it."""
    if not claim.block:
        text = f"claim {claim.name} is for a file system: a disk needs one with volumeMode Block"
        return _failed(seen, "NotBlock", text)
    if claim.deleting:
        text = f"claim {claim.name} is being deleted: create another one"
        return _pending(seen, "ClaimDeleted", text, warning=True)
    return _bound(seen, claim) if claim.volume else _unbound(seen, claim)


def _unbound(seen: Seen, claim: Claim) -> Decision:  # noqa: PLR0911 - a table of reasons
    """The claim has no volume yet."""
    kind = seen.storage_class
    if claim.phase == "Lost":
        return _failed(seen, "ClaimLost", f"claim {claim.name} has lost its volume: delete it")
    if kind is None:
        about = f"of class {claim.storage_class}, which is not there" if claim.storage_class else ""
        text = f"claim {claim.name} is not bound{' and ' * bool(about)}{about}: see its events"
        return _pending(seen, "ClaimNotBound", text, warning=True, retry=True)
    if not kind.ours:
        text = f"claim {claim.name} is of class {kind.name}, whose volumes are {kind.provisioner}'s"
        return _failed(seen, "NotOurs", text)
    if kind.waits and claim.selected_node is None:
        if not seen.select_wait_s:
            return Decision(actions=(SelectNode(),))
        text = f"claim {claim.name} could not be made on node {seen.node}: its events say why"
        return _pending(seen, "ClaimNotMade", text, warning=True, again_s=seen.select_wait_s)
    if kind.waits and claim.selected_node != seen.node:
        text = (
            f"claim {claim.name} is being made on node {claim.selected_node} and the machine runs "
            f"on {seen.node}: start it there"
        )
        return _pending(seen, "OtherNode", text, warning=True)
    text = f"claim {claim.name} is not bound yet: its events tell how far it is"
    return _pending(seen, "ClaimNotBound", text)


def _bound(seen: Seen, claim: Claim) -> Decision:
    """The claim has a volume that is not a LUN of the machine."""
    volume = claim.volume
    assert volume is not None
    if not volume.ours:
        text = f"claim {claim.name} is bound to a volume of {volume.driver or 'another driver'}"
        return _failed(seen, "NotOurs", text)
    if volume.node != seen.node:
        return _not_here(seen, claim, volume)
    if seen.pod is None or seen.absent is not None:
        why = seen.absent or 'label its template virtlun.dev/controller: "true" and start it anew'
        text = f"virtual machine {seen.volume.spec.vm_name} has no controller: {why}"
        return _failed(seen, "NoController", text)
    if seen.size is None:
        text = (
            f"volume {volume.handle} of claim {claim.name} is not on this node's target: "
            "is its lvstore open?"
        )
        return _pending(seen, "VolumeNotFound", text, warning=True, retry=True)
    if seen.refused:
        return _pending(seen, "InUse", seen.refused, warning=True, retry=True)
    return Decision(actions=(*_held(seen, claim), Attach(seen.pod, volume.handle, seen.read_only)))


def _not_here(seen: Seen, claim: Claim, volume: PersistentVolume) -> Decision:
    """The claim's volume is not this node's."""
    if volume.in_pool:
        text = (
            f"the volume of claim {claim.name} is of a pool of Ceph, whose volumes are disks of "
            "machines that name them when they start, or that KubeVirt hot-plugs"
        )
        return _failed(seen, "OfPool", text)
    text = (
        f"the volume of claim {claim.name} is on node {volume.node} and the machine runs on "
        f"{seen.node}: start it there"
    )
    if volume.node is None:
        text = (
            f"the volume of claim {claim.name} is on no node, as the nodeAffinity of "
            f"PersistentVolume {volume.name} does not name one node: mend that"
        )
    return _pending(seen, "OtherNode", text, warning=True)


def _ours(seen: Seen) -> list[tuple[str, Lun]]:
    """Returns the LUNs that are this VmVolume's: not another one's, nor a machine's own claims."""
    if seen.rival is not None:
        return []
    return [(pod, lun) for pod, lun in seen.luns if not lun.handed_over]


def _is_right(seen: Seen, pod: str, lun: Lun) -> bool:
    """Whether it is the LUN that there is to be; else it is of a pod or a claim from before.

    A VmVolume before this one, whose finalizer somebody took off, may have left it writable.
    """
    if seen.read_only and not lun.read_only:
        return False
    return pod == seen.pod and (seen.claim is None or seen.claim.handle in (None, lun.volume))


def _disk_of(machine: Vmi, claim: str) -> str | None:
    """Returns which volume of the machine's own specification uses a claim."""
    for each in (machine.object.get("spec") or {}).get("volumes") or ():
        named = (each.get("persistentVolumeClaim") or {}).get("claimName")
        if claim in (named, (each.get("dataVolume") or {}).get("name")):
            return str(each["name"])
    return None


def _pending(
    seen: Seen,
    reason: str,
    message: str,
    *,
    warning: bool = False,
    retry: bool = False,
    again_s: float | None = None,
) -> Decision:
    if seen.volume.finalizer:  # of a LUN that is gone
        return Decision(actions=(LetGoOfClaim(), LetGo()))
    say = Say("Pending", reason, message, seen.node, warning=warning)
    return Decision(say=say, retry=retry, again_s=again_s)


def _failed(seen: Seen, reason: str, message: str) -> Decision:
    if seen.volume.finalizer:
        return Decision(actions=(LetGoOfClaim(), LetGo()))
    return Decision(say=Say("Failed", reason, message, seen.node, warning=True))


def _between(value: float, ends: tuple[float, float]) -> float:
    return min(max(value, ends[0]), ends[1])
