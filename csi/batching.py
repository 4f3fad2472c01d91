"""Questions that are answered together: one costly answer at a time, which all get who wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Set
from concurrent.futures import Future
from typing import Generic, TypeVar

Key = TypeVar("Key")
Answer = TypeVar("Answer")


class BatchedQuestions(Generic[Key, Answer]):
    """Answers questions by key. Any number of threads may ask."""

    def __init__(self, answer: Callable[[Set[Key]], Mapping[Key, Answer]]) -> None:
        """Takes what answers several keys at once; it never runs twice at the same time."""
        self._answer = answer
        self._turn = threading.Lock()  # held while it runs
        self._mutex = threading.Lock()
        self._next: tuple[Future[Mapping[Key, Answer]], set[Key]] | None = None

    def ask(self, key: Key) -> Answer:
        """Returns the answer for a key, of a run that begins after the question.

        Who asks while one runs waits for its end, then for that of the next one, together with all
        others who do. What it raises is raised for all of these.
        """
        with self._mutex:
            runs = self._next is None
            future, keys = self._next = self._next or (Future(), set())
            keys.add(key)
        if runs:
            self._run(future, keys)
        return future.result()[key]

    def _run(self, future: Future[Mapping[Key, Answer]], keys: set[Key]) -> None:
        with self._turn:
            with self._mutex:
                self._next = None  # who asks from now on is of the one after it
            try:
                future.set_result(self._answer(keys))
            except BaseException as error:
                future.set_exception(error)
