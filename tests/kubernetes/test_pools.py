"""A pool of Ceph on two nodes: volumes that are no node's, by the examples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pydataplane.domain.limits import NONE, Limits
from tests.kubernetes import snapshots
from tests.kubernetes.ceph import KEY, ceph_of, with_pool
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.driver import EXAMPLES, Deployment
from tests.kubernetes.left import CONVERGE_S
from tests.kubernetes.test_limits import GOLD, SILVER, ask, has, limits
from tests.kubernetes.test_nodes import DEVICE, pod
from tests.kubernetes.test_snapshots import SNAPSHOT, of_claim, of_snapshot
from tests.kubernetes.test_volumes import (
    claim,
    device_bytes,
    example,
    grow,
    read,
    volume_of,
    write,
)
from tests.support.ceph import POOL, Ceph, lacks
from tests.support.wait import until

pytestmark = [
    pytest.mark.nightly(reason="a second node, and Ceph"),
    pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}"),
]
MIB = 1 << 20


@pytest.fixture(scope="module")
def ceph(cluster: Cluster) -> Iterator[Ceph]:
    """A Ceph on the nodes."""
    with ceph_of(cluster) as made:
        yield made


@pytest.fixture(scope="module")
def pool(deployment: Deployment, second: Deployment, ceph: Ceph) -> Iterator[str]:
    """Both nodes have the pool, and the class is there; the pool's UUID."""
    with with_pool(deployment, ceph) as pool, with_pool(second, ceph) as other:
        assert pool == other
        deployment.cluster.apply(EXAMPLES / "ceph/storageclass.yaml")
        yield pool
        deployment.sweep()
        until(lambda: _images(ceph) == [], lambda: f"no images: {_images(ceph)}", CONVERGE_S)
        deployment.cluster.kubectl("delete", "-f", EXAMPLES / "ceph/storageclass.yaml")


def _images(ceph: Ceph) -> list[str]:
    return ceph.rbd("ls", POOL).split()


def _pods(cluster: Cluster, app: str) -> dict[str, str]:
    """Returns the nodes of an application's pods that run, by their names."""
    return {
        each["metadata"]["name"]: each["spec"]["nodeName"]
        for each in cluster.items("pod", "-l", f"app={app}")
        if each["status"]["phase"] == "Running" and "deletionTimestamp" not in each["metadata"]
    }


def _pod(cluster: Cluster, app: str, *, on: set[str]) -> str:
    """Waits for the application's one pod, on one of these nodes; returns its name."""

    def found() -> str:
        pods = _pods(cluster, app)
        return next((name for name, node in pods.items() if {node} <= on), "")

    name: str = until(found, f"a pod of {app} on {on}", deadline_s=CONVERGE_S, every_s=0.5)
    cluster.wait(f"pod/{name}", "condition=Ready", CONVERGE_S)
    return name


def test_a_pod_goes_with_its_volume_to_another_node(
    cluster: Cluster, deployment: Deployment, second: Deployment, pool: str, ceph: Ceph
) -> None:
    nodes = {deployment.node.name, second.node.name}
    with cluster.applied((EXAMPLES / "ceph/pod.yaml").read_text()):
        first = _pod(cluster, "wanderer", on=nodes)
        [term] = volume_of(cluster, "wanders")["spec"]["nodeAffinity"]["required"][
            "nodeSelectorTerms"
        ]
        [place] = term["matchExpressions"]
        assert (place["key"], place["values"]) == (f"{KEY}{pool}", ["true"])
        cluster.shell(first, "echo kept > /data/file && sync")
        left = _pods(cluster, "wanderer")[first]
        cluster.kubectl("cordon", left)
        try:
            cluster.delete("pod", first)
            other = _pod(cluster, "wanderer", on=nodes - {left})
            assert cluster.shell(other, "cat /data/file").strip() == "kept"
            grow(cluster, "wanders", "640Mi")
            cluster.wait("pvc/wanders", "jsonpath={.status.capacity.storage}=640Mi", CONVERGE_S)
            free = cluster.shell(other, "df -m /data | tail -n 1 | awk '{print $4}'")
            assert int(free) > 400
        finally:
            cluster.kubectl("uncordon", left)
    until(lambda: _images(ceph) == [], "the image to be deleted", deadline_s=CONVERGE_S)


def test_one_block_device_on_two_nodes(
    cluster: Cluster, deployment: Deployment, second: Deployment, pool: str
) -> None:
    with cluster.applied((EXAMPLES / "ceph/pods-shared-block.yaml").read_text()):
        names = ("sharers-0", "sharers-1")
        for name in names:
            until(lambda name=name: cluster.items("pod", "-l", "app=sharers"), "its pods")  # type: ignore[misc]
            cluster.wait(f"pod/{name}", "condition=Ready", CONVERGE_S)
        nodes = {deployment.node.name, second.node.name}
        assert set(_pods(cluster, "sharers").values()) == nodes
        for number, (name, other) in enumerate((names, reversed(names))):
            write(cluster, name, f"of {name}", at_mib=number)
            assert read(cluster, other, at_mib=number) == f"of {name}"


def test_a_volume_of_a_pool_is_limited_on_the_node_that_uses_it(
    cluster: Cluster, deployment: Deployment, second: Deployment, pool: str
) -> None:
    nodes = (deployment, second)

    def limited(by: Limits, on: Deployment) -> bool:
        return [limits(each, "goes") for each in nodes] == [
            by if each is on else NONE for each in nodes
        ]

    goes = claim("goes", "virtlun-rbd").replace(
        "spec:\n", "spec:\n  volumeAttributesClassName: virtlun-silver\n"
    )
    with cluster.applied(example("volumeattributesclasses")), cluster.applied(goes):
        for here in nodes:
            with cluster.applied(pod("goes", here.node.name)):
                cluster.wait("pod/goes", "condition=Ready", CONVERGE_S)
                assert limited(SILVER, on=here)
                ask(cluster, "goes", "virtlun-gold")
                has(cluster, "goes", "virtlun-gold")
                until(lambda: limited(GOLD, on=here), "the other limits")  # noqa: B023
                here.kill("virtlun-target")
                here.wait_ready()
                assert limited(GOLD, on=here)
                cluster.delete("pod", "goes")
            until(lambda: limited(NONE, on=deployment), "no limits where no pod is")
            ask(cluster, "goes", "virtlun-silver")
            has(cluster, "goes", "virtlun-silver")


def test_snapshots_and_clones_are_for_any_node(
    cluster: Cluster, deployment: Deployment, second: Deployment, pool: str
) -> None:
    here, there = deployment.node.name, second.node.name
    with (
        snapshots.controller(cluster),
        cluster.applied(claim("source", "virtlun-rbd")),
        cluster.applied(pod("source", here)),
    ):
        cluster.wait("pod/source", "condition=Ready", CONVERGE_S)
        write(cluster, "source", "kept")
        with cluster.applied(SNAPSHOT.format(name="source", claim="source")):
            snapshots.wait_ready(cluster, "source")
            write(cluster, "source", "later")
            restored = of_snapshot(claim("restored", "virtlun-rbd"), "source")
            cloned = of_claim(claim("cloned", "virtlun-rbd"), "source")
            with cluster.applied(restored), cluster.applied(cloned):
                for name, text in (("restored", "kept"), ("cloned", "later")):
                    with cluster.applied(pod(name, there, use=DEVICE)):
                        cluster.wait(f"pod/{name}", "condition=Ready", CONVERGE_S)
                        assert read(cluster, name) == text
                        assert device_bytes(cluster, name) == 64 * MIB
            until(lambda: len(cluster.items("pv")) == 1, "the copies' end", CONVERGE_S)
        until(lambda: not cluster.items("volumesnapshotcontent"), "the snapshot's end")


UNREACHABLE = "node.kubernetes.io/unreachable"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
TOLERATIONS = (
    f"tolerations: [{{key: {UNREACHABLE}, operator: Exists, effect: NoExecute, "
    "tolerationSeconds: 1}]"
)
"""Pods are deleted one second after their node is given up, not five minutes."""
STATEFUL = f"""\
apiVersion: apps/v1
kind: StatefulSet
metadata: {{name: ordered}}
spec:
  selector: {{matchLabels: {{app: ordered}}}}
  template:
    metadata: {{labels: {{app: ordered}}}}
    spec:
      terminationGracePeriodSeconds: 1
      {TOLERATIONS}
      containers:
        - name: shell
          image: busybox:stable
          imagePullPolicy: IfNotPresent
          command: [sleep, "1000000"]
          volumeMounts: [{{name: data, mountPath: /data}}]
  volumeClaimTemplates:
    - metadata: {{name: data}}
      spec:
        storageClassName: virtlun-rbd
        accessModes: [ReadWriteOnce]
        resources: {{requests: {{storage: 320Mi}}}}
"""


def _written(cluster: Cluster, pod: str, text: str) -> None:
    """Writes a file, and that alone: sync(1) waits for all disks, those of a dead node, too."""
    cluster.shell(pod, f"echo {text} | dd of=/data/file conv=fsync 2>/dev/null")


@contextmanager
def _dead(place: Deployment) -> Iterator[ExitStack]:
    """A node that does nothing: what Kubernetes runs there, the driver's parts and the target.

    Closing what is yielded has the target alone go on; the rest does so after the block.
    """
    with ExitStack() as others, ExitStack() as target:
        assert place.node.kubelet is not None and place.node.containerd is not None
        for process in (place.node.kubelet, place.node.containerd):
            others.enter_context(process.frozen())
        for name in place.parts:
            stack = target if name == "virtlun-target" else others
            stack.enter_context(place.frozen(name))
        yield target


def _device_of(place: Deployment, handle: str) -> str:
    """Returns the loop device over the file of a volume, which one node alone has."""
    place.box.files.add(handle)
    [device] = [dev for dev, file in place.box.loops().items() if Path(file).name == handle]
    return device


def test_the_volumes_of_a_node_that_died_go_to_another(
    cluster: Cluster, deployment: Deployment, second: Deployment, pool: str, ceph: Ceph
) -> None:
    """As the page of pools says: a Deployment's by itself, a StatefulSet's after the taint."""
    here, there = deployment.node.name, second.node.name
    example = (EXAMPLES / "ceph/pod.yaml").read_text()
    grace = "      terminationGracePeriodSeconds: 1\n"
    assert grace in example
    cluster.kubectl("cordon", here)
    cluster.apply(example.replace(grace, f"{grace}      {TOLERATIONS}\n"))
    cluster.apply(STATEFUL)
    try:
        until(lambda: cluster.items("pod", "-l", "app=ordered"), "the pod")
        for app in ("wanderer", "ordered"):
            _written(cluster, _pod(cluster, app, on={there}), "kept")
        cluster.kubectl("uncordon", here)
        handle = volume_of(cluster, "data-ordered-0")["spec"]["csi"]["volumeHandle"]
        device = _device_of(second, handle)
        with _dead(second) as target:
            # Of a Deployment another pod is made at once; its volume comes when Ceph gives it up.
            wanderer = _pod(cluster, "wanderer", on={here})
            assert cluster.shell(wanderer, "cat /data/file").strip() == "kept"
            # A StatefulSet's is to be deleted, and nobody there does so.
            [left] = cluster.items("pod", "-l", "app=ordered")
            assert (left["spec"]["nodeName"], "deletionTimestamp" in left["metadata"]) == (
                there,
                True,
            )
            assert cluster.items("volumeattachments") == []
            cluster.kubectl("taint", "node", there, f"{OUT_OF_SERVICE}=nodeshutdown:NoExecute")
            ordered = _pod(cluster, "ordered", on={here})
            assert cluster.shell(ordered, "cat /data/file").strip() == "kept"
            _written(cluster, ordered, "later")
            # The old target is back, before anything else of its node, and nobody takes a write.
            target.close()
            into = ("dd", "if=/dev/zero", f"of={device}", "bs=4096", "count=1", "oflag=direct")
            assert "No such device" in cluster.box.run(*into, check=False).stderr
            log = second.parts["virtlun-target"].process.words
            until(lambda: "has fenced this host" in log(5000), "the target to say why")
            assert cluster.shell(ordered, "cat /data/file").strip() == "later"
        # The node is well again, and lets go of what it had.
        cluster.wait(f"node/{there}", "condition=Ready", CONVERGE_S)
        cluster.kubectl("taint", "node", there, f"{OUT_OF_SERVICE}-")
        until(lambda: handle not in second.exports(), "the old volume to be let go", CONVERGE_S)
        cluster.kubectl("cordon", here)
        cluster.delete("pod", ordered)
        ordered = _pod(cluster, "ordered", on={there})
        assert cluster.shell(ordered, "cat /data/file").strip() == "later"
        _written(cluster, ordered, "at last")
    finally:
        cluster.kubectl("taint", "node", there, f"{OUT_OF_SERVICE}-", check=False)
        cluster.kubectl("uncordon", here)
        cluster.delete("statefulset", "ordered")
        cluster.delete("pvc", "data-ordered-0")
        cluster.api.delete_objects(example)
    until(lambda: _images(ceph) == [], "the images to be deleted", deadline_s=CONVERGE_S)
