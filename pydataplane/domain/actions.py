"""What is to be done for a target to match a domain: pure functions of its plan and what there is.

Standard library only: the hook is made of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydataplane.domain.model import DiskAddress, LunPlan, Plan
from pydataplane.domain.names import domain_controller
from pydataplane.domain.observed import ObservedDisk, State, bdev_of, is_right


@dataclass(frozen=True, slots=True)
class CreateController:
    """Make an empty controller."""

    controller: str
    cpus: frozenset[frozenset[int]] = frozenset()
    """As of `Plan`."""


@dataclass(frozen=True, slots=True)
class CreateBlk:
    """Make the controller of a virtio-blk disk, with it."""

    controller: str
    """The domain's, which its name begins with."""
    lun: LunPlan
    cpus: frozenset[frozenset[int]] = frozenset()
    """As of `Plan`."""
    incoming: bool = False
    """As of `Plan`."""


@dataclass(frozen=True, slots=True)
class SetOwner:
    """Keep a controller for a process of QEMU's user that starts after this."""

    controller: str
    uid: int | None
    """Number of that user; None: any."""


@dataclass(frozen=True, slots=True)
class AddTarget:
    """Show a volume as a target of a controller."""

    controller: str
    lun: LunPlan
    incoming: bool = False
    """As of `Plan`."""


@dataclass(frozen=True, slots=True)
class SetLimits:
    """Limit the I/O of a disk that is shown already."""

    controller: str
    """The domain's."""
    lun: LunPlan


@dataclass(frozen=True, slots=True)
class RemoveTarget:
    """Take a target from a controller; a connected guest sees the disk go."""

    controller: str
    number: int


@dataclass(frozen=True, slots=True)
class DeleteController:
    """Take a controller without targets away."""

    controller: str


@dataclass(frozen=True, slots=True)
class ReleaseController:
    """Take a controller away with its targets, once nobody is connected to it."""

    controller: str


Action = (
    CreateController
    | CreateBlk
    | SetOwner
    | AddTarget
    | SetLimits
    | RemoveTarget
    | DeleteController
    | ReleaseController
)


def addition(plan: Plan, lun: LunPlan) -> AddTarget | CreateBlk:
    """Returns what shows a disk to the guest of this domain."""
    if lun.front == "scsi":
        return AddTarget(plan.controller, lun, plan.incoming)
    return CreateBlk(plan.controller, lun, plan.cpus, plan.incoming)


def wanted_disks(plan: Plan) -> dict[DiskAddress, LunPlan]:
    """Returns the plan's disks by where the target is to have them."""
    return {lun.address(plan.controller): lun for lun in plan.luns}


def _shown(plan: Plan, state: State) -> dict[DiskAddress, ObservedDisk]:
    """Returns what the target has under the controllers that the plan names."""
    return {
        DiskAddress(name, number): shown
        for name in plan.controllers
        for number, shown in state.controllers.get(name, {}).items()
    }


def actions(plan: Plan, state: State, *, whole: bool) -> list[Action]:
    """Returns what to do, in order, so that the controllers exist with the plan's disks.

    A disk that is right stays untouched, so a running guest's other disks notice nothing. `whole`:
    the domain does not run and is about to be started, so that a controller that shows anything
    else, or not all, is made anew, and whoever is connected is a stranger, and disconnected.
    Otherwise nothing is taken from it: see `unasked`.
    """
    result: list[Action] = []
    for name, luns in plan.controllers.items():
        owner: list[Action] = [SetOwner(name, plan.uid)] if whole else []
        is_scsi = name == plan.controller
        create: list[Action] = [CreateController(name, plan.cpus)] if is_scsi else []
        add: list[Action] = [addition(plan, lun) for lun in luns]
        # A virtio-blk controller is made with its disk.
        new = [*create, *owner, *add] if create else [*add, *owner]
        shown = state.controllers.get(name)
        if shown is None:
            # It may be recorded, with a volume that is not there: none other has its place then.
            result += [ReleaseController(name)] if whole and not is_scsi else []
            result += new
            continue
        numbers = {lun.address(plan.controller).target: lun for lun in luns}
        right = {
            n
            for n, lun in numbers.items()
            if is_right(lun, shown.get(n), state)
            # Such a volume may be another host's still, and is asked for anew.
            and (plan.incoming or not bdev_of(lun, state).awaits_guest)
        }
        if whole and shown.keys() | numbers.keys() != right:
            result += [*owner, ReleaseController(name), *new]
            continue
        missing = [lun for n, lun in numbers.items() if n not in shown]
        result += [addition(plan, lun) for lun in missing]
        if whole:  # those of one that runs may have been changed since
            result += [*owner, *(SetLimits(plan.controller, lun) for lun in luns)]
    return result


def unasked(plan: Plan, state: State) -> dict[DiskAddress, ObservedDisk]:
    """Returns the disks that a running domain has otherwise than its metadata says, by address.

    They stay as they are: a guest may be writing to them, and nobody has asked for a detach.
    """
    wanted = wanted_disks(plan)
    return {
        address: shown
        for address, shown in sorted(_shown(plan, state).items())
        if address not in wanted or not is_right(wanted[address], shown, state)
    }


def leftovers(plan: Plan, state: State) -> set[str]:
    """Returns a running domain's controllers that it lacks, and that no QEMU is connected to.

    Those are of virtio-blk disks whose attach failed, or that the guest has let go late.
    """
    kept = {*plan.controllers, *plan.others, plan.controller}
    return state.of_domain(plan.controller) - kept - state.connected


def clearance(controller: str, state: State) -> list[Action]:
    """Returns what takes a controller away with its LUNs; nothing if there is none."""
    present = state.controllers.get(controller)
    if present is None:
        return []
    is_scsi = controller == domain_controller(controller)
    removals = [RemoveTarget(controller, number) for number in sorted(present) if is_scsi]
    return [*removals, DeleteController(controller)]
