"""A queue of keys for workers: each key is in it once, at the earliest time asked for.

A key that is put while it is worked on is there again afterwards, so no change is ever missed.
"""

from __future__ import annotations

import heapq
import threading
import time
from dataclasses import dataclass
from typing import Generic, TypeVar

from csi.cluster import backoff

Key = TypeVar("Key")
RETRY_S = (0.02, 10.0)
"""Waits after a failure: the first, and the longest, seconds."""
SLACK = 16  # entries that are no longer due, above as many as there are keys


@dataclass(frozen=True)
class Due(Generic[Key]):
    """A key whose time has come."""

    key: Key
    since: float
    """When it became due, seconds since the epoch: for the first of the reasons to look at it."""


class Queue(Generic[Key]):
    """Keys and when they are due; of the size of the number of keys. Threads may share it."""

    def __init__(self, longest_s: float = RETRY_S[1]) -> None:
        """Begins empty; `longest_s` is how long a retry waits at most, seconds."""
        self._longest_s = longest_s
        self._changed = threading.Condition()
        self._due: dict[Key, float] = {}  # monotonic seconds
        self._heap: list[tuple[float, int, Key]] = []
        self._order = 0  # of entries of one time; keys need not be comparable
        self._failures: dict[Key, int] = {}
        self._closed = False

    def put(self, key: Key, after_s: float = 0.0) -> None:
        """Makes a key due `after_s` seconds from now, or earlier if it is to be already."""
        at = time.monotonic() + after_s
        with self._changed:
            known = self._due.get(key)
            if known is not None and known <= at:
                return
            self._due[key] = at
            self._order += 1
            if len(self._heap) > 2 * len(self._due) + SLACK:
                self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
                heapq.heapify(self._heap)
            heapq.heappush(self._heap, (at, self._order, key))
            self._changed.notify()

    def retry(self, key: Key) -> float:
        """Makes a key due after a wait that grows with each failure in a row, and returns it."""
        with self._changed:
            self._failures[key] = self._failures.get(key, 0) + 1
            wait = backoff(self._failures[key], RETRY_S[0], self._longest_s)
        self.put(key, wait)
        return wait

    def failures(self, key: Key) -> int:
        """Returns how often in a row a key has failed."""
        with self._changed:
            return self._failures.get(key, 0)

    def done(self, key: Key) -> None:
        """Forgets the failures of a key."""
        with self._changed:
            self._failures.pop(key, None)

    def get(self) -> Due[Key] | None:
        """Waits for the next key that is due and takes it out; None once the queue is closed."""
        with self._changed:
            while not self._closed:
                wait = self._until_next()
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                    continue
                at, _, key = heapq.heappop(self._heap)
                del self._due[key]
                return Due(key, time.time() - (time.monotonic() - at))
        return None

    def waiting(self) -> bool:
        """Whether a key is due."""
        with self._changed:
            wait = self._until_next()
            return wait is not None and wait <= 0

    def close(self) -> None:
        """Lets `get` return None, from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        """Returns how many keys there are."""
        with self._changed:
            return len(self._due)

    def _until_next(self) -> float | None:
        """Returns the seconds until the next key is due; None: there is no key."""
        while self._heap:
            at, _, key = self._heap[0]
            if self._due.get(key) == at:
                return at - time.monotonic()
            heapq.heappop(self._heap)  # it was put earlier since
        return None
