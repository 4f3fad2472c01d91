"""Makes the target match a domain, by what `actions` says is to be done.

The gateway uses it for a domain that starts or changes and, one by one, for all of them; the hook
for one that starts. From a domain that runs it takes no LUN, whatever its metadata says: only a
detach does that, and the domain's own end.

Standard library only: the hook is made of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Literal

from pydataplane.domain import histograms, limiting, reactors
from pydataplane.domain.actions import (
    Action,
    AddTarget,
    CreateBlk,
    CreateController,
    DeleteController,
    ReleaseController,
    RemoveTarget,
    SetLimits,
    SetOwner,
    actions,
    clearance,
    unasked,
    wanted_disks,
)
from pydataplane.domain.errors import LunKept, ReconcileError
from pydataplane.domain.limits import NONE
from pydataplane.domain.model import ON_ERROR, OWN, Characteristics, DiskAddress, LunPlan, Plan
from pydataplane.domain.observed import (
    Bdev,
    ObservedDisk,
    State,
    bdev_of,
    characteristics_of,
    observe,
)
from pydataplane.errors import (
    BAD_PARAMETERS,
    BUSY,
    METHOD_NOT_FOUND,
    NO_DEVICE,
    SPDK_REFUSES,
    RpcError,
)
from pydataplane.methods import Rpc

Release = Literal["released", "busy", "none"]
"""What became of a controller that was to go."""

SPDK_TARGET_MAX = 7
"""The highest number of a target that a controller of SPDK's own has."""

LEAVE_TRIES = 20
LEAVE_S = 0.1
"""How often, and how many seconds apart, whoever is connected to a controller that is to be made
anew is given to let go."""


def perform(rpc: Rpc, action: Action, state: State) -> None:
    """Does one action; taking away what somebody else took away meanwhile is no error.

    Raises:
        TargetError: the target refuses or does not answer.
    """
    match action:
        case CreateController(controller, cpus):
            mask = reactors.mask_for(rpc, cpus)
            rpc.call("vhost_create_scsi_controller", ctrlr=controller, cpumask=mask)
        case SetOwner(controller, uid):
            _set_owner(rpc, controller, uid)
        case DeleteController(controller):
            try:
                rpc.call("vhost_delete_controller", ctrlr=controller)
            except RpcError:
                if controller in observe(rpc).controllers:
                    raise
        case ReleaseController(controller):
            if not released(rpc, controller):
                raise ReconcileError(
                    f"controller {controller} shows other LUNs than the domain has, and a process"
                    " is connected to it though the domain does not run: end that process, then"
                    " start the domain again"
                )
        case RemoveTarget(controller, number):
            try:
                rpc.call(
                    "vhost_scsi_controller_remove_target", ctrlr=controller, scsi_target_num=number
                )
            except RpcError:
                if number in observe(rpc).controllers.get(controller, {}):
                    raise
        case AddTarget() | CreateBlk() | SetLimits():
            _show(rpc, action, state)


UNKNOWN = "unknown parameter "
"""Begins what the target says of a parameter that it does not know."""


def _show(rpc: Rpc, action: AddTarget | CreateBlk | SetLimits, state: State) -> None:
    """Limits a disk, shows it, if it is not there already, and has it counted."""
    controller, lun = action.controller, action.lun
    limiting.bring(rpc, controller, lun, state)
    try:
        if isinstance(action, AddTarget):
            _add_target(rpc, action, bdev_of(lun, state))
        elif isinstance(action, CreateBlk):
            _create_blk(rpc, action, bdev_of(lun, state))
    except RpcError as error:
        if error.code != BAD_PARAMETERS or not error.message.startswith(UNKNOWN):
            raise
        raise ReconcileError(
            f"{error}: the target is of an older version than what asks it: upgrade it first"
            " (`virtlun target upgrade`)"
        ) from error
    if lun.histograms and not lun.shareable:  # another VM may be counting
        histograms.begin(rpc, bdev_of(lun, state).name)


def _set_owner(rpc: Rpc, controller: str, uid: int | None) -> None:
    try:
        rpc.call("virtlun_controller_set_owner", ctrlr=controller, uid=uid, fresh=True)
    except RpcError as error:
        if error.code != METHOD_NOT_FOUND:  # SPDK's own has none
            raise


def _create_blk(rpc: Rpc, action: CreateBlk, bdev: Bdev) -> None:
    """Makes a virtio-blk controller; one of SPDK's own is not sent the extensions it lacks."""
    lun, mask = action.lun, reactors.mask_for(rpc, action.cpus)

    def create(policy: Mapping[str, Any]) -> None:
        rpc.call(
            "vhost_create_blk_controller",
            ctrlr=lun.address(action.controller).controller,
            dev_name=bdev.name,
            cpumask=mask,
            readonly=True if lun.read_only else None,
            serial=lun.serial,
            uuid=lun.known_as.uuid if lun.known_as is not None else None,
            shareable=True if lun.shareable else None,
            block_size=lun.block_size if lun.block_size != bdev.block_size else None,
            physical_block_size=characteristics_of(lun, bdev).physical_block_size,
            discard=None if lun.characteristics.discard else False,
            incoming=_incoming(action, bdev),
            **policy,
        )

    _with_policy(lun, create)


def _incoming(action: AddTarget | CreateBlk, bdev: Bdev) -> bool | None:
    return True if action.incoming and bdev.follows_guest else None


def _add_target(rpc: Rpc, action: AddTarget, bdev: Bdev) -> None:
    """Adds a LUN; a target that is SPDK's own is not sent the extensions that it does not know."""
    lun = action.lun
    extensions: dict[str, Any] = {
        "serial": lun.serial,
        "uuid": lun.known_as.uuid if lun.known_as is not None else None,
        "read_only": True if lun.read_only else None,
        "shareable": True if lun.shareable else None,
        "block_size": lun.block_size if lun.block_size != bdev.block_size else None,
        "incoming": _incoming(action, bdev),
        **_chosen(characteristics_of(lun, bdev)),
    }

    def add(policy: Mapping[str, Any]) -> None:
        rpc.call(
            "vhost_scsi_controller_add_target",
            ctrlr=action.controller,
            scsi_target_num=lun.target,
            bdev_name=bdev.name,
            **extensions,
            **policy,
        )

    try:
        _with_policy(lun, add)
    except RpcError as error:
        if (error.code, error.message) != (BAD_PARAMETERS, SPDK_REFUSES):
            raise
        policy = {} if lun.error_policy == ON_ERROR else _policy(lun)
        given = [name for name, value in (extensions | policy).items() if value is not None]
        raise _unknown_to_spdk(lun, given, error) from error


def _unknown_to_spdk(lun: LunPlan, given: list[str], error: RpcError) -> RpcError | ReconcileError:
    """Returns why SPDK's target refuses the parameters of a LUN, which it does not say."""
    if lun.target > SPDK_TARGET_MAX:
        return ReconcileError(
            f"target {lun.target}: {error}; SPDK's target has 0 to {SPDK_TARGET_MAX} of a VM's"
        )
    if given:
        return ReconcileError(
            f"{error}; SPDK's target cannot show a disk with {', '.join(given)}: leave that out"
        )
    return error


def _with_policy(lun: LunPlan, call: Callable[[Mapping[str, Any]], None]) -> None:
    """Makes a disk, with what becomes of its errors where the target knows that."""
    policy = _policy(lun)
    try:
        call(policy)
    except RpcError as error:
        # Nobody chose it: an older target, or SPDK's own, tells the guest of all errors.
        if error.code != BAD_PARAMETERS or not policy or lun.error_policy != ON_ERROR:
            raise
        call({})


def _policy(lun: LunPlan) -> dict[str, Any]:
    """Returns the parameters for what becomes of errors; without, the guest is told of all."""
    policy = lun.error_policy
    asked = {"write_error_policy": policy.write, "read_error_policy": policy.read}
    return {name: word for name, word in asked.items() if word != "report"}


def _chosen(characteristics: Characteristics) -> dict[str, Any]:
    """Returns the parameters for what is not as the volume itself has it."""
    default = asdict(OWN)
    return {k: v for k, v in asdict(characteristics).items() if v != default[k]}


def ensure(rpc: Rpc, plan: Plan, *, whole: bool) -> list[LunPlan]:
    """Makes the controllers exist with the plan's disks; safe to repeat.

    `whole`: the domain is to start, with exactly these; if one LUN fails, those added before it are
    taken away again. Otherwise it runs: the rest is added, for it is better off with some of its
    disks than none, and nothing is taken away.

    Returns:
        The LUNs that had to be added.

    Raises:
        ReconcileError: the target refused; names the first LUN.
        LunKept: all is done, and the running domain keeps a LUN that its metadata has not so.
        TargetUnavailable, TargetTimeout: the target does not answer.
    """
    state = observe(rpc, plan.luns)
    added: list[LunPlan] = []
    made: list[str] = []
    failures: list[str] = []
    for action in actions(plan, state, whole=whole):
        try:
            perform(rpc, action, state)
        except (ReconcileError, RpcError) as error:
            failures.append(_sentence(action, error))
            if whole:
                break
            continue
        if isinstance(action, CreateController):
            made.append(action.controller)
        if isinstance(action, AddTarget | CreateBlk):
            added.append(action.lun)
    if failures and whole:
        with suppress(RpcError):
            _undo(rpc, plan, made, added, state)
    if failures:
        raise ReconcileError(failures[0])
    kept = None if whole else next(iter(unasked(plan, state).items()), None)
    if kept is not None:
        raise LunKept(_kept(plan, *kept))
    return added


def _undo(rpc: Rpc, plan: Plan, made: list[str], added: list[LunPlan], state: State) -> None:
    """Takes away what a start that failed has added."""
    for lun in added:
        address = lun.address(plan.controller)
        if lun.front == "blk":
            release(rpc, address.controller)
        elif plan.controller not in made:
            perform(rpc, RemoveTarget(*address), state)
    for name in made:
        release(rpc, name)
    limited = [bdev_of(lun, state).name for lun in plan.luns if lun.limits != NONE]
    limiting.gone(rpc, limited, plan.controller, state)


def _kept(plan: Plan, address: DiskAddress, shown: ObservedDisk) -> str:
    """Says that a running domain keeps a disk that its metadata does not have so."""
    lun = wanted_disks(plan).get(address)
    other = f"says disk {lun.dev} otherwise" if lun is not None else "has no such disk"
    return (
        f"target {address.target} of controller {address.controller} is kept, with bdev"
        f" {shown.bdev}, though the metadata of the running domain {other}: only a detach takes a"
        " disk from a running guest; a stop and start of the domain puts it right"
    )


def _sentence(action: Action, error: ReconcileError | RpcError) -> str:
    if isinstance(action, AddTarget | CreateBlk | SetLimits):
        return f"disk {action.lun.dev} (volume {action.lun.volume.alias}): {error}"
    if isinstance(error, ReconcileError):
        return str(error)
    return f"controller {action.controller}: {error.method}: {error}"


def release(rpc: Rpc, controller: str) -> Release:
    """Takes a controller away with its LUNs, unless a QEMU is connected to it; safe to repeat.

    The target looks and takes it away in one step, so that a QEMU that connects meanwhile either
    keeps all of its LUNs or finds no controller.

    Raises:
        TargetError: the target refuses or does not answer.
    """
    try:
        # The parameter is our target's own: SPDK's, which refuses it, has no such step.
        rpc.call("vhost_delete_controller", ctrlr=controller, force=False)
    except RpcError as error:
        if error.code == BUSY:
            return "busy"
        if error.code == NO_DEVICE:
            return "none"
        if error.code != BAD_PARAMETERS:
            raise
        return _release_by_steps(rpc, controller)
    return "released"


def _release_by_steps(rpc: Rpc, controller: str) -> Release:
    """As `release`, of a target that deletes controllers without LUNs only."""
    state = observe(rpc)
    if controller not in state.controllers:
        return "none"
    if controller in state.connected:
        return "busy"
    for action in clearance(controller, state):
        perform(rpc, action, state)
    return "released"


def released(rpc: Rpc, controller: str, do: Callable[[Rpc, str], Release] = release) -> bool:
    """Takes a controller away once whoever is connected to it has let go; False if nobody does.

    Waits for a few seconds at most. `do` may be `release_domain`, for all of a domain. Raises as
    `release`.
    """
    for _ in range(LEAVE_TRIES):
        if do(rpc, controller) != "busy":
            return True
        time.sleep(LEAVE_S)
    return False


def release_domain(rpc: Rpc, controller: str) -> Release:
    """Takes all controllers of a domain away, as `release`; `controller` is its own.

    "busy" if a QEMU is connected to one of them still.
    """
    state = observe(rpc)
    found = sorted(state.of_domain(controller), reverse=True)
    outcomes = {name: release(rpc, name) for name in found}
    left = {name for name, outcome in outcomes.items() if outcome != "busy"}
    limiting.gone(rpc, state.bdevs_of(left), controller, state)
    if "busy" in outcomes.values():
        return "busy"
    return "released" if "released" in outcomes.values() else "none"
