"""What is done about a VmVolume in every state that there can be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from csi.kubevirt.vmvolume.decide import (
    LATER,
    NOTHING,
    Attach,
    Decision,
    Detach,
    FinishExpansion,
    Grow,
    Hold,
    HoldClaim,
    LetGo,
    LetGoOfClaim,
    Say,
    Seen,
    SelectNode,
    TakeCharge,
    decide,
)
from csi.kubevirt.vmvolume.model import FINALIZER, Status
from csi.kubevirt.vmvolume.reconcile import ROUNDS_MAX
from tests.unit.vmvolume.world import (
    EARLY,
    FOREIGN,
    HANDLE,
    LATE,
    MIB,
    NODE,
    NOW,
    OLD_POD,
    OTHER,
    POD,
    claim,
    lun,
    machine,
    pv,
    seen,
    vm_volume,
)

ATTACHED = {"phase": "Attached", "node": NODE, "pod": POD, "target": 1, "volume": HANDLE}
JUST_NOW = "2027-01-15T07:59:59Z"  # a second before NOW
HELD: dict[str, Any] = {
    "volume": vm_volume(ATTACHED, finalizer=True),
    "claim": claim(pv(), finalizer=True),
}
DELETED: dict[str, Any] = {
    "volume": vm_volume(ATTACHED, finalizer=True, deleted_at=JUST_NOW),
    "claim": claim(pv(), finalizer=True),
}


def said(decision: Decision) -> Say:
    """Returns what the status is to say."""
    assert decision.say is not None, decision
    assert decision.actions == ()
    return decision.say


# The way in


def test_all_is_there_and_it_is_attached_after_both_finalizers() -> None:
    assert decide(seen()).actions == (HoldClaim(), Hold(), Attach(POD, HANDLE))


def test_finalizers_that_are_there_are_not_set_again() -> None:
    held = seen(volume=vm_volume(finalizer=True), claim=claim(pv(), finalizer=True))
    assert decide(held).actions == (Attach(POD, HANDLE),)


def test_an_attached_one_that_the_guest_has_seen_rests() -> None:
    decision = decide(seen(**HELD, luns=((POD, lun()),)))
    assert said(decision).phase == "Attached"
    assert (decision.again_s, decision.retry) == (None, False)
    assert said(decision).lun == (POD, lun())


@pytest.mark.parametrize(("age", "again"), [(0.0, 0.02), (0.4, 0.1), (8.0, 2.0), (1e6, 30.0)])
def test_the_guest_s_first_look_is_waited_for_less_and_less_often(age: float, again: float) -> None:
    new = lun(guest_seen_at=None, event_at=NOW - age)
    decision = decide(seen(**HELD, luns=((POD, new),)))
    assert said(decision).phase == "Attached"
    assert decision.again_s == pytest.approx(again)


def test_what_the_guest_saw_before_the_target_restarted_is_not_waited_for() -> None:
    status = ATTACHED | {"guestSeenAt": "2027-01-15T07:00:00Z"}
    held = HELD | {"volume": vm_volume(status, finalizer=True)}
    forgotten = lun(guest_seen_at=None, event_at=None)
    assert decide(seen(**held, luns=((POD, forgotten),))).again_s is None
    other = lun(target=2, guest_seen_at=None, event_at=None)
    assert decide(seen(**held, luns=((POD, other),))).again_s is not None


def test_an_attached_one_gets_back_finalizers_that_somebody_took() -> None:
    attached = seen(volume=vm_volume(ATTACHED), luns=((POD, lun()),))
    assert decide(attached).actions == (HoldClaim(), Hold())
    going = replace(attached, claim=claim(pv(), deleting=True))
    assert decide(going).actions == (Hold(),)


# What forbids it

PENDING: list[tuple[str, dict[str, Any], str, str]] = [
    ("VmNotRunning", {"machine": machine("Pending")}, "is starting", ""),
    ("VmNotRunning", {"machine": machine("Scheduling")}, "is starting", ""),
    ("VmNotRunning", {"machine": machine("Scheduled")}, "is starting", ""),
    ("VmNotRunning", {"machine": machine("Unknown")}, "is not running properly", ""),
    ("VmNotRunning", {"machine": machine(deleting=True)}, "is being stopped", ""),
    (
        "VmMigrating",
        {"machine": replace(machine(), migrating=True)},
        "is being migrated: it gets no disk before",
        "",
    ),
    ("ClaimTaken", {"rival": "first"}, "VmVolume first has claim data", "warning"),
    ("ClaimNotFound", {"claim": None}, "there is no claim data: create it", "warning"),
    ("ClaimDeleted", {"claim": claim(pv(), deleting=True)}, "is being deleted", "warning"),
    ("ClaimNotBound", {"claim": claim(None)}, "class fast, which is not there", "warning retry"),
    (
        "ClaimNotBound",
        {"claim": claim(None, storage_class=None)},
        "claim data is not bound: see its events",
        "warning retry",
    ),
    ("ClaimNotBound", {"claim": claim(None), "storage_class": EARLY}, "not bound yet", ""),
    (
        "ClaimNotBound",
        {"claim": claim(None, selected_node=NODE), "storage_class": LATE},
        "not bound yet",
        "",
    ),
    (
        "OtherNode",
        {"claim": claim(None, selected_node=OTHER), "storage_class": LATE},
        "is being made on node node2 and the machine runs on node1",
        "warning",
    ),
    ("OtherNode", {"claim": claim(pv(OTHER))}, "is on node node2 and the", "warning"),
    ("OtherNode", {"claim": claim(pv(None))}, "does not name one node", "warning"),
    ("VolumeNotFound", {"size": None}, "is its lvstore open?", "warning retry"),
    ("InUse", {"refused": "pod x has it"}, "pod x has it", "warning retry"),
]
FAILED: list[tuple[str, dict[str, Any], str]] = [
    ("NotBlock", {"claim": claim(pv(), block=False)}, "volumeMode Block"),
    ("NotBlock", {"claim": claim(None, block=False)}, "volumeMode Block"),
    ("ClaimLost", {"claim": claim(None, phase="Lost")}, "has lost its volume"),
    ("NotOurs", {"claim": claim(None), "storage_class": FOREIGN}, "other.example.org's"),
    ("NotOurs", {"claim": claim(pv(driver="other.example.org"))}, "of other.example.org"),
    ("NotOurs", {"claim": claim(pv(driver=""))}, "of another driver"),
    ("OfPool", {"claim": claim(replace(pv(None), in_pool=True))}, "of a pool of Ceph"),
    ("NoController", {"pod": None}, "virtlun.dev/controller"),
    ("NoController", {"absent": "QEMU has no such device"}, "controller: QEMU has no such"),
    (
        "OwnDisk",
        {
            "machine": machine(
                volumes=[{"name": "root", "persistentVolumeClaim": {"claimName": "data"}}]
            )
        },
        "already (root)",
    ),
    (
        "OwnDisk",
        {"machine": machine(volumes=[{"name": "dv", "dataVolume": {"name": "data"}}])},
        "already (dv)",
    ),
]


@pytest.mark.parametrize(("reason", "changes", "text", "how"), PENDING)
def test_what_can_still_come_is_pending(
    reason: str, changes: dict[str, Any], text: str, how: str
) -> None:
    decision = decide(seen(**changes))
    say = said(decision)
    assert (say.phase, say.reason, say.node, say.lun) == ("Pending", reason, NODE, None)
    assert text in say.message
    assert (say.warning, decision.retry) == ("warning" in how, "retry" in how)


@pytest.mark.parametrize(("reason", "changes", "text"), FAILED)
def test_what_waiting_does_not_mend_has_failed(
    reason: str, changes: dict[str, Any], text: str
) -> None:
    decision = decide(seen(**changes))
    say = said(decision)
    assert (say.phase, say.reason, say.warning) == ("Failed", reason, True)
    assert text in say.message
    assert (decision.again_s, decision.retry) == (None, False)


ABSENT = [changes for _, changes, _, _ in PENDING] + [changes for _, changes, _ in FAILED]


@pytest.mark.parametrize("changes", ABSENT)
def test_finalizers_of_a_lun_that_is_gone_are_taken_off_first(changes: dict[str, Any]) -> None:
    before = seen(volume=vm_volume({"node": NODE}, finalizer=True), **changes)
    assert decide(before).actions == (LetGoOfClaim(), LetGo())


def test_a_lun_that_nobody_told_of_is_the_one_of_the_claim_s_node() -> None:
    """Whoever made it died before it wrote the status."""
    unsaid = seen(volume=vm_volume(finalizer=True), claim=claim(pv(OTHER), finalizer=True))
    assert (unsaid.other, decide(unsaid)) == (OTHER, LATER)
    there = replace(unsaid, node=OTHER, luns=((OLD_POD, lun()),))
    assert decide(there).actions == (Detach(OLD_POD, HANDLE),)
    assert decide(replace(there, luns=())).actions == (LetGoOfClaim(), LetGo())
    going = replace(unsaid, volume=vm_volume(finalizer=True, deleted_at=JUST_NOW), machine=None)
    assert (going.waits_for, decide(going)) == (OTHER, LATER)
    assert decide(replace(going, gone_node=OTHER)).actions == (LetGoOfClaim(), LetGo())


def test_a_claim_that_waits_for_its_first_consumer_gets_this_node() -> None:
    waiting = seen(claim=claim(None), storage_class=LATE)
    assert decide(waiting).actions == (SelectNode(),)
    again = decide(replace(waiting, select_wait_s=4.0))
    assert (said(again).reason, again.again_s) == ("ClaimNotMade", 4.0)


def test_every_sentence_names_what_it_is_about() -> None:
    for changes in ABSENT:
        message = said(decide(seen(**changes))).message
        assert any(word in message for word in ("data", "vm", "pod x", HANDLE)), message
        assert message[-1] not in ".!"


# Growth


def test_a_volume_smaller_than_its_claim_s_grows() -> None:
    larger = HELD | {"claim": claim(pv(size=128 * MIB), finalizer=True)}
    attached = seen(**larger, luns=((POD, lun()),))
    assert decide(attached).actions == (Grow(HANDLE, 128 * MIB),)
    refused = decide(replace(attached, not_grown="there is no room"))
    assert (said(refused).phase, refused.retry) == ("Attached", True)
    assert "it does not grow: there is no room" in said(refused).message


def test_the_end_of_an_expansion_is_told_once_the_volume_has_the_size() -> None:
    grown = HELD | {"claim": claim(pv(size=128 * MIB), finalizer=True, expanding=True)}
    attached = seen(**grown, luns=((POD, lun()),), size=128 * MIB)
    assert decide(attached).actions == (FinishExpansion(),)
    assert decide(replace(attached, size=64 * MIB)).actions == (Grow(HANDLE, 128 * MIB),)


def test_nobody_but_the_user_of_a_volume_grows_it() -> None:
    grown = claim(pv(size=128 * MIB), expanding=True)
    kinds = {type(action) for action in decide(seen(claim=grown)).actions}
    assert not kinds & {Grow, FinishExpansion}


# The way out


def test_a_disk_that_is_not_in_use_goes_at_once() -> None:
    assert decide(seen(**DELETED, luns=((POD, lun()),))).actions == (
        Detach(POD, HANDLE, unless_used=True),
    )
    assert decide(seen(**DELETED)).actions == (LetGoOfClaim(), LetGo())


def test_a_disk_in_use_is_waited_for_and_then_forced() -> None:
    used = seen(**DELETED, luns=((POD, lun(removal_prevented=True)),))
    decision = decide(used)
    assert (said(decision).phase, said(decision).reason) == ("Releasing", "InUse")
    assert decision.again_s == pytest.approx(0.1)
    late = replace(used, now=NOW + 28.5)
    assert decide(late).again_s == pytest.approx(0.5)
    assert decide(replace(used, now=NOW + 29.9)).again_s == pytest.approx(0.1)
    assert decide(replace(used, now=NOW + 30)).actions == (Detach(POD, HANDLE, forced=True),)


def test_a_target_that_restarted_is_in_doubt_about_the_use() -> None:
    status = ATTACHED | {"guestSeenAt": "2027-01-15T07:00:00Z"}
    volume = vm_volume(status, finalizer=True, deleted_at=JUST_NOW)
    forgot = lun(guest_seen_at=None, event_at=None)
    state = seen(volume=volume, claim=DELETED["claim"], luns=((POD, forgot),))
    assert "the target restarted" in said(decide(state)).message
    assert decide(replace(state, now=NOW + 30)).actions == (Detach(POD, HANDLE, forced=True),)
    for other in (replace(forgot, removable=False), lun()):
        unused = replace(state, luns=((POD, other),))
        assert decide(unused).actions == (Detach(POD, HANDLE, unless_used=True),)
    assert decide(replace(state, machine=None)).actions == (Detach(POD, HANDLE),)


def test_without_a_timeout_it_is_forced_at_once() -> None:
    volume = vm_volume(ATTACHED, finalizer=True, deleted_at=JUST_NOW, releaseTimeoutSeconds=0)
    used = seen(
        volume=volume, claim=DELETED["claim"], luns=((POD, lun(removal_prevented=True)),), now=NOW
    )
    assert decide(used).actions == (Detach(POD, HANDLE, forced=True),)


@pytest.mark.parametrize("gone", [None, machine("Succeeded"), machine("Failed"), machine(node="x")])
def test_a_machine_that_is_gone_keeps_nothing_in_use(gone: Any) -> None:
    used = seen(**DELETED | {"machine": gone}, luns=((POD, lun(removal_prevented=True)),))
    assert decide(used).actions == (Detach(POD, HANDLE),)


def test_one_that_never_had_a_lun_goes_without_us() -> None:
    assert decide(seen(volume=vm_volume(deleted_at=JUST_NOW))) == NOTHING


def test_only_the_node_in_charge_lets_go() -> None:
    other = vm_volume(ATTACHED | {"node": OTHER}, finalizer=True, deleted_at=JUST_NOW)
    assert decide(seen(volume=other)) == LATER
    unsaid = vm_volume(finalizer=True, deleted_at=JUST_NOW)
    assert decide(seen(volume=unsaid, claim=claim(pv(OTHER), finalizer=True))) == LATER
    mine = seen(volume=unsaid, claim=claim(pv(), finalizer=True))
    assert decide(mine).actions == (LetGoOfClaim(), LetGo())
    assert decide(replace(mine, claim=None)).actions == (LetGoOfClaim(), LetGo())


def test_a_node_that_is_gone_for_good_holds_nothing_up() -> None:
    status = ATTACHED | {"node": OTHER}
    left = claim(pv(OTHER), finalizer=True)
    going = seen(volume=vm_volume(status, finalizer=True, deleted_at=JUST_NOW), claim=left)
    assert (going.waits_for, going.concerns_us, decide(going)) == (OTHER, False, LATER)
    free = replace(going, gone_node=OTHER)
    assert free.concerns_us
    assert decide(free).actions == (LetGoOfClaim(), LetGo())
    moved = seen(volume=vm_volume(status, finalizer=True), claim=left)
    assert (moved.waits_for, decide(moved)) == (OTHER, LATER)
    taken = replace(moved, gone_node=OTHER)
    assert decide(taken).actions == (TakeCharge(),)
    taken = replace(taken, volume=vm_volume(ATTACHED, finalizer=True))
    assert decide(taken).actions == (LetGoOfClaim(), LetGo())
    bare = replace(taken, volume=vm_volume(ATTACHED))
    assert (said(decide(bare)).reason, said(decide(bare)).node) == ("OtherNode", NODE)
    elsewhere = replace(moved, machine=machine(node=OTHER))
    assert (elsewhere.waits_for, elsewhere.concerns_us) == (None, False)


# A machine that stops or moves


@pytest.mark.parametrize("gone", [None, machine("Succeeded"), machine("Failed")])
def test_without_its_machine_the_disk_is_taken_away_and_waits(gone: Any) -> None:
    before = seen(**HELD | {"machine": gone}, luns=((POD, lun()),))
    assert decide(before).actions == (Detach(POD, HANDLE),)
    without = replace(before, luns=())
    assert decide(without).actions == (LetGoOfClaim(), LetGo())
    bare = replace(without, volume=vm_volume(ATTACHED), claim=claim(pv()))
    say = said(decide(bare))
    assert (say.phase, say.reason, say.node) == ("Pending", "VmNotRunning", None)
    assert "does not run" in say.message


def test_a_machine_that_moved_is_the_other_node_s_after_this_one_let_go() -> None:
    moved = machine(node=OTHER)
    here = seen(**HELD | {"machine": moved}, luns=((POD, lun()),))
    assert decide(here).actions == (Detach(POD, HANDLE),)
    bare = seen(volume=vm_volume(ATTACHED), machine=moved)
    assert "runs on node node2 now" in said(decide(bare)).message
    there = replace(here, node=OTHER, luns=())
    assert (there.concerns_us, decide(there)) == (False, LATER), "not before the first has let go"
    free = replace(bare, node=OTHER)
    assert (free.concerns_us, decide(free).actions) == (True, (TakeCharge(),))
    free = replace(free, volume=vm_volume({"phase": "Pending"}))
    assert said(decide(free)).reason == "OtherNode"


def test_a_lun_of_the_machine_s_pod_from_before_is_taken_away_first() -> None:
    old = seen(**HELD, luns=((OLD_POD, lun()),))
    assert decide(old).actions == (Detach(OLD_POD, HANDLE),)


def test_the_lun_of_another_one_is_left_alone() -> None:
    mine = vm_volume({"phase": "Pending", "node": NODE}, name="second")
    taken = seen(volume=mine, rival="first", claim=HELD["claim"], luns=((POD, lun()),))
    assert said(decide(taken)).reason == "ClaimTaken"
    for gone in (None, machine("Succeeded"), machine(node=OTHER)):
        assert said(decide(replace(taken, machine=gone))).reason == "VmNotRunning"


def test_a_writable_lun_is_not_what_a_read_only_one_is() -> None:
    for read_only in (
        {"volume": vm_volume(finalizer=True, readOnly=True)},
        {"claim": claim(pv(), finalizer=True, read_only=True)},
    ):
        left = seen(**HELD | read_only, luns=((POD, lun()),))
        assert decide(left).actions == (Detach(POD, HANDLE),)
        assert decide(replace(left, luns=())).actions == (Attach(POD, HANDLE, read_only=True),)
        right = replace(left, luns=((POD, lun(read_only=True)),))
        assert said(decide(right)).phase == "Attached"


def test_a_claim_made_anew_is_another_disk() -> None:
    before = seen(**HELD | {"claim": claim(None)}, luns=((POD, lun()),))
    assert decide(before).actions == (HoldClaim(),)
    unbound = replace(before, claim=claim(None, finalizer=True))
    assert "claim data is not bound any more" in said(decide(unbound)).message
    other = replace(unbound, claim=claim(replace(pv(), handle="another"), finalizer=True))
    assert decide(other).actions == (Detach(POD, HANDLE),)


def test_somebody_says_it_of_a_machine_that_does_not_run() -> None:
    assert said(decide(seen(machine=None))).reason == "VmNotRunning"
    assert decide(seen(machine=None, volume=vm_volume({"phase": "Pending"}))) == NOTHING
    assert decide(seen(machine=machine(node=OTHER))) == NOTHING


# All of it

STATUSES: list[dict[str, Any]] = [
    {},
    {"phase": "Pending"},
    {"phase": "Pending", "node": NODE},
    {"phase": "Pending", "node": OTHER},
    ATTACHED,
    ATTACHED | {"node": OTHER},
    ATTACHED | {"pod": OLD_POD},
    ATTACHED | {"guestSeenAt": "2027-01-15T07:00:00Z"},
]
MACHINES = [
    None,
    *(machine(phase) for phase in ("Scheduled", "Running", "Succeeded", "Failed", "Unknown")),
    replace(machine(), migrating=True),
    machine(node=OTHER),
    machine(node=None),
    machine(deleting=True),
]
CLAIMS = [
    None,
    claim(None),
    claim(None, selected_node=NODE),
    claim(None, phase="Lost"),
    *(claim(pv(), finalizer=held) for held in (False, True)),
    claim(pv(size=128 * MIB), finalizer=True, expanding=True),
    claim(pv(), finalizer=True, deleting=True),
    claim(pv(), deleting=True),
    claim(pv(OTHER), finalizer=True),
    claim(pv(driver="other.example.org")),
    claim(pv(), block=False),
]
LUNS = [
    (),
    ((POD, lun()),),
    ((POD, lun(removal_prevented=True)),),
    ((POD, lun(guest_seen_at=None)),),
    ((POD, lun(handed_over=True)),),
    ((OLD_POD, lun()),),
]
DELETIONS = [None, JUST_NOW, "2027-01-15T07:00:00Z"]


def everything() -> Iterator[Seen]:
    """Yields every combination; also ones that no cluster should have."""
    flags = (False, True)
    for status, held, deleted in itertools.product(STATUSES, flags, DELETIONS):
        volume = vm_volume(status, finalizer=held, deleted_at=deleted)
        for vm, bound, luns in itertools.product(MACHINES, CLAIMS, LUNS):
            for pod, rival, refused in itertools.product((POD, None), (None, "first"), ("", "no")):
                kind = LATE if bound and bound.volume is None else None
                size = 64 * MIB if bound and bound.node == NODE else None
                yield Seen(
                    *(NODE, NOW, volume, vm, bound, kind, rival, pod, luns, size),
                    refused=refused,
                )


def test_no_state_leads_to_a_step_that_is_unsafe() -> None:
    count = 0
    for state in everything():
        count += 1
        check(state, decide(state))
    assert count > 200_000


def check(state: Seen, decision: Decision) -> None:
    """Raises AssertionError if a decision could lose or leak something."""
    volume, bound = state.volume, state.claim
    ours = {pod for pod, each in state.luns if not each.handed_over and not state.rival}
    assert not (decision.actions and decision.say), state
    held = volume.finalizer
    claim_held = bound is not None and FINALIZER in bound.finalizers
    for action in decision.actions:
        match action:
            case TakeCharge():
                assert state.here, state
                assert state.other is None, state
                assert len(decision.actions) == 1, state
            case HoldClaim():
                assert volume.status.node in (None, NODE), state
                assert bound and not bound.deleting
                claim_held = True
            case Hold():
                assert volume.deleted_at is None
                assert claim_held or (bound and bound.deleting)
                held = True
            case Attach():
                assert held, state
                assert claim_held, state
                assert state.here, state
                assert state.machine and state.machine.phase == "Running", state
                assert not state.machine.migrating, state
                assert bound and bound.block and bound.node == NODE, state
                assert action.pod == state.pod, state
                assert not ours and not state.rival and not state.refused, state
                assert volume.deleted_at is None, state
            case Detach():
                assert action.pod in ours, state
                staying = state.here and volume.deleted_at is None and action.pod == state.pod
                assert not staying or (bound and bound.handle not in (None, HANDLE)), state
                assert state.other is None, state
                used = state.here and any(
                    each.removal_prevented
                    or (each.guest_seen_at is None and volume.status.guest_seen_at)
                    for _, each in state.luns
                )
                assert action.forced == (used and volume.deleted_at is not None), state
                spare = state.here and volume.deleted_at is not None and not used
                assert action.unless_used == spare, state
            case LetGoOfClaim() | LetGo():
                assert not ours, state
                assert state.other is None, state
            case Grow() | FinishExpansion():
                assert ours, state
    if volume.status.node == OTHER and volume.finalizer:
        assert decision in (NOTHING, LATER), state
    if decision.say and decision.say.phase == "Attached":
        assert ours == {state.pod}, state
    if decision.say and decision.say.node is not None:
        assert decision.say.node == NODE, state


def test_every_state_comes_to_rest() -> None:
    """Each action has its effect on a model of the cluster; none is needed twice."""
    for state in everything():
        at = state
        for _ in range(ROUNDS_MAX):
            decision = decide(at)
            if not decision.actions:
                break
            for action in decision.actions:
                at = after(at, action)
        else:
            raise AssertionError(f"does not come to rest: {state}")


def after(state: Seen, action: object) -> Seen:  # noqa: PLR0911 - one for each action
    """Returns the state after an action took effect."""
    volume, bound = state.volume, state.claim
    match action:
        case TakeCharge():
            return replace(state, volume=replace(volume, status=Status(phase="Pending", node=NODE)))
        case HoldClaim():
            assert bound
            return replace(state, claim=replace(bound, finalizers=(*bound.finalizers, FINALIZER)))
        case Hold():
            return replace(state, volume=replace(volume, finalizer=True))
        case Attach(pod=pod):
            return replace(state, luns=(*state.luns, (pod, lun())))
        case Detach(pod=pod):
            return replace(state, luns=tuple(each for each in state.luns if each[0] != pod))
        case LetGoOfClaim():
            left = tuple(each for each in bound.finalizers if each != FINALIZER) if bound else ()
            return replace(state, claim=replace(bound, finalizers=left) if bound else None)
        case LetGo():
            return replace(state, volume=replace(volume, finalizer=False))
        case SelectNode():
            assert bound
            return replace(state, claim=replace(bound, selected_node=NODE))
        case Grow(size=size):
            return replace(state, size=size)
        case FinishExpansion():
            assert bound
            return replace(state, claim=replace(bound, expanding=False))
    raise AssertionError(action)
