"""What a gateway that was killed has left in a target while it read or wrote a volume."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import structlog

from plugin.gateway.errors import GatewayError, noting
from plugin.gateway.targets import Targets
from pydataplane.volumes import Volumes

SUFFIX = ".stream"
SNAPSHOT = "snapshot"
"""In the file of an lvol snapshot, which goes as well; in that of a volume there is nothing."""

_log = structlog.get_logger(__name__)


class Leftovers:
    """A file for each lvol (its UUID) that is shown as a file."""

    def __init__(self, folder: Path) -> None:
        """Notes in `folder`, which is for root alone."""
        self._folder = folder

    def add(self, uuid: str, *, snapshot: bool) -> None:
        """Notes one.

        Raises:
            Refused: that cannot be written.
        """
        path = self._path(uuid)
        with noting(path):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_text(SNAPSHOT if snapshot else "")

    def remove(self, uuid: str) -> None:
        """Forgets one."""
        with suppress(OSError):
            self._path(uuid).unlink(missing_ok=True)

    def _path(self, uuid: str) -> Path:
        return self._folder / f"{uuid}{SUFFIX}"

    async def clean(self, targets: Targets) -> None:
        """Ends all that are noted; what a target that does not answer has waits for the next."""
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            uuid = path.name.removesuffix(SUFFIX)
            with suppress(GatewayError, OSError):
                snapshot = path.read_text() == SNAPSHOT
                target = await targets.of_volume(uuid)
                await target.do(lambda v, u=uuid, s=snapshot: _end(v, u, s))  # type: ignore[misc]
                self.remove(uuid)
                _log.info("ended what a gateway before this one had begun", volume=uuid)


def _end(volumes: Volumes, uuid: str, snapshot: bool) -> None:
    volumes.end_export(uuid)
    if snapshot:
        volumes.delete(uuid, missing_ok=True)
