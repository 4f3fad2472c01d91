"""Driver or target killed with -9 before each step of a volume's life, which then goes on.

A step is whatever changes something: a call of the target, a command of the host, a loop device
(see tests/support/killed.py). Whoever made the call that was cut off makes it again, to the driver
that runs then, as kubelet and the sidecars do; nothing else is repeated, and nothing stays behind.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from google.protobuf.message import Message

from csi.proto import csi_pb2 as pb
from pydataplane.volumes import Volumes
from tests.support.csi import MIB, NOTHING, Driver, block, mount, snapshot_of, volume_of
from tests.support.killed import STEP
from tests.support.wait import until
from tests.target.conftest import MakeTarget

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

SIZE = 320 * MIB
LARGER = 400 * MIB
DEATH_S = 10.0
LOOK_S = 0.05
SOME = b"some" * 1024
FILES = {
    "bdev_lvol_create",
    "virtlun_export_create",
    "loop attach",
    "virtlun_lvol_set_xattr csi.formatting",
    "mkfs.xfs",
    "virtlun_lvol_remove_xattr csi.formatting",
    "mount",
    "mount --bind",
    "bdev_lvol_resize",
    "loop grow",
    "xfs_growfs",
    "umount",
    "loop release",
    "virtlun_export_delete",
    "bdev_lvol_delete",
}
SOCKET = {
    "bdev_lvol_create",
    "vhost_create_scsi_controller",
    "vhost_scsi_controller_add_target",
    "mount --bind",
    "mount",
    "umount",
    "vhost_delete_controller",
    "bdev_lvol_delete",
}
HISTORY = {
    "bdev_lvol_create",
    "bdev_lvol_snapshot",
    "virtlun_lvol_snapshot_together",
    "bdev_lvol_clone",
    "bdev_lvol_resize",
    "bdev_lvol_inflate",
    "virtlun_lvol_remove_xattr csi.unfinished",
    "virtlun_lvol_set_xattr csi.deleted",
    "bdev_lvol_delete",
}
"""The steps of a life, which the driver is killed before."""


class Stubborn(Driver):
    """A driver whose caller makes a call again if the driver dies of it."""

    deaths = 0

    def call(self, request: Message) -> Any:
        """Makes a call, twice if need be."""
        try:
            return super().call(request)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
        assert self.stop() == -signal.SIGKILL
        self.deaths += 1
        self.start()
        return super().call(request)


class Faithful(Driver):
    """A driver whose target is started again when it dies, in the middle of a call perhaps.

    What reads and writes the volume's file waits until then; a call of the target fails, and the
    caller makes its own again.
    """

    deaths = 0

    def call(self, request: Message) -> Any:
        """Makes a call, twice if need be."""
        before, armed = self.deaths, self.fuse is not None and self.fuse.exists()
        with ThreadPoolExecutor(1) as executor:
            answer = executor.submit(super().call, request)
            while not answer.done():
                self.revive()
                wait([answer], LOOK_S)
        if armed and self.fuse is not None and not self.fuse.exists() and self.deaths == before:
            self.revive(DEATH_S)  # it was killed in this call, and may not have ended yet
        try:
            return answer.result()
        except grpc.RpcError as error:
            if self.deaths == before:
                self.revive(DEATH_S)  # the connections of a killed process end before it does
            if self.deaths == before:
                raise error
        return super().call(request)

    def revive(self, seconds: float = 0) -> None:
        """Starts the target again if it has ended, or does within `seconds`."""
        assert self.target.process is not None
        try:
            self.target.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        self.target.kill9()
        self.deaths += 1
        self.target.start()


Made = TypeVar("Made", Stubborn, Faithful)


def run(make_target: MakeTarget, kind: type[Made]) -> Iterator[Made]:
    """Runs a driver with an lvstore of 1 GiB."""
    target = make_target().start()
    target.make_lvstore(size=1024 * MIB)
    made = kind(target, target.directory)
    made.fuse = target.directory / "kill-at"
    made.start()
    yield made
    status = made.stop()
    made.clear()
    assert status == 0, made.words()


@pytest.fixture
def driver(make_target: MakeTarget) -> Iterator[Stubborn]:
    """A running driver that may die."""
    yield from run(make_target, Stubborn)


@pytest.fixture
def faithful(make_target: MakeTarget) -> Iterator[Faithful]:
    """A running driver whose target may die."""
    yield from run(make_target, Faithful)


@pytest.mark.nightly
def test_a_driver_killed_before_any_step_leaves_what_its_callers_complete(
    driver: Stubborn,
) -> None:
    def live(name: str, fuse: Path, point: str) -> None:
        """A volume from its creation to its end, with a file in it that must not get lost."""
        fuse.write_text(point)
        handle = driver.create(name, SIZE, mount("xfs"), thin="true")
        file = driver.publish(handle, mount("xfs")) / "file"
        _write_through(file)
        driver.expand(handle, LARGER)
        assert file.read_bytes() == SOME
        found = os.statvfs(file)
        assert SIZE < found.f_blocks * found.f_frsize <= LARGER
        reader = driver.publish(handle, mount("xfs"), "reader", readonly=True) / "file"
        assert reader.read_bytes() == SOME
        with pytest.raises(OSError, match="Read-only file system"):
            _write_through(reader)
        driver.unpublish(handle, "reader")
        driver.unpublish(handle)
        driver.unstage(handle)
        driver.delete(handle)

    assert _kill_everywhere(driver, live) == FILES


def test_a_volume_that_nobody_was_told_of_is_listed_and_completed(driver: Stubborn) -> None:
    """Killed when the target has made it; the claim may be gone before the driver is back."""
    assert driver.fuse is not None
    driver.fuse.write_text("after bdev_lvol_create")
    request = pb.CreateVolumeRequest(
        name="pvc-1",
        capacity_range=pb.CapacityRange(required_bytes=SIZE),
        volume_capabilities=[mount("xfs")],
        parameters={"lvstore": "lvs0", "thin": "true"},
    )
    with pytest.raises(grpc.RpcError):
        Driver.call(driver, request)
    assert driver.stop() == -signal.SIGKILL
    driver.start()
    (entry,) = driver.call(pb.ListVolumesRequest()).entries
    assert entry.volume.capacity_bytes == SIZE
    assert driver.call(request).volume == entry.volume
    assert len(driver.left()["lvols"]) == 1
    driver.delete(entry.volume.volume_id)
    assert driver.left() == NOTHING


@pytest.mark.nightly
def test_so_does_one_killed_over_the_socket_of_a_virtual_machine(driver: Stubborn) -> None:
    def live(name: str, fuse: Path, point: str) -> None:
        """A volume of the vhost face."""
        fuse.write_text(point)
        handle = driver.create(name, SIZE, mount("ext4"), face="vhost")
        folder = driver.publish(handle, mount("ext4"))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(folder / "vhost.sock"))
        with pytest.raises(OSError, match="Read-only file system"):
            (folder / "vhost.sock").unlink()
        driver.unpublish(handle)
        driver.unstage(handle)
        driver.delete(handle)

    assert _kill_everywhere(driver, live) == SOCKET


def remember(driver: Driver, name: str, revive: Callable[[], None] = lambda: None) -> None:
    """A volume with snapshots and clones of all kinds, from its creation to the end of all."""
    how = block()
    source = driver.create(name, 16 * MIB, how, thin="true")
    taken = driver.snapshot(source, f"{name}-snap")
    sure = driver.call(pb.GetSnapshotRequest(snapshot_id=taken)).snapshot
    assert sure.source_volume_id == source
    made = [
        driver.create(f"{name}-thin", 16 * MIB, how, snapshot_of(taken), thin="true"),
        driver.create(f"{name}-larger", 32 * MIB, how, snapshot_of(taken), thin="true"),
        driver.create(f"{name}-thick", 32 * MIB, how, snapshot_of(taken)),
        driver.create(f"{name}-clone", 16 * MIB, how, volume_of(source), thin="true"),
        driver.create(f"{name}-copy", 16 * MIB, how, volume_of(source)),
    ]
    revive()
    sizes = {lvol["name"]: lvol["size"] for lvol in sizes_of(driver)}
    assert sizes == {
        **dict.fromkeys((f"{name}-thin", f"{name}-clone", f"{name}-copy", name), 16 * MIB),
        **dict.fromkeys((f"{name}-larger", f"{name}-thick"), 32 * MIB),
    }
    together = pb.CreateVolumeGroupSnapshotRequest(
        name=f"{name}-group", source_volume_ids=[source, made[0]]
    )
    group = driver.call(together).group_snapshot
    assert len(group.snapshots) == 2
    group_id = group.group_snapshot_id
    driver.call(pb.DeleteVolumeGroupSnapshotRequest(group_snapshot_id=group_id))
    driver.delete_snapshot(taken)
    assert not driver.call(pb.ListSnapshotsRequest()).entries
    for handle in (source, *made):
        driver.delete(handle)
    revive()


def sizes_of(driver: Driver) -> list[dict[str, Any]]:
    """Returns the volumes that the driver lists: names and sizes."""
    entries = driver.call(pb.ListVolumesRequest()).entries
    volumes = Volumes(driver.target.client)
    found = [volumes.volume(entry.volume.volume_id) for entry in entries]
    return [{"name": each.name, "size": each.size} for each in found]


@pytest.mark.nightly
def test_a_driver_killed_before_any_step_of_snapshots_and_clones_leaves_none_behind(
    driver: Stubborn,
) -> None:
    def live(name: str, fuse: Path, point: str) -> None:
        fuse.write_text(point)
        remember(driver, name)
        assert until(lambda: driver.left() == NOTHING)  # of a driver that has just begun, perhaps

    assert _kill_everywhere(driver, live) == HISTORY


@pytest.mark.nightly
def test_a_target_killed_before_any_step_of_snapshots_and_clones_leaves_none_behind(
    faithful: Faithful,
) -> None:
    def live(name: str, fuse: Path, point: str) -> None:
        faithful.revive()
        fuse.write_text(f"{point} {faithful.target.pid}")
        remember(faithful, name, faithful.revive)

    _kill_everywhere(faithful, live)


@pytest.mark.nightly
def test_a_target_killed_before_any_step_comes_back_to_what_the_same_calls_complete(
    faithful: Faithful,
) -> None:
    """What a pod has of a volume goes on when the target is back."""

    def live(name: str, fuse: Path, point: str) -> None:
        faithful.revive()
        fuse.write_text(f"{point} {faithful.target.pid}")
        handle = faithful.create(name, SIZE, mount("xfs"), thin="true")
        file = faithful.publish(handle, mount("xfs")) / "file"
        faithful.revive()
        _write_through(file)
        faithful.unpublish(handle)
        file = faithful.publish(handle, mount("xfs"), "next") / "file"
        faithful.revive()
        assert file.read_bytes() == SOME
        faithful.unpublish(handle, "next")
        faithful.unstage(handle)
        faithful.delete(handle)
        faithful.revive()

    _kill_everywhere(faithful, live)


def _kill_everywhere(
    driver: Stubborn | Faithful, live: Callable[[str, Path, str], None]
) -> set[str]:
    """Kills before each step of a life, one after the other, until there are no more.

    Returns the names of the steps. There is nothing left after any of the lives.
    """
    assert driver.fuse is not None
    before = driver.target.rpc("bdev_lvol_get_lvstores")
    for number in itertools.count(1):
        seen = len(driver.entries())
        live(f"pvc-{number}", driver.fuse, f"before {number}")
        assert driver.left() == NOTHING
        assert driver.target.rpc("bdev_lvol_get_lvstores") == before
        if driver.fuse.exists():
            break
    driver.fuse.unlink()
    assert driver.deaths == number - 1
    steps = {each[STEP] for each in driver.entries()[seen:] if each["event"] == STEP}
    assert driver.deaths >= len(steps)
    return steps


def _write_through(path: Path) -> None:
    with path.open("wb") as opened:
        opened.write(SOME)
        opened.flush()
        os.fsync(opened.fileno())
