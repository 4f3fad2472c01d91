"""Persistent reservations of a volume that two machines share (SPC-4 5.13), on the real target.

Each machine is our initiator on a controller of its own, as two VMs of a Windows or Pacemaker
cluster are: who is preempted can write nothing more, whatever becomes of the target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from tests.support.initiator import Initiator
from tests.support.target import Target

REGISTER, RESERVE, RELEASE, PREEMPT, PREEMPT_AND_ABORT, REGISTER_AND_IGNORE = 0, 1, 2, 4, 5, 6
WRITE_EXCLUSIVE_REGISTRANTS_ONLY = 5
GOOD, CHECK_CONDITION, CONFLICT = 0, 2, 0x18
KEY = {"a": 0xA, "b": 0xB}


class Machine:
    """A machine with the volume as its disk; it begins anew as often as its target does."""

    def __init__(self, target: Target, name: str) -> None:
        self.target = target
        self.name = name
        self.key = KEY[name]
        self.initiator = self._connect()

    def _connect(self) -> Initiator:
        initiator = Initiator(self.target.vhost_dir / f"vm-{self.name}")
        initiator.send("connect")
        initiator.ready()
        return initiator

    def reconnect(self) -> None:
        """Goes on after its target went away."""
        self.initiator.kill()
        self.initiator = self._connect()

    def out(
        self, action: int, *, other: int = 0, persist: bool = False, key: int | None = None
    ) -> int:
        """PERSISTENT RESERVE OUT; returns the status."""
        keys = ((self.key if key is None else key), other)
        data = b"".join(k.to_bytes(8, "big") for k in keys) + bytes([0, 0, 0, 0, persist, 0, 0, 0])
        cdb = bytes([0x5F, action, WRITE_EXCLUSIVE_REGISTRANTS_ONLY, 0, 0, 0, 0, 0, len(data), 0])
        answer = self.initiator.cdb(cdb, data_out=data)
        assert answer["response"] == 0, answer
        return int(answer["status"])

    def register(self, *, persist: bool = False) -> None:
        """Registers with its own key."""
        assert self.out(REGISTER_AND_IGNORE, other=self.key, persist=persist) == GOOD

    def keys(self) -> list[int]:
        """READ KEYS."""
        answer = self.initiator.cdb(bytes([0x5E, *bytes(7), 255, 0]), data_in_len=255)
        assert (answer["response"], answer["status"]) == (0, GOOD), answer
        data = answer["data_in"]
        end = 8 + int.from_bytes(data[4:8], "big")
        return [int.from_bytes(data[at : at + 8], "big") for at in range(8, end, 8)]

    def write(self) -> int:
        """Writes a block; returns the status, after the unit attentions that wait."""
        cdb = bytes([0x2A, *bytes(7), 1, 0])
        while True:
            answer = self.initiator.cdb(cdb, data_out=self.name.encode() * 512)
            assert answer["response"] == 0, answer
            if answer["status"] != CHECK_CONDITION or answer["sense"][2] & 15 != 6:
                return int(answer["status"])


@pytest.fixture
def machines(target: Target) -> Iterator[tuple[Machine, Machine]]:
    """Machines a and b, which share a volume."""
    target.make_lvstore()
    volume = target.make_thin("shared", 8)
    for name in KEY:
        target.attach(f"vm-{name}", volume, shareable=True)
    machines = Machine(target, "a"), Machine(target, "b")
    yield machines
    for machine in machines:
        machine.initiator.kill()


@pytest.mark.parametrize("away", [Target.restart, Target.crash, Target.upgrade])
def test_who_is_fenced_stays_so_whatever_becomes_of_the_target(
    target: Target, machines: tuple[Machine, Machine], away: Callable[[Target], Any]
) -> None:
    a, b = machines
    a.register()
    b.register()
    assert a.out(RESERVE) == GOOD
    assert (a.write(), b.write()) == (GOOD, GOOD)
    assert b.out(PREEMPT_AND_ABORT, other=a.key) == GOOD
    for _ in range(2):
        assert (a.write(), b.write()) == (CONFLICT, GOOD)
        assert b.keys() == [b.key]
        # It registers as nobody who it was: its key is not there any more.
        assert a.out(REGISTER, other=a.key, key=a.key) == CONFLICT
        away(target)
        if away is not Target.upgrade:
            a.reconnect()
            b.reconnect()
    assert b.out(RELEASE) == GOOD
    assert a.write() == GOOD


def test_a_registration_of_another_boot_counts_where_it_was_to_outlive_it(
    target: Target, machines: tuple[Machine, Machine]
) -> None:
    a, b = machines
    for persist in (False, True):
        a.register(persist=persist)
        assert a.out(RESERVE) == GOOD
        assert b.write() == CONFLICT
        target.kill9()
        (kept,) = (target.state_dir / "reservations").iterdir()
        record = json.loads(kept.read_text())
        assert record["reservations"]["persist"] is persist
        record["boot"] = str(uuid4())  # as if the host had started anew since
        kept.write_text(json.dumps(record))
        target.start()
        a.reconnect()
        b.reconnect()
        assert (b.write(), a.keys()) == ((CONFLICT, [a.key]) if persist else (GOOD, []))


def test_a_record_that_is_damaged_is_told_and_left(
    target: Target, machines: tuple[Machine, Machine]
) -> None:
    a, b = machines
    a.register()
    target.stop()
    (kept,) = (target.state_dir / "reservations").iterdir()
    kept.write_text("{")
    target.start()
    a.reconnect()
    b.reconnect()
    assert b.keys() == []
    assert f"{kept} cannot be read, so nobody has reserved volume" in target.words()
    assert kept.read_text() == "{"
