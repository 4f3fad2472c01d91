"""Killed: the driver in the middle of each operation, and the target. It converges.

Two moments for each operation: `asked`, when the driver was called and waits for the target's first
answer (the target is frozen meanwhile, so this cannot be missed), and `begun`, as soon as the first
effect is seen. After each, the operation ends well by itself and nothing is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.kubernetes.cluster import NODE, Cluster
from tests.kubernetes.driver import Deployment
from tests.kubernetes.sandbox import SandboxError, wait_for
from tests.kubernetes.test_volumes import (
    MIB,
    claim,
    device_bytes,
    documents_of,
    example,
    grow,
    read,
    write,
)

MOMENTS = ("asked", "begun")
CONVERGE_S = 120.0
POD = documents_of(example("pod-filesystem"))[1]
RAW = documents_of(example("pod-block"))[1]
FILES = claim("data", "virtlun-immediate", "320Mi", "Filesystem")
DISK = documents_of(example("pod-block"))[0]


@pytest.fixture(autouse=True)
def nothing_left(deployment: Deployment) -> Iterator[None]:
    """Nothing is there before a test, nothing after it, and everything runs."""
    deployment.wait_ready()
    deployment.wait_clean()
    yield
    deployment.wait_ready()
    deployment.sweep()
    deployment.wait_clean(CONVERGE_S)


def crash(
    deployment: Deployment,
    moment: str,
    act: Callable[[], object],
    begun: Callable[[], object],
    method: str,
) -> None:
    """Acts, and kills the driver at this moment of what follows, in a call of `method`."""
    restarts = deployment.parts["virtlun-csi"].restarts
    if moment == "asked":
        asked = deployment.asked(method)
        with deployment.frozen("virtlun-target"):
            act()
            wait_for(asked, f"a call of {method}", seconds=60)
            deployment.kill("virtlun-csi")
    else:
        act()
        wait_for(begun, "the first effect", seconds=60, pause_s=0.002)
        deployment.kill("virtlun-csi")
    wait_for(lambda: deployment.parts["virtlun-csi"].restarts > restarts, "its restart", seconds=10)


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_it_creates(cluster: Cluster, deployment: Deployment, moment: str) -> None:
    """A claim whose node is chosen: for others the provisioner asks for capacity first."""
    node = f"annotations: {{volume.kubernetes.io/selected-node: {NODE}}}"
    placed = claim("disk", "virtlun-thick").replace("{name: disk}", f"{{name: disk, {node}}}")
    crash(
        deployment,
        moment,
        lambda: cluster.apply(placed),
        deployment.volumes.volumes,
        "CreateVolume",
    )
    cluster.wait_phase("pvc/disk", "Bound", CONVERGE_S)
    assert len(deployment.volumes.volumes()) == 1
    cluster.delete("pvc", "disk")


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_it_stages(cluster: Cluster, deployment: Deployment, moment: str) -> None:
    with cluster.applied(FILES):
        cluster.wait_phase("pvc/data", "Bound")
        crash(
            deployment, moment, lambda: cluster.apply(POD), deployment.box.loops, "NodeStageVolume"
        )
        cluster.wait("pod/writer", "condition=Ready", CONVERGE_S)
        assert cluster.execute("writer", "cat", "/data/started")
        assert len(deployment.census().exports) == 1
        cluster.delete("pod", "writer")


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_it_publishes(cluster: Cluster, deployment: Deployment, moment: str) -> None:
    """A second pod of the node: the volume is staged, and has only to be published."""
    second = POD.replace("writer", "second").replace("/data/started", "/data/again")

    def published() -> bool:
        places = deployment.box.mounts(cluster.kubelet_dir / "pods")
        return sum("kubernetes.io~csi" in place for place in places) > 1

    with cluster.applied(FILES), cluster.applied(POD):
        cluster.wait("pod/writer", "condition=Ready")
        crash(deployment, moment, lambda: cluster.apply(second), published, "NodePublishVolume")
        cluster.wait("pod/second", "condition=Ready", CONVERGE_S)
        assert cluster.execute("second", "cat", "/data/started")
        assert cluster.execute("writer", "cat", "/data/again")
        cluster.delete("pod", "second")


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_it_expands(cluster: Cluster, deployment: Deployment, moment: str) -> None:
    """Of the second growth: csi-resizer ends at its first call if there is a new driver."""

    def grown(to_mib: int = 128) -> bool:
        return deployment.volumes.volumes()[0].size == to_mib * MIB

    with cluster.applied(DISK), cluster.applied(RAW):
        cluster.wait("pod/raw", "condition=Ready")
        write(cluster, "raw", "before")
        grow(cluster, "disk", "80Mi")
        cluster.wait("pvc/disk", "jsonpath={.status.capacity.storage}=80Mi", CONVERGE_S)
        crash(
            deployment,
            moment,
            lambda: grow(cluster, "disk", "128Mi"),
            grown,
            "ControllerExpandVolume",
        )
        cluster.wait("pvc/disk", "jsonpath={.status.capacity.storage}=128Mi", CONVERGE_S)
        assert device_bytes(cluster, "raw") == 128 * MIB
        assert read(cluster, "raw") == "before"


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_it_deletes(cluster: Cluster, deployment: Deployment, moment: str) -> None:
    def delete() -> None:
        cluster.delete("pod", "writer", wait=False)
        cluster.delete("pvc", "data", wait=False)

    with cluster.applied(FILES), cluster.applied(POD):
        cluster.wait("pod/writer", "condition=Ready")
        # a pod that waits for its device cannot end
        written = "until test -s /data/started; do sleep 0.1; done; sync"
        cluster.execute("writer", "sh", "-c", written)
        crash(deployment, moment, delete, lambda: not deployment.box.loops(), "NodeUnstageVolume")
        deployment.wait_clean(CONVERGE_S)


def test_pods_do_not_notice_a_new_driver_or_kubelet(
    cluster: Cluster, deployment: Deployment
) -> None:
    with cluster.applied(FILES), cluster.applied(POD):
        cluster.wait("pod/writer", "condition=Ready")
        write_once = "echo {0} > /data/{0} && sync && cat /data/{0}"
        assert deployment.stop("virtlun-csi") == 0
        assert cluster.execute("writer", "sh", "-c", write_once.format("without")) == "without\n"
        deployment.wait_ready()
        cluster.restart_kubelet()
        cluster.wait("pod/writer", "condition=Ready")
        words = ("writer", "sh", "-c", write_once.format("after"))
        wait_for(
            lambda: cluster.execute(*words, check=False) == "after\n",
            "the new kubelet to know the pod",
            seconds=60,
        )
        assert cluster.get("pod", "writer")["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_dead_target_gives_errors_and_a_new_pod_gets_the_data_again(
    cluster: Cluster, deployment: Deployment
) -> None:
    """What a loop device cannot: give a pod that was there before its volume back."""
    with cluster.applied(DISK), cluster.applied(RAW):
        cluster.wait("pod/raw", "condition=Ready")
        write(cluster, "raw", "safe")
        with (
            deployment.without("virtlun-target"),
            pytest.raises(SandboxError, match="Input/output error"),
        ):
            write(cluster, "raw", "lost", at_mib=1)
        deployment.wait_ready()
        cluster.delete("pod", "raw")
        cluster.apply(RAW)
        cluster.wait("pod/raw", "condition=Ready", CONVERGE_S)
        assert read(cluster, "raw") == "safe"


def test_a_file_system_is_whole_after_its_target_died(
    cluster: Cluster, deployment: Deployment
) -> None:
    with cluster.applied(FILES), cluster.applied(POD):
        cluster.wait("pod/writer", "condition=Ready")
        cluster.execute("writer", "sh", "-c", "echo kept > /data/kept && sync")
        deployment.kill("virtlun-target")
        deployment.wait_ready()
        cluster.delete("pod", "writer")
        cluster.apply(POD)
        cluster.wait("pod/writer", "condition=Ready", CONVERGE_S)
        assert cluster.execute("writer", "cat", "/data/kept") == "kept\n"
