"""Work that may take longer than a call can: it goes on, and the same call made again waits for it.

The kubelet waits two minutes for a call. What is cut off in the middle (a file system's check or
growth) would begin anew each time and never end, or leave what it works on half done; and what
waits for a target or a disk that does not answer cannot be cut off at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from csi.errors import Code, Failure

T = TypeVar("T")
WAIT_S = 100.0
"""Longest wait of a call, seconds: below the 2 minutes that the kubelet waits."""


class LongCalls:
    """The work that goes on, each in a thread of its own; of the size of what is going on."""

    def __init__(self, wait_s: float = WAIT_S) -> None:
        """Begins with none; `wait_s` is how long each call waits, seconds."""
        self._wait_s = wait_s
        self._mutex = threading.Lock()
        self._jobs: dict[object, Future[Any]] = {}

    def run(self, key: object, what: str, work: Callable[[], T]) -> T:
        """Does `work` and returns its result, or waits for that of the same `key` that goes on.

        Whatever `work` raises passes through, to each call that waits for it.

        Raises:
            RuntimeError: the system gives no thread; nothing was begun.
            Failure: DEADLINE_EXCEEDED, it goes on; `what` names it in the sentence.
        """
        with self._mutex:
            job = self._jobs.get(key)
            if job is None:
                job = Future()
                threading.Thread(
                    target=self._work, args=(key, job, work), name=what, daemon=True
                ).start()
                self._jobs[key] = job  # only of a thread that runs, which waits for the mutex
        try:
            return job.result(self._wait_s)  # type: ignore[no-any-return]
        except TimeoutError as error:
            if job.done():  # just now, or the error is the work's own
                return job.result()  # type: ignore[no-any-return]
            raise Failure(
                Code.DEADLINE_EXCEEDED,
                f"{what} has not ended within {self._wait_s:.0f} s and goes on: make the same call "
                "again, which waits for it; if it never ends, see whether the node's target and "
                "the device under its lvstore answer",
            ) from error

    def _work(self, key: object, job: Future[T], work: Callable[[], T]) -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with self._mutex:
            del self._jobs[key]
        if failure is not None:
            job.set_exception(failure)
        else:
            job.set_result(result)  # type: ignore[arg-type]
