"""Which of our PersistentVolumes have a handle, as a watch of them tells.

Whoever asks reads those that it is told of, as they are at that moment: what is kept of them here
says only which need not be read. So to ask for a volume of which there is no PersistentVolume costs
the API server nothing, and nor do those that another node's credentials have made of a handle.
"""

from __future__ import annotations

import threading
from sys import intern
from typing import NamedTuple

from csi.cluster import Change
from csi.objects import created_at, handle_of, node_of


class Known(NamedTuple):
    """What is kept of one."""

    name: str
    node: str | None
    """The one that its affinity names."""
    created: str
    """As PersistentVolume.created."""


class VolumeIndex:
    """Ours by handle; of the size of our volumes in the cluster. Threads may share it."""

    def __init__(self) -> None:
        """Knows nothing before a watch has told all that there is."""
        self._mutex = threading.Lock()
        self._complete = False
        self._handles: dict[str, str] = {}  # by name
        self._known: dict[str, tuple[Known, ...]] = {}  # by handle

    def note(self, change: Change) -> None:
        """Takes one change of a PersistentVolume, or that all were told."""
        if change.what == "complete":
            self._complete = True
            return
        name = change.object["metadata"]["name"]
        handle = handle_of(change.object) if change.what == "present" else ""
        known = None
        if handle:
            node = node_of(change.object)
            known = Known(name, intern(node) if node else None, created_at(change.object))
        with self._mutex:
            before = self._handles.pop(name, "")
            if before:
                left = tuple(each for each in self._known.pop(before) if each.name != name)
                self._known |= {before: left} if left else {}
            if known is not None:
                self._handles[name] = handle
                self._known[handle] = (*self._known.get(handle, ()), known)

    def of(self, handle: str) -> tuple[Known, ...] | None:
        """Returns the PersistentVolumes with a handle; None: nothing is known yet."""
        with self._mutex:
            return self._known.get(handle, ()) if self._complete else None
