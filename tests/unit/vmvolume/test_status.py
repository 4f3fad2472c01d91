"""What the status of a VmVolume says, and how little of it is written."""

from __future__ import annotations

from typing import Any

from csi.kubevirt.vmvolume.decide import Say
from csi.kubevirt.vmvolume.model import Status, VmVolume
from csi.kubevirt.vmvolume.status import change, is_news, status
from tests.unit.vmvolume.world import HANDLE, NODE, NOW, POD, lun, vm_volume

WAITS = Say("Pending", "ClaimNotFound", "there is no claim data", NODE, warning=True)


def attached(**changes: Any) -> Say:
    return Say("Attached", "Attached", "target 1", NODE, lun=(POD, lun(**changes)))


def after(volume: VmVolume, say: Say, now: float = NOW) -> VmVolume:
    """Returns the VmVolume with the status that says it."""
    return vm_volume(status(volume, say, now).plain())


def conditions(found: Status) -> dict[str, str]:
    return {each.type: f"{each.status} {each.reason}" for each in found.conditions}


def test_a_pending_one_says_why_and_where() -> None:
    found = status(vm_volume(), WAITS, NOW)
    assert found.plain() == {
        "phase": "Pending",
        "message": "there is no claim data",
        "node": NODE,
        "observedGeneration": 1,
        "conditions": [
            {
                "type": "Attached",
                "status": "False",
                "reason": "ClaimNotFound",
                "message": "there is no claim data",
                "lastTransitionTime": "2027-01-15T08:00:00.000000Z",
                "observedGeneration": 1,
            },
            {
                "type": "SeenByGuest",
                "status": "False",
                "reason": "NotAttached",
                "message": "the guest has not looked at it",
                "lastTransitionTime": "2027-01-15T08:00:00.000000Z",
                "observedGeneration": 1,
            },
        ],
    }


def test_an_attached_one_says_when_the_guest_had_it() -> None:
    found = status(vm_volume(), attached(), NOW)
    assert (found.pod, found.target, found.volume) == (POD, 1, HANDLE)
    assert found.attached_at == "2027-01-15T07:59:59.100000Z"
    assert found.guest_seen_at == "2027-01-15T07:59:59.200000Z"
    assert conditions(found) == {"Attached": "True Attached", "SeenByGuest": "True Seen"}


def test_without_a_guest_the_time_is_the_lun_s() -> None:
    found = status(vm_volume(), attached(event_at=None, guest_seen_at=None), NOW)
    assert found.attached_at == "2027-01-15T07:59:59.000000Z"
    assert found.guest_seen_at is None
    assert conditions(found)["SeenByGuest"] == "False NotSeenYet"


def test_what_the_target_forgot_of_the_same_lun_stays() -> None:
    volume = after(vm_volume(), attached())
    forgotten = attached(event_at=None, guest_seen_at=None)
    found = status(volume, forgotten, NOW + 9)
    assert found == volume.status
    other = status(volume, Say(**vars(forgotten) | {"lun": ("another", lun())}), NOW + 9)
    assert other.guest_seen_at == "2027-01-15T07:59:59.200000Z"
    other = status(
        volume,
        Say(**vars(forgotten) | {"lun": ("another", lun(event_at=None, guest_seen_at=None))}),
        NOW + 9,
    )
    assert (other.attached_at, other.guest_seen_at) == ("2027-01-15T07:59:59.000000Z", None)


def test_saying_the_same_again_writes_nothing() -> None:
    for say in (WAITS, attached()):
        volume = after(vm_volume(), say)
        assert change(volume.status, status(volume, say, NOW + 60)) == {}
        assert not is_news(volume.status, say)


def test_a_condition_keeps_its_time_until_it_changes() -> None:
    volume = after(vm_volume(), WAITS)
    other = Say("Pending", "InUse", "pod x has claim data", NODE)
    found = status(volume, other, NOW + 60)
    assert [each.last_transition_time for each in found.conditions] == [
        "2027-01-15T08:00:00.000000Z"
    ] * 2
    assert is_news(volume.status, other)
    found = status(volume, attached(), NOW + 60)
    assert {each.last_transition_time for each in found.conditions} == {
        "2027-01-15T08:01:00.000000Z"
    }


def test_what_is_no_more_is_taken_out() -> None:
    volume = after(vm_volume(), attached())
    found = change(volume.status, status(volume, WAITS, NOW))
    gone = {key for key, value in found.items() if value is None}
    assert gone == {"pod", "target", "volume", "attachedAt", "guestSeenAt"}
    assert found["phase"] == "Pending"


def test_what_cannot_be_asked_for_is_kept_and_unknown() -> None:
    away = Say("Releasing", "TargetFailed", "no target answers", NODE, keeps_lun=True)
    volume = after(vm_volume(), attached())
    found = change(volume.status, status(volume, away, NOW))
    assert found.keys() == {"phase", "message", "conditions"}
    known = status(volume, away, NOW)
    assert conditions(known) == {"Attached": "Unknown TargetFailed", "SeenByGuest": "True Seen"}
    nothing = status(vm_volume(), away, NOW)
    assert conditions(nothing)["Attached"] == "False TargetFailed"
