"""The guest's program `verified_io`: started, asked, ended, and its volume audited from outside."""

from __future__ import annotations

import base64
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.support.agent import Agent
from tests.support.initiator import connected
from tests.support.qemu import Guest
from tests.support.target import Target
from tests.support.wait import until

FOLDER = "/tmp/verified"
STATUS_S = 240.0
"""No I/O is needed for an answer of it, but a starved guest is slow."""
BLOCK, SECTOR, STAMP = 4096, 512, 32
#: Of tests/guest/verified_io.c, which describes a stamp.
MAGIC, C1, C2 = 0x6F69646569666972, 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Status:
    """What the program has done; counts of answered requests."""

    requests: int
    kinds: dict[str, int]
    """How many of each kind: write, fua, read, flush, unmap, zero."""
    errors: int
    wrong: int
    longest_s: float
    """The longest time without an answer since it was last asked."""
    finished: bool
    text: str
    """All of it, with what the program found."""


class VerifiedIo:
    """The program at work on a disk of the guest that reads as zeros."""

    def __init__(
        self, guest: Guest | Agent, disk: str, *, seed: int, threads: int, depth: int
    ) -> None:
        """Starts it on `disk`, such as "sda", with up to `depth` requests a thread."""
        self.guest, self.seed = guest, seed
        self._in_flight = threads * depth
        # A signal that comes before it takes them ends it, without a word.
        guest.run(
            f"mkdir -p {FOLDER}; rm -f {FOLDER}/status; "
            f"verified_io /dev/{disk} {seed} {threads} {depth} {FOLDER} > {FOLDER}/log 2>&1 & "
            f"while [ -d /proc/$! ] && [ ! -f {FOLDER}/status ]; do usleep 2000; done",
            deadline_s=STATUS_S,
        )
        self.goes_on(0)

    def status(self) -> Status:
        """Asks it, and begins a new measurement of the longest pause."""
        said = self.guest.run(
            f"cd {FOLDER}; rm -f status; pid=$(pidof verified_io); kill -USR1 $pid; "
            "while [ -d /proc/${pid:-none} ] && [ ! -f status ]; do usleep 2000; done; "
            "cat status log",
            deadline_s=STATUS_S,
        )
        return parse(said)

    def goes_on(self, done: int, deadline_s: float = 90.0) -> Status:
        """Waits until more requests are answered than `done` and all that were in flight then.

        Returns the status with the longest pause meanwhile. AssertionError if it found something
        wrong, or if nothing more is answered until the deadline.
        """
        end, longest = time.monotonic() + deadline_s, 0.0
        while True:
            status = self.status()
            longest = max(longest, status.longest_s)
            assert (status.errors, status.wrong) == (0, 0), status.text
            if status.requests > done + self._in_flight:
                return Status(**{**vars(status), "longest_s": longest})
            assert time.monotonic() < end, f"the guest's I/O stands still: {status.text}"
            time.sleep(0.02)

    def goes_on_after(self, way: Callable[[], object]) -> Status:
        """Does `way`, which interrupts the I/O, and waits as `goes_on`."""
        done = self.status().requests
        way()
        return self.goes_on(done)

    def finish(self, deadline_s: float = 180.0) -> list[int]:
        """Ends the I/O; the guest reads the whole disk.

        Returns the generation of each block; AssertionError if anything was wrong.
        """
        self.guest.run(f"kill -TERM $(pidof verified_io); rm -f {FOLDER}/status")
        runs = partial(self.guest.run, "pidof verified_io", check=False)
        until(lambda: not runs(), "the program's end: I/O hangs", deadline_s, 0.1)
        status = parse(self.guest.run(f"cat {FOLDER}/status {FOLDER}/log"))
        assert (status.finished, status.errors, status.wrong) == (True, 0, 0), status.text
        packed = self.guest.run(f"gzip -c {FOLDER}/ledger | base64", deadline_s=120.0)
        data = zlib.decompress(base64.b64decode(packed), 31)
        return list(struct.unpack(f"<{len(data) // 4}I", data))


def parse(said: str) -> Status:
    """Reads a status line, with what follows it."""
    fields = {}
    for word in said.split("\n", 1)[0].split():
        name, _, value = word.partition("=")
        fields[name] = int(value)
    kinds = ("write", "fua", "read", "flush", "unmap", "zero")
    return Status(
        requests=sum(fields[kind] for kind in kinds),
        kinds={kind: fields[kind] for kind in kinds},
        errors=fields["errors"],
        wrong=fields["wrong"],
        longest_s=max(fields["longest_us"], fields["quiet_us"]) / 1e6,
        finished=bool(fields["finished"]),
        text=said,
    )


def block(seed: int, number: int, generation: int) -> bytes:
    """Returns what a block of a generation holds."""
    if generation == 0:
        return bytes(BLOCK)
    sectors = []
    for sector in range(number * BLOCK // SECTOR, (number + 1) * BLOCK // SECTOR):
        check = (sector * C1 & MASK) ^ (generation * C2 & MASK) ^ seed
        stamp = struct.pack("<4Q", seed ^ MAGIC, sector, generation, check)
        sectors.append(stamp * (SECTOR // STAMP))
    return b"".join(sectors)


def audit(target: Target, controller: str, ledger: list[int], seed: int) -> None:
    """Reads a volume through `controller`'s target 0 without any guest, and compares each block."""
    step = 256
    wrong = []
    with connected(target, controller) as peer:
        for first in range(0, len(ledger), step):
            part = ledger[first : first + step]
            data = peer.read(first * BLOCK // 512, len(part) * BLOCK // 512)
            for at, generation in enumerate(part):
                held = data[at * BLOCK : (at + 1) * BLOCK]
                if held != block(seed, first + at, generation):
                    wrong.append((first + at, generation, held[:STAMP].hex()))
    assert not wrong, f"{len(wrong)} blocks of the volume are wrong, such as {wrong[:5]}"
