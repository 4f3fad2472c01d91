"""An upgrade waits for a slow disk, and only the guest whose disk it is waits with it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.initiator import Initiator, connected
from tests.support.slow_disk import SlowDisk
from tests.support.target import Target, TargetFailed
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_upgrade import Load

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="a slow disk needs root and FUSE"
)

DISK_BYTES = 16 << 20
BLOCK = 4096
WRITES = 64
"""No more than FUSE lets wait at a time for a file: whoever submits the next one waits, too."""
QUEUE, QUEUE_SIZE = 3, 1024
"""The second request queue, whose descriptors nothing else uses."""
BUFFERS, EACH, RESPONSE, DATA = 128 << 20, 2 * BLOCK, 1024, BLOCK
"""Guest address of the requests' buffers, bytes of each, and where response and data are in it."""
MEMORY = 256 << 20
HEADER_BYTES, RESPONSE_BYTES = 51, 108
NEXT, WRITABLE = 1, 2
SIMPLE, ORDERED = 0, 1
BUSY, GOOD = 8, 0
DEADLINE_S = 60.0
ROUNDS = 5
"""Of a neighbour while an upgrade waits: it would do one if it waited, too."""

TOO_LATE = "controller slow: an upgrade still waits for I/O in flight"
"""What the target says when it has waited for its --drain-timeout."""

NEW_PROGRAM = """
import socket, sys
from tests.target.test_upgrade import HELLO, exchange

with socket.socket(socket.AF_UNIX) as stream:
    stream.connect(sys.argv[1])
    exchange(stream, HELLO)
    answer = exchange(stream, {"message": "ready"})
    while answer["message"] != "end":
        answer = exchange(stream, None)
    print("expecting", flush=True)
    sys.stdin.readline()
    # The old one ends this process when it sees the end of the connection.
    print(exchange(stream, {"message": "expecting"})["message"], flush=True)
"""
"""Takes nothing over: it ends when the guests are held for it."""


class NewProgram:
    """A new program for which guests are held when the test wants it; a context manager.

    A real one asks the disks first, and gives up where one does not answer.
    """

    def __init__(self, target: Target, disk: SlowDisk) -> None:
        """Starts it; it is told what is about to come. `disk` goes on at its end at the latest."""
        self._disk = disk
        self._process = subprocess.Popen(
            [sys.executable, "-c", NEW_PROGRAM, f"{target.rpc_socket}.upgrade"],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "expecting\n"

    def hold(self) -> None:
        """Has the guests held."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def waits(self) -> bool:
        """Whether they are not all held yet."""
        return self._process.poll() is None

    def answer(self) -> str:
        """Waits until they are, or it is given up, and returns what the target says then."""
        return self._process.communicate(timeout=DEADLINE_S)[0].strip()

    def __enter__(self) -> NewProgram:
        """Returns it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it."""
        self._disk.go_on()
        self._process.kill()
        self._process.wait()


class Upgrade(threading.Thread):
    """A real upgrade that is under way."""

    def __init__(self, target: Target) -> None:
        """Begins it."""
        super().__init__()
        self._target = target
        self.failure: TargetFailed | None = None
        self.start()

    def run(self) -> None:
        """Upgrades."""
        try:
            self._target.upgrade()
        except TargetFailed as failure:
            self.failure = failure


def content(n: int) -> bytes:
    """Returns what is written to block `n`."""
    return bytes([n % 255 + 1]) * BLOCK


def taken(target: Target) -> int:
    """Returns how many requests were taken from the guest of the slow disk."""
    (stats,) = target.rpc("virtlun_vhost_get_stats", name="slow")
    requests: int = stats["requests"]
    return requests


class Writer:
    """A guest with many writes of 4 KiB in flight, and a request that begins when they are done."""

    def __init__(self, target: Target, guest: Initiator) -> None:
        """Sends them, and waits until all were taken: who is held before has nothing in flight."""
        self._guest = guest
        wanted = taken(target) + WRITES + 1
        descs, heads = [], []
        for n in range(WRITES + 1):
            at, head = BUFFERS + n * EACH, 3 * n
            cdb, data, attribute = bytes(6), b"", ORDERED
            if n < WRITES:
                lba = (n * BLOCK // 512).to_bytes(4, "big")
                cdb = bytes([0x2A, 0, *lba, 0, *(BLOCK // 512).to_bytes(2, "big"), 0])
                data, attribute = content(n), SIMPLE
            header = bytes([1, 0, 0x40, 0, 0, 0, 0, 0, *n.to_bytes(8, "little"), attribute, 0, 0])
            header += cdb.ljust(HEADER_BYTES - len(header), b"\0")
            guest.send("write_mem", gpa=at, data=header)
            guest.send("write_mem", gpa=at + RESPONSE, data=b"\xee" * RESPONSE_BYTES)
            parts = [(at, HEADER_BYTES, 0), (at + RESPONSE, RESPONSE_BYTES, WRITABLE)]
            if data:
                guest.send("write_mem", gpa=at + DATA, data=data)
                parts.insert(1, (at + DATA, BLOCK, 0))
            for nth, (gpa, length, flags) in enumerate(parts):
                more = NEXT if nth + 1 < len(parts) else 0
                index = head + nth
                descs.append(
                    {
                        "index": index,
                        "addr": gpa,
                        "len": length,
                        "flags": flags | more,
                        "next": index + 1,
                    }
                )
            heads.append(head)
        self._answered: list[int] = []
        self._take(guest.send("raw", queue=QUEUE, descs=descs, heads=heads))
        until(lambda: taken(target) >= wanted, "all are taken")

    def _take(self, answer: dict[str, list[dict[str, int]]]) -> None:
        self._answered += [used["head"] // 3 for used in answer["used"]]

    def status(self, n: int) -> int:
        """Returns the SCSI status of request `n`, which was answered."""
        at = BUFFERS + n * EACH + RESPONSE
        response: bytes = self._guest.send("read_mem", gpa=at, len=RESPONSE_BYTES)["data"]
        assert response[11] == 0, response
        return response[10]

    def wait_for(self, count: int) -> list[int]:
        """Waits until so many are answered, and returns which, in order."""

        def enough() -> bool:
            self._take(self._guest.send("raw", queue=QUEUE))
            return len(self._answered) >= count

        until(enough, f"{count} are answered", every_s=0.005)
        assert len(set(self._answered)) == len(self._answered), "answered twice"
        return self._answered

    def wait_until_held(self) -> None:
        """Waits until what did not begin is to be sent again: it is held from then on."""
        assert self.wait_for(1) == [WRITES]
        assert self.status(WRITES) == BUSY

    def finish(self) -> None:
        """Waits for all: each is done."""
        for n in self.wait_for(WRITES + 1)[1:]:
            assert self.status(n) == GOOD
            assert self._guest.read(n * BLOCK // 512, BLOCK // 512) == content(n)


@pytest.fixture
def drain_timeout_s() -> int:
    """How long an upgrade waits for I/O in flight."""
    return 5


@pytest.fixture
def target(make_target: MakeTarget, drain_timeout_s: int) -> Target:
    """The target that is upgraded."""
    return make_target().start("--drain-timeout", str(drain_timeout_s))


@pytest.fixture
def slow(scratch: Path, target: Target) -> Iterator[SlowDisk]:
    """The disk of controller `slow`; that of `fast` is in memory."""
    with SlowDisk(scratch / "slow", DISK_BYTES) as disk:
        target.rpc("bdev_uring_create", filename=str(disk.path), name="s0", block_size=512)
        target.rpc("bdev_malloc_create", name="f0", num_blocks=4096, block_size=512)
        for controller, bdev in (("slow", "s0"), ("fast", "f0")):
            target.attach(controller, bdev)
        yield disk
        # Whatever happened: nobody may have its file open when it ends.
        disk.go_on()
        assert target.stop() == 0, target.words()


@pytest.fixture
def guest(target: Target, slow: SlowDisk) -> Iterator[Initiator]:
    """The guest of the slow disk."""
    with connected(target, "slow", queues=2, queue_size=QUEUE_SIZE, memory=MEMORY) as guest:
        yield guest
        # Whatever happened: its requests end before it does.
        slow.go_on()


@pytest.fixture
def load(target: Target, slow: SlowDisk) -> Iterator[Load]:
    """The neighbour, whose disk is in memory."""
    with Load(target, "fast") as load:
        yield load
        load.wait(ROUNDS)
        load.check()


@contextlib.contextmanager
def waiting(
    target: Target, slow: SlowDisk, guest: Initiator
) -> Iterator[tuple[NewProgram, Writer]]:
    """An upgrade that waits for the guest's writes, whose disk hangs."""
    slow.hang()
    writer = Writer(target, guest)
    with NewProgram(target, slow) as new:
        new.hold()
        writer.wait_until_held()
        yield new, writer


@pytest.mark.nightly
@pytest.mark.parametrize("drain_timeout_s", [60])
def test_a_neighbour_is_served_while_a_slow_disk_is_waited_for(
    target: Target, slow: SlowDisk, guest: Initiator, load: Load
) -> None:
    with waiting(target, slow, guest) as (new, writer):
        load.wait(ROUNDS)
        waited = new.waits()
        slow.go_on()
        # Nothing is in flight soon. It ends, and the old one goes on.
        answer = new.answer()
    writer.finish()
    load.wait()
    assert (waited, answer) == (True, "target")
    assert "its I/O takes long" in target.words()
    until(Path(f"{target.rpc_socket}.upgrade").exists, "a new program is waited for")
    target.upgrade()
    pause_ms = target.rpc("virtlun_get_status")["upgrade"]["pause_ms"]
    print(f"the neighbour's pause: {pause_ms:.0f} ms")


@pytest.mark.nightly
def test_a_disk_that_hangs_fails_the_upgrade_and_keeps_no_neighbour_waiting(
    target: Target, slow: SlowDisk, guest: Initiator, load: Load
) -> None:
    with waiting(target, slow, guest) as (new, writer):
        rounds = load.rounds
        assert new.answer() != "target"
        assert load.rounds >= rounds + ROUNDS
    assert TOO_LATE in target.words()
    load.wait(ROUNDS)
    writer.finish()
    # The next one succeeds.
    until(Path(f"{target.rpc_socket}.upgrade").exists, "a new program is waited for")
    target.upgrade()


@pytest.mark.nightly
def test_a_disk_that_hangs_before_the_guests_are_held_holds_none(
    target: Target, slow: SlowDisk, guest: Initiator, load: Load
) -> None:
    slow.hang()
    upgrade = Upgrade(target)
    load.wait(ROUNDS)
    upgrade.join()
    assert upgrade.failure is not None
    assert "the disk of bdev s0 has not answered for 5 s; no guest was held" in target.words()
    # It has not asked for them.
    assert "its I/O takes long" not in target.words()
    assert "does not go on" not in target.words()
    slow.go_on()
    guest.write(0, b"x" * 512)
    load.wait(ROUNDS)
    target.upgrade()
    assert guest.read(0, 1) == b"x" * 512
