"""Puts what is to be said of a VmVolume into its status, as a pure function."""

from __future__ import annotations

from typing import Any, Literal

from csi.kubevirt.vmvolume.decide import Say
from csi.kubevirt.vmvolume.model import Condition, Status, VmVolume, time_text

OF_LUN = ("pod", "volume", "target", "attached_at", "guest_seen_at")


def status(volume: VmVolume, say: Say, now: float) -> Status:
    """Returns the status of a VmVolume of which this is to be said, `now` in epoch seconds.

    What was known of the same LUN stays: the target forgets it when it restarts.
    """
    old = volume.status
    made: dict[str, Any] = {}
    if say.keeps_lun:
        made = {name: getattr(old, name) for name in OF_LUN}
    if say.lun is not None:
        pod, lun = say.lun
        same = old.tells_of(pod, lun)
        attached = lun.event_at or (None if same else lun.attached_at or now)
        seen = time_text(lun.guest_seen_at) if lun.guest_seen_at else None
        made = {
            "pod": pod,
            "volume": lun.volume,
            "target": lun.target,
            "attached_at": time_text(attached) if attached else old.attached_at,
            "guest_seen_at": seen or (old.guest_seen_at if same else None),
        }
    has_it = None if made.get("target") is not None and say.keeps_lun else say.lun is not None
    looked = bool(made.get("guest_seen_at"))
    conditions = (
        _condition(volume, "Attached", has_it, say.reason, say.message, now),
        _condition(
            volume,
            "SeenByGuest",
            looked,
            "Seen" if looked else "NotAttached" if has_it is False else "NotSeenYet",
            "the guest has read the disk's size" if looked else "the guest has not looked at it",
            now,
        ),
    )
    return Status(
        phase=say.phase,
        message=say.message,
        node=say.node,
        observed_generation=volume.generation,
        conditions=conditions,
        **made,
    )


def change(old: Status, new: Status) -> dict[str, Any]:
    """Returns what has to be merged into the old status to make it the new one (RFC 7386)."""
    before, after = old.plain(), new.plain()
    gone = dict.fromkeys(before.keys() - after.keys())
    return gone | {key: value for key, value in after.items() if before.get(key) != value}


def is_news(old: Status, say: Say) -> bool:
    """Whether it is worth an Event: the phase or its reason changed."""
    reasons = [each.reason for each in old.conditions if each.type == "Attached"]
    return old.phase != say.phase or reasons != [say.reason]


def _condition(
    volume: VmVolume, kind: str, holds: bool | None, reason: str, message: str, now: float
) -> Condition:
    text: Literal["True", "False", "Unknown"]
    text = "Unknown" if holds is None else "True" if holds else "False"
    old = next((each for each in volume.status.conditions if each.type == kind), None)
    same = old is not None and old.status == text
    return Condition(
        type=kind,
        status=text,
        reason=reason,
        message=message,
        last_transition_time=old.last_transition_time if old and same else time_text(now),
        observed_generation=volume.generation,
    )
