"""One call at a time for each volume; a second one is told ABORTED at once and comes again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from csi.errors import Code, Failure


class VolumeLocks:
    """Which volumes have a call in flight; of the size of what is in flight."""

    def __init__(self) -> None:
        """Begins with none."""
        self._mutex = threading.Lock()
        self._held: set[str] = set()

    @contextmanager
    def hold(self, volume: str) -> Iterator[None]:
        """Holds the volume's lock for a `with` block.

        Raises:
            Failure: ABORTED, another call holds it.
        """
        with self._mutex:
            if volume in self._held:
                raise Failure(
                    Code.ABORTED,
                    f"another operation on volume {volume} is in progress: try again later",
                )
            self._held.add(volume)
        try:
            yield
        finally:
            with self._mutex:
                self._held.remove(volume)
