"""What the driver answers to bad input: a code, one sentence with what to do, and nothing left.

The real driver over the real target; each case is one call that an orchestrator can make.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message

from csi.proto import csi_pb2 as pb
from tests.support.csi import MIB, NODE, Driver, Mode, block, mount, running
from tests.support.night import by_day
from tests.target.conftest import MakeTarget

pytestmark = pytest.mark.root
Code = grpc.StatusCode
UNKNOWN = "00000000-0000-4000-8000-000000000000"
Make = Callable[[Driver], Message]


@pytest.fixture
def driver(make_target: MakeTarget) -> Iterator[Driver]:
    """A running driver with an lvstore of 512 MiB."""
    with running(make_target().start(), 512) as driver:
        yield driver


@pytest.fixture(scope="module")
def shared(make_shared_target: MakeTarget) -> Iterator[Driver]:
    """The same for all tests that make nothing."""
    with running(make_shared_target().start(), 512) as driver:
        yield driver


def create(
    capability: pb.VolumeCapability | None = None, size: int = 64 * MIB, **parameters: str
) -> Make:
    """Returns what makes a request for a volume; parameters of the class are given as they are."""
    return lambda _: pb.CreateVolumeRequest(
        name="bad",
        capacity_range=pb.CapacityRange(required_bytes=size),
        volume_capabilities=[capability or mount("ext4")],
        parameters=parameters,
    )


def refuses(driver: Driver, make: Make, code: grpc.StatusCode, said: str) -> None:
    """Makes the call twice and checks the answer, which is one line, and that nothing changed."""
    before = driver.left(), driver.target.rpc("bdev_lvol_get_lvstores")
    for _ in range(2):
        found, message = driver.refuses(make(driver))
        assert (found, message) == (code, message)
        assert re.search(said, message), message
        assert "\n" not in message
    assert (driver.left(), driver.target.rpc("bdev_lvol_get_lvstores")) == before


@pytest.mark.parametrize(
    ("make", "code", "said"),
    [
        pytest.param(
            create(),
            Code.INVALID_ARGUMENT,
            r"^StorageClass parameter lvstore is missing: name it, for example lvs0$",
            id="class without lvstore",
        ),
        pytest.param(
            create(lvstore="lvs0", colour="red"),
            Code.INVALID_ARGUMENT,
            r"^StorageClass parameter colour is not known: the parameters are lvstore, ",
            id="unknown parameter",
        ),
        pytest.param(
            create(lvstore="lvs9"),
            Code.RESOURCE_EXHAUSTED,
            rf"^node {NODE} has no lvstore lvs9: make one with `virtlun lvstore create`, or name ",
            id="lvstore that is not there",
        ),
        pytest.param(
            create(lvstore="lvs0", size=1 << 40),
            Code.RESOURCE_EXHAUSTED,
            rf"^{1 << 40} bytes do not fit in lvstore lvs0, which has \d+: ask for less, or ",
            id="larger than the lvstore",
        ),
        pytest.param(
            create(mount("ntfs"), lvstore="lvs0"),
            Code.INVALID_ARGUMENT,
            r"^file system 'ntfs' is not supported: there are ext4 and xfs$",
            id="unknown file system",
        ),
        pytest.param(
            create(mount("ext4", Mode.MULTI_NODE_MULTI_WRITER), lvstore="lvs0"),
            Code.INVALID_ARGUMENT,
            r"^access mode MULTI_NODE_MULTI_WRITER is not possible with volumeMode Filesystem: use "
            r"volumeMode Block, or ReadWriteOnce$",
            id="files for many nodes",
        ),
        pytest.param(
            create(block(), lvstore="lvs0", face="vhost"),
            Code.INVALID_ARGUMENT,
            r"^a volume of the vhost face is a directory: ask for volumeMode Filesystem$",
            id="block device of the vhost face",
        ),
    ],
)
def test_a_volume_that_cannot_be_is_not_made(
    shared: Driver, make: Make, code: grpc.StatusCode, said: str
) -> None:
    refuses(shared, make, code, said)
    assert shared.left()["lvols"] == []


def test_a_volume_for_which_there_is_no_room_left_is_not_made(driver: Driver) -> None:
    driver.create("most", 400 * MIB, mount("ext4"))
    said = (
        rf"^lvstore lvs0 of node {NODE} has \d+ bytes free, and volume bad needs \d+ \(.*\): "
        "ask for less"
    )
    refuses(driver, create(lvstore="lvs0", size=200 * MIB), Code.RESOURCE_EXHAUSTED, said)
    driver.create("bad", 64 * MIB, mount("ext4"))


def test_growth_beyond_what_there_is_changes_nothing(driver: Driver) -> None:
    handle = driver.create("pvc-1", 64 * MIB, block())
    driver.create("most", 300 * MIB, block())
    path = driver.publish(handle, block())
    for size in (256 * MIB, 1 << 40):
        more = pb.CapacityRange(required_bytes=size)
        said = rf"^volume {handle} cannot grow from {64 * MIB} to {size} bytes: lvstore lvs0 of "
        for request in (
            pb.ControllerExpandVolumeRequest(volume_id=handle, capacity_range=more),
            pb.NodeExpandVolumeRequest(
                volume_id=handle, volume_path=str(path), capacity_range=more
            ),
        ):
            made: Message = request
            refuses(driver, lambda _, made=made: made, Code.OUT_OF_RANGE, said)  # type: ignore[misc]
    driver.expand(handle, 128 * MIB)
    driver.unpublish(handle)
    driver.unstage(handle)


def test_a_use_that_cannot_be_is_refused_on_the_node(driver: Driver) -> None:
    handle = driver.create("pvc-1", 64 * MIB, mount("ext4"))
    refuses(
        driver,
        lambda driver: driver.publish_request(handle, mount("ext4")),
        Code.FAILED_PRECONDITION,
        rf"^volume {handle} is not staged at /\S+: stage it first$",
    )
    no_staging = driver.publish_request(handle, mount("ext4"))
    no_staging.staging_target_path = ""
    refuses(
        driver,
        lambda _: no_staging,
        Code.FAILED_PRECONDITION,
        r"^staging_target_path is missing: stage the volume first$",
    )
    refuses(
        driver,
        lambda driver: driver.stage_request(handle, mount("ntfs")),
        Code.INVALID_ARGUMENT,
        r"^file system 'ntfs' is not supported",
    )
    refuses(
        driver,
        lambda driver: driver.stage_request(handle, mount("", Mode.MULTI_NODE_MULTI_WRITER)),
        Code.INVALID_ARGUMENT,
        r"^access mode MULTI_NODE_MULTI_WRITER is not possible with volumeMode Filesystem",
    )
    refuses(
        driver,
        lambda driver: driver.stage_request(handle, mount("xfs")),
        Code.FAILED_PRECONDITION,
        r"^xfs needs 300 MiB, the volume has 64: ask for more, or use ext4$",
    )
    driver.unstage(handle)


@by_day("foreign")
@pytest.mark.parametrize("kind", ["unknown", "name", "foreign"])
def test_a_handle_that_is_not_ours_is_not_touched(driver: Driver, kind: str) -> None:
    target = driver.target
    foreign = str(target.rpc("bdev_lvol_create", lvol_name="own", size_in_mib=16, lvs_name="lvs0"))
    handle = {"unknown": UNKNOWN, "name": "lvs0/own", "foreign": foreign}[kind]
    ours = rf"^volume {handle} is not one of csi.virtlun.dev on node {NODE}$"
    capacity = pb.CapacityRange(required_bytes=64 * MIB)
    somewhere = str(driver.directory)
    requests: list[Message] = [
        driver.stage_request(handle, block()),
        driver.publish_request(handle, block()),
        pb.ControllerExpandVolumeRequest(volume_id=handle, capacity_range=capacity),
        pb.NodeExpandVolumeRequest(
            volume_id=handle, volume_path=somewhere, capacity_range=capacity
        ),
        pb.NodeGetVolumeStatsRequest(volume_id=handle, volume_path=somewhere),
        pb.ValidateVolumeCapabilitiesRequest(volume_id=handle, volume_capabilities=[block()]),
    ]
    for request in requests:
        refuses(driver, lambda _, request=request: request, Code.NOT_FOUND, ours)  # type: ignore[misc]
    target.rpc("virtlun_export_create", bdev_name=foreign, read_only=False)
    nowhere = str(driver.directory / "nowhere")
    driver.call(pb.NodeUnpublishVolumeRequest(volume_id=handle, target_path=nowhere))
    driver.call(pb.NodeUnstageVolumeRequest(volume_id=handle, staging_target_path=nowhere))
    assert [each["bdev_name"] for each in target.rpc("virtlun_export_list")] == [foreign]
    target.rpc("virtlun_export_delete", bdev_name=foreign)
    delete = pb.DeleteVolumeRequest(volume_id=handle)
    if kind == "foreign":
        said = r"^lvol lvs0/own is not of csi.virtlun.dev: delete it with `virtlun volume`$"
        refuses(driver, lambda _: delete, Code.FAILED_PRECONDITION, said)
    else:
        driver.call(delete)  # what is not there is deleted
    assert driver.left()["lvols"] == ["own"]


def test_a_volume_has_one_face_at_a_time(driver: Driver) -> None:
    """As a LUN of a machine it is no device of a pod, and the other way round."""
    target = driver.target
    target.rpc("vhost_create_scsi_controller", ctrlr="vm")
    kernel = driver.create("pvc-1", 64 * MIB, block())
    lun = {"ctrlr": "vm", "scsi_target_num": 0, "bdev_name": kernel}
    target.rpc("vhost_scsi_controller_add_target", **lun)
    refuses(
        driver,
        lambda driver: driver.stage_request(kernel, block()),
        Code.FAILED_PRECONDITION,
        r"^the target refused virtlun_export_create: Device or resource busy: "
        rf"bdev {kernel} is in use by target 0 of controller vm: release it there first$",
    )
    refuses(
        driver,
        lambda _: pb.DeleteVolumeRequest(volume_id=kernel),
        Code.FAILED_PRECONDITION,
        r"^the target refused bdev_lvol_delete: ",
    )
    target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm", scsi_target_num=0)
    machine = driver.create("vm-1", 64 * MIB, mount("ext4"), face="vhost")
    target.rpc("virtlun_export_create", bdev_name=machine, read_only=False)
    refuses(
        driver,
        lambda driver: driver.stage_request(machine, mount("ext4")),
        Code.FAILED_PRECONDITION,
        r"^the target refused vhost_scsi_controller_add_target: .*in use by the export \S+: "
        r"release it there first$",
    )
    assert [each["ctrlr"] for each in target.rpc("vhost_get_controllers")] == ["vm"]
    target.rpc("virtlun_export_delete", bdev_name=machine)
    for handle, capability in ((kernel, block()), (machine, mount("ext4"))):
        driver.publish(handle, capability)
        driver.unpublish(handle)
        driver.unstage(handle)
    target.rpc("vhost_delete_controller", ctrlr="vm")


def test_missing_fields_are_named(driver: Driver) -> None:
    handle = driver.create("pvc-1", 64 * MIB, block())
    path = str(Path(driver.directory) / "x")
    use = block()
    for request, field in (
        (pb.DeleteVolumeRequest(), "volume_id"),
        (pb.ControllerExpandVolumeRequest(volume_id=handle), "capacity_range"),
        (pb.NodeStageVolumeRequest(volume_id=handle, volume_capability=use), "staging_target_path"),
        (pb.NodePublishVolumeRequest(volume_id=handle, volume_capability=use), "target_path"),
        (pb.NodeUnpublishVolumeRequest(volume_id=handle), "target_path"),
        (pb.NodeUnstageVolumeRequest(staging_target_path=path), "volume_id"),
        (pb.NodeGetVolumeStatsRequest(volume_id=handle), "volume_path"),
        (pb.NodeExpandVolumeRequest(volume_id=handle), "volume_path"),
    ):
        found: Message = request
        said = rf"^{field} is missing"
        refuses(driver, lambda _, found=found: found, Code.INVALID_ARGUMENT, said)  # type: ignore[misc]
