"""Which of our PersistentVolumes have a handle, as a watch of them tells: their names alone.

Whoever asks reads those that it is told of, as they are at that moment: nothing else is kept, so
nothing is out of date but a name that is a moment old. Where the watch is cut off, or silent for
longer than it may be, nothing is known. So to ask for a volume of which there is no
PersistentVolume costs the API server nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from csi.cluster import SILENCE_S, Change
from csi.objects import handle_of


class VolumeIndex:
    """Names by handle; of the size of our volumes in the cluster. Threads may share it."""

    def __init__(self) -> None:
        """Knows nothing before a watch has told all that there is."""
        self.heard: Callable[[], float | None] = time.monotonic
        """Says when the watch told last that it goes on (Cluster.heard)."""
        self._mutex = threading.Lock()
        self._complete = False
        self._handles: dict[str, str] = {}  # by name
        self._names: dict[str, tuple[str, ...]] = {}  # by handle

    def note(self, change: Change) -> None:
        """Takes one change of a PersistentVolume, or that all were told."""
        with self._mutex:
            if change.what == "complete":
                self._complete = True
                return
            name = change.object["metadata"]["name"]
            present = change.what == "present"
            handle = handle_of(change.object) if present else ""
            before = self._handles.get(name, "")
            if handle == before:
                return
            if before:
                del self._handles[name]
                left = tuple(each for each in self._names.pop(before) if each != name)
                self._names |= {before: left} if left else {}
            if handle:
                self._handles[name] = handle
                self._names[handle] = (*self._names.get(handle, ()), name)

    def names(self, handle: str) -> tuple[str, ...] | None:
        """Returns the names of the PersistentVolumes with a handle; None: not known now."""
        heard = self.heard()
        if heard is None or time.monotonic() - heard > SILENCE_S:
            return None
        with self._mutex:
            return self._names.get(handle, ()) if self._complete else None
