"""VolumeSnapshots, what is restored of them, and clones of claims, as users see them.

The real snapshot-controller tells the real csi-snapshotter of a volume's node to take them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kubernetes import snapshots
from tests.kubernetes.cluster import NODE, Cluster
from tests.kubernetes.driver import DRIVER, EXAMPLES, Deployment
from tests.kubernetes.test_volumes import claim, example, free_mib, read, volume_of, write
from tests.support.wait import until

SNAPSHOT = """\
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {{name: {name}}}
spec:
  volumeSnapshotClassName: virtlun
  source: {{persistentVolumeClaimName: {claim}}}
"""
KNOWN = """\
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotContent
metadata:
  name: known
  labels: {{snapshot.storage.kubernetes.io/managed-by: {node}}}
spec:
  driver: csi.virtlun.dev
  deletionPolicy: Delete
  volumeSnapshotClassName: virtlun
  source: {{snapshotHandle: {handle}}}
  volumeSnapshotRef: {{name: known, namespace: default}}
---
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {{name: known}}
spec:
  volumeSnapshotClassName: virtlun
  source: {{volumeSnapshotContentName: known}}
"""
SOURCE = "\n  dataSource: {{apiGroup: {group}, kind: {kind}, name: {name}}}\n"
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def controller(cluster: Cluster, deployment: Deployment) -> Iterator[None]:
    """The snapshot-controller, beside our driver."""
    assert deployment.cluster is cluster
    with snapshots.controller(cluster):
        yield


@pytest.fixture(autouse=True)
def nothing_left(cluster: Cluster, deployment: Deployment) -> Iterator[None]:
    """Nothing is there before a test, and nothing after it."""
    deployment.wait_clean()
    yield
    cluster.api.delete_all("volumesnapshot")
    deployment.sweep()
    # The sidecar waits longer each time, up to minutes, after a driver that died.
    until(
        lambda: not cluster.items("volumesnapshotcontent"),
        "no VolumeSnapshotContent",
        deadline_s=180,
    )
    deployment.wait_clean()


def of_snapshot(manifest: str, name: str) -> str:
    """Returns a claim's manifest with a snapshot as what it begins with."""
    group = "snapshot.storage.k8s.io"
    return manifest.rstrip() + SOURCE.format(group=group, kind="VolumeSnapshot", name=name)


def of_claim(manifest: str, name: str) -> str:
    """Returns a claim's manifest with another claim as what it begins with."""
    return manifest.rstrip() + SOURCE.format(group='""', kind="PersistentVolumeClaim", name=name)


def put(cluster: Cluster, pod: str, path: str, text: str) -> None:
    """Writes a file in a pod, durably."""
    cluster.shell(pod, f"printf %s {shlex.quote(text)} > {path} && sync")


def handle_of(cluster: Cluster, name: str) -> str:
    """Returns the handle of a claim's volume."""
    return str(volume_of(cluster, name)["spec"]["csi"]["volumeHandle"])


def test_a_snapshot_is_restored_and_a_claim_cloned_beside_it(
    cluster: Cluster, deployment: Deployment
) -> None:
    cluster.apply(EXAMPLES / "pod-filesystem.yaml")
    cluster.wait("pod/writer", "condition=Ready")
    put(cluster, "writer", "/data/file", "before")
    cluster.apply(EXAMPLES / "snapshot.yaml")
    content = snapshots.wait_ready(cluster, "data")
    assert content["spec"]["driver"] == DRIVER
    label = "snapshot.storage.kubernetes.io/managed-by"
    assert content["metadata"]["labels"][label] == NODE
    assert content["status"]["restoreSize"] == 400 * MIB
    put(cluster, "writer", "/data/file", "after")
    cluster.apply(EXAMPLES / "pod-restored.yaml")
    cluster.wait("pod/reader", "condition=Ready")
    assert cluster.execute("reader", "cat", "/restored/file") == "before"
    assert cluster.execute("reader", "cat", "/cloned/file") == "after"
    assert "xfs" in cluster.execute("reader", "grep", "/restored", "/proc/mounts")
    restored = int(cluster.execute("reader", "df", "-m", "/restored").splitlines()[-1].split()[1])
    assert free_mib(cluster, "writer") < 400 < restored <= 600
    volume = volume_of(cluster, "restored")
    assert volume["spec"]["capacity"]["storage"] == "600Mi"
    # Nothing that was made of it holds a snapshot or a claim back.
    cluster.delete("volumesnapshot", "data")
    until(lambda: not cluster.items("volumesnapshotcontent"), "no VolumeSnapshotContent")
    cluster.delete("pod", "writer")
    cluster.delete("pvc", "data")
    for path, text in (("/restored/file", "before"), ("/cloned/file", "after")):
        assert cluster.execute("reader", "cat", path) == text
        put(cluster, "reader", path, "its own")
        assert cluster.execute("reader", "cat", path) == "its own"
    claims = {handle_of(cluster, name) for name in ("restored", "cloned")}

    def kept() -> set[str]:
        return {volume.uuid for volume in deployment.volumes.volumes() if not volume.snapshot}

    until(lambda: kept() == claims, lambda: f"{claims} alone: {kept()}", deadline_s=180)


@pytest.mark.nightly
def test_a_snapshot_outlives_its_claim(cluster: Cluster, deployment: Deployment) -> None:
    claimed, pod = example("pod-block").split("\n---\n")
    cluster.apply(example("pod-block"))
    cluster.wait("pod/raw", "condition=Ready")
    write(cluster, "raw", "kept", at_mib=1)
    cluster.apply(SNAPSHOT.format(name="kept", claim="disk"))
    content = snapshots.wait_ready(cluster, "kept")
    cluster.delete("pod", "raw")
    cluster.delete("pvc", "disk")
    until(
        lambda: (
            [each.uuid for each in deployment.volumes.volumes()]
            == [content["status"]["snapshotHandle"]]
        ),
        "the snapshot alone",
    )
    cluster.apply(of_snapshot(claimed, "kept"))
    cluster.apply(pod)
    cluster.wait("pod/raw", "condition=Ready")
    assert read(cluster, "raw", at_mib=1) == "kept"
    made = deployment.volumes.volume(handle_of(cluster, "disk"))
    assert (made.thin, made.allocated) == (False, 64 * MIB)  # of a class without `thin`


def test_a_snapshot_that_is_there_is_taken_over_by_who_names_it(
    cluster: Cluster, deployment: Deployment
) -> None:
    """As after the restore of a cluster; the node is named by whoever writes the object."""
    cluster.apply(claim("source", "virtlun-immediate", "64Mi"))
    cluster.wait_phase("pvc/source", "Bound")
    cluster.apply(SNAPSHOT.format(name="taken", claim="source"))
    before = snapshots.wait_ready(cluster, "taken")
    name, handle = before["metadata"]["name"], before["status"]["snapshotHandle"]
    cluster.patch("volumesnapshotcontent", name, {"spec": {"deletionPolicy": "Retain"}})
    cluster.delete("volumesnapshot", "taken")
    cluster.delete("volumesnapshotcontent", name)
    assert handle in [each.uuid for each in deployment.volumes.volumes()]
    cluster.apply(KNOWN.format(node=NODE, handle=handle))
    after = snapshots.wait_ready(cluster, "known")
    assert after["status"]["snapshotHandle"] == handle
    assert after["status"]["restoreSize"] == 64 * MIB
    assert after["status"]["creationTime"] == before["status"]["creationTime"]
    cluster.apply(of_snapshot(claim("restored", "virtlun-immediate", "64Mi"), "known"))
    cluster.wait_phase("pvc/restored", "Bound")


@pytest.mark.nightly
def test_a_claim_that_is_smaller_or_of_another_kind_is_told_why(cluster: Cluster) -> None:
    cluster.apply(claim("source", "virtlun-immediate", "400Mi"))
    cluster.wait_phase("pvc/source", "Bound")
    cluster.apply(SNAPSHOT.format(name="taken", claim="source"))
    snapshots.wait_ready(cluster, "taken")
    for manifest, word in (
        (of_snapshot(claim("bad", "virtlun-immediate", "300Mi"), "taken"), "less than the size"),
        (of_snapshot(claim("bad", "virtlun-block", "400Mi"), "taken"), "cannot have blocks of"),
    ):
        with cluster.applied(manifest):
            wait_told(cluster, "bad", word)
        cluster.wait("pvc/bad", "delete")


def wait_told(cluster: Cluster, name: str, words: str) -> None:
    """Waits until the events of a claim say something."""

    def told() -> str:
        found = cluster.items("events", f"--field-selector=involvedObject.name={name}")
        return "\n".join(str(each["message"]) for each in found)

    until(lambda: words in told(), told)


@pytest.mark.nightly
def test_many_claims_are_restored_of_one_snapshot(cluster: Cluster) -> None:
    names = [f"copy-{number}" for number in range(10)]
    cluster.apply(claim("golden", "virtlun-immediate", "64Mi"))
    cluster.wait_phase("pvc/golden", "Bound")
    cluster.apply(SNAPSHOT.format(name="golden", claim="golden"))
    snapshots.wait_ready(cluster, "golden")
    many = [of_snapshot(claim(name, "virtlun-immediate", "64Mi"), "golden") for name in names]
    cluster.apply("---\n".join([*many, of_claim(claim("other", "virtlun-immediate"), "golden")]))
    for name in (*names, "other"):
        cluster.wait_phase(f"pvc/{name}", "Bound")


@pytest.mark.nightly
def test_a_driver_that_dies_while_it_takes_a_snapshot_takes_one(
    cluster: Cluster, deployment: Deployment
) -> None:
    # Of a name that was there before the controller may wait for minutes until it tries again.
    cluster.apply(claim("cut-off", "virtlun-immediate", "64Mi"))
    cluster.wait_phase("pvc/cut-off", "Bound")
    begun = deployment.asked("CreateSnapshot")
    cluster.apply(SNAPSHOT.format(name="cut-off", claim="cut-off"))
    until(begun, "the call", every_s=0.002, deadline_s=180)
    deployment.kill("virtlun-csi")
    deployment.wait_ready()
    content = snapshots.wait_ready(cluster, "cut-off")
    taken: list[Any] = [each for each in deployment.volumes.volumes() if each.snapshot]
    assert [each.uuid for each in taken] == [content["status"]["snapshotHandle"]]
