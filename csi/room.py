"""What volumes of a class can still get from an lvstore, and what was promised of it.

A volume is promised its size, a snapshot what it has, which is all that it ever takes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from csi.errors import Code, Failure
from csi.parameters import Parameters
from csi.targets import Targets
from pydataplane.lvstores import Lvstore
from pydataplane.volumes import Volumes

UNKNOWN_BYTES = 1 << 60
"""The room of a pool of Ceph whose cluster does not tell it: no claim waits for that."""


class Room:
    """The room of one node's lvstores, and of its pools of Ceph."""

    def __init__(self, targets: Targets, node: str) -> None:
        """Asks `targets`, those of `node`."""
        self._targets = targets
        self._node = node
        self._promising = threading.Lock()
        """Held from a look at what is promised until it is more."""

    def left(self, parameters: Parameters, store: Lvstore) -> int:
        """Returns the bytes that volumes of a class can still get from an lvstore together."""
        if not store.tells_room:
            return UNKNOWN_BYTES
        most = parameters.promised_most(store)
        if most is None or store.free == 0:
            return store.free
        return max(0, most - self._promised(store))

    def _promised(self, store: Lvstore) -> int:
        """Returns the bytes that the lvols of an lvstore may take together."""
        lvols = Volumes(self._targets.of_store(store.uuid)).volumes(store.uuid)
        return sum(lvol.allocated if lvol.snapshot else lvol.size for lvol in lvols)

    @contextmanager
    def promise(self, parameters: Parameters, store: Lvstore, more: int) -> Iterator[None]:
        """Keeps others of a limited class from the room in which lvols take `more` bytes.

        Raises:
            Failure: RESOURCE_EXHAUSTED, the class may not promise so many bytes more.
        """
        most = parameters.promised_most(store)
        if most is None:
            yield
            return
        with self._promising:  # a thin volume is made at once
            promised = self._promised(store)
            if promised + more > most:
                raise Failure(
                    Code.RESOURCE_EXHAUSTED,
                    f"the volumes of lvstore {store.name} of node {self._node} have {promised} "
                    f"bytes, and {more} more are over the class's overcommit "
                    f"{parameters.overcommit} of {store.total} bytes: ask for less, delete volumes "
                    "there or add to the lvstore",
                )
            yield
