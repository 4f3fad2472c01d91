"""What becomes of disks whose volume is not there when their domain starts, for gateway and hook.

The start fails, with the command that makes the volume, or that the array has to. Only if the
configuration asks for it, a volume is made, thin, for a disk of which none is recorded; one that is
recorded is never replaced. What is recorded is its UUID, at define, attach and start, in the
domain's metadata, and by the hook in `records`.

Standard library only: the hook is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pydataplane.domain.model import LunPlan, Plan
from pydataplane.domain.observed import look_up
from pydataplane.errors import EXISTS, RpcError, VolumeError, VolumeNotFoundError
from pydataplane.methods import Rpc


def find(rpc: Rpc, plan: Plan, known: Mapping[str, str]) -> Plan:
    """Returns the plan with the UUID of each volume that is there; None marks what was never seen.

    The UUID decides: a renamed volume is found, and another one under the old name is not taken
    for it. `known` has UUIDs (by LVSTORE/LVOL) that the domain's metadata does not.

    Raises:
        VolumeNotFoundError: a volume is lost, or its lvstore is not loaded.
        TargetError: the target refuses or does not answer.
    """
    luns = [replace(lun, uuid=lun.uuid or known.get(lun.volume.alias)) for lun in plan.luns]
    return replace(plan, luns=tuple(_found(rpc, lun) for lun in luns))


def _found(rpc: Rpc, lun: LunPlan) -> LunPlan:
    bdev = look_up(rpc, lun.bdev_name)
    if bdev is None:
        rpc.call("bdev_wait_for_examine")  # the target may have been started just now
        bdev = look_up(rpc, lun.bdev_name)
    if bdev is None:
        _check_never_existed(rpc, lun)
    return replace(lun, uuid=bdev.name if bdev is not None else None)


_DISKS = {"iscsi": "LUN", "nvme": "namespace"}
"""What the array makes that is a volume, by kind of pool."""


def _kinds(rpc: Rpc) -> dict[str, str]:
    """Returns the kind of each lvstore and pool, by name."""
    stores = rpc.call("bdev_lvol_get_lvstores")
    return {str(each["name"]): str(each.get("kind") or "lvstore") for each in stores}


def _check_never_existed(rpc: Rpc, lun: LunPlan) -> None:
    """Raises VolumeNotFoundError if the volume of a disk that has none may be lost."""
    if lun.volume.source is not None:
        raise VolumeNotFoundError(
            f"disk {lun.dev}: image {lun.volume.alias} is not open in the target: start the domain"
            " again, through virtlun-gateway"
        )
    volume = f"volume {lun.volume.alias}" + (f" (UUID {lun.uuid})" if lun.uuid else "")
    store = lun.volume.lvstore
    kinds = _kinds(rpc)
    if store not in kinds:
        raise VolumeNotFoundError(
            f"disk {lun.dev}: lvstore {store} with {volume} is not loaded; bring back the file or"
            " device that it is on (`virtlun lvstore list` shows what is loaded), then start the"
            " domain again"
        )
    if lun.uuid is None:
        return
    other = look_up(rpc, lun.volume.alias)
    disk = _DISKS.get(kinds[store])
    if other is not None:
        restoring = (
            f"bring the lost {disk} back at the array"
            if disk
            else "rename it and restore the lost one under its UUID"
        )
        raise VolumeNotFoundError(
            f"disk {lun.dev}: {volume} is lost, and another one has its name (UUID {other.name});"
            f" to use that one, detach the disk and attach it again, or else {restoring}"
        )
    if disk:
        raise VolumeNotFoundError(
            f"disk {lun.dev}: {volume} is lost: the array of pool {store} has no {disk} that is it;"
            f" bring it back there and show it to this host (`virtlun volume list {store}`), or"
            " detach the disk"
        )
    raise VolumeNotFoundError(
        f"disk {lun.dev}: {volume} is lost: lvstore {store} has no volume of this UUID; make it"
        f" again with `virtlun volume create {lun.volume.alias} SIZE --uuid {lun.uuid}` and restore"
        " its data, or detach the disk"
    )


def make(rpc: Rpc, plan: Plan, mib: int) -> Plan:
    """Makes the volumes that `find` left without a UUID, thin; returns the plan with all UUIDs.

    Raises:
        VolumeNotFoundError: there is such a volume, and `mib` is 0.
        VolumeError: one cannot be made.
        TargetError: the target does not answer.
    """
    missing = [lun for lun in plan.luns if lun.uuid is None]
    kinds = _kinds(rpc) if missing else {}
    for lun in missing:
        store = lun.volume.lvstore
        if disk := _DISKS.get(kinds.get(store, "")):
            raise VolumeNotFoundError(
                f"disk {lun.dev}: there is no volume {lun.volume.alias}, and only the array of pool"
                f" {store} can make it: make the {disk} there and show it to this host"
                f" (`virtlun volume list {store}`)"
            )
    if missing and not mib:
        alias = missing[0].volume.alias
        raise VolumeNotFoundError(
            f"disk {missing[0].dev}: there is no volume {alias}; if it was renamed or lost, bring"
            f" it back; make an empty one with `virtlun volume create {alias} SIZE`"
        )
    made = {lun.target: _create(rpc, lun, mib) for lun in missing}
    luns = tuple(replace(lun, uuid=lun.uuid or made[lun.target]) for lun in plan.luns)
    return replace(plan, luns=luns)


def _create(rpc: Rpc, lun: LunPlan, mib: int) -> str:
    try:
        answer = rpc.call(
            "bdev_lvol_create",
            lvs_name=lun.volume.lvstore,
            lvol_name=lun.volume.lvol,
            size_in_mib=mib,
            thin_provision=True,
        )
        return str(answer)
    except RpcError as error:
        there = look_up(rpc, lun.volume.alias) if error.code == EXISTS else None
        if there is not None:  # another start was faster
            return there.name
        raise VolumeError(
            f"disk {lun.dev}: volume {lun.volume.alias} of {mib} MiB cannot be made: {error}"
        ) from error
