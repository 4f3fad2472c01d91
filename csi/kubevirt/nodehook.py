"""KubeVirt's node hooks: what happens on the node around a virtual machine's life.

| hook point | what is done |
| --- | --- |
| PreVMStart | makes LUNs or virtio-blk disks of its claims, and writes the document; on each sync |
| PostVMStop | makes ordinary claims of them again |
| PreMigrationSource | refuses a machine with LUNs, or virtio-blk disks of ours |
| PreMigrationTarget | writes the document, without LUNs, for the pod that it is to move to |
| PostVMStart, PreVMStop, PostMigrationTarget, others | nothing; our Plugin does not ask for it |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import structlog

from csi.clustererrors import ClusterError
from csi.errors import Code, Failure, precondition
from csi.kubevirt import document, machine
from csi.kubevirt.claims import ClaimSource, claim_of, unfit
from csi.kubevirt.controllers import VmControllers
from csi.kubevirt.document import BlkOf, Controller, LunOf
from csi.kubevirt.lun import StaysOnKernelFace
from csi.kubevirt.machine import MachineVolume
from csi.kubevirt.podcontrollers import POD_UID, disk_socket
from csi.kubevirt.pods import Pod
from csi.objects import Object, Vmi
from csi.proto import kubevirt_plugin_pb2 as pb
from pydataplane.domain.model import RECONNECT_S
from pydataplane.emulator import Qemu

VOLUME_LEFT = "VolumeStaysBlockDevice"
NO_CONTROLLER = "NoVirtlunController"
"""Reasons of events."""

log = structlog.get_logger()


class ClusterLike(ClaimSource, Protocol):
    """What of csi.cluster.Cluster the hooks need."""

    def event(
        self, about: Object, reason: str, message: str, *, warning: bool = False, node: str = ""
    ) -> None:
        """Tells something of an object."""


class NodeHook:
    """kubevirt.hooks.plugins.v1alpha1.NodeHookService.

    With `only` it serves one pod, which may itself be the caller and is not trusted: whatever
    machine it names, nothing but its own claims is touched.
    """

    def __init__(
        self,
        controllers: VmControllers,
        cluster: ClusterLike,
        node: str,
        find_qemu: Callable[[str], Qemu],
        only: Pod | None = None,
    ) -> None:
        """`find_qemu` tells which QEMU a pod has (probe.find)."""
        self._controllers = controllers
        self._cluster = cluster
        self._node = node
        self._find_qemu = find_qemu
        self._only = only
        self._points: dict[str, Callable[[Vmi, str], None]] = {
            "PreVMStart": self._pre_start,
            "PostVMStop": self._post_stop,
            "PreMigrationSource": self._pre_migration,
            "PreMigrationTarget": self._pre_migration_target,
        }

    def execute_node_hook(self, request: pb.ExecuteNodeHookRequest) -> pb.ExecuteNodeHookResponse:
        """Acts at a hook point; an unknown one is ignored."""
        act = self._points.get(request.hookPoint)
        if act is not None:
            vmi = machine.parse(request.vmi)
            for pod in self._pods(vmi):
                with self._controllers.hold(pod):
                    act(vmi, pod)
        return pb.ExecuteNodeHookResponse()

    def _pods(self, vmi: Vmi) -> list[str]:
        """Returns the machine's pods on this node that have a controller."""
        if self._only is not None:
            if vmi.namespace != self._only.namespace:
                raise Failure(
                    Code.PERMISSION_DENIED,
                    f"pod {self._only.namespace}/{self._only.name} may not speak for a machine in "
                    f"namespace {vmi.namespace}",
                )
            pods = [self._only.uid]
        else:
            pods = [pod for pod in vmi.pods_on(self._node) if POD_UID.fullmatch(pod)]
        return [pod for pod in pods if self._controllers.exists(pod)]

    def _pre_start(self, vmi: Vmi, pod: str) -> None:
        folder = self._controllers.folder(pod)
        present = document.read(folder)
        if present is None and self._only is not None:
            self._check_stays(vmi, pod)
        found = self._decide(vmi, pod) if present is None else self._repeat(present, vmi, pod)
        if found != present:
            document.write(folder, found)
        if present is None:
            self._tell(vmi, pod, found)

    def _check_stays(self, vmi: Vmi, pod: str) -> None:
        """Refuses a migration where KubeVirt has none of our hooks at its source.

        It asks a sidecar at the target as for a start. Whether the machine has LUNs is not known
        there, and if it has, its guest would lose them.
        """
        qemu = self._find_qemu(pod)
        if vmi.migrating and (qemu.vhost_user_scsi or qemu.vhost_user_blk):
            raise precondition(
                f"virtual machine {vmi.namespace}/{vmi.name} cannot be migrated: this KubeVirt "
                "asks no node whether the machine has its volumes as LUNs; stop it and start it "
                "anew"
            )

    def _post_stop(self, _: Vmi, pod: str) -> None:
        self._controllers.clear(pod)
        document.remove(self._controllers.folder(pod))

    def _pre_migration(self, vmi: Vmi, pod: str) -> None:
        luns, disks = self._controllers.luns(pod), self._controllers.disks(pod)
        if not luns and not disks:
            return
        kind = "LUNs" if luns else "virtio-blk disks"
        handles = [lun.volume for lun in luns] + [disk.volume for disk in disks]
        in_pool = self._in_pool(vmi)
        shared = sum(handle in in_pool for handle in handles)
        has, then = [], "delete the migration"
        if of_node := len(handles) - shared:
            has.append(
                f"{kind} ({of_node}), whose volumes are on node {self._node} and which no other "
                "one can reach"
            )
            then += ", or the VmVolumes of a machine without claims"
        if shared:
            has.append(
                f"{kind} ({shared}) of a pool of Ceph, which cannot follow a migration of KubeVirt "
                "yet"
            )
            then += (
                "; a claim of the pool that is ReadWriteMany with volumeMode Block becomes no disk "
                "of virtlun, and follows one"
            )
        raise precondition(
            f"virtual machine {vmi.namespace}/{vmi.name} cannot be migrated: it has "
            f"{' and '.join(has)}; {then}"
        )

    def _in_pool(self, vmi: Vmi) -> set[str]:
        """Returns the handles of a machine's claims that are of a pool of Ceph."""
        volumes = (claim_of(self._cluster, vmi, each).volume for each in machine.volumes(vmi))
        return {volume.handle for volume in volumes if volume and volume.ours and volume.in_pool}

    def _pre_migration_target(self, _: Vmi, pod: str) -> None:
        """Lets the pod have what a machine without LUNs has; one with LUNs never gets here."""
        folder = self._controllers.folder(pod)
        if document.read(folder) is None:
            document.write(folder, _controller(self._find_qemu(pod)))

    def _decide(self, vmi: Vmi, pod: str) -> Controller:
        """Makes LUNs, or virtio-blk disks, of what can be one."""
        qemu = self._find_qemu(pod)
        controller = _controller(qemu)
        blk = qemu.vhost_user_blk and not qemu.vhost_user_scsi
        luns: dict[str, LunOf] = {}
        disks: dict[str, BlkOf] = {}
        left: dict[str, str] = {}
        for volume in machine.volumes(vmi):
            claim = claim_of(self._cluster, vmi, volume)
            if claim.handle is None:  # not of ours
                continue
            if blk:
                why = unfit(volume, claim) or _unfit_for_blk(volume, qemu)
            else:
                why = controller.absent or unfit(volume, claim)
            if why is None:
                try:
                    if blk:
                        disks[volume.name] = self._hand_over_blk(pod, volume, claim.handle)
                    else:
                        luns[volume.name] = self._hand_over(pod, volume, claim.handle)
                except StaysOnKernelFace as error:
                    why = str(error)
            if why is not None:
                left[volume.name] = (
                    f"claim {vmi.namespace}/{volume.claim} is no disk of virtlun in virtual "
                    f"machine {vmi.name} and stays as KubeVirt gives it: {why}"
                )
        return controller.model_copy(update={"luns": luns, "disks": disks, "left": left})

    def _repeat(self, present: Controller, vmi: Vmi, pod: str) -> Controller:
        """Makes sure of what was decided for this pod; the domain may have been made by it."""
        if not present.luns and not present.disks:
            return present
        volumes = {volume.name: volume for volume in machine.volumes(vmi)}
        luns = {
            name: self._hand_over(pod, volumes[name], lun.volume)
            for name, lun in present.luns.items()
            if name in volumes
        }
        disks = {
            name: self._hand_over_blk(pod, volumes[name], disk.volume)
            for name, disk in present.disks.items()
            if name in volumes
        }
        update = {"luns": present.luns | luns, "disks": present.disks | disks}
        return present.model_copy(update=update)

    def _hand_over(self, pod: str, volume: MachineVolume, handle: str) -> LunOf:
        return LunOf(target=self._number(pod, volume, handle, blk=False), volume=handle)

    def _hand_over_blk(self, pod: str, volume: MachineVolume, handle: str) -> BlkOf:
        number = self._number(pod, volume, handle, blk=True)
        return BlkOf(socket=disk_socket(number), volume=handle)

    def _number(self, pod: str, volume: MachineVolume, handle: str, *, blk: bool) -> int:
        return self._controllers.hand_over(
            pod,
            handle,
            blk=blk,
            serial=volume.serial,
            read_only=volume.read_only,
            block_size=volume.block_size,
            physical_block_size=volume.physical_block_size,
        )

    def _tell(self, vmi: Vmi, pod: str, controller: Controller) -> None:
        """Says where people look what became of the machine's volumes."""
        bound = log.bind(vmi=f"{vmi.namespace}/{vmi.name}", pod=pod)
        for name, lun in controller.luns.items():
            bound.info("handed over", volume=name, lvol=lun.volume, scsi_target=lun.target)
        for name, disk in controller.disks.items():
            bound.info("handed over", volume=name, lvol=disk.volume, socket=disk.socket)
        said = [(VOLUME_LEFT, sentence) for sentence in controller.left.values()]
        if controller.absent and not said and not controller.disks:
            said = [(NO_CONTROLLER, f"there is no controller for LUNs: {controller.absent}")]
        for reason, sentence in said:
            bound.warning("not on the controller", reason=sentence)
            try:
                self._cluster.event(vmi.object, reason, sentence, warning=True, node=self._node)
            except ClusterError as error:
                bound.warning("no event", reason=str(error))


def _controller(qemu: Qemu) -> Controller:
    """Returns what can be said of a pod's controller before its volumes are looked at."""
    if qemu.vhost_user_scsi:
        return Controller(reconnect_s=RECONNECT_S if qemu.reconnects else 0)
    return Controller(
        # vhost-user-blk connects again in any version.
        reconnect_s=RECONNECT_S if qemu.vhost_user_blk else 0,
        absent=f"QEMU of its launcher ({qemu.path}) has no vhost-user-scsi-pci device; use a "
        "virt-launcher image whose QEMU is built with CONFIG_VHOST_USER_SCSI",
    )


def _unfit_for_blk(volume: MachineVolume, qemu: Qemu) -> str | None:
    """Returns why a volume cannot be a virtio-blk disk; None if it can."""
    if volume.bus == "virtio":
        return None
    return (
        f"QEMU of its launcher ({qemu.path}) has no vhost-user-scsi-pci device, and the disk's bus "
        f"is '{volume.bus or 'not set'}': give it bus virtio, for which vhost-user-blk-pci is there"
    )
