"""One operation at a time on what a launcher pod has; a second one waits for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from csi.errors import Code, Failure

WAIT_S = 20.0
"""Below the 30 s that virt-handler gives a node hook."""


class PodLocks:
    """Which pods have an operation under way; of the size of what is under way."""

    def __init__(self) -> None:
        """Begins with none."""
        self._mutex = threading.Lock()
        self._held: dict[str, _Held] = {}

    @contextmanager
    def hold(self, pod: str) -> Iterator[None]:
        """Holds the pod's lock for a `with` block; the thread that has it may take it again.

        Raises:
            Failure: ABORTED, another operation has held it for WAIT_S seconds.
        """
        with self._mutex:
            held = self._held.setdefault(pod, _Held())
            held.users += 1
        try:
            if not held.lock.acquire(timeout=WAIT_S):
                raise Failure(
                    Code.ABORTED,
                    f"another operation on the volumes of pod {pod} is in progress: try again "
                    "later",
                )
            try:
                yield
            finally:
                held.lock.release()
        finally:
            with self._mutex:
                held.users -= 1
                if held.users == 0:
                    del self._held[pod]


class _Held:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users = 0
