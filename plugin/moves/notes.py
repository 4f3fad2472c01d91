"""What is noted at a volume that another one moves to, and what follows of it.

| state | the old volume | the new one |
| --- | --- | --- |
| copying | counts | has part of it, or was overtaken |
| mirrored | counts; a VM writes to both | has part of it, or was overtaken when the VM ended |
| pivoted | counts unless it has moved (`MOVED`) | counts if that has; unknown if it is lost |
| whole | counts unless it has moved, or is gone | has all of it, durably, and counts else |

The target makes "pivoted" of "mirrored", and notes `MOVED` at the old one, in the moment in which
the VM goes on with the new one, and shows no VM a volume that does not count. It decides which one
does (`counting`), as what it has recorded of a disk decides before any note. "whole" comes last,
just before the old one is deleted; by whoever deletes it, the target leaves no new one "pivoted".
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Literal, cast, get_args

from pydataplane.client import Client
from pydataplane.errors import METHOD_NOT_FOUND, NO_DATA, NO_DEVICE, RpcError, VolumeError
from pydataplane.volumes import MOVE_XATTR, Volumes

XATTR = MOVE_XATTR

IDENTITY = "virtlun.identity"
"""Xattr of a volume that guests know as another one, whose place it has: the UUID of that.

The target makes serial and WWN of it.
"""

MOVED = "virtlun.moved"
"""Xattr of a volume whose VM has gone on with another one: the target's."""

HOST = "virtlun.host_move"
"""Xattr of a volume that goes to another host (plugin.hostmoves.sourcenote)."""

Counts = Literal["old", "new", "neither", "unknown"]

State = Literal["copying", "mirrored", "pivoted", "whole"]
STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True)
class Note:
    """What a volume is made for."""

    of: str
    """UUID of the volume that moves."""
    path: str
    """LVSTORE/NAME of that."""
    state: State = "copying"
    pause_us: int | None = None
    """How long a VM's requests waited, at most, when it went on with the new volume."""

    @property
    def text(self) -> str:
        """Returns what stands in the xattr."""
        return json.dumps({k: v for k, v in asdict(self).items() if v is not None})


def read(volumes: Volumes, uuid: str) -> Note | None:
    """Returns what is noted at a volume; None: nobody moves to it.

    Raises:
        VolumeError: nobody can read what is noted.
    """
    text = volumes.xattrs(uuid).get(XATTR)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    values = found if isinstance(found, dict) else {}
    of, path, pause = (values.get(name) for name in ("of", "path", "pause_us"))
    state = next((each for each in STATES if each == values.get("state")), None)
    if isinstance(of, str) and isinstance(path, str) and state is not None:
        return Note(of, path, state, pause if isinstance(pause, int) else None)
    raise VolumeError(
        f"the xattr {XATTR} of volume {volumes.lvol(uuid).path} is damaged, so nobody knows what is"
        " on it: delete the volume if what should move there is whole"
    )


def counting(client: Client, new: str) -> Counts:
    """Returns which volume of a move counts, by the new one (its UUID); the target decides.

    Raises:
        VolumeError: the target is of an earlier version, which does not.
        TargetError: nobody knows; the sentence says why.
    """
    try:
        found = client.call("virtlun_lvol_move_check", name=new)["counts"]
    except RpcError as error:
        if error.code != METHOD_NOT_FOUND:
            raise
        raise VolumeError(
            "the target that runs is of an earlier version, which does not note that a VM has gone"
            " on with another volume: `virtlun target upgrade`, and move the volume again"
        ) from error
    return cast(Counts, found)


def check_target(client: Client, volume: str) -> None:
    """Refuses a target that would have a VM go on with another volume without noting that.

    `volume` is the UUID of any, which need not be there.

    Raises:
        VolumeError: it is of an earlier version.
    """
    try:
        counting(client, volume)
    except RpcError as error:
        if error.code not in (NO_DATA, NO_DEVICE):
            raise


def write(volumes: Volumes, uuid: str, note: Note, state: State) -> Note:
    """Notes another state, lasting and at once."""
    changed = replace(note, state=state)
    volumes.set_xattr(uuid, XATTR, changed.text)
    return changed
