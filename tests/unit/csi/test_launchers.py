"""Which pods get a controller."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest

from csi.clustererrors import UnreachableError
from csi.errors import Code
from csi.kinds import POD, VMI
from csi.kubevirt.controllers import VmControllers
from csi.kubevirt.inline import InlineVolumes
from csi.kubevirt.launchers import Launchers
from csi.kubevirt.podhook import PodHooks
from csi.kubevirt.pods import Pod
from csi.proto import csi_pb2 as pb
from csi.targets import Targets
from pydataplane.client import Client
from tests.unit.csi.conftest import World, mount, refused
from tests.unit.csi.fake_cluster import FakeCluster

UID = "7d3c0e4e-0000-4000-8000-000000000001"
ASKED = Pod(UID, "shop", "virt-launcher-vm-abcde", hook_in_pod=False)
OWNER = {
    "apiVersion": "kubevirt.io/v1",
    "kind": "VirtualMachineInstance",
    "name": "vm",
    "uid": "machine-1",
    "controller": True,
}
LAUNCHER: dict[str, Any] = {
    "metadata": {
        "name": ASKED.name,
        "namespace": "shop",
        "uid": UID,
        "labels": {"kubevirt.io": "virt-launcher"},
        "ownerReferences": [OWNER],
    }
}
MACHINE = {"metadata": {"namespace": "shop", "name": "vm", "uid": "machine-1"}}


def launchers(
    pod: dict[str, Any] | None = LAUNCHER, machine: dict[str, Any] | None = MACHINE
) -> Launchers:
    return Launchers(with_objects(pod, machine))


def with_objects(pod: dict[str, Any] | None, machine: dict[str, Any] | None) -> FakeCluster:
    cluster = FakeCluster()
    for kind, found in ((POD, pod), (VMI, machine)):
        if found is not None:
            cluster.put(kind, copy.deepcopy(found))
    return cluster


def changed(**changes: Any) -> dict[str, Any]:
    made = copy.deepcopy(LAUNCHER)
    made["metadata"].update(changes)
    return made


def test_a_launcher_of_a_machine_that_there_is_gets_one() -> None:
    launchers().machine_of(ASKED)


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        (launchers(changed(labels=None)), "no launcher"),
        (launchers(changed(labels={"kubevirt.io": "virt-handler"})), "no launcher"),
        (launchers(changed(ownerReferences=None)), "no launcher"),
        (launchers(changed(ownerReferences=[{**OWNER, "controller": False}])), "no launcher"),
        (launchers(changed(ownerReferences=[{**OWNER, "apiVersion": "other/v1"}])), "no launcher"),
        (launchers(changed(ownerReferences=[{**OWNER, "kind": "ReplicaSet"}])), "no launcher"),
        (launchers(changed(ownerReferences=[{**OWNER, "uid": "other"}])), "an earlier virtual"),
        (launchers(changed(ownerReferences=[{**OWNER, "name": "other"}])), "no controller"),
        (launchers(changed(uid="other")), "is another one now"),
        (launchers(machine=None), "no controller"),
        (launchers(pod=None), "no controller"),
    ],
)
def test_every_other_pod_gets_none(asked: Launchers, word: str) -> None:
    message = refused(lambda: asked.machine_of(ASKED), Code.FAILED_PRECONDITION)
    assert word in message
    assert "shop/virt-launcher-vm-abcde" in message


def test_while_the_api_server_is_away_nobody_gets_one() -> None:
    cluster = with_objects(LAUNCHER, MACHINE)
    cluster.failure = UnreachableError("cannot read it: the API server does not answer")
    made = Launchers(cluster)
    refused(lambda: made.machine_of(ASKED), Code.UNAVAILABLE)


def test_the_node_service_asks_before_it_makes_anything(world: World) -> None:
    controllers = VmControllers(Targets([world.target]), world.host, world.locks)
    hooks = cast("PodHooks", object())
    ours = launchers(changed(labels=None))

    def admit(pod: Pod, _: str) -> Client:
        ours.machine_of(pod)
        return world.target

    world.node._inline = InlineVolumes(controllers, hooks, admit)
    context = {
        "csi.storage.k8s.io/ephemeral": "true",
        "csi.storage.k8s.io/pod.uid": UID,
        "csi.storage.k8s.io/pod.name": ASKED.name,
        "csi.storage.k8s.io/pod.namespace": "shop",
    }
    request = pb.NodePublishVolumeRequest(
        volume_id=f"csi-{'0' * 64}",
        target_path=str(Path(world.directory) / "pod"),
        volume_capability=mount(),
        volume_context=context,
    )
    message = refused(lambda: world.node.node_publish_volume(request), Code.FAILED_PRECONDITION)
    assert "is no launcher" in message
    assert not world.target.controllers
    assert not world.host.mounted
