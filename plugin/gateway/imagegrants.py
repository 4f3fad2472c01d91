"""Records which images a client with the right to read their secrets opened for a domain.

A domain's metadata does not say that: any client that may change a domain at libvirtd itself can
name any secret there. So the gateway opens again in its own name, after the target has lost them,
only the images that are recorded here. With each, which LUN it is on: a running guest goes on with
that one alone, whatever has its number by then. One file a domain; they are lost with the host's
memory, as the running domains are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from plugin.gateway.errors import noting
from pydataplane.domain.images import LunIdentity

SUFFIX = ".images"


class ImageGrants:
    """By the name of a domain's controller."""

    def __init__(self, folder: Path) -> None:
        """Notes in `folder`, which is for root alone."""
        self._folder = folder

    def has(self, controller: str, uuid: str) -> bool:
        """Whether an image (its bdev's UUID) was opened for a domain in a client's name."""
        return uuid in self._read(controller)

    def of(self, controller: str) -> set[str]:
        """Returns the images (their bdevs' UUIDs) that a domain may have open still."""
        return set(self._read(controller))

    def lun(self, controller: str, uuid: str) -> LunIdentity | None:
        """Returns which LUN such an image is on; None: it is on none, or not known."""
        return self._read(controller).get(uuid)

    def add(self, controller: str, opened: Mapping[str, LunIdentity | None]) -> None:
        """Notes that these were, and which LUNs they are on.

        Raises:
            Refused: that cannot be written.
        """
        known = self._read(controller)
        there = known | dict(opened)
        if there == known:
            return
        path = self._path(controller)
        new = path.with_suffix(".new")
        with noting(path):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            new.write_text("".join(f"{_line(*each)}\n" for each in sorted(there.items())))
            new.rename(path)

    def forget(self, controller: str) -> None:
        """Forgets those of a domain that does not run any more."""
        self._path(controller).unlink(missing_ok=True)

    def _path(self, controller: str) -> Path:
        return self._folder / f"{controller}{SUFFIX}"

    def _read(self, controller: str) -> dict[str, LunIdentity | None]:
        try:
            lines = self._path(controller).read_text().splitlines()
        except OSError:
            return {}
        known: dict[str, LunIdentity | None] = {}
        for line in lines:
            match line.split():
                case [uuid, identity, size] if size.isdecimal():
                    known[uuid] = LunIdentity(identity, int(size))
                case [uuid]:
                    known[uuid] = None
        return known


def _line(uuid: str, lun: LunIdentity | None) -> str:
    return uuid if lun is None else f"{uuid} {lun.uuid} {lun.block_size}"
