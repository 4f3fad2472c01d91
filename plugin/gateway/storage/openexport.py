"""Exports a volume, or an lvol snapshot of it, as a file, and ends the export.

The export can be ended at whatever point it was cut off, as it is noted before it begins
(`leftovers`): the name of its snapshot is chosen first.
"""

from __future__ import annotations

import json
import uuid as uuids
from dataclasses import asdict, dataclass
from pathlib import Path

from plugin.gateway.locks import volume_name
from pydataplane.errors import VolumeError, VolumeNotFoundError
from pydataplane.lvols import Volume
from pydataplane.volumes import Volumes


@dataclass(frozen=True)
class OpenExport:
    """A volume that is exported, or about to be."""

    store: str
    """UUID of the volume's lvstore."""
    name: str
    """The volume's."""
    uuid: str
    """The volume's."""
    snapshot: str | None
    """What follows the `@` in the name of the lvol snapshot; None: it is the volume itself."""
    thick: bool
    """Whether the volume is thick: the snapshot makes it thin, which ends with the snapshot."""

    @staticmethod
    def of(store: str, volume: Volume, *, snapshot: bool) -> OpenExport:
        """Returns what is to begin with a volume of an lvstore (its UUID)."""
        moment = f"vol-download-{uuids.uuid4().hex[:12]}" if snapshot else None
        return OpenExport(store, volume.name, volume.uuid, moment, not volume.thin)

    @staticmethod
    def read(text: str) -> OpenExport | None:
        """Reads what `text` returns; None: it is not that."""
        try:
            return OpenExport(**json.loads(text))
        except (ValueError, TypeError):
            return None

    @property
    def text(self) -> str:
        """How it is noted."""
        return json.dumps(asdict(self))

    @property
    def lock(self) -> str:
        """The lock of the volume's name."""
        return volume_name(self.store, self.name)

    # What follows blocks; it raises TargetError, and VolumeError as it says.

    def check_free(self, volumes: Volumes) -> None:
        """Refuses a volume that is a file already: whose that is would not be known at the end.

        Raises:
            VolumeError: it is.
        """
        if self.snapshot is None and volumes.export_of(self.uuid) is not None:
            raise VolumeError(
                f"volume {volumes.lvstore(self.store).name}/{self.name} is in use as a file of"
                " this host: end that first (virtlun_export_delete)"
            )

    def begin(self, volumes: Volumes, *, write: bool) -> Path:
        """Returns the file; to `write` it is that of the volume itself."""
        of = self.uuid
        if self.snapshot is not None:
            (taken,) = volumes.snapshot([of], self.snapshot)
            of = taken.uuid
        return volumes.export(of, read_only=not write)

    def end(self, volumes: Volumes) -> None:
        """Leaves the volume as it was. Safe to repeat, and if nothing was begun."""
        if self.snapshot is None:
            volumes.end_export(self.uuid)
            return
        path = f"{volumes.lvstore(self.store).name}/{self.name}@{self.snapshot}"
        try:
            taken = volumes.volume(path)
        except VolumeNotFoundError:
            pass
        else:
            volumes.end_export(taken.uuid)
            volumes.delete(taken.uuid, missing_ok=True)
        if self.thick:
            self._make_thick(volumes)

    def _make_thick(self, volumes: Volumes) -> None:
        """Reserves again what the snapshot did not: it has given back all that it held."""
        try:
            volume = volumes.volume(self.uuid)
        except VolumeNotFoundError:
            return
        # With another snapshot it is thin for that one, and would get a copy of it.
        if volume.thin and volume.parent is None:
            volumes.inflate(volume.uuid)
