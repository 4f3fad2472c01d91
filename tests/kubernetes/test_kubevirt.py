"""Virtual machines of KubeVirt on our claims.

What of KubeVirt is simulated, and what is real, is said in tests/kubernetes/kubevirt.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kubernetes.cluster import Cluster
from tests.kubernetes.driver import EXAMPLES, Deployment
from tests.kubernetes.kubevirt.bootdisk import boot_disk
from tests.kubernetes.kubevirt.importer import fill
from tests.kubernetes.kubevirt.simulator import KubeVirt, Machine

MIB = 1 << 20
KUBEVIRT = EXAMPLES / "kubevirt"
CLAIM = (KUBEVIRT / "claim.yaml").read_text()
VM = (KUBEVIRT / "vm.yaml").read_text()


@pytest.fixture(scope="module")
def plain(cluster: Cluster, deployment: Deployment) -> KubeVirt:
    """KubeVirt without any plugin."""
    return KubeVirt(cluster, deployment)


@pytest.fixture
def machine(plain: KubeVirt) -> Iterator[Machine]:
    """The example's virtual machine, with its claim filled, before it is started."""
    cluster = plain.cluster
    plain.deployment.wait_clean()
    with cluster.applied(CLAIM), cluster.applied(VM):
        fill(cluster, "boot", boot_disk())
        made = Machine(plain, "vm")
        yield made
        made.close()
    plain.deployment.wait_clean()


def test_a_machine_without_the_plugin_boots_from_the_block_device(machine: Machine) -> None:
    agent = machine.start()
    assert agent.run("cat /sys/block/sda/device/vendor").strip() == "QEMU"
    assert int(agent.run("cat /sys/block/sda/size")) * 512 == 64 * MIB
    machine.stop()
