"""The target restarts under verified I/O of a guest, which must notice a pause and nothing else.

`VIRTLUN_SEED` repeats the moments of a run; the guest's own choices have the same seed.
`VIRTLUN_RESTARTS` is how many restarts the nightly tests make of each kind. Those that stand still
for a minute are shared among several guests, each on a target of its own.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.guest.conftest import add, disk, remove
from tests.guest.emulator import Emulator, newer
from tests.guest.image import Image
from tests.support.frozen import frozen
from tests.support.night import at_night
from tests.support.qemu import Guest
from tests.support.restarts import AT_ONCE, RESTARTS, STOPPED_S, choose_seed
from tests.support.slow_disk import SlowDisk
from tests.support.target import Target
from tests.support.verified_io import VerifiedIo, audit
from tests.support.wait import until

pytestmark = pytest.mark.vm

VOLUME_MIB = 48
THREADS = 4
DEPTH = 8
RECONNECT_MS = 100
#: Longest wait before a restart.
BETWEEN_S = 0.4
BROKEN = ("is not a head", "broke virtio's rules", "panicked")


@pytest.fixture
def seed() -> int:
    """Of the guest's requests and the moments of the restarts."""
    return choose_seed()


class Restarts:
    """A guest with verified I/O on a volume, whose target can be ended in several ways."""

    def __init__(self, target: Target, guest: Guest, volume: str, seed: int) -> None:
        """Starts the guest's I/O on `volume`, which is its target 0."""
        self.target, self.guest, self.volume, self.seed = target, guest, volume, seed
        self.moments = random.Random(seed)
        self.io = VerifiedIo(
            self.guest, disk(self.guest, 0), seed=seed, threads=THREADS, depth=DEPTH
        )
        self.pauses_s: list[float] = []

    def kill(self) -> None:
        """Ends the target as a crash does."""
        self.target.crash()

    def terminate(self) -> None:
        """Ends the target in order."""
        assert self.target.stop() == 0, self.target.words()
        self.target.start()

    def upgrade(self) -> None:
        """Has a new process take over."""
        self.target.upgrade()

    def stand_still(self, seconds: float) -> None:
        """Stops the target for a while, as a debugger or a frozen cgroup does."""
        with frozen(self.target.pid):
            time.sleep(seconds)

    def noticed(self) -> None:
        """Waits until the guest's I/O goes on, after one of the above; takes the pause down."""
        status = self.io.goes_on(self.done)
        self.pauses_s.append(status.longest_s)
        words = self.target.words()
        assert not [text for text in BROKEN if text in words], words
        time.sleep(self.moments.uniform(0, BETWEEN_S))

    def before(self) -> None:
        """Takes down what the guest has done."""
        self.done = self.io.status().requests

    def end(self) -> None:
        """Checks the guest, its QEMU and the volume, from inside and from outside."""
        until(lambda: all(self.io.status().kinds.values()), "requests of each kind are answered")
        ledger = self.io.finish()
        log = self.guest.run("dmesg")
        assert "I/O error" not in log, log
        said = self.guest.log.read_text()
        assert not [text for text in BROKEN if text in said], said
        self.guest.stop()
        remove(self.target, 0)
        self.target.attach("audit", self.volume)
        audit(self.target, "audit", ledger, self.seed)
        print(
            f"{len(self.pauses_s)} restarts; a pause of {statistics.median(self.pauses_s):.3f} s "
            f"(median), {max(self.pauses_s):.3f} s (longest)"
        )


@contextlib.contextmanager
def thin_volume(target: Target, slow: Path | None) -> Iterator[str]:
    """Shows a thin volume as target 0 of `vm0`, on a file, or on a disk in `slow` that is late."""
    size = 2 * VOLUME_MIB << 20
    with contextlib.ExitStack() as stack:
        if slow is None:
            file = target.make_file("fast.img", size)
        else:
            late = stack.enter_context(SlowDisk(slow, size))
            file = late.path
            # Nobody may have its file open when it ends.
            stack.callback(target.stop)
        target.rpc("bdev_uring_create", filename=str(file), name="base", block_size=512)
        target.rpc("bdev_lvol_create_lvstore", bdev_name="base", lvs_name="lvs0")
        target.make_thin("v0", VOLUME_MIB)
        add(target, 0, "lvs0/v0")
        yield "lvs0/v0"


@contextlib.contextmanager
def at_work(
    scratch: Path, image: Image, seed: int, *, slow: bool, kept_by: Emulator | None = None
) -> Iterator[Restarts]:
    """Runs a target, and a guest with I/O on a volume of it, in a directory with a short path.

    `kept_by`: a QEMU that does not connect again, whose connection is kept.
    """
    target = Target(scratch, *(["--hold-sessions"] if kept_by else [])).start()
    with contextlib.ExitStack() as stack:
        stack.callback(target.stop)
        target.rpc("vhost_create_scsi_controller", ctrlr="vm0")
        volume = stack.enter_context(thin_volume(target, scratch / "slow" if slow else None))
        guest = Guest(
            image,
            scratch / "guest",
            controllers=(target.vhost_dir / "vm0",),
            emulator=kept_by or newer(),
            reconnect_ms=None if kept_by else RECONNECT_MS,
            vcpus=THREADS,
            num_queues=THREADS,
        )
        stack.callback(guest.stop)
        yield Restarts(target, guest, volume, seed)
        assert target.stop() == 0, target.words()


@pytest.fixture(params=["fast", at_night("slow")])
def restarts(
    scratch: Path, image: Image, seed: int, request: pytest.FixtureRequest
) -> Iterator[Restarts]:
    """The guest at work."""
    with at_work(scratch, image, seed, slow=request.param == "slow") as guest:
        yield guest


def test_a_guest_notices_only_a_pause(restarts: Restarts) -> None:
    """Crashes, orderly ends and standing still, in a mixed order."""
    ways: list[Callable[[], None]] = [restarts.kill] * 3 + [restarts.terminate] * 3
    ways.append(partial(restarts.stand_still, 2.0))
    restarts.moments.shuffle(ways)
    for way in ways:
        restarts.before()
        way()
        restarts.noticed()
    restarts.end()


@pytest.mark.nightly
@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "kills"])
def test_a_guest_whose_connection_is_kept_notices_only_a_pause(
    scratch: Path, image: Image, seed: int, emulator: Emulator, mixed: bool
) -> None:
    """With any QEMU, and without a word to it."""
    with at_work(scratch, image, seed, slow=False, kept_by=emulator) as restarts:
        ways: list[Callable[[], None]] = [restarts.kill] * 6
        if mixed:
            ways = [restarts.kill, restarts.upgrade, restarts.terminate] * 2
            restarts.moments.shuffle(ways)
        for way in ways:
            until(lambda: restarts.target.is_kept("vm0"), "it is kept")
            restarts.before()
            way()
            restarts.noticed()
        restarts.end()


@pytest.mark.nightly
@pytest.mark.timeout(3 * 3600)
def test_many_kills_of_a_guest_whose_connection_is_kept(
    scratch: Path, image: Image, seed: int, emulator: Emulator
) -> None:
    with at_work(scratch, image, seed, slow=True, kept_by=emulator) as restarts:
        for _ in range(RESTARTS):
            until(lambda: restarts.target.is_kept("vm0"), "it is kept")
            restarts.before()
            restarts.kill()
            restarts.noticed()
        restarts.end()


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("way", ["kill", "terminate"])
def test_many_restarts(restarts: Restarts, way: str) -> None:
    for _ in range(RESTARTS):
        restarts.before()
        getattr(restarts, way)()
        restarts.noticed()
    restarts.end()


@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize(
    ("times", "guests"),
    [
        pytest.param(2, 2, marks=[pytest.mark.timeout(900), pytest.mark.nightly]),
        at_night(RESTARTS, AT_ONCE),
    ],
)
def test_standing_still_for_longer_than_a_guest_waits(
    scratch: Path, image: Image, seed: int, times: int, guests: int
) -> None:
    """Linux gives a SCSI command 30 s, and virtio-scsi's driver more of them."""
    booting = threading.Lock()

    def stand_still_often(number: int) -> None:
        folder = scratch / str(number)
        folder.mkdir()
        with contextlib.ExitStack() as stack:
            # One at a time is at work; while a guest stands still it takes no processor.
            with booting:
                begun = at_work(folder, image, seed + number, slow=number % 2 == 1)
                restarts = stack.enter_context(begun)
            for _ in range(-(-times // guests)):
                restarts.before()
                restarts.stand_still(STOPPED_S)
                restarts.noticed()
            restarts.end()

    with ThreadPoolExecutor(guests) as pool:
        list(pool.map(stand_still_often, range(guests)))
