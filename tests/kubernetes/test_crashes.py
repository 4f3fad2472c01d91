"""Killed: the driver in the middle of each operation, and the target. It converges.

The driver of these tests ends by SIGKILL at a step that a test names (tests/support/killed.py):
with half of the operation done, or all of it and nobody told. It comes back as kubelet would start
it again, the operation ends well by itself, and nothing is left behind.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.cluster import NODE, Cluster
from tests.kubernetes.driver import Deployment
from tests.kubernetes.killed_driver import CSI, fuse, killed
from tests.kubernetes.kubevirt.census import luns
from tests.kubernetes.left import CONVERGE_S, wait_nothing
from tests.kubernetes.sandbox import SandboxError
from tests.kubernetes.test_volumes import (
    MIB,
    SOCKET,
    claim,
    device_bytes,
    documents_of,
    example,
    grow,
    read,
    write,
)
from tests.support.wait import until

__all__ = ["fuse"]

HELPER = "virtlun-csi-helper"
PUBLISH = "NodePublishVolume"
POD = documents_of(example("pod-filesystem"))[1]
RAW = documents_of(example("pod-block"))[1]
FILES = claim("data", "virtlun-immediate", "320Mi", "Filesystem")
DISK = documents_of(example("pod-block"))[0]


@pytest.fixture(autouse=True)
def nothing_left(deployment: Deployment, fuse: Path) -> Iterator[None]:
    """Nothing is there before a test, nothing after it, and everything runs."""
    deployment.wait_ready()
    wait_nothing(deployment)
    yield
    fuse.unlink(missing_ok=True)
    deployment.wait_ready()
    deployment.sweep()
    wait_nothing(deployment, CONVERGE_S)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "point",
    [
        pytest.param("before bdev_lvol_create", marks=pytest.mark.nightly),
        "after bdev_lvol_create",
    ],
)
def test_killed_while_it_creates(
    cluster: Cluster, deployment: Deployment, fuse: Path, point: str
) -> None:
    """A claim whose node is chosen: for others the provisioner asks for capacity first."""
    node = f"annotations: {{volume.kubernetes.io/selected-node: {NODE}}}"
    placed = claim("disk", "virtlun-thick").replace("{name: disk}", f"{{name: disk, {node}}}")
    with killed(deployment, fuse, point):
        cluster.apply(placed)
    cluster.wait_phase("pvc/disk", "Bound", CONVERGE_S)
    assert len(deployment.volumes.volumes()) == 1
    cluster.delete("pvc", "disk")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "point",
    [
        pytest.param("before loop attach", marks=pytest.mark.nightly),
        pytest.param("before mkfs.xfs", marks=pytest.mark.nightly),
        "after mkfs.xfs",
    ],
)
def test_killed_while_it_stages(
    cluster: Cluster, deployment: Deployment, fuse: Path, point: str
) -> None:
    with cluster.applied(FILES):
        cluster.wait_phase("pvc/data", "Bound")
        with killed(deployment, fuse, point):
            cluster.apply(POD)
        cluster.wait("pod/writer", "condition=Ready", CONVERGE_S)
        assert cluster.execute("writer", "cat", "/data/started")
        assert len(deployment.census().exports) == len(deployment.census().loops) == 1
        cluster.delete("pod", "writer")


@pytest.mark.nightly
def test_without_its_helper_a_pod_waits(cluster: Cluster, deployment: Deployment) -> None:
    """As after a crash of that: what is mounted stays, and what is to be is once it is back."""
    with cluster.applied(FILES):
        cluster.wait_phase("pvc/data", "Bound")
        with deployment.without(HELPER):
            cluster.apply(POD)
            why = "virtlun-csi-helper does not answer"
            until(lambda: why in cluster.kubectl("describe", "pod", "writer"), "the event")
            assert deployment.http("readyz") == ""  # refused
        cluster.wait("pod/writer", "condition=Ready", CONVERGE_S)
        deployment.kill(HELPER)
        assert cluster.execute("writer", "cat", "/data/started")
        cluster.delete("pod", "writer")


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["before mount --bind", "after mount --bind"])
def test_killed_while_it_publishes(
    cluster: Cluster, deployment: Deployment, fuse: Path, point: str
) -> None:
    """A second pod of the node: the volume is staged, and has only to be published."""
    second = POD.replace("writer", "second").replace("/data/started", "/data/again")
    with cluster.applied(FILES), cluster.applied(POD):
        cluster.wait("pod/writer", "condition=Ready")
        with killed(deployment, fuse, point):
            cluster.apply(second)
        cluster.wait("pod/second", "condition=Ready", CONVERGE_S)
        assert cluster.execute("second", "cat", "/data/started")
        assert cluster.execute("writer", "cat", "/data/again")
        cluster.delete("pod", "second")


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["after bdev_lvol_resize", "before loop grow"])
def test_killed_while_it_expands(
    cluster: Cluster, deployment: Deployment, fuse: Path, point: str
) -> None:
    """Of the second growth: csi-resizer ends at its first call if there is a new driver."""
    with cluster.applied(DISK), cluster.applied(RAW):
        cluster.wait("pod/raw", "condition=Ready")
        write(cluster, "raw", "before")
        grow(cluster, "disk", "80Mi")
        cluster.wait("pvc/disk", "jsonpath={.status.capacity.storage}=80Mi", CONVERGE_S)
        with killed(deployment, fuse, point):
            grow(cluster, "disk", "128Mi")
        cluster.wait("pvc/disk", "jsonpath={.status.capacity.storage}=128Mi", CONVERGE_S)
        assert device_bytes(cluster, "raw") == 128 * MIB
        assert read(cluster, "raw") == "before"


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["after loop release", "after bdev_lvol_delete"])
def test_killed_while_it_deletes(
    cluster: Cluster, deployment: Deployment, fuse: Path, point: str
) -> None:
    with cluster.applied(FILES), cluster.applied(POD):
        cluster.wait("pod/writer", "condition=Ready")
        with killed(deployment, fuse, point):
            cluster.delete("pod", "writer", wait=False)
            cluster.delete("pvc", "data", wait=False)
        wait_nothing(deployment, CONVERGE_S)


@pytest.mark.nightly
def test_killed_while_it_makes_and_removes_a_controller(
    cluster: Cluster, deployment: Deployment, fuse: Path
) -> None:
    pod = POD.replace("date > /data/started && sync && ", "")
    with cluster.applied(SOCKET), cluster.applied(claim("data", "socket", mode="Filesystem")):
        cluster.wait_phase("pvc/data", "Bound")
        with killed(deployment, fuse, "after vhost_create_scsi_controller"):
            cluster.apply(pod)
        cluster.wait("pod/writer", "condition=Ready", CONVERGE_S)
        cluster.execute("writer", "test", "-S", "/data/vhost.sock")
        assert len(luns(deployment)) == 1
        with killed(deployment, fuse, "after vhost_delete_controller"):
            cluster.delete("pod", "writer", wait=False)
            cluster.delete("pvc", "data", wait=False)
        wait_nothing(deployment, CONVERGE_S)


def calls(deployment: Deployment, since: int) -> list[dict[str, Any]]:
    """Returns what the driver's log has of calls since a place in it."""
    text = deployment.parts[CSI].process.log.read_bytes()[since:].decode(errors="replace")
    whole = text.rpartition("\n")[0].splitlines()
    found = (json.loads(line) for line in whole if line.startswith("{"))
    return [each for each in found if "code" in each]


@pytest.mark.nightly
def test_pods_do_not_notice_a_new_driver_or_kubelet(
    cluster: Cluster, deployment: Deployment
) -> None:
    """The new kubelet publishes what they have once more, also what is for one pod."""
    sole = DISK.replace("ReadWriteOnce", "ReadWriteOncePod")
    with (
        cluster.applied(FILES),
        cluster.applied(POD),
        cluster.applied(sole),
        cluster.applied(RAW),
    ):
        cluster.wait("pod/writer", "condition=Ready")
        cluster.wait("pod/raw", "condition=Ready")
        write_once = "echo {0} > /data/{0} && sync && cat /data/{0}"
        assert deployment.stop(CSI) == 0
        assert cluster.shell("writer", write_once.format("without")) == "without\n"
        deployment.wait_ready()
        since = deployment.parts[CSI].process.log.stat().st_size
        cluster.restart_kubelet()
        cluster.wait("pod/writer", "condition=Ready")
        script = write_once.format("after")
        until(
            lambda: cluster.shell("writer", script, check=False) == "after\n",
            "the new kubelet to know the pod",
        )
        for pod in ("writer", "raw"):
            again = (PUBLISH, f"default/{pod}")
            until(
                lambda again=again: any(  # type: ignore[misc]
                    (each["method"], each.get("pod")) == again for each in calls(deployment, since)
                ),
                f"the volume of {pod} to be published again",
            )
            containers = cluster.get("pod", pod)["status"]["containerStatuses"]
            assert [each["restartCount"] for each in containers] == [0]
        published = [each for each in calls(deployment, since) if each["method"] == PUBLISH]
        assert {each["code"] for each in published} == {"OK"}


def test_a_running_pod_waits_while_its_target_is_away(
    cluster: Cluster, deployment: Deployment
) -> None:
    with cluster.applied(DISK), cluster.applied(RAW):
        cluster.wait("pod/raw", "condition=Ready")
        write(cluster, "raw", "safe")
        with deployment.without("virtlun-target"):
            writing = threading.Thread(target=write, args=(cluster, "raw", "late"))
            writing.start()
            writing.join(1.0)
            assert writing.is_alive()
        deployment.wait_ready()
        writing.join(CONVERGE_S)
        assert not writing.is_alive()
        assert read(cluster, "raw") == "late"


@pytest.mark.nightly
def test_a_target_that_dies_with_the_holder_gives_errors_and_a_new_pod_gets_the_data_again(
    cluster: Cluster, deployment: Deployment
) -> None:
    """What a loop device cannot: give a pod that was there before its volume back."""
    with cluster.applied(DISK), cluster.applied(RAW):
        cluster.wait("pod/raw", "condition=Ready")
        write(cluster, "raw", "safe")
        with (
            deployment.without("virtlun-target"),
            deployment.without("virtlun-holder"),
            pytest.raises(SandboxError, match="Input/output error"),
        ):
            write(cluster, "raw", "lost", at_mib=1)
        deployment.wait_ready()
        cluster.delete("pod", "raw")
        cluster.apply(RAW)
        cluster.wait("pod/raw", "condition=Ready", CONVERGE_S)
        assert read(cluster, "raw") == "safe"


@pytest.mark.nightly
def test_a_file_system_is_whole_after_its_target_died(
    cluster: Cluster, deployment: Deployment
) -> None:
    with cluster.applied(FILES), cluster.applied(POD):
        cluster.wait("pod/writer", "condition=Ready")
        cluster.shell("writer", "echo kept > /data/kept && sync")
        deployment.kill("virtlun-target")
        deployment.wait_ready()
        cluster.delete("pod", "writer")
        cluster.apply(POD)
        cluster.wait("pod/writer", "condition=Ready", CONVERGE_S)
        assert cluster.execute("writer", "cat", "/data/kept") == "kept\n"
