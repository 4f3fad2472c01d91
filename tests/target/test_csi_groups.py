"""Snapshots of several volumes together, and their parts that hold data: real driver and target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message

from csi.proto import csi_pb2 as pb
from tests.support.csi import MIB, NOTHING, Driver, block, running, snapshot_of
from tests.target.conftest import MakeTarget

pytestmark = pytest.mark.root
Code = grpc.StatusCode
SIZE = 16 * MIB
UNKNOWN = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def driver(make_target: MakeTarget) -> Iterator[Driver]:
    """A running driver with an lvstore of 1 GiB, with clusters of 1 MiB."""
    with running(make_target().start(), 1024) as driver:
        yield driver


@pytest.fixture(scope="module")
def shared(make_shared_target: MakeTarget) -> Iterator[Driver]:
    """The same for all tests that make nothing."""
    with running(make_shared_target().start(), 1024) as driver:
        yield driver


def create(driver: Driver, name: str) -> tuple[str, Path]:
    """Makes a volume; returns its handle, and its device in a pod."""
    handle = driver.create(name, SIZE, block(), thin="true")
    return handle, driver.publish(handle, block())


def write(device: Path, at_mib: int, text: bytes) -> None:
    """Writes a block, durably."""
    with device.open("rb+", buffering=0) as file:
        file.seek(at_mib * MIB)
        file.write(text.ljust(4096, b"\0"))


def read(device: Path, at_mib: int) -> bytes:
    """Returns what a block begins with."""
    with device.open("rb") as file:
        file.seek(at_mib * MIB)
        return file.read(4096).rstrip(b"\0")


def group_of(name: str, *volumes: str, **parameters: str) -> pb.CreateVolumeGroupSnapshotRequest:
    """Returns a request for a group, of a class with these parameters."""
    return pb.CreateVolumeGroupSnapshotRequest(
        name=name, source_volume_ids=volumes, parameters=parameters
    )


def end(driver: Driver, *handles: str) -> None:
    """Takes volumes from their pods and deletes them."""
    for handle in handles:
        driver.unpublish(handle)
        driver.unstage(handle)
        driver.delete(handle)


def test_a_group_is_taken_once_and_deleted_as_a_whole(driver: Driver) -> None:
    (data, data_device), (log, log_device) = (create(driver, name) for name in ("data", "log"))
    for device, text in ((data_device, b"a row"), (log_device, b"its entry")):
        write(device, 0, text)
    group = driver.call(group_of("group-1", data, log)).group_snapshot
    assert sorted(each.source_volume_id for each in group.snapshots) == sorted([data, log])
    assert group.ready_to_use
    for each in group.snapshots:
        assert each.group_snapshot_id == group.group_snapshot_id
        assert each.creation_time == group.creation_time
        assert each.ready_to_use
    driver.stop()
    driver.start()
    # Kubernetes' storage suite has the class's own field among its parameters.
    again = group_of("group-1", log, data, deletionPolicy="Delete")
    assert driver.call(again).group_snapshot == group
    code, message = driver.refuses(group_of("group-1", log, data, policy="Delete"))
    assert (code, "parameter policy is not known" in message) == (Code.INVALID_ARGUMENT, True)
    ids = [each.snapshot_id for each in group.snapshots]
    get = pb.GetVolumeGroupSnapshotRequest(
        group_snapshot_id=group.group_snapshot_id, snapshot_ids=ids
    )
    assert driver.call(get).group_snapshot == group
    code, message = driver.refuses(group_of("group-1", data))
    assert code is Code.ALREADY_EXISTS
    assert "group-1 exists already, of other volumes" in message
    assert len(driver.call(pb.ListSnapshotsRequest()).entries) == 2
    code, message = driver.refuses(pb.DeleteSnapshotRequest(snapshot_id=ids[0]))
    assert code is Code.INVALID_ARGUMENT
    assert message == (f"snapshot {ids[0]} is of the group {group.group_snapshot_id}: delete that")
    for device in (data_device, log_device):
        write(device, 0, b"later")
    restored = [
        driver.create(f"copy-{each.source_volume_id}", SIZE, block(), snapshot_of(each.snapshot_id))
        for each in group.snapshots
    ]
    of = dict(zip((each.source_volume_id for each in group.snapshots), restored, strict=True))
    assert read(driver.publish(of[data], block()), 0) == b"a row"
    assert read(driver.publish(of[log], block()), 0) == b"its entry"
    delete = pb.DeleteVolumeGroupSnapshotRequest(
        group_snapshot_id=group.group_snapshot_id, snapshot_ids=ids
    )
    for _ in range(2):
        driver.call(delete)
    assert driver.refuses(get)[0] is Code.NOT_FOUND
    assert not driver.call(pb.ListSnapshotsRequest()).entries
    end(driver, data, log, *restored)
    assert driver.left() == NOTHING


@pytest.mark.parametrize(
    ("request_", "code", "said"),
    [
        (group_of("", UNKNOWN), Code.INVALID_ARGUMENT, "name is missing"),
        (group_of("x"), Code.INVALID_ARGUMENT, "names 0 volumes: 1 to 256"),
        (group_of("x", UNKNOWN), Code.NOT_FOUND, UNKNOWN),
        (pb.DeleteVolumeGroupSnapshotRequest(), Code.INVALID_ARGUMENT, "id is missing"),
        (pb.GetVolumeGroupSnapshotRequest(), Code.INVALID_ARGUMENT, "id is missing"),
        (
            pb.GetVolumeGroupSnapshotRequest(group_snapshot_id=UNKNOWN),
            Code.NOT_FOUND,
            "there is no group snapshot",
        ),
    ],
)
def test_bad_requests_are_refused_in_one_sentence(
    shared: Driver, request_: Message, code: grpc.StatusCode, said: str
) -> None:
    found, message = shared.refuses(request_)
    assert found is code
    assert said in message


def test_volumes_of_several_lvstores_are_no_group(driver: Driver) -> None:
    driver.target.make_lvstore("lvs1", size=64 * MIB)
    here = driver.create("pvc-1", 8 * MIB, block(), thin="true")
    there = driver.create("pvc-2", 8 * MIB, block(), thin="true", lvstore="lvs1")
    code, message = driver.refuses(group_of("group-1", here, there))
    assert code is Code.FAILED_PRECONDITION
    assert message.startswith("the volumes are in the lvstores lvs0, lvs1: ")
    assert not driver.call(pb.ListSnapshotsRequest()).entries


def test_a_group_and_a_list_that_do_not_match_are_told(driver: Driver) -> None:
    handles = [driver.create(f"pvc-{number}", 8 * MIB, block(), thin="true") for number in (1, 2)]
    group = driver.call(group_of("group-1", *handles)).group_snapshot
    alone = driver.snapshot(handles[0], "alone")
    some = [group.snapshots[0].snapshot_id]
    for ids in (some, [*some, alone]):
        for kind in (pb.GetVolumeGroupSnapshotRequest, pb.DeleteVolumeGroupSnapshotRequest):
            request = kind(group_snapshot_id=group.group_snapshot_id, snapshot_ids=ids)
            code, message = driver.refuses(request)
            assert code is Code.INVALID_ARGUMENT
            assert "are not those of the group" in message
    assert len(driver.call(pb.ListSnapshotsRequest()).entries) == 3


# Which parts


def parts(
    driver: Driver, request: pb.GetMetadataAllocatedRequest | pb.GetMetadataDeltaRequest
) -> list[tuple[int, int]]:
    """Returns where parts begin and how long they are, in MiB, and checks each message."""
    found: list[tuple[int, int]] = []
    messages = list(driver.stream(request))
    assert messages
    for message in messages:
        assert message.block_metadata_type == pb.VARIABLE_LENGTH
        assert message.volume_capacity_bytes == SIZE
        assert len(message.block_metadata) <= (request.max_results or 1 << 20)
        found += [(e.byte_offset // MIB, e.size_bytes // MIB) for e in message.block_metadata]
    return found


def test_the_parts_that_hold_data_and_that_changed_are_told(driver: Driver) -> None:
    handle, device = create(driver, "pvc-1")
    for at_mib in (0, 1, 5, 9):
        write(device, at_mib, b"first")
    before = driver.snapshot(handle, "before")
    for at_mib in (1, 7):
        write(device, at_mib, b"second")
    after = driver.snapshot(handle, "after")
    write(device, 12, b"third")
    allocated = pb.GetMetadataAllocatedRequest
    delta = pb.GetMetadataDeltaRequest
    assert parts(driver, allocated(snapshot_id=before)) == [(0, 2), (5, 1), (9, 1)]
    assert parts(driver, allocated(snapshot_id=after)) == [(0, 2), (5, 1), (7, 1), (9, 1)]
    changed = delta(base_snapshot_id=before, target_snapshot_id=after)
    assert parts(driver, changed) == [(1, 1), (7, 1)]
    changed.starting_offset = 2 * MIB
    assert parts(driver, changed) == [(7, 1)]
    some = allocated(snapshot_id=after, starting_offset=5 * MIB + 1, max_results=1)
    assert parts(driver, some) == [(5, 1), (7, 1), (9, 1)]
    assert parts(driver, delta(base_snapshot_id=after, target_snapshot_id=after)) == []
    other = driver.snapshot(driver.create("pvc-2", 8 * MIB, block(), thin="true"), "other")
    for request, code, said in (
        (allocated(), Code.INVALID_ARGUMENT, "snapshot_id is missing"),
        (allocated(snapshot_id=UNKNOWN), Code.NOT_FOUND, "there is no snapshot"),
        (allocated(snapshot_id=after, starting_offset=SIZE), Code.OUT_OF_RANGE, f"has {SIZE} byt"),
        (allocated(snapshot_id=after, max_results=-1), Code.INVALID_ARGUMENT, "give 0 or more"),
        (
            delta(base_snapshot_id=after, target_snapshot_id=before),
            Code.INVALID_ARGUMENT,
            "was taken after",
        ),
        (
            delta(base_snapshot_id=other, target_snapshot_id=after),
            Code.INVALID_ARGUMENT,
            "name two of one volume",
        ),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            list(driver.stream(request))
        assert refused.value.code() is code
        assert said in (refused.value.details() or "")


def test_a_copy_of_the_told_parts_is_a_copy_of_the_snapshot(driver: Driver) -> None:
    """As a backup does it: all of the first snapshot, then what changed, into another volume."""
    handle, device = create(driver, "pvc-1")
    backup, into = create(driver, "backup")
    before = ""
    for number, written in enumerate(((0, 3, 4), (3, 15), (1, 4, 14)), 1):
        for at_mib in written:
            write(device, at_mib, f"{number} at {at_mib}".encode())
        taken = driver.snapshot(handle, f"snap-{number}")
        whole = pb.GetMetadataAllocatedRequest(snapshot_id=taken)
        delta = pb.GetMetadataDeltaRequest(base_snapshot_id=before, target_snapshot_id=taken)
        restored = driver.create(f"look-{number}", SIZE, block(), snapshot_of(taken), thin="true")
        look = driver.publish(restored, block())
        with look.open("rb") as source, into.open("rb+", buffering=0) as sink:
            for at_mib, length in parts(driver, delta if before else whole):
                source.seek(at_mib * MIB)
                sink.seek(at_mib * MIB)
                sink.write(source.read(length * MIB))
        assert into.read_bytes() == look.read_bytes()
        end(driver, restored)
        before = taken
    end(driver, backup)
