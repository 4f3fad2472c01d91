"""What is noted at a volume that another one moves to, and what follows of it.

| state | the old volume | the new one |
| --- | --- | --- |
| copying | counts | has part of it, or was overtaken |
| whole | counts if it is there | has all of it, durably, and counts if the old one is gone |

The target shows a volume with such a note to no VM.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Literal

from pydataplane.errors import VolumeError
from pydataplane.volumes import MOVE_XATTR, Volumes

XATTR = MOVE_XATTR

IDENTITY = "virtlun.identity"
"""Xattr of a volume that guests know as another one, whose place it has: the UUID of that.

The target makes serial and WWN of it.
"""

State = Literal["copying", "whole"]


@dataclass(frozen=True)
class Note:
    """What a volume is made for."""

    of: str
    """UUID of the volume that moves."""
    path: str
    """LVSTORE/NAME of that."""
    state: State = "copying"

    @property
    def text(self) -> str:
        """Returns what stands in the xattr."""
        return json.dumps(asdict(self))


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
    of, path, state = (values.get(name) for name in ("of", "path", "state"))
    if isinstance(of, str) and isinstance(path, str) and state in ("copying", "whole"):
        return Note(of, path, "whole" if state == "whole" else "copying")
    raise VolumeError(
        f"the xattr {XATTR} of volume {volumes.lvol(uuid).path} is damaged, so nobody knows what is"
        " on it: delete the volume if what should move there is whole"
    )


def write(volumes: Volumes, uuid: str, note: Note, state: State) -> Note:
    """Notes another state, lasting and at once."""
    changed = replace(note, state=state)
    volumes.set_xattr(uuid, XATTR, changed.text)
    return changed
