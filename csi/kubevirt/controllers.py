"""The controllers of virtual machines: one for each launcher pod, on the target of its volumes.

Which target has a pod's is asked of the targets, as where a volume is (csi.targets); there it does
not move. What is done with it there is the matter of csi.kubevirt.podcontrollers.

Methods take the pod's lock, then the volume's, which never waits (ABORTED: try again).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from csi.errors import Failure
from csi.hostdevice import HostDevice
from csi.kubevirt.lun import BlkDisk, Lun
from csi.kubevirt.podcontrollers import PodControllers, controller_name
from csi.kubevirt.podlocks import PodLocks
from csi.locks import VolumeLocks
from csi.targets import Answer, Targets
from pydataplane.client import Client


class VmControllers:
    """The controllers of this node's launcher pods.

    Every method raises what PodControllers does, and of several targets a TargetError of one that
    may have the pod's controller and does not say; `pod` is a pod's UID, `volume` a volume's UUID.
    """

    def __init__(self, targets: Targets, devices: HostDevice, volumes: VolumeLocks) -> None:
        """Those on `targets`; `devices` are the kernel face, `volumes` its locks."""
        self._targets = targets
        self._pods = PodLocks()
        self._on = {
            id(client): PodControllers(client, targets, devices, volumes)
            for client in targets.clients
        }

    @contextmanager
    def hold(self, pod: str) -> Iterator[None]:
        """Holds the pod's lock over several calls of one thread.

        Raises:
            Failure: ABORTED, someone else has it for too long.
        """
        with self._pods.hold(pod):
            yield

    # The controller

    def publish(self, pod: str, client: Client | None = None) -> Path:
        """Makes the pod's controller without LUNs, if it is not there, and returns its folder.

        It is made on the target of `client`, by default the first; one that is there stays.
        """
        with self.hold(pod):
            at = self._on[id(client or self._targets.clients[0])]
            if self._targets.sole is None and not at.exists(pod):
                # Earlier on another one, as an lvstore may move. One that does not answer has none:
                # if it had, it would have been this one then, and have the pod's volumes.
                there = [each.client for each in self._has(pod) if each.value]
                at = self._on[id(there[0])] if there else at
            return at.publish(pod)

    def unpublish(self, pod: str) -> None:
        """Deletes the pod's controller, its folder and all else of the pod; idempotent.

        Raises:
            Failure: FAILED_PRECONDITION, a virtual machine is still connected.
        """
        with self.hold(pod):
            for at in self._left_on(pod):
                at.unpublish(pod)
            self._targets.forget(controller_name(pod))

    def exists(self, pod: str) -> bool:
        """Whether the pod has a controller."""
        return self._at(pod).exists(pod)

    def folder(self, pod: str) -> Path:
        """Returns where the folder of the pod's controller is.

        Where there is none, that is where the first target would have it.
        """
        return self._at(pod).folder(pod)

    def absent(self, pod: str) -> str | None:
        """Returns why the pod's machine runs without the controller; None if it has it, or may.

        Raises:
            HostError: the document in the folder cannot be read.
        """
        return self._at(pod).absent(pod)

    def pods(self) -> list[Answer[list[str]]]:
        """Returns the pods that have a controller, by target, or why one does not say."""
        return self._targets.ask(lambda client: self._on[id(client)].pods())

    def luns(self, pod: str) -> list[Lun]:
        """Returns what the pod's controller has, by target number.

        Raises:
            Failure: NOT_FOUND, the pod has no controller.
        """
        return self._at(pod).luns(pod)

    def disks(self, pod: str) -> list[BlkDisk]:
        """Returns the virtio-blk disks of the pod's machine, by number."""
        return self._at(pod).disks(pod)

    def shown(self, volume: str) -> list[tuple[str, Lun]]:
        """Returns the pods that have a volume as a LUN, with it."""
        return self._on[id(self._targets.of(volume))].shown(volume)

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
        """Makes a claim of the pod a LUN of its controller, as PodControllers.hand_over."""
        with self.hold(pod):
            return self._at(pod).hand_over(
                pod,
                volume,
                blk=blk,
                serial=serial,
                read_only=read_only,
                block_size=block_size,
                physical_block_size=physical_block_size,
            )

    def give_back(self, pod: str, volume: str) -> None:
        """Makes a handed over LUN of the pod an ordinary claim again; idempotent.

        No target is waited for but the volume's, which has the controller if it is a LUN.

        Raises:
            Failure: ABORTED, the volume is being worked on.
        """
        at = self._on[id(self._targets.of(volume))]
        with self.hold(pod):
            at.give_back(pod, volume)

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
        """Makes a volume a LUN of the pod's controller, as PodControllers.attach."""
        with self.hold(pod):
            return self._at(pod).attach(
                *(pod, volume), serial=serial, read_only=read_only, removable=removable, check=check
            )

    def detach(self, pod: str, volume: str, *, unless_used: bool = False) -> None:
        """Removes a LUN, as PodControllers.detach; idempotent."""
        with self.hold(pod):
            self._at(pod).detach(pod, volume, unless_used=unless_used)

    def clear(self, pod: str) -> None:
        """Removes every LUN of the pod, and unparks what was handed over; idempotent.

        Raises:
            Failure: ABORTED, one of the volumes is being worked on.
        """
        with self.hold(pod):
            for at in self._left_on(pod):
                at.clear(pod)

    # Which target

    def _at(self, pod: str) -> PodControllers:
        """Returns those of the target that has the pod's controller.

        If all answer and none has it, that is the first one, which says so itself.
        """
        return self._on[id(self._found(pod) or self._targets.clients[0])]

    def _left_on(self, pod: str) -> list[PodControllers]:
        """Returns those of the targets that something of the pod may be left on."""
        try:
            found = self._found(pod)
        except Failure:  # several have it
            found = None
        return [self._on[id(found)]] if found else list(self._on.values())

    def _found(self, pod: str) -> Client | None:
        name = controller_name(pod)
        if self._targets.sole is not None:
            return self._targets.sole
        what = f"controller {name}: delete the pod"
        return self._targets.having(name, what, lambda client: self._on[id(client)].exists(pod))

    def _has(self, pod: str) -> list[Answer[bool]]:
        return self._targets.ask(lambda client: self._on[id(client)].exists(pod))
