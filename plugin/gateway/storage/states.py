"""Which of our pools are stopped or undefined: a file each, lost with the host's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path

from plugin.gateway.errors import noting

SUFFIX = ".pool"


class State(Enum):
    """What a pool is to clients."""

    ACTIVE = "active"
    """As every one is of which nothing is noted."""
    INACTIVE = "inactive"
    """It is defined, and shows no volumes."""
    UNDEFINED = "undefined"
    """It is not shown."""


class States:
    """By the lvstore's UUID."""

    def __init__(self, folder: Path) -> None:
        """Notes in `folder`, which is for root alone, and knows what was noted there before."""
        self._folder = folder
        self._noted = dict(self._read())

    def _read(self) -> Iterator[tuple[str, State]]:
        for file in self._folder.glob(f"*{SUFFIX}"):
            with suppress(OSError, ValueError):
                yield file.name.removesuffix(SUFFIX), State(file.read_text().strip())

    def of(self, uuid: str) -> State:
        """Returns the state of a pool."""
        return self._noted.get(uuid, State.ACTIVE)

    def set(self, uuid: str, state: State) -> None:
        """Notes a pool's state.

        Raises:
            Refused: that cannot be written.
        """
        path = self._folder / f"{uuid}{SUFFIX}"
        with noting(path):
            if state is State.ACTIVE:
                path.unlink(missing_ok=True)
            else:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                new = path.with_suffix(".new-pool")
                new.write_text(state.value)
                new.rename(path)
        self._noted[uuid] = state
