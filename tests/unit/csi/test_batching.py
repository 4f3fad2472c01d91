"""Questions that are answered together."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from csi.batching import BatchedQuestions
from tests.support.wait import until


class Slow:
    """Answers when it is let; notes which keys it was asked for, and how many at a time."""

    def __init__(self) -> None:
        self.asked: list[set[str]] = []
        self.go = threading.Semaphore(0)
        self.failure: Exception | None = None
        self.running = 0

    def __call__(self, keys: Set[str]) -> Mapping[str, int]:
        self.running += 1
        assert self.running == 1
        self.asked.append(set(keys))
        number = len(self.asked)
        self.go.acquire()
        self.running -= 1
        if self.failure:
            raise self.failure
        return dict.fromkeys(keys, number)


def test_who_asks_while_one_runs_shares_the_next() -> None:
    slow = Slow()
    questions = BatchedQuestions(slow)
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(questions.ask, "a")
        until(lambda: slow.asked == [{"a"}], "the first to run")
        later = [pool.submit(questions.ask, key) for key in "abcdefgh"]
        until(lambda: waiting(questions) == {*"abcdefgh"}, "all to wait")
        slow.go.release(2)
        assert first.result() == 1
        assert {each.result() for each in later} == {2}
    assert slow.asked == [{"a"}, {*"abcdefgh"}]
    slow.go.release()
    assert questions.ask("a") == 3


def test_a_failure_is_that_of_all_who_waited_and_of_nobody_after() -> None:
    slow = Slow()
    questions = BatchedQuestions(slow)
    slow.failure = OSError("away")
    with ThreadPoolExecutor(3) as pool:
        asked: list[Future[int]] = [pool.submit(questions.ask, "a")]
        until(lambda: len(slow.asked) == 1, "the first to run")
        asked += [pool.submit(questions.ask, key) for key in "ab"]
        until(lambda: waiting(questions) == {"a", "b"}, "both to wait")
        slow.go.release(2)
        for each in asked:
            with pytest.raises(OSError, match="away"):
                each.result()
    assert len(slow.asked) == 2
    slow.failure = None
    slow.go.release()
    assert questions.ask("b") == 3


def waiting(questions: BatchedQuestions[str, int]) -> set[str]:
    """Returns the keys that wait for the next run."""
    return set(questions._next[1]) if questions._next else set()
