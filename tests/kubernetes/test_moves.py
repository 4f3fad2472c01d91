"""A claim's volume goes to another node, by the commands of docs/pages/how-to/move-a-claim.md."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from csi import LVSTORE_KEY, RECEIVED_KEY
from tests.kubernetes import snapshots
from tests.kubernetes.cluster import NODE, Cluster
from tests.kubernetes.driver import LVSTORE, ROOT, Deployment
from tests.kubernetes.events import wait_event
from tests.kubernetes.left import CONVERGE_S
from tests.kubernetes.test_nodes import MANAGED_BY, free, names, node_of, uuids
from tests.kubernetes.test_snapshots import SNAPSHOT, of_claim
from tests.kubernetes.test_volumes import TOPOLOGY, claim, free_mib, grow, volume_of
from tests.support.target import binary
from tests.support.wait import until

pytestmark = [
    pytest.mark.nightly(reason="a second node"),
    pytest.mark.usefixtures("nothing_left_on_both"),
]
PAGE = ROOT / "docs/pages/how-to/move-a-claim.md"
APP = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: db}
spec:
  replicas: 1
  selector: {matchLabels: {app: db}}
  strategy: {type: Recreate}
  template:
    metadata: {labels: {app: db}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
        - name: shell
          image: busybox:stable
          imagePullPolicy: IfNotPresent
          command: [sleep, "1000000"]
          volumeMounts: [{name: volume, mountPath: /data}]
      volumes:
        - name: volume
          persistentVolumeClaim: {claimName: data}
"""
NAMES, RUNNING, STANDING, AFTER, BACK, WITHOUT_GATE = range(6)
"""The page's blocks."""


class Operator:
    """Who follows the page."""

    def __init__(self, cluster: Cluster, first: Deployment, second: Deployment) -> None:
        blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
        assert len(blocks) == len(range(WITHOUT_GATE + 1))
        self.blocks = blocks
        self.cluster = cluster
        self._places = {each.node.name: each for each in (first, second)}

    def follow(self, block: int, *, until_line: str = "", edit: tuple[str, str] = ("", "")) -> str:
        """Runs one block, to the line that begins so where that is given; returns its output."""
        text = self.blocks[block].replace(*edit) if edit[0] else self.blocks[block]
        if until_line:
            text = text[: text.index(f"\n{until_line}") + 1]
        return self.cluster.box.run(
            *("bash", "-c", f"{self._begin()}\n{text}"),
            deadline_s=300,
            env={"PYTHONPATH": str(ROOT)},
        ).stdout

    def _begin(self) -> str:
        """Returns the first block, with the commands of pods run as the node's processes here."""
        kubectl = f"{self.cluster.tools.path('kubectl')} --kubeconfig={self.cluster.kubeconfig}"
        sockets = " ".join(
            f"{name}) socket={place.target_socket};;" for name, place in self._places.items()
        )
        virtlun = f'{binary("virtlun")} --socket "$socket" "$@"'
        first, second = self._places
        names = [
            line
            for line in self.blocks[NAMES]
            .replace("node1", first)
            .replace("node2", second)
            .splitlines()
            if not line.startswith(("pod()", "on()"))
        ]
        return "\n".join(
            [
                f'kubectl() {{ {kubectl} "$@"; }}',
                f"on() {{ case $1 in {sockets} esac; shift 2; {virtlun}; }}",
                f"set -e -o pipefail; cd {self.cluster.scratch}",
                *names,
            ]
        )


@pytest.fixture
def operator(cluster: Cluster, deployment: Deployment, second: Deployment) -> Iterator[Operator]:
    """With the application on the first node."""
    cluster.kubectl("cordon", second.node.name)
    cluster.apply(claim("data", "virtlun-thin", "320Mi", "Filesystem"))
    cluster.apply(APP)
    assert running(cluster, NODE)
    cluster.kubectl("uncordon", second.node.name)
    yield Operator(cluster, deployment, second)
    cluster.delete("deployment", "db")


def running(cluster: Cluster, node: str) -> str:
    """Waits for the application's pod on a node; returns its name."""

    def found() -> str:
        pods = [
            each
            for each in cluster.items("pod", "-l", "app=db")
            if each["spec"].get("nodeName") == node and "deletionTimestamp" not in each["metadata"]
        ]
        return str(pods[0]["metadata"]["name"]) if pods else ""

    name: str = until(found, f"a pod on {node}", deadline_s=CONVERGE_S, every_s=0.3)
    cluster.wait(f"pod/{name}", "condition=Ready", CONVERGE_S)
    return name


def tie(cluster: Cluster, pv: str, node: str, received: str = "") -> None:
    """Gives a volume's object the affinity of a node, and the last snapshot, as the page does."""
    expression = {"key": TOPOLOGY, "operator": "In", "values": [node]}
    terms = [{"matchExpressions": [expression]}]
    notes = {"annotations": {RECEIVED_KEY: received}} if received else {}
    affinity = {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}
    cluster.patch("pv", pv, {"metadata": notes, "spec": affinity})


def scale(cluster: Cluster, replicas: int) -> None:
    cluster.patch("deployment", "db", {"spec": {"replicas": replicas}})
    if not replicas:
        until(lambda: not cluster.items("pod", "-l", "app=db"), "no pod", CONVERGE_S, 0.3)


def lvstore_of(cluster: Cluster) -> str:
    return str(volume_of(cluster, "data")["metadata"]["annotations"].get(LVSTORE_KEY, ""))


def test_a_claim_goes_to_another_node_and_lives_there(
    cluster: Cluster, deployment: Deployment, second: Deployment, operator: Operator
) -> None:
    pv = volume_of(cluster, "data")["metadata"]["name"]
    there = second.node.name
    before = running(cluster, NODE)
    cluster.shell(before, "echo early >/data/early")
    operator.follow(RUNNING)
    cluster.shell(before, "echo late >/data/late")
    operator.follow(STANDING)
    pod = running(cluster, there)
    assert cluster.shell(pod, "cat /data/early /data/late").split() == ["early", "late"]
    assert (node_of(cluster, "data"), lvstore_of(cluster)) == (
        there,
        second.volumes.lvstore(LVSTORE).uuid,
    )

    # It grows there, whoever is elected; what is left behind does not.
    size = deployment.volumes.volume(f"{LVSTORE}/{pv}").size
    room = free_mib(cluster, pod)
    grow(cluster, "data", "600Mi")
    cluster.wait("pvc/data", "jsonpath={.status.capacity.storage}=600Mi", CONVERGE_S)
    assert free_mib(cluster, pod) > room + 200
    assert deployment.volumes.volume(f"{LVSTORE}/{pv}").size == size

    # Its snapshots are that node's, and so are clones.
    with snapshots.controller(cluster):
        with cluster.applied(SNAPSHOT.format(name="there", claim="data")):
            content = snapshots.wait_ready(cluster, "there")
            assert content["metadata"]["labels"][MANAGED_BY] == there
            assert content["status"]["snapshotHandle"] in uuids(second)
            cloned = claim("cloned", "virtlun-immediate", "600Mi", "Filesystem")
            with cluster.applied(of_claim(cloned, "data")):
                cluster.wait_phase("pvc/cloned", "Bound", CONVERGE_S)
                assert node_of(cluster, "cloned") == there
        until(lambda: not cluster.items("volumesnapshotcontent"), "no VolumeSnapshotContent")

    # The old one does not come back by mistake.
    scale(cluster, 0)
    tie(cluster, pv, NODE)
    scale(cluster, 1)
    until(lambda: cluster.items("pod", "-l", "app=db"), "a pod")
    [stale] = cluster.items("pod", "-l", "app=db")
    wait_event(cluster, stale["metadata"]["name"], "is older than the one", deadline_s=CONVERGE_S)
    assert not [each for each in deployment.census().mounts if pv in each]
    scale(cluster, 0)
    tie(cluster, pv, there)
    scale(cluster, 1)
    pod = running(cluster, there)
    assert cluster.shell(pod, "cat /data/late").strip() == "late"

    operator.follow(AFTER)
    assert names(deployment) == []
    assert names(second) == [pv]
    for place in (deployment, second):
        until(
            lambda place=place: (  # type: ignore[misc]
                free(cluster, place.node.name) == place.volumes.lvstore(LVSTORE).free
            ),
            "the capacity object to say so",
            CONVERGE_S,
            0.5,
        )
    asked_here, asked_there = deployment.asked("DeleteVolume"), second.asked("DeleteVolume")
    end(cluster)
    assert names(second) == []
    assert (asked_here(), asked_there()) == (False, True)


def test_a_claim_that_is_deleted_with_both_volumes_there_is_deleted_on_the_new_node(
    cluster: Cluster, deployment: Deployment, second: Deployment, operator: Operator
) -> None:
    """Before any pod has come there, and over the end of the driver that deletes."""
    pv = volume_of(cluster, "data")["metadata"]["name"]
    operator.follow(RUNNING)
    operator.follow(STANDING, until_line="kubectl scale deployment db --replicas=1")
    asked_here = deployment.asked("DeleteVolume")
    cluster.delete("deployment", "db")
    with second.without("virtlun-csi"):
        cluster.delete("pvc", "data", wait=False)
        cluster.wait_phase(f"pv/{pv}", "Released", CONVERGE_S)
    until(lambda: not cluster.items("pv"), "no PersistentVolume", CONVERGE_S, 0.3)
    assert names(second) == [f"{pv}@one", f"{pv}@two"]
    assert names(deployment) == [pv, f"{pv}@one", f"{pv}@two"]
    assert not asked_here()
    forget(deployment, second)


def test_a_pod_that_is_before_its_data_waits_and_the_claim_comes_back_by_what_has_changed(
    cluster: Cluster, deployment: Deployment, second: Deployment, operator: Operator
) -> None:
    pv = volume_of(cluster, "data")["metadata"]["name"]
    path = f"{LVSTORE}/{pv}"
    cluster.shell(running(cluster, NODE), "echo first >/data/first")
    scale(cluster, 0)
    tie(cluster, pv, second.node.name, "one")
    scale(cluster, 1)
    until(lambda: cluster.items("pod", "-l", "app=db"), "a pod")
    [waits] = cluster.items("pod", "-l", "app=db")
    words = "virtlun volume receive --uuid"
    wait_event(cluster, waits["metadata"]["name"], words, deadline_s=CONVERGE_S)
    until(lambda: not deployment.volumes.users(path), "the node to let go", CONVERGE_S)
    operator.follow(RUNNING)
    pod = running(cluster, second.node.name)
    assert cluster.shell(pod, "cat /data/first").strip() == "first"
    cluster.shell(pod, "echo second >/data/second")
    scale(cluster, 0)
    until(lambda: not second.volumes.users(path), "the node to let go", CONVERGE_S)
    tie(cluster, pv, NODE, "three")
    operator.follow(BACK, edit=('--since "@$LAST"', "--since @one"))
    scale(cluster, 1)
    pod = running(cluster, NODE)
    assert lvstore_of(cluster) == deployment.volumes.lvstore(LVSTORE).uuid
    assert cluster.shell(pod, "cat /data/second").strip() == "second"
    end(cluster)
    assert names(deployment) == [f"{pv}@one", f"{pv}@three"]
    forget(deployment, second)


def test_without_the_feature_gate_the_claim_and_its_object_are_made_anew(
    cluster: Cluster, deployment: Deployment, second: Deployment, operator: Operator
) -> None:
    pv = volume_of(cluster, "data")["metadata"]["name"]
    cluster.shell(running(cluster, NODE), "echo first >/data/first")
    operator.follow(RUNNING)
    begin, _, rest = operator.blocks[STANDING].partition("kubectl patch pv")
    _, _, end_of_it = rest.partition("tries=")
    operator.blocks[STANDING] = f"{begin}tries={end_of_it}"
    operator.follow(STANDING, until_line="kubectl scale deployment db --replicas=1")
    operator.follow(WITHOUT_GATE)
    scale(cluster, 1)
    pod = running(cluster, second.node.name)
    assert volume_of(cluster, "data")["metadata"]["name"] == pv
    assert cluster.shell(pod, "cat /data/first").strip() == "first"
    grow(cluster, "data", "600Mi")
    cluster.wait("pvc/data", "jsonpath={.status.capacity.storage}=600Mi", CONVERGE_S)
    operator.follow(AFTER)
    end(cluster)
    assert (names(deployment), names(second)) == ([], [])


def end(cluster: Cluster) -> None:
    """Deletes the application and its claim, and waits until the volume is gone."""
    cluster.delete("deployment", "db")
    cluster.delete("pvc", "data")
    until(lambda: not cluster.items("pv"), "no PersistentVolume", CONVERGE_S, 0.3)


def forget(*places: Deployment) -> None:
    """Deletes what is left on nodes: a volume, then its snapshots."""
    for place in places:
        for name in sorted(names(place), key=len):
            place.volumes.delete(f"{LVSTORE}/{name}")
