"""What the credentials of one node reach on a real API server, in the hands of who took it over."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from csi import LVSTORE_KEY, RECEIVED_KEY
from tests.kubernetes import snapshots
from tests.kubernetes.account import NAMESPACE, make_pod, token
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.driver import DRIVER, EXAMPLES, LEASE, Deployment
from tests.kubernetes.sandbox import SandboxError
from tests.support.wait import until

#: A program: sends a merge patch, and says the answer's code and text.
PATCH = """\
import ssl, sys, urllib.error, urllib.request
path, token, ca, change = sys.argv[1:]
words = {"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"}
request = urllib.request.Request(
    f"https://127.0.0.1{path}", change.encode(), words, method="PATCH"
)
try:
    with urllib.request.urlopen(request, context=ssl.create_default_context(cafile=ca)) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
NODE_KEY = "csi.virtlun.dev/node"
POOL_KEY = "csi.virtlun.dev/pool-"
FINALIZER = "virtlun.dev/lun"
MANAGED_BY = "snapshot.storage.kubernetes.io/managed-by"
PROVISIONER = "volume.kubernetes.io/storage-provisioner"
SELECTED = "volume.kubernetes.io/selected-node"
#: Whose owner does not exist is collected as garbage.
OWNED = {
    "metadata": {
        "ownerReferences": [
            {"apiVersion": "v1", "kind": "ConfigMap", "name": "nobody", "uid": "0-0-0-0"}
        ]
    }
}
NO_OWNER = "gives no object an owner"


class Node:
    """Who has the account's token of a pod or a node, or (no words) one that tells neither."""

    def __init__(self, cluster: Cluster, *bound: str) -> None:
        self.cluster = cluster
        self.token = token(cluster, *bound)

    def does(self, *words: str, stdin: str = "") -> str:
        """Runs kubectl with the token."""
        return self.cluster.kubectl(f"--token={self.token}", *words, stdin=stdin)

    def may_not(self, word: str, *words: str, stdin: str = "") -> None:
        """Runs kubectl, which the server is to refuse with this word."""
        with pytest.raises(SandboxError, match=word):
            self.does(*words, stdin=stdin)

    def may_not_patch(self, word: str, path: str, change: dict[str, Any]) -> None:
        """Sends a change to a path, which kubectl would ask for first; it is to be refused."""
        said = self.sends(path, change)
        assert said.startswith("403 "), said
        assert word in said

    def sends(self, path: str, change: dict[str, Any]) -> str:
        """Sends a change to a path; returns the answer's code and text."""
        ca = str(self.cluster.pki.ca)
        words = (sys.executable, "-c", PATCH, path, self.token, ca, json.dumps(change))
        return self.cluster.box.run(*words).stdout

    def patch(self, what: str, change: dict[str, Any], *more: str) -> tuple[str, ...]:
        """Returns kubectl's words for a change."""
        return ("patch", *what.split("/"), "--type=merge", "-p", json.dumps(change), *more)


@pytest.fixture(scope="module")
def account(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster with the driver's account and what it may do, without the driver."""
    cluster.apply(EXAMPLES / "rbac.yaml")
    cluster.apply(EXAMPLES / "node-policy.yaml")
    yield cluster
    cluster.kubectl("delete", "pv", "--all", "--wait=false")
    cluster.kubectl("delete", "-f", EXAMPLES / "node-policy.yaml")


@pytest.fixture(scope="module")
def hostile(account: Cluster) -> Node:
    """Whoever has taken over the node; waits until the server holds to the policies."""
    node = Node(account, "Node", account.nodes[0].name)

    def refuses() -> bool:
        # The server has the policies in the order of their file: of the last without a CRD.
        made = capacity("early", "other")
        try:
            node.does("create", "--dry-run=server", "-f", "-", stdin=made)
        except SandboxError as error:
            return "its own capacity only" in str(error)
        return False

    until(refuses, "the server holds to the policies")
    return node


def volume(
    name: str, node: str | None, driver: str = DRIVER, key: str = NODE_KEY, handle: str = ""
) -> str:
    """Returns a volume of a node, or of whichever has `key` with that value."""
    requirement = {"key": key, "operator": "In", "values": [node]}
    affinity = {"required": {"nodeSelectorTerms": [{"matchExpressions": [requirement]}]}}
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "persistentVolumeReclaimPolicy": "Delete",
        "storageClassName": "none",
        "csi": {"driver": driver, "volumeHandle": handle or name},
        **({"nodeAffinity": affinity} if node else {}),
    }
    meta = {"name": name}
    return json.dumps(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": meta, "spec": spec}
    )


def test_a_node_makes_and_deletes_its_own_volumes_alone(hostile: Node) -> None:
    cluster, here = hostile.cluster, hostile.cluster.nodes[0].name
    for name, node, driver in (
        ("elsewhere", "other", DRIVER),
        ("anywhere", None, DRIVER),
        ("theirs", here, "other.example.org"),
    ):
        hostile.may_not(
            "ValidatingAdmissionPolicy", "create", "-f", "-", stdin=volume(name, node, driver)
        )
    cluster.kubectl("create", "-f", "-", stdin=volume("victim", "other"))
    hostile.may_not("is not of node", "delete", "pv", "victim")
    hostile.does("create", "-f", "-", stdin=volume("mine", here))
    hostile.does("delete", "pv", "mine")


@pytest.mark.nightly
def test_every_node_makes_and_deletes_volumes_of_pools_and_no_others_as_such(
    hostile: Node,
) -> None:
    key = f"{POOL_KEY}3f1e5a0c-77d2-5c11-8a4b-0123456789ab"
    of_pool, of_another = (
        f"{digits}-8c34-8590-9fe22618f4ff" for digits in ("3f1e5a0c-77d2", "3f1e5a0c-77d3")
    )
    made = volume("of-pool", "true", key=key, handle=of_pool)
    hostile.does("create", "-f", "-", stdin=made)
    hostile.does("delete", "pv", "of-pool", "--wait=false")
    for name, place, handle in (
        ("lvol", key, of_another),
        ("key", f"{POOL_KEY}x", of_pool),
        ("named", NODE_KEY, of_pool),
    ):
        wrong = volume(name, "true", key=place, handle=handle)
        hostile.may_not("denied", "create", "-f", "-", stdin=wrong)


@pytest.mark.nightly
def test_a_node_redirects_no_volume_but_notes_growth(hostile: Node) -> None:
    cluster, here = hostile.cluster, hostile.cluster.nodes[0].name
    for name, node in (("far", "other"), ("near", here)):
        cluster.kubectl("create", "-f", "-", stdin=volume(name, node))
        grown = {"spec": {"capacity": {"storage": "2Gi"}}}
        hostile.does(*hostile.patch(f"pv/{name}", grown))
        hostile.may_not(NO_OWNER, *hostile.patch(f"pv/{name}", OWNED))
        for change in (
            {"persistentVolumeReclaimPolicy": "Retain"},
            {
                "claimRef": {
                    "namespace": "default",
                    "name": "x",
                    "uid": "1",
                    "kind": "PersistentVolumeClaim",
                }
            },
            {"storageClassName": "other"},
            {"nodeAffinity": json.loads(volume(name, "third"))["spec"]["nodeAffinity"]},
        ):
            hostile.may_not(
                "ValidatingAdmissionPolicy", *hostile.patch(f"pv/{name}", {"spec": change})
            )
    for key in (LVSTORE_KEY, RECEIVED_KEY):
        taken_over = {"metadata": {"annotations": {key: "its own word"}}}
        hostile.does(*hostile.patch("pv/near", taken_over))
        hostile.may_not("in which lvstore", *hostile.patch("pv/far", taken_over))


def test_a_node_takes_claims_for_itself_and_changes_nothing_else_of_them(hostile: Node) -> None:
    cluster, here = hostile.cluster, hostile.cluster.nodes[0].name
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": "wanted",
            "finalizers": ["example.org/other"],
            "annotations": {PROVISIONER: "theirs.example.org"},
        },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "nobody-has-volumes-of-it",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(claim))
    try:
        change = hostile.patch
        for word, meta in (
            ("takes claims for itself", {"annotations": {SELECTED: "other"}}),
            ("no finalizers of others", {"finalizers": None}),
            ("labels", {"labels": {"app": "x"}}),
            (NO_OWNER, OWNED["metadata"]),
            ("whose a claim is", {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}}),
            ("whose a claim is", {"annotations": {PROVISIONER: "other.example.org"}}),
            ("whose a claim is", {"annotations": {PROVISIONER: None}}),
        ):
            hostile.may_not(word, *change("pvc/wanted", {"metadata": meta}))
        wider = {"spec": {"resources": {"requests": {"storage": "2Gi"}}}}
        hostile.may_not("orbidden|nvalid", *change("pvc/wanted", wider))
        bound = {"status": {"phase": "Bound"}}
        path = "/api/v1/namespaces/default/persistentvolumeclaims/wanted/status"
        hostile.may_not_patch("does not bind", path, bound)
        for node in (here, None):
            hostile.does(*change("pvc/wanted", {"metadata": {"annotations": {SELECTED: node}}}))
        ours = ["example.org/other", "kubernetes.io/pvc-protection", "virtlun.dev/lun"]
        for finalizers in (ours, ours[:2]):
            hostile.does(*change("pvc/wanted", {"metadata": {"finalizers": finalizers}}))
    finally:
        free = {"metadata": {"finalizers": None}}
        cluster.kubectl(*hostile.patch("pvc/wanted", free))
        cluster.kubectl("delete", "pvc", "wanted", "--ignore-not-found")


def capacity(name: str, node: str) -> str:
    """Returns what a node tells of its room for volumes of a class."""
    return json.dumps(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "CSIStorageCapacity",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "storageClassName": "none",
            "nodeTopology": {"matchLabels": {NODE_KEY: node}},
            "capacity": "1Gi",
        }
    )


def test_a_node_tells_its_own_capacity_alone(hostile: Node) -> None:
    here = hostile.cluster.nodes[0].name
    hostile.may_not("its own capacity only", "create", "-f", "-", stdin=capacity("theirs", "other"))
    hostile.does("create", "-f", "-", stdin=capacity("ours", here))
    hostile.does("delete", "csistoragecapacity", "ours", "-n", NAMESPACE)


def lease(holder: str, name: str = LEASE, lasts_s: int = 1, meta: Any = None) -> str:
    """Returns a lease that somebody holds."""
    spec = {"holderIdentity": holder, "leaseDurationSeconds": lasts_s}
    about = {"name": name, "namespace": NAMESPACE, **(meta or {})}
    kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
    return json.dumps({**kind, "metadata": about, "spec": spec})


def test_a_node_is_elected_under_its_own_pods_name_alone(
    hostile: Node, deployment: Deployment
) -> None:
    """Another's lease may be taken, as an expired one has to be, but not kept for good."""
    cluster, own = hostile.cluster, "virtlun-csi-taken"
    until(deployment.leads, "the real csi-resizer's election", deadline_s=60)
    make_pod(cluster, own, cluster.nodes[0].name)
    pod = Node(cluster, "Pod", own)
    words = ("replace", "-f", "-")
    with deployment.without("csi-resizer"):
        for word, wrong in (
            ("by its own name", lease(deployment.pod)),
            ("by its own name", lease("")),  # another's
            ("more than a minute", lease(own, lasts_s=61)),
            (NO_OWNER, lease(own, meta=OWNED["metadata"])),
        ):
            pod.may_not(word, *words, stdin=wrong)
        pod.may_not("cannot delete", "delete", "lease", LEASE, "-n", NAMESPACE)
        hostile.may_not("pod '' is elected", *words, stdin=lease(""))
        for holder in (own, own, "", own):  # taken over, renewed, resigned
            pod.does(*words, stdin=lease(holder))
        cluster.kubectl("delete", "lease", LEASE, "-n", NAMESPACE)
        words = ("create", "-f", "-")
        for word, wrong in (
            ("by its own name", lease("virtlun-csi-other")),
            ("csi-resizer's election only", lease(own, "another")),
            (NO_OWNER, lease(own, meta=OWNED["metadata"])),
        ):
            pod.may_not(word, *words, stdin=wrong)
        pod.does(*words, stdin=lease(own))
    until(deployment.leads, "the real csi-resizer's takeover", deadline_s=60)
    cluster.kubectl("delete", "pod", own, "-n", NAMESPACE, "--force")


@pytest.mark.nightly
def test_a_node_says_of_vm_volumes_what_is_the_case_on_it_alone(hostile: Node) -> None:
    cluster, here = hostile.cluster, hostile.cluster.nodes[0].name
    cluster.apply(EXAMPLES / "kubevirt/vmvolume-crd.yaml")
    cluster.wait("crd/vmvolumes.virtlun.dev", "condition=Established")
    cluster.apply(EXAMPLES / "kubevirt/vmvolume.yaml")
    path = "/apis/virtlun.dev/v1alpha1/namespaces/default/vmvolumes/extra"
    try:
        other = {"status": {"phase": "Pending", "message": "x", "node": "other"}}
        hostile.may_not_patch("speaks for itself", f"{path}/status", other)
        hostile.may_not_patch("does not change what", path, {"spec": {"releaseTimeoutSeconds": 1}})
        hostile.may_not_patch(NO_OWNER, path, OWNED)
        words = ("patch", "vmvolume", "extra", "--type=merge", "--subresource=status", "-p")
        cluster.kubectl(*words, json.dumps(other))
        failed = {"status": {"phase": "Failed", "message": "gone"}}
        hostile.may_not_patch("does not change what 'other' said", f"{path}/status", failed)
        hostile.does(*hostile.patch("vmvolume/extra", {"metadata": {"finalizers": [FINALIZER]}}))
        hostile.does(*hostile.patch("vmvolume/extra", {"metadata": {"finalizers": None}}))
        own = {"status": {"phase": "Pending", "message": "y", "node": here}}
        assert hostile.sends(f"{path}/status", own).startswith("200 ")
    finally:
        cluster.kubectl("delete", "-f", EXAMPLES / "kubevirt/vmvolume-crd.yaml")


def test_a_node_says_of_its_own_snapshots_alone_that_they_are_taken(hostile: Node) -> None:
    cluster, here = hostile.cluster, hostile.cluster.nodes[0].name
    snapshots.define(cluster)
    path = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents"
    ready = {"status": {"readyToUse": True, "snapshotHandle": "x"}}
    noted = {"metadata": {"annotations": {"snapshot.storage.kubernetes.io/x": "yes"}}}
    taken = {"metadata": {"labels": {MANAGED_BY: here}}}
    kept = {"spec": {"deletionPolicy": "Retain"}}
    for name, node in (("far", "other"), ("near", here)):
        cluster.kubectl("create", "-f", "-", stdin=snapshot_content(name, node))
    try:
        until(
            lambda: hostile.sends(f"{path}/far", noted).startswith("403 "),
            "the server holds to the policy of these, too",
        )
        for change, sub in ((ready, "/status"), (noted, ""), (taken, ""), (kept, "")):
            hostile.may_not_patch("is not of node", f"{path}/far{sub}", change)
        hostile.may_not_patch(NO_OWNER, f"{path}/near", OWNED)
        away = {"metadata": {"labels": {MANAGED_BY: "other"}}}
        for change in (kept, away):
            hostile.may_not_patch("of what or whose a snapshot is", f"{path}/near", change)
        for change, sub in ((ready, "/status"), (noted, "")):
            assert hostile.sends(f"{path}/near{sub}", change).startswith("200 ")
        for words in (("create", "-f", "-"), ("delete", "-f", "-")):
            hostile.may_not("orbidden", *words, stdin=snapshot_content("near", here))
    finally:
        cluster.kubectl("delete", "volumesnapshotcontents", "far", "near")


def snapshot_content(name: str, node: str) -> str:
    """Returns what the snapshot-controller makes of a snapshot of a node's volume."""
    of = {"kind": "VolumeSnapshot", "name": name, "namespace": "default"}
    spec = {
        "driver": DRIVER,
        "deletionPolicy": "Delete",
        "source": {"volumeHandle": name},
        "volumeSnapshotRef": of,
    }
    meta = {"name": name, "labels": {MANAGED_BY: node}}
    kind = {"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent"}
    return json.dumps({**kind, "metadata": meta, "spec": spec})


def test_credentials_that_tell_no_node_change_nothing(hostile: Node) -> None:
    nobody = Node(hostile.cluster)
    nobody.may_not("is not of node ''", "create", "-f", "-", stdin=volume("x", "node1"))
