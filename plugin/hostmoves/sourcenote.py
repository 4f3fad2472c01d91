"""What is noted at a volume that leaves for another host, and what has nobody use it there.

| state | `virtlun.moved` | the volume here | the one there |
| --- | --- | --- | --- |
| sending | not there | counts, and a VM may use it | no disk |
| sending | there | counts, and is no disk: the last of it is sent | no disk |
| moved | there | is no disk | counts, and is one when its `virtlun.move` is gone |

The target makes no disk of a volume that has `virtlun.moved`, and none of one that has
`virtlun.move`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Literal

from plugin.moves import notes
from plugin.signals import deferred
from pydataplane.errors import VolumeError
from pydataplane.lvols import Volume
from pydataplane.volumes import Volumes

XATTR = notes.HOST

State = Literal["sending", "moved"]


@dataclass(frozen=True)
class HostNote:
    """Where a volume goes, and how far it is."""

    host: str
    """[USER@]HOST, as the person wrote it."""
    to: str
    """LVSTORE/NAME there."""
    thin: bool
    """Whether it was before the first snapshot, with which it is."""
    state: State = "sending"
    domain: str | None = None
    """UUID of the domain that goes along."""
    was_running: bool = False
    """Whether the move has shut a VM down, which is to run in the end."""
    shut_down: str | None = None
    """UUID of that VM's domain."""
    handed_over: Literal["", "defined", "started"] = ""
    """How far the domain that goes along is on the other host."""
    is_kept: bool = False
    """Whether all is done, and the volume was to stay."""

    @property
    def place(self) -> str:
        """HOST:LVSTORE/NAME, for people."""
        return f"{self.host}:{self.to}"


def read(volumes: Volumes, source: Volume) -> HostNote | None:
    """Returns what is noted at a volume; None: it goes to no other host.

    Raises:
        VolumeError: nobody can read it.
    """
    text = volumes.xattrs(source.uuid).get(XATTR)
    if text is None:
        return None
    try:
        found = HostNote(**json.loads(text))
    except (TypeError, ValueError):
        found = None
    if found is None or found.state not in ("sending", "moved"):
        raise VolumeError(
            f"the xattr {XATTR} of volume {source.path} is damaged, so nobody knows to which host"
            " it goes: if it counts here, remove that (virtlun_lvol_remove_xattr)"
        )
    return found


def write(volumes: Volumes, source: Volume, note: HostNote, **changed: object) -> HostNote:
    """Notes something at a volume, lasting and at once; returns what is noted then."""
    new = replace(note, **changed)  # type: ignore[arg-type]
    with deferred():
        volumes.set_xattr(source.uuid, XATTR, json.dumps(asdict(new)))
    return new


def hold(volumes: Volumes, source: Volume, note: HostNote) -> None:
    """Has nobody begin to use a volume; safe to repeat."""
    # By its own UUID, which the other one has, too: it can be deleted, as what it names is there.
    gone = {"to": source.uuid, "path": note.place}
    volumes.set_xattr(source.uuid, notes.MOVED, json.dumps(gone))


def free(volumes: Volumes, source: Volume) -> None:
    """Has the volume be a disk again, if `hold` has it be none; safe to repeat.

    One whose VM has gone on with another volume of this host stays none.
    """
    text = volumes.xattrs(source.uuid).get(notes.MOVED)
    if text is not None and _to(text) == source.uuid:
        volumes.remove_xattr(source.uuid, notes.MOVED)


def _to(text: str) -> str | None:
    """Returns the UUID of the volume that has the place of one, as is noted at that."""
    try:
        to = json.loads(text).get("to")
    except (AttributeError, ValueError):
        return None
    return to if isinstance(to, str) else None
