"""The target dies at each step of a request, and the next one finishes it: once, whatever was done.

Three requests, all WRITEs or all UNMAPs, are taken together. The thread that serves them is stopped
at a step (tests.support.tracer) and the process killed there. The driver looks at its in-flight
region, sends one more, and connects to the next target: each is answered once and is on the disk,
and none is done again that the driver was told of.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import tracer
from tests.support.initiator import Initiator, connected
from tests.support.tracer import Tracer
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_inflight import CHECK, UNIT_ATTENTION

pytestmark = pytest.mark.skipif(not tracer.is_possible(), reason="the tracer knows x86-64 alone")

QUEUE = 2
"""The first request queue, over all queues."""
SIZE = 128
"""Descriptors of each queue of the driver."""
OWN_SIZE = 1024
"""The same of a region that the target makes for itself."""
LAST_BATCH_HEAD, USED_IDX, DESC = 12, 14, 16
"""Offsets in a queue's part of the region (vhost-user, QueueRegionSplit)."""
REGION, MEMORY = "virtlun-inflight", "virtlun-bench"
"""Names of the memory files."""
WRITE = 1
"""The system call."""
REQUESTS, BLOCK = 3, 4096
DEADLINE_MS = 60_000
COMPLETION_S = 0.1


@dataclass(frozen=True)
class Command:
    """What is asked for with three requests, a block each."""

    name: str
    request: Callable[[int], tuple[bytes, bytes]]
    """The CDB and the data of the `nth`."""
    leaves: Callable[[int], bytes]
    """What is in its block when it is done."""
    counter: str
    """What counts it in `bdev_get_iostat`."""


def write(nth: int) -> tuple[bytes, bytes]:
    """WRITE (10), SBC-3 5.32."""
    lba = (nth * BLOCK // 512).to_bytes(4, "big")
    return bytes([0x2A, 0, *lba, 0, *(BLOCK // 512).to_bytes(2, "big"), 0]), stamp(nth)


def unmap(nth: int) -> tuple[bytes, bytes]:
    """UNMAP with one block descriptor, SBC-3 5.28."""
    descriptor = (nth * BLOCK // 512).to_bytes(8, "big") + (BLOCK // 512).to_bytes(4, "big")
    data = (22).to_bytes(2, "big") + (16).to_bytes(2, "big") + bytes(4) + descriptor + bytes(4)
    return bytes([0x42, *bytes(6), *len(data).to_bytes(2, "big"), 0]), data


def stamp(nth: int) -> bytes:
    """Returns what the `nth` write puts into its block."""
    return bytes([nth + 1]) * BLOCK


COMMANDS = [
    Command("write", write, stamp, "num_write_ops"),
    Command("unmap", unmap, lambda _: bytes(BLOCK), "num_unmap_ops"),
]


@dataclass
class Stage:
    """A target whose reactor is stopped, and three requests that it has not seen yet."""

    command: Command
    tracer: Tracer
    pid: int
    guest: Initiator
    disk: Path
    heads: list[int]
    used: int
    """Guest address of the used ring."""
    base: int
    """Its index."""
    file_of: Callable[[int], str]
    own_region: bool = False
    """The driver keeps none: the target has one of its own."""

    def region(self, offset: int) -> int:
        """Returns where the target has a byte of the queue's part of the region."""
        size = OWN_SIZE if self.own_region else SIZE
        part = 16 + 16 * size + -(16 + 16 * size) % 64
        return tracer.address_of(self.pid, REGION, QUEUE * part + offset)

    def mark(self, head: int) -> int:
        """Returns where the target marks a head as in flight."""
        return self.region(DESC + 16 * head)

    def ring(self, offset: int) -> int:
        """Returns where the target has a byte of the used ring."""
        return tracer.address_of(self.pid, MEMORY, self.used + offset)

    def element(self, nth: int) -> int:
        """Returns the offset in the used ring of the element of what ends as the `nth`."""
        return 4 + 8 * ((self.base + nth) % SIZE)

    def ended(self, nth: int) -> int:
        """Returns the head that ended as the `nth`."""
        bytes_: bytes = self.guest.send("read_mem", gpa=self.used + self.element(nth), len=4)[
            "data"
        ]
        return int.from_bytes(bytes_, "little")

    def content(self) -> list[bytes]:
        """Returns the first byte of each block of the disk."""
        data = self.disk.read_bytes()
        return [data[n * BLOCK : n * BLOCK + 1] for n in range(REQUESTS)]


def first_taken(stage: Stage) -> None:
    stage.tracer.until_store(stage.mark(stage.heads[0]), 1)


def taken(stage: Stage) -> None:
    stage.tracer.until_store(stage.mark(stage.heads[-1]), 1)


def given_to_bdev(stage: Stage) -> None:
    # Before the call: what is in the ring of the process alone goes with it.
    stage.tracer.until_submission()


def submitted(stage: Stage) -> None:
    given_to_bdev(stage)
    assert stage.tracer.until_return() == REQUESTS


def completed(stage: Stage) -> None:
    submitted(stage)
    done = [stage.command.leaves(n)[:1] for n in range(REQUESTS)]
    until(lambda: stage.content() == done and workers_rest(stage.pid), "they complete")
    # From there to the thread's list of what is complete it is a short way in the kernel.
    time.sleep(COMPLETION_S)


def used_elements(stage: Stage) -> None:
    completed(stage)
    stage.tracer.until_store(stage.ring(stage.element(REQUESTS - 1)), 4)


def linked(stage: Stage) -> None:
    completed(stage)
    stage.tracer.until_store(stage.region(LAST_BATCH_HEAD), 2, times=REQUESTS)


def shown(stage: Stage) -> None:
    completed(stage)
    stage.tracer.until_store(stage.ring(2), 2)


def first_cleared(stage: Stage) -> None:
    shown(stage)
    stage.tracer.until_store(stage.mark(stage.ended(0)), 1)


def cleared(stage: Stage) -> None:
    shown(stage)
    stage.tracer.until_store(stage.mark(stage.ended(REQUESTS - 1)), 1)


def index_stored(stage: Stage) -> None:
    shown(stage)
    stage.tracer.until_store(stage.region(USED_IDX), 2)


def called(stage: Stage) -> None:
    shown(stage)
    is_event = lambda fd, _, length: length == 8 and "[eventfd]" in stage.file_of(fd)  # noqa: E731
    stage.tracer.until_call(WRITE, is_event)
    assert stage.tracer.until_return() == 8


@dataclass(frozen=True)
class Step:
    """Where the target dies, and what is left then."""

    reach: Callable[[Stage], None]
    marked: int
    """Of the three, how many are marked as in flight."""
    shown: int = 0
    """How many the used ring's index tells of."""
    index: int = 0
    """How many the region's index tells of."""


STEPS = [
    Step(first_taken, 1),
    Step(taken, 3),
    Step(given_to_bdev, 3),
    Step(submitted, 3),
    Step(completed, 3),
    Step(used_elements, 3),
    Step(linked, 3),
    Step(shown, 3, 3),
    Step(first_cleared, 2, 3),
    Step(cleared, 0, 3),
    Step(index_stored, 0, 3, 3),
    Step(called, 0, 3, 3),
]


def workers_rest(pid: int) -> bool:
    """Whether no worker of the process's io_urings has anything to do (proc(5), wchan)."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    workers = [t for t in threads if (t / "comm").read_text().startswith("iou-wrk")]
    return all((worker / "wchan").read_text() == "io_wq_worker" for worker in workers)


def send(guest: Initiator, command: Command, nth: int) -> int:
    """Submits the `nth` request, and returns its head."""
    cdb, data_out = command.request(nth)
    head: int = guest.send("submit", cdb=cdb, data_out=data_out)["head"]
    return head


def finish(guest: Initiator, command: Command, heads: list[int]) -> None:
    """Waits for the requests; what hears of the new target's start is sent again, as by drivers."""
    for nth, head in enumerate(heads):
        answer: dict[str, Any] = guest.send("wait", head=head, timeout_ms=DEADLINE_MS)
        if answer["status"] == CHECK and answer["sense"][2] & 15 == UNIT_ATTENTION:
            answer = guest.send("wait", head=send(guest, command, nth), timeout_ms=DEADLINE_MS)
        assert (answer["response"], answer["status"]) == (0, 0), answer


@dataclass(frozen=True)
class GoesOn:
    """How the driver comes to the next target."""

    name: str
    kept: bool = False
    """Its connection is kept for that: it notices nothing."""
    own_region: bool = False
    """It keeps no region, so the target has one of its own."""

    @property
    def options(self) -> list[str]:
        """Options of the target."""
        return ["--hold-sessions"] if self.kept else []


WAYS = [
    GoesOn("reconnected"),
    GoesOn("kept", kept=True),
    GoesOn("kept-own-region", kept=True, own_region=True),
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.reach.__name__)
def test_a_target_that_dies_at_a_step_of_a_request(
    make_target: MakeTarget, step: Step, command: Command, way: GoesOn
) -> None:
    target = make_target(*way.options).start()
    disk = target.make_file("disk.img", 1 << 20)
    disk.write_bytes(b"\xff" * (1 << 20))
    target.rpc("bdev_uring_create", filename=str(disk), name="disk", block_size=512)
    target.attach("c0", "disk")
    with connected(target, "c0", inflight=not way.own_region) as guest:
        until(lambda: target.is_kept("c0") == way.kept, "it is kept")
        ring = guest.send("ring", queue=QUEUE)
        used = ring["used"]
        base = int.from_bytes(guest.send("read_mem", gpa=used + 2, len=2)["data"], "little")
        # It wants a call for the next that ends (virtio 1.2, 2.7.7).
        event = base.to_bytes(2, "little")
        guest.send("write_mem", gpa=ring["avail"] + 4 + 2 * ring["size"], data=event)
        pid = target.pid
        reactor = tracer.thread_named(pid, "reactor_0")
        with Tracer(pid, reactor) as traced:
            # It is stopped, so that it will find all three at once.
            heads = [send(guest, command, nth) for nth in range(REQUESTS)]
            file_of = lambda fd: str(Path(f"/proc/{pid}/fd/{fd}").readlink())  # noqa: E731
            stage = Stage(command, traced, pid, guest, disk, heads, used, base, file_of)
            stage.own_region = way.own_region
            step.reach(stage)
            traced.kill()
        target.kill9()

        index = int.from_bytes(guest.send("read_mem", gpa=used + 2, len=2)["data"], "little")
        assert index - base == step.shown
        if not way.own_region:
            left = guest.send("inflight")["queues"][QUEUE]
            assert (len(left["in_flight"]), left["used_idx"] - base) == (step.marked, step.index)
            assert set(left["in_flight"]) <= set(heads)
        # A guest goes on sending: marks that are left of what ended must not take its place.
        heads.append(send(guest, command, REQUESTS))

        target.start()
        if not way.kept:
            guest.until_connected(keep=True)
        finish(guest, command, heads)
        done = target.rpc("bdev_get_iostat", name="disk")["bdevs"][0][command.counter]
        expected = REQUESTS + 1 - step.shown
        assert done == expected, "what it was told of is not done again, all else is"
        guest.ready()
        for nth in range(REQUESTS + 1):
            assert guest.read(nth * BLOCK // 512, BLOCK // 512) == command.leaves(nth)
        assert guest.send("raw", queue=QUEUE)["used"] == [], "answered twice"
        if not way.own_region:
            until(
                lambda: not guest.send("inflight")["queues"][QUEUE]["in_flight"],
                lambda: f"nothing in flight: {guest.send('inflight')}",
            )
        guest.send("disconnect")
    assert "broke virtio's rules" not in target.words()
