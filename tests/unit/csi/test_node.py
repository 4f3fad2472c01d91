"""The Node service over doubles of target and host: what it checks, and each call twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from csi import POOL_KEY, POOL_VALUE, TOPOLOGY_KEY
from csi.errors import Code
from csi.proto import csi_pb2 as pb
from csi.volumes import FORMATTING_XATTR
from pydataplane.errors import TargetUnavailable
from tests.support.fake_target import LVSTORE, LVSTORE_UUID, MIB
from tests.unit.csi.conftest import Mode, World, block, mount, refused

NOWHERE = "33333333-3333-4333-8333-333333333333"


def test_the_life_of_a_file_system_volume_with_each_call_twice(world: World) -> None:
    handle = world.create().volume_id
    for _ in range(2):
        world.stage(handle)
    for _ in range(2):
        world.restart()
        target = world.publish(handle)
    assert [each.target for each in world.host.mounted] == [world.staging, target]
    assert world.host.made == [(handle, "ext4")]
    for _ in range(2):
        world.unpublish(handle)
    for _ in range(2):
        world.unstage(handle)
    assert (world.host.mounted, world.host.devices, world.target.exports) == ([], {}, set())
    for _ in range(2):
        world.delete(handle)


def test_the_life_of_a_block_volume_with_each_call_twice(world: World) -> None:
    handle = world.create(volume_capabilities=[block()]).volume_id
    for _ in range(2):
        world.stage(handle, block())
        target = world.publish(handle, capability=block())
    (bound,) = world.host.mounted
    assert (bound.target, bound.root) == (target, "/loop1")
    assert not world.host.made
    for _ in range(2):
        world.unpublish(handle)
        world.unstage(handle)
    assert (world.host.mounted, world.host.devices, world.target.exports) == ([], {}, set())


@pytest.mark.parametrize(
    ("fs_type", "parameters", "made"),
    [("", {}, "ext4"), ("xfs", {}, "xfs"), ("", {"fsType": "xfs"}, "xfs")],
)
def test_the_file_system_is_the_claim_s_or_the_class_s(
    world: World, fs_type: str, parameters: dict[str, str], made: str
) -> None:
    handle = world.create(parameters=parameters).volume_id
    world.stage(handle, mount(fs_type))
    assert world.host.made == [(handle, made)]


def test_data_is_never_formatted_over(world: World) -> None:
    handle = world.create().volume_id
    world.stage(handle, mount("ext4"))
    world.unstage(handle)
    message = refused(lambda: world.stage(handle, mount("xfs")), Code.FAILED_PRECONDITION)
    assert "holds ext4" in message
    world.host.contents[handle] = "crypto_LUKS"
    refused(lambda: world.stage(handle, mount("ext4")), Code.FAILED_PRECONDITION)
    assert len(world.host.made) == 1


def test_a_mkfs_that_was_cut_off_is_done_again(world: World) -> None:
    handle = world.create().volume_id
    world.host.crash_in_make = True
    refused(lambda: world.stage(handle), Code.UNAVAILABLE)
    world.host.crash_in_make = False
    world.restart()
    world.stage(handle)
    assert world.host.contents[handle] == "ext4"
    assert FORMATTING_XATTR not in world.target.volume(handle).xattrs


def test_publishing_needs_staging(world: World) -> None:
    handle = world.create().volume_id
    for capability in (mount(), block()):
        message = refused(
            lambda each=capability: world.publish(handle, capability=each),  # type: ignore[misc]
            Code.FAILED_PRECONDITION,
        )
        assert "stage it first" in message
    assert not world.host.devices


def test_unstaging_waits_for_the_last_pod(world: World) -> None:
    handle = world.create().volume_id
    world.stage(handle)
    target = world.publish(handle)
    assert target in refused(lambda: world.unstage(handle), Code.FAILED_PRECONDITION)
    world.publish(handle)
    world.unpublish(handle)
    world.unstage(handle)


def test_two_pods_share_a_volume_unless_it_is_for_one(world: World) -> None:
    shared, sole = mount(mode=Mode.SINGLE_NODE_MULTI_WRITER), Mode.SINGLE_NODE_SINGLE_WRITER
    handle = world.create().volume_id
    world.stage(handle, shared)
    world.publish(handle, "a", shared)
    first = world.publish(handle, "b", shared)
    world.unpublish(handle, "a")
    message = refused(
        lambda: world.publish(handle, "c", mount(mode=sole)), Code.FAILED_PRECONDITION
    )
    assert first in message
    assert world.publish(handle, "b", mount(mode=sole)) == first


def test_two_pods_share_a_block_device(world: World) -> None:
    many = block(Mode.MULTI_NODE_MULTI_WRITER)
    handle = world.create(volume_capabilities=[many]).volume_id
    world.stage(handle, many)
    world.publish(handle, "a", many)
    world.publish(handle, "b", many)
    assert {each.root for each in world.host.mounted} == {"/loop1"}


def test_read_only_is_a_device_or_a_mount_of_its_own(world: World) -> None:
    handle = world.create().volume_id
    world.stage(handle, block())
    world.publish(handle, "a", block(), readonly=True)
    assert world.host.devices[handle, True] != world.host.devices[handle, False]
    assert world.host.mounted[0].root == f"/{world.host.devices[handle, True].name}"
    refused(lambda: world.publish(handle, "a", block()), Code.ALREADY_EXISTS)
    other = world.create("pvc-2").volume_id
    world.staging += "2"
    world.stage(other)
    world.publish(other, "b", readonly=True)
    assert world.host.mounted[-1].read_only
    refused(lambda: world.publish(other, "b"), Code.ALREADY_EXISTS)


def test_a_device_that_died_with_its_target_is_replaced_at_the_next_publish(world: World) -> None:
    handle = world.create().volume_id
    world.stage(handle)
    dead = world.host.devices.pop((handle, False))
    world.host.devices[handle, False] = Path("/dev/loop77")  # what attach() gives from now on
    target = world.publish(handle)
    assert {(each.target, each.device) for each in world.host.mounted} == {
        (world.staging, (7, 77)),
        (target, (7, 77)),
    }
    assert dead != world.host.devices[handle, False]


def test_a_volume_that_another_face_has_is_refused(world: World) -> None:
    handle = world.create().volume_id
    world.target.controllers["other"] = {0: handle}
    message = refused(lambda: world.stage(handle), Code.FAILED_PRECONDITION)
    assert "in use by a controller" in message


def test_a_handle_that_is_not_ours_is_not_found(world: World) -> None:
    foreign = world.target.add_volume("lvs0/other", thin=False)
    for handle in (foreign, NOWHERE, "lvs0/other"):
        refused(lambda each=handle: world.stage(each), Code.NOT_FOUND)  # type: ignore[misc]
        refused(lambda each=handle: world.publish(each), Code.NOT_FOUND)  # type: ignore[misc]
    assert not world.target.exports


def test_growing_reaches_device_and_file_system(world: World, tmp_path: Path) -> None:
    handle = world.create().volume_id
    world.stage(handle)
    world.host.grow = lambda *given: world.host.grown.append(str(given[-1]))  # type: ignore[method-assign]
    world.target.volume(handle).mib = 128
    for _ in range(2):
        answer = world.node.node_expand_volume(
            pb.NodeExpandVolumeRequest(volume_id=handle, volume_path=str(tmp_path))
        )
        assert answer.capacity_bytes == 128 * MIB
    assert world.host.grown == [handle, "ext4"] * 2
    missing = pb.NodeExpandVolumeRequest(volume_id=handle, volume_path=str(tmp_path / "none"))
    refused(lambda: world.node.node_expand_volume(missing), Code.NOT_FOUND)


@pytest.mark.parametrize("left_out", ["volume_id", "staging_target_path", "volume_capability"])
def test_what_is_missing_is_named(world: World, left_out: str) -> None:
    request = pb.NodeStageVolumeRequest(
        volume_id=NOWHERE, staging_target_path="/s", volume_capability=mount()
    )
    request.ClearField(left_out)
    message = refused(lambda: world.node.node_stage_volume(request), Code.INVALID_ARGUMENT)
    assert message == f"{left_out} is missing"


def test_a_second_call_for_the_same_volume_is_aborted(world: World) -> None:
    handle = world.create().volume_id
    with world.locks.hold(handle):
        refused(lambda: world.stage(handle), Code.ABORTED)
        refused(lambda: world.publish(handle), Code.ABORTED)
        refused(lambda: world.unpublish(handle), Code.ABORTED)
        refused(lambda: world.unstage(handle), Code.ABORTED)


def test_the_life_of_a_volume_of_the_vhost_face_with_each_call_twice(world: World) -> None:
    handle = world.create(parameters={"face": "vhost"}).volume_id
    for _ in range(2):
        world.stage(handle)
        first = world.publish(handle, "a")
        second = world.publish(handle, "b")
    assert world.target.controllers == {f"csi-{handle}": {0: handle}}
    asked = dict(world.target.requests)["vhost_create_scsi_controller"]
    assert asked == {"ctrlr": f"csi-{handle}", "own_folder": True}
    assert {each.target for each in world.host.mounted} == {first, second}
    world.unpublish(handle, "a")
    assert second in refused(lambda: world.unstage(handle), Code.FAILED_PRECONDITION)
    for _ in range(2):
        world.unpublish(handle, "b")
        world.unstage(handle)
    assert (world.target.controllers, world.target.exports, world.host.mounted) == ({}, set(), [])


def test_a_machine_on_the_vhost_face_gets_the_blocks_of_the_class(world: World) -> None:
    for size, given in (("4096", 4096), ("512", None)):  # SPDK's own target knows no such option
        handle = world.create(f"of-{size}", parameters={"face": "vhost", "blockSize": size})
        world.stage(handle.volume_id)
        options = world.target.options[f"csi-{handle.volume_id}", 0]
        assert options.get("block_size") == given


def test_the_vhost_face_is_a_folder_for_one_pod_that_is_staged(world: World) -> None:
    handle = world.create(parameters={"face": "vhost"}).volume_id
    assert "stage it first" in refused(lambda: world.publish(handle), Code.FAILED_PRECONDITION)
    refused(lambda: world.stage(handle, block()), Code.INVALID_ARGUMENT)
    sole = mount(mode=Mode.SINGLE_NODE_SINGLE_WRITER)
    world.stage(handle, sole)
    world.publish(handle, "a", sole)
    refused(lambda: world.publish(handle, "b", sole), Code.FAILED_PRECONDITION)


def test_a_volume_with_a_device_gets_no_controller(world: World) -> None:
    handle = world.create(parameters={"face": "vhost"}).volume_id
    world.target.exports.add(handle)
    message = refused(lambda: world.stage(handle), Code.FAILED_PRECONDITION)
    assert "in use by an export" in message
    assert not world.target.controllers


def test_a_guest_needs_no_help_of_the_node_to_see_growth(world: World, tmp_path: Path) -> None:
    handle = world.create(parameters={"face": "vhost"}).volume_id
    answer = world.controller.controller_expand_volume(
        pb.ControllerExpandVolumeRequest(
            volume_id=handle, capacity_range=pb.CapacityRange(required_bytes=128 * MIB)
        )
    )
    assert not answer.node_expansion_required
    request = pb.NodeExpandVolumeRequest(volume_id=handle, volume_path=str(tmp_path))
    assert world.node.node_expand_volume(request).capacity_bytes == 128 * MIB


def test_a_device_that_has_not_taken_the_size_yet_is_asked_again(world: World) -> None:
    handle = world.create().volume_id
    world.stage(handle)
    request = pb.NodeExpandVolumeRequest(
        volume_id=handle,
        volume_path=world.publish(handle),
        capacity_range=pb.CapacityRange(required_bytes=128 * MIB),
    )
    world.host.grow = lambda *given: world.host.grown.append(str(given[-1]))  # type: ignore[method-assign]
    world.host.behind = 64 * MIB
    message = refused(lambda: world.node.node_expand_volume(request), Code.UNAVAILABLE)
    assert "it takes them soon" in message
    world.host.behind = 0
    assert world.node.node_expand_volume(request).capacity_bytes == 128 * MIB


def test_a_node_is_told_with_the_pools_that_were_known_last(world: World) -> None:
    def told() -> dict[str, str]:
        info = world.node.node_get_info(pb.NodeGetInfoRequest())
        return dict(info.accessible_topology.segments)

    away = {"bdev_lvol_get_lvstores": TargetUnavailable("the target is away")}
    world.target.refuse.update(away)
    assert told() == {TOPOLOGY_KEY: "node1"}
    world.target.refuse.clear()
    world.target.pools.add(LVSTORE)
    known = {TOPOLOGY_KEY: "node1", f"{POOL_KEY}{LVSTORE_UUID}": POOL_VALUE}
    assert told() == known
    world.restart()
    world.target.refuse.update(away)
    assert told() == known
    world.target.refuse.clear()
    world.target.pools.clear()
    assert told() == {TOPOLOGY_KEY: "node1"}, "it is no more"
    (world.directory / "pools.json").write_text("nonsense")
    world.target.refuse.update(away)
    assert told() == {TOPOLOGY_KEY: "node1"}


def test_a_volume_grows_to_what_its_claim_asks_for_and_no_further(
    world: World, tmp_path: Path
) -> None:
    """Any node's credentials may note a capacity in a PersistentVolume, which kubelet believes."""
    handle = world.create(parameters={"face": "vhost"}).volume_id
    world.asked[handle] = 128 * MIB - 100

    def expand(size: int) -> int:
        wanted = pb.CapacityRange(required_bytes=size)
        request = pb.NodeExpandVolumeRequest(
            volume_id=handle, volume_path=str(tmp_path), capacity_range=wanted
        )
        return world.node.node_expand_volume(request).capacity_bytes

    assert expand(128 * MIB) == 128 * MIB, "rounded up"
    message = refused(lambda: expand(1024 * MIB), Code.OUT_OF_RANGE)
    assert f"its claim asks for {128 * MIB - 100}" in message
    assert expand(128 * MIB) == 128 * MIB


def test_what_grew_while_nobody_used_it_is_staged_with_its_new_size(world: World) -> None:
    """csi-resizer asked another node's driver, which left it to this node."""
    handle = world.create().volume_id
    world.capacities[handle] = 128 * MIB
    world.stage(handle)
    assert world.target.volume(handle).mib == 128
    world.stage(handle)
    assert world.target.calls.count("bdev_lvol_resize") == 1
    world.unstage(handle)
    world.capacities[handle] = 4096 * MIB  # no room: used as it is
    world.stage(handle)
    assert world.target.volume(handle).mib == 128
