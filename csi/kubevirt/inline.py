"""The inline volume of a launcher's pod: the folder of its controller.

A CSI ephemeral volume (KEP-596): kubelet publishes it without a claim and tells the pod, and it
ends with the pod. What kubelet mounted is the record of it: the folder is called after the pod.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from csi import mounts
from csi.errors import invalid, precondition
from csi.host import Host
from csi.host.local import LocalHost
from csi.kubevirt import pods
from csi.kubevirt.controllers import VmControllers
from csi.kubevirt.podcontrollers import POD_UID, PREFIX
from csi.kubevirt.podhook import PodHooks
from csi.kubevirt.pods import Pod
from csi.proto import csi_pb2 as pb
from pydataplane.client import Client
from pydataplane.errors import TargetError

KUBERNETES = "csi.storage.k8s.io/"
EPHEMERAL = f"{KUBERNETES}ephemeral"
NODE_HOOK = "nodeHook"
"""Volume attribute: who calls the node hooks, `node` (virt-handler) or `pod` (the sidecar)."""
LVSTORE = "lvstore"
"""Volume attribute: the lvstore whose target has the controller; else that of the claims."""
HANDLE = re.compile(r"csi-[0-9a-f]{64}")
"""What kubelet calls an ephemeral volume."""
DELETED = "//deleted"
"""Behind the root of a mount whose folder is gone (proc_pid_mountinfo)."""


class InlineVolumes:
    """The inline volumes of this node; each call may be repeated after a crash at any point."""

    def __init__(
        self,
        controllers: VmControllers,
        hooks: PodHooks | None,
        admit: Callable[[Pod, str], Client] | None = None,
        host: Host | None = None,
    ) -> None:
        """Without `hooks` none is published, but those that there are still go.

        `host` mounts, by default in this process.
        `admit` returns the target for a pod's controller, given the lvstore that the volume names
        or nothing; it raises a Failure for a pod that is not to have one.
        """
        self._controllers = controllers
        self._hooks = hooks
        self._host = host or LocalHost()
        self._admit = admit

    def publish(self, request: pb.NodePublishVolumeRequest) -> None:
        """Makes the pod's controller, and its folder appear at a path.

        Raises:
            Failure: INVALID_ARGUMENT, the volume asks for something that there is not;
                FAILED_PRECONDITION, the pod has another one or is not to have any, or the driver
                does not do this; UNAVAILABLE, the API server does not say what the pod is.
        """
        target = Path(request.target_path)
        pod, lvstore = _pod(request)
        if self._hooks is None:
            raise precondition(
                f"pod {pod.namespace}/{pod.name} asks for a controller of a virtual machine: start "
                "the driver of this node with --kubevirt"
            )
        client = self._admit(pod, lvstore) if self._admit else None
        with self._controllers.hold(pod.uid):
            present = _mounted(pod.uid)
            if others := present - {mounts.real(target)}:
                raise precondition(
                    f"pod {pod.namespace}/{pod.name} has its controller at {', '.join(others)} "
                    "already: give it one inline volume of this driver"
                )
            folder = self._controllers.publish(pod.uid, client)
            pods.note(folder, pod)
            if pod.hook_in_pod:
                self._hooks.serve(pod)
            if not present:
                self._host.unmount(request.volume_id, target)
                self._host.bind_folder(request.volume_id, folder, target)
            self._host.seal(request.volume_id, target)

    def unpublish(self, volume: str, target: Path) -> bool:
        """Takes the controller away and what of the pod's claims it has; whether it was one.

        Raises:
            Failure: FAILED_PRECONDITION, a virtual machine is still connected.
        """
        pod = _pod_at(volume, target)
        if pod is None:
            return False
        with self._controllers.hold(pod):
            if not _mounted(pod) - {mounts.real(target)}:  # else: one that was refused
                self._controllers.unpublish(pod)
                if self._hooks is not None:
                    self._hooks.leave(pod)
            self._host.remove(volume, target)
        return True

    def released(self, volume: str, target: Path) -> None:
        """Gives a claim back that kubelet takes from a pod as a block device.

        Its path ends with the pod's UID. Without a target it is given back with the inline volume.

        Raises:
            Failure: ABORTED, it is being worked on.
        """
        if POD_UID.fullmatch(target.name):
            with suppress(TargetError):
                self._controllers.give_back(target.name, volume)


def is_inline(volume: str) -> bool:
    """Whether kubelet means an ephemeral volume by a handle."""
    return HANDLE.fullmatch(volume) is not None


def _pod(request: pb.NodePublishVolumeRequest) -> tuple[Pod, str]:
    """Reads what kubelet tells of the pod, and the pod's wishes, of which the lvstore.

    Raises:
        Failure: INVALID_ARGUMENT.
    """
    context = dict(request.volume_context)
    told = {key: context.get(f"{KUBERNETES}pod.{key}", "") for key in ("uid", "namespace", "name")}
    if not POD_UID.fullmatch(told["uid"]):
        raise invalid("the pod's UID is missing: let the CSIDriver have podInfoOnMount: true")
    if request.volume_capability.HasField("block"):
        raise invalid("an inline volume is a folder: it has no block device")
    wishes = {key: text for key, text in context.items() if not key.startswith(KUBERNETES)}
    where, lvstore = wishes.pop(NODE_HOOK, "node"), wishes.pop(LVSTORE, "")
    if wishes:
        unknown = sorted(wishes)[0]
        raise invalid(
            f"volume attribute {unknown} is not known: there are {LVSTORE} and {NODE_HOOK}"
        )
    if where not in ("node", "pod"):
        raise invalid(f"volume attribute {NODE_HOOK}: '{where}' is neither node nor pod")
    return Pod(**told, hook_in_pod=where == "pod"), lvstore


def _mounted(pod: str) -> set[str]:
    """Returns where the folder of the pod's controller is mounted, one that is gone left out."""
    end = f"/{PREFIX}{pod}"
    return {mount.target for mount in mounts.table() if mount.root.endswith(end)}


def _pod_at(volume: str, target: Path) -> str | None:
    """Returns the pod whose folder is at a path, or was there; None for another kind of volume."""
    present = mounts.at(target)
    if present is not None:
        name = Path(present.root.removesuffix(DELETED)).name
        uid = name.removeprefix(PREFIX)
        return uid if name.startswith(PREFIX) and POD_UID.fullmatch(uid) else None
    if not is_inline(volume):
        return None
    # kubelet's PODS/UID/volumes/kubernetes.io~csi/NAME/mount
    return next((part for part in reversed(target.parts) if POD_UID.fullmatch(part)), None)
