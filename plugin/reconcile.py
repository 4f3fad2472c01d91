"""Makes the target match the domains: state in, actions out (pure), and a thin shell that acts.

Callers: the gateway when it starts and when the target came back, `virtlun doctor` to show what it
would do. The hook does the same for one domain with a program of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plugin.translate import LunPlan, Plan
from pydataplane.client import Client
from pydataplane.errors import RpcError, TargetError

OWN_PREFIX = "vm-"
"""Controllers with this prefix are of domains; others are never touched."""


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
class State:
    """What the target has: controllers to target numbers to bdev names, and what bdevs are called.

    `names` maps each alias (LVSTORE/LVOL) and each name to the bdev's name.
    """

    controllers: Mapping[str, Mapping[int, str]]
    names: Mapping[str, str]

    @classmethod
    def of(
        cls, controllers: Iterable[Mapping[str, Any]], bdevs: Iterable[Mapping[str, Any]]
    ) -> State:
        """Reads the answers of vhost_get_controllers and bdev_get_bdevs."""
        names: dict[str, str] = {}
        for bdev in bdevs:
            for name in (bdev["name"], *bdev.get("aliases", ())):
                names[name] = bdev["name"]
        return cls({c["ctrlr"]: _luns(c) for c in controllers}, names)


@dataclass(frozen=True, slots=True)
class Failure:
    """An action that did not work, and why."""

    action: Action
    why: str


def _luns(controller: Mapping[str, Any]) -> dict[int, str]:
    result = {}
    for target in controller.get("backend_specific", {}).get("scsi", ()):
        luns = target.get("luns", ())
        result[int(target["scsi_dev_num"])] = str(luns[0]["bdev_name"]) if luns else ""
    return result


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
        wanted = {lun.target: bdev_of(lun, state) for lun in plan.luns}
        removals += [
            RemoveTarget(plan.controller, number)
            for number, bdev in sorted(present.items())
            if wanted.get(number) != bdev
        ]
        additions += [
            AddTarget(plan.controller, lun)
            for lun in plan.luns
            if present.get(lun.target) != wanted[lun.target]
        ]
    if complete:
        known = {plan.controller for plan in desired}
        for name, present in sorted(state.controllers.items()):
            if name.startswith(OWN_PREFIX) and name not in known:
                removals += [RemoveTarget(name, number) for number in sorted(present)]
                removals.append(DeleteController(name))
    return removals + additions


def bdev_of(lun: LunPlan, state: State) -> str:
    """Returns the name of a disk's bdev: by UUID, else by LVSTORE/LVOL, else what to ask for."""
    for name in (lun.uuid, lun.volume.alias):
        if name is not None and name in state.names:
            return state.names[name]
    return lun.volume.alias


def observe(client: Client) -> State:
    """Asks the target for its state.

    Raises:
        TargetError: it does not answer.
    """
    return State.of(client.call("vhost_get_controllers"), client.call("bdev_get_bdevs"))


def execute(client: Client, todo: Iterable[Action], state: State) -> list[Failure]:
    """Does the actions in order; one that the target refuses does not stop the others.

    Raises:
        TargetUnavailable, TargetTimeout: the target does not answer.
    """
    failures = []
    for action in todo:
        try:
            _execute(client, action, state)
        except RpcError as error:
            failures.append(Failure(action, str(error)))
    return failures


def _execute(client: Client, action: Action, state: State) -> None:
    match action:
        case CreateController(controller):
            client.call("vhost_create_scsi_controller", ctrlr=controller)
        case DeleteController(controller):
            client.call("vhost_delete_controller", ctrlr=controller)
        case RemoveTarget(controller, number):
            client.call(
                "vhost_scsi_controller_remove_target", ctrlr=controller, scsi_target_num=number
            )
        case AddTarget(controller, lun):
            # A target that is SPDK's own is not sent the extensions that it does not know.
            client.call(
                "vhost_scsi_controller_add_target",
                ctrlr=controller,
                scsi_target_num=lun.target,
                bdev_name=bdev_of(lun, state),
                serial=lun.serial,
                read_only=True if lun.read_only else None,
                shareable=True if lun.shareable else None,
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
    "State",
    "TargetError",
    "actions",
    "bdev_of",
    "execute",
    "observe",
    "reconcile",
]
