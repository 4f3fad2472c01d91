"""Snapshots of a virtual machine's claim while it runs, and the machine on what is restored.

KubeVirt's VirtualMachineSnapshot takes a VolumeSnapshot of each claim, and its
VirtualMachineRestore gives the machine a claim that begins with it. KubeVirt is simulated here
(tests/kubernetes/kubevirt says how far), so the test does both by hand; the snapshot-controller and
csi-snapshotter are real.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kubernetes import snapshots
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.kubevirt import census
from tests.kubernetes.kubevirt.claims import claim, read_in_a_pod
from tests.kubernetes.kubevirt.examples import VM, machine, nothing_left
from tests.kubernetes.kubevirt.guest import OURS, read, vendor, write
from tests.kubernetes.kubevirt.simulator import KubeVirt, Machine
from tests.kubernetes.test_snapshots import SNAPSHOT, of_snapshot

#: A guest boots in software, on a machine that others may keep busy.
pytestmark = pytest.mark.timeout(900)
#: Where `write` writes on a claim of 64 MiB, MiB.
AT = 60


@pytest.fixture(scope="module", autouse=True)
def controller(cluster: Cluster, kubevirt: KubeVirt) -> Iterator[None]:
    """The snapshot-controller, beside KubeVirt and our driver."""
    assert kubevirt.cluster is cluster
    with snapshots.controller(cluster):
        yield


@pytest.fixture(autouse=True)
def clean(kubevirt: KubeVirt) -> Iterator[None]:
    """Nothing is there before a test, and nothing after it."""
    with nothing_left(kubevirt, 180):
        yield
        kubevirt.cluster.api.delete_all("volumesnapshot")


def booting_from(name: str) -> str:
    """Returns the example's machine with this claim as its disk."""
    return VM.replace("claimName: boot", f"claimName: {name}")


@pytest.mark.nightly
def test_a_machine_goes_back_to_a_snapshot_taken_while_it_ran(kubevirt: KubeVirt) -> None:
    cluster, deployment = kubevirt.cluster, kubevirt.deployment
    with machine(kubevirt) as vm:
        agent = vm.start()
        before = write(agent, "sda")
        cluster.apply(SNAPSHOT.format(name="before", claim="boot"))
        content = snapshots.wait_ready(cluster, "before")
        assert content["status"]["restoreSize"] == 64 << 20
        after = write(agent, "sda")
        assert after != before
        with cluster.applied(of_snapshot(claim("again"), "before")):
            # The machine goes on beside what is restored, which shares its clusters.
            assert read_in_a_pod(cluster, "again", AT) == before
            assert read(agent, "sda") == after
            vm.stop()
            census.wait_nothing(deployment)
            cluster.apply(booting_from("again"))
            restored = Machine(kubevirt, "vm")
            try:
                agent = restored.start()
                assert restored.failures == [], restored.failures
                assert vendor(agent, "sda") == OURS
                assert read(agent, "sda") == before
                again = write(agent, "sda")
            finally:
                restored.close()
            assert read_in_a_pod(cluster, "again", AT) == again
            assert read_in_a_pod(cluster, "boot", AT) == after
