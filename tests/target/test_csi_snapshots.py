"""Snapshots and what is made of them: the real driver over the real target, with real mounts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message

from csi.proto import csi_pb2 as pb
from csi.snapshots import DELETED_XATTR
from csi.volumes import FORMATTING_XATTR
from pydataplane.volumes import Volumes
from tests.support.csi import (
    MIB,
    NODE,
    NOTHING,
    Driver,
    Mode,
    block,
    mount,
    running,
    snapshot_of,
    volume_of,
)
from tests.support.wait import until
from tests.target.conftest import MakeTarget

pytestmark = pytest.mark.root
Code = grpc.StatusCode
SIZE = 320 * MIB
UNKNOWN = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def driver(make_target: MakeTarget) -> Iterator[Driver]:
    """A running driver with an lvstore of 2 GiB."""
    with running(make_target().start(), 2048) as driver:
        yield driver


@pytest.fixture(scope="module")
def shared(make_shared_target: MakeTarget) -> Iterator[Driver]:
    """The same for all tests that make nothing."""
    with running(make_shared_target().start(), 2048) as driver:
        yield driver


@pytest.fixture(scope="module")
def taken(make_shared_target: MakeTarget) -> Iterator[tuple[Driver, str]]:
    """A driver with a snapshot, a volume that takes room, and another lvstore; its handle."""
    with running(make_shared_target().start(), 2048) as driver:
        driver.target.make_lvstore("lvs1", size=64 * MIB)
        source = driver.create("pvc-1", 32 * MIB, block(), thin="true")
        driver.create("pvc-2", 128 * MIB, block())  # takes its room at once
        yield driver, driver.snapshot(source, "snap-1")


def write(path: Path, text: str) -> None:
    """Writes a file, durably."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def size_of(path: Path) -> int:
    """Returns the bytes of a file system."""
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize


def end(driver: Driver, handle: str, pod: str = "pod") -> None:
    """Takes a volume from its pod and deletes it."""
    driver.unpublish(handle, pod)
    driver.unstage(handle)
    driver.delete(handle)


@pytest.mark.parametrize("fs_type", ["xfs", "ext4"])
def test_a_file_system_of_a_snapshot_is_mounted_beside_its_source_and_grows(
    driver: Driver, fs_type: str
) -> None:
    how = mount(fs_type)
    source = driver.create("pvc-1", SIZE, how, thin="true")
    write(driver.publish(source, how) / "file", "before")
    taken = driver.snapshot(source, "snap-1")
    write(driver.path(source) / "file", "after")
    restored = driver.create("pvc-2", 2 * SIZE, how, snapshot_of(taken), thin="true")
    cloned = driver.create("pvc-3", SIZE, how, volume_of(source), thin="true")
    assert (driver.publish(restored, how) / "file").read_text() == "before"
    assert (driver.publish(cloned, how) / "file").read_text() == "after"
    assert size_of(driver.path(source)) <= SIZE < size_of(driver.path(restored)) <= 2 * SIZE
    write(driver.path(restored) / "file", "its own")
    reader = driver.publish(restored, how, "reader", readonly=True) / "file"
    assert reader.read_text() == "its own"
    with pytest.raises(OSError, match="Read-only file system"):
        write(reader, "not this")
    driver.unpublish(restored, "reader")
    assert (driver.path(source) / "file").read_text() == "after"
    end(driver, source)
    driver.delete_snapshot(taken)
    assert (driver.path(restored) / "file").read_text() == "its own"
    end(driver, restored)
    assert (driver.path(cloned) / "file").read_text() == "after"
    end(driver, cloned)
    assert driver.left() == NOTHING


def test_readers_of_a_snapshots_blocks_share_a_device_that_nobody_writes(driver: Driver) -> None:
    """ReadOnlyMany is for block volumes: two pods have the same one, and a file system is none."""
    source = driver.create("pvc-1", SIZE, block(), thin="true")
    with driver.publish(source, block()).open("rb+") as device:
        device.write(b"before" + bytes(4090))
        device.flush()
        os.fsync(device.fileno())
    taken = driver.snapshot(source, "snap-1")
    how = block(Mode.MULTI_NODE_READER_ONLY)
    many = driver.create("pvc-2", SIZE, how, snapshot_of(taken), thin="true")
    first, second = (driver.publish(many, how, pod) for pod in ("a", "b"))
    assert first.stat().st_rdev == second.stat().st_rdev
    for path in (first, second):
        with path.open("rb") as reader:
            assert reader.read(6) == b"before"
        with (
            pytest.raises(OSError, match="Operation not permitted"),
            path.open("rb+", buffering=0) as writer,
        ):
            writer.write(bytes(512))
    code, message = driver.refuses(
        driver.create_request("pvc-3", SIZE, mount(mode=Mode.MULTI_NODE_READER_ONLY))
    )
    assert (code, "use volumeMode Block" in message) == (Code.INVALID_ARGUMENT, True)
    for pod in ("a", "b"):
        driver.unpublish(many, pod)
    driver.unstage(many)
    driver.delete(many)
    end(driver, source)
    driver.delete_snapshot(taken)
    assert driver.left() == NOTHING


def test_a_snapshot_says_what_it_is_and_is_taken_once(driver: Driver) -> None:
    source = driver.create("pvc-1", SIZE, block(), thin="true")
    other = driver.create("pvc-2", SIZE, block(), thin="true")
    before = time.time()
    request = pb.CreateSnapshotRequest(
        source_volume_id=source,
        name="snap-1",
        parameters={"csi.storage.k8s.io/volumesnapshot/name": "mine"},
    )
    snapshot = driver.call(request).snapshot
    assert (snapshot.source_volume_id, snapshot.size_bytes) == (source, SIZE)
    assert snapshot.ready_to_use
    assert before <= snapshot.creation_time.ToNanoseconds() / 1e9 <= time.time()
    driver.call(
        pb.ControllerExpandVolumeRequest(
            volume_id=source, capacity_range=pb.CapacityRange(required_bytes=2 * SIZE)
        )
    )
    assert driver.call(request).snapshot == snapshot
    code, message = driver.refuses(pb.CreateSnapshotRequest(source_volume_id=other, name="snap-1"))
    assert code is Code.ALREADY_EXISTS
    assert message == (
        f"snapshot snap-1 exists already, of volume {source}: choose another name, or delete it"
    )
    driver.stop()
    driver.start()
    driver.delete(source)
    assert driver.call(request).snapshot == snapshot
    get = pb.GetSnapshotRequest(snapshot_id=snapshot.snapshot_id)
    assert driver.call(get).snapshot == snapshot
    for _ in range(2):
        driver.delete_snapshot(snapshot.snapshot_id)
    assert driver.refuses(get)[0] is Code.NOT_FOUND
    driver.delete(other)
    assert driver.left() == NOTHING


def test_snapshots_are_listed_by_volume_and_handle_and_page_by_page(driver: Driver) -> None:
    sources = [driver.create(f"pvc-{number}", 8 * MIB, block(), thin="true") for number in (1, 2)]
    of = {driver.snapshot(each, f"{each}-{n}"): each for each in sources for n in range(3)}

    def listed(**asked: object) -> tuple[list[str], str]:
        answer = driver.call(pb.ListSnapshotsRequest(**asked))  # type: ignore[arg-type]
        return [entry.snapshot.snapshot_id for entry in answer.entries], answer.next_token

    assert listed() == (sorted(of), "")
    some, token = listed(max_entries=4)
    assert (some, token) == (sorted(of)[:4], sorted(of)[4])
    assert listed(starting_token=token) == (sorted(of)[4:], "")
    for source in sources:
        its = sorted(each for each, volume in of.items() if volume == source)
        assert listed(source_volume_id=source) == (its, "")
    one = min(of)
    assert listed(snapshot_id=one) == ([one], "")
    assert listed(snapshot_id=UNKNOWN) == ([], "")
    assert listed(source_volume_id=UNKNOWN) == ([], "")
    volumes = driver.call(pb.ListVolumesRequest()).entries
    assert [entry.volume.volume_id for entry in volumes] == sorted(sources)
    for each in [*of]:
        driver.delete_snapshot(each)
    for each in sources:
        driver.delete(each)
    assert driver.left() == NOTHING


def test_a_snapshot_that_clones_need_is_gone_for_its_users_and_really_when_one_is_left(
    driver: Driver,
) -> None:
    source = driver.create("pvc-1", 8 * MIB, block(), thin="true")
    taken = driver.snapshot(source, "snap-1")
    clones = [
        driver.create(f"clone-{number}", 8 * MIB, block(), snapshot_of(taken), thin="true")
        for number in range(3)
    ]
    for _ in range(2):
        driver.delete_snapshot(taken)
    assert "snap-1" in driver.left()["lvols"]
    assert not driver.call(pb.ListSnapshotsRequest()).entries
    assert driver.refuses(pb.GetSnapshotRequest(snapshot_id=taken))[0] is Code.NOT_FOUND
    code, message = driver.refuses(
        pb.CreateVolumeRequest(
            name="late",
            volume_capabilities=[block()],
            volume_content_source=snapshot_of(taken),
            parameters={"lvstore": "lvs0", "thin": "true"},
        )
    )
    assert (code, message) == (
        Code.NOT_FOUND,
        f"there is no snapshot {taken} of csi.virtlun.dev",
    )
    again = driver.snapshot(source, "snap-1")
    assert again != taken
    driver.delete_snapshot(again)
    driver.delete(source)
    driver.delete(clones[0])
    assert "snap-1" in driver.left()["lvols"]
    driver.delete(clones[1])
    assert driver.left()["lvols"] == ["clone-2"]
    driver.delete(clones[2])
    assert driver.left() == NOTHING


def test_what_was_needed_no_more_while_there_was_no_driver_goes_when_it_starts(
    driver: Driver,
) -> None:
    source = driver.create("pvc-1", 8 * MIB, block(), thin="true")
    taken = driver.snapshot(source, "snap-1")
    driver.create("pvc-2", 8 * MIB, block(), snapshot_of(taken), thin="true")
    driver.delete_snapshot(taken)
    assert driver.stop() == 0
    driver.target.rpc("bdev_lvol_delete", name=source)
    assert "snap-1" in driver.left()["lvols"]
    driver.start()
    assert until(lambda: driver.left()["lvols"] == ["pvc-2"])


def test_a_volume_of_a_thick_class_has_all_of_its_own(driver: Driver) -> None:
    source = driver.create("pvc-1", 64 * MIB, block(), thin="true")
    device = driver.publish(source, block())
    device.write_bytes(b"x" * MIB)
    taken = driver.snapshot(source, "snap-1")
    thick = [
        driver.create("pvc-2", 96 * MIB, block(), snapshot_of(taken)),
        driver.create("pvc-3", 96 * MIB, block(), volume_of(source)),
    ]
    volumes = Volumes(driver.target.client)
    for handle in thick:
        found = volumes.volume(handle)
        assert (found.thin, found.parent, found.allocated) == (False, None, 96 * MIB)
        with driver.publish(handle, block()).open("rb") as opened:
            assert opened.read(MIB + 1) == b"x" * MIB + b"\0"
    assert sorted(driver.left()["lvols"]) == ["pvc-1", "pvc-2", "pvc-3", "snap-1"]
    for handle in [source, *thick]:
        end(driver, handle)
    driver.delete_snapshot(taken)
    assert driver.left() == NOTHING


def test_many_volumes_of_one_source_are_made_at_once(driver: Driver) -> None:
    source = driver.create("pvc-1", 8 * MIB, block(), thin="true")
    taken = driver.snapshot(source, "snap-1")

    def make(number: int) -> str:
        of = snapshot_of(taken) if number % 2 else volume_of(source)
        return driver.create(f"clone-{number}", 8 * MIB, block(), of, thin="true")

    with ThreadPoolExecutor(8) as executor:
        made = list(executor.map(make, range(16)))
    driver.delete(source)
    driver.delete_snapshot(taken)
    with ThreadPoolExecutor(4) as executor:
        list(executor.map(driver.delete, made))
    driver.delete(source)  # what two deletions at a time left to each other
    assert driver.left() == NOTHING


def test_what_mkfs_was_cut_off_on_is_formatted_anew_where_it_is_cloned(driver: Driver) -> None:
    source = driver.create("pvc-1", SIZE, mount("xfs"), thin="true")
    device = driver.publish(source, block())
    device.write_bytes(b"half a file system")
    driver.unpublish(source)
    driver.unstage(source)
    Volumes(driver.target.client).set_xattr(source, FORMATTING_XATTR, "1")
    taken = driver.snapshot(source, "snap-1")
    for name, of in (("pvc-2", snapshot_of(taken)), ("pvc-3", volume_of(source))):
        handle = driver.create(name, SIZE, mount("xfs"), of, thin="true")
        write(driver.publish(handle, mount("xfs")) / "file", "it works")
        end(driver, handle)


def test_clones_and_snapshots_count_towards_what_a_class_promises(driver: Driver) -> None:
    """lvs0 has a little less than 2 GiB."""
    limited = {"thin": "true", "overcommit": "1.0"}
    source = driver.create("pvc-1", 1024 * MIB, block(), **limited)
    device = driver.publish(source, block())
    with device.open("rb+", buffering=0) as file:
        file.write(b"x" * 64 * MIB)
    taken = driver.snapshot(source, "snap-1")  # keeps 64 MiB
    request = pb.CreateVolumeRequest(
        name="pvc-2",
        volume_capabilities=[block()],
        volume_content_source=snapshot_of(taken),
        parameters={"lvstore": "lvs0", **limited},
    )
    code, message = driver.refuses(request)
    assert code is Code.RESOURCE_EXHAUSTED
    assert f"have {1088 * MIB} bytes, and {1024 * MIB} more are over the class's" in message
    del request.parameters["overcommit"]
    handle = driver.call(request).volume.volume_id
    code, message = driver.refuses(pb.CreateSnapshotRequest(source_volume_id=source, name="snap-2"))
    assert code is Code.RESOURCE_EXHAUSTED
    assert "and 0 more are over" in message
    driver.delete(handle)
    driver.delete_snapshot(taken)
    end(driver, source)
    assert driver.left() == NOTHING


def of_nothing(_: str) -> pb.VolumeContentSource:
    """Returns a source that names nothing."""
    return pb.VolumeContentSource()


@pytest.mark.parametrize(
    ("of", "size", "parameters", "code", "said"),
    [
        pytest.param(
            snapshot_of, 16, {}, Code.OUT_OF_RANGE, "what it is made of has 33554432", id="smaller"
        ),
        pytest.param(
            snapshot_of, 32, {"lvstore": "lvs1"}, Code.INVALID_ARGUMENT,
            "cannot be made in lvstore lvs1 of what is in lvstore lvs0", id="another lvstore",
        ),
        pytest.param(
            snapshot_of, 32, {"blockSize": "4096"}, Code.INVALID_ARGUMENT,
            "cannot have blocks of 4096 bytes: what it is made of has 512", id="longer blocks",
        ),
        pytest.param(
            snapshot_of, 2000, {"thin": "false"}, Code.RESOURCE_EXHAUSTED,
            "needs 2097152000: name a class with thin", id="no room for a thick one",
        ),
        pytest.param(
            of_nothing, 32, {}, Code.INVALID_ARGUMENT,
            "names neither a snapshot nor a volume", id="of nothing",
        ),
        pytest.param(
            lambda _: snapshot_of(UNKNOWN), 32, {}, Code.NOT_FOUND,
            f"there is no snapshot {UNKNOWN}", id="of a snapshot that is not there",
        ),
        pytest.param(
            lambda _: volume_of(UNKNOWN), 32, {}, Code.NOT_FOUND,
            f"there is no volume {UNKNOWN}", id="of a volume that is not there",
        ),
        pytest.param(
            lambda _: snapshot_of("5a1f0000-0000-8000-8000-000000000000"), 32, {},
            Code.RESOURCE_EXHAUSTED,
            f"is of an lvstore that node {NODE} does not have", id="of another node's snapshot",
        ),
    ],
)  # fmt: skip
def test_a_volume_that_cannot_be_made_of_something_is_not_made(
    taken: tuple[Driver, str],
    of: Callable[[str], pb.VolumeContentSource],
    size: int,
    parameters: dict[str, str],
    code: grpc.StatusCode,
    said: str,
) -> None:
    driver, snapshot = taken
    request = pb.CreateVolumeRequest(
        name="bad",
        capacity_range=pb.CapacityRange(required_bytes=size * MIB),
        volume_capabilities=[block()],
        volume_content_source=of(snapshot),
        parameters={"lvstore": "lvs0", "thin": "true", **parameters},
    )
    before = driver.left()
    for _ in range(2):
        found, message = driver.refuses(request)
        assert found is code
        assert said in message
        assert "\n" not in message
    assert driver.left() == before


@pytest.mark.parametrize(
    ("request_", "code", "said"),
    [
        (pb.CreateSnapshotRequest(source_volume_id=UNKNOWN), Code.INVALID_ARGUMENT, "name is mis"),
        (pb.CreateSnapshotRequest(name="x"), Code.INVALID_ARGUMENT, "source_volume_id is missing"),
        (
            pb.CreateSnapshotRequest(name="x", source_volume_id=UNKNOWN, parameters={"a": "b"}),
            Code.INVALID_ARGUMENT,
            "VolumeSnapshotClass parameter a is not known: there are none, leave it out",
        ),
        (pb.CreateSnapshotRequest(name="x", source_volume_id=UNKNOWN), Code.NOT_FOUND, UNKNOWN),
        (pb.DeleteSnapshotRequest(), Code.INVALID_ARGUMENT, "snapshot_id is missing"),
        (pb.GetSnapshotRequest(), Code.INVALID_ARGUMENT, "snapshot_id is missing"),
        (pb.ListSnapshotsRequest(max_entries=-1), Code.INVALID_ARGUMENT, "give 0 or more"),
        (pb.ListSnapshotsRequest(starting_token="x"), Code.ABORTED, "begin anew"),
    ],
)
def test_bad_requests_are_refused_in_one_sentence(
    shared: Driver, request_: Message, code: grpc.StatusCode, said: str
) -> None:
    found, message = shared.refuses(request_)
    assert found is code
    assert said in message
    assert shared.left() == NOTHING


def test_a_call_for_another_source_is_told_from_a_repeated_one(driver: Driver) -> None:
    source = driver.create("pvc-1", 8 * MIB, block(), thin="true")
    taken = driver.snapshot(source, "snap-1")
    request = pb.CreateVolumeRequest(
        name="pvc-2",
        volume_capabilities=[block()],
        volume_content_source=snapshot_of(taken),
        parameters={"lvstore": "lvs0", "thin": "true"},
    )
    made = driver.call(request).volume
    assert made.content_source == snapshot_of(taken)
    assert made.capacity_bytes == 8 * MIB
    assert driver.call(request).volume == made
    for other in (volume_of(source), None):
        changed = pb.CreateVolumeRequest()
        changed.CopyFrom(request)
        changed.ClearField("volume_content_source")
        if other is not None:
            changed.volume_content_source.CopyFrom(other)
        changed.capacity_range.required_bytes = 8 * MIB
        code, message = driver.refuses(changed)
        assert code is Code.ALREADY_EXISTS
        assert f"made of snapshot/{taken}" in message
    driver.delete_snapshot(taken)
    assert driver.call(request).volume == made  # its answer may have been lost
    (entry,) = (
        entry
        for entry in driver.call(pb.ListVolumesRequest()).entries
        if entry.volume.volume_id == made.volume_id
    )
    assert entry.volume.content_source == snapshot_of(taken)


def test_snapshots_of_others_are_left_alone(driver: Driver) -> None:
    source = driver.create("pvc-1", 8 * MIB, block(), thin="true")
    (others,) = Volumes(driver.target.client).snapshot([source], "mine")
    assert not driver.call(pb.ListSnapshotsRequest()).entries
    code, message = driver.refuses(pb.DeleteSnapshotRequest(snapshot_id=others.uuid))
    assert code is Code.FAILED_PRECONDITION
    assert message == (
        "lvol lvs0/pvc-1@mine is no snapshot of csi.virtlun.dev: delete it with `virtlun volume`"
    )
    Volumes(driver.target.client).set_xattr(others.uuid, DELETED_XATTR, "1")
    driver.delete(source)
    assert driver.left()["lvols"] == ["pvc-1@mine"]
