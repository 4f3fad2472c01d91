"""Volumes and snapshots that are in the lvstore already, for Cinder to take over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cinder import exception

from plugin.openstack.lvols import Lvols
from plugin.openstack.refusals import told
from pydataplane.lvols import Volume

GIB = 1 << 30
SOURCE = "source-name"
"""Key of a reference: the name of an lvol."""


class ManageableLvols:
    """What there is in an lvstore."""

    def __init__(self, lvols: Lvols) -> None:
        """Looks at that of `lvols`."""
        self._lvols = lvols

    def lvol(self, reference: Mapping[str, str], *, snapshot: bool) -> Volume:
        """Returns the volume that nobody uses, or the snapshot, that a reference names.

        Raises:
            ManageExistingInvalidReference: it names none.
        """
        name = reference.get(SOURCE)
        if name is None:
            raise _invalid(reference, f"a reference has the key {SOURCE}, with an lvol's name")
        with told(f"lvstore {self._lvols.lvstore}"):
            lvols = {each.name: (each, used) for each, used in self._lvols.all()}
        found, used = lvols.get(name, (None, False))
        if found is None or found.snapshot != snapshot:
            kind = "snapshot" if snapshot else "volume"
            raise _invalid(reference, f"lvstore {self._lvols.lvstore} has no {kind} {name}")
        if used and not snapshot:
            raise _invalid(reference, f"{found.path} is in use: detach it first")
        return found

    def snapshot_of(self, volume: str, reference: Mapping[str, str]) -> Volume:
        """Returns the snapshot of a volume that a reference names; raises as `lvol`."""
        found = self.lvol(reference, snapshot=True)
        with told(f"volume {volume}"):
            line = self._lvols.lines().get(volume, [])
        if found.name not in line:
            path = self._lvols.path(volume)
            raise _invalid(reference, f"{found.path} is no snapshot of {path}")
        return found

    def volumes(self, managed: list[Any]) -> list[dict[str, Any]]:
        """Returns the volumes, as Cinder lists them; it has those of `managed`."""
        with told(f"lvstore {self._lvols.lvstore}"):
            lvols = self._lvols.all()
        return [_entry(each, managed, used=used) for each, used in lvols if not each.snapshot]

    def snapshots(self, managed: list[Any]) -> list[dict[str, Any]]:
        """Returns the snapshots that volumes are made of, each with the first one of these."""
        with told(f"lvstore {self._lvols.lvstore}"):
            lvols = {each.name: each for each, _ in self._lvols.all()}
            lines = self._lvols.lines()
        found: dict[str, dict[str, Any]] = {}
        for name, line in lines.items():
            for snapshot in (each for each in line if each in lvols):
                entry = _entry(lvols[snapshot], managed, used=False)
                found.setdefault(snapshot, entry | {"source_reference": {SOURCE: name}})
        return list(found.values())


def gibibytes(volume: Volume) -> int:
    """Returns the size of a volume as Cinder has it, rounded up."""
    return math.ceil(volume.size / GIB)


def _entry(lvol: Volume, managed: list[Any], *, used: bool) -> dict[str, Any]:
    known = next((each["id"] for each in managed if each["name"] == lvol.name), None)
    why = "already managed" if known is not None else "in use" if used else None
    return {
        "reference": {SOURCE: lvol.name},
        "size": gibibytes(lvol),
        "cinder_id": known,
        "safe_to_manage": why is None,
        "reason_not_safe": why,
        "extra_info": None,
    }


def _invalid(reference: Mapping[str, str], why: str) -> Exception:
    found: Exception = exception.ManageExistingInvalidReference(
        existing_ref=dict(reference), reason=why
    )
    return found
