"""kill -9 of a real target, again and again, while volumes come, change and go.

Each operation either happened or did not; those that were answered did. (Power cuts at every write
and flush, torn sectors included, are in the crates blobstore and lvol.)
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field, replace

import pytest

from pydataplane.errors import RpcError, TargetUnavailable
from tests.support.initiator import Initiator, Refused, connected
from tests.support.night import by_day
from tests.support.target import Target
from tests.support.wait import until

TARGET_KILLS = 40
"""Of a target that a client changes volumes of."""
MAX_ANSWERS = 40
"""Most calls that a target answers before it is killed in one of the next."""
PAUSE_S = 0.004
"""Longest time between the last of them and the kill: some calls."""
CUT_OFF = 10
"""Kills that come in a call, at least; a slow machine may need more kills for that."""
KILLS = 5
"""Of a target that a guest writes to."""
MIB = 1 << 20
STORE_MIB = 96
THICK_MIB = 12
"""Largest thick volume: four of them fit with room to spare."""
SLOTS = 4
"""Volumes at a time."""
CLUSTERS = 40
"""That a guest writes to."""


@dataclass(frozen=True)
class Volume:
    """What a volume should look like."""

    name: str
    mib: int
    thin: bool
    xattrs: tuple[tuple[str, str], ...] = ()


State = dict[str, Volume]
"""Volumes by UUID."""


@dataclass
class Worker:
    """Changes volumes until the target is gone."""

    target: Target
    rng: random.Random
    sure: State
    maybe: State | None = None
    """What the state is instead if the call that was not answered happened after all."""
    created: Volume | None = None
    """The volume whose creation was not answered: its UUID is not known."""
    wanted: int = 1
    """How many answers set `enough`."""
    answered: int = 0
    cut_off: bool = False
    """Whether the target went away in a call: it had taken the connection, and did not answer."""
    enough: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None
    names: int = 0

    def run(self) -> None:
        try:
            while True:
                self.step()
                self.answered += 1
                if self.answered == self.wanted:
                    self.enough.set()
        except RpcError as error:
            self.failure = error
        except TargetUnavailable as error:
            self.cut_off = "went away" in str(error)
        finally:
            self.enough.set()

    def step(self) -> None:
        self.maybe, self.created = None, None
        if len(self.sure) < SLOTS and self.rng.random() < 0.5:
            self.create()
        elif self.sure:
            uuid = self.rng.choice(sorted(self.sure))
            action = self.rng.choice(
                [self.resize, self.resize, self.rename, self.mark, self.delete]
            )
            action(uuid, self.sure[uuid])
            assert self.maybe is not None
            self.sure, self.maybe = self.maybe, None

    def fresh_name(self) -> str:
        self.names += 1
        return f"v{self.rng.getrandbits(32):08x}-{self.names}"

    def size(self, thin: bool) -> int:
        return self.rng.randint(1, 4000 if thin else THICK_MIB)

    def create(self) -> None:
        thin = self.rng.random() < 0.5
        volume = Volume(self.fresh_name(), self.size(thin), thin)
        self.created = volume
        uuid: str = self.target.rpc(
            "bdev_lvol_create",
            lvol_name=volume.name,
            size_in_mib=volume.mib,
            thin_provision=thin,
            lvs_name="lvs0",
        )
        self.sure = {**self.sure, uuid: volume}

    def resize(self, uuid: str, volume: Volume) -> None:
        changed = replace(volume, mib=self.size(volume.thin))
        self.maybe = {**self.sure, uuid: changed}
        self.target.rpc("bdev_lvol_resize", name=uuid, size_in_mib=changed.mib)

    def rename(self, uuid: str, volume: Volume) -> None:
        changed = replace(volume, name=self.fresh_name())
        self.maybe = {**self.sure, uuid: changed}
        self.target.rpc("bdev_lvol_rename", old_name=uuid, new_name=changed.name)

    def mark(self, uuid: str, volume: Volume) -> None:
        name, value = f"x{self.rng.randrange(3)}", "y" * self.rng.randrange(3000)
        changed = replace(
            volume, xattrs=tuple(sorted({**dict(volume.xattrs), name: value}.items()))
        )
        self.maybe = {**self.sure, uuid: changed}
        self.target.rpc("virtlun_lvol_set_xattr", name=uuid, xattr_name=name, xattr_value=value)

    def delete(self, uuid: str, volume: Volume) -> None:
        self.maybe = {other: v for other, v in self.sure.items() if other != uuid}
        self.target.rpc("bdev_lvol_delete", name=uuid)


def found(target: Target) -> State:
    """What the target shows, after checking that it agrees with itself."""
    lvols = target.rpc("bdev_lvol_get_lvols", lvs_name="lvs0")
    (store,) = target.rpc("bdev_lvol_get_lvstores")
    owned = sum(lvol["num_allocated_clusters"] for lvol in lvols)
    assert owned + store["free_clusters"] == store["total_data_clusters"], (lvols, store)
    state: State = {}
    for lvol in lvols:
        uuid, mib, thin = lvol["uuid"], lvol["size"] // MIB, lvol["is_thin_provisioned"]
        assert lvol["num_allocated_clusters"] == (0 if thin else mib), lvol
        (bdev,) = target.rpc("bdev_get_bdevs", name=uuid)
        assert bdev["num_blocks"] * bdev["block_size"] == lvol["size"], bdev
        xattrs = target.rpc("virtlun_lvol_get_xattrs", name=uuid)
        state[uuid] = Volume(lvol["name"], mib, thin, tuple(sorted(xattrs.items())))
    return state


def check_outcome(state: State, worker: Worker) -> State:
    """Checks that `state` is one of the two that the worker leaves possible."""
    new = [volume for uuid, volume in state.items() if uuid not in worker.sure]
    if worker.created is not None and new:
        assert new == [worker.created]
        rest = {uuid: volume for uuid, volume in state.items() if uuid in worker.sure}
        assert rest == worker.sure
        return state
    assert state in (worker.sure, worker.maybe)
    return state


def test_each_operation_happened_or_did_not_when_the_target_is_killed(target: Target) -> None:
    """`VIRTLUN_SEED` repeats the calls and after how many of them the target is killed."""
    seed = int(os.environ.get("VIRTLUN_SEED", time.time_ns() & 0xFFFFFFFF))
    print(f"VIRTLUN_SEED={seed} pytest tests/crash/test_kill.py")
    target.make_lvstore(size=STORE_MIB * MIB)
    state: State = {}
    kill = answered = cut_off = 0
    while kill < TARGET_KILLS or (cut_off < CUT_OFF and kill < TARGET_KILLS * 4):
        kill += 1
        rng = random.Random(f"{seed}-{kill}")
        worker = Worker(target, rng, state, wanted=rng.randint(1, MAX_ANSWERS))
        pause_s = rng.random() * PAUSE_S
        thread = threading.Thread(target=worker.run)
        thread.start()
        assert worker.enough.wait(60)
        time.sleep(pause_s)
        target.kill9()
        thread.join()
        assert worker.failure is None, worker.failure
        target.start()
        assert target.rpc("virtlun_get_status")["restore_problems"] == []
        state = check_outcome(found(target), worker)
        answered += worker.answered
        cut_off += worker.cut_off
    print(f"{kill} kills, {answered} operations answered, {cut_off} cut off")
    assert cut_off >= CUT_OFF, "most kills came between two calls"


@by_day("clone")
@pytest.mark.parametrize("kind", ["thin", "clone"])
def test_what_was_written_and_answered_is_there_after_a_kill(target: Target, kind: str) -> None:
    """Writes through shared memory, of which many are the first to their cluster, until the kill.

    A cluster of a clone has what is beside them from its snapshot.
    """
    target.make_lvstore(size=128 * MIB)
    target.rpc(
        "bdev_lvol_create", lvol_name="t", size_in_mib=256, thin_provision=True, lvs_name="lvs0"
    )
    target.rpc("vhost_create_scsi_controller", ctrlr="c0")
    add = {"ctrlr": "c0", "scsi_target_num": 0, "bdev_name": "lvs0/t"}
    target.rpc("vhost_scsi_controller_add_target", **add)
    rng = random.Random(5)
    written: dict[int, bytes] = {}
    if kind == "clone":
        with connected(target, "c0") as guest:
            for cluster in range(CLUSTERS):
                # The guest does not write these again.
                for block in (4, 2000, 2044):
                    lba, data = cluster * 2048 + block, bytes([0x80 + cluster, block & 255]) * 1024
                    guest.write(lba, data)
                    written[lba] = data
        target.rpc("bdev_lvol_snapshot", lvol_name="lvs0/t", snapshot_name="s")
    for turn in range(KILLS):
        with connected(target, "c0") as guest:
            verify(guest, written)
            write_until_killed(target, guest, rng, turn, written)
        target.start()
    with connected(target, "c0") as guest:
        verify(guest, written)
    lvols = {each["name"]: each for each in target.rpc("bdev_lvol_get_lvols", lvs_name="lvs0")}
    assert 4 < lvols["t"]["num_allocated_clusters"] <= CLUSTERS
    assert kind == "thin" or lvols["s"]["num_allocated_clusters"] == CLUSTERS


def test_a_shallow_copy_that_was_cut_off_is_made_again(target: Target) -> None:
    """The snapshot is as it was, and the copy whole the next time."""
    target.make_lvstore()
    target.rpc("bdev_lvol_create", lvol_name="t", size_in_mib=24, lvs_name="lvs0")
    with target.exported("lvs0/t") as volume, volume.open("r+b") as file:
        file.write(random.Random(1).randbytes(24 * MIB))
        os.fsync(file)
    target.rpc("bdev_lvol_snapshot", lvol_name="lvs0/t", snapshot_name="s")
    to = target.make_file("copy.img", 24 * MIB)
    target.rpc("bdev_uring_create", filename=str(to), name="copy", block_size=512)
    rng = random.Random(2)
    start = {"src_lvol_name": "lvs0/s", "dst_bdev_name": "copy"}
    turn = cut_off = 0
    # A slow test may find the first ones complete.
    while turn < KILLS * 2 or (not cut_off and turn < KILLS * 40):
        turn += 1
        begun = target.rpc("bdev_lvol_start_shallow_copy", **start)
        time.sleep(rng.random() * PAUSE_S)
        said = target.rpc("bdev_lvol_check_shallow_copy", **begun)
        cut_off += said["state"] == "in progress"
        target.crash()
        assert target.rpc("virtlun_get_status")["restore_problems"] == []
        # Nobody holds either bdev for a copy that is no more.
        assert target.fails("bdev_lvol_check_shallow_copy", **begun)
    assert cut_off, "none was under way"
    begun = target.rpc("bdev_lvol_start_shallow_copy", **start)
    until(
        lambda: target.rpc("bdev_lvol_check_shallow_copy", **begun)["state"] == "complete",
        "it is copied",
    )
    with target.exported("copy") as copy, target.exported("lvs0/t") as volume:
        assert copy.read_bytes() == volume.read_bytes() == random.Random(1).randbytes(24 * MIB)


def verify(guest: Initiator, written: dict[int, bytes]) -> None:
    """Reads all that was answered."""
    for lba, data in written.items():
        assert guest.read(lba, 4) == data, f"block {lba}"


def write_until_killed(
    target: Target, guest: Initiator, rng: random.Random, turn: int, written: dict[int, bytes]
) -> None:
    """Writes, and notes each write that is answered, until the target is killed in one of them."""
    enough, killed = threading.Event(), threading.Event()
    wanted = rng.randint(20, 120)

    def crash() -> None:
        assert enough.wait(60)
        killed.set()
        target.kill9()
        os.kill(guest.pid, signal.SIGKILL)  # it would wait for the answer

    thread = threading.Thread(target=crash)
    thread.start()
    try:
        for number in itertools.count(1):
            # A cluster of 1 MiB has 2048 blocks; few clusters, so that none runs out.
            lba = rng.randrange(CLUSTERS) * 2048 + rng.randrange(2, 490) * 4
            data = bytes([turn + 1, number & 255]) * 1024
            written.pop(lba, None)  # it may be either until this is answered
            guest.write(lba, data)
            written[lba] = data
            if number == wanted:
                enough.set()
    except (Refused, json.JSONDecodeError, BrokenPipeError):
        # No answer, or the end of the process that would give it.
        assert killed.is_set(), "nobody has killed it yet"
    finally:
        enough.set()
        thread.join()
