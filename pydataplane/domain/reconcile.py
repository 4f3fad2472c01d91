"""Makes the target match a domain: state in, actions out (pure), and a thin shell that acts.

The gateway uses it for a domain that starts or changes and, one by one, for all of them; the hook
for one that starts. From a domain that runs it takes no LUN, whatever its metadata says: only a
detach does that, and the domain's own end.

Standard library only: the hook is made of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from pydataplane.domain.errors import LunKept, ReconcileError
from pydataplane.domain.model import ON_ERROR, OWN, Characteristics, LunPlan, Plan
from pydataplane.errors import BAD_PARAMETERS, BUSY, METHOD_NOT_FOUND, NO_DEVICE, RpcError
from pydataplane.methods import Rpc

Release = Literal["released", "busy", "none"]
"""What became of a controller that was to go."""

LEAVE_TRIES = 20
LEAVE_S = 0.1
"""How often, and how many seconds apart, whoever is connected to a controller that is to be made
anew is given to let go."""

BLOCK_BYTES = 512
"""Logical block of a volume of which nothing else is known."""


@dataclass(frozen=True, slots=True)
class CreateController:
    """Make an empty controller."""

    controller: str


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
    CreateController | SetOwner | AddTarget | RemoveTarget | DeleteController | ReleaseController
)


@dataclass(frozen=True, slots=True)
class Shown:
    """A LUN as the target has it; what a target that is SPDK's own does not tell is None."""

    bdev: str
    serial: str | None = None
    read_only: bool | None = None
    block_size: int | None = None
    characteristics: Characteristics | None = None


@dataclass(frozen=True, slots=True)
class Bdev:
    """A volume's bdev."""

    name: str
    """Its UUID."""
    block_size: int
    """Bytes of its own blocks."""


@dataclass(frozen=True, slots=True)
class State:
    """What the target has: controllers to target numbers to LUNs, and the bdevs asked for.

    `connected` are the controllers that a QEMU is connected to now, or for which the target does
    not tell.
    """

    controllers: Mapping[str, Mapping[int, Shown]]
    bdevs: Mapping[str, Bdev] = field(default_factory=dict)
    """By the name (UUID or LVSTORE/LVOL) that was asked for."""
    connected: frozenset[str] = frozenset()

    def with_bdev(self, asked: str, bdev: Bdev) -> State:
        """Returns the state with one more bdev."""
        return replace(self, bdevs={**self.bdevs, asked: bdev})


def _luns(controller: Mapping[str, Any]) -> dict[int, Shown]:
    result = {}
    for target in controller.get("backend_specific", {}).get("scsi", ()):
        luns = target.get("luns", ())
        lun = luns[0] if luns else {}
        result[int(target["scsi_dev_num"])] = Shown(
            str(lun.get("bdev_name", "")),
            lun.get("serial"),
            lun.get("read_only"),
            lun.get("block_size"),
            _characteristics(lun),
        )
    return result


def _characteristics(lun: Mapping[str, Any]) -> Characteristics | None:
    """Reads what a LUN says of itself, None where the target does not tell."""
    if "write_cache" not in lun:
        return None
    return Characteristics(**{f.name: lun[f.name] for f in fields(Characteristics)})


def bdev_of(lun: LunPlan, state: State) -> Bdev:
    """Returns a disk's bdev, or what to ask for if the target has none.

    Where the UUID is known it decides: another volume under the old name is not this disk's.
    """
    return state.bdevs.get(lun.bdev_name) or Bdev(lun.bdev_name, BLOCK_BYTES)


def is_right(lun: LunPlan, shown: Shown | None, state: State) -> bool:
    """Whether the target shows the LUN as it is wanted, as far as it tells.

    Without a serial of the client's the target takes the volume's UUID, which is the bdev's name.
    One that is read-only need not be so by our doing: the volume itself may be. Its blocks are
    never smaller than the volume's.
    """
    bdev = bdev_of(lun, state)
    if shown is None or shown.bdev != bdev.name:
        return False
    writable = shown.read_only is False and lun.read_only
    return (
        shown.serial in (None, lun.serial or bdev.name)
        and not writable
        and shown.block_size in (None, max(lun.block_size or 0, bdev.block_size))
        and shown.characteristics in (None, lun.characteristics)
    )


def _right(plan: Plan, state: State) -> set[int]:
    """Returns the targets that are shown as the plan says."""
    shown = state.controllers.get(plan.controller, {})
    return {lun.target for lun in plan.luns if is_right(lun, shown.get(lun.target), state)}


def actions(plan: Plan, state: State, *, whole: bool) -> list[Action]:
    """Returns what to do, in order, so that the controller exists with the plan's LUNs.

    A LUN that is right stays untouched, so a running guest's other disks notice nothing. `whole`:
    the domain does not run and is about to be started, so that a controller that shows anything
    else is made anew, and whoever is connected is a stranger, and disconnected. Otherwise nothing
    is taken from it: see `unasked`.
    """
    name = plan.controller
    shown = state.controllers.get(name)
    owner: list[Action] = [SetOwner(name, plan.uid)] if whole else []
    if shown is None:
        new: list[Action] = [CreateController(name)]
        return [*new, *owner, *(AddTarget(name, lun) for lun in plan.luns)]
    right = _right(plan, state)
    if whole and shown.keys() - right:
        luns = [AddTarget(name, lun) for lun in plan.luns]
        return [*owner, ReleaseController(name), CreateController(name), *owner, *luns]
    missing = [lun for lun in plan.luns if lun.target not in shown]
    return [*owner, *(AddTarget(name, lun) for lun in missing)]


def unasked(plan: Plan, state: State) -> dict[int, Shown]:
    """Returns the LUNs that a running domain has otherwise than its metadata says, by target.

    They stay as they are: a guest may be writing to them, and nobody has asked for a detach.
    """
    shown = state.controllers.get(plan.controller, {})
    right = _right(plan, state)
    return {number: lun for number, lun in sorted(shown.items()) if number not in right}


def clearance(controller: str, state: State) -> list[Action]:
    """Returns what takes a controller away with its LUNs; nothing if there is none."""
    present = state.controllers.get(controller)
    if present is None:
        return []
    removals = [RemoveTarget(controller, number) for number in sorted(present)]
    return [*removals, DeleteController(controller)]


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
    return Bdev(str(found["name"]), int(found.get("block_size", BLOCK_BYTES)))


def observe(rpc: Rpc, luns: Iterable[LunPlan] = ()) -> State:
    """Asks the target for its controllers, and for the bdevs of these disks.

    Raises:
        TargetError: it does not answer.
    """
    controllers = rpc.call("vhost_get_controllers")
    names = {lun.bdev_name for lun in luns}
    bdevs = {name: bdev for name in names if (bdev := look_up(rpc, name)) is not None}
    connected = frozenset(c["ctrlr"] for c in controllers if c.get("sessions", True))
    return State({c["ctrlr"]: _luns(c) for c in controllers}, bdevs, connected)


def perform(rpc: Rpc, action: Action, state: State) -> None:
    """Does one action; taking away what somebody else took away meanwhile is no error.

    Raises:
        TargetError: the target refuses or does not answer.
    """
    match action:
        case CreateController(controller):
            rpc.call("vhost_create_scsi_controller", ctrlr=controller)
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
        case AddTarget(controller, lun):
            _add_target(rpc, controller, lun, bdev_of(lun, state))


def _set_owner(rpc: Rpc, controller: str, uid: int | None) -> None:
    try:
        rpc.call("virtlun_controller_set_owner", ctrlr=controller, uid=uid, fresh=True)
    except RpcError as error:
        if error.code != METHOD_NOT_FOUND:  # SPDK's own has none
            raise


def _add_target(rpc: Rpc, controller: str, lun: LunPlan, bdev: Bdev) -> None:
    """Adds a LUN; a target that is SPDK's own is not sent the extensions that it does not know."""

    def add(policy: Mapping[str, Any]) -> None:
        rpc.call(
            "vhost_scsi_controller_add_target",
            ctrlr=controller,
            scsi_target_num=lun.target,
            bdev_name=bdev.name,
            serial=lun.serial,
            read_only=True if lun.read_only else None,
            shareable=True if lun.shareable else None,
            block_size=lun.block_size if lun.block_size != bdev.block_size else None,
            **_chosen(lun.characteristics),
            **policy,
        )

    policy = _policy(lun)
    try:
        add(policy)
    except RpcError as error:
        # Nobody chose it: an older target, or SPDK's own, tells the guest of all errors.
        if error.code != BAD_PARAMETERS or not policy or lun.error_policy != ON_ERROR:
            raise
        add({})


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
    """Makes the controller exist with the plan's LUNs; safe to repeat.

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
    made = False
    failures: list[str] = []
    for action in actions(plan, state, whole=whole):
        try:
            perform(rpc, action, state)
        except (ReconcileError, RpcError) as error:
            failures.append(_sentence(action, error))
            if whole:
                break
        else:
            made = made or isinstance(action, CreateController)
            if isinstance(action, AddTarget):
                added.append(action.lun)
    if failures and whole:
        with suppress(RpcError):
            if made:
                release(rpc, plan.controller)
            else:
                for lun in added:
                    perform(rpc, RemoveTarget(plan.controller, lun.target), state)
    if failures:
        raise ReconcileError(failures[0])
    kept = None if whole else next(iter(unasked(plan, state).items()), None)
    if kept is not None:
        raise LunKept(_kept(plan, *kept))
    return added


def _kept(plan: Plan, number: int, shown: Shown) -> str:
    """Says that a running domain keeps a LUN that its metadata does not have so."""
    lun = next((lun for lun in plan.luns if lun.target == number), None)
    other = f"says disk {lun.dev} otherwise" if lun is not None else "has no such disk"
    return (
        f"target {number} of controller {plan.controller} is kept, with bdev {shown.bdev},"
        f" though the metadata of the running domain {other}: only a detach takes a disk from a"
        " running guest; a stop and start of the domain puts it right"
    )


def _sentence(action: Action, error: ReconcileError | RpcError) -> str:
    if isinstance(action, AddTarget):
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


def released(rpc: Rpc, controller: str) -> bool:
    """Takes a controller away once whoever is connected to it has let go; False if nobody does.

    Waits for a few seconds at most. Raises as `release`.
    """
    for _ in range(LEAVE_TRIES):
        if release(rpc, controller) != "busy":
            return True
        time.sleep(LEAVE_S)
    return False
