"""Claims, pods and growth, as users see them: through the API server, kubelet and containerd.

Every test begins and ends with nothing of any volume left anywhere: lvols, exports, loop devices,
mounts, LUNs, controllers, claims and persistent volumes are counted.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from tests.kubernetes.account import NAMESPACE
from tests.kubernetes.cluster import NODE, Cluster
from tests.kubernetes.driver import DRIVER, EXAMPLES, LVSTORE, Deployment
from tests.kubernetes.events import wait_event
from tests.kubernetes.kubevirt.census import luns
from tests.support.csi import may_grow_ext4
from tests.support.wait import until

pytestmark = pytest.mark.usefixtures("nothing_left")
MIB = 1 << 20
TOPOLOGY = "csi.virtlun.dev/node"
CLAIM = """\
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {name}}}
spec:
  storageClassName: {storage_class}
  volumeMode: {mode}
  accessModes: [{access}]
  resources: {{requests: {{storage: {size}}}}}
"""
CLASS = """\
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {{name: {name}}}
provisioner: csi.virtlun.dev
volumeBindingMode: {binding}
allowVolumeExpansion: true
parameters: {parameters}
"""
SOCKET = CLASS.format(
    name="socket", binding="Immediate", parameters=f"{{lvstore: {LVSTORE}, face: vhost}}"
)
VOLUME = """\
apiVersion: v1
kind: PersistentVolume
metadata: {{name: {name}}}
spec:
  capacity: {{storage: 64Mi}}
  accessModes: [ReadWriteOnce]
  volumeMode: Block
  storageClassName: virtlun-block
  persistentVolumeReclaimPolicy: Retain
  csi: {{driver: csi.virtlun.dev, volumeHandle: {handle}}}
"""


def claim(
    name: str,
    storage_class: str,
    size: str = "64Mi",
    mode: str = "Block",
    access: str = "ReadWriteOnce",
) -> str:
    """Returns a claim's manifest."""
    return CLAIM.format(name=name, storage_class=storage_class, size=size, mode=mode, access=access)


def example(name: str) -> str:
    """Returns an example's manifest."""
    return (EXAMPLES / f"{name}.yaml").read_text()


def volume_of(cluster: Cluster, name: str) -> dict[str, Any]:
    """Returns the persistent volume that a claim is bound to."""
    bound = cluster.get("pvc", name)
    return dict(cluster.get("pv", bound["spec"]["volumeName"]))


def grow(cluster: Cluster, name: str, size: str) -> None:
    """Asks for more."""
    cluster.patch("pvc", name, {"spec": {"resources": {"requests": {"storage": size}}}})


def device_bytes(cluster: Cluster, pod: str) -> int:
    """Returns the size of the block device in one of the examples' pods."""
    return int(cluster.execute(pod, "blockdev", "--getsize64", "/dev/virtlun"))


def write(cluster: Cluster, pod: str, text: str, at_mib: int = 0) -> None:
    """Writes a block of text to the block device in one of the examples' pods, and flushes it."""
    lines = f"{text}\n" * (4096 // (len(text) + 1) + 1)
    into = f"dd of=/dev/virtlun bs=4096 count=1 seek={at_mib * 256} conv=fsync iflag=fullblock"
    cluster.shell(pod, f"printf %s {shlex.quote(lines[:4096])} | {into}")


def read(cluster: Cluster, pod: str, at_mib: int = 0) -> str:
    """Returns the first line of a block of the device, read past the page cache."""
    script = f"dd if=/dev/virtlun bs=4096 count=1 skip={at_mib * 256} iflag=direct 2>/dev/null"
    return cluster.shell(pod, f"{script} | head -n 1").strip()


# Claims


def test_the_node_says_where_its_volumes_are_and_how_many_it_takes(cluster: Cluster) -> None:
    # Kubelet tells the server a moment after the driver has told it.
    until(lambda: cluster.get("csinode", NODE)["spec"].get("drivers"), "the node's driver")
    [told] = cluster.get("csinode", NODE)["spec"]["drivers"]
    assert (told["name"], told["nodeID"], told["topologyKeys"]) == (DRIVER, NODE, [TOPOLOGY])
    assert told["allocatable"] == {"count": 250}
    assert cluster.get("node", NODE)["metadata"]["labels"][TOPOLOGY] == NODE


def test_a_claim_with_immediate_binding_is_bound_at_once(
    cluster: Cluster, deployment: Deployment
) -> None:
    with cluster.applied(claim("now", "virtlun-block")):
        cluster.wait_phase("pvc/now", "Bound")
        volume = volume_of(cluster, "now")
        assert volume["spec"]["csi"]["driver"] == DRIVER
        assert volume["spec"]["capacity"]["storage"] == "64Mi"
        lvol = deployment.volumes.volume(volume["spec"]["csi"]["volumeHandle"])
        assert (lvol.lvstore, lvol.size, lvol.thin) == (LVSTORE, 64 * MIB, False)
        owner = json.loads(deployment.volumes.xattrs(lvol.uuid)["csi.volume"])
        assert (owner["driver"], owner["claim"]) == (DRIVER, "default/now")
        assert owner["name"] == volume["metadata"]["name"]


def test_a_claim_waits_for_its_first_pod_and_is_bound_on_that_node(cluster: Cluster) -> None:
    with cluster.applied(example("pod-filesystem")):
        cluster.wait("pod/writer", "condition=Ready")
        volume = volume_of(cluster, "data")
        terms = volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
        assert terms == [
            {"matchExpressions": [{"key": TOPOLOGY, "operator": "In", "values": [NODE]}]}
        ]
    with cluster.applied(claim("waits", "virtlun-thin", "400Mi", "Filesystem")):
        wait_event(cluster, "waits", "WaitForFirstConsumer", deadline_s=90)
        assert cluster.get("pvc", "waits")["status"]["phase"] == "Pending"


# Pods


def test_a_file_system_keeps_its_data_and_grows_under_its_pod(cluster: Cluster) -> None:
    manifest = example("pod-filesystem")
    with cluster.applied(manifest):
        cluster.wait("pod/writer", "condition=Ready")
        digest = cluster.shell(
            "writer",
            "dd if=/dev/urandom of=/data/file bs=1M count=16 2>/dev/null && sync && "
            "md5sum < /data/file",
        )
        before = free_mib(cluster, "writer")
        grow(cluster, "data", "600Mi")
        cluster.wait("pvc/data", "jsonpath={.status.capacity.storage}=600Mi")
        assert free_mib(cluster, "writer") > before + 150
        cluster.delete("pod", "writer")
        cluster.apply(manifest.replace("400Mi", "600Mi"), force=True)
        cluster.wait("pod/writer", "condition=Ready")
        assert cluster.execute("writer", "md5sum", "/data/file").split()[0] == digest.split()[0]


@pytest.mark.nightly
def test_ext4_grows_under_its_pod_or_says_that_it_grows_with_the_next(cluster: Cluster) -> None:
    """Linux lets only CAP_SYS_RESOURCE grow a mounted ext4; the node may run without it."""
    pod = documents_of(example("pod-filesystem"))[1]
    with cluster.applied(claim("data", "virtlun-thick", "64Mi", "Filesystem")):
        cluster.apply(pod)
        cluster.wait("pod/writer", "condition=Ready")
        assert "ext4" in cluster.execute("writer", "grep", "/data", "/proc/mounts")
        before = free_mib(cluster, "writer")
        grow(cluster, "data", "128Mi")
        if not may_grow_ext4():
            said = "it grows when the volume is staged next; xfs grows at once"
            until(lambda: said in conditions(cluster, "data"), f"a condition: {said}")
            assert free_mib(cluster, "writer") == before
            cluster.delete("pod", "writer")
            cluster.apply(pod)
            cluster.wait("pod/writer", "condition=Ready")
        cluster.wait("pvc/data", "jsonpath={.status.capacity.storage}=128Mi")
        assert free_mib(cluster, "writer") > before + 50


def conditions(cluster: Cluster, name: str) -> str:
    """Returns the conditions of a claim, as text."""
    found = cluster.get("pvc", name)["status"].get("conditions", [])
    return "\n".join(f"{each['type']}: {each.get('message', '')}" for each in found)


def free_mib(cluster: Cluster, pod: str) -> int:
    """Returns what df says of /data."""
    return int(cluster.execute(pod, "df", "-m", "/data").splitlines()[-1].split()[3])


def test_a_block_device_is_written_read_and_grown_in_its_pod(cluster: Cluster) -> None:
    with cluster.applied(example("pod-block")):
        cluster.wait("pod/raw", "condition=Ready")
        assert device_bytes(cluster, "raw") == 64 * MIB
        assert cluster.execute("raw", "blockdev", "--getss", "/dev/virtlun").strip() == "4096"
        write(cluster, "raw", "first", at_mib=1)
        grow(cluster, "disk", "128Mi")
        until(
            lambda: device_bytes(cluster, "raw") == 128 * MIB,
            "the new size in the pod",
        )
        write(cluster, "raw", "last", at_mib=127)
        assert read(cluster, "raw", at_mib=1) == "first"
        assert read(cluster, "raw", at_mib=127) == "last"


@pytest.mark.nightly
def test_a_volume_that_a_stranger_writes_larger_stays_as_its_claim_asks(
    cluster: Cluster, deployment: Deployment
) -> None:
    """The credentials of any node may note a capacity, as the elected csi-resizer does."""
    with cluster.applied(example("pod-block")):
        cluster.wait("pod/raw", "condition=Ready")
        before = device_bytes(cluster, "raw")
        volume = cluster.get("pvc", "disk")["spec"]["volumeName"]
        cluster.patch("pv", volume, {"spec": {"capacity": {"storage": "1Gi"}}})
        log = deployment.parts["virtlun-csi"].process
        until(
            lambda: "its claim asks for" in log.words(20_000),
            "kubelet's call, and its refusal",
            every_s=0.2,
        )
        assert device_bytes(cluster, "raw") == before


@pytest.mark.nightly
def test_two_pods_share_a_block_device(cluster: Cluster) -> None:
    with cluster.applied(example("pods-shared-block")):
        cluster.wait("pod/left", "condition=Ready")
        cluster.wait("pod/right", "condition=Ready")
        write(cluster, "left", "from the left")
        assert read(cluster, "right") == "from the left"
        write(cluster, "right", "from the right", at_mib=2)
        assert read(cluster, "left", at_mib=2) == "from the right"
        cluster.delete("pod", "left")
        assert read(cluster, "right") == "from the left"


def test_an_ephemeral_volume_lives_and_dies_with_its_pod(
    cluster: Cluster, deployment: Deployment
) -> None:
    with cluster.applied(example("pod-ephemeral")):
        cluster.wait("pod/scratch", "condition=Ready")
        cluster.shell("scratch", "echo gone soon > /scratch/file && sync")
        [owner] = cluster.get("pvc", "scratch-scratch")["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("Pod", "scratch")
        cluster.delete("pod", "scratch")
        deployment.wait_clean()


def test_a_pod_gets_the_folder_of_a_socket_for_a_virtual_machine(
    cluster: Cluster, deployment: Deployment
) -> None:
    pod = documents_of(example("pod-filesystem"))[1].replace("date > /data/started && sync && ", "")
    files = claim("data", "socket", mode="Filesystem")
    with cluster.applied(SOCKET), cluster.applied(files), cluster.applied(pod):
        cluster.wait("pod/writer", "condition=Ready")
        assert cluster.execute("writer", "ls", "/data").split() == ["vhost.sock"]
        cluster.execute("writer", "test", "-S", "/data/vhost.sock")
        handle = volume_of(cluster, "data")["spec"]["csi"]["volumeHandle"]
        assert luns(deployment) == (handle,)
        grow(cluster, "data", "128Mi")
        cluster.wait("pvc/data", "jsonpath={.status.capacity.storage}=128Mi")
        assert deployment.volumes.volume(handle).size == 128 * MIB


# Capacity and metrics


def test_metrics_count_volumes_and_operations(cluster: Cluster, deployment: Deployment) -> None:
    with cluster.applied(claim("counted", "virtlun-block")):
        cluster.wait_phase("pvc/counted", "Bound")
        lines = deployment.http("metrics").splitlines()
        assert 'virtlun_csi_volumes{lvstore="lvs0"} 1.0' in lines
        assert 'virtlun_csi_volumes_bytes{lvstore="lvs0"} 6.7108864e+07' in lines
        assert any('method="CreateVolume"' in line and 'code="OK"' in line for line in lines)


def test_capacity_objects_tell_what_is_free(cluster: Cluster, deployment: Deployment) -> None:
    def published() -> dict[str, int]:
        found = cluster.items("csistoragecapacities", "-n", NAMESPACE)
        for each in found:
            assert each["nodeTopology"]["matchLabels"] == {TOPOLOGY: NODE}
        return {each["storageClassName"]: quantity(each["capacity"]) for each in found}

    store = deployment.volumes.lvstore(LVSTORE)
    free = store.free
    until(
        lambda: published() == {"virtlun-thin": 4 * store.total, "virtlun-thick": free},
        "objects of both classes that bind late, and of the thin one's overcommit",
        every_s=0.5,
    )
    with cluster.applied(claim("takes", "virtlun-block", "512Mi")):
        cluster.wait_phase("pvc/takes", "Bound")
        until(
            lambda: (
                published()["virtlun-thick"] <= free - 512 * MIB
                and published()["virtlun-thin"] == 4 * store.total - 512 * MIB
            ),
            "less of it",
            every_s=0.5,
        )


@pytest.mark.nightly
def test_a_claim_bound_at_once_for_which_there_is_no_room_says_so_and_gets_it_later(
    cluster: Cluster, deployment: Deployment
) -> None:
    """By itself the provisioner passes over it in silence, for 15 minutes."""
    most = deployment.volumes.lvstore(LVSTORE).free // MIB - 128
    said = f"waiting for a node with {512 * MIB} bytes free in lvstore {LVSTORE}"
    with cluster.applied(claim("most", "virtlun-block", f"{most}Mi")):
        cluster.wait_phase("pvc/most", "Bound")
        cluster.apply(claim("waits", "virtlun-block", "512Mi"))
        wait_event(cluster, "waits", said)
        assert cluster.get("pvc", "waits")["status"]["phase"] == "Pending"
        cluster.delete("pvc", "most")
        cluster.wait_phase("pvc/waits", "Bound")


@pytest.mark.nightly
def test_a_claim_bound_at_once_that_no_volume_can_serve_is_told_why_once(
    cluster: Cluster, deployment: Deployment
) -> None:
    """The provisioner passes over it, whatever room there is."""
    files = claim("files", "virtlun-immediate", "64Mi", "Filesystem", "ReadWriteMany")

    def told() -> list[int]:
        found = cluster.items("events", "--field-selector=involvedObject.name=files")
        return [each.get("count", 1) for each in found if each["reason"] == "CannotProvision"]

    with cluster.applied(files):
        until(told, "an event CannotProvision")
        wait_event(cluster, "files", "use volumeMode Block, or ReadWriteOnce")
        for number in range(2):
            asked = deployment.asked("GetCapacity")
            cluster.kubectl("annotate", "pvc", "files", f"example.org/look={number}", "--overwrite")
            until(asked, "the provisioner to ask again")
        assert told() == [1]
        noted = cluster.get("pvc", "files")["metadata"]["annotations"]
        assert not any(name.startswith("csi.virtlun.dev/") for name in noted)


def quantity(text: str) -> int:
    """Returns a Kubernetes quantity of bytes, with a binary suffix or none."""
    units = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
    return int(text[:-2]) * units[text[-2:]] if text[-2:] in units else int(text)


# Bad input


NO_ROOM = "did not have enough free storage"
INVALID = "rpc error: code = InvalidArgument desc"


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("no-lvstore", {}, "lvstore is missing: name it, for example lvs0"),
        ("unknown", {"lvstore": LVSTORE, "colour": "red"}, "colour is not known: the parameters "),
    ],
    ids=["no lvstore", "unknown parameter"],
)
def test_a_bad_class_says_why_in_the_claims_events(
    cluster: Cluster, name: str, parameters: dict[str, str], said: str
) -> None:
    said = f"rpc error: code = InvalidArgument desc = StorageClass parameter {said}"
    bad = CLASS.format(name=name, binding="Immediate", parameters=json.dumps(parameters))
    with cluster.applied(bad), cluster.applied(claim(name, name)):
        wait_event(cluster, name, said)
        assert cluster.get("pvc", name)["status"]["phase"] == "Pending"


@pytest.mark.parametrize(
    ("name", "parameters", "size", "access", "said"),
    [
        ("other-lvstore", {"lvstore": "lvs9"}, "400Mi", "ReadWriteOnce", NO_ROOM),
        ("too-large", {"lvstore": LVSTORE}, "1Ti", "ReadWriteOnce", NO_ROOM),
        (
            "ntfs",
            {"lvstore": LVSTORE, "csi.storage.k8s.io/fstype": "ntfs"},
            "400Mi",
            "ReadWriteOnce",
            f"{INVALID} = file system 'ntfs' is not supported: there are ext4 and xfs",
        ),
        (
            "shared-files",
            {"lvstore": LVSTORE},
            "400Mi",
            "ReadWriteMany",
            f"{INVALID} = access mode MULTI_NODE_MULTI_WRITER is not possible with volumeMode "
            "Filesystem: use volumeMode Block, or ReadWriteOnce",
        ),
    ],
    ids=["other lvstore", "too large", "unknown file system", "files for many nodes"],
)
def test_a_claim_that_cannot_be_served_says_why(
    cluster: Cluster, name: str, parameters: dict[str, str], size: str, access: str, said: str
) -> None:
    """The scheduler says it of a node without room, the driver of what it does not do."""
    bad = CLASS.format(name=name, binding="WaitForFirstConsumer", parameters=json.dumps(parameters))
    pod = (
        documents_of(example("pod-filesystem"))[1]
        .replace("writer", name)
        .replace("claimName: data", f"claimName: {name}")
    )
    with (
        cluster.applied(bad),
        cluster.applied(claim(name, name, size, "Filesystem", access)),
        cluster.applied(pod),
    ):
        wait_event(cluster, name, said)
        assert cluster.get("pvc", name)["status"]["phase"] == "Pending"
        assert cluster.get("pod", name)["status"]["phase"] == "Pending"


@pytest.mark.nightly
def test_a_volume_that_a_virtual_machine_has_is_refused_to_a_pod_until_it_is_free(
    cluster: Cluster, deployment: Deployment
) -> None:
    disk, pod = documents_of(example("pod-block"))
    target = deployment.client
    with cluster.applied(disk):
        cluster.wait_phase("pvc/disk", "Bound")
        handle = volume_of(cluster, "disk")["spec"]["csi"]["volumeHandle"]
        target.call("vhost_create_scsi_controller", ctrlr="vm")
        target.call(
            "vhost_scsi_controller_add_target", ctrlr="vm", scsi_target_num=0, bdev_name=handle
        )
        with cluster.applied(pod):
            said = (
                "rpc error: code = FailedPrecondition desc = the target refused "
                f"virtlun_export_create: Device or resource busy: bdev {handle} is in use by "
                "target 0 of controller vm: release it there first"
            )
            wait_event(cluster, "raw", said)
            assert deployment.census().exports == deployment.census().loops == ()
            target.call("vhost_delete_controller", ctrlr="vm")
            cluster.wait("pod/raw", "condition=Ready")


def test_a_volume_that_is_not_ours_is_left_alone(cluster: Cluster, deployment: Deployment) -> None:
    """As the volume of a claim, made by hand with the UUID of somebody else's lvol."""
    handle = deployment.volumes.create(f"{LVSTORE}/foreign", 64 * MIB).uuid
    disk, pod = documents_of(example("pod-block"))
    bound = disk.replace("spec:\n", "spec:\n  volumeName: foreign\n", 1)
    with (
        cluster.applied(VOLUME.format(name="foreign", handle=handle)),
        cluster.applied(bound),
        cluster.applied(pod),
    ):
        said = f"code = NotFound desc = volume {handle} is not one of {DRIVER} on node {NODE}"
        wait_event(cluster, "raw", said)
        left = deployment.census()
        assert (left.lvols, left.exports, left.loops) == (("foreign",), (), ())
        cluster.delete("pod", "raw")
        cluster.delete("pvc", "disk")
        cluster.delete("pv", "foreign")
    deployment.volumes.delete(handle)


def documents_of(manifest: str) -> list[str]:
    """Returns the objects of a manifest, each as text."""
    return manifest.split("\n---\n")


@pytest.mark.nightly
def test_a_claim_is_told_when_its_volume_waits_and_when_it_is_in_order_again(
    cluster: Cluster, deployment: Deployment
) -> None:
    def told() -> dict[str, tuple[str, str]]:
        uid = cluster.get("pvc", "disk")["metadata"]["uid"]
        found = cluster.items("events", f"--field-selector=involvedObject.uid={uid}")
        return {each["reason"]: (each["type"], each["message"]) for each in found}

    with (
        deployment.driver_with("--health-interval=0.5"),
        cluster.applied(example("pod-block")),
    ):
        cluster.wait("pod/raw", "condition=Ready")
        assert "TargetAway" not in told()
        with deployment.without("virtlun-target"):
            until(lambda: "TargetAway" in told(), "an event", every_s=0.2)
        kind, message = told()["TargetAway"]
        assert kind == "Warning"
        assert message.startswith(f"on node {NODE}: I/O waits for its target: ")
        until(lambda: "VolumeHealthy" in told(), "its end", every_s=0.2)
        assert told()["VolumeHealthy"][0] == "Normal"
