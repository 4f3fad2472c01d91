"""Two nodes: volumes come to their pods' node, or where there is room, and grow on any.

Each node has its own target, driver and provisioner; one csi-resizer is elected for both, and asks
the driver beside it about every volume.
"""

from __future__ import annotations

import pytest

from pydataplane.domain.limits import NONE
from tests.kubernetes import snapshots
from tests.kubernetes.account import NAMESPACE
from tests.kubernetes.cluster import NODE, Cluster
from tests.kubernetes.driver import LVSTORE, Deployment
from tests.kubernetes.events import wait_event
from tests.kubernetes.left import CONVERGE_S
from tests.kubernetes.test_limits import GOLD, SILVER, ask, has, limits
from tests.kubernetes.test_snapshots import SNAPSHOT, of_claim, of_snapshot
from tests.kubernetes.test_volumes import (
    MIB,
    TOPOLOGY,
    claim,
    conditions,
    device_bytes,
    example,
    free_mib,
    grow,
    quantity,
    read,
    volume_of,
    write,
)
from tests.support.wait import until

pytestmark = pytest.mark.usefixtures("nothing_left_on_both")
MANAGED_BY = "snapshot.storage.kubernetes.io/managed-by"
POD = """\
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  terminationGracePeriodSeconds: 1
  nodeSelector: {{{selector}}}
  containers:
    - name: shell
      image: busybox:stable
      imagePullPolicy: IfNotPresent
      command: [sleep, "1000000"]
      {use}
  volumes:
    - name: volume
      persistentVolumeClaim: {{claimName: {claim}}}
"""
DEVICE = "volumeDevices: [{name: volume, devicePath: /dev/virtlun}]"
FILES = "volumeMounts: [{name: volume, mountPath: /data}]"


def pod(name: str, node: str | None = None, *, of: str | None = None, use: str = DEVICE) -> str:
    """Returns the manifest of a pod with a claim (by default of its name), on a node or on any."""
    selector = f"kubernetes.io/hostname: {node}" if node else ""
    return POD.format(name=name, selector=selector, claim=of or name, use=use)


def both(name: str, node: str | None = None, size: str = "64Mi") -> str:
    """Returns the manifests of a claim for a block device that waits for its pod, and of that."""
    return f"{claim(name, 'virtlun-thick', size)}---\n{pod(name, node)}"


@pytest.fixture
def follower(deployment: Deployment, second: Deployment) -> Deployment:
    """The node whose csi-resizer is not the elected one."""
    until(lambda: deployment.leads() or second.leads(), "an election", every_s=0.2)
    return second if deployment.leads() else deployment


def node_of(cluster: Cluster, name: str) -> str:
    """Returns the node that a claim's volume is tied to."""
    [term] = volume_of(cluster, name)["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
    [found] = term["matchExpressions"]
    assert (found["key"], found["operator"]) == (TOPOLOGY, "In")
    [node] = found["values"]
    return str(node)


def names(deployment: Deployment) -> list[str]:
    """Returns the names of a target's volumes."""
    return [volume.name for volume in deployment.volumes.volumes()]


def free(cluster: Cluster, node: str) -> int:
    """Returns the bytes that a node's capacity object tells of the class that waits for its pod."""
    found = [
        quantity(each["capacity"])
        for each in cluster.items("csistoragecapacities", "-n", NAMESPACE)
        if each["storageClassName"] == "virtlun-thick"
        and each["nodeTopology"]["matchLabels"] == {TOPOLOGY: node}
    ]
    return found[0] if found else -1


@pytest.mark.nightly
def test_a_volume_is_made_on_the_node_of_its_first_pod(
    cluster: Cluster, deployment: Deployment, second: Deployment
) -> None:
    with cluster.applied(both("here", NODE)), cluster.applied(both("there", second.node.name)):
        for name, place, other in (("here", deployment, second), ("there", second, deployment)):
            cluster.wait(f"pod/{name}", "condition=Ready")
            assert node_of(cluster, name) == place.node.name
            volume = volume_of(cluster, name)["metadata"]["name"]
            assert volume in names(place)
            assert volume not in names(other)
            write(cluster, name, f"of {name}")
            assert read(cluster, name) == f"of {name}"


@pytest.mark.nightly
def test_snapshots_and_what_is_made_of_them_are_on_the_node_of_their_volume(
    cluster: Cluster, deployment: Deployment, second: Deployment
) -> None:
    """With late binding the pod has to be there; bound at once, the provisioners find it."""
    there = second.node.name
    with snapshots.controller(cluster), cluster.applied(both("there", there)):
        cluster.wait("pod/there", "condition=Ready")
        write(cluster, "there", "kept")
        with cluster.applied(SNAPSHOT.format(name="there", claim="there")):
            content = snapshots.wait_ready(cluster, "there")
            assert content["metadata"]["labels"][MANAGED_BY] == there
            assert content["status"]["snapshotHandle"] in uuids(second)
            wrong = of_snapshot(claim("wrong", "virtlun-thick"), "there")
            with cluster.applied(f"{wrong}---\n{pod('wrong', NODE)}"):
                wait_event(
                    cluster,
                    "wrong",
                    f"lvstore that node {NODE} does not have",
                    deadline_s=CONVERGE_S,
                )
            restored = of_snapshot(claim("restored", "virtlun-immediate"), "there")
            cloned = of_claim(claim("cloned", "virtlun-immediate"), "there")
            with cluster.applied(restored), cluster.applied(cloned):
                for name in ("restored", "cloned"):
                    cluster.wait_phase(f"pvc/{name}", "Bound", CONVERGE_S)
                    assert node_of(cluster, name) == there
                with cluster.applied(pod("reader", of="restored")):
                    cluster.wait("pod/reader", "condition=Ready")
                    assert read(cluster, "reader") == "kept"
        until(lambda: not cluster.items("volumesnapshotcontent"), "no VolumeSnapshotContent")
    assert not [volume for volume in deployment.volumes.volumes() if volume.snapshot]


def uuids(deployment: Deployment) -> list[str]:
    """Returns the UUIDs of a target's volumes."""
    return [volume.uuid for volume in deployment.volumes.volumes()]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "full",
    [pytest.param(0, id="first"), pytest.param(1, id="second", marks=pytest.mark.nightly)],
)
def test_a_volume_is_made_where_there_is_room(
    cluster: Cluster, deployment: Deployment, second: Deployment, full: int
) -> None:
    """By the scheduler for a claim with a pod, by the provisioners for one bound at once."""
    place, other = (deployment, second)[full], (second, deployment)[full]
    most = place.volumes.lvstore(LVSTORE).free // MIB - 128
    with cluster.applied(both("most", place.node.name, f"{most}Mi")):
        cluster.wait("pod/most", "condition=Ready")
        until(
            lambda: 0 <= free(cluster, place.node.name) < 129 * MIB,
            "the capacity object to say so",
            every_s=0.2,
        )
        with (
            cluster.applied(both("late", size="512Mi")),
            cluster.applied(claim("now", "virtlun-block", "512Mi")),
        ):
            cluster.wait("pod/late", "condition=Ready")
            cluster.wait_phase("pvc/now", "Bound")
            assert node_of(cluster, "late") == node_of(cluster, "now") == other.node.name
            assert len(names(place)) == 1
            assert len(names(other)) == 2


@pytest.mark.nightly
def test_a_pod_cannot_run_where_its_volume_is_not(cluster: Cluster, second: Deployment) -> None:
    with cluster.applied(both("first", NODE)):
        cluster.wait("pod/first", "condition=Ready")
        with cluster.applied(pod("elsewhere", second.node.name, of="first")):
            wait_event(cluster, "elsewhere", "didn't match PersistentVolume's node affinity")
            assert cluster.get("pod", "elsewhere")["status"]["phase"] == "Pending"
        assert second.census().lvols == ()


@pytest.mark.nightly
def test_claims_grow_on_the_node_whose_resizer_is_not_elected(
    cluster: Cluster, follower: Deployment
) -> None:
    files = claim("files", "virtlun-thin", "320Mi", "Filesystem")
    with (
        cluster.applied(both("disk", follower.node.name)),
        cluster.applied(files),
        cluster.applied(pod("files", follower.node.name, use=FILES)),
    ):
        for name in ("disk", "files"):
            cluster.wait(f"pod/{name}", "condition=Ready")
        write(cluster, "disk", "before")
        before = free_mib(cluster, "files")
        grow(cluster, "disk", "128Mi")
        grow(cluster, "files", "600Mi")
        cluster.wait("pvc/disk", "jsonpath={.status.capacity.storage}=128Mi")
        cluster.wait("pvc/files", "jsonpath={.status.capacity.storage}=600Mi")
        assert device_bytes(cluster, "disk") == 128 * MIB
        assert read(cluster, "disk") == "before"
        write(cluster, "disk", "after", at_mib=127)
        assert free_mib(cluster, "files") > before + 200
        assert not follower.leads()


@pytest.mark.nightly
def test_a_claim_that_no_pod_uses_grows_on_any_node(
    cluster: Cluster, deployment: Deployment, second: Deployment
) -> None:
    """At once where the elected resizer is, elsewhere as soon as a pod comes."""
    with cluster.applied(both("here", NODE)), cluster.applied(both("there", second.node.name)):
        for name in ("here", "there"):
            cluster.wait(f"pod/{name}", "condition=Ready")
        cluster.delete("pod", "here", "there")
        for name in ("here", "there"):
            grow(cluster, name, "128Mi")
        leading, waiting = ("here", "there") if deployment.leads() else ("there", "here")
        cluster.wait(f"pvc/{leading}", "jsonpath={.status.capacity.storage}=128Mi")
        cluster.wait(f"pvc/{waiting}", "condition=FileSystemResizePending")
        assert cluster.get("pvc", waiting)["status"]["capacity"]["storage"] == "64Mi"
        for name in ("here", "there"):
            cluster.apply(pod(name))
            cluster.wait(f"pod/{name}", "condition=Ready")
            cluster.wait(f"pvc/{name}", "jsonpath={.status.capacity.storage}=128Mi")
            assert device_bytes(cluster, name) == 128 * MIB


@pytest.mark.nightly
def test_growth_without_room_on_another_node_says_why_and_goes_on_when_there_is(
    cluster: Cluster, follower: Deployment
) -> None:
    most = follower.volumes.lvstore(LVSTORE).free // MIB - 256
    with (
        cluster.applied(both("most", follower.node.name, f"{most}Mi")),
        cluster.applied(both("grows", follower.node.name)),
    ):
        for name in ("most", "grows"):
            cluster.wait(f"pod/{name}", "condition=Ready")
        grow(cluster, "grows", "512Mi")
        said = f"cannot grow from {64 * MIB} to {512 * MIB} bytes: lvstore {LVSTORE}"
        until(
            lambda: said in conditions(cluster, "grows"),
            f"a condition of the claim with: {said}",
            every_s=0.2,
        )
        assert device_bytes(cluster, "grows") == 64 * MIB
        cluster.delete("pod", "most")
        cluster.delete("pvc", "most")
        cluster.wait("pvc/grows", "jsonpath={.status.capacity.storage}=512Mi", CONVERGE_S)
        assert device_bytes(cluster, "grows") == 512 * MIB


@pytest.mark.nightly
def test_a_volume_is_limited_on_the_node_whose_resizer_is_not_elected(
    cluster: Cluster, follower: Deployment
) -> None:
    """At once, and as soon as its driver is back; over the end of target and driver."""
    there = both("there", follower.node.name)
    with cluster.applied(example("volumeattributesclasses")), cluster.applied(there):
        cluster.wait("pod/there", "condition=Ready")
        assert limits(follower, "there") == NONE
        ask(cluster, "there", "virtlun-silver")
        has(cluster, "there", "virtlun-silver")
        until(lambda: limits(follower, "there") == SILVER, "the limits of the class")
        write(cluster, "there", "limited")
        follower.kill("virtlun-target")
        follower.wait_ready()
        assert limits(follower, "there") == SILVER
        with follower.without("virtlun-csi"):
            ask(cluster, "there", "virtlun-gold")
            has(cluster, "there", "virtlun-gold")
            assert limits(follower, "there") == SILVER
        until(lambda: limits(follower, "there") == GOLD, "the limits of the class", CONVERGE_S)
        assert read(cluster, "there") == "limited"
        assert not follower.leads()


@pytest.mark.nightly
def test_a_dead_driver_of_one_node_leaves_the_other_at_work(
    cluster: Cluster, deployment: Deployment, second: Deployment
) -> None:
    with cluster.applied(both("there", second.node.name)):
        cluster.wait("pod/there", "condition=Ready")
        with second.without("virtlun-csi"):
            for manifest in (
                both("late", second.node.name),
                both("here", NODE),
                claim("now", "virtlun-block"),
            ):
                cluster.apply(manifest)
            cluster.wait("pod/here", "condition=Ready")
            cluster.wait_phase("pvc/now", "Bound")
            assert node_of(cluster, "now") == NODE
            write(cluster, "there", "goes on")
            assert read(cluster, "there") == "goes on"
            assert cluster.get("pod", "late")["status"]["phase"] == "Pending"
        cluster.wait("pod/late", "condition=Ready", CONVERGE_S)
        assert len(names(deployment)) == 2
