"""What a target has, as far as domains are concerned: its controllers and their disks.

Standard library only: the hook is made of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pydataplane.domain.model import OWN, Characteristics, DiskAddress, FrontEnd, LunPlan
from pydataplane.domain.names import domain_controller
from pydataplane.errors import NO_DEVICE, RpcError
from pydataplane.methods import Rpc

BLOCK_BYTES = 512
"""Logical block of a volume of which nothing else is known."""


@dataclass(frozen=True, slots=True)
class ObservedDisk:
    """A disk as the target has it; what a target that is SPDK's own does not tell is None."""

    bdev: str
    serial: str | None = None
    read_only: bool | None = None
    block_size: int | None = None
    characteristics: Characteristics | None = None
    identity: str | None = None
    """UUID of the volume that the guest has known it as, where that was another one."""


@dataclass(frozen=True, slots=True)
class Bdev:
    """A volume's bdev."""

    name: str
    """Its UUID."""
    block_size: int
    """Bytes of its own blocks."""
    limited: bool | None = None
    """Whether it has I/O limits; None where the target does not tell."""
    follows_guest: bool = False
    """Whether it is an image that several hosts have, one at a time."""
    awaits_guest: bool = False
    """Whether it is open for a guest that is still to come from another host."""


@dataclass(frozen=True, slots=True)
class State:
    """What the target has: controllers to target numbers to disks, and the bdevs asked for.

    The disk of a virtio-blk controller has number 0.

    `connected` are the controllers that a QEMU is connected to now, or for which the target does
    not tell.
    """

    controllers: Mapping[str, Mapping[int, ObservedDisk]]
    bdevs: Mapping[str, Bdev] = field(default_factory=dict)
    """By the name (UUID or LVSTORE/LVOL) that was asked for."""
    connected: frozenset[str] = frozenset()

    def of_domain(self, controller: str) -> set[str]:
        """Returns the names of the controllers of a domain, of which `controller` is its own."""
        return {name for name in self.controllers if domain_controller(name) == controller}

    def bdevs_of(self, controllers: Collection[str]) -> list[str]:
        """Returns the names of the bdevs that these controllers show, each once."""
        luns = [self.controllers.get(name, {}) for name in sorted(controllers)]
        return list(dict.fromkeys(shown.bdev for each in luns for shown in each.values()))

    def has_elsewhere(self, bdev: str, controller: str) -> bool:
        """Whether another domain than that of this controller shows a bdev."""
        others = self.controllers.keys() - self.of_domain(controller)
        return bdev in self.bdevs_of(others)

    def with_bdev(self, asked: str, bdev: Bdev) -> State:
        """Returns the state with one more bdev."""
        return replace(self, bdevs={**self.bdevs, asked: bdev})


def disks_of(controller: Mapping[str, Any]) -> dict[int, ObservedDisk]:
    """Reads the disks of one of vhost_get_controllers' controllers, by target number."""
    result = {}
    specific = controller.get("backend_specific", {})
    if "block" in specific:
        result[0] = _blk(specific["block"])
    for target in specific.get("scsi", ()):
        luns = target.get("luns", ())
        lun = luns[0] if luns else {}
        result[int(target["scsi_dev_num"])] = ObservedDisk(
            str(lun.get("bdev_name", "")),
            lun.get("serial"),
            lun.get("read_only"),
            lun.get("block_size"),
            _characteristics(lun),
            lun.get("uuid"),
        )
    return result


def _blk(disk: Mapping[str, Any]) -> ObservedDisk:
    """Reads a virtio-blk controller's disk, of which it has one."""
    return ObservedDisk(
        str(disk.get("bdev") or ""),
        disk.get("serial"),
        disk.get("readonly"),
        disk.get("block_size"),
        replace(OWN, discard=disk["discard"], physical_block_size=disk.get("physical_block_size"))
        if "discard" in disk
        else None,
        disk.get("uuid"),
    )


def _characteristics(lun: Mapping[str, Any]) -> Characteristics | None:
    """Reads what a LUN says of itself, None where the target does not tell."""
    if "write_cache" not in lun:
        return None
    # An older target tells nothing of what it does not know, and shows none of it.
    told = {f.name: lun[f.name] for f in fields(Characteristics) if f.name in lun}
    return Characteristics(**told)


def bdev_of(lun: LunPlan, state: State) -> Bdev:
    """Returns a disk's bdev, or what to ask for if the target has none.

    Where the UUID is known it decides: another volume under the old name is not this disk's.
    """
    return state.bdevs.get(lun.bdev_name) or Bdev(lun.bdev_name, BLOCK_BYTES)


def characteristics_of(lun: LunPlan, bdev: Bdev) -> Characteristics:
    """Returns what a disk on this bdev is to show: no physical block smaller than a logical one."""
    chosen = lun.characteristics
    if chosen.physical_block_size is None:
        return chosen
    size = max(chosen.physical_block_size, lun.block_size or 0, bdev.block_size)
    return replace(chosen, physical_block_size=size)


def is_right(lun: LunPlan, shown: ObservedDisk | None, state: State) -> bool:
    """Whether the target shows the LUN as it is wanted, as far as it tells.

    Without a serial of the client's the target takes the volume's UUID, which is the bdev's name,
    or that of the volume whose copy took its place while the guest used it.
    That of a disk over the network is known to its metadata.
    One that is read-only need not be so by our doing: the volume itself may be. Its blocks are
    never smaller than the volume's.
    """
    bdev = bdev_of(lun, state)
    if shown is None or shown.bdev != bdev.name:
        return False
    known_as, is_far = lun.identity or bdev.name, lun.volume.source is not None
    if is_far and shown.serial is not None and (shown.identity or bdev.name) != known_as:
        return False
    writable = shown.read_only is False and lun.read_only
    return (
        shown.serial in (None, lun.serial or shown.identity or bdev.name)
        and not writable
        and shown.block_size in (None, max(lun.block_size or 0, bdev.block_size))
        and shown.characteristics in (None, characteristics_of(lun, bdev))
    )


def look_up(rpc: Rpc, name: str) -> Bdev | None:
    """Returns the bdev with a name or alias, None if there is none.

    Raises:
        TargetError: the target refuses or does not answer.
    """
    try:
        found = rpc.call("bdev_get_bdevs", name=name)[0]
    except RpcError as error:
        if error.code != NO_DEVICE:
            raise
        return None
    rbd = found.get("driver_specific", {}).get("rbd")
    return Bdev(
        str(found["name"]),
        int(found.get("block_size", BLOCK_BYTES)),
        found.get("has_limits"),
        follows_guest=rbd is not None,
        awaits_guest=rbd is not None and rbd.get("locked") is False,
    )


def observe(rpc: Rpc, luns: Iterable[LunPlan] = ()) -> State:
    """Asks the target for its controllers, and for the bdevs of these disks.

    Raises:
        TargetError: it does not answer.
    """
    controllers = rpc.call("vhost_get_controllers")
    names = {lun.bdev_name for lun in luns}
    bdevs = {name: bdev for name in names if (bdev := look_up(rpc, name)) is not None}
    connected = frozenset(c["ctrlr"] for c in controllers if c.get("sessions", True))
    return State({c["ctrlr"]: disks_of(c) for c in controllers}, bdevs, connected)


def is_hidden(rpc: Rpc, address: DiskAddress, front: FrontEnd) -> bool:
    """Whether a disk is recorded and cannot be shown, as what it is on is not there.

    Raises:
        TargetError: the target refuses or does not answer.
    """
    of = f"controller {address.controller}"
    own = of if front == "blk" else f"target {address.target} of {of}"
    problems = rpc.call("virtlun_get_status")["restore_problems"]
    return any(problem.startswith(f"{own} is not restored: ") for problem in problems)
