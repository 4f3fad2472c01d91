"""The launcher pods' controllers of one target: each is in a folder of its own.

A claim of a machine is an ordinary one on the kernel face until it is handed over: its export is
parked (it serves reads, refuses writes and lets go of the volume), and the volume becomes a LUN of
the pod's controller. Giving it back does the reverse. A volume that no pod has on the kernel face
is attached and detached instead. Where the machine's QEMU has no vhost-user-scsi a claim is handed
over as a virtio-blk disk: a controller of its own, whose socket is in the pod's folder, too.

Nothing is written down: what a pod has is asked of the target, and a LUN whose volume has an export
is one that was handed over, as every virtio-blk disk is. So each method may be repeated after a
crash at any point. The caller (csi.kubevirt.controllers) holds the pod's lock; methods take the
volume's, which never waits (ABORTED: try again).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TypeVar

from csi import mounts
from csi.errors import Failure, invalid, not_found, precondition
from csi.hostdevice import HostDevice
from csi.hosterrors import HostError
from csi.kubevirt import document
from csi.kubevirt.lun import BlkDisk, InUse, Lun, StaysOnKernelFace
from csi.locks import VolumeLocks
from csi.mounts import Mount
from csi.targets import Targets
from csi.vhostcontroller import BLOCK_BYTES, SOCKET, VhostControllers
from csi.volumes import owner_of
from pydataplane import methods
from pydataplane.client import Client
from pydataplane.errors import BAD_PARAMETERS, BUSY, INVALID, NO_DEVICE, RpcError
from pydataplane.volumes import Volumes

PREFIX = "pod-"
LAUNCHER_UID = LAUNCHER_GID = 107
"""User and group of KubeVirt's virt-launcher and its QEMU."""
Shown = TypeVar("Shown", Lun, BlkDisk)
POD_UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class PodControllers:
    """The controllers of one target that are launcher pods'.

    Every method raises pydataplane.errors for the target's refusals and csi.errors.HostError for
    the host's, beside the Failures that it names; `pod` is a pod's UID, `volume` a volume's UUID.
    """

    def __init__(
        self, client: Client, targets: Targets, devices: HostDevice, volumes: VolumeLocks
    ) -> None:
        """Those of the target of `client`, one of `targets`.

        `devices` are the kernel face, `volumes` its locks.
        """
        self._targets = targets
        self._client = client
        self._controllers = VhostControllers(client)
        self._devices = devices
        self._volumes = volumes

    # The controller

    def publish(self, pod: str) -> Path:
        """Makes the pod's controller without LUNs, if it is not there, and returns its folder."""
        self._controllers.create(
            controller_name(pod), socket_gid=LAUNCHER_GID, owner_uid=LAUNCHER_UID
        )
        return self.folder(pod)

    def unpublish(self, pod: str) -> None:
        """Deletes the pod's controller, its folder and all else of the pod; idempotent.

        Raises:
            Failure: FAILED_PRECONDITION, a virtual machine is still connected.
        """
        own = controller_name(pod)
        names = {own, *(_disk_controller(pod, disk.number) for disk in self.disks(pod))}
        if any(each["ctrlr"] in names and each["sessions"] for each in self._controllers.all()):
            raise precondition(
                f"the virtual machine of pod {pod} is still connected to its controller: it "
                "goes when QEMU has ended"
            )
        self.clear(pod)
        folder = self.folder(pod)
        with suppress(FileNotFoundError):
            for entry in folder.iterdir():
                if entry.name != SOCKET:
                    entry.unlink(missing_ok=True)
        self._controllers.delete(own)
        with suppress(FileNotFoundError):
            (folder / SOCKET).unlink(missing_ok=True)
            folder.rmdir()

    def exists(self, pod: str) -> bool:
        """Whether the pod has a controller."""
        return self._controllers.find(controller_name(pod)) is not None

    def folder(self, pod: str) -> Path:
        """Returns where the folder of the pod's controller is, whether there is one or not."""
        return self._controllers.folder(controller_name(pod))

    def absent(self, pod: str) -> str | None:
        """Returns why the pod's machine runs without the controller; None if it has it, or may.

        Raises:
            HostError: the document in the folder cannot be read.
        """
        told = document.read(self.folder(pod))
        return told.absent if told is not None else None

    def pods(self) -> list[str]:
        """Returns the pods that have a controller."""
        names = [found["ctrlr"] for found in self._controllers.all()]
        pods = [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
        return [pod for pod in pods if POD_UID.fullmatch(pod)]

    def shown(self, volume: str) -> list[tuple[str, Lun]]:
        """Returns the pods that have a volume as a LUN, with it."""
        pods = {name.removeprefix(PREFIX) for name, shown in self._all_shown() if shown == volume}
        found = []
        for pod in sorted(filter(POD_UID.fullmatch, pods)):
            with suppress(Failure):  # it went meanwhile
                found += [(pod, lun) for lun in self.luns(pod) if lun.volume == volume]
        return found

    def luns(self, pod: str) -> list[Lun]:
        """Returns what the pod's controller has, by target number.

        Raises:
            Failure: NOT_FOUND, the pod has no controller.
        """
        found = self._controllers.find(controller_name(pod))
        if found is None:
            raise not_found(
                f"pod {pod} has no controller on this node: it needs the inline volume of "
                "csi.virtlun.dev"
            )
        exported = self._exports()
        return sorted(
            (
                _lun(target["scsi_dev_num"], lun, exported)
                for target in found["backend_specific"].get("scsi", ())
                for lun in target["luns"]
            ),
            key=lambda lun: lun.target,
        )

    def disks(self, pod: str) -> list[BlkDisk]:
        """Returns the pod's virtio-blk disks, by number."""
        prefix = f"{controller_name(pod)}."
        found = (
            BlkDisk(int(number), each["backend_specific"]["block"]["bdev"])
            for each in self._controllers.all()
            if each["ctrlr"].startswith(prefix)
            and (number := each["ctrlr"].removeprefix(prefix)).isdecimal()
        )
        return sorted(found, key=lambda disk: disk.number)

    # Claims of the pod, which are on the kernel face

    def hand_over(
        self,
        pod: str,
        volume: str,
        *,
        blk: bool = False,
        serial: str | None = None,
        read_only: bool = False,
        block_size: int | None = None,
        physical_block_size: int | None = None,
    ) -> int:
        """Makes a claim of the pod a LUN of its controller, and returns the target's number.

        Its logical blocks are those that pods see; `block_size` is what the machine's disk asks
        for, in bytes, if it does. Its physical ones have `physical_block_size` bytes, or the
        volume's own size. With `blk` it becomes a virtio-blk disk, and its number is returned.

        Raises:
            Failure: FAILED_PRECONDITION, it is not published to the pod, or another pod has it as a
                LUN; NOT_FOUND, no controller; ABORTED, the volume is being worked on.
            StaysOnKernelFace: another pod has it on the kernel face, too, another target has it,
                the disk asks for other blocks than pods see, or a LUN cannot have those, or not
                the physical ones.
        """
        with self._volumes.hold(volume):
            luns = self.luns(pod)
            disks = self.disks(pod)
            writable = self._mounts(volume, kinds=(False,))
            found = writable + self._mounts(volume, kinds=(True,))
            if not any(_is_block_of(pod, mount) for mount in found):
                raise precondition(
                    f"volume {volume} is not published to pod {pod} as a block device"
                )
            if (lun := _of(luns, volume)) is not None:
                return lun.target
            if (disk := _of(disks, volume)) is not None:
                return disk.number
            if why := self._elsewhere(pod, volume):
                raise StaysOnKernelFace(why)
            self._check_no_lun(pod, volume)
            if others := {mount.target for mount in found if not _is_block_of(pod, mount)}:
                raise StaysOnKernelFace(
                    f"volume {volume} is published at {', '.join(sorted(others))}, too: a claim of "
                    "several pods of one node cannot become a LUN of one of them"
                )
            blocks = self._block_size(volume)
            if block_size not in (None, blocks):
                raise StaysOnKernelFace(
                    f"its disk asks for blocks of {block_size} bytes, and every pod sees volume "
                    f"{volume} with blocks of {blocks}, as the StorageClass says; leave blockSize "
                    "out of the disk, or use another class"
                )
            read_only = read_only or not writable
            self._devices.flush(volume)
            self._client.call("virtlun_export_park", bdev_name=volume)
            number = _free(disks)
            try:
                if blk:
                    self._controllers.create_disk(
                        _disk_controller(pod, number),
                        volume,
                        socket=f"{controller_name(pod)}/{disk_socket(number)}",
                        socket_gid=LAUNCHER_GID,
                        owner_uid=LAUNCHER_UID,
                        block_size=blocks,
                        physical_block_size=physical_block_size,
                        serial=serial,
                        read_only=read_only,
                    )
                    return number
                return self._controllers.add(
                    controller_name(pod),
                    volume,
                    block_size=blocks,
                    physical_block_size=physical_block_size,
                    serial=serial,
                    read_only=read_only,
                    removable=False,
                )
            except RpcError as error:
                try:
                    if blk:
                        self._discard(_disk_controller(pod, number), volume)
                finally:
                    self._unpark(volume)
                if physical_block_size is not None and error.code in (INVALID, BAD_PARAMETERS):
                    raise StaysOnKernelFace(
                        f"its disk asks for physical blocks of {physical_block_size} bytes, and "
                        f"the target refused a disk with them: {error.message}"
                    ) from error
                raise

    def give_back(self, pod: str, volume: str) -> None:
        """Makes a handed over LUN or disk of the pod an ordinary claim again; idempotent.

        Raises:
            Failure: ABORTED, the volume is being worked on.
        """
        with self._volumes.hold(volume):
            if self.exists(pod) and (lun := _of(self.luns(pod), volume)) and lun.handed_over:
                self._remove(pod, lun)
            if disk := _of(self.disks(pod), volume):
                self._remove_disk(pod, disk)

    # Volumes that are on no other face

    def attach(
        self,
        pod: str,
        volume: str,
        *,
        serial: str | None = None,
        read_only: bool = False,
        removable: bool = True,
        check: Callable[[], None] | None = None,
    ) -> int:
        """Makes a volume a LUN of the pod's controller, and returns the target's number.

        A connected guest is told at once. One that is there already is left as it is. Its logical
        blocks are those that a pod would see. `check` is called under the volume's lock before
        there is a new one, and raises what forbids that.

        Raises:
            Failure: FAILED_PRECONDITION, another pod has the volume, on the kernel face or as a
                LUN, a LUN cannot have the blocks that pods see, the machine runs without the
                controller, or another target has the volume; NOT_FOUND, no controller or no volume;
                ABORTED, the volume is being worked on.
        """
        with self._volumes.hold(volume):
            if (present := _of(self.luns(pod), volume)) is not None:
                return present.target
            if check is not None:
                check()
            if (why := self.absent(pod)) is not None:
                raise precondition(f"the virtual machine has no controller: {why}")
            if why := self._elsewhere(pod, volume):
                raise precondition(why)
            self._check_no_lun(pod, volume)
            if volume in self._exports():
                users = sorted({mount.target for mount in self._mounts(volume)})
                raise precondition(
                    f"volume {volume} is in use by another pod of this node, at "
                    f"{', '.join(users) or 'no path any more'}: delete that pod, then it can be "
                    "attached"
                )
            return self._controllers.add(
                controller_name(pod),
                volume,
                block_size=self._block_size(volume),
                serial=serial,
                read_only=read_only,
                removable=removable,
            )

    def detach(self, pod: str, volume: str, *, unless_used: bool = False) -> None:
        """Removes a LUN, in use or not, and tells a connected guest; idempotent.

        One that was handed over is given back. With `unless_used` the guest either keeps it, or
        cannot begin to use it any more.

        Raises:
            InUse: with `unless_used`, the guest prevents the removal; nothing was done.
            Failure: ABORTED, the volume is being worked on.
        """
        with self._volumes.hold(volume):
            if self.exists(pod) and (lun := _of(self.luns(pod), volume)):
                # Only a removable disk can be prevented from going, and SPDK has none.
                self._remove(pod, lun, unless_prevented=unless_used and lun.removable)

    def clear(self, pod: str) -> None:
        """Removes every LUN and disk of the pod, and unparks what was handed over; idempotent.

        Raises:
            Failure: ABORTED, one of the volumes is being worked on.
        """
        for disk in self.disks(pod):
            with self._volumes.hold(disk.volume or _disk_controller(pod, disk.number)):
                self._remove_disk(pod, disk)
        for lun in self.luns(pod) if self.exists(pod) else ():
            with self._volumes.hold(lun.volume):
                self._remove(pod, lun)
        self._unpark_orphans()

    def _unpark_orphans(self) -> None:
        """Unparks exports that no controller shows: a driver has died before or after it did.

        One that is being worked on is left: whoever does so is about to show it.
        """
        parked = {volume for volume, is_parked in self._exports().items() if is_parked}
        for volume in parked - {shown for _, shown in self._all_shown()}:
            with suppress(Failure), self._volumes.hold(volume):
                if volume not in {shown for _, shown in self._all_shown()}:
                    self._unpark(volume)

    def _block_size(self, volume: str) -> int:
        """Returns the logical block size that pods see, bytes, which is the LUN's, too.

        Raises:
            StaysOnKernelFace: the volume's own blocks are larger, so that no LUN can have it.
        """
        owner = owner_of(Volumes(self._client), volume)
        size = int(owner.read().block_size) if owner is not None else BLOCK_BYTES
        (bdev,) = self._client.call("bdev_get_bdevs", name=volume)
        if size < bdev["block_size"]:
            raise StaysOnKernelFace(
                f"pods see volume {volume} with blocks of {size} bytes, and a LUN has no smaller "
                f"ones than its lvstore's device, {bdev['block_size']}; use a StorageClass with "
                f'blockSize "{bdev["block_size"]}"'
            )
        return size

    def _remove(self, pod: str, lun: Lun, *, unless_prevented: bool = False) -> None:
        try:
            self._client.call(
                "vhost_scsi_controller_remove_target",
                ctrlr=controller_name(pod),
                scsi_target_num=lun.target,
                unless_prevented=unless_prevented or None,
            )
        except RpcError as error:
            # One that only waits for its I/O is on its way out, and shown no longer.
            if error.code == BUSY and unless_prevented and _of(self.luns(pod), lun.volume):
                raise InUse(error.message) from error
            if error.code != NO_DEVICE:
                raise
        self._unpark(lun.volume)

    def _discard(self, controller: str, volume: str) -> None:
        """Deletes a disk's controller that may be there and not whole, if it is this volume's."""
        found = self._controllers.find(controller)
        if found is not None and found["backend_specific"]["block"]["bdev"] == volume:
            self._controllers.delete(controller, force=True)

    def _remove_disk(self, pod: str, disk: BlkDisk) -> None:
        self._controllers.delete(_disk_controller(pod, disk.number), force=True)
        if disk.volume is not None:
            self._unpark(disk.volume)

    def _unpark(self, volume: str) -> None:
        """Gives the volume to the kernel face again, if it is on it.

        What was written to the device meanwhile fails now, while it is parked: later it would
        overtake what the guest wrote.
        """
        with suppress(HostError):
            self._devices.flush(volume)
        try:
            self._client.call("virtlun_export_unpark", bdev_name=volume)
        except RpcError as error:
            if error.code != NO_DEVICE:
                raise
            return
        self._devices.flush(volume)

    def _elsewhere(self, pod: str, volume: str) -> str | None:
        """Returns why a volume cannot be a LUN here: another target has it; None if it can."""
        theirs = self._targets.of(volume)
        if theirs is self._client:
            return None
        return (
            f"volume {volume} is on the target of {theirs.path}, and the controller of pod {pod} "
            f"on that of {self._client.path}: the LUNs of a virtual machine are of one target, "
            "that of the claim that it boots first, or of the inline volume's lvstore; use a "
            "StorageClass with an lvstore of that one"
        )

    def _check_no_lun(self, pod: str, volume: str) -> None:
        """Raises FAILED_PRECONDITION if another controller shows the volume."""
        for name, shown in self._all_shown():
            if shown == volume:
                raise precondition(
                    f"volume {volume} is a disk of controller {name} and cannot be one of pod "
                    f"{pod}: stop the virtual machine that has it, or detach it there"
                )

    def _all_shown(self) -> list[tuple[str, str]]:
        """Returns controller and bdev of every LUN and virtio-blk disk of the target."""
        shown = []
        for found in self._controllers.all():
            specific = found["backend_specific"]
            for target in specific.get("scsi", ()):
                shown += [(found["ctrlr"], lun["bdev_name"]) for lun in target["luns"]]
            bdev = specific["block"]["bdev"] if "block" in specific else None
            if bdev is not None:
                shown.append((found["ctrlr"], bdev))
        return shown

    def _exports(self) -> dict[str, bool]:
        """Returns the volumes on the kernel face, and whether each is parked."""
        found = self._client.call("virtlun_export_list")
        return {each["bdev_name"]: each["parked"] for each in found}

    def _mounts(self, volume: str, kinds: tuple[bool, ...] = (False, True)) -> list[Mount]:
        """Returns where the volume's devices are; `kinds`: the writable, the read-only one."""
        found = (self._devices.device(volume, read_only=flag) for flag in kinds)
        return [mount for device in found if device for mount in mounts.of_device(device)]


def controller_name(pod: str) -> str:
    """Returns the name of a pod's controller.

    Raises:
        Failure: INVALID_ARGUMENT, it is no UID: the name becomes part of a path.
    """
    if not POD_UID.fullmatch(pod):
        raise invalid(f"'{pod}' is not the UID of a pod")
    return f"{PREFIX}{pod}"


def _is_block_of(pod: str, mount: Mount) -> bool:
    """Whether a mount is a block device that kubelet gave to the pod, whose UID is in the path."""
    return mount.fs_type == "devtmpfs" and pod in Path(mount.target).parts


def _of(shown: list[Shown], volume: str) -> Shown | None:
    return next((each for each in shown if each.volume == volume), None)


def _free(disks: list[BlkDisk]) -> int:
    taken = {disk.number for disk in disks}
    return next(number for number in count() if number not in taken)


def _disk_controller(pod: str, number: int) -> str:
    return f"{controller_name(pod)}.{number}"


def disk_socket(number: int) -> str:
    """Returns the name of a virtio-blk disk's socket in the pod's folder."""
    return f"{SOCKET}.{number}"


def _lun(target: int, lun: methods.Lun, exported: dict[str, bool]) -> Lun:
    return Lun(
        target=target,
        volume=lun["bdev_name"],
        serial=lun["serial"],
        read_only=lun["read_only"],
        removable=lun["removable"],
        block_size=lun["block_size"],
        removal_prevented=lun["removal_prevented"],
        handed_over=lun["bdev_name"] in exported,
        attached_at=lun["attached_at"],
        event_at=lun["event_at"],
        guest_seen_at=lun["guest_seen_at"],
        resize_event_at=lun["resize_event_at"],
    )
