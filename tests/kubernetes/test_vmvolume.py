"""VmVolumes on a real API server, with the real provisioner, kubelet and target.

There is no virtual machine here: KubeVirt's object of one is written by the test, and where a guest
is needed our own vhost-user front end does what one would. The whole of it, with a guest that
boots, is in test_kubevirt.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
import uuid
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from csi.kubevirt.vmvolume.controller import NODE_LABEL
from csi.kubevirt.vmvolume.crd import CRD
from csi.kubevirt.vmvolume.model import FINALIZER
from pydataplane import methods
from pydataplane.errors import RpcError
from tests.kubernetes.cluster import API_PORT, NODE, Cluster
from tests.kubernetes.driver import EXAMPLES, ROOT, Deployment, driver_program
from tests.kubernetes.events import wait_event
from tests.kubernetes.kubevirt.objects import definitions
from tests.kubernetes.sandbox import Process, SandboxError
from tests.kubernetes.test_volumes import MIB, claim, device_bytes, grow, volume_of
from tests.support.initiator import Initiator
from tests.support.night import by_day
from tests.support.wait import until

HTTP = "127.0.0.1:9820"
DEADLINE_S = 60.0
PREVENT, ALLOW = (bytes([0x1E, 0, 0, 0, way, 0]) for way in (1, 0))  # SPC-4 6.22
READ_CAPACITY = bytes([0x25, *bytes(9)])


def vm_volume(name: str = "extra", claim_name: str = "data", **spec: Any) -> str:
    """Returns a VmVolume's manifest."""
    return json.dumps(
        {
            "apiVersion": "virtlun.dev/v1alpha1",
            "kind": "VmVolume",
            "metadata": {"name": name},
            "spec": {"vmName": "vm", "claimName": claim_name, **spec},
        }
    )


class World:
    """A controller of its own beside the deployment, and a machine without a guest."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.cluster: Cluster = deployment.cluster
        self.client = deployment.client
        self.process: Process | None = None
        self.starts = 0

    # The controller

    def start(self) -> None:
        """Starts it as the DaemonSet does, with the manifest's account and its rights."""
        self.starts += 1
        scratch = self.cluster.scratch / "vmvolume"
        scratch.mkdir(exist_ok=True)
        self.process = self.cluster.box.spawn(
            f"virtlun-csi-kubevirt-{self.starts}",
            *self.deployment.in_pod(),
            *driver_program(),
            *("--mode=node", f"--node-id={NODE}", f"--endpoint=unix://{scratch / 'csi.sock'}"),
            *(f"--target-socket={self.deployment.target_socket}", f"--http={HTTP}"),
            *("--kubevirt", f"--node-hook-socket={scratch / 'hook.sock'}", "--log-level=debug"),
            env={
                "KUBERNETES_SERVICE_HOST": "127.0.0.1",
                "KUBERNETES_SERVICE_PORT": str(API_PORT),
                "PYTHONPATH": str(ROOT),
            },
        )
        until(self._serves, "the driver", deadline_s=DEADLINE_S)

    def _serves(self) -> bool:
        if self.process is None or not self.process.running():
            raise AssertionError(self.process.words() if self.process else "it was not started")
        url = f"http://{HTTP}/healthz"
        return (
            self.cluster.box.run("busybox", "wget", "-q", "-O", "-", url, check=False).stdout != ""
        )

    def stop(self) -> None:
        """Stops it in order."""
        assert self.process is not None
        assert self.process.stop() == 0
        self.process = None

    def kill(self) -> None:
        """Ends it as a crash does."""
        assert self.process is not None
        self.process.send(signal.SIGKILL)
        self.process.process.wait(90)
        self.process = None

    def metrics(self) -> dict[str, float]:
        """Returns its metrics by name and labels."""
        url = f"http://{HTTP}/metrics"
        text = self.cluster.box.run("busybox", "wget", "-q", "-O", "-", url).stdout
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    # The machine

    def run_machine(self, phase: str = "Running", *, controller: bool = True) -> str:
        """Makes machine `vm` run on the node, and returns its new pod's UID."""
        pod = str(uuid.uuid4())
        if controller:
            self.client.call("vhost_create_scsi_controller", ctrlr=f"pod-{pod}", own_folder=True)
        instance = {
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "metadata": {"name": "vm", "labels": {NODE_LABEL: NODE}},
            "spec": {"volumes": []},
            "status": {"phase": phase, "nodeName": NODE, "activePods": {pod: NODE}},
        }
        self.cluster.apply(json.dumps(instance))
        return pod

    def end_machine(self, pod: str) -> None:
        """Ends it, and its pod's controller after its LUNs."""
        self.cluster.delete("virtualmachineinstances", "vm")
        with contextlib.suppress(RpcError):
            self.client.call("vhost_delete_controller", ctrlr=f"pod-{pod}")

    def luns(self, pod: str) -> dict[int, methods.Lun]:
        """Returns the LUNs of a pod's controller by target number."""
        (found,) = self.client.call("vhost_get_controllers", name=f"pod-{pod}")
        targets = found["backend_specific"]["scsi"]
        return {each["scsi_dev_num"]: each["luns"][0] for each in targets}

    # The objects

    def status(self, name: str = "extra") -> dict[str, Any]:
        """Returns a VmVolume's status."""
        return dict(self.cluster.get("vmvolume", name).get("status") or {})

    def until(
        self, phase: str, reason: str | None = None, name: str = "extra", text: str = ""
    ) -> dict[str, Any]:
        """Waits for a phase, with a reason and a text in its message if given."""

        def there() -> dict[str, Any] | None:
            found = self.status(name)
            reasons = [each["reason"] for each in found.get("conditions", ())]
            right = found.get("phase") == phase and (reason is None or reason in reasons)
            return found if right and text in found["message"] else None

        try:
            return until(there, f"{phase} {reason} {text}", deadline_s=DEADLINE_S)
        except (SandboxError, AssertionError) as error:
            words = self.process.words() if self.process else "no controller"
            raise SandboxError(f"{error}\n{self.status(name)}\n{words}") from None

    def finalizers(self, what: str, name: str) -> list[str]:
        """Returns an object's finalizers."""
        return list(self.cluster.get(what, name)["metadata"].get("finalizers") or ())

    def gone(self, name: str = "extra") -> None:
        """Waits until a VmVolume is gone."""
        self.cluster.wait(f"vmvolume/{name}", "delete", DEADLINE_S)


@pytest.fixture(scope="module")
def running(deployment: Deployment) -> Iterator[World]:
    """The kinds and the controller."""
    cluster = deployment.cluster
    cluster.apply(CRD)
    for definition in definitions():
        cluster.apply(json.dumps(definition))
    for name in ("vmvolumes.virtlun.dev", "virtualmachineinstances.kubevirt.io"):
        cluster.wait(f"crd/{name}", "condition=Established")
    made = World(deployment)
    made.start()
    yield made
    if made.process is not None:
        made.stop()


@pytest.fixture
def world(running: World) -> Iterator[World]:
    """Nothing is there before a test, and nothing after it."""
    running.deployment.wait_clean()
    if running.process is None:
        running.start()
    yield running
    cluster = running.cluster
    if running.process is None:
        running.start()
    cluster.delete("vmvolume", "--all")
    cluster.delete("virtualmachineinstances", "--all")
    running.deployment.sweep()
    for controller in running.client.call("vhost_get_controllers"):
        assert not controller["backend_specific"]["scsi"], "a LUN was left behind"
        # The target may not have heard yet that its guest has ended.
        running.client.call("vhost_delete_controller", ctrlr=controller["ctrlr"], force=True)
    running.deployment.wait_clean()


@pytest.fixture
def pod(world: World) -> str:
    """A machine that runs."""
    return world.run_machine()


# The definition


@pytest.mark.nightly
def test_the_server_guards_what_the_definition_says(world: World) -> None:
    cluster = world.cluster
    cluster.apply(vm_volume(serial="one"))
    for field, value in {
        "vmName": "other",
        "claimName": "other",
        "readOnly": True,
        "removable": False,
        "serial": "two",
    }.items():
        with pytest.raises(SandboxError, match=f"{field} cannot be changed: delete the VmVolume"):
            patch(cluster, "vmvolume", "extra", {"spec": {field: value}})
    with pytest.raises(SandboxError, match="serial cannot be changed"):
        patch(cluster, "vmvolume", "extra", {"spec": {"serial": None}})
    patch(cluster, "vmvolume", "extra", {"spec": {"releaseTimeoutSeconds": 5}})
    for bad, said in (
        (vm_volume("bad", serial=""), "serial"),
        (vm_volume("bad", releaseTimeoutSeconds=-1), "releaseTimeoutSeconds"),
        (vm_volume("bad", claim_name=""), "claimName"),
        (vm_volume("bad", claim_name="../../other/persistentvolumeclaims/data"), "claimName"),
        (vm_volume("bad", colour="red"), "colour"),
    ):
        with pytest.raises(SandboxError, match=said):
            cluster.apply(bad)


def patch(cluster: Cluster, what: str, name: str, change: dict[str, Any], *words: str) -> None:
    """Merges a change into an object."""
    cluster.kubectl("patch", what, name, "--type=merge", "-p", json.dumps(change), *words)


def test_who_edits_a_namespace_may_make_one_but_not_say_how_it_is(world: World) -> None:
    """Through the roles that every cluster has; the status says which LUNs are to be taken away."""
    cluster = world.cluster
    user = "--as=jane"

    def may(*words: str) -> bool:
        return cluster.kubectl("auth", "can-i", *words, user, check=False).strip() == "yes"

    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "jane"},
        "subjects": [
            {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "jane"},
        ],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"},
    }
    with cluster.applied(json.dumps(binding)):
        until(lambda: may("create", "vmvolumes"), "jane's rights", deadline_s=DEADLINE_S)
        assert may("delete", "vmvolumes")
        assert not may("patch", "vmvolumes", "--subresource=status")
        cluster.kubectl("apply", "-f", "-", user, stdin=vm_volume())
        with pytest.raises(SandboxError, match="forbidden"):
            patch(cluster, "vmvolume", "extra", {"status": {}}, "--subresource=status", user)


# The way in and out


def test_a_claim_becomes_a_lun_and_stops_being_one(world: World, pod: str) -> None:
    cluster = world.cluster
    before = world.metrics()
    with cluster.applied(claim("data", "virtlun-block")):
        cluster.wait_phase("pvc/data", "Bound")
        handle = volume_of(cluster, "data")["spec"]["csi"]["volumeHandle"]
        cluster.apply(vm_volume(serial="scratch-1"))
        status = world.until("Attached")
        assert (status["node"], status["pod"], status["volume"]) == (NODE, pod, handle)
        ((target, lun),) = world.luns(pod).items()
        assert target == status["target"]
        assert (lun["bdev_name"], lun["serial"]) == (handle, "scratch-1")
        assert (lun["read_only"], lun["removable"]) == (False, True)
        assert lun["block_size"] == 4096, "as pods see a volume of this class"
        assert status["attachedAt"].endswith("Z")
        seen = {each["type"]: each["status"] for each in status["conditions"]}
        assert seen == {"Attached": "True", "SeenByGuest": "False"}, "there is no guest"
        assert FINALIZER in world.finalizers("vmvolume", "extra")
        assert FINALIZER in world.finalizers("pvc", "data")
        wait_event(cluster, "extra", "Attached: target")
        columns = cluster.kubectl("get", "vmvolume", "extra").splitlines()
        assert columns[0].split() == ["NAME", "VM", "CLAIM", "NODE", "TARGET", "PHASE", "AGE"]
        assert columns[1].split()[:-1] == ["extra", "vm", "data", NODE, str(target), "Attached"]
        attached = 'virtlun_csi_vmvolumes{phase="Attached"}'
        until(lambda: world.metrics().get(attached) == 1.0, "it is counted")
        cluster.delete("vmvolume", "extra")
        assert world.luns(pod) == {}
        assert FINALIZER not in world.finalizers("pvc", "data")
    name = 'virtlun_csi_vmvolume_reconciles_total{result="Attached"}'
    assert world.metrics()[name] > before.get(name, 0.0)


@pytest.mark.nightly
def test_its_options_reach_the_target(world: World, pod: str) -> None:
    with world.cluster.applied(claim("data", "virtlun-block")):
        world.cluster.apply(vm_volume(readOnly=True, removable=False))
        target = world.until("Attached")["target"]
        lun = world.luns(pod)[target]
        assert (lun["read_only"], lun["removable"]) == (True, False)


def test_a_claim_in_a_vm_is_kept_until_the_vmvolume_is_gone(world: World, pod: str) -> None:
    cluster = world.cluster
    cluster.apply(claim("data", "virtlun-block"))
    cluster.apply(vm_volume())
    world.until("Attached")
    cluster.delete("pvc", "data", wait=False)
    until(
        lambda: "deletionTimestamp" in cluster.get("pvc", "data")["metadata"],
        "the claim's deletion",
        deadline_s=90,
    )
    assert world.luns(pod) != {}
    assert world.status()["phase"] == "Attached"
    cluster.delete("vmvolume", "extra")
    cluster.wait("pvc/data", "delete", DEADLINE_S)
    assert world.luns(pod) == {}


def test_a_claim_may_come_after_and_waits_for_no_pod(world: World, pod: str) -> None:
    """Its class binds with the first consumer, which is the machine."""
    cluster = world.cluster
    cluster.apply(vm_volume())
    world.until("Pending", "ClaimNotFound")
    with cluster.applied(claim("data", "virtlun-thin")):
        status = world.until("Attached")
        chosen = cluster.get("pvc", "data")["metadata"]["annotations"]
        assert chosen["volume.kubernetes.io/selected-node"] == NODE
        assert world.luns(pod).keys() == {status["target"]}
        cluster.delete("vmvolume", "extra")


@pytest.mark.nightly
def test_two_of_one_claim_come_one_after_the_other(world: World, pod: str) -> None:
    cluster = world.cluster
    with cluster.applied(claim("data", "virtlun-block")):
        cluster.apply(vm_volume("first"))
        world.until("Attached", name="first")
        cluster.apply(vm_volume("second"))
        world.until("Pending", "ClaimTaken", name="second", text="VmVolume first has claim data")
        cluster.delete("vmvolume", "first")
        world.until("Attached", name="second")
        assert len(world.luns(pod)) == 1
        cluster.delete("vmvolume", "second")


# Guests


@pytest.fixture
def guest(world: World, pod: str) -> Iterator[Initiator]:
    """A front end on the machine's controller, connected as its guest."""
    with Initiator(world.deployment.run_dir / "vhost" / f"pod-{pod}" / "vhost.sock") as made:
        made.send("connect")
        yield made


def test_the_status_tells_when_the_guest_had_it(world: World, guest: Initiator) -> None:
    cluster = world.cluster
    before = world.metrics()
    with cluster.applied(claim("data", "virtlun-block")):
        cluster.wait_phase("pvc/data", "Bound")
        began = time.time()
        cluster.apply(vm_volume())
        target = world.until("Attached")["target"]
        guest.ready(target)
        assert "guestSeenAt" not in world.status()
        guest.cdb(READ_CAPACITY, target=target, data_in_len=8)
        cluster.wait("vmvolume/extra", "condition=SeenByGuest", DEADLINE_S)
        status = world.status()
        had, seen = (
            datetime.fromisoformat(status[name]).timestamp()
            for name in ("attachedAt", "guestSeenAt")
        )
        assert began <= had <= seen <= time.time()
        for name in ("event", "guest_seen"):
            # It is counted when the status is written.
            count = f"virtlun_csi_vmvolume_{name}_seconds_count"
            until(lambda: world.metrics()[count] == before[count] + 1, count)  # noqa: B023
        cluster.delete("vmvolume", "extra")


def test_a_disk_in_use_is_waited_for(world: World, pod: str, guest: Initiator) -> None:
    cluster = world.cluster
    with cluster.applied(claim("data", "virtlun-block")):
        cluster.apply(vm_volume(releaseTimeoutSeconds=600))
        target = world.until("Attached")["target"]
        guest.ready(target)
        guest.cdb(PREVENT, target=target)
        cluster.delete("vmvolume", "extra", wait=False)
        world.until("Releasing", "InUse", text="600 s after the deletion it is taken away by force")
        assert world.luns(pod).keys() == {target}
        guest.cdb(ALLOW, target=target)
        world.gone()
        assert world.luns(pod) == {}


@pytest.mark.nightly
def test_a_disk_in_use_is_taken_away_by_force(world: World, pod: str, guest: Initiator) -> None:
    """A timeout that is shortened while it runs counts as well."""
    cluster = world.cluster
    forced = world.metrics()["virtlun_csi_vmvolume_forced_releases_total"]
    with cluster.applied(claim("data", "virtlun-block")):
        cluster.apply(vm_volume("kept", releaseTimeoutSeconds=600))
        target = world.until("Attached", name="kept")["target"]
        guest.ready(target)
        guest.cdb(PREVENT, target=target)
        cluster.delete("vmvolume", "kept", wait=False)
        world.until("Releasing", "InUse", name="kept")
        patch(cluster, "vmvolume", "kept", {"spec": {"releaseTimeoutSeconds": 1}})
        world.gone("kept")
        assert world.luns(pod) == {}
        assert FINALIZER not in world.finalizers("pvc", "data")
        wait_event(cluster, "kept", "ForcedRelease: the guest had not released the disk 1 s")
        assert world.metrics()["virtlun_csi_vmvolume_forced_releases_total"] == forced + 1


def test_a_restart_of_the_target_leaves_the_use_in_doubt(world: World, guest: Initiator) -> None:
    cluster, deployment = world.cluster, world.deployment
    with cluster.applied(claim("data", "virtlun-block")):
        cluster.apply(vm_volume(releaseTimeoutSeconds=600))
        target = world.until("Attached")["target"]
        guest.ready(target)
        guest.cdb(READ_CAPACITY, target=target, data_in_len=8)
        cluster.wait("vmvolume/extra", "condition=SeenByGuest", DEADLINE_S)
        before = world.status()
        deployment.kill("virtlun-target")
        deployment.wait_ready()
        cluster.delete("vmvolume", "extra", wait=False)
        after = world.until("Releasing", "InUse", text="the target restarted and cannot tell")
        assert {key: after[key] for key in ("attachedAt", "guestSeenAt", "target")} == {
            key: before[key] for key in ("attachedAt", "guestSeenAt", "target")
        }
        patch(cluster, "vmvolume", "extra", {"spec": {"releaseTimeoutSeconds": 0}})
        world.gone()


# Machines


def test_a_machine_that_stops_and_starts_gets_its_disk_again(world: World) -> None:
    cluster = world.cluster
    with cluster.applied(claim("data", "virtlun-block")):
        cluster.apply(vm_volume())
        world.until("Pending", "VmNotRunning", text="does not run")
        first = world.run_machine("Scheduled")
        world.until("Pending", "VmNotRunning", text="is starting")
        patch(cluster, "virtualmachineinstances", "vm", {"status": {"phase": "Running"}})
        assert world.until("Attached")["pod"] == first
        patch(cluster, "virtualmachineinstances", "vm", {"status": {"phase": "Succeeded"}})
        status = world.until("Pending", "VmNotRunning", text="does not run")
        assert status.keys().isdisjoint({"node", "pod", "target", "attachedAt"})
        assert world.luns(first) == {}
        assert FINALIZER not in world.finalizers("pvc", "data")
        world.end_machine(first)
        second = world.run_machine()
        assert world.until("Attached")["pod"] == second
        cluster.delete("virtualmachineinstances", "vm")
        world.until("Pending", "VmNotRunning", text="does not run")
        assert world.luns(second) == {}


def test_a_machine_on_another_node_is_told_where_the_claim_is(world: World, pod: str) -> None:
    cluster = world.cluster
    with cluster.applied(claim("data", "virtlun-block")):
        cluster.apply(vm_volume())
        world.until("Attached")
        moved = {"nodeName": "elsewhere", "activePods": {str(uuid.uuid4()): "elsewhere"}}
        meta = {"labels": {NODE_LABEL: "elsewhere"}}
        patch(cluster, "virtualmachineinstances", "vm", {"metadata": meta, "status": moved})
        world.until("Pending", "VmNotRunning", text="runs on node elsewhere now")
        assert world.luns(pod) == {}
        cluster.delete("vmvolume", "extra")


@pytest.mark.nightly
def test_a_node_that_holds_nothing_is_not_waited_for(world: World) -> None:
    """It was the machine's before, and is away now."""
    cluster = world.cluster
    with cluster.applied(claim("data", "virtlun-block")):
        cluster.apply(vm_volume())
        world.until("Pending", "VmNotRunning", text="does not run")
        patch(cluster, "vmvolume", "extra", {"status": {"node": "away"}}, "--subresource=status")
        pod = world.run_machine()
        status = world.until("Attached")
        assert (status["node"], status["pod"]) == (NODE, pod)
        cluster.delete("vmvolume", "extra")


@pytest.mark.nightly
def test_a_machine_that_is_being_migrated_gets_its_disk_afterwards(world: World, pod: str) -> None:
    """The disk would stay behind with the node that it leaves."""
    cluster = world.cluster
    with cluster.applied(claim("data", "virtlun-block")):
        cluster.wait_phase("pvc/data", "Bound")
        state: dict[str, Any] = {"targetNode": "elsewhere"}
        patch(cluster, "virtualmachineinstances", "vm", {"status": {"migrationState": state}})
        cluster.apply(vm_volume())
        world.until("Pending", "VmMigrating", text="is being migrated")
        assert world.luns(pod) == {}
        state |= {"completed": True, "failed": True}
        patch(cluster, "virtualmachineinstances", "vm", {"status": {"migrationState": state}})
        world.until("Attached")
        cluster.delete("vmvolume", "extra")


def test_a_machine_without_a_controller_is_told_what_it_lacks(world: World) -> None:
    cluster = world.cluster
    with cluster.applied(claim("data", "virtlun-block")):
        pod = world.run_machine(controller=False)
        cluster.apply(vm_volume())
        world.until("Failed", "NoController", text="virtlun.dev/controller")
        world.end_machine(pod)
        world.run_machine()
        world.until("Attached")
        cluster.delete("vmvolume", "extra")


# Claims that cannot be had


@pytest.mark.nightly
def test_a_claim_in_use_by_a_pod_comes_after_it(world: World, pod: str) -> None:
    cluster = world.cluster
    with cluster.applied((EXAMPLES / "pod-block.yaml").read_text()):
        cluster.wait("pod/raw", "condition=Ready")
        cluster.apply(vm_volume(claim_name="disk"))
        world.until("Pending", "InUse", text="claim disk is in use by pod raw: delete it first")
        assert "Warning" in cluster.kubectl("describe", "vmvolume", "extra")
        assert device_bytes(cluster, "raw") == 64 * MIB
        cluster.delete("pod", "raw")
        world.until("Attached")
        assert len(world.luns(pod)) == 1
        cluster.delete("vmvolume", "extra")


@by_day("manifest1-NotOurs-whose volumes are other.example.org's")
@pytest.mark.parametrize(
    ("manifest", "reason", "said"),
    [
        (claim("data", "virtlun-thin", "400Mi", "Filesystem"), "NotBlock", "volumeMode Block"),
        (claim("data", "foreign"), "NotOurs", "whose volumes are other.example.org's"),
        (claim("data", "nowhere"), "ClaimNotBound", "of class nowhere, which is not there"),
    ],
)
def test_a_claim_of_the_wrong_kind_says_so(
    world: World, pod: str, manifest: str, reason: str, said: str
) -> None:
    cluster = world.cluster
    foreign = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": "foreign"},
        "provisioner": "other.example.org",
    }
    with cluster.applied(json.dumps(foreign)), cluster.applied(manifest):
        cluster.apply(vm_volume())
        phase = "Pending" if reason == "ClaimNotBound" else "Failed"
        world.until(phase, reason, text=said)
        wait_event(cluster, "extra", f"{reason}: claim data")
        assert world.luns(pod) == {}
        assert world.finalizers("vmvolume", "extra") == []
        cluster.delete("vmvolume", "extra")


# Growth


def test_a_claim_grows_while_it_is_a_lun(world: World, pod: str) -> None:
    cluster = world.cluster
    with cluster.applied(claim("data", "virtlun-block")):
        cluster.apply(vm_volume())
        handle = world.until("Attached")["volume"]
        grow(cluster, "data", "128Mi")
        cluster.wait("pvc/data", "jsonpath={.status.capacity.storage}=128Mi")
        assert world.deployment.volumes.volume(handle).size == 128 * MIB
        assert "conditions" not in cluster.get("pvc", "data")["status"]
        cluster.delete("vmvolume", "extra")


@pytest.mark.nightly
def test_growth_decided_on_another_node_is_done_here(world: World, pod: str) -> None:
    """What csi-resizer writes when another node's driver has answered that the node is to do it.

    The volume's capacity is the new one, and the claim waits for a kubelet. None comes: no pod has
    the claim.
    """
    cluster = world.cluster
    with cluster.applied(claim("data", "virtlun-block")):
        cluster.apply(vm_volume())
        handle = world.until("Attached")["volume"]
        name = cluster.get("pvc", "data")["spec"]["volumeName"]
        patch(cluster, "pv", name, {"spec": {"capacity": {"storage": "192Mi"}}})
        waiting = {"type": "FileSystemResizePending", "status": "True"}
        pending = {
            "conditions": [waiting],
            "allocatedResourceStatuses": {"storage": "NodeResizePending"},
        }
        patch(cluster, "pvc", "data", {"status": pending}, "--subresource=status")
        cluster.wait("pvc/data", "jsonpath={.status.capacity.storage}=192Mi")
        status = cluster.get("pvc", "data")["status"]
        assert status.keys().isdisjoint({"conditions", "allocatedResourceStatuses"})
        assert world.deployment.volumes.volume(handle).size == 192 * MIB
        cluster.delete("vmvolume", "extra")


# Crashes


@pytest.mark.nightly
def test_a_controller_that_starts_anew_takes_nothing_away(world: World, pod: str) -> None:
    cluster = world.cluster
    with cluster.applied(claim("data", "virtlun-block")):
        cluster.apply(vm_volume())
        world.until("Attached")
        before, lun = world.status(), world.luns(pod)
        world.kill()
        world.start()
        cluster.apply(vm_volume("other", claim_name="none"))
        world.until("Pending", "ClaimNotFound", name="other")  # it is at work
        assert world.luns(pod) == lun, "it is the same one, which nobody made anew"
        assert world.status() == before


@pytest.mark.nightly
def test_what_happened_while_it_was_away_is_seen(world: World, pod: str) -> None:
    cluster = world.cluster
    with (
        cluster.applied(claim("data", "virtlun-block")),
        cluster.applied(claim("late", "virtlun-block")),
    ):
        cluster.apply(vm_volume())
        world.until("Attached")
        world.stop()
        assert len(world.luns(pod)) == 1, "a stop leaves the disks"
        cluster.delete("vmvolume", "extra", wait=False)
        cluster.apply(vm_volume("other", claim_name="late"))
        world.start()
        world.gone()
        handle = world.until("Attached", name="other")["volume"]
        assert [lun["bdev_name"] for lun in world.luns(pod).values()] == [handle]
        world.stop()
        cluster.delete("virtualmachineinstances", "vm")
        world.start()
        world.until("Pending", "VmNotRunning", name="other")
        assert world.luns(pod) == {}


@pytest.mark.nightly
def test_a_target_that_dies_and_comes_back_has_the_lun(world: World, pod: str) -> None:
    cluster, deployment = world.cluster, world.deployment
    with cluster.applied(claim("data", "virtlun-block")):
        cluster.apply(vm_volume())
        before = world.until("Attached")
        with deployment.without("virtlun-target"):
            cluster.apply(vm_volume("other", claim_name="none"))
            cluster.delete("vmvolume", "extra", wait=False)
            world.until("Pending", "TargetFailed", name="other", text="no target answers")
            assert FINALIZER in world.finalizers("vmvolume", "extra")
            world.until("Releasing", "TargetFailed", text="no target answers")
        deployment.wait_ready()
        world.gone()
        world.until("Pending", "ClaimNotFound", name="other")
        assert world.luns(pod) == {}
        assert before["target"] == 0


@pytest.mark.nightly
@pytest.mark.parametrize("down", [False, True])
def test_finalizers_taken_off_by_hand_leave_nothing(world: World, pod: str, down: bool) -> None:
    cluster = world.cluster
    with cluster.applied(claim("data", "virtlun-block")):
        cluster.apply(vm_volume())
        world.until("Attached")
        if down:
            world.stop()
        cluster.delete("vmvolume", "extra", wait=False)
        with contextlib.suppress(SandboxError):  # the controller was faster
            patch(cluster, "vmvolume", "extra", {"metadata": {"finalizers": None}})
        world.gone()
        if down:
            world.start()
        until(
            lambda: FINALIZER not in world.finalizers("pvc", "data") and world.luns(pod) == {},
            "a claim that is free",
            deadline_s=DEADLINE_S,
        )
