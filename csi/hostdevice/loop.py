"""A loop device over a FUSE file of the target: the face that every Linux has.

While the target is away the device waits: its file is held by the virtlun-holder, and the next
target goes on with it. Where that is not so (a kernel before 6.9 and a target that was killed, or
one that was away for too long) the device gives I/O errors and stays dead, since the kernel cannot
exchange a writable loop device's file. `attach` sees that its file is another one than the target
exports now, takes it away and makes a new one; who has the old one open must open anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from csi.host import Host
from csi.host.local import LocalHost
from csi.hostdevice import exports, loopctl
from csi.hostdevice.loopctl import Loop
from csi.hosterrors import HostError
from csi.longcalls import LongCalls
from csi.targets import Targets
from pydataplane.errors import EXISTS, RpcError

PROBE_S = 15.0
"""How long an export or a device may take to answer, seconds."""
UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class LoopDevices:
    """HostDevice by virtlun_export_create and loop devices named `virtlun:UUID[:ro]`."""

    def __init__(
        self, targets: Targets, host: Host | None = None, probe_s: float = PROBE_S
    ) -> None:
        """Has the one of `targets` export a volume that has it, and uses `host` (this process).

        `probe_s` is how long an export or a device may take to answer, seconds.
        """
        self._targets = targets
        self._host = host or LocalHost()
        self._probes = LongCalls(probe_s)

    def attach(
        self,
        volume: str,
        *,
        read_only: bool = False,
        block_size: int = 512,
        shared: bool = False,
    ) -> Path:
        """Returns the volume's device over the file that the target exports now."""
        file = self._export(volume, shared=shared)
        try:
            found = self._probes.run(file, f"looking at the target's export {file}", file.stat)
        except OSError as error:
            raise HostError(f"the target's export {file} does not answer: {error}") from error
        for loop in self._loops(volume):
            same = loop.backing == (loopctl.encoded(found.st_dev), found.st_ino)
            if not same or not self._answers(volume, loop):
                self._host.release(volume, loop.device)
            elif loop.read_only == read_only and not loop.leaving:
                return loop.device
        return self._host.attach(volume, file, read_only=read_only, block_size=block_size)

    def device(self, volume: str, *, read_only: bool = False) -> Path | None:
        """Returns the volume's device if there is one."""
        found = [loop for loop in self._loops(volume) if loop.read_only == read_only]
        working = [loop for loop in found if not loop.leaving]
        return next((loop.device for loop in working or found), None)

    def answers(self, volume: str) -> bool:
        """Whether the kernel still asks the target for what the volume's devices are over."""
        return not any(loop.name.startswith(loopctl.DEAD) for loop in self._loops(volume))

    def grow(self, volume: str) -> None:
        """Lets the volume's devices take its size."""
        for loop in self._loops(volume):
            self._host.resize(volume, loop.device)

    def flush(self, volume: str) -> None:
        """Empties the page cache of the volume's devices; of one whose file is dead nothing is."""
        for loop in self._loops(volume):
            if not loop.name.startswith(loopctl.DEAD):
                self._host.flush(volume, loop.device)

    def detach(self, volume: str) -> None:
        """Frees the volume's devices, then its export."""
        for loop in self._loops(volume):
            self._host.detach(volume, loop.device)
        exports.delete(self._targets, volume)

    def attached(self) -> list[str]:
        """Returns the volumes that have a device."""
        exported = exports.all_of(self._targets)
        return sorted(each["bdev_name"] for each in exported if self._loops(each["bdev_name"]))

    def present(self) -> list[str]:
        """Returns the UUIDs after which the files of loop devices are called, as exports are."""
        return sorted(name for name in loopctl.file_names() if UUID.fullmatch(name))

    def _export(self, volume: str, *, shared: bool) -> Path:
        """Returns the target's file of the volume, made if need be."""
        client = self._targets.of(volume)
        try:
            # also where there is one: it may be shared with other hosts, and is not to be, or not
            made = client.call(
                "virtlun_export_create",
                bdev_name=volume,
                read_only=False,
                shareable=shared or None,
            )
        except RpcError as error:
            if error.code == EXISTS and (export := exports.find(client, volume)) is not None:
                return Path(export["path"])
            raise
        return Path(made["path"])

    def _answers(self, volume: str, loop: Loop) -> bool:
        """Whether a device's first bytes can be read from its file.

        Raises:
            Failure: DEADLINE_EXCEEDED, it waits, so that nobody knows.
        """
        about = f"reading {loop.device} of {loop.name}"
        return self._probes.run(loop.device, about, lambda: self._host.answers(volume, loop.device))

    def _loops(self, volume: str) -> list[Loop]:
        """Returns the volume's devices.

        To tell what a device is the kernel asks its file, and that waits for the target: one that
        is away is an error here.
        """
        self._targets.of(volume).call("spdk_get_version")
        return self._host.loops(volume)
