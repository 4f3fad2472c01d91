"""Limits of volumes by the CSI calls, over a double of the target: each call twice."""

from __future__ import annotations

import json

import pytest

from csi.attributes import Attributes, read
from csi.errors import Code, precondition
from csi.proto import csi_pb2 as pb
from csi.volumelimits import LIMITS_XATTR, VolumeLimits
from pydataplane.errors import BAD_PARAMETERS, BUSY, METHOD_NOT_FOUND, RpcError, TargetUnavailable
from pydataplane.lvols import Volume
from tests.support.fake_target import LVSTORE, MIB
from tests.unit.csi.conftest import World, block, mount, refused

SLOW = {"iops": "100", "throughput": "5"}
LIMITS = {"total_iops_sec": 100, "total_bytes_sec": 5 * MIB}


def modify(world: World, handle: str, parameters: dict[str, str]) -> None:
    world.controller.controller_modify_volume(
        pb.ControllerModifyVolumeRequest(volume_id=handle, mutable_parameters=parameters)
    )


@pytest.fixture
def pool(world: World) -> World:
    """A driver whose lvstore is a pool of Ceph."""
    world.target.pools.add(LVSTORE)
    return world


def test_a_volume_has_the_limits_of_its_class_from_the_beginning(world: World) -> None:
    handle = world.create(mutable_parameters=SLOW).volume_id
    assert world.target.volume(handle).limits == LIMITS
    assert world.create(mutable_parameters=SLOW).volume_id == handle
    assert world.target.volume(handle).limits == LIMITS
    assert world.target.calls.count("virtlun_bdev_set_limits") == 1


def test_a_create_that_was_cut_off_before_the_limits_is_completed(world: World) -> None:
    world.target.fail["virtlun_bdev_set_limits"] = TargetUnavailable("gone")
    refused(lambda: world.create(mutable_parameters=SLOW), Code.UNAVAILABLE)
    world.restart()
    handle = world.create(mutable_parameters=SLOW).volume_id
    assert world.target.volume(handle).limits == LIMITS


@pytest.mark.parametrize("in_pool", [False, True])
def test_what_another_class_gave_before_the_answer_was_lost_does_not_stay(
    world: World, in_pool: bool
) -> None:
    if in_pool:
        world.target.pools.add(LVSTORE)
    handle = world.create(mutable_parameters={"readIops": "9", "throughput": "7"}).volume_id
    assert world.create(mutable_parameters={"throughput": "5"}).volume_id == handle
    world.stage(handle, block())
    assert world.target.volume(handle).limits == {"total_bytes_sec": 5 * MIB}


def _older(world: World) -> None:
    for method in ("virtlun_bdev_set_limits", "virtlun_bdev_get_limits"):
        world.target.refuse[method] = RpcError(METHOD_NOT_FOUND, "Method not found", method)


def test_a_volume_that_cannot_be_limited_is_not_left(world: World) -> None:
    """After such a code no call comes that would delete it."""
    _older(world)
    for _ in range(2):
        refused(
            lambda: world.create(mutable_parameters={"readIops": "9"}), Code.FAILED_PRECONDITION
        )
        assert not world.target.volumes
    world.create()


def test_one_that_is_there_already_stays_and_is_tried_again(world: World) -> None:
    """It may be somebody's by now; csi-provisioner goes on after this code, and deletes it."""
    world.target.fail["virtlun_bdev_get_limits"] = TargetUnavailable("gone")
    refused(lambda: world.create(mutable_parameters={"readIops": "9"}), Code.UNAVAILABLE)
    _older(world)
    message = refused(lambda: world.create(mutable_parameters={"readIops": "9"}), Code.UNAVAILABLE)
    assert "is not limited: read_iops_sec" in message
    assert len(world.target.volumes) == 1


def test_one_that_cannot_be_taken_back_is_tried_again(world: World) -> None:
    _older(world)
    world.target.refuse["bdev_lvol_delete"] = RpcError(BUSY, "in use", "bdev_lvol_delete")
    refused(lambda: world.create(mutable_parameters={"readIops": "9"}), Code.UNAVAILABLE)
    assert len(world.target.volumes) == 1


def test_a_class_that_makes_no_sense_makes_no_volume(world: World) -> None:
    message = refused(
        lambda: world.create(mutable_parameters={"iops": "fast"}), Code.INVALID_ARGUMENT
    )
    assert "parameter iops: 'fast'" in message
    assert not world.target.volumes


def test_modifying_counts_at_once_and_leaves_what_is_not_named(world: World) -> None:
    handle = world.create(mutable_parameters=SLOW).volume_id
    world.stage(handle)
    for _ in range(2):
        modify(world, handle, {"iops": "200"})
        assert world.target.volume(handle).limits == LIMITS | {"total_iops_sec": 200}
    modify(world, handle, {"iops": "0", "throughput": "0"})
    assert world.target.volume(handle).limits == {}
    assert world.target.calls.count("virtlun_bdev_set_limits") == 3
    refused(lambda: modify(world, handle, {"rate": "1"}), Code.INVALID_ARGUMENT)
    refused(lambda: modify(world, "", SLOW), Code.INVALID_ARGUMENT)
    refused(lambda: modify(world, "nobody's", SLOW), Code.NOT_FOUND)


def test_csi_resizer_cannot_be_led_to_a_volume_by_another_nodes_object(world: World) -> None:
    handle = world.create(mutable_parameters=SLOW).volume_id
    world.forged.add("forged")
    name = "csi.storage.k8s.io/pv/name"
    for _ in range(2):
        refused(
            lambda: modify(world, handle, {"iops": "0", name: "forged"}), Code.FAILED_PRECONDITION
        )
        assert world.target.volume(handle).limits == LIMITS
    modify(world, handle, {"iops": "9", name: "pvc-1"})
    assert world.target.volume(handle).limits == LIMITS | {"total_iops_sec": 9}


def test_modifying_waits_for_no_other_call(world: World) -> None:
    handle = world.create().volume_id
    with world.locks.hold(handle):
        refused(lambda: modify(world, handle, SLOW), Code.ABORTED)


def test_the_node_of_a_volume_of_another_is_left_to_limit_it(world: World) -> None:
    handle = world.create().volume_id
    world.nodes[handle] = "node2"
    world.target.volumes.clear()
    modify(world, handle, SLOW)
    refused(lambda: modify(world, handle, {"iops": "fast"}), Code.INVALID_ARGUMENT)
    world.nodes[handle] = "node1"
    refused(lambda: modify(world, handle, SLOW), Code.NOT_FOUND)


def test_a_target_that_is_older_than_the_driver_is_told_of(world: World) -> None:
    handle = world.create().volume_id
    _older(world)
    message = refused(lambda: modify(world, handle, {"readIops": "5"}), Code.FAILED_PRECONDITION)
    assert f"volume {handle} is not limited: read_iops_sec" in message


def test_what_can_be_validated_is_told(world: World) -> None:
    handle = world.create().volume_id

    def validated(**parameters: str) -> pb.ValidateVolumeCapabilitiesResponse:
        return world.controller.validate_volume_capabilities(
            pb.ValidateVolumeCapabilitiesRequest(
                volume_id=handle, volume_capabilities=[mount()], mutable_parameters=parameters
            )
        )

    assert dict(validated(iops="1").confirmed.mutable_parameters) == {"iops": "1"}
    assert "iops: 'x'" in validated(iops="x").message
    assert not validated(iops="x").HasField("confirmed")


# Of a pool, whose images any node may have


def test_an_image_has_its_limits_where_it_is_used_and_notes_them(pool: World) -> None:
    handle = pool.create(mutable_parameters=SLOW).volume_id
    image = pool.target.volume(handle)
    assert json.loads(image.xattrs[LIMITS_XATTR]) == LIMITS
    assert image.limits == {}
    pool.restart()
    pool.stage(handle, block())
    assert image.limits == LIMITS
    for _ in range(2):
        modify(pool, handle, {"iops": "0"})
        assert image.limits == {"total_bytes_sec": 5 * MIB}
    assert json.loads(image.xattrs[LIMITS_XATTR]) == image.limits
    for _ in range(2):
        pool.unstage(handle)
        assert image.limits == {}
    modify(pool, handle, {"throughput": "0"})
    assert image.xattrs[LIMITS_XATTR] == "{}"
    assert image.limits == {}


def test_an_image_is_limited_before_its_device_is_there(pool: World) -> None:
    handle = pool.create(mutable_parameters=SLOW).volume_id
    pool.target.fail["virtlun_bdev_set_limits"] = TargetUnavailable("gone")
    refused(lambda: pool.stage(handle, block()), Code.UNAVAILABLE)
    assert not pool.host.devices


def test_an_image_that_could_not_be_staged_leaves_no_limits_here(pool: World) -> None:
    """Kubelet does not unstage it, and the pod may go to another node."""
    handle = pool.create(mutable_parameters=SLOW).volume_id
    pool.host.contents[handle] = "crypto_LUKS"
    refused(lambda: pool.stage(handle), Code.FAILED_PRECONDITION)
    assert pool.target.volume(handle).limits == {}
    del pool.host.contents[handle]
    pool.stage(handle)
    assert pool.target.volume(handle).limits == LIMITS
    # One that is used here keeps them.
    refused(lambda: pool.stage(handle, mount("xfs")), Code.ALREADY_EXISTS)
    assert pool.target.volume(handle).limits == LIMITS


def test_an_image_that_cannot_be_limited_is_never_deleted(pool: World) -> None:
    """Another node may have made it meanwhile, or have answered that it is the claim's."""
    pool.target.refuse["virtlun_lvol_set_xattr"] = RpcError(BAD_PARAMETERS, "no", "set")
    for _ in range(2):
        message = refused(lambda: pool.create(mutable_parameters=SLOW), Code.UNAVAILABLE)
        assert "the target refused set" in message
        assert len(pool.target.volumes) == 1
    del pool.target.refuse["virtlun_lvol_set_xattr"]
    handle = pool.create(mutable_parameters=SLOW).volume_id
    assert json.loads(pool.target.volume(handle).xattrs[LIMITS_XATTR]) == LIMITS


def test_an_image_without_a_class_keeps_what_is_set_by_hand(pool: World) -> None:
    handle = pool.create().volume_id
    image = pool.target.volume(handle)
    by_hand = {"total_iops_sec": 500}
    pool.stage(handle, block())
    image.limits |= by_hand
    for _ in range(2):
        pool.stage(handle, block())
        assert image.limits == by_hand
    pool.unstage(handle)
    pool.stage(handle, block())
    assert image.limits == by_hand
    assert LIMITS_XATTR not in image.xattrs
    # A class that limits nothing is one.
    modify(pool, handle, {"iops": "0"})
    assert image.limits == {}
    image.limits |= by_hand
    pool.unstage(handle)
    assert image.limits == {}


def test_what_the_target_does_not_take_is_not_noted_either(pool: World) -> None:
    handle = pool.create(mutable_parameters=SLOW).volume_id
    image = pool.target.volume(handle)
    pool.stage(handle, block())
    pool.target.refuse["virtlun_bdev_set_limits"] = RpcError(BAD_PARAMETERS, "no", "set")
    refused(lambda: modify(pool, handle, {"iops": "7"}), Code.INTERNAL)
    pool.classes[handle] = read({"iops": "9"})
    refused(lambda: pool.stage(handle, block()), Code.INTERNAL)
    assert json.loads(image.xattrs[LIMITS_XATTR]) == LIMITS


@pytest.mark.parametrize("noted", ["no JSON", "[1]", "7", "null"])
def test_an_image_whose_note_makes_no_sense_can_be_used(pool: World, noted: str) -> None:
    handle = pool.create(mutable_parameters=SLOW).volume_id
    image = pool.target.volume(handle)
    image.xattrs[LIMITS_XATTR] = noted
    pool.stage(handle, block())
    assert image.limits == {}
    modify(pool, handle, SLOW)
    assert json.loads(image.xattrs[LIMITS_XATTR]) == image.limits == LIMITS


def test_why_an_image_was_not_staged_is_said_whatever_comes_after(
    pool: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = pool.create(mutable_parameters=SLOW).volume_id
    pool.host.contents[handle] = "crypto_LUKS"

    def fails(_: VolumeLimits, volume: Volume) -> None:
        raise precondition(f"several targets have {volume.uuid}")

    monkeypatch.setattr(VolumeLimits, "after_use", fails)
    assert "crypto_LUKS" in refused(lambda: pool.stage(handle), Code.FAILED_PRECONDITION)


def test_what_the_api_server_says_counts_before_what_is_noted(pool: World) -> None:
    """Another node's driver was asked, which has not the pool."""
    handle = pool.create(mutable_parameters=SLOW).volume_id
    pool.classes[handle] = read({"iops": "300"})
    pool.stage(handle, block())
    image = pool.target.volume(handle)
    assert image.limits == LIMITS | {"total_iops_sec": 300}
    assert json.loads(image.xattrs[LIMITS_XATTR]) == image.limits


def test_a_volume_whose_class_changed_while_the_driver_was_away_is_limited_when_staged(
    world: World,
) -> None:
    handle = world.create(mutable_parameters=SLOW).volume_id
    world.classes[handle] = Attributes(iops="300")
    world.stage(handle)
    assert world.target.volume(handle).limits == LIMITS | {"total_iops_sec": 300}
    world.unstage(handle)
    assert world.target.volume(handle).limits == LIMITS | {"total_iops_sec": 300}
