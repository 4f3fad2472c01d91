"""A driver without an in-flight region: what was in flight when the target died cannot be known.

A queue with such requests is not started again, whoever restarts, until its driver resets it; one
that was quiet goes on. With our own initiator, and the mark in the state directory between them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.frozen import freeze
from tests.support.initiator import Initiator, Refused, connected
from tests.support.target import Target
from tests.support.wait import until

MIB = 1 << 20
BLOCK = 512
LOST, QUIET = 0, 1
"""Request queues: with a request in flight when the target dies, and without."""
FIRST = 2
"""Number of the first request queue; control and event queue come before (virtio 1.2, 5.6.2)."""
SENTENCE = "the queue is not started until its driver resets it"


def stopped(target: Target) -> dict[int, str]:
    """The queues that are not started, and why, as `vhost_get_controllers` tells."""
    (found,) = target.rpc("vhost_get_controllers")
    (session,) = found["sessions"]
    return {queue["queue"]: queue["reason"] for queue in session["stopped_queues"]}


def stop_of_lost(target: Target) -> str:
    """Why the queue that cannot be known is stopped; it may be set up after the quiet one."""
    now = until(lambda: stopped(target), "a queue is stopped")
    assert list(now) == [FIRST + LOST]
    return now[FIRST + LOST]


def write(guest: Initiator, lba: int, data: bytes, **given: Any) -> dict[str, Any]:
    """Puts a WRITE(10) in flight."""
    cdb = bytes([0x2A, 0, *lba.to_bytes(4, "big"), 0, *(len(data) // BLOCK).to_bytes(2, "big"), 0])
    return guest.send("submit", cdb=cdb, target=0, data_out=data, **given)


@pytest.fixture
def guest(target: Target) -> Any:
    """Connected without an in-flight region, with two request queues."""
    target.make_lvstore("lvs0", 64 * MIB)
    target.rpc("bdev_lvol_create", lvol_name="v", size_in_mib=8, lvs_name="lvs0")
    target.attach("c0", "lvs0/v")
    with connected(target, "c0", queues=2, inflight=False) as guest:
        yield guest


@pytest.mark.parametrize("again", [Target.crash, Target.restart, Target.upgrade])
def test_a_queue_that_cannot_be_known_stays_stopped_until_its_driver_resets_it(
    target: Target, guest: Initiator, again: Callable[[Target], None]
) -> None:
    before, after = os.urandom(BLOCK), os.urandom(BLOCK)
    guest.write(0, before, queue=QUIET)
    guest.write(1, before, queue=LOST)
    # In flight for certain: nobody takes it from the ring before the end.
    freeze(target.pid)
    lost = write(guest, 1, after, queue=LOST)["head"]
    target.crash()
    for change in (lambda _: None, again, Target.crash):
        change(target)
        guest.until_connected(keep=True)
        guest.ready(queue=QUIET)
        assert guest.read(0, 1, queue=QUIET) == before, "what was quiet goes on"
        assert "requests were in flight" in stop_of_lost(target)
        assert guest.read(1, 1, queue=QUIET) == before, "it was neither done nor guessed"
        with pytest.raises(Refused):
            guest.send("wait", head=lost, queue=LOST, timeout_ms=100)
    guest.until_connected(keep=False)
    guest.ready()
    assert stopped(target) == {}
    # It was said before the queues were set up again.
    said = target.words().count(SENTENCE)
    assert said >= 3
    guest.write(1, after, queue=LOST)
    # And now that it is known again, it goes on after the next crash.
    target.crash()
    guest.until_connected(keep=True)
    assert stopped(target) == {}
    guest.ready(queue=LOST)
    assert guest.read(1, 1, queue=LOST) == after
    assert target.words().count(SENTENCE) == said
