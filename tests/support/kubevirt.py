"""A node's side of KubeVirt for tests: the driver's own parts over a real target, in this process.

Real: the target, the CSI services, loop devices, mounts, controllers, folders, hooks. NOT real: the
API server (claims are a dictionary here; tests/kubernetes has a real one) and kubelet, whose calls
and paths are made here. The launcher's pod has no process: `launcher` writes what /proc would say
of one.
"""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from csi.clustererrors import NotFoundError
from csi.controller import Controller
from csi.hostdevice import loopctl
from csi.hostdevice.loop import LoopDevices
from csi.kubevirt import probe
from csi.kubevirt.controllers import VmControllers
from csi.kubevirt.inline import InlineVolumes
from csi.kubevirt.nodehook import NodeHook
from csi.kubevirt.placement import Placement
from csi.kubevirt.podhook import PodHooks
from csi.kubevirt.pods import Pod
from csi.locks import VolumeLocks
from csi.metrics import Metrics
from csi.mounts import table
from csi.node import Node
from csi.objects import Claim, Object, PersistentVolume, Vmi
from csi.proto import csi_pb2 as pb
from csi.proto import kubevirt_plugin_pb2 as hooks
from csi.snapshots import OwnedSnapshots
from csi.targets import Targets
from csi.vhostface import VhostFace
from csi.volumes import OwnedVolumes
from pydataplane.client import Client
from pydataplane.emulator import Qemu
from pydataplane.watchedclient import WatchedClient
from tests.support.csi import block
from tests.support.target import Target

NAMESPACE = "default"
MIB = 1 << 20
QEMU = b"\0QEMU emulator version 9.1.0 (a test's)\0vhost-user-scsi-pci\0"
OLD_QEMU = b"\0QEMU emulator version 7.2.22 (a test's)\0vhost-user-scsi-pci\0"
BLK_QEMU = b"\0QEMU emulator version 9.1.0 (a test's)\0vhost-user-blk-pci\0"
POOR_QEMU = b"\0QEMU emulator version 9.1.0 (a test's)\0virtio-blk-pci\0"


class Api:
    """Claims by name, and the events that were told."""

    def __init__(self) -> None:
        """Begins with none."""
        self.claims: dict[str, Claim] = {}
        self.events: list[tuple[str, str, str]] = []

    def claim(self, namespace: str, name: str) -> Claim:
        """Returns a claim."""
        if namespace != NAMESPACE or name not in self.claims:
            raise NotFoundError(f"cannot read PersistentVolumeClaim {namespace}/{name}")
        return self.claims[name]

    def event(
        self, about: Object, reason: str, message: str, *, warning: bool = False, node: str = ""
    ) -> None:
        """Notes an event."""
        assert warning
        assert node
        self.events.append((about["metadata"]["name"], reason, message))


class Struck(BaseException):
    """The driver was killed here; nothing of it catches this."""


class Strike(WatchedClient):
    """A client that strikes before or after one of the calls that change the target."""

    def __init__(self, path: Path, when: str, number: int, blow: Callable[[], None]) -> None:
        """Strikes `before` or `after` call `number`, counted from 1."""
        super().__init__(path)
        self._when = when
        self._number = number
        self._blow = blow
        self.calls: list[str] = []

    def call_raw(self, method: str, **params: Any) -> Any:
        """Calls a method."""
        if "_get" in method or method.endswith("_list"):
            return super().call_raw(method, **params)
        self.calls.append(method)
        hit = len(self.calls) == self._number
        if hit and self._when == "before":
            self._blow()
        answer = super().call_raw(method, **params)
        if hit and self._when == "after":
            self._blow()
        return answer


class Host:
    """A node. `restart` begins the driver anew, as after a crash."""

    def __init__(self, target: Target, directory: Path, *others: Target) -> None:
        """Prepares it, with `others` beside its first target; the directory needs a short path."""
        self.target = target
        self.others = others
        #: The machine whose launcher's pod is published next; None: one without claims.
        self.booting: Object | None = None
        self.directory = directory
        #: One of its own, as volumes' UUIDs come of it: several tests may run on one machine.
        self.name = f"node-{uuid.uuid4().hex[:8]}"
        self.proc = directory / "proc"
        self.kubelet = directory / "kubelet"
        self.api = Api()
        self.handles: dict[str, str] = {}
        self.pod_hooks: PodHooks | None = None
        self.proc.mkdir()
        self.restart()

    def restart(self, client: WatchedClient | None = None) -> None:
        """Forgets everything that the driver had in memory."""
        self.close()
        others = [WatchedClient(each.rpc_socket) for each in self.others]
        targets = Targets([client or WatchedClient(self.target.rpc_socket), *others])
        self.placement = Placement(targets, self.api)
        volumes, locks = OwnedVolumes(targets, self.name), VolumeLocks()
        devices = LoopDevices(targets)
        self.locks = locks
        self.controllers = VmControllers(targets, devices, locks)
        self.pod_hooks = PodHooks(self.controllers, self.hook, Metrics())
        self.pod_hooks.start()
        self.inline = InlineVolumes(self.controllers, self.pod_hooks, self._admit)
        snapshots = OwnedSnapshots(volumes, locks)
        self.csi = Controller(volumes, snapshots, locks, self.name, lambda _: self.name)
        self.node = Node(volumes, devices, VhostFace(targets), locks, self.name, 0, self.inline)
        self.node_hook = self.hook()

    def close(self) -> None:
        """Ends the driver."""
        if self.pod_hooks is not None:
            self.pod_hooks.stop()

    def _admit(self, _: Pod, lvstore: str) -> Client:
        vmi = Vmi.of(self.booting or self.machine())
        return self.placement.target_of(vmi, lvstore)

    def hook(self, only: Pod | None = None) -> NodeHook:
        """Returns the node hooks, for one pod or for all."""

        def find(pod: str) -> Qemu:
            return probe.find(pod, self.proc)

        return NodeHook(self.controllers, self.api, self.name, find, only)

    # What a cluster does

    def claim(
        self, name: str, size: int = 64 * MIB, *, mode: str = "Block", **parameters: str
    ) -> str:
        """Makes a claim with its volume, of a class with `parameters`; returns its UUID."""
        request = pb.CreateVolumeRequest(
            name=f"pvc-{name}",
            capacity_range=pb.CapacityRange(required_bytes=size),
            volume_capabilities=[block()],
            parameters={"lvstore": "lvs0", **parameters},
        )
        handle: str = self.csi.create_volume(request).volume.volume_id
        self.handles[name] = handle
        self.api.claims[name] = claim(name, handle, mode=mode)
        return handle

    def launcher(self, qemu: bytes = QEMU, **attributes: str) -> str:
        """Makes a pod with a QEMU program and its inline volume; returns its UID."""
        pod = str(uuid.uuid4())
        process = self.proc / str(len(list(self.proc.iterdir())) + 1)
        program = process / "root/usr/libexec/qemu-kvm"
        program.parent.mkdir(parents=True)
        program.write_bytes(qemu)
        slices = pod.replace("-", "_")
        (process / "cgroup").write_text(f"0::/kubepods.slice/kubepods-pod{slices}.slice/cri-1\n")
        self.publish_inline(pod, **attributes)
        return pod

    def inline_path(self, pod: str, name: str = "virtlun") -> Path:
        """Returns where kubelet has a pod's inline volume."""
        return self.kubelet / "pods" / pod / "volumes/kubernetes.io~csi" / name / "mount"

    def publish_inline(self, pod: str, name: str = "virtlun", **attributes: str) -> Path:
        """Publishes a pod's inline volume."""
        path = self.inline_path(pod, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        context = {
            "csi.storage.k8s.io/ephemeral": "true",
            "csi.storage.k8s.io/pod.uid": pod,
            "csi.storage.k8s.io/pod.name": f"virt-launcher-{pod[:5]}",
            "csi.storage.k8s.io/pod.namespace": NAMESPACE,
            **attributes,
        }
        self.node.node_publish_volume(
            pb.NodePublishVolumeRequest(
                volume_id=_inline_handle(pod, name),
                target_path=str(path),
                volume_capability=pb.VolumeCapability(mount=pb.VolumeCapability.MountVolume()),
                volume_context=context,
            )
        )
        return path

    def unpublish_inline(self, pod: str, name: str = "virtlun") -> None:
        """Takes a pod's inline volume away."""
        self.node.node_unpublish_volume(
            pb.NodeUnpublishVolumeRequest(
                volume_id=_inline_handle(pod, name),
                target_path=str(self.inline_path(pod, name)),
            )
        )

    def block_path(self, name: str, pod: str) -> Path:
        """Returns where kubelet has a claim's block device for a pod."""
        return self.kubelet / "plugins/volumeDevices/publish" / f"pv-{name}" / pod

    def publish(self, name: str, pod: str, *, read_only: bool = False) -> Path:
        """Stages a claim and publishes it to a pod as a block device."""
        handle = self.handles[name]
        staging = str(self.kubelet / "plugins/volumeDevices/staging" / f"pv-{name}")
        self.node.node_stage_volume(
            pb.NodeStageVolumeRequest(
                volume_id=handle, staging_target_path=staging, volume_capability=block()
            )
        )
        self.node.node_publish_volume(
            pb.NodePublishVolumeRequest(
                volume_id=handle,
                staging_target_path=staging,
                target_path=str(self.block_path(name, pod)),
                volume_capability=block(),
                readonly=read_only,
            )
        )
        return self.block_path(name, pod)

    def unpublish(self, name: str, pod: str) -> None:
        """Takes a claim from a pod."""
        self.node.node_unpublish_volume(
            pb.NodeUnpublishVolumeRequest(
                volume_id=self.handles[name], target_path=str(self.block_path(name, pod))
            )
        )

    def unstage(self, name: str) -> None:
        """Takes a claim's device away."""
        staging = str(self.kubelet / "plugins/volumeDevices/staging" / f"pv-{name}")
        self.node.node_unstage_volume(
            pb.NodeUnstageVolumeRequest(volume_id=self.handles[name], staging_target_path=staging)
        )

    def machine(self, *claims: str, pods: tuple[str, ...] = (), name: str = "vm") -> dict[str, Any]:
        """Returns the VMI of a machine on this node; see the function."""
        return machine(self.name, *claims, pods=pods, name=name)

    def expand(self, name: str, size: int) -> None:
        """Grows a claim, and what kubelet has of it."""
        handle = self.handles[name]
        grown = pb.CapacityRange(required_bytes=size)
        self.csi.controller_expand_volume(
            pb.ControllerExpandVolumeRequest(volume_id=handle, capacity_range=grown)
        )
        (path,) = (self.kubelet / "plugins/volumeDevices/publish" / f"pv-{name}").iterdir()
        self.node.node_expand_volume(
            pb.NodeExpandVolumeRequest(volume_id=handle, volume_path=str(path))
        )

    def call(self, point: str, vmi: Object) -> None:
        """Calls a node hook as virt-handler does."""
        self.node_hook.execute_node_hook(
            hooks.ExecuteNodeHookRequest(
                hookPoint=point,
                vmi=json.dumps(vmi).encode(),
                node_context=hooks.NodeContext(node_name=self.name),
            )
        )

    # What there is

    def luns(self, pod: str) -> dict[int, str]:
        """Returns the volumes that a pod has as LUNs, by target number, by the claims' names."""
        names = {handle: name for name, handle in self.handles.items()}
        return {lun.target: names[lun.volume] for lun in self.controllers.luns(pod)}

    def disks(self, pod: str) -> dict[int, str]:
        """Returns the volumes that a pod has as virtio-blk disks, likewise."""
        names = {handle: name for name, handle in self.handles.items()}
        found = self.controllers.disks(pod)
        return {disk.number: names[disk.volume] for disk in found if disk.volume}

    def parked(self) -> list[str]:
        """Returns the claims whose exports are parked."""
        names = {handle: name for name, handle in self.handles.items()}
        found = self.target.rpc("virtlun_export_list")
        return sorted(names[each["bdev_name"]] for each in found if each["parked"])

    def folder(self, pod: str) -> Path:
        """Returns the folder of a pod's controller as the pod sees it, at a path for sockets."""
        short = self.directory / pod[:8]
        if not short.is_symlink():
            short.symlink_to(self.inline_path(pod))
        return short

    def socket(self, pod: str) -> Path:
        """Returns the socket of a pod's controller, as the pod sees it."""
        return self.folder(pod) / "vhost.sock"

    def clear(self) -> None:
        """Takes away what a failed test has left in the kernel."""
        left = self.left()
        for each in reversed(left["mounts"]):
            subprocess.run(["umount", "--lazy", each], check=False)
        for loop in [e for handle in self.handles.values() for e in loopctl.loops(handle)]:
            if loop.name in left["loops"]:
                loopctl.release(loop)

    def left(self) -> dict[str, list[str]]:
        """Returns what there is of controllers, exports, loop devices and mounts."""
        below, export = f"{self.directory}/", self.target.export_dir
        handles = set(self.handles.values())
        return {
            "controllers": [each["ctrlr"] for each in self.target.rpc("vhost_get_controllers")],
            "folders": [path.name for path in self.target.vhost_dir.iterdir()],
            "exports": [each["bdev_name"] for each in self.target.rpc("virtlun_export_list")],
            "loops": [e.name for handle in handles for e in loopctl.loops(handle)],
            "mounts": [
                m.target
                for m in table()
                if m.target.startswith(below) and Path(m.target).parent != export
            ],
        }


NOTHING: dict[str, list[str]] = {
    "controllers": [],
    "folders": [],
    "exports": [],
    "loops": [],
    "mounts": [],
}


def claim(name: str, handle: str, *, mode: str = "Block", driver: str = "csi.virtlun.dev") -> Claim:
    """Returns a claim that is bound to a volume, as the API server would tell of both."""
    volume = {
        "metadata": {"name": f"pv-{name}"},
        "spec": {
            "capacity": {"storage": "64Mi"},
            "volumeMode": mode,
            "csi": {"driver": driver, "volumeHandle": handle},
        },
    }
    meta = {"namespace": NAMESPACE, "name": name, "uid": handle, "resourceVersion": "1"}
    found = {
        "metadata": meta,
        "spec": {"volumeMode": mode, "volumeName": f"pv-{name}"},
        "status": {"phase": "Bound", "capacity": {"storage": "64Mi"}},
    }
    return Claim.of(found, PersistentVolume.of(volume))


def machine(
    node: str, *claims: str, pods: tuple[str, ...] = (), name: str = "vm"
) -> dict[str, Any]:
    """Returns the VMI of a machine with claims as virtio disks, whose volumes are called alike."""
    disks = [{"name": each, "disk": {"bus": "virtio"}} for each in claims]
    volumes = [{"name": each, "persistentVolumeClaim": {"claimName": each}} for each in claims]
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"namespace": NAMESPACE, "name": name, "uid": str(uuid.uuid4())},
        "spec": {"domain": {"devices": {"disks": disks}}, "volumes": volumes},
        "status": {
            "phase": "Scheduled",
            "nodeName": node,
            "activePods": dict.fromkeys(pods, node),
        },
    }


def _inline_handle(pod: str, name: str) -> str:
    """Returns a handle of the form that kubelet gives."""
    return f"csi-{uuid.uuid5(uuid.NAMESPACE_URL, pod + name).hex * 2}"
