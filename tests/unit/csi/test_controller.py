"""The Controller service over a double of the target: what it checks, and each call twice."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from csi import POOL_KEY, POOL_VALUE, TOPOLOGY_KEY, handles
from csi.controller import Controller
from csi.errors import Code
from csi.locks import VolumeLocks
from csi.parameters import read
from csi.proto import csi_pb2 as pb
from csi.snapshots import OwnedSnapshots
from csi.targets import Targets
from csi.volumes import OWNER_XATTR, OwnedVolumes
from csi.waitingclaims import WaitingClaims
from pydataplane.errors import RpcError, TargetTimeout, TargetUnavailable
from tests.support.fake_target import LVSTORE, LVSTORE_UUID, MIB, FakeTarget
from tests.unit.csi.conftest import Mode, World, block, mount, refused


def test_a_volume_is_made_once_however_often_it_is_asked_for(world: World) -> None:
    first = world.create()
    world.restart()
    assert world.create() == first
    ((alias, lvol),) = world.target.volumes.items()
    assert (alias, lvol.mib, lvol.thin) == ("lvs0/pvc-1", 64, False)
    assert first.capacity_bytes == 64 * MIB
    assert first.accessible_topology[0].segments == {TOPOLOGY_KEY: "node1"}


def test_its_owner_and_claim_stand_in_the_lvol(world: World) -> None:
    prefix = "csi.storage.k8s.io/pvc"
    volume = world.create(parameters={f"{prefix}/name": "data", f"{prefix}/namespace": "shop"})
    noted = json.loads(world.target.volume(volume.volume_id).xattrs[OWNER_XATTR])
    assert (noted["driver"], noted["claim"]) == ("csi.virtlun.dev", "shop/data")
    assert json.loads(noted["parameters"])["lvstore"] == LVSTORE


def test_what_a_newer_driver_noted_beside_it_is_left_out(world: World) -> None:
    volume = world.create()
    notes = world.target.volume(volume.volume_id).xattrs
    notes[OWNER_XATTR] = json.dumps(json.loads(notes[OWNER_XATTR]) | {"mood": "good"})
    world.restart()
    assert world.create() == volume


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("method", ["bdev_lvol_create", "virtlun_lvol_set_xattr"])
def test_a_create_cut_off_anywhere_is_completed_by_the_next(
    world: World, method: str, knows: bool
) -> None:
    world.target.knows_xattrs = knows
    world.target.fail[method] = TargetUnavailable("gone")
    reached = method == "bdev_lvol_create" or not knows
    if reached:
        refused(world.create, Code.UNAVAILABLE)
    world.restart()
    volume = world.create()
    assert world.target.uuids == [volume.volume_id]
    assert OWNER_XATTR in world.target.volume(volume.volume_id).xattrs


def test_a_volume_that_was_made_is_listed_although_nobody_was_told(world: World) -> None:
    """The target made it, the driver died before it heard of that, and the claim is gone."""
    create = world.target.bdev_lvol_create

    def die(*given: Any, **params: Any) -> str:
        create(*given, **params)
        raise TargetUnavailable("the driver is killed here")

    world.target.bdev_lvol_create = die  # type: ignore[method-assign]
    refused(world.create, Code.UNAVAILABLE)
    world.restart()
    (entry,) = world.controller.list_volumes(pb.ListVolumesRequest()).entries
    assert world.target.uuids == [entry.volume.volume_id]
    world.delete(entry.volume.volume_id)
    assert not world.target.volumes


def test_a_create_cut_off_and_asked_for_with_another_size_leaves_one_volume(world: World) -> None:
    world.target.knows_xattrs = False
    world.target.fail["virtlun_lvol_set_xattr"] = TargetUnavailable("gone")
    refused(world.create, Code.UNAVAILABLE)
    assert world.create(size=128 * MIB).capacity_bytes == 128 * MIB
    assert len(world.target.volumes) == 1


def test_a_volume_of_an_lvstore_that_is_not_loaded_is_not_gone(world: World) -> None:
    handle = world.create().volume_id
    world.target.loaded = False
    for call in (
        lambda: world.delete(handle),
        lambda: world.stage(handle),
        lambda: _expand(world, handle, 128 * MIB),
    ):
        message = refused(call, Code.UNAVAILABLE)
        assert "is not loaded on node node1: see `virtlun lvstore list`" in message
    world.target.loaded = True
    world.delete(handle)
    assert not world.target.volumes
    world.delete(handle)


def test_nor_is_one_of_an_lvstore_that_is_being_loaded(world: World) -> None:
    """The lvstore is there already, its lvols are not bdevs yet."""
    handle = world.create().volume_id
    world.target.bdev_get_bdevs = _no_bdevs  # type: ignore[method-assign]
    refused(lambda: world.delete(handle), Code.UNAVAILABLE)
    del world.target.bdev_get_bdevs
    world.delete(handle)


def test_a_volume_of_an_lvstore_that_was_replaced_is_not_gone(world: World) -> None:
    other = handles.make("22222222-2222-4222-8222-222222222222", "node1", "pvc-1")
    assert handles.is_uuid(other)
    refused(lambda: world.delete(other), Code.UNAVAILABLE)


def test_a_handle_of_an_earlier_driver_is_gone_where_all_lvstores_are_loaded(
    world: World,
) -> None:
    """It does not tell its own, which may be one that is not there."""
    before = handles.without_lvstore("node1", "pvc-1")
    world.delete(before)
    refused(lambda: world.stage(before), Code.NOT_FOUND)
    world.target.complete = False
    for call in (lambda: world.delete(before), lambda: world.stage(before)):
        assert "is not loaded" in refused(call, Code.UNAVAILABLE)
    # What never was a handle is in none, and one that tells its lvstore needs no other.
    world.delete("nobody's")
    world.delete(handles.make(LVSTORE_UUID, "node1", "pvc-1"))
    world.target.complete = True
    world.target.loaded = False
    refused(lambda: world.delete(before), Code.UNAVAILABLE)


def test_of_an_older_target_its_problems_are_taken_for_lvstores(world: World) -> None:
    before = handles.without_lvstore("node1", "pvc-1")
    world.target.complete = None
    world.delete(before)
    world.target.problems = ["bdev d0 is not restored: No such file or directory"]
    refused(lambda: world.delete(before), Code.UNAVAILABLE)


def test_a_volume_that_an_earlier_driver_made_is_found_by_its_name(world: World) -> None:
    before = handles.without_lvstore("node1", "pvc-1")
    made = world.create("pvc-1").volume_id
    assert made == handles.make(LVSTORE_UUID, "node1", "pvc-1") != before
    world.target.volume(made).uuid = before
    world.restart()
    assert world.create("pvc-1").volume_id == before
    world.delete(before)
    assert not world.target.volumes


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 128 * MIB},
        {"capacity_range": pb.CapacityRange(limit_bytes=32 * MIB)},
        {"parameters": {"thin": "true"}},
        {"parameters": {"fsType": "xfs"}},
    ],
)
def test_another_volume_of_the_same_name_is_refused(world: World, changes: dict[str, Any]) -> None:
    world.create()
    message = refused(lambda: world.create(**changes), Code.ALREADY_EXISTS)
    assert "pvc-1 exists already" in message


def test_a_name_that_is_no_lvol_name_works(world: World) -> None:
    name = "Ein sehr langer Name mit Leerzeichen/und Schrägstrich " * 2
    volume = world.create(name)
    assert list(world.target.volumes) == [f"lvs0/csi-{volume.volume_id}"]
    assert world.create(name) == volume


def test_an_lvol_of_someone_else_with_the_name_is_left_alone(world: World) -> None:
    world.target.add_volume("lvs0/pvc-1", thin=False)
    refused(world.create, Code.ALREADY_EXISTS)
    assert len(world.target.volumes) == 1


def test_sizes_are_whole_clusters_within_the_range(world: World) -> None:
    assert world.create("a", 3 * MIB + 1).capacity_bytes == 4 * MIB
    within = pb.CapacityRange(limit_bytes=10 * MIB + 5)
    assert world.create("b", capacity_range=within).capacity_bytes == 10 * MIB
    tight = pb.CapacityRange(required_bytes=10 * MIB + 1, limit_bytes=10 * MIB + 2)
    refused(lambda: world.create("c", capacity_range=tight), Code.OUT_OF_RANGE)
    crossed = pb.CapacityRange(required_bytes=2 * MIB, limit_bytes=MIB)
    refused(lambda: world.create("d", capacity_range=crossed), Code.INVALID_ARGUMENT)
    refused(lambda: world.create("e", 2048 * MIB), Code.RESOURCE_EXHAUSTED)
    world.create("f", 800 * MIB)
    refused(lambda: world.create("g", 800 * MIB), Code.RESOURCE_EXHAUSTED)
    assert len(world.target.volumes) == 3


@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        ({"lvstore": ""}, "lvstore"),
        ({"thick": "true"}, "thick is not known"),
        ({"thin": "yes"}, "thin"),
        ({"fsType": "btrfs"}, "fsType"),
        ({"fs_type": "xfs"}, "fs_type is not known"),
        ({"blockSize": "1024"}, "blockSize"),
        ({"thin": "true", "overcommit": "0.5"}, "overcommit"),
        ({"thin": "true", "overcommit": "much"}, "overcommit"),
        ({"overcommit": "2"}, "overcommit: '2'"),
        ({"csi.storage.k8s.io/other": "x"}, "other is not known"),
    ],
)
def test_a_wrong_parameter_is_named(world: World, parameters: dict[str, str], word: str) -> None:
    message = refused(lambda: world.create(parameters=parameters), Code.INVALID_ARGUMENT)
    assert word in message
    assert not world.target.volumes


def test_a_class_without_lvstore_is_told_what_to_add(world: World) -> None:
    request = pb.CreateVolumeRequest(name="x", volume_capabilities=[mount()])
    message = refused(lambda: world.controller.create_volume(request), Code.INVALID_ARGUMENT)
    assert message.startswith("StorageClass parameter lvstore is missing")


@pytest.mark.parametrize(
    ("capability", "word"),
    [
        (mount("btrfs"), "btrfs"),
        (mount(mode=Mode.MULTI_NODE_MULTI_WRITER), "MULTI_NODE_MULTI_WRITER"),
        (block(mode=Mode.MULTI_NODE_SINGLE_WRITER), "MULTI_NODE_SINGLE_WRITER"),
        (mount(mode=Mode.UNKNOWN), "no access mode"),
        (pb.VolumeCapability(access_mode=Mode(mode="SINGLE_NODE_WRITER")), "no access type"),
    ],
)
def test_an_impossible_use_is_refused(
    world: World, capability: pb.VolumeCapability, word: str
) -> None:
    create = refused(lambda: world.create(volume_capabilities=[capability]), Code.INVALID_ARGUMENT)
    assert word in create
    volume = world.create()
    answer = world.controller.validate_volume_capabilities(
        pb.ValidateVolumeCapabilitiesRequest(
            volume_id=volume.volume_id, volume_capabilities=[mount(), capability]
        )
    )
    assert word in answer.message
    assert not answer.HasField("confirmed")


def test_the_uses_there_are_get_confirmed(world: World) -> None:
    volume = world.create(volume_capabilities=[block(Mode.MULTI_NODE_MULTI_WRITER)])
    answer = world.controller.validate_volume_capabilities(
        pb.ValidateVolumeCapabilitiesRequest(
            volume_id=volume.volume_id,
            volume_capabilities=[
                mount("xfs"),
                block(Mode.MULTI_NODE_MULTI_WRITER),
                block(Mode.MULTI_NODE_READER_ONLY),
            ],
        )
    )
    assert len(answer.confirmed.volume_capabilities) == 3


def test_a_volume_for_another_node_is_made_there(world: World) -> None:
    wanted = pb.TopologyRequirement(requisite=[pb.Topology(segments={TOPOLOGY_KEY: "node2"})])
    message = refused(
        lambda: world.create(accessibility_requirements=wanted), Code.RESOURCE_EXHAUSTED
    )
    assert "node2" in message
    wanted.requisite.append(pb.Topology(segments={TOPOLOGY_KEY: "node1"}))
    assert world.create(accessibility_requirements=wanted).volume_id


def test_a_volume_of_a_pool_is_for_nodes_with_the_pool_or_for_this_one(world: World) -> None:
    world.target.pools.add(LVSTORE)

    def made(*segments: dict[str, str]) -> str:
        requisite = [pb.Topology(segments=each) for each in segments]
        wanted = pb.TopologyRequirement(requisite=requisite)
        return world.create(accessibility_requirements=wanted).volume_id

    key = f"{POOL_KEY}{LVSTORE_UUID}"
    handle = made({TOPOLOGY_KEY: "node2", key: POOL_VALUE})
    # As allowedTopologies of a class that is bound at once say it.
    assert made({TOPOLOGY_KEY: "node2"}, {TOPOLOGY_KEY: "node1"}) == handle
    other = {f"{POOL_KEY}77777777-7777-4777-8777-777777777777": POOL_VALUE}
    for where in ({TOPOLOGY_KEY: "node2"}, {TOPOLOGY_KEY: "node1", **other}):
        message = refused(lambda: made(where), Code.RESOURCE_EXHAUSTED)  # noqa: B023
        assert f"without the pool {LVSTORE}" in message


def test_deleting_twice_is_fine(world: World) -> None:
    handle = world.create().volume_id
    world.delete(handle)
    world.delete(handle)
    world.delete("not-a-handle")
    assert not world.target.volumes


def test_deleting_a_volume_in_use_or_of_others_is_refused(world: World) -> None:
    handle = world.create().volume_id
    world.target.exports.add(handle)
    refused(lambda: world.delete(handle), Code.FAILED_PRECONDITION)
    foreign = world.target.add_volume("lvs0/other", thin=False)
    assert "not of csi.virtlun.dev" in refused(
        lambda: world.delete(foreign), Code.FAILED_PRECONDITION
    )
    assert set(world.target.uuids) == {handle, foreign}


def _expand(world: World, handle: str, size: int) -> pb.ControllerExpandVolumeResponse:
    return world.controller.controller_expand_volume(
        pb.ControllerExpandVolumeRequest(
            volume_id=handle, capacity_range=pb.CapacityRange(required_bytes=size)
        )
    )


def test_expanding_twice_grows_once_and_never_shrinks(world: World) -> None:
    handle = world.create().volume_id
    for size in (128 * MIB, 128 * MIB, 32 * MIB):
        answer = _expand(world, handle, size)
        assert (answer.capacity_bytes, answer.node_expansion_required) == (128 * MIB, False)
    assert world.target.calls.count("bdev_lvol_resize") == 1
    refused(lambda: _expand(world, "nothing", MIB), Code.NOT_FOUND)
    foreign = world.target.add_volume("lvs0/other", thin=False)
    refused(lambda: _expand(world, foreign, 128 * MIB), Code.NOT_FOUND)


def test_it_grows_no_further_than_its_own_claim_asks_for(world: World) -> None:
    """csi-resizer asks for what the claim of any PersistentVolume of the handle wants."""
    handle = world.create().volume_id
    world.asked[handle] = 128 * MIB - 100
    for _ in range(2):
        message = refused(lambda: _expand(world, handle, 256 * MIB), Code.OUT_OF_RANGE)
        assert f"its claim asks for {128 * MIB - 100}" in message
        assert world.target.volume(handle).mib == 128
    assert _expand(world, handle, 128 * MIB).capacity_bytes == 128 * MIB
    world.asked[handle] = 256 * MIB
    assert _expand(world, handle, 256 * MIB).capacity_bytes == 256 * MIB
    del world.asked[handle]  # a volume of nobody's claim grows as it is told
    assert _expand(world, handle, 512 * MIB).capacity_bytes == 512 * MIB


@pytest.mark.parametrize("size", [1000 * MIB, 4096 * MIB], ids=["now", "ever"])
def test_growth_beyond_what_there_is_can_be_asked_for_again_or_less(
    world: World, size: int
) -> None:
    handle, other = world.create().volume_id, world.create("other", 100 * MIB).volume_id
    message = refused(lambda: _expand(world, handle, size), Code.OUT_OF_RANGE)
    assert f"cannot grow from {64 * MIB} to {size} bytes: lvstore {LVSTORE}" in message
    assert f"has {860 * MIB} bytes free" in message
    assert world.target.volume(handle).mib == 64
    assert _expand(world, handle, 128 * MIB).capacity_bytes == 128 * MIB
    world.delete(other)
    assert _expand(world, handle, 1000 * MIB).capacity_bytes == 1000 * MIB


def test_a_pod_with_the_device_needs_its_node_to_take_the_new_size(world: World) -> None:
    handle = world.create().volume_id
    world.stage(handle)
    answer = _expand(world, handle, 128 * MIB)
    assert (answer.capacity_bytes, answer.node_expansion_required) == (128 * MIB, True)


def test_growth_of_another_nodes_volume_is_left_to_that_node(world: World) -> None:
    handle = "33333333-3333-4333-8333-333333333333"
    world.nodes[handle] = "node2"
    answer = _expand(world, handle, 128 * MIB)
    assert (answer.capacity_bytes, answer.node_expansion_required) == (128 * MIB, True)
    world.nodes[handle] = "node1"  # ours by name, but its lvol is not there
    refused(lambda: _expand(world, handle, 128 * MIB), Code.NOT_FOUND)


def test_growth_of_a_volume_of_a_pool_is_left_to_nodes_that_have_the_pool(world: World) -> None:
    handle = handles.make("77777777-7777-4777-8777-777777777777", "", "data")
    world.nodes[handle] = ""
    answer = _expand(world, handle, 128 * MIB)
    assert (answer.capacity_bytes, answer.node_expansion_required) == (128 * MIB, True)
    gone = handles.make(LVSTORE_UUID, "", "data")
    world.nodes[gone] = ""
    refused(lambda: _expand(world, gone, 128 * MIB), Code.NOT_FOUND)


def test_the_node_grows_a_volume_that_the_controller_did_not(world: World) -> None:
    handle = world.create().volume_id
    world.stage(handle)
    request = pb.NodeExpandVolumeRequest(
        volume_id=handle,
        volume_path=world.publish(handle),
        capacity_range=pb.CapacityRange(required_bytes=128 * MIB),
    )
    world.host.grow = lambda *given: world.host.grown.append(str(given[-1]))  # type: ignore[method-assign]
    for _ in range(2):
        assert world.node.node_expand_volume(request).capacity_bytes == 128 * MIB
    assert world.target.calls.count("bdev_lvol_resize") == 1
    assert world.host.grown == [handle, "ext4"] * 2
    request.capacity_range.required_bytes = 4096 * MIB
    message = refused(lambda: world.node.node_expand_volume(request), Code.OUT_OF_RANGE)
    assert "ask for less, delete volumes there" in message
    request.capacity_range.required_bytes = 64 * MIB
    assert world.node.node_expand_volume(request).capacity_bytes == 128 * MIB
    request.volume_path = str(world.directory / "nowhere")
    request.capacity_range.required_bytes = 256 * MIB
    refused(lambda: world.node.node_expand_volume(request), Code.NOT_FOUND)
    assert world.target.volume(handle).mib == 128


def test_the_list_has_pages_and_only_our_volumes(world: World) -> None:
    ours = sorted(world.create(f"pvc-{number}", MIB).volume_id for number in range(5))
    world.target.add_volume("lvs0/other", thin=False)
    found, token = [], ""
    while True:
        request = pb.ListVolumesRequest(max_entries=2, starting_token=token)
        page = world.controller.list_volumes(request)
        assert len(page.entries) <= 2
        found += [entry.volume.volume_id for entry in page.entries]
        if not (token := page.next_token):
            break
    assert found == ours
    wrong = pb.ListVolumesRequest(starting_token="x")
    refused(lambda: world.controller.list_volumes(wrong), Code.ABORTED)


def test_capacity_is_what_is_free_here(world: World) -> None:
    world.create(size=100 * MIB)
    capacity = world.controller.get_capacity
    parameters = {"lvstore": LVSTORE}
    free = 924 * MIB
    assert capacity(pb.GetCapacityRequest()).available_capacity == free
    assert capacity(pb.GetCapacityRequest(parameters=parameters)).available_capacity == free
    for nothing in (
        pb.GetCapacityRequest(parameters={"lvstore": "elsewhere"}),
        pb.GetCapacityRequest(accessible_topology=pb.Topology(segments={TOPOLOGY_KEY: "node2"})),
        pb.GetCapacityRequest(volume_capabilities=[mount("btrfs")]),
    ):
        assert capacity(nothing).available_capacity == 0


LIMITED = {"thin": "true", "overcommit": "1.5"}


def test_a_thin_class_promises_no_more_than_its_limit(world: World) -> None:
    """The lvstore has 1024 MiB; thick volumes count as well."""
    world.create("thick", 512 * MIB)
    first = world.create("a", 600 * MIB, parameters=LIMITED).volume_id
    capacity = world.controller.get_capacity
    request = pb.GetCapacityRequest(parameters={"lvstore": LVSTORE, **LIMITED})
    assert capacity(request).available_capacity == (1536 - 512 - 600) * MIB
    message = refused(
        lambda: world.create("b", 425 * MIB, parameters=LIMITED), Code.RESOURCE_EXHAUSTED
    )
    assert "over the class's overcommit 1.5" in message
    world.create("b", 424 * MIB, parameters=LIMITED)
    assert capacity(request).available_capacity == 0
    refused(lambda: _expand(world, first, 601 * MIB), Code.OUT_OF_RANGE)
    assert world.target.volume(first).mib == 600
    # Another class of the same lvstore has no limit.
    world.create("c", 900 * MIB, parameters={"thin": "true"})
    assert capacity(request).available_capacity == 0


def test_one_volume_is_never_larger_than_its_lvstore(world: World) -> None:
    answer = world.controller.get_capacity(
        pb.GetCapacityRequest(parameters={"lvstore": LVSTORE, **LIMITED})
    )
    assert (answer.available_capacity, answer.maximum_volume_size.value) == (
        1536 * MIB,
        1024 * MIB,
    )


def test_a_full_lvstore_has_no_room_for_thin_volumes_either(world: World) -> None:
    world.create("thick", 1024 * MIB)
    request = pb.GetCapacityRequest(parameters={"lvstore": LVSTORE, **LIMITED})
    assert world.controller.get_capacity(request).available_capacity == 0


def test_a_volume_that_was_made_before_there_was_a_limit_is_the_same(world: World) -> None:
    kept = json.loads(read({"lvstore": LVSTORE}).kept())
    assert "overcommit" not in kept


class Told(WaitingClaims):
    """Notes what claims are told, and what is said of room."""

    def __init__(self) -> None:
        super().__init__("node1")
        self.told: list[tuple[str, str, str]] = []
        self.rooms: list[tuple[Any, ...]] = []

    def tell(self, claim: str, reason: str, message: str) -> None:
        self.told.append((claim, reason, message))

    def asked(self, *given: Any) -> None:
        self.rooms.append(given)

    def room(self, *given: Any) -> None:
        self.rooms.append(given)


CLAIM = {
    "csi.storage.k8s.io/pvc/name": "data",
    "csi.storage.k8s.io/pvc/namespace": "shop",
}


def test_a_claim_for_many_nodes_is_told_that_its_volume_is_on_one(world: World) -> None:
    """KubeVirt takes ReadWriteMany for a volume that a machine can be migrated with."""
    waiting = Told()
    world.controller._waiting = waiting
    world.create("one", MIB, volume_capabilities=[block()], parameters=CLAIM)
    assert not waiting.told
    shared = block(mode=Mode.MULTI_NODE_MULTI_WRITER)
    world.create("many", MIB, volume_capabilities=[shared], parameters=CLAIM)
    ((claim, reason, message),) = waiting.told
    assert (claim, reason) == ("shop/data", "OneNode")
    assert message.startswith("the volume is on node node1 alone: ")
    assert message.endswith("a virtual machine with it cannot be migrated")
    world.create("nobody's", MIB, volume_capabilities=[shared])
    assert len(waiting.told) == 1


def test_a_claim_that_no_volume_can_serve_is_told_why_and_waits_for_no_room() -> None:
    target = FakeTarget()
    volumes, waiting = OwnedVolumes(Targets([target]), "node1"), Told()
    locks = VolumeLocks()
    snapshots = OwnedSnapshots(volumes, locks)
    controller = Controller(volumes, snapshots, locks, "node1", waiting=waiting)
    request = pb.GetCapacityRequest(
        parameters={"lvstore": LVSTORE, **CLAIM},
        volume_capabilities=[mount(mode=Mode.MULTI_NODE_MULTI_WRITER)],
    )
    assert controller.get_capacity(request).available_capacity == 0
    ((claim, reason, message),) = waiting.told
    assert (claim, reason) == ("shop/data", "CannotProvision")
    assert message.endswith("use volumeMode Block, or ReadWriteOnce")
    elsewhere = pb.GetCapacityRequest(
        parameters={"lvstore": LVSTORE},
        accessible_topology=pb.Topology(segments={TOPOLOGY_KEY: "node2"}),
    )
    assert controller.get_capacity(elsewhere).available_capacity == 0
    assert (len(waiting.told), waiting.rooms) == (1, [])
    usable = pb.GetCapacityRequest(parameters=request.parameters, volume_capabilities=[mount()])
    assert controller.get_capacity(usable).available_capacity == target.mib * MIB
    assert waiting.rooms == [("shop/data", LVSTORE, target.mib * MIB)]


def test_a_second_call_for_the_same_volume_is_aborted_and_others_are_not(world: World) -> None:
    handle = world.create().volume_id
    with world.locks.hold(handle):
        refused(world.create, Code.ABORTED)
        refused(lambda: world.delete(handle), Code.ABORTED)
        refused(lambda: _expand(world, handle, 128 * MIB), Code.ABORTED)
        assert world.create("pvc-2").volume_id != handle
    world.delete(handle)


def test_the_lock_is_free_again_after_a_failure(world: World) -> None:
    handle = world.create().volume_id
    world.target.fail["bdev_lvol_delete"] = TargetTimeout("no answer")
    refused(lambda: world.delete(handle), Code.DEADLINE_EXCEEDED)
    world.delete(handle)


def test_twenty_threads_make_one_volume(world: World) -> None:
    results: list[str] = []

    def work() -> None:
        try:
            results.append(world.create().volume_id)
        except Exception as error:
            results.append(type(error).__name__)

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(world.target.volumes) == 1
    assert set(results) <= {world.create().volume_id, "Failure"}


@pytest.mark.parametrize(
    ("errno", "code"),
    [
        (-16, Code.FAILED_PRECONDITION),
        (-22, Code.INVALID_ARGUMENT),
        (-5, Code.INTERNAL),
    ],
)
def test_the_target_s_errors_keep_their_meaning(world: World, errno: int, code: Code) -> None:
    world.target.fail["bdev_lvol_create"] = RpcError(errno, "its words", "bdev_lvol_create")
    assert "bdev_lvol_create: its words" in refused(world.create, code)


def _no_bdevs(name: str | None = None) -> list[dict[str, Any]]:
    if name is not None:
        raise RpcError(-19, f"bdev {name} does not exist", "bdev_get_bdevs")
    return []
