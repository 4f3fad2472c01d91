"""The copy of a volume that a VM uses: a block job of the gateway's, as `virsh blockcopy` has it.

So the gateway sees to it that the target's LUN or virtio-blk controller, the running domain and its
definition follow together, also when it is killed in between; and this command may end at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from plugin.gateway import lvolcopies
from plugin.gateway.lvolcopies import Disk
from plugin.moves.naming import Domains
from plugin.signals import uninterrupted
from pydataplane.client import Client
from pydataplane.domain.names import domain_of
from pydataplane.errors import VolumeError

LOOK_S = 0.1
"""How often the target is asked how far it is, seconds."""
FOLLOW_S = 60.0
"""How long a gateway may take to have a domain follow its disk, also one that starts, seconds."""

Progress = Callable[[int, int], None]


class Running:
    """A disk of a VM, by the target on the volume that moves, or on the new one."""

    def __init__(self, domains: Domains, client: Client, disk: Disk) -> None:
        """`client` is the target's, which has `disk`."""
        self._domains, self._client, self._disk = domains, client, disk

    @property
    def errors(self) -> type[Exception]:
        """What libvirt's calls raise."""
        found: type[Exception] = self._domains.libvirt.libvirtError
        return found

    @property
    def domain(self) -> str | None:
        """Name of the domain whose disk it is; None: libvirt knows it no more."""
        handle = self._domains.of_uuid(domain_of(self._disk.controller))
        return handle.name() if handle is not None else None

    def mirror(self, old: str, made: str, to: str, progress: Progress) -> str:
        """Has the target copy the disk, and what is written to it, to the new volume.

        Returns the disk's target dev when both have the same.

        Args:
            old: LVSTORE/NAME that the domain names.
            made: UUID of the new volume.
            to: LVSTORE/NAME of that.
            progress: is told of bytes that were dealt with, and of how many.

        Raises:
            VolumeError: it cannot be; libvirt's, TargetError: as that.
        """
        handle = self._handle()
        devs = self._domains.live_devs(handle, old)
        if len(devs) != 1:
            raise VolumeError(
                f"domain {handle.name()} names volume {old} otherwise, or twice: detach the disk,"
                " and attach it by that name"
            )
        (dev,) = devs
        copy = lvolcopies.found(self._client, self._disk)
        if copy is not None and copy.destination != made:
            raise VolumeError(
                f"disk {dev} of domain {handle.name()} is being copied to another volume: wait for"
                " the end of that, or `virsh blockjob --abort` it"
            )
        if copy is not None and (copy.state == "failed" or not handle.blockJobInfo(dev, 0)):
            lvolcopies.abort(self._client, self._disk)  # which the gateway knows nothing of
            copy = None
        if copy is None:
            self.begin(handle, dev, to)
        self.until_ready(handle, dev, made, progress)
        return dev

    def begin(self, handle: Any, dev: str, to: str) -> None:
        """Begins to copy a disk to the volume LVSTORE/NAME, which is there."""
        libvirt = self._domains.libvirt
        flags = (
            libvirt.VIR_DOMAIN_BLOCK_COPY_TRANSIENT_JOB | libvirt.VIR_DOMAIN_BLOCK_COPY_REUSE_EXT
        )
        handle.blockCopy(dev, self._domains.disk_on(handle, dev, to), {}, flags)

    def until_ready(self, handle: Any, dev: str, made: str, progress: Progress) -> None:
        """Waits until all is copied.

        Raises:
            VolumeError: the copy failed.
        """
        while True:
            copy = lvolcopies.found(self._client, self._disk)
            if copy is None or copy.destination != made or copy.state == "failed":
                why = (copy and copy.error) or "the gateway's log says why"
                raise VolumeError(
                    f"the copy of disk {dev} of domain {handle.name()} has ended, and the domain"
                    f" goes on with what it has: {why}"
                )
            progress(copy.done, copy.total)
            if copy.state == "ready":
                return
            time.sleep(LOOK_S)

    def pivot(self, dev: str) -> None:
        """Has the disk go on with its copy, and the domain name it.

        Raises:
            libvirt's: it does not, or nobody knows.
        """
        abort = self._domains.libvirt.VIR_DOMAIN_BLOCK_JOB_ABORT_PIVOT
        self._handle().blockJobAbort(dev, abort)

    def end(self, old: str, made: str) -> None:
        """Ends our copy, if there is one; the disk goes on with what it is on. Safe to repeat.

        `old` and `made` are as for `mirror`. No copy to the volume is pivoted after that.

        Raises:
            TargetError: nobody knows.
        """
        copy = lvolcopies.found(self._client, self._disk)
        if copy is None or copy.destination != made:
            return
        with suppress(
            VolumeError, self.errors
        ):  # so that clients are told; the rest does the target
            handle = self._handle()
            for dev in self._domains.live_devs(handle, old):
                handle.blockJobAbort(dev, 0)
        copy = lvolcopies.found(self._client, self._disk)
        if copy is not None and copy.destination == made:
            lvolcopies.abort(self._client, self._disk)

    def followed(self, to: str) -> None:
        """Waits until the pivot is over, and the domain, if it runs, names LVSTORE/NAME.

        Raises:
            VolumeError: it does not.
        """
        end = time.monotonic() + FOLLOW_S
        with uninterrupted():
            while not self._follows(to):
                if time.monotonic() > end:
                    raise VolumeError(
                        f"domain {domain_of(self._disk.controller)} is on volume {to}, and does not"
                        " name it yet: see the gateway's log, and move the volume again"
                    )
                time.sleep(LOOK_S)

    def _follows(self, to: str) -> bool:
        if lvolcopies.found(self._client, self._disk) is not None:
            return False
        handle = self._domains.of_uuid(domain_of(self._disk.controller))
        if handle is None:
            return True
        try:
            return not handle.isActive() or bool(self._domains.live_devs(handle, to))
        except self.errors as error:
            if error.get_error_code() != self._domains.libvirt.VIR_ERR_NO_DOMAIN:  # type: ignore[attr-defined]
                raise
            return True

    def _handle(self) -> Any:
        uuid = domain_of(self._disk.controller)
        handle = self._domains.of_uuid(uuid)
        if handle is None:
            raise VolumeError(f"the gateway knows no domain {uuid}, which uses the volume")
        return handle
