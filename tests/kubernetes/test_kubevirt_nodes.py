"""Virtual machines where there are two nodes: one that lives on the second, and one that moves.

Each node has its own target, driver and provisioner, and one csi-resizer is elected for both. What
of KubeVirt is simulated is said in tests/kubernetes/kubevirt, and of a migration in its `migration`.
"""  # noqa: E501

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest

from tests.kubernetes.cluster import NODE, Cluster
from tests.kubernetes.driver import DRIVER, Deployment
from tests.kubernetes.kubevirt import census
from tests.kubernetes.kubevirt.claims import (
    CLAIM,
    claim,
    grow,
    made_on,
    status,
    vm_volume,
    wait_phase,
)
from tests.kubernetes.kubevirt.examples import machine, nothing_left
from tests.kubernetes.kubevirt.guest import OURS, disk_at, size, vendor, wait_size
from tests.kubernetes.kubevirt.installed import installed
from tests.kubernetes.kubevirt.migration import Migration
from tests.kubernetes.kubevirt.objects import PLUGIN_GROUP
from tests.kubernetes.kubevirt.simulator import KubeVirt, Machine
from tests.kubernetes.kubevirt.wire import HookError
from tests.support.wait import until

SHARED_CLAIM = CLAIM.replace("ReadWriteOnce", "ReadWriteMany")
#: Has no volume, and so nothing to boot: the firmware says so and waits.
BARE = """\
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: bare}
spec:
  runStrategy: Always
  template:
    metadata: {labels: {virtlun.dev/controller: "true"}}
    spec:
      terminationGracePeriodSeconds: 5
      domain:
        memory: {guest: 64Mi}
        devices: {interfaces: [{name: default, masquerade: {}}]}
      networks: [{name: default, pod: {}}]
"""
#: The hook points that our plugin does not ask for, sent to the same socket.
OTHER_POINTS = {
    "apiVersion": f"{PLUGIN_GROUP}/v1alpha1",
    "kind": "Plugin",
    "metadata": {"name": "other-points"},
    "spec": {
        "nodeHooks": [
            {
                "socket": f"/var/lib/kubelet/plugins/{DRIVER}/node-hook.sock",
                "permittedHooks": ["PostVMStart", "PreVMStop", "PostMigrationTarget"],
            }
        ]
    },
}

#: A guest boots in software, on a machine that others may keep busy.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def kubevirt(cluster: Cluster, deployment: Deployment, second: Deployment) -> Iterator[KubeVirt]:
    """KubeVirt with our plugin on both nodes."""
    made = KubeVirt(cluster, deployment, second)
    with installed(deployment, second):
        yield made


@pytest.fixture(autouse=True)
def clean(kubevirt: KubeVirt) -> Iterator[None]:
    """Nothing is there before a test, and nothing after it, on both nodes."""
    with nothing_left(kubevirt):
        yield
    kubevirt.called.clear()


@pytest.fixture
def elsewhere(deployment: Deployment, second: Deployment) -> None:
    """The elected csi-resizer is the first node's."""
    until(lambda: deployment.leads() or second.leads(), "an election", every_s=0.2)
    if second.leads():
        with second.without("csi-resizer"):
            until(deployment.leads, "another election", every_s=0.2)


def lvols(deployment: Deployment) -> int:
    return len(deployment.volumes.volumes())


@pytest.mark.nightly
@pytest.mark.usefixtures("elsewhere")
def test_a_machine_lives_on_the_second_node_and_stays_there(
    kubevirt: KubeVirt, deployment: Deployment, second: Deployment
) -> None:
    """Its claim waited for its first pod, which came there, and may be used by many nodes' pods."""
    cluster, node = kubevirt.cluster, second.node.name
    with (
        machine(kubevirt, boot=SHARED_CLAIM, node=node) as vm,
        cluster.applied(claim("late")),
        cluster.applied(made_on(claim("far"), NODE)),
    ):
        cluster.wait_phase("pvc/far", "Bound")
        agent = vm.start()
        assert (vm.node, vendor(agent, "sda"), size(agent, "sda")) == (node, OURS, 64)
        assert (lvols(deployment), lvols(second)) == (1, 1)
        assert census.census(second).controllers == (f"pod-{vm.pod_uid}",)
        assert len(census.luns(second)) == len(census.parked(second)) == 1

        cluster.apply(vm_volume("late", "vm", "late"))
        cluster.apply(vm_volume("far", "vm", "far"))
        told = wait_phase(cluster, "late", "Attached")
        assert (told["node"], told["pod"]) == (node, vm.pod_uid)
        late = disk_at(agent, told["target"])
        assert (lvols(deployment), lvols(second)) == (1, 2), "it was made where the machine runs"
        said = f"the volume of claim far is on node {NODE} and the machine runs on {node}"
        until(
            lambda: said in status(cluster, "far").get("message", ""),
            f"the VmVolume far to say: {said}",
        )
        assert wait_phase(cluster, "far", "Pending").get("target") is None

        for name, disk in (("boot", "sda"), ("late", late)):
            grow(cluster, name, 96)
            wait_size(agent, disk, 96)
            cluster.wait(f"pvc/{name}", "jsonpath={.status.capacity.storage}=96Mi")
        assert deployment.leads(), "the other node's csi-resizer decided it"

        migration = Migration(vm)
        migration.create_pod()
        why = migration.unschedulable()
        assert "node(s) didn't match PersistentVolume's node affinity" in why
        assert "node(s) didn't match pod anti-affinity rules" in why
        migration.give_up()
        assert (vendor(agent, "sda"), size(agent, "sda")) == (OURS, 96), "the machine runs on"
        assert (census.census(deployment).controllers, census.luns(deployment)) == ((), ())

        cluster.delete("vmvolume", "far", "late")
        agent.wait_for(f"! [ -e /sys/block/{late} ]")
        cluster.delete("virtualmachine", "vm", wait=False)
        vm.stop()
        assert {where for _, where in kubevirt.called} == {node}
        for each in (deployment, second):
            census.wait_nothing(each)
            assert each.exports() == []


@pytest.mark.nightly
def test_a_machine_migrates_when_it_has_no_luns_and_every_hook_point_is_called(
    kubevirt: KubeVirt,
) -> None:
    """A disk of this node keeps it here; without one libvirt moves it, and it gets disks there."""
    cluster = kubevirt.cluster
    vm = Machine(kubevirt, "bare")
    with cluster.applied(BARE), cluster.applied(json.dumps(OTHER_POINTS)):
        try:
            vm.create()
            vm.run_domain()
            here = vm.node
            source = kubevirt.deployments[here]
            with cluster.applied(claim("data")):
                cluster.apply(vm_volume("extra", "bare", "data"))
                assert wait_phase(cluster, "extra", "Attached")["node"] == here

                migration = Migration(vm)
                migration.create_pod()
                migration.hand_over()
                assert migration.target is not None
                there = migration.target.node
                destination = kubevirt.deployments[there]
                for _ in range(2):
                    migration.prepare_target()
                new = f"pod-{migration.target.uid}"
                assert census.census(destination).controllers == (new,)
                for _ in range(2):
                    with pytest.raises(HookError, match="bare cannot be migrated: it has LUNs"):
                        migration.migrate()
                assert (vm.launcher.state(), migration.target.state()) == ("running", "")
                assert len(census.luns(source)) == 1
                cluster.delete("vmvolume", "extra")

            cluster.apply(claim("data2"))
            cluster.apply(vm_volume("after", "bare", "data2"))
            told = wait_phase(cluster, "after", "Pending")
            assert "virtual machine bare is being migrated" in told["message"]
            migration.migrate()
            migration.finish()
            assert (vm.node, vm.launcher.state()) == (there, "running")
            (disk,) = vm.xml().findall("devices/disk")
            assert disk.get("type") == "vhostuser"
            assert census.census(source).controllers == ()

            assert wait_phase(cluster, "after", "Attached")["node"] == there
            cluster.delete("vmvolume", "after")
            cluster.delete("pvc", "data2")
            cluster.delete("virtualmachine", "bare", wait=False)
            vm.stop()
        finally:
            vm.close()
    assert [call for call, _ in itertools.groupby(kubevirt.called)] == [
        ("PreVMStart", here),
        ("PostVMStart", here),
        ("PreMigrationTarget", there),
        ("PreMigrationSource", here),
        ("PostMigrationTarget", there),
        ("PreVMStop", there),
        ("PostVMStop", there),
    ]
    for each in (source, destination):
        census.wait_nothing(each)
