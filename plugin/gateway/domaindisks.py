"""Makes, adds and removes a domain's controllers and disks in one target.

A failure names the domain. All functions block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pydataplane.client import Client
from pydataplane.domain import limiting, missingvolumes, reconcile
from pydataplane.domain.actions import RemoveTarget, addition, leftovers
from pydataplane.domain.errors import ReconcileError
from pydataplane.domain.model import DiskAddress
from pydataplane.domain.names import domain_controller
from pydataplane.domain.observed import Bdev, State, is_right, observe
from pydataplane.domain.translate import LunPlan, Plan
from pydataplane.errors import BUSY, EXISTS, RpcError, VolumeError
from pydataplane.lvols import Lvol

_EMPTY = State({})


@contextmanager
def _about(plan: Plan) -> Iterator[None]:
    """Puts the domain's name before the sentence of what fails."""
    try:
        yield
    except (VolumeError, ReconcileError) as error:
        raise type(error)(f"domain {plan.domain}: {error}") from error


def find(client: Client, plan: Plan, known: dict[str, str]) -> Plan:
    """Returns the plan with the UUIDs of the volumes that are there; see `missing.find`."""
    with _about(plan):
        return missingvolumes.find(client, plan, known)


def make(client: Client, plan: Plan, mib: int) -> Plan:
    """Makes the volumes of the plan that have no UUID; see `missing.make`."""
    with _about(plan):
        return missingvolumes.make(client, plan, mib)


def ensure(client: Client, plan: Plan, *, whole: bool) -> list[LunPlan]:
    """Makes the controllers exist with the plan's disks; see `reconcile.ensure`."""
    with _about(plan):
        return reconcile.ensure(client, plan, whole=whole)


def add(client: Client, plan: Plan, lun: LunPlan, volume: Lvol) -> bool:
    """Adds one disk, of this volume, to the plan's; False if it is there already.

    Raises:
        VolumeError: another disk has its address, or there is no controller.
        TargetError: the target refuses or does not answer.
    """
    bdev = Bdev(volume.uuid, volume.block_size, volume.limited)
    action, address = addition(plan, lun), lun.address(plan.controller)
    if lun.front == "blk":
        # What an earlier disk of the same number has left behind is not this one's.
        reconcile.release(client, address.controller)
    try:
        reconcile.perform(client, action, _EMPTY.with_bdev(lun.bdev_name, bdev))
    except RpcError as error:
        # What there is tells why, or that it was done before.
        state = observe(client).with_bdev(lun.bdev_name, bdev)
        disks = state.controllers.get(address.controller)
        if disks is None and lun.front == "scsi":
            raise VolumeError(
                f"domain {plan.domain} has no controller in the target: "
                "was the target started after it? Stop and start the domain"
            ) from None
        present = (disks or {}).get(address.target)
        if error.code not in (EXISTS, BUSY):
            raise
        idle = leftovers(plan, state)
        if any(reconcile.release(client, name) == "released" for name in idle):
            return add(client, plan, lun, volume)
        if is_right(lun, present, state):
            return False
        if present is not None:
            raise VolumeError(
                f"domain {plan.domain}: target {address.target} of controller {address.controller}"
                f" is taken by {present.bdev}: restart virtlun-gateway, which puts this right"
            ) from None
        raise
    return True


def remove(client: Client, address: DiskAddress, limited: str | None) -> None:
    """Removes one disk, and what it has limited of a volume; see `Target.remove`."""
    domain = domain_controller(address.controller)
    if limited is not None:
        limiting.gone_before(client, limited, domain)
    if address.controller == domain:
        reconcile.perform(client, RemoveTarget(*address), _EMPTY)
    elif reconcile.release(client, address.controller) == "busy":
        return  # the guest has it still
    if limited is not None:
        limiting.gone(client, [limited], domain, observe(client))


def release_leftovers(client: Client, plan: Plan) -> set[str]:
    """Deletes a running domain's idle controllers that its plan lacks; returns their names."""
    state = observe(client)
    idle = leftovers(plan, state)
    gone = {name for name in idle if reconcile.release(client, name) == "released"}
    kept = {lun.bdev_name for lun in plan.luns}
    bdevs = [bdev for bdev in state.bdevs_of(gone) if bdev not in kept]
    limiting.gone(client, bdevs, plan.controller, state)
    return gone
