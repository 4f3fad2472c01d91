"""VolumeGroupSnapshots: claims under write, at one instant, by the real controller and sidecar.

The sidecar sees what has its node's label, which examples/kubernetes/groupsnapshots.yaml has the
API server set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kubernetes import snapshots
from tests.kubernetes.cluster import NODE, Cluster
from tests.kubernetes.driver import Deployment
from tests.kubernetes.sandbox import SandboxError
from tests.kubernetes.test_snapshots import of_snapshot
from tests.kubernetes.test_volumes import claim
from tests.support.wait import until

LABEL = "snapshot.storage.kubernetes.io/managed-by"
CLAIMS = ("first", "second")
POD = """\
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
    - name: shell
      image: busybox:stable
      imagePullPolicy: IfNotPresent
      command: [sh, -c, {command!r}]
      volumeMounts: [{mounts}]
  volumes: [{volumes}]
"""
WRITE = (
    "i=0; while :; do i=$((i+1)); for d in first second; do echo $i >/$d/new;"
    " mv /$d/new /$d/n; sync /$d/n; done; done"
)
"""Writes a number that grows to each in turn, durably."""


def pod(name: str, command: str, claims: dict[str, str]) -> str:
    """Returns a pod that has claims at the places that they are named by."""
    mounts = ", ".join(f"{{name: {at}, mountPath: /{at}}}" for at in claims)
    volumes = ", ".join(
        f"{{name: {at}, persistentVolumeClaim: {{claimName: {of}}}}}" for at, of in claims.items()
    )
    return POD.format(name=name, command=command, mounts=mounts, volumes=volumes)


@pytest.fixture(scope="module", autouse=True)
def controller(cluster: Cluster, deployment: Deployment) -> Iterator[None]:
    """The snapshot-controller, the policy and the class, beside our driver."""
    with snapshots.controller(cluster), snapshots.groups(cluster):
        yield


@pytest.fixture(autouse=True)
def nothing_left(cluster: Cluster, deployment: Deployment) -> Iterator[None]:
    """Nothing is there before a test, and nothing after it."""
    deployment.wait_clean()
    yield
    cluster.api.delete_all("volumegroupsnapshot")
    deployment.sweep()
    wait_gone(cluster, "volumegroupsnapshotcontent", "volumesnapshotcontent")
    deployment.wait_clean()


def wait_gone(cluster: Cluster, *kinds: str) -> None:
    """Waits until there are no objects of these kinds; the sidecar may wait a minute."""
    until(
        lambda: not any(cluster.items(kind) for kind in kinds),
        lambda: told(cluster),
        deadline_s=180,
    )


def told(cluster: Cluster) -> str:
    """Returns what Kubernetes says of groups of snapshots."""
    kinds = "volumegroupsnapshots,volumegroupsnapshotcontents,volumesnapshotcontents"
    return cluster.kubectl("describe", kinds, check=False)[-5000:]


def wait_ready(cluster: Cluster, name: str) -> dict[str, Any]:
    """Waits until a group is ready to use; returns its content."""
    try:
        cluster.wait(f"volumegroupsnapshot/{name}", "jsonpath={.status.readyToUse}=True")
    except SandboxError as error:
        raise SandboxError(f"{error}\n{told(cluster)}") from None
    status = cluster.get("volumegroupsnapshot", name)["status"]
    name = status["boundVolumeGroupSnapshotContentName"]
    return dict(cluster.get("volumegroupsnapshotcontent", name))


@pytest.mark.nightly
def test_two_claims_under_write_are_restored_as_of_one_instant(
    cluster: Cluster, deployment: Deployment
) -> None:
    for name in CLAIMS:
        cluster.apply(claim(name, "virtlun-thin", "400Mi", "Filesystem"))
        cluster.kubectl("label", "pvc", name, "app=database")
    cluster.apply(pod("writer", WRITE, {name: name for name in CLAIMS}))
    cluster.wait("pod/writer", "condition=Ready")
    until(lambda: cluster.execute("writer", "cat", "/second/n"), "it writes")
    cluster.apply(snapshots.of_groups("VolumeGroupSnapshot"))
    content = wait_ready(cluster, "database")
    assert content["metadata"]["labels"][LABEL] == NODE
    assert len(content["status"]["volumeSnapshotInfoList"]) == 2
    members = {
        each["spec"]["source"]["persistentVolumeClaimName"]: each["metadata"]["name"]
        for each in cluster.items("volumesnapshot")
        if each["metadata"]["ownerReferences"][0]["name"] == "database"
    }
    assert sorted(members) == sorted(CLAIMS)
    for name in CLAIMS:
        known = snapshots.wait_ready(cluster, members[name])
        assert known["metadata"]["labels"][LABEL] == NODE
        cluster.apply(
            of_snapshot(
                claim(f"{name}-again", "virtlun-thin", "400Mi", "Filesystem"), members[name]
            )
        )
    cluster.apply(pod("reader", "sleep 1000000", {name: f"{name}-again" for name in CLAIMS}))
    cluster.wait("pod/reader", "condition=Ready")
    first, second = (int(cluster.execute("reader", "cat", f"/{name}/n")) for name in CLAIMS)
    assert second > 0 and first - second in (0, 1), (first, second)
    later = int(cluster.execute("writer", "cat", "/second/n"))
    assert later > first
    cluster.delete("volumegroupsnapshot", "database")
    wait_gone(cluster, "volumegroupsnapshotcontent", "volumesnapshotcontent", "volumesnapshot")
    assert int(cluster.execute("reader", "cat", "/first/n")) == first
    kept = {volume.name for volume in deployment.volumes.volumes() if not volume.snapshot}
    assert len(kept) == 4


@pytest.mark.nightly
def test_claims_of_another_node_are_told_so(cluster: Cluster) -> None:
    """The class is that of a node which does not have them."""
    cluster.apply(claim("first", "virtlun-immediate", "64Mi"))
    cluster.wait_phase("pvc/first", "Bound")
    cluster.kubectl("label", "pvc", "first", "app=database")
    elsewhere = snapshots.of_groups("VolumeGroupSnapshotClass", "VolumeGroupSnapshot").replace(
        NODE, "other"
    )
    cluster.apply(elsewhere)
    try:
        until(lambda: "virtlun-other" in told(cluster) and "not found" in told(cluster), "why")
    finally:
        cluster.delete("volumegroupsnapshot", "database")
        cluster.kubectl("delete", "volumegroupsnapshotclass", "virtlun-other")
