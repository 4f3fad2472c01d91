"""What the hook does for a domain with disks of ours."""

from __future__ import annotations

import os
import signal
import time
from typing import NoReturn

from plugin.hook.config import Config
from plugin.hook.rpc import Connection
from pydataplane.domain import missing, reconcile, records
from pydataplane.domain.errors import PluginError, ReconcileError
from pydataplane.domain.model import Plan
from pydataplane.domain.xml.view import required_plan
from pydataplane.errors import RpcError, TargetError, TargetTimeout, VolumeError

LEAVE_TRIES = 20
LEAVE_S = 0.1
"""How often, and how many seconds apart, a QEMU that has ended is given to let go."""

INCOMING = ("migrate", "restore")
"""Before these, `prepare` follows; what it would make as if new must be there already."""


def attempt(operation: str, xml: bytes, config_path: str | None) -> str | None:
    """Does one operation on one domain; returns the sentence why it failed, None if it did not."""
    try:
        plan = required_plan(xml)
        if plan is not None:
            _run(operation, plan, Config(config_path))
    except RpcError as error:
        return f"{error.method}: {error}"
    except (PluginError, TargetError, VolumeError) as error:
        return str(error)
    return None


def _run(operation: str, plan: Plan, config: Config) -> None:
    # Calls end by themselves at the deadline; the alarm is for what might hang elsewhere.
    signal.signal(signal.SIGALRM, _alarm)
    signal.setitimer(signal.ITIMER_REAL, config.deadline_s + 0.5)
    try:
        if operation in INCOMING and not plan.luns:
            return
        rpc = Connection(config.rpc_socket_of(plan.socket), config.deadline_s)
        if operation == "release":
            _release(rpc, plan.controller)
        else:
            _bring_up(rpc, plan, operation, config)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _release(rpc: Connection, controller: str) -> None:
    """Takes a controller away once its QEMU, which has ended, has let go of it.

    One that somebody stays connected to is left: the hook runs also where a start has failed, and
    whoever is connected then is not of that start.

    Raises:
        TargetError: the target refuses or does not answer.
    """
    for _ in range(LEAVE_TRIES):
        if reconcile.release(rpc, controller) != "busy":
            return
        time.sleep(LEAVE_S)


def _bring_up(rpc: Connection, plan: Plan, operation: str, config: Config) -> None:
    """Does what comes before a start, and after libvirtd's own restart.

    Raises:
        PluginError, TargetError, VolumeError: it cannot be done; the sentence says why.
    """
    known = records.read(config.state_dir, plan.controller)
    mib = config.create_missing_mib if operation == "prepare" else 0
    there = missing.make(rpc, missing.find(rpc, plan, known), mib)
    uuids = {lun.volume.alias: lun.uuid for lun in there.luns if lun.uuid is not None}
    new = [lun.volume.alias for lun in plan.luns if lun.uuid is None]
    recorded = {alias: uuids[alias] for alias in new}
    if recorded != known:
        records.write(config.state_dir, plan.controller, recorded)
    if operation in INCOMING:
        return
    starts = operation == "prepare"
    reconcile.ensure(rpc, there, whole=starts, starts=starts)
    if not os.path.exists(plan.socket):  # noqa: PTH110 - pathlib is slow to import
        raise ReconcileError(
            f"the virtlun target made no socket {plan.socket}; vhost_dir in virtlun.toml and the"
            " target's own folder differ: make them the same and define the domain again"
        )


def _alarm(*_: object) -> NoReturn:
    raise TargetTimeout("the hook was stopped at its deadline (hook.deadline_s of virtlun.toml)")
