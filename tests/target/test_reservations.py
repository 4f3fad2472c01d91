"""Persistent reservations of a volume that two machines share (SPC-4 5.13), on the real target.

Each machine is our initiator on a controller of its own, as two VMs of a Windows or Pacemaker
cluster are: who is preempted can write nothing more, whatever becomes of the target.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.support.initiator import Initiator
from tests.support.killed_target import killed_at
from tests.support.target import Target
from tests.support.wait import until

REGISTER, RESERVE, RELEASE, PREEMPT, PREEMPT_AND_ABORT, REGISTER_AND_IGNORE = 0, 1, 2, 4, 5, 6
REPLACE_LOST = 8
WRITE_EXCLUSIVE_REGISTRANTS_ONLY = 5
GOOD, CHECK_CONDITION, CONFLICT = 0, 2, 0x18
KEY = {"a": 0xA, "b": 0xB}
LOST = (7, 0x4401)
"""DATA PROTECT, PERSISTENT RESERVATION INFORMATION LOST."""
NOT_READY = (2, 0x0401)


class Machine:
    """A machine with the volume as its disk; it begins anew as often as its target does."""

    def __init__(self, target: Target, name: str) -> None:
        self.target = target
        self.name = name
        self.key = KEY[name]
        self.initiator = self._connect()
        self.initiator.ready()

    def _connect(self) -> Initiator:
        initiator = Initiator(self.target.vhost_dir / f"vm-{self.name}")
        initiator.send("connect")
        return initiator

    def reconnect(self, *, ready: bool = True) -> None:
        """Goes on after its target went away; `ready`: with a disk that is."""
        self.initiator.kill()
        self.initiator = self._connect()
        if ready:
            self.initiator.ready()

    def out(
        self, action: int, *, other: int = 0, persist: bool = False, key: int | None = None
    ) -> int:
        """PERSISTENT RESERVE OUT; returns the status."""
        answer = self.initiator.cdb(**self._order(action, other, persist, key))
        assert answer["response"] == 0, answer
        return int(answer["status"])

    def begin_to_replace(self) -> None:
        """Sends REPLACE LOST RESERVATION, and does not wait for its end."""
        self.initiator.send("submit", **self._order(REPLACE_LOST, self.key, True, 0))

    def begin_to_reserve(self) -> None:
        """Sends RESERVE, and does not wait for its end."""
        self.initiator.send("submit", **self._order(RESERVE, 0, False, None))

    def _order(self, action: int, other: int, persist: bool, key: int | None) -> dict[str, Any]:
        keys = ((self.key if key is None else key), other)
        data = b"".join(k.to_bytes(8, "big") for k in keys) + bytes([0, 0, 0, 0, persist, 0, 0, 0])
        cdb = bytes([0x5F, action, WRITE_EXCLUSIVE_REGISTRANTS_ONLY, 0, 0, 0, 0, 0, len(data), 0])
        return {"cdb": cdb, "data_out": data}

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

    def capacity(self) -> int | tuple[int, int]:
        """Returns what READ CAPACITY says, in blocks; its sense as `write` has it, if it fails."""
        answer = self.initiator.cdb(bytes([0x25, *bytes(9)]), data_in_len=8)
        if answer["status"] == CHECK_CONDITION:
            sense = answer["sense"]
            return sense[2] & 15, int.from_bytes(sense[12:14], "big")
        return int.from_bytes(answer["data_in"][:4], "big") + 1

    def write(self) -> int | tuple[int, int]:
        """Writes a block, after the unit attentions that wait.

        Returns the status; where there is sense data, its key, and its code and qualifier.
        """
        cdb = bytes([0x2A, *bytes(7), 1, 0])
        while True:
            answer = self.initiator.cdb(cdb, data_out=self.name.encode() * 512)
            assert answer["response"] == 0, answer
            if answer["status"] != CHECK_CONDITION:
                return int(answer["status"])
            sense = answer["sense"]
            if sense[2] & 15 != 6:
                return sense[2] & 15, int.from_bytes(sense[12:14], "big")


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


@pytest.mark.root
@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_what_a_killed_target_was_writing_of_a_record_goes_with_the_next_start(
    target: Target, machines: tuple[Machine, Machine], call: str
) -> None:
    a, b = machines
    a.register(persist=True)
    (kept,) = (target.state_dir / "reservations").iterdir()
    before = kept.read_text()
    cut_off = kept.with_name(f"{kept.name}.{target.pid}.new")
    with killed_at(target, call, f"reservations/{cut_off.name}"):
        a.begin_to_reserve()
    assert set(kept.parent.iterdir()) == {kept, cut_off}
    target.start()
    assert list(kept.parent.iterdir()) == [kept]
    assert kept.read_text() == before
    a.reconnect()
    b.reconnect()
    assert (b.write(), a.keys()) == (GOOD, [a.key])


@pytest.fixture
def damaged(target: Target, machines: tuple[Machine, Machine]) -> Path:
    """Returns the volume's record, which is damaged: a had reserved. The target serves again."""
    a, _ = machines
    a.register(persist=True)
    assert a.out(RESERVE) == GOOD
    target.stop()
    (kept,) = (target.state_dir / "reservations").iterdir()
    kept.with_suffix(".before").write_bytes(kept.read_bytes())
    kept.write_text("{")
    target.start()
    for machine in machines:
        machine.reconnect(ready=False)
    return kept


def test_a_record_that_is_damaged_keeps_all_out_until_one_replaces_it(
    target: Target, machines: tuple[Machine, Machine], damaged: Path
) -> None:
    a, b = machines
    for times_told in (1, 2):
        assert (a.write(), b.write()) == (LOST, LOST)
        assert b.out(REGISTER_AND_IGNORE, other=b.key) == CHECK_CONDITION
        told = f"{damaged} is damaged, so that nobody knows who has reserved volume"
        assert target.words().count(told) == times_told
        assert damaged.read_text() == "{"
        time.sleep(0.3)
        assert b.write() == LOST  # and it is read again
        if times_told == 1:
            target.upgrade()
    assert b.out(REPLACE_LOST, key=0, other=b.key, persist=True) == GOOD
    for away in (None, Target.crash, Target.restart, Target.upgrade):
        if away is not None:
            away(target)
        if away in {Target.crash, Target.restart}:
            a.reconnect()
            b.reconnect()
        assert (a.write(), b.write()) == (CONFLICT, GOOD)
        assert (a.keys(), b.keys()) == ([b.key], [b.key])
        assert a.out(REPLACE_LOST, key=0, other=a.key) == CHECK_CONDITION


def test_who_booted_while_it_was_damaged_is_told_by_a_program_that_knows_it_at_once(
    target: Target,
    machines: tuple[Machine, Machine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = machines
    a.register(persist=True)
    assert a.out(RESERVE) == GOOD
    target.stop()
    (kept,) = (target.state_dir / "reservations").iterdir()
    # The record as each program has it in the folder where it began.
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    (before / "record").write_text("{")
    after.mkdir()
    kept.rename(after / "record")
    kept.symlink_to("/proc/self/cwd/record")
    monkeypatch.chdir(before)
    target.start()
    for machine in machines:
        machine.reconnect(ready=False)
    b.write()  # takes the unit attention of a new session
    assert b.capacity() == LOST
    target.upgrade()
    assert b.capacity() == LOST
    assert b.initiator.send("events", timeout_ms=0)["events"] == []
    monkeypatch.chdir(after)
    target.upgrade()
    (event,) = b.initiator.send("events", timeout_ms=60_000)["events"]
    assert (event["event"], event["target"], event["reason"]) == (3, 0, 0x2A | 9 << 8)
    assert b.capacity() == (6, 0x2A09)
    assert b.capacity() == 8 << 11
    assert (a.write(), b.write()) == (GOOD, CONFLICT)
    target.upgrade()
    assert b.capacity() == 8 << 11
    assert b.initiator.send("events", timeout_ms=0)["events"] == []


def test_who_replaces_a_record_and_is_killed_has_done_so_or_not(
    target: Target, machines: tuple[Machine, Machine], damaged: Path
) -> None:
    a, b = machines
    before = set()
    for milliseconds in (0, 0.5, 1, 2, 4, 8, 16, 64, 256):
        assert (a.write(), b.write()) == (LOST, LOST)
        b.begin_to_replace()
        time.sleep(milliseconds / 1000)
        target.kill9()
        target.start()
        a.reconnect(ready=False)
        b.reconnect(ready=False)
        became = (a.write(), b.write())
        assert became in {(LOST, LOST), (CONFLICT, GOOD)}
        before.add(became)
        if became == (CONFLICT, GOOD):
            target.kill9()
            damaged.write_text("{")
            target.start()
            a.reconnect(ready=False)
            b.reconnect(ready=False)
    assert (CONFLICT, GOOD) in before


def test_a_record_whose_blocks_cannot_be_read_is_replaced(
    target: Target, machines: tuple[Machine, Machine]
) -> None:
    a, b = machines
    a.register(persist=True)
    target.stop()
    (kept,) = (target.state_dir / "reservations").iterdir()
    kept.unlink()
    kept.symlink_to("/proc/self/mem")  # nothing is mapped at its begin, which it says by EIO
    target.start()
    a.reconnect(ready=False)
    b.reconnect(ready=False)
    assert (a.write(), b.write()) == (LOST, LOST)
    assert b.out(REPLACE_LOST, key=0, other=b.key) == GOOD
    assert (a.write(), b.write()) == (CONFLICT, GOOD)
    assert not kept.is_symlink()


@pytest.mark.parametrize("spoil", ["damaged", "removed", "unread"])
def test_what_is_known_stays_so_when_a_machine_boots(
    target: Target, machines: tuple[Machine, Machine], spoil: str
) -> None:
    a, b = machines
    a.register(persist=True)
    assert a.out(RESERVE) == GOOD
    target.restart()
    a.reconnect()
    b.reconnect()
    (kept,) = (target.state_dir / "reservations").iterdir()
    record = json.loads(kept.read_text())
    kept.unlink()
    if spoil == "damaged":
        kept.write_text("{")
    elif spoil == "unread":
        kept.symlink_to(kept)
    for machine in (b, a):
        machine.reconnect()
        assert (a.write(), b.write()) == (GOOD, CONFLICT)
    if spoil == "unread":
        return
    assert json.loads(kept.read_text()) == record
    assert f"{kept} was damaged, changed or removed while the target serves" in target.words()
    target.restart()
    a.reconnect()
    b.reconnect()
    assert (a.write(), b.write()) == (GOOD, CONFLICT)


@pytest.mark.parametrize("mended", [True, False])
def test_a_record_that_is_mended_or_removed_counts_at_once(
    machines: tuple[Machine, Machine], damaged: Path, mended: bool
) -> None:
    a, b = machines
    assert b.write() == LOST
    if mended:
        damaged.with_suffix(".before").rename(damaged)
    else:
        damaged.unlink()
    expected = (GOOD, CONFLICT) if mended else (GOOD, GOOD)
    until(lambda: (a.write(), b.write()) == expected, "the record is read again")
    assert a.keys() == ([a.key] if mended else [])


def test_a_record_that_cannot_be_read_for_now_is_replaced_by_nobody(
    target: Target, machines: tuple[Machine, Machine]
) -> None:
    a, b = machines
    a.register()
    assert a.out(RESERVE) == GOOD
    target.stop()
    (kept,) = (target.state_dir / "reservations").iterdir()
    kept.rename(kept.with_suffix(".before"))
    kept.mkdir()
    target.start()
    a.reconnect(ready=False)
    b.reconnect(ready=False)
    assert (a.write(), b.write()) == (NOT_READY, NOT_READY)
    assert b.out(REPLACE_LOST, key=0, other=b.key) == CHECK_CONDITION
    assert f"{kept} cannot be read, so that nobody knows who has reserved" in target.words()
    kept.rmdir()
    kept.with_suffix(".before").rename(kept)
    until(lambda: b.write() == CONFLICT, "the record is read again")
    assert (a.write(), a.keys()) == (GOOD, [a.key])
