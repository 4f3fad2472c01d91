"""The Node service where something is there already: of an earlier call, of kubelet, of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from csi.errors import Code
from csi.mounts import Mount
from csi.proto import csi_pb2 as pb
from tests.support.fake_target import LVSTORE
from tests.unit.csi.conftest import Mode, World, block, mount, refused

KUBELET = "/var/lib/kubelet"
UID = "8d6fb0ad-3a4c-4b86-9c3b-0a3ce2e8f001"
OF_POD = {"csi.storage.k8s.io/pod.uid": UID}
OF_ANOTHER = {"csi.storage.k8s.io/pod.uid": UID.replace("8d", "9e")}


@pytest.mark.parametrize(
    ("use", "place"),
    [
        (block, f"{KUBELET}/plugins/kubernetes.io/csi/volumeDevices/pvc-1/dev/{UID}"),
        (mount, f"{KUBELET}/pods/{UID}/volume-subpaths/pvc-1/shell/0"),
    ],
    ids=["a device once more", "a subPath"],
)
def test_what_kubelet_mounts_itself_of_a_volume_for_one_pod_is_that_pods(
    world: World, use: Callable[..., pb.VolumeCapability], place: str
) -> None:
    """It is there when a new kubelet publishes everything again."""
    sole = use(mode=Mode.SINGLE_NODE_SINGLE_WRITER)
    handle = world.create().volume_id
    world.stage(handle, sole)
    target = world.publish(handle, UID, sole, volume_context=OF_POD)
    published = world.host.at(world.directory / UID)
    assert published is not None
    world.host.mounted.append(replace(published, target=place))
    assert world.publish(handle, UID, sole, volume_context=OF_POD) == target
    contexts: tuple[dict[str, str], ...] = (OF_ANOTHER, {})
    for context in contexts:
        message = refused(
            lambda context=context: world.publish(handle, "b", sole, volume_context=context),  # type: ignore[misc]
            Code.FAILED_PRECONDITION,
        )
        assert place in message


def test_a_read_only_publish_that_was_cut_off_is_sealed_by_the_next(world: World) -> None:
    handle = world.create().volume_id
    world.stage(handle)
    target = world.publish(handle)  # all that had come about of a read-only one
    world.publish(handle, readonly=True)
    found = world.host.at(world.directory / "pod")
    assert found == Mount(target, (7, 1), "/", True, "ext4")


def test_the_folder_of_a_socket_that_was_not_sealed_yet_is(world: World) -> None:
    handle = world.create(parameters={"face": "vhost"}).volume_id
    world.stage(handle)
    world.publish(handle)
    world.host.mounted = [replace(each, read_only=False) for each in world.host.mounted]
    world.publish(handle)
    assert [each.read_only for each in world.host.mounted] == [True]


def test_a_volume_is_not_staged_as_another_file_system_meanwhile(world: World) -> None:
    handle = world.create().volume_id
    world.stage(handle, mount("xfs"))
    message = refused(lambda: world.stage(handle, mount("ext4")), Code.ALREADY_EXISTS)
    assert "is staged as xfs, not ext4" in message
    world.stage(handle, mount("xfs"))


def test_unstaging_what_is_not_ours_leaves_others_exports(world: World) -> None:
    foreign = world.target.add_volume("lvs0/other", thin=False)
    world.target.exports.add(foreign)
    for handle in (foreign, f"{LVSTORE}/other", "nothing"):
        world.node.node_unstage_volume(
            pb.NodeUnstageVolumeRequest(volume_id=handle, staging_target_path=world.staging)
        )
    assert world.target.exports == {foreign}
