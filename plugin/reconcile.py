"""Makes the target match the domains: state in, actions out (pure), and a thin shell that acts.

The gateway uses it for one domain that starts or changes, and for all when it starts. The hook does
the same for one domain with a program of its own; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from plugin.hook import script
from plugin.translate import CONTROLLER_PREFIX, LunPlan, Plan
from pydataplane.client import Client
from pydataplane.errors import RpcError, TargetError


@dataclass(frozen=True, slots=True)
class CreateController:
    """Make an empty controller."""

    controller: str


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


Action = CreateController | AddTarget | RemoveTarget | DeleteController


@dataclass(frozen=True, slots=True)
class Shown:
    """A LUN as the target has it; what a target that is SPDK's own does not tell is None."""

    bdev: str
    serial: str | None = None
    read_only: bool | None = None
    block_size: int | None = None


@dataclass(frozen=True, slots=True)
class State:
    """What the target has: controllers to target numbers to LUNs, and what bdevs are called.

    `names` maps each alias (LVSTORE/LVOL) and each name to the bdev's name. `connected` are the
    controllers that a QEMU is connected to now, or for which the target does not tell.
    """

    controllers: Mapping[str, Mapping[int, Shown]]
    names: Mapping[str, str]
    connected: frozenset[str] = frozenset()
    block_sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of a bdev's own blocks, by its name."""

    @classmethod
    def of(
        cls, controllers: Iterable[Mapping[str, Any]], bdevs: Iterable[Mapping[str, Any]]
    ) -> State:
        """Reads the answers of vhost_get_controllers and bdev_get_bdevs."""
        names: dict[str, str] = {}
        block_sizes: dict[str, int] = {}
        for bdev in bdevs:
            block_sizes[bdev["name"]] = bdev.get("block_size", script.BLOCK_BYTES)
            for name in (bdev["name"], *bdev.get("aliases", ())):
                names[name] = bdev["name"]
        known = list(controllers)
        connected = frozenset(c["ctrlr"] for c in known if c.get("sessions", True))
        return cls({c["ctrlr"]: _luns(c) for c in known}, names, connected, block_sizes)

    def with_bdev(self, alias: str, name: str, block_size: int) -> State:
        """Returns the state with one more name of a bdev, and the size of its blocks."""
        return replace(
            self,
            names={**self.names, alias: name},
            block_sizes={**self.block_sizes, name: block_size},
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """An action that did not work, and why."""

    action: Action
    why: str


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
        )
    return result


def is_right(lun: LunPlan, shown: Shown | None, state: State) -> bool:
    """Whether the target shows the LUN as it is wanted, as far as it tells.

    Without a serial of the client's the target takes the volume's UUID, which is the bdev's name.
    One that is read-only need not be so by our doing: the volume itself may be. Its blocks are
    never smaller than the volume's.
    """
    bdev = bdev_of(lun, state)
    if shown is None or shown.bdev != bdev:
        return False
    writable = shown.read_only is False and lun.read_only
    blocks = max(lun.block_size or 0, state.block_sizes.get(bdev, script.BLOCK_BYTES))
    return (
        shown.serial in (None, lun.serial or bdev)
        and not writable
        and shown.block_size in (None, blocks)
    )


def actions(desired: Sequence[Plan], state: State, *, complete: bool) -> list[Action]:
    """Returns what to do, in order, so that each desired controller has exactly its LUNs.

    A LUN that is right stays untouched, so a running guest's other disks notice nothing. All
    removals come first: a volume may move from one controller to another. `complete` says that
    `desired` is all that runs on this host: controllers of domains beyond it are then deleted.
    """
    removals: list[Action] = []
    additions: list[Action] = []
    for plan in desired:
        present = state.controllers.get(plan.controller)
        if present is None:
            additions.append(CreateController(plan.controller))
            present = {}
        right = {lun.target for lun in plan.luns if is_right(lun, present.get(lun.target), state)}
        removals += [
            RemoveTarget(plan.controller, number) for number in sorted(present.keys() - right)
        ]
        additions += [
            AddTarget(plan.controller, lun) for lun in plan.luns if lun.target not in right
        ]
    if complete:
        known = {plan.controller for plan in desired}
        for name in sorted(state.controllers):
            if name.startswith(CONTROLLER_PREFIX) and name not in known:
                removals += clearance(name, state)
    return removals + additions


def clearance(controller: str, state: State) -> list[Action]:
    """Returns what takes a controller away with its LUNs; nothing if there is none."""
    present = state.controllers.get(controller)
    if present is None:
        return []
    removals = [RemoveTarget(controller, number) for number in sorted(present)]
    return [*removals, DeleteController(controller)]


def bdev_of(lun: LunPlan, state: State) -> str:
    """Returns the name of a disk's bdev, or what to ask for if the target has none.

    Where the UUID is known it decides: another volume under the old name is not this disk's.
    """
    return state.names.get(lun.bdev_name, lun.bdev_name)


def observe(client: Client, *, bdevs: bool = True) -> State:
    """Asks the target for its state; without `bdevs` its `names` are empty.

    Raises:
        TargetError: it does not answer.
    """
    controllers = client.call("vhost_get_controllers")
    return State.of(controllers, client.call("bdev_get_bdevs") if bdevs else ())


def execute(client: Client, todo: Iterable[Action], state: State) -> list[Failure]:
    """Does the actions in order; one that the target refuses does not stop the others.

    Raises:
        TargetUnavailable, TargetTimeout: the target does not answer.
    """
    failures = []
    for action in todo:
        try:
            perform(client, action, state)
        except RpcError as error:
            failures.append(Failure(action, str(error)))
    return failures


def perform(client: Client, action: Action, state: State) -> None:
    """Does one action; taking away what somebody else took away meanwhile is no error.

    Raises:
        TargetError: the target refuses or does not answer.
    """
    match action:
        case CreateController(controller):
            client.call("vhost_create_scsi_controller", ctrlr=controller)
        case DeleteController(controller):
            try:
                client.call("vhost_delete_controller", ctrlr=controller)
            except RpcError:
                if controller in observe(client, bdevs=False).controllers:
                    raise
        case RemoveTarget(controller, number):
            try:
                client.call(
                    "vhost_scsi_controller_remove_target", ctrlr=controller, scsi_target_num=number
                )
            except RpcError:
                if number in observe(client, bdevs=False).controllers.get(controller, {}):
                    raise
        case AddTarget(controller, lun):
            # A target that is SPDK's own is not sent the extensions that it does not know.
            bdev = bdev_of(lun, state)
            own_blocks = state.block_sizes.get(bdev, script.BLOCK_BYTES)
            client.call(
                "vhost_scsi_controller_add_target",
                ctrlr=controller,
                scsi_target_num=lun.target,
                bdev_name=bdev,
                serial=lun.serial,
                read_only=True if lun.read_only else None,
                shareable=True if lun.shareable else None,
                block_size=lun.block_size if lun.block_size != own_blocks else None,
            )


def reconcile(client: Client, desired: Sequence[Plan], *, complete: bool) -> list[Failure]:
    """Observes, decides and acts; returns what did not work.

    Raises:
        TargetUnavailable, TargetTimeout: the target does not answer.
    """
    state = observe(client)
    return execute(client, actions(desired, state, complete=complete), state)


__all__ = [
    "Action",
    "AddTarget",
    "CreateController",
    "DeleteController",
    "Failure",
    "RemoveTarget",
    "Shown",
    "State",
    "TargetError",
    "actions",
    "bdev_of",
    "clearance",
    "execute",
    "is_right",
    "observe",
    "perform",
    "reconcile",
]
