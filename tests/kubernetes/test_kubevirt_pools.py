"""A virtual machine with a claim of a pool of Ceph, on two nodes: it moves, with its disk.

What of KubeVirt is simulated is said in tests/kubernetes/kubevirt, and of a migration in its
`migration`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kubernetes.ceph import ceph_of, with_pool
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.driver import EXAMPLES, Deployment
from tests.kubernetes.events import wait_event
from tests.kubernetes.kubevirt import census
from tests.kubernetes.kubevirt.claims import CLAIM
from tests.kubernetes.kubevirt.examples import machine
from tests.kubernetes.kubevirt.guest import OURS, read, vendor, write
from tests.kubernetes.kubevirt.installed import installed
from tests.kubernetes.kubevirt.migration import Migration
from tests.kubernetes.kubevirt.simulator import KubeVirt
from tests.support.ceph import lacks

ALONE = CLAIM.replace("virtlun-thin", "virtlun-rbd")
SHARED = ALONE.replace("ReadWriteOnce", "ReadWriteMany")

pytestmark = [
    #: A guest boots in software, on a machine that others may keep busy.
    pytest.mark.timeout(900),
    pytest.mark.nightly(reason="a second node, a guest and Ceph"),
    pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}"),
]


@pytest.fixture(scope="module")
def kubevirt(cluster: Cluster, deployment: Deployment, second: Deployment) -> Iterator[KubeVirt]:
    """KubeVirt with our plugin on both nodes, which have the pool."""
    made = KubeVirt(cluster, deployment, second)
    with (
        ceph_of(cluster) as ceph,
        installed(deployment, second),
        with_pool(deployment, ceph),
        with_pool(second, ceph),
    ):
        cluster.apply(EXAMPLES / "ceph/storageclass.yaml")
        yield made
        deployment.sweep()
        for each in (deployment, second):
            census.wait_nothing(each)
        cluster.kubectl("delete", "-f", EXAMPLES / "ceph/storageclass.yaml")


def test_a_machine_with_a_claim_of_several_nodes_migrates(kubevirt: KubeVirt) -> None:
    with machine(kubevirt, boot=SHARED) as vm:
        agent = vm.start()
        here = vm.node
        assert (vendor(agent, "sda"), census.luns(kubevirt.deployments[here])) == ("QEMU", ())
        wait_event(kubevirt.cluster, "vm", "so that the machine can be migrated", vm.uid)
        written = write(agent, "sda")
        migration = Migration(vm)
        migration.create_pod()
        migration.hand_over()
        migration.prepare_target()
        migration.migrate()
        migration.finish()
        assert (vm.node != here, vm.launcher.state()) == (True, "running")
        agent = vm.agent()
        assert read(agent, "sda") == written
        written = write(agent, "sda")
        assert read(agent, "sda") == written
        kubevirt.cluster.delete("virtualmachine", "vm", wait=False)
        vm.stop()


def test_a_claim_of_one_node_at_a_time_is_a_lun(kubevirt: KubeVirt) -> None:
    with machine(kubevirt, boot=ALONE) as vm:
        agent = vm.start()
        assert vendor(agent, "sda") == OURS
        assert len(census.luns(kubevirt.deployments[vm.node])) == 1
        kubevirt.cluster.delete("virtualmachine", "vm", wait=False)
        vm.stop()
