"""What becomes of disks whose volume is not there when their domain starts: the gateway's side.

The policy and its sentences are the hook's (plugin.hook.script.judge): a volume that never existed
is made, one that is lost is not. Here it works on plans, with the gateway's client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plugin import reconcile
from plugin.hook import script
from plugin.translate import LunPlan, Plan
from pydataplane.client import Client
from pydataplane.errors import RpcError
from pydataplane.volumes import EXISTS, VolumeError, VolumeNotFoundError, Volumes


def find(client: Client, plan: Plan, known: Mapping[str, str]) -> Plan:
    """Returns the plan with the UUID of each volume that is there; None marks what never was.

    `known` has UUIDs (by LVSTORE/LVOL) that the domain's metadata does not: see `script.recall`.

    Raises:
        VolumeNotFoundError: a volume is lost, or its lvstore is not loaded.
        TargetError: the target does not answer.
    """
    names = reconcile.observe(client).names
    luns = [replace(lun, uuid=lun.uuid or known.get(lun.volume.alias)) for lun in plan.luns]
    if any(lun.bdev_name not in names for lun in luns):
        client.call("bdev_wait_for_examine")  # the target may have been started just now
        names = reconcile.observe(client).names

    def judged(lun: LunPlan) -> LunPlan:
        alias = lun.volume.alias
        return replace(lun, uuid=script.judge(lun.dev, alias, lun.uuid, names.get, stores))

    def stores() -> set[str]:
        return {store.name for store in Volumes(client).lvstores()}

    try:
        return replace(plan, luns=tuple(judged(lun) for lun in luns))
    except script.HookError as error:
        raise VolumeNotFoundError(f"domain {plan.domain}: {error}") from error


def make(client: Client, plan: Plan, mib: int) -> Plan:
    """Makes the volumes that `find` left without a UUID, thin; returns the plan with all UUIDs.

    Raises:
        VolumeNotFoundError: there is such a volume, and `mib` is 0.
        VolumeError, TargetError: the target refuses or does not answer.
    """
    missing = [lun for lun in plan.luns if lun.uuid is None]
    if missing and not mib:
        sentence = script.absent(missing[0].dev, missing[0].volume.alias)
        raise VolumeNotFoundError(f"domain {plan.domain}: {sentence}")
    made = {lun.target: _create(client, plan, lun, mib) for lun in missing}
    luns = tuple(replace(lun, uuid=lun.uuid or made[lun.target]) for lun in plan.luns)
    return replace(plan, luns=luns)


def _create(client: Client, plan: Plan, lun: LunPlan, mib: int) -> str:
    try:
        answer = client.call(
            "bdev_lvol_create",
            lvs_name=lun.volume.lvstore,
            lvol_name=lun.volume.lvol,
            size_in_mib=mib,
            thin_provision=True,
        )
        return str(answer)
    except RpcError as error:
        if error.code == EXISTS:  # another start was faster
            return Volumes(client).volume(lun.volume.alias).uuid
        raise VolumeError(
            f"domain {plan.domain}: disk {lun.dev}: volume {lun.volume.alias} of {mib} MiB cannot"
            f" be made: {error}"
        ) from error
