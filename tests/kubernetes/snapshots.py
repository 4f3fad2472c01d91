"""VolumeSnapshots on a test cluster: their definitions, and the snapshot-controller in a pod.

The sidecar, csi-snapshotter, is one of our DaemonSet's (`driver.py`). All three are upstream's own,
built by `tools`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kubernetes.cluster import NODE, Cluster
from tests.kubernetes.images import image
from tests.kubernetes.sandbox import SandboxError
from tests.support.examples import used
from tests.support.wait import until

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples/kubernetes"
PROGRAM = "snapshot-controller"
NAMESPACE = "kube-system"
READY_DEADLINE_S = 90.0


def define(cluster: Cluster) -> None:
    """Has the API server know VolumeSnapshots and groups of them."""
    for crd in cluster.tools.crds():
        cluster.apply(crd)
    for crd in cluster.tools.crds():
        group, _, plural = crd.stem.partition("_")
        cluster.wait(f"crd/{plural}.{group}", "condition=Established")


@contextmanager
def controller(cluster: Cluster) -> Iterator[None]:
    """Runs the snapshot-controller of the examples, and has our VolumeSnapshotClass."""
    manifest = EXAMPLES / "snapshot-controller.yaml"
    named = re.search(rf"image: (\S+/{PROGRAM}:\S+)", manifest.read_text())
    assert named, f"{manifest} has no image of {PROGRAM}"
    program = cluster.tools.path(PROGRAM)
    entry = {"Entrypoint": [f"/{PROGRAM}"]}
    for node in cluster.nodes:  # its pod runs on any
        file = node.folder / f"{PROGRAM}.tar"
        node.import_image(image(file, [named[1]], {PROGRAM: program}, {}, entry))
    cluster.apply(manifest)
    cluster.apply(EXAMPLES / "snapshotclass.yaml")
    try:
        until(lambda: _is_ready(cluster), _words(cluster), deadline_s=READY_DEADLINE_S)
        yield
    finally:
        cluster.kubectl("delete", "-f", manifest, "-f", EXAMPLES / "snapshotclass.yaml")


def of_groups(*kinds: str) -> str:
    """Returns the objects of the example of groups that are of these kinds, for the first node."""
    text = used(EXAMPLES / "groupsnapshots.yaml").read_text().replace("node-1", NODE)
    every = text.split("\n---\n")
    return "\n---\n".join(one for one in every if any(f"\nkind: {kind}\n" in one for kind in kinds))


@contextmanager
def groups(cluster: Cluster) -> Iterator[None]:
    """Has the policy that groups of snapshots need, and the first node's class of them."""
    setting = of_groups(
        "MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding", "VolumeGroupSnapshotClass"
    )
    cluster.apply(setting)
    try:
        yield
    finally:
        cluster.kubectl("delete", "-f", "-", stdin=setting)


def _is_ready(cluster: Cluster) -> bool:
    pods = cluster.items("pod", "-n", NAMESPACE, "-l", f"app={PROGRAM}")
    conditions = pods[0]["status"].get("conditions", []) if len(pods) == 1 else []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _words(cluster: Cluster) -> Any:
    where = ("-n", NAMESPACE, "-l", f"app={PROGRAM}")

    def said() -> str:
        told = cluster.kubectl("describe", "pod", *where, check=False)
        return f"a ready {PROGRAM}:\n{told[-3000:]}{cluster.kubectl('logs', *where, check=False)}"

    return said


def wait_ready(cluster: Cluster, name: str) -> dict[str, Any]:
    """Waits until a VolumeSnapshot is ready to use; returns its content."""
    try:
        cluster.wait(f"volumesnapshot/{name}", "jsonpath={.status.readyToUse}=True")
    except SandboxError as error:
        told = cluster.kubectl("describe", "volumesnapshotcontents", check=False)
        raise SandboxError(f"{error}\n{told[-3000:]}") from None
    status = cluster.get("volumesnapshot", name)["status"]
    return dict(cluster.get("volumesnapshotcontent", status["boundVolumeSnapshotContentName"]))
