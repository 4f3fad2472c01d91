"""Verified I/O on a file or block device from several threads: every block says what it is.

Each thread has regions of its own and remembers what it wrote there last. A block carries its
place, its thread and the number of the write, so that a lost write, a stale one that comes late,
and one that lands elsewhere are all told apart. Direct I/O, so that what is read is what is stored.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.target import Target
from tests.support.wait import until

BLOCK = 4096
LENGTHS = (1, 1, 1, 2, 4, 16, 64, 256)
"""Blocks of one write."""
STAMP = struct.Struct("<4sIQQ")


def _stamp(place: int, number: int, thread: int) -> bytes:
    return STAMP.pack(b"load", thread, place, number) * (BLOCK // STAMP.size) + bytes(
        BLOCK % STAMP.size
    )


@dataclass
class Load:
    """I/O that runs until it is stopped; read it only then."""

    path: Path
    size: int
    seed: int
    threads: int = 4
    operations: int = 0
    """I/Os that have ended."""
    longest_s: float = 0.0
    """The longest of them since it was set to 0."""
    problems: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _known: dict[int, bytes] = field(default_factory=dict)

    @contextlib.contextmanager
    def running(self) -> Iterator[Load]:
        """Runs it for the duration of a block, and then looks at everything once more."""
        workers = [threading.Thread(target=self._run, args=(n,)) for n in range(self.threads)]
        for worker in workers:
            worker.start()
        try:
            yield self
        finally:
            self._stop.set()
            for worker in workers:
                worker.join()
        self.check()

    def progress(self, operations: int, deadline_s: float = 120.0) -> None:
        """Waits until so many more I/Os have ended."""
        wanted = self.operations + operations
        until(lambda: self.operations >= wanted or self.problems, "more I/O", deadline_s)

    def check(self) -> None:
        """Compares all that was ever written with what is there."""
        assert not self.problems, self.problems
        node = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, BLOCK) as page:
                for place, expected in sorted(self._known.items()):
                    os.preadv(node, [page], place * BLOCK)
                    found = page[:]
                    assert found == expected, f"block {place}: {_told(found, expected)}"
        finally:
            os.close(node)

    def _run(self, thread: int) -> None:
        chance = random.Random(self.seed * 1000 + thread)
        node = os.open(self.path, os.O_RDWR | os.O_DIRECT)
        try:
            with mmap.mmap(-1, max(LENGTHS) * BLOCK) as memory:
                number = 0
                while not self._stop.is_set() and not self.problems:
                    number += 1
                    self._one(node, memory, thread, number, chance)
        except OSError as error:
            self.problems.append(f"thread {thread}: {error}")
        finally:
            os.close(node)

    def _one(
        self, node: int, memory: mmap.mmap, thread: int, number: int, chance: random.Random
    ) -> None:
        share = self.size // BLOCK // self.threads
        count = chance.choice(LENGTHS)
        first = thread * share + chance.randrange(share - count)
        begun = time.monotonic()
        kind = chance.random()
        if kind < 0.5:
            data = b"".join(_stamp(first + n, number, thread) for n in range(count))
            memory[: len(data)] = data
            wrote = os.pwritev(node, [memoryview(memory)[: len(data)]], first * BLOCK)
            if wrote != len(data):
                self.problems.append(f"thread {thread}: wrote {wrote} of {len(data)} bytes")
            for n in range(count):
                self._known[first + n] = data[n * BLOCK : (n + 1) * BLOCK]
        elif kind < 0.6:
            os.fdatasync(node)
        else:
            view = memoryview(memory)[: count * BLOCK]
            os.preadv(node, [view], first * BLOCK)
            for n in range(count):
                expected = self._known.get(first + n)
                found = bytes(view[n * BLOCK : (n + 1) * BLOCK])
                if expected is not None and found != expected:
                    why = _told(found, expected)
                    self.problems.append(f"thread {thread}, block {first + n}: {why}")
            view.release()
        with self._lock:
            self.operations += 1
            self.longest_s = max(self.longest_s, time.monotonic() - begun)


def _told(found: bytes, expected: bytes) -> str:
    """Returns what differs, in words."""
    return f"found {STAMP.unpack_from(found)}, expected {STAMP.unpack_from(expected)}"


@contextlib.contextmanager
def load_on(target: Target, bdev: str, seed: int) -> Iterator[Load]:
    """Verified I/O on the first 32 MiB of a bdev for the duration of a block."""
    with target.exported(bdev) as path, Load(path, 32 << 20, seed, threads=2).running() as load:
        yield load
