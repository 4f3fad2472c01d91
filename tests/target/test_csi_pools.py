"""The driver on volumes of a pool of Ceph: one node's, and two nodes' with a target each."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from csi.proto import csi_pb2 as pb
from pydataplane.volumes import Volumes
from tests.support.ceph import POOL, Ceph, cluster, lacks
from tests.support.csi import (
    MIB,
    NODE,
    NOTHING,
    Driver,
    Mode,
    block,
    mount,
    snapshot_of,
    volume_of,
)
from tests.support.frozen import frozen
from tests.support.wait import until
from tests.target.conftest import MakeTarget

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}"),
    pytest.mark.timeout(300),
]

Code = grpc.StatusCode
SHARED = block(Mode.MULTI_NODE_MULTI_WRITER)
CLASS = {"lvstore": "ceph0", "thin": "true"}
COPIES = {"lvstore": "ceph0"}


@pytest.fixture(scope="module")
def ceph() -> Iterator[Ceph]:
    """A cluster."""
    with cluster() as made:
        yield made


@contextmanager
def driver_of(make_target: MakeTarget, ceph: Ceph, node: str) -> Iterator[Driver]:
    """A driver on a target with the pool as `ceph0`; nothing of it stays."""
    target = make_target("--rbd").start()
    Volumes(target.client).add_pool("ceph0", POOL, conf=ceph.conf)
    driver = Driver(target, target.directory, node)
    driver.has_own_loops = True
    yield driver.start()
    status = driver.stop()
    driver.clear()
    assert status == 0, driver.words()


@pytest.fixture
def here(make_target: MakeTarget, ceph: Ceph) -> Iterator[Driver]:
    """The driver of a node."""
    with driver_of(make_target, ceph, NODE) as driver:
        yield driver


@pytest.fixture
def there(make_target: MakeTarget, ceph: Ceph) -> Iterator[Driver]:
    """That of another one."""
    with driver_of(make_target, ceph, f"{NODE}-2") as driver:
        yield driver


def images(ceph: Ceph) -> list[str]:
    """Returns the names of the pool's images."""
    return ceph.rbd("ls", POOL).split()


def written(device: Path, text: bytes, at: int = 0) -> None:
    """Writes to a device, past the page cache of this host."""
    number = os.open(device, os.O_WRONLY)
    try:
        os.pwrite(number, text, at)
        os.fsync(number)
    finally:
        os.close(number)


def read(device: Path, length: int, at: int = 0) -> bytes:
    """Reads what a device has, not what this host has cached of it."""
    subprocess.run(["blockdev", "--flushbufs", device], check=True)
    with device.open("rb") as file:
        file.seek(at)
        return file.read(length)


def test_a_volume_of_a_pool_from_its_claim_to_its_end(here: Driver, ceph: Ceph) -> None:
    request = here.create_request("data", 320 * MIB, mount(), **CLASS)
    made = here.call(request).volume
    handle = made.volume_id
    here.handles.add(handle)
    assert here.call(request).volume == made
    [topology] = made.accessible_topology
    told = here.call(pb.NodeGetInfoRequest()).accessible_topology.segments
    [key] = topology.segments
    assert key.startswith("csi.virtlun.dev/pool-")
    assert told[key] == topology.segments[key]
    assert images(ceph) == ["data"]
    room = here.call(pb.GetCapacityRequest(parameters=CLASS))
    assert room.available_capacity > 1 << 40, "nobody tells it, so it holds no claim back"

    path = here.publish(handle, mount())
    (path / "file").write_text("of the volume")
    before = os.statvfs(path).f_blocks
    here.expand(handle, 400 * MIB)
    assert os.statvfs(path).f_blocks > before
    subprocess.run(["sync", "-f", path], check=True)
    taken = here.snapshot(handle, "monday")
    assert here.snapshot(handle, "monday") == taken
    (path / "file").write_text("later")

    for name, source, parameters, text in (
        ("of-snapshot", snapshot_of(taken), CLASS, "of the volume"),
        ("copied", snapshot_of(taken), COPIES, "of the volume"),
        ("of-volume", volume_of(handle), COPIES, "later"),
    ):
        subprocess.run(["sync", "-f", path], check=True)
        clone = here.create(name, 400 * MIB, mount(), source, **parameters)
        assert (here.publish(clone, mount()) / "file").read_text() == text, name
        here.unpublish(clone)
        here.unstage(clone)
    listed = here.call(pb.ListVolumesRequest()).entries
    assert {each.volume.volume_id for each in listed} == here.handles
    [entry] = here.call(pb.ListSnapshotsRequest()).entries
    assert (entry.snapshot.snapshot_id, entry.snapshot.source_volume_id) == (taken, handle)

    code, why = here.refuses(pb.DeleteVolumeRequest(volume_id=handle))
    assert (code, "in use by" in why) == (Code.FAILED_PRECONDITION, True)
    here.unpublish(handle)
    here.unstage(handle)
    code, why = here.refuses(pb.DeleteVolumeRequest(volume_id=handle))
    assert (code, "has snapshots, or" in why) == (Code.FAILED_PRECONDITION, True)
    here.delete_snapshot(taken)
    here.delete_snapshot(taken)
    code, why = here.refuses(pb.DeleteVolumeRequest(volume_id=handle))
    assert "deleted ones whose clones are left" in why
    assert code is Code.FAILED_PRECONDITION
    for each in here.call(pb.ListVolumesRequest()).entries:
        if each.volume.volume_id != handle:
            here.delete(each.volume.volume_id)
    here.delete(handle)
    here.delete(handle)
    assert (images(ceph), here.left()) == ([], NOTHING)


def test_images_of_others_stay_as_they_are(here: Driver, ceph: Ceph) -> None:
    ceph.image("theirs")
    written = here.create_request("theirs", 8 * MIB, block(), **CLASS)
    ceph.rbd("bench", "--io-type", "write", "--io-total", "4M", f"{POOL}/theirs")
    code, why = here.refuses(written)
    assert (code, "exists already" in why) == (Code.ALREADY_EXISTS, True)
    uuid = Volumes(here.target.client).volume("ceph0/theirs").uuid
    code, why = here.refuses(pb.DeleteVolumeRequest(volume_id=uuid))
    assert (code, "is not of csi.virtlun.dev" in why) == (Code.FAILED_PRECONDITION, True)
    assert list(here.call(pb.ListVolumesRequest()).entries) == []
    assert images(ceph) == ["theirs"]
    ceph.rbd("rm", "--no-progress", f"{POOL}/theirs")


@pytest.mark.nightly
def test_what_a_node_left_that_died_is_completed_by_the_next_call(here: Driver, ceph: Ceph) -> None:
    # Before its owner was noted: an empty one of a pool without fast-diff, and a clone.
    ceph.image("old", 8, "--image-feature", "layering,exclusive-lock")
    handle = here.create("old", 8 * MIB, block(), **CLASS)
    taken = here.snapshot(handle, "monday")
    clone = here.create("copy", 8 * MIB, block(), snapshot_of(taken), **CLASS)
    volumes = Volumes(here.target.client)
    owner = volumes.xattrs(clone)["csi.volume"]
    volumes.remove_xattr(clone, "csi.volume")
    here.stop()
    here.start()
    assert here.create("copy", 8 * MIB, block(), snapshot_of(taken), **CLASS) == clone
    assert volumes.xattrs(clone)["csi.volume"] == owner
    # While it was deleted.
    ceph.cut_off_deletion("copy")
    here.delete(clone)
    assert (images(ceph), ceph.trash()) == (["old"], set())
    here.delete_snapshot(taken)
    here.delete(handle)


@pytest.mark.nightly
def test_two_nodes_have_the_same_volumes(here: Driver, there: Driver, ceph: Ceph) -> None:
    # What a node left that died between the image and what is noted at it.
    ceph.image("data", 320)
    request = here.create_request("data", 320 * MIB, mount(), **CLASS)
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(lambda driver: _made(driver, request), (here, there)))
    assert made[0] == made[1]
    handle = made[0].volume_id
    assert images(ceph) == ["data"]
    for driver in (here, there):
        driver.handles.add(handle)
        [entry] = driver.call(pb.ListVolumesRequest()).entries
        assert entry.volume == made[0]

    path = here.publish(handle, mount())
    (path / "file").write_text("from here")
    code, why = there.refuses(there.stage_request(handle, mount()))
    assert (code, "is locked by the client at" in why) == (Code.FAILED_PRECONDITION, True)
    # Any node's resizer and snapshotter do for all.
    grown = there.call(
        pb.ControllerExpandVolumeRequest(
            volume_id=handle, capacity_range=pb.CapacityRange(required_bytes=400 * MIB)
        )
    )
    assert (grown.capacity_bytes, grown.node_expansion_required) == (400 * MIB, True)
    before = os.statvfs(path).f_blocks
    here.call(
        pb.NodeExpandVolumeRequest(
            volume_id=handle,
            volume_path=str(path),
            staging_target_path=str(here.staging / handle),
            capacity_range=pb.CapacityRange(required_bytes=400 * MIB),
        )
    )
    assert os.statvfs(path).f_blocks > before
    subprocess.run(["sync", "-f", path], check=True)
    taken = there.snapshot(handle, "monday")
    assert here.snapshot(handle, "monday") == taken
    for number in range(4):
        of = snapshot_of(taken)
        clone = here.create(f"clone-{number}", 400 * MIB, mount(), of, **CLASS)
        # As the provisioners of all nodes do.
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda driver: _delete(driver, clone), (here, there)))  # noqa: B023
    there.delete_snapshot(taken)
    assert images(ceph) == ["data"]
    code, why = there.refuses(pb.DeleteVolumeRequest(volume_id=handle))
    assert (code, "a client has it open" in why) == (Code.FAILED_PRECONDITION, True)

    here.unpublish(handle)
    here.unstage(handle)
    assert (there.publish(handle, mount()) / "file").read_text() == "from here"
    there.unpublish(handle)
    there.unstage(handle)
    here.delete(handle)
    there.delete(handle)
    assert (images(ceph), here.left(), there.left()) == ([], NOTHING, NOTHING)


def _delete(driver: Driver, handle: str) -> None:
    """Deletes a volume as the provisioner does."""
    until(lambda: _deleted(driver, handle), "the volume to be deleted")


def _made(driver: Driver, request: pb.CreateVolumeRequest) -> pb.Volume:
    """Makes a volume as the provisioner does, which tries again."""
    found: list[pb.Volume] = []

    def tried() -> bool:
        with suppress(grpc.RpcError):
            found.append(driver.call(request).volume)
        return bool(found)

    until(tried, "the volume")
    return found[0]


@pytest.mark.nightly
def test_a_block_volume_of_several_nodes(here: Driver, there: Driver, ceph: Ceph) -> None:
    code, why = here.refuses(
        here.create_request("files", 8 * MIB, mount(mode=Mode.MULTI_NODE_MULTI_WRITER), **CLASS)
    )
    assert (code, "use volumeMode Block" in why) == (Code.INVALID_ARGUMENT, True)
    handle = here.create("disk", 8 * MIB, SHARED, **CLASS)
    there.handles.add(handle)
    paths = [driver.publish(handle, SHARED) for driver in (here, there)]
    for number, (path, other) in enumerate((paths, reversed(paths)), 1):
        text = bytes([number]) * 4096
        written(path, text, number * MIB)
        assert read(other, 4096, number * MIB) == text
    code, why = here.refuses(here.stage_request(handle, block()))
    assert (code, "so it cannot be locked" in why) == (Code.FAILED_PRECONDITION, True)
    for driver in (here, there):
        driver.unpublish(handle)
        driver.unstage(handle)
    there.delete(handle)
    assert (images(ceph), here.left(), there.left()) == ([], NOTHING, NOTHING)


@pytest.mark.nightly(reason="Ceph gives a client up after half a minute")
def test_a_shared_block_volume_comes_back_with_its_target(
    here: Driver, there: Driver, ceph: Ceph
) -> None:
    handle = here.create("disk", 8 * MIB, SHARED, **CLASS)
    there.handles.add(handle)
    paths = [driver.publish(handle, SHARED) for driver in (here, there)]
    here.target.crash()
    written(paths[0], b"a" * 4096)
    assert read(paths[1], 4096) == b"a" * 4096
    for driver in (here, there):
        driver.unpublish(handle)
        driver.unstage(handle)
    # The killed client counts as one that has it open until then.
    until(lambda: _deleted(there, handle), "the end of the client", deadline_s=120, every_s=1)
    assert images(ceph) == []


def _deleted(driver: Driver, handle: str) -> bool:
    with suppress(grpc.RpcError):
        driver.delete(handle)
        return True
    return False


@pytest.mark.nightly(reason="Ceph gives a client up after half a minute")
def test_the_volume_of_a_node_that_died_goes_to_another(
    here: Driver, there: Driver, ceph: Ceph
) -> None:
    handle = here.create("disk", 8 * MIB, block(), **CLASS)
    there.handles.add(handle)
    device = here.publish(handle, block())
    written(device, b"a" * 4096)
    with frozen(here.target.pid):
        until(lambda: _published(there, handle), "the lock", deadline_s=120, every_s=1)
        other = there.path(handle)
        assert read(other, 4096) == b"a" * 4096
        written(other, b"b" * 4096)
    # It comes back, and knows nothing of that.
    with pytest.raises(OSError, match="Input/output error"):
        written(device, b"c" * 4096)
    assert read(other, 4096) == b"b" * 4096
    here.unpublish(handle)
    here.unstage(handle)
    there.unpublish(handle)
    there.unstage(handle)
    assert read(here.publish(handle, block()), 4096) == b"b" * 4096
    here.unpublish(handle)
    here.unstage(handle)
    here.delete(handle)


def _published(driver: Driver, handle: str) -> bool:
    """Stages and publishes; False where the volume is refused as another node has it."""
    try:
        driver.publish(handle, block())
    except grpc.RpcError as error:
        assert error.code() is Code.FAILED_PRECONDITION, error.details()
        return False
    return True


def test_what_changed_in_an_image_is_told(here: Driver, there: Driver, ceph: Ceph) -> None:
    handle = here.create("data", 16 * MIB, block(), **CLASS)
    device = here.publish(handle, block())
    written(device, b"1" * 4096)
    before = here.snapshot(handle, "before")
    written(device, b"2" * 4096, 5 * MIB)
    after = here.snapshot(handle, "after")
    # Of whole objects, on any node.
    delta = pb.GetMetadataDeltaRequest(base_snapshot_id=before, target_snapshot_id=after)
    whole = pb.GetMetadataAllocatedRequest(snapshot_id=after)
    for request, wanted in ((delta, [(4, 4)]), (whole, [(0, 8)])):
        told = [entry for message in there.stream(request) for entry in message.block_metadata]
        assert [(e.byte_offset // MIB, e.size_bytes // MIB) for e in told] == wanted
    for taken in (before, after):
        here.delete_snapshot(taken)
    here.unpublish(handle)
    here.unstage(handle)
    here.delete(handle)
    assert (images(ceph), here.left(), there.left()) == ([], NOTHING, NOTHING)


@pytest.mark.nightly
def test_a_group_of_images_is_of_one_instant_and_gone_with_its_last(
    here: Driver, there: Driver, ceph: Ceph
) -> None:
    handles = [here.create(name, 16 * MIB, block(), **CLASS) for name in ("data", "log")]
    devices = [here.publish(handle, block()) for handle in handles]
    for device in devices:
        written(device, b"1" * 4096)
    request = pb.CreateVolumeGroupSnapshotRequest(name="group", source_volume_ids=handles)
    # Only the node that has the volumes can have their writes wait.
    code, why = there.refuses(request)
    assert (code, "is locked by the client at" in why) == (Code.UNAVAILABLE, True)
    group = here.call(request).group_snapshot
    for driver in (here, there):
        assert driver.call(request).group_snapshot == group
    for device in devices:
        written(device, b"2" * 4096)
    for image in ("data", "log"):
        (snapshot,) = json.loads(ceph.rbd("snap", "ls", "--format", "json", f"{POOL}/{image}"))
        assert ceph.content(f"{image}@{snapshot['name']}")[:4096] == b"1" * 4096
    delete = pb.DeleteVolumeGroupSnapshotRequest(
        group_snapshot_id=group.group_snapshot_id,
        snapshot_ids=[one.snapshot_id for one in group.snapshots],
    )
    for driver in (there, here):
        driver.call(delete)
    for handle in handles:
        here.unpublish(handle)
        here.unstage(handle)
        here.delete(handle)
    assert (images(ceph), here.left(), there.left()) == ([], NOTHING, NOTHING)


@pytest.mark.nightly
def test_limits_of_an_image_are_where_it_is_used_and_go_with_it(
    here: Driver, there: Driver, ceph: Ceph
) -> None:
    request = here.create_request("data", 32 * MIB, SHARED, **CLASS)
    request.mutable_parameters.update({"iops": "500", "throughput": "10"})
    handle = here.call(request).volume.volume_id
    two = (here, there)

    def limited() -> list[tuple[int, int]]:
        found = [each.target.rpc("virtlun_bdev_get_limits", name=handle) for each in two]
        return [(each["total_iops_sec"], each["total_bytes_sec"] // MIB) for each in found]

    assert limited() == [(0, 0), (0, 0)]
    here.handles.add(handle)
    here.publish(handle, SHARED)
    assert limited() == [(500, 10), (0, 0)]
    # By a node that does not use it, while another one does.
    change = pb.ControllerModifyVolumeRequest(volume_id=handle)
    change.mutable_parameters.update({"iops": "700"})
    there.call(change)
    there.handles.add(handle)
    there.publish(handle, SHARED)
    assert limited() == [(500, 10), (700, 10)]
    here.call(change)
    assert limited() == [(700, 10), (700, 10)]
    here.target.kill9()
    here.target.start()
    assert limited() == [(700, 10), (700, 10)]
    for each in two:
        each.unpublish(handle)
        each.unstage(handle)
    assert limited() == [(0, 0), (0, 0)]
    clone = there.create("clone", 32 * MIB, SHARED, volume_of(handle), **CLASS)
    there.publish(clone, SHARED)
    assert not there.target.rpc("virtlun_bdev_get_limits", name=clone)["total_iops_sec"]
    there.unpublish(clone)
    there.unstage(clone)
    there.delete(clone)
    here.delete(handle)
    assert images(ceph) == []
    for each in two:
        kept = each.target.configuration()["bdev"]
        assert not [call for call in kept if call["method"] == "virtlun_bdev_set_limits"]
