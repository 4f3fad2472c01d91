"""A controller that is deleted under I/O answers what it has begun before it closes its socket."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.support.initiator import Initiator
from tests.support.slow_disk import SlowDisk
from tests.support.target import Target
from tests.target.test_upgrade_slow_disk import (
    BLOCK,
    GOOD,
    WRITES,
    Writer,
    content,
    guest,
    pytestmark,
    slow,
)

__all__ = ["guest", "pytestmark", "slow"]

STILL_S = 0.5
"""How long a deletion is seen to wait."""
CONNECTED = "03"


def connections(path: Path) -> int:
    """Returns how many connections to a socket its listener has."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return sum(row[5] == CONNECTED for row in rows if row[7:] == [str(path)])


def test_what_was_begun_is_answered_and_then_the_socket_is_closed(
    target: Target, slow: SlowDisk, guest: Initiator
) -> None:
    path = target.vhost_dir / "slow"
    slow.hang()
    writer = Writer(target, guest)
    delete = {"ctrlr": "slow", "force": True}
    deleting = threading.Thread(target=target.rpc, args=("vhost_delete_controller",), kwargs=delete)
    deleting.start()
    deleting.join(STILL_S)
    assert (deleting.is_alive(), connections(path)) == (True, 1)
    slow.go_on()
    deleting.join()
    assert (connections(path), path.exists()) == (0, False)
    assert [one["ctrlr"] for one in target.rpc("vhost_get_controllers")] == ["fast"]
    # Nobody is there to answer any more: it was done before.
    answered = writer.wait_for(WRITES)
    assert {writer.status(n) for n in answered if n < WRITES} == {GOOD}
    assert set(answered) >= set(range(WRITES))
    with slow.path.open("rb") as file:
        assert [file.read(BLOCK) for _ in range(WRITES)] == [content(n) for n in range(WRITES)]
