"""Virtual machines of KubeVirt on our claims, from boot to the end of them.

What of KubeVirt is simulated, and what is real, is said in tests/kubernetes/kubevirt. Every test
begins and ends with nothing of any machine or volume left anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from pydataplane.domain.limits import NONE
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.events import events, wait_event
from tests.kubernetes.images import BUSYBOX_IMAGE
from tests.kubernetes.kubevirt import census
from tests.kubernetes.kubevirt.claims import (
    claim,
    condition,
    grow,
    read_in_a_pod,
    status,
    vm_volume,
    wait_phase,
)
from tests.kubernetes.kubevirt.examples import FOLDER, LEGACY_VM, VM, machine, nothing_left
from tests.kubernetes.kubevirt.guest import (
    OURS,
    block_sizes,
    disk_at,
    read,
    size,
    vendor,
    wait_size,
    write,
)
from tests.kubernetes.kubevirt.objects import QEMU, VIRT_CONTROLLER
from tests.kubernetes.kubevirt.simulator import KubeVirt, Machine
from tests.kubernetes.sandbox import SandboxError
from tests.kubernetes.test_limits import GOLD, SILVER, ask, has, limits
from tests.kubernetes.test_volumes import example
from tests.support.wait import until

LABEL = 'virtlun.dev/controller: "true"'
#: What a disk of a machine may ask for.
BLOCK_SIZE = "blockSize: {custom: {logical: 512, physical: 16384}}"
#: A second volume of the example's machine.
SECOND_DISK = """\
            - name: files
              disk: {bus: virtio}
          interfaces:
"""
SECOND_VOLUME = """\
        - name: files
          persistentVolumeClaim:
            claimName: files
"""

#: A guest boots in software, on a machine that others may keep busy.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True)
def clean(kubevirt: KubeVirt) -> Iterator[None]:
    """Nothing is there before a test, and nothing after it."""
    with nothing_left(kubevirt):
        yield


@pytest.mark.nightly
def test_a_machine_boots_from_its_claim_and_gets_grows_and_loses_another(
    kubevirt: KubeVirt,
) -> None:
    """The whole life: the claims are LUNs of one controller, and ordinary claims afterwards."""
    cluster, deployment = kubevirt.cluster, kubevirt.deployment
    manifest = VM.replace("bus: scsi}", f"bus: scsi}}\n              {BLOCK_SIZE}")
    with machine(kubevirt, manifest) as vm, cluster.applied(claim("data")):
        agent = vm.start()
        assert vm.failures == [], vm.failures
        assert block_sizes(agent, "sda") == (512, 16384)
        assert (vendor(agent, "sda"), size(agent, "sda")) == (OURS, 64)
        written = write(agent, "sda")
        domain = vm.xml()
        disks = domain.findall("devices/disk")
        assert [disk.get("type") for disk in disks] == ["vhostuser"], "no disk but the carrier"
        assert domain.find("memoryBacking/source[@type='memfd']") is not None
        assert domain.find("memoryBacking/access[@mode='shared']") is not None
        counted = census.census(deployment)
        assert counted.controllers == (f"pod-{vm.pod_uid}",)
        assert len(counted.luns) == len(counted.parked) == 1

        cluster.apply(FOLDER / "vmvolume.yaml")
        told = wait_phase(cluster, "extra", "Attached")
        assert (told["node"], told["pod"], told["target"]) == ("node1", vm.pod_uid, 1)
        second = disk_at(agent, told["target"])
        assert size(agent, second) == 64
        assert "scratch-1" in agent.run(f"sg_vpd -p 0x80 /dev/{second}")
        until(
            lambda: condition(cluster, "extra", "SeenByGuest").startswith("True"),
            "the condition SeenByGuest",
            deadline_s=90,
        )
        told = status(cluster, "extra")
        assert (told["phase"], told["message"][:9]) == ("Attached", "target 1,")
        had, seen = (datetime.fromisoformat(told[name]) for name in ("attachedAt", "guestSeenAt"))
        assert had <= seen <= datetime.now(UTC), "when the guest had it"
        in_second = write(agent, second)

        assert told_of_growth(vm) == []
        for name, disk in (("boot", "sda"), ("data", second)):
            grow(cluster, name, 96)
            wait_size(agent, disk, 96)
            wait = f"pvc/{name}", "jsonpath={.status.capacity.storage}=96Mi"
            cluster.wait(*wait)
        assert told_of_growth(vm) == [0, 1], "by PARAM_CHANGE in the guest's event queue"
        vm.update_volumes()
        vm.launch()  # virt-handler passes on what the claims are now; nothing is to be done
        assert vm.runs == 1

        cluster.delete("vmvolume", "extra", wait=False)
        agent.wait_for(f"! [ -e /sys/block/{second} ]")
        cluster.wait("vmvolume/extra", "delete")
        assert read_in_a_pod(cluster, "data", 60) == in_second

        cluster.delete("virtualmachine", "vm", wait=False)
        vm.stop()
        census.wait_nothing(deployment)
        assert deployment.exports() == []
        assert read_in_a_pod(cluster, "boot", 60) == written


def told_of_growth(vm: Machine) -> list[int]:
    """Returns the targets for which the guest's event queue had PARAM_CHANGE."""
    (found,) = vm.kubevirt.deployment.client.call("vhost_get_controllers", name=f"pod-{vm.pod_uid}")
    return [
        one["scsi_dev_num"]
        for one in found["backend_specific"]["scsi"]
        if one["luns"][0]["resize_event_at"] is not None
    ]


@pytest.mark.nightly
def test_a_machine_s_claims_are_limited_by_their_classes(kubevirt: KubeVirt) -> None:
    """The one that it boots from while it runs, and a hot-plugged one before it is there."""
    cluster, deployment = kubevirt.cluster, kubevirt.deployment
    data = claim("data").replace("spec:\n", "spec:\n  volumeAttributesClassName: virtlun-gold\n", 1)
    classes = cluster.applied(example("volumeattributesclasses"))
    with classes, machine(kubevirt) as vm, cluster.applied(data):
        agent = vm.start()
        assert limits(deployment, "boot") == NONE
        ask(cluster, "boot", "virtlun-silver")
        has(cluster, "boot", "virtlun-silver")
        until(lambda: limits(deployment, "boot") == SILVER, "the limits of the class")
        written = write(agent, "sda")
        assert read(agent, "sda") == written
        cluster.apply(vm_volume("more", "vm", "data"))
        disk = disk_at(agent, wait_phase(cluster, "more", "Attached")["target"])
        assert limits(deployment, "data") == GOLD
        ask(cluster, "data", "virtlun-unlimited")
        has(cluster, "data", "virtlun-unlimited")
        assert limits(deployment, "data") == NONE
        written = write(agent, disk)
        assert read(agent, disk) == written
        cluster.delete("vmvolume", "more")
        cluster.delete("virtualmachine", "vm", wait=False)
        vm.stop()
        assert limits(deployment, "boot") == SILVER


@pytest.mark.nightly
def test_a_disk_in_use_is_waited_for_and_then_taken_away(kubevirt: KubeVirt) -> None:
    """A guest that lets go in time loses nothing; one that does not is told about."""
    cluster = kubevirt.cluster
    with machine(kubevirt) as vm, cluster.applied(claim("data")):
        agent = vm.start()
        for lets_go in (True, False):
            cluster.apply(vm_volume("more", "vm", "data", releaseTimeoutSeconds=600))
            told = wait_phase(cluster, "more", "Attached")
            disk = disk_at(agent, told["target"])
            agent.run(f"mkfs.ext4 -q -F /dev/{disk} && mount /dev/{disk} /mnt")
            cluster.delete("vmvolume", "more", wait=False)
            told = wait_phase(cluster, "more", "Releasing")
            assert "in use" in told["message"]
            assert agent.run(f"ls /sys/block/{disk}/size")
            if lets_go:
                agent.run("umount /mnt")
            else:
                sooner = json.dumps({"spec": {"releaseTimeoutSeconds": 1}})
                cluster.kubectl("patch", "vmvolume", "more", "--type=merge", "-p", sooner)
            cluster.wait("vmvolume/more", "delete")
            agent.wait_for(f"! [ -e /sys/block/{disk} ]")
            if lets_go:
                assert "ForcedRelease" not in events(cluster, "more")
            else:
                wait_event(cluster, "more", "ForcedRelease")
        agent.run("umount -l /mnt")
        assert size(agent, "sda") == 64, "the other disk is as it was"
        cluster.delete("virtualmachine", "vm", wait=False)
        vm.stop()


def test_only_a_launcher_of_a_machine_gets_a_controller(kubevirt: KubeVirt) -> None:
    """Others may not make such a pod, and the driver publishes nothing for one that is made."""
    cluster = kubevirt.cluster
    pod = json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "curious", "labels": {"kubevirt.io": "virt-launcher"}},
            "spec": {
                "terminationGracePeriodSeconds": 0,
                "securityContext": {"runAsUser": 107, "runAsGroup": 107},
                "volumes": [{"name": "socket", "csi": {"driver": "csi.virtlun.dev"}}],
                "containers": [
                    {
                        "name": "main",
                        "image": BUSYBOX_IMAGE,
                        "command": ["sleep", "600"],
                        "volumeMounts": [{"name": "socket", "mountPath": "/socket"}],
                    }
                ],
            },
        }
    )
    with pytest.raises(SandboxError, match="only KubeVirt gives a pod an inline volume"):
        cluster.kubectl("create", "-f", "-", stdin=pod)
    cluster.kubectl("create", *VIRT_CONTROLLER, "-f", "-", stdin=pod)
    try:
        until(
            lambda: any("is no launcher of a virtual machine" in each for each in told(cluster)),
            "the driver's refusal",
        )
        assert cluster.get("pod", "curious")["status"]["phase"] == "Pending"
        assert census.census(kubevirt.deployment).controllers == ()
    finally:
        cluster.delete("pod", "curious")


def told(cluster: Cluster) -> list[str]:
    """Returns what events say of the pod `curious`."""
    found = cluster.items("events", "--field-selector=involvedObject.name=curious")
    return [each["message"] for each in found]


@pytest.mark.nightly
def test_a_machine_of_an_older_kubevirt_boots_with_its_own_sidecar(kubevirt: KubeVirt) -> None:
    """KubeVirt 1.8 has no plugins: the sidecar calls the node hooks in the pod's own folder."""
    cluster = kubevirt.cluster
    kubevirt.legacy = True
    try:
        with machine(kubevirt, LEGACY_VM, "vm-legacy") as vm, cluster.applied(claim("data")):
            agent = vm.start()
            assert (vendor(agent, "sda"), vm.failures) == (OURS, [])
            cluster.apply(vm_volume("more", "vm-legacy", "data"))
            told = wait_phase(cluster, "more", "Attached")
            assert disk_at(agent, told["target"])
            cluster.delete("vmvolume", "more")
            cluster.delete("virtualmachine", "vm-legacy", wait=False)
            vm.stop()
    finally:
        kubevirt.legacy = False


def without(folder: Path, *devices: bytes) -> Path:
    """Returns a QEMU that lacks devices, as some distributions build it."""
    program = QEMU.read_bytes()
    for device in devices:
        assert device + b"\0" in program
        program = program.replace(device + b"\0", device.replace(b"user", b"gone") + b"\0")
    lesser = folder / "-".join(["qemu-without", *(device.decode() for device in devices)])
    lesser.write_bytes(program)
    lesser.chmod(0o755)
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o755)
    return lesser


@pytest.mark.nightly
@pytest.mark.parametrize("bus", ["virtio", "scsi"])
def test_a_qemu_without_either_device_boots_from_the_block_device(
    kubevirt: KubeVirt, tmp_path: Path, bus: str
) -> None:
    """One sentence says so, and a VmVolume that it cannot. With bus scsi it takes no virtio-blk."""
    cluster = kubevirt.cluster
    devices = [b"vhost-user-scsi-pci", *([b"vhost-user-blk-pci"] if bus == "virtio" else [])]
    manifest, disk = VM.replace("bus: scsi", f"bus: {bus}"), "sda" if bus == "scsi" else "vda"
    with (
        machine(kubevirt, manifest, qemu=without(tmp_path, *devices)) as vm,
        cluster.applied(claim("data")),
    ):
        agent = vm.start()
        assert size(agent, disk) == 64
        assert vm.xml().find("devices/disk[@type='block']") is not None
        wait_event(cluster, "vm", "VolumeStays", vm.uid)
        said = [
            line for line in events(cluster, "vm", vm.uid).splitlines() if "VolumeStays" in line
        ]
        assert len(said) == 1
        assert "vhost-user-scsi-pci" in said[0]
        assert "boot" in said[0]
        cluster.apply(vm_volume("more", "vm", "data"))
        told = wait_phase(cluster, "more", "Failed")
        assert "vhost-user-scsi-pci" in told["message"]
        cluster.delete("vmvolume", "more")
        cluster.delete("virtualmachine", "vm", wait=False)
        vm.stop()


@pytest.mark.nightly
def test_a_qemu_without_vhost_user_scsi_has_its_claims_as_virtio_blk_disks(
    kubevirt: KubeVirt, tmp_path: Path
) -> None:
    """As in KubeVirt's own launcher. They grow under the guest, and are claims again afterwards."""
    cluster, deployment = kubevirt.cluster, kubevirt.deployment
    more = f"serial: BOOT-1\n              {BLOCK_SIZE}"
    manifest = VM.replace("bus: scsi}", f"bus: virtio}}\n              {more}")
    with machine(kubevirt, manifest, qemu=without(tmp_path, b"vhost-user-scsi-pci")) as vm:
        agent = vm.start()
        assert vm.failures == [], vm.failures
        assert events(cluster, "vm", vm.uid) == ""
        assert [disk.get("type") for disk in vm.xml().findall("devices/disk")] == ["vhostuser"]
        assert (size(agent, "vda"), block_sizes(agent, "vda")) == (64, (512, 16384))
        assert agent.run("cat /sys/block/vda/serial").strip() == "BOOT-1"
        written = write(agent, "vda")
        grow(cluster, "boot", 96)
        wait_size(agent, "vda", 96)
        cluster.wait("pvc/boot", "jsonpath={.status.capacity.storage}=96Mi")
        # A target that is killed meanwhile is a pause.
        deployment.kill("virtlun-target")
        assert read(agent, "vda") != ""
        cluster.delete("virtualmachine", "vm", wait=False)
        vm.stop()
        census.wait_nothing(deployment)
        assert deployment.exports() == []
        assert read_in_a_pod(cluster, "boot", 60) == written


@pytest.mark.nightly
def test_a_claim_of_mode_filesystem_stays_as_kubevirt_gives_it(kubevirt: KubeVirt) -> None:
    """Beside a LUN, in the same machine, with a sentence why."""
    cluster = kubevirt.cluster
    manifest = VM.replace("          interfaces:\n", SECOND_DISK) + SECOND_VOLUME
    files = claim("files", mode="Filesystem", storage_class="virtlun-thick")
    with cluster.applied(files), machine(kubevirt, manifest) as vm:
        agent = vm.start()
        assert vendor(agent, "sda") == OURS
        assert agent.run("cat /sys/block/vda/size").strip() != "0"
        wait_event(cluster, "vm", "volumeMode is Filesystem", vm.uid)
        cluster.delete("virtualmachine", "vm", wait=False)
        vm.stop()


@pytest.mark.nightly
def test_a_machine_boots_by_launcher_hooks(kubevirt: KubeVirt) -> None:
    """With the Plugin changed as plugin.yaml says for 1.10; a 1.10 asks for no domain hook."""
    cluster = kubevirt.cluster
    (manifest,) = [
        one
        for one in yaml.safe_load_all((FOLDER / "plugin.yaml").read_text())
        if one["kind"] == "Plugin"
    ]
    hooks = manifest["spec"].pop("domainHooks")
    for hook in hooks:
        hook["sidecar"]["permittedHooks"] = ["GuestDefinition"]
    manifest["spec"]["launcherHooks"] = hooks
    cluster.apply(json.dumps(manifest))
    kubevirt.has_launcher_hooks = True
    try:
        with machine(kubevirt) as vm:
            agent = vm.start()
            assert vm.failures == [], vm.failures
            assert (vendor(agent, "sda"), size(agent, "sda")) == (OURS, 64)
            cluster.delete("virtualmachine", "vm", wait=False)
            vm.stop()
    finally:
        kubevirt.has_launcher_hooks = False
        cluster.apply(FOLDER / "plugin.yaml")
    assert "launcherHooks" not in cluster.get("plugin", "virtlun")["spec"]


@pytest.mark.nightly
def test_a_machine_without_the_label_boots_from_the_block_device(kubevirt: KubeVirt) -> None:
    """It has nothing of ours but the claim, and no sidecar."""
    cluster = kubevirt.cluster
    with machine(kubevirt, VM.replace(LABEL, 'example: "1"')) as vm:
        agent = vm.start()
        assert (vendor(agent, "sda"), size(agent, "sda")) == ("QEMU", 64)
        names = [one["name"] for one in vm.pod["spec"]["containers"]]
        assert (names, vm.pod["spec"].get("initContainers", [])) == (["compute"], [])
        cluster.delete("virtualmachine", "vm", wait=False)
        vm.stop()
