"""One call at a time for each volume; a second one is told ABORTED and comes again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from csi.errors import Code, Failure


class VolumeLocks:
    """Which volumes and snapshots have a call in flight; of the size of what is in flight."""

    def __init__(self) -> None:
        """Begins with none."""
        self._changed = threading.Condition()
        self._held: set[str] = set()

    @contextmanager
    def hold(self, volume: str, *, wait_s: float = 0) -> Iterator[None]:
        """Holds the volume's lock for a `with` block.

        Where another call holds it, that is waited for, `wait_s` seconds at most.

        Raises:
            Failure: ABORTED, another call holds it.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: volume not in self._held, wait_s):
                raise Failure(
                    Code.ABORTED,
                    f"another operation on volume {volume} is in progress: try again later",
                )
            self._held.add(volume)
        try:
            yield
        finally:
            with self._changed:
                self._held.remove(volume)
                self._changed.notify_all()
