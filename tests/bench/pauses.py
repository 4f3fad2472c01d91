"""`python -m tests.bench.pauses`: how long a guest and a pod wait when their target goes.

The target is killed and started again, stopped in order and started again, and upgraded, while a
guest reads its LUN and a pod its loop device (with direct I/O over an export), one read after the
other. What is told is the longest read around each time, in milliseconds: the median and the most.
With a target that ends, its successor's start is in it; systemd waits for 100 ms before that
(RestartSec of the unit), and QEMU connects again once a second, or as `reconnect_s` says.

The guest is virtlun-bench's, which keeps an in-flight region as QEMU does, and connects as soon as
it can. Needs root, /dev/fuse and loop devices.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.support.initiator import Initiator, Refused
from tests.support.target import Target

SIZE_MIB = 16
READ_BYTES, BLOCK = 4096, 512
READ_10 = bytes([0x28, *bytes(6), 0, READ_BYTES // BLOCK, 0])
LOOK_MS = 1
"""How long an answer is waited for before it is looked whether the target is gone."""
BETWEEN_S = 0.2
DEADLINE_S = 60.0


class Reader(ABC):
    """Reads all the time, in a thread."""

    def __init__(self) -> None:
        """Reads from `begin` on."""
        self.longest_s = 0.0
        self.reads = 0
        self.is_gone = False
        """The target has ended: whoever has a connection has to make it anew."""
        self.failed: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @abstractmethod
    def read(self) -> None:
        """Reads once; returns when it was answered, however long that takes."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Reads for the duration of a block."""
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()

    def pause_ms(self, how: Callable[[], object]) -> float:
        """Returns how long the longest read took that was under way beside `how`, or just after."""
        time.sleep(BETWEEN_S)
        self.longest_s = 0.0
        how()
        # Also the one that was in flight when it was over.
        wanted, end = self.reads + 2, time.monotonic() + DEADLINE_S
        while self.reads < wanted:
            if self.failed is not None:
                raise self.failed
            if time.monotonic() > end:
                raise TimeoutError(f"nothing was read for {DEADLINE_S:g} s")
            time.sleep(0.001)
        return self.longest_s * 1e3

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                begun = time.monotonic()
                self.read()
                self.longest_s = max(self.longest_s, time.monotonic() - begun)
                self.reads += 1
        except (OSError, Refused) as error:
            self.failed = error


class Guest(Reader):
    """Reads a LUN, and connects again to a target that was started again."""

    def __init__(self, initiator: Initiator) -> None:
        """Of an initiator that is connected."""
        super().__init__()
        self._initiator = initiator

    def read(self) -> None:
        """Reads once; a unit attention of a new target is an answer."""
        head = self._initiator.send("submit", cdb=READ_10, data_in_len=READ_BYTES)["head"]
        while True:
            try:
                self._initiator.send("wait", head=head, timeout_ms=LOOK_MS)
            except Refused:
                if self.is_gone:
                    self._connect()
            else:
                return

    def _connect(self) -> None:
        try:
            self._initiator.send("reconnect", keep=True)
        except Refused:
            return  # not yet
        self.is_gone = False


class Pod(Reader):
    """Reads a block device with direct I/O."""

    def __init__(self, device: str) -> None:
        """Of the device at that path."""
        super().__init__()
        self._node = os.open(device, os.O_RDONLY | os.O_DIRECT)
        self._memory = mmap.mmap(-1, READ_BYTES)

    def read(self) -> None:
        """Reads once."""
        os.preadv(self._node, [self._memory], 0)

    def close(self) -> None:
        """Lets go of the device."""
        os.close(self._node)


def ways(target: Target, reader: Reader) -> dict[str, Callable[[], object]]:
    """Returns what becomes of the target, by name."""

    def anew(end: Callable[[], object]) -> None:
        end()
        reader.is_gone = True
        target.start()

    return {
        "kill -9": lambda: anew(target.kill9),
        "restart": lambda: anew(target.stop),
        "upgrade": target.upgrade,
    }


@contextmanager
def guest(target: Target, volume: str) -> Iterator[Reader]:
    """A guest with that volume."""
    target.rpc("vhost_create_scsi_controller", ctrlr="vm")
    target.add_lun("vm", volume)
    with Initiator(target.vhost_dir / "vm") as initiator:
        initiator.send("connect")
        initiator.ready()
        yield Guest(initiator)


@contextmanager
def pod(target: Target, volume: str) -> Iterator[Reader]:
    """A loop device on that volume, as the CSI driver gives one to a pod."""
    path = target.rpc("virtlun_export_create", bdev_name=volume)["path"]
    command = ["losetup", "--find", "--show", "--direct-io=on", path]
    loop = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    try:
        reader = Pod(loop)
        try:
            yield reader
        finally:
            reader.close()
    finally:
        subprocess.run(["losetup", "-d", loop], check=True)


WHO = {"guest": guest, "pod": pod}


def measure(who: str, rounds: int) -> dict[str, list[float]]:
    """Returns the pauses in milliseconds, by what became of the target."""
    directory = Path(tempfile.mkdtemp(prefix="vp-", dir="/tmp"))
    target = Target(directory).start()
    try:
        target.make_lvstore(size=4 * SIZE_MIB << 20)
        volume = target.rpc(
            "bdev_lvol_create", lvol_name="v", size_in_mib=SIZE_MIB, lvs_name="lvs0"
        )
        with WHO[who](target, volume) as reader, reader.reading():
            return {
                name: [reader.pause_ms(how) for _ in range(rounds)]
                for name, how in ways(target, reader).items()
            }
    finally:
        target.stop()
        target.end_holder()
        shutil.rmtree(directory)


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.pauses",
        description="Milliseconds that a guest and a pod wait while their target is away.",
    )
    parser.add_argument("--rounds", type=int, default=20, help="of each row (20)")
    rounds = parser.parse_args().rounds
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("WHO", "TARGET"):
        table.add_column(title)
    for title in ("p50", "max"):
        table.add_column(title, justify="right")
    for who in WHO:
        for how, pauses in measure(who, rounds).items():
            table.add_row(who, how, f"{statistics.median(pauses):.1f}", f"{max(pauses):.1f}")
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
