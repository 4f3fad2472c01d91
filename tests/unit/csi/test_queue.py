"""The queue of the VmVolume controller."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from csi.cluster import backoff
from csi.queue import Due, Queue


def keys(queue: Queue[str], count: int) -> list[str]:
    """Returns the next keys."""
    found = [queue.get() for _ in range(count)]
    return [due.key for due in found if due]


def test_a_key_is_in_it_once_in_the_order_of_time() -> None:
    queue: Queue[str] = Queue()
    queue.put("late", 0.05)
    for _ in range(3):
        queue.put("now")
    queue.put("then")
    assert len(queue) == 3
    assert keys(queue, 3) == ["now", "then", "late"]
    assert len(queue) == 0


def test_it_says_whether_a_key_is_due() -> None:
    queue: Queue[str] = Queue()
    assert not queue.waiting()
    queue.put("late", 1000)
    assert not queue.waiting()
    queue.put("now")
    assert queue.waiting()
    assert keys(queue, 1) == ["now"]
    assert not queue.waiting()


def test_the_earlier_time_counts() -> None:
    queue: Queue[str] = Queue()
    queue.put("a", 1000)
    queue.put("b", 0.01)
    queue.put("a")
    queue.put("a", 500)
    assert keys(queue, 2) == ["a", "b"]
    assert len(queue) == 0


def test_it_stays_of_the_size_of_its_keys() -> None:
    queue: Queue[str] = Queue()
    for _ in range(1000):
        queue.put("a", 1000)
        queue.put("b", 1000)
        queue.put("a")
        assert keys(queue, 1) == ["a"]
    assert len(queue) == 1
    assert len(queue._heap) < 64
    queue.put("b")
    assert keys(queue, 1) == ["b"]


def test_it_says_since_when_a_key_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    clocks = SimpleNamespace(time=lambda: now, monotonic=lambda: now - 900)
    monkeypatch.setattr("csi.queue.time", clocks)
    queue: Queue[str] = Queue()
    queue.put("a")
    now += 1
    queue.put("a")  # a second reason does not make it later
    now += 1
    assert queue.get() == Due("a", since=1000.0)


def test_a_key_put_while_it_is_worked_on_is_there_again() -> None:
    queue: Queue[str] = Queue()
    queue.put("a")
    assert keys(queue, 1) == ["a"]
    queue.put("a")
    assert keys(queue, 1) == ["a"]


def test_retries_wait_longer_each_time_until_it_is_done() -> None:
    queue: Queue[str] = Queue()
    waits = [queue.retry("a") for _ in range(12)]
    assert 0.015 <= waits[0] <= 0.02
    assert all(7.5 <= wait <= 10 for wait in waits[-2:])
    assert waits[4] > waits[0]
    assert queue.failures("a") == 12
    queue.done("a")
    assert queue.retry("a") <= 0.02


def test_the_longest_wait_can_be_another() -> None:
    queue: Queue[str] = Queue(60.0)
    waits = [queue.retry("a") for _ in range(20)]
    assert 45 <= waits[-1] <= 60


def test_closing_wakes_the_worker() -> None:
    queue: Queue[str] = Queue()
    found: list[object] = []
    worker = threading.Thread(target=lambda: found.append(queue.get()))
    worker.start()
    queue.close()
    worker.join(60)
    assert found == [None]
    queue.put("a")
    assert queue.get() is None


def test_a_wait_is_bounded_however_often_it_failed() -> None:
    assert 7.5 <= backoff(10_000, 0.2, 10.0) <= 10.0
    assert 0.15 <= backoff(1, 0.2, 10.0) <= 0.2
