"""Restarts under I/O: what is in flight when the target goes is done by the next one.

A driver that keeps an in-flight region, as QEMU does, writes stamped blocks through several queues
while its target is killed, stopped in order, and frozen. Every request is answered once and well,
and a block holds what was written to it last.

`VIRTLUN_SEED` repeats what a run chose; `VIRTLUN_RESTARTS` is how many restarts the nightly tests
make of each kind; those that stand still for a minute share them among several targets.
"""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from tests.support.frozen import freeze
from tests.support.initiator import Initiator, connected
from tests.support.night import at_night
from tests.support.restarts import AT_ONCE, RESTARTS, STOPPED_S, choose_seed
from tests.support.target import Target
from tests.support.wait import until
from tests.target.conftest import MakeTarget

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 512
EXTENTS = 24
"""Parts of the disk, 1 MiB each, that are written one at a time each."""
QUEUES = 2
SIZES = [4 * KIB, 4 * KIB, 4 * KIB, 16 * KIB, 64 * KIB, 128 * KIB, 512 * KIB, MIB]
"""Of writes and reads, in bytes; indirect descriptors carry each."""
CUTS = [(), (51,), (51, 512), (20, 31, 4096, 1024)]
"""Where the readable part of a chain is cut into descriptors."""
CHECK, TASK_SET_FULL = 2, 0x28
"""CHECK CONDITION, TASK SET FULL (SAM-5 5.3.1)."""
UNIT_ATTENTION = 6
"""Sense key (SPC-4 4.5.6)."""
DEADLINE_S = 60.0
ROUNDS = 5
"""Of each kind in `make test`."""
KEPT_ROUNDS = 4
"""The same of a driver whose connection is kept."""


def stamp(extent: int, version: int, length: int) -> bytes:
    """What version `version` of an extent begins with: each block tells where and when."""
    return b"".join(
        f"{extent}:{block}:{version};".encode().ljust(BLOCK, bytes([version % 251 + 1]))
        for block in range(length // BLOCK)
    )


@dataclass
class Request:
    """A request that was not answered yet, and what it makes of its extent."""

    queue: int
    head: int
    command: dict[str, object]
    extent: int | None = None
    content: bytes | None = None
    """Of the extent afterwards."""
    expected: bytes | None = None
    """What a read must show."""


@dataclass
class Load:
    """A driver's requests, and what the disk must hold."""

    guest: Initiator
    rng: random.Random
    held: dict[int, bytes] = field(default_factory=dict)
    pending: list[Request] = field(default_factory=list)
    version: int = 0
    answered: int = 0

    def submit(self, count: int) -> None:
        """Puts `count` requests in flight, each write and read in an extent of its own."""
        busy = {request.extent for request in self.pending}
        free = [extent for extent in range(EXTENTS) if extent not in busy]
        self.rng.shuffle(free)
        for extent in free[:count]:
            self.pending.append(self.request(extent))
        flush: dict[str, object] = {"cdb": bytes([0x35]).ljust(10, b"\0")}
        self.pending.append(self.sent(Request(self.rng.randrange(QUEUES), 0, flush)))

    def request(self, extent: int) -> Request:
        queue, kind = self.rng.randrange(QUEUES), self.rng.random()
        held = self.held.get(extent, bytes(MIB))
        length = self.rng.choice(SIZES)
        lba = extent * MIB // BLOCK
        blocks = (length // BLOCK).to_bytes(2, "big")
        at = lba.to_bytes(4, "big")
        if kind < 0.6:
            self.version += 1
            data = stamp(extent, self.version, length)
            fua = 8 if self.rng.random() < 0.3 else 0
            command: dict[str, object] = {
                "cdb": bytes([0x2A, fua, *at, 0, *blocks, 0]),
                "data_out": data,
                "cut_out": list(self.rng.choice(CUTS)),
            }
            return self.sent(Request(queue, 0, command, extent, data + held[length:]))
        if kind < 0.8:
            command = {"cdb": bytes([0x28, 0, *at, 0, *blocks, 0]), "data_in_len": length}
            return self.sent(Request(queue, 0, command, extent, held, held[:length]))
        ranges = lba.to_bytes(8, "big") + (MIB // BLOCK).to_bytes(4, "big") + bytes(4)
        parameters = bytes([0, 22, 0, 16, 0, 0, 0, 0]) + ranges
        command = {
            "cdb": bytes([0x42, 0, 0, 0, 0, 0, 0, 0, len(parameters), 0]),
            "data_out": parameters,
        }
        return self.sent(Request(queue, 0, command, extent, bytes(MIB)))

    def sent(self, request: Request) -> Request:
        answer = self.guest.send("submit", queue=request.queue, **request.command)
        request.head = answer["head"]
        return request

    def wait_all(self) -> None:
        """Waits for every request, and looks at what it brought."""
        while self.pending:
            request = self.pending.pop(0)
            answer = self.guest.send(
                "wait", head=request.head, queue=request.queue, timeout_ms=int(DEADLINE_S * 1000)
            )
            attention = answer["status"] == CHECK and answer["sense"][2] & 15 == UNIT_ATTENTION
            if attention or answer["status"] == TASK_SET_FULL:
                # The new target's power-on, or too much at once. A driver asks again.
                self.pending.append(self.sent(request))
                continue
            assert (answer["response"], answer["status"]) == (0, 0), answer
            self.answered += 1
            if request.expected is not None:
                assert answer["data_in"] == request.expected, f"extent {request.extent}"
            if request.extent is not None and request.content is not None:
                self.held[request.extent] = request.content
        for queue in range(2 + QUEUES):
            if queue != 1:
                assert self.guest.send("raw", queue=queue)["used"] == [], "answered twice"

    def audit(self) -> None:
        """Reads the whole disk."""
        for extent in range(EXTENTS):
            found = self.guest.read(extent * MIB // BLOCK, MIB // BLOCK)
            assert found == self.held.get(extent, bytes(MIB)), f"extent {extent}"

    def check_region(self) -> None:
        """With nothing in flight the region says so, and agrees with the rings."""
        for queue in range(2, 2 + QUEUES):
            used = self.guest.send("ring", queue=queue)["next_avail"]
            state = until(partial(self._rest, queue, used), f"queue {queue} rests at {used}")
            assert (state["version"], state["desc_num"]) == (1, 128)
            if used:
                assert state["last_batch_head"] == self.last_used(queue, used)

    def _rest(self, queue: int, used: int) -> dict[str, Any] | None:
        state: dict[str, Any] = self.guest.send("inflight")["queues"][queue]
        return state if (state["in_flight"], state["used_idx"]) == ([], used) else None

    def last_used(self, queue: int, index: int) -> int:
        """Returns the head in the last element of a used ring that has this index."""
        ring = self.guest.send("ring", queue=queue)
        at = ring["used"] + 4 + 8 * ((index - 1) % ring["size"])
        return int.from_bytes(self.guest.send("read_mem", gpa=at, len=4)["data"], "little")


def prepare(target: Target) -> None:
    target.make_lvstore("lvs0", 64 * MIB)
    target.rpc(
        "bdev_lvol_create", lvol_name="v", size_in_mib=EXTENTS, lvs_name="lvs0", thin_provision=True
    )
    target.attach("c0", "lvs0/v")


def rounds_of(how: str, rounds: int, hours: int = 0) -> object:
    """Returns the parameters of a test; those of the night have so many hours."""
    marks = [pytest.mark.nightly, pytest.mark.timeout(hours * 3600)] if hours else []
    return pytest.param(how, rounds, id=f"{how}-nightly" if hours else how, marks=marks)


@pytest.mark.parametrize(
    ("how", "rounds"),
    [
        rounds_of("kill", ROUNDS),
        at_night("term", ROUNDS, id="term"),
        rounds_of("kill", RESTARTS, hours=2),
        rounds_of("term", RESTARTS, hours=2),
    ],
)
def test_what_is_in_flight_survives_the_target(target: Target, how: str, rounds: int) -> None:
    survive(target, choose_seed(), how, rounds, 0.0)


@pytest.mark.nightly
def test_an_orderly_stop_leaves_nothing_in_flight_of_a_driver_without_a_region(
    target: Target,
) -> None:
    survive(target, choose_seed(), "term", KEPT_ROUNDS, 0.0, region=False)


@pytest.mark.nightly
@pytest.mark.root
@pytest.mark.parametrize(
    "rounds",
    [KEPT_ROUNDS, pytest.param(RESTARTS, marks=[pytest.mark.nightly, pytest.mark.timeout(7200)])],
)
@pytest.mark.parametrize("region", [True, at_night(False)], ids=["region", "own-region"])
@pytest.mark.parametrize("how", ["kill", at_night("term")])
def test_a_driver_whose_connection_is_kept_does_nothing_for_it(
    make_target: MakeTarget, rounds: int, region: bool, how: str
) -> None:
    target = make_target("--hold-sessions").start()
    survive(target, choose_seed(), how, rounds, 0.0, kept=True, region=region)


@pytest.mark.parametrize(
    ("stops", "at_once"),
    [
        at_night(ROUNDS, ROUNDS),
        pytest.param(
            *(RESTARTS, AT_ONCE), marks=[pytest.mark.nightly, pytest.mark.timeout(3 * 3600)]
        ),
    ],
)
def test_what_is_in_flight_survives_minutes_without_a_target(
    make_target: MakeTarget, stops: int, at_once: int
) -> None:
    """Several targets stand still at a time, each with a driver of its own."""
    seed = choose_seed()
    targets = [make_target().start() for _ in range(at_once)]

    def stand_still_often(number: int) -> None:
        survive(targets[number], seed + number, "freeze", -(-stops // at_once), STOPPED_S)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(stand_still_often, range(at_once)))


def survive(
    target: Target,
    seed: int,
    how: str,
    rounds: int,
    frozen_s: float,
    *,
    kept: bool = False,
    region: bool = True,
) -> None:
    """Ends or freezes a target under a driver's requests; each is answered once and well.

    `kept`: its connection is kept for the next target. `region`: it keeps an in-flight region.
    """
    rng = random.Random(seed)
    prepare(target)
    with connected(target, "c0", queues=QUEUES, memory=256 * MIB, inflight=region) as guest:
        load = Load(guest, rng)
        replayed = 0
        for _ in range(rounds):
            until(lambda: target.is_kept("c0") == kept, "it is kept")
            # Frozen meanwhile, so that it has them all at once.
            freeze(target.pid)
            load.submit(EXTENTS - 4)
            os.kill(target.pid, signal.SIGCONT)
            time.sleep(rng.random() * 0.01)
            if how == "kill":
                target.kill9()
            elif how == "term":
                assert target.stop() == 0
            else:
                freeze(target.pid)
                load.submit(4)
                time.sleep(frozen_s)
                os.kill(target.pid, signal.SIGCONT)
            if how != "freeze":
                states = guest.send("inflight")["queues"] or []
                replayed += sum(len(state["in_flight"]) for state in states[2:])
                # The guest goes on while nobody is there.
                load.submit(4)
                target.start()
                if not kept:
                    guest.until_connected(keep=True)
            load.wait_all()
            if region:
                load.check_region()
        load.audit()
        assert load.answered >= rounds * EXTENTS
        print(f"{load.answered} requests answered, {replayed} of them submitted again")
        guest.send("disconnect")
    words = target.words()
    assert "broke virtio's rules" not in words
    assert "not started" not in words
