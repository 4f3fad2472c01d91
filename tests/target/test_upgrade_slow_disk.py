"""An upgrade waits for a slow disk, and only the guest whose disk it is waits with it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.initiator import Initiator
from tests.support.slow_disk import SlowDisk
from tests.support.target import Target, TargetFailed
from tests.support.wait import until
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
ROUNDS = 5
"""Of a neighbour while an upgrade waits, for 5 s at most: it would do one if it waited, too."""


class Upgrade(threading.Thread):
    """An upgrade that is under way; a context manager that waits for its end."""

    def __init__(self, target: Target, disk: SlowDisk) -> None:
        """Begins it; `disk` goes on at its end at the latest."""
        super().__init__()
        self._target, self._disk = target, disk
        self.failure: TargetFailed | None = None
        self.start()

    def run(self) -> None:
        """Upgrades."""
        try:
            self._target.upgrade()
        except TargetFailed as failure:
            self.failure = failure

    def __enter__(self) -> Upgrade:
        """Returns it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for its end."""
        self._disk.go_on()
        self.join()


def content(n: int) -> bytes:
    """Returns what is written to block `n`."""
    return bytes([n % 255 + 1]) * BLOCK


class Writer:
    """A guest with many writes of 4 KiB in flight, and a request that begins when they are done."""

    def __init__(self, guest: Initiator) -> None:
        """Sends them."""
        self._guest = guest
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

    def _take(self, answer: dict[str, list[dict[str, int]]]) -> None:
        self._answered += [used["head"] // 3 for used in answer["used"]]

    def _status(self, n: int) -> int:
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
        assert self._status(WRITES) == BUSY

    def finish(self) -> None:
        """Waits for all: each is done."""
        for n in self.wait_for(WRITES + 1)[1:]:
            assert self._status(n) == GOOD
            assert self._guest.read(n * BLOCK // 512, BLOCK // 512) == content(n)


@pytest.fixture
def slow(scratch: Path, target: Target) -> Iterator[SlowDisk]:
    """The disk of controller `slow`; that of `fast` is in memory."""
    with SlowDisk(scratch / "slow", DISK_BYTES) as disk:
        target.rpc("bdev_uring_create", filename=str(disk.path), name="s0", block_size=512)
        target.rpc("bdev_malloc_create", name="f0", num_blocks=4096, block_size=512)
        for controller, bdev in (("slow", "s0"), ("fast", "f0")):
            target.rpc("vhost_create_scsi_controller", ctrlr=controller)
            target.add_lun(controller, bdev)
        yield disk
        # Whatever happened: nobody may have its file open when it ends.
        disk.go_on()
        assert target.stop() == 0, target.words()


def test_a_neighbour_is_served_while_a_slow_disk_is_waited_for(
    target: Target, slow: SlowDisk
) -> None:
    with Initiator(target.vhost_dir / "slow") as guest, Load(target, "fast") as load:
        guest.send("connect", queues=2, queue_size=QUEUE_SIZE, memory=MEMORY)
        guest.ready()
        slow.hang()
        writer = Writer(guest)
        with Upgrade(target, slow) as upgrade:
            writer.wait_until_held()
            load.wait(ROUNDS)
            assert upgrade.is_alive(), upgrade.failure
        assert upgrade.failure is None, upgrade.failure
        writer.finish()
        load.wait()
        load.check()
    assert "its I/O takes long" in target.words()
    pause_ms = target.rpc("virtlun_get_status")["upgrade"]["pause_ms"]
    print(f"the neighbour's pause: {pause_ms:.0f} ms")


def test_a_disk_that_hangs_fails_the_upgrade_and_keeps_no_neighbour_waiting(
    target: Target, slow: SlowDisk
) -> None:
    with Initiator(target.vhost_dir / "slow") as guest, Load(target, "fast") as load:
        guest.send("connect", queues=2, queue_size=QUEUE_SIZE, memory=MEMORY)
        guest.ready()
        slow.hang()
        writer = Writer(guest)
        with Upgrade(target, slow) as upgrade:
            writer.wait_until_held()
            rounds = load.rounds
            upgrade.join()
            assert load.rounds >= rounds + ROUNDS
            assert upgrade.failure is not None
        assert "controller slow: an upgrade still waits for I/O in flight" in target.words()
        load.wait(ROUNDS)
        writer.finish()
        # The next one succeeds.
        target.upgrade()
        load.wait()
        load.check()
