"""A virtual machine with a claim of a pool of Ceph, on two nodes: it moves, with its disk.

What of KubeVirt is simulated is said in tests/kubernetes/kubevirt, and of a migration in its
`migration`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pydataplane.volumes import Volumes
from tests.kubernetes.ceph import NodesCeph, ceph_of, with_pool
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.driver import EXAMPLES, Deployment
from tests.kubernetes.events import wait_event
from tests.kubernetes.kubevirt import census
from tests.kubernetes.kubevirt.claims import CLAIM
from tests.kubernetes.kubevirt.examples import VM, machine
from tests.kubernetes.kubevirt.guest import OURS, read, size, vendor, write
from tests.kubernetes.kubevirt.installed import installed
from tests.kubernetes.kubevirt.migration import Migration
from tests.kubernetes.kubevirt.simulator import KubeVirt
from tests.support.ceph import lacks
from tests.support.verified_io import VerifiedIo, block
from tests.support.wait import until

ALONE = CLAIM.replace("virtlun-thin", "virtlun-rbd")
SHARED = ALONE.replace("ReadWriteOnce", "ReadWriteMany")
DATA_MIB = 16
DATA = SHARED.replace("name: boot", "name: data").replace("64Mi", f"{DATA_MIB}Mi")
"""Another claim, which reads as zeros."""
WITH_DATA = VM.replace(
    "disk: {bus: scsi}\n", "disk: {bus: scsi}\n            - {name: data, disk: {bus: scsi}}\n"
).replace(
    "claimName: boot\n",
    "claimName: boot\n        - {name: data, persistentVolumeClaim: {claimName: data}}\n",
)
SEED = 0x6B756265

pytestmark = [
    #: A guest boots in software, on a machine that others may keep busy.
    pytest.mark.timeout(900),
    pytest.mark.nightly(reason="a second node, a guest and Ceph"),
    pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}"),
]


@pytest.fixture(scope="module")
def ceph(cluster: Cluster) -> Iterator[NodesCeph]:
    """A Ceph on the nodes."""
    with ceph_of(cluster) as made:
        yield made


@pytest.fixture(scope="module")
def kubevirt(
    cluster: Cluster, deployment: Deployment, second: Deployment, ceph: NodesCeph
) -> Iterator[KubeVirt]:
    """KubeVirt with our plugin on both nodes, which have the pool."""
    made = KubeVirt(cluster, deployment, second)
    with (
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


def test_a_machine_with_a_claim_of_several_nodes_migrates(
    kubevirt: KubeVirt, ceph: NodesCeph
) -> None:
    """Its guest writes meanwhile, and all that it reads is verified."""
    cluster = kubevirt.cluster
    with cluster.applied(DATA), machine(kubevirt, WITH_DATA, boot=SHARED) as vm:
        agent = vm.start()
        here = vm.node
        for disk in ("sda", "sdb"):
            assert vendor(agent, disk) == "QEMU"
        assert census.luns(kubevirt.deployments[here]) == ()
        boot, data = sorted(("sda", "sdb"), key=lambda disk: size(agent, disk), reverse=True)
        assert size(agent, data) == DATA_MIB, "which reads as zeros"
        wait_event(cluster, "vm", "so that the machine can be migrated", vm.uid)
        written = write(agent, boot)
        io = VerifiedIo(agent, data, seed=SEED, threads=1, depth=8)
        migration = Migration(vm)
        migration.create_pod()
        migration.hand_over()
        migration.prepare_target()
        migrate_under_io(migration, io)
        migration.finish()
        assert (vm.node != here, vm.launcher.state()) == (True, "running")
        agent = io.guest = vm.agent()
        for _ in range(2):  # the first count may be of before
            io.goes_on(io.status().requests)
        assert read(agent, boot) == written
        written = write(agent, boot)
        assert read(agent, boot) == written
        ledger = io.finish()
        held = ceph.content(image_of(kubevirt, vm.node, "data"))
        wrong = [
            number
            for number, generation in enumerate(ledger)
            if held[number * 4096 : (number + 1) * 4096] != block(SEED, number, generation)
        ]
        assert not wrong, f"{len(wrong)} blocks are wrong, such as {wrong[:5]}"
        cluster.delete("virtualmachine", "vm", wait=False)
        vm.stop()


def migrate_under_io(migration: Migration, io: VerifiedIo) -> None:
    """Migrates so slowly that the guest's I/O is seen to go on meanwhile, then fast to the end."""
    compute, domain = migration.source.compute, migration.source.domain
    assert compute is not None
    with ThreadPoolExecutor(1) as pool:
        moved = pool.submit(migration.migrate, "--bandwidth", "1")
        try:

            def sends() -> bool:
                assert not moved.done(), moved.exception()
                return "Memory processed" in compute.virsh("domjobinfo", domain, check=False)

            until(sends, "memory to be sent")
            for _ in range(2):  # the first count may be of before
                io.goes_on(io.status().requests)
            assert not moved.done(), "it was to go on until the guest's I/O was seen"
        finally:
            compute.virsh("migrate-setspeed", domain, "10000", check=False)
            compute.virsh("migrate-setmaxdowntime", domain, "5000", check=False)
        moved.result()


def image_of(kubevirt: KubeVirt, node: str, claim: str) -> str:
    """Returns the name of a claim's image in the pool."""
    name = kubevirt.cluster.get("pvc", claim)["spec"]["volumeName"]
    handle = kubevirt.cluster.get("pv", name)["spec"]["csi"]["volumeHandle"]
    return Volumes(kubevirt.deployments[node].client).volume(handle).name


def test_a_claim_of_one_node_at_a_time_is_a_lun(kubevirt: KubeVirt) -> None:
    with machine(kubevirt, boot=ALONE) as vm:
        agent = vm.start()
        assert vendor(agent, "sda") == OURS
        assert len(census.luns(kubevirt.deployments[vm.node])) == 1
        kubevirt.cluster.delete("virtualmachine", "vm", wait=False)
        vm.stop()
