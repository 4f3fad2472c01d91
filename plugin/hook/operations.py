"""What the hook does for a domain with disks of ours."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import NoReturn

from plugin.hook import pivots
from plugin.hook.config import Config
from plugin.hook.rpc import Connection
from pydataplane.domain import images, missingvolumes, reconcile, records
from pydataplane.domain.errors import PluginError, ReconcileError
from pydataplane.domain.model import Plan, Settings
from pydataplane.domain.observed import observe
from pydataplane.domain.xml import carrier as carriers
from pydataplane.domain.xml import view as views
from pydataplane.domain.xml.view import View
from pydataplane.errors import RpcError, TargetError, TargetTimeout, VolumeError

INCOMING = ("migrate", "restore")
"""Before these, `prepare` follows; what it would make as if new must be there already."""


def attempt(operation: str, xml: bytes, config_path: str | None) -> tuple[str | None, str | None]:
    """Does one operation on one domain.

    Returns:
        The sentence why it failed, None if it did not; and XML for libvirtd to take instead of what
        it gave, None for that.
    """
    try:
        view = views.given(xml)
        if view is None:
            return None, None
        plan = view.plan()
        if plan is not None and plan.protection and operation in (*INCOMING, "prepare"):
            carriers.check_protection(view.domain, Settings(qemu_protects=_protects))
        if operation in INCOMING and (plan is None or not plan.luns):
            return None, _fitting(view, Config(config_path))
        if plan is not None:
            return None, _run(operation, view, plan, Config(config_path))
    except RpcError as error:
        return f"{error.method}: {error}", None
    except (PluginError, TargetError, VolumeError) as error:
        return str(error), None
    return None, None


def _fitting(view: View, config: Config) -> str | None:
    """Returns a guest without a disk of ours with the device that it can have; None: it has it."""
    metadata = view.metadata
    if metadata is None or view.carrier is None:
        return None
    path = f"{config.vhost_dir.rstrip('/')}/{metadata.controller}"
    settings = _settings(config)
    try:
        observe(Connection(config.rpc_socket_of(view.socket or path), config.deadline_s))
    except TargetError as error:
        if view.carrier.protection:
            raise ReconcileError(
                f"{error}; domain '{view.name}' has a virtlun controller with protection"
                " information, without which it cannot go on: start the target"
            ) from error
        return views.replaced(view, None, settings)
    return views.replaced(view, path, settings) or views.refitted(view, settings)


def _settings(config: Config) -> Settings:
    return Settings(reconnect_s=config.reconnect_s, qemu_reconnects=_reconnects)


def _reconnects(path: str | None, arch: str | None) -> bool:
    """pydataplane.emulator.reconnects: for this operation alone, as it reads all of the program."""
    from pydataplane import emulator  # noqa: PLC0415 - a start does without

    return emulator.reconnects(path, arch)


def _protects(path: str | None, arch: str | None) -> bool | None:
    """pydataplane.emulator.protects, as `_reconnects`."""
    from pydataplane import emulator  # noqa: PLC0415 - a start of others does without

    return emulator.protects(path, arch)


def _run(operation: str, view: View, plan: Plan, config: Config) -> str | None:
    """Returns XML for libvirtd to take instead of the domain's, None for that."""
    # Calls end by themselves at the deadline; the alarm is for what might hang elsewhere.
    signal.signal(signal.SIGALRM, _alarm)
    signal.setitimer(signal.ITIMER_REAL, config.deadline_s + 0.5)
    try:
        rpc = Connection(config.rpc_socket_of(plan.socket), config.deadline_s)
        pivoted = pivots.asked(config.journal_dir, plan.controller)
        if operation == "release":
            # One that somebody stays connected to is left: the hook runs also where a start has
            # failed, and whoever is connected then is not of that start. What the target has
            # recorded of a pivot goes with the controller, so the gateway looks at it first.
            if pivoted is None:
                reconcile.released(rpc, plan.controller, reconcile.release_domain)
            records.take_expected(config.state_dir, plan.controller)
        elif operation == "prepare" and pivoted is not None:
            raise ReconcileError(
                f"nobody knows yet which volume disk {pivoted} went on with: start the domain"
                " through the gateway, which finds out or says what it lacks"
                f" ({config.journal_dir} has it)"
            )
        else:
            _bring_up(rpc, plan, operation, config)
        return views.refitted(view, _settings(config)) if operation in INCOMING else None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _bring_up(rpc: Connection, plan: Plan, operation: str, config: Config) -> None:
    """Does what comes before a start, and after libvirtd's own restart.

    Raises:
        PluginError, TargetError, VolumeError: it cannot be done; the sentence says why.
    """
    running = operation == "reconnect"
    incoming = operation == "migrate" or (
        operation == "prepare" and records.take_expected(config.state_dir, plan.controller)
    )
    plan = replace(plan, incoming=incoming)
    failed = images.open_without_secrets(rpc, plan, config.allowed, running)
    if not running:
        for error in failed.values():
            raise error
    # A guest that runs has its other disks, whatever becomes of these.
    plan = replace(plan, luns=tuple(lun for lun in plan.luns if lun not in failed))
    known = records.read(config.state_dir, plan.controller)
    mib = config.create_missing_mib if operation == "prepare" else 0
    there = missingvolumes.make(rpc, missingvolumes.find(rpc, plan, known), mib)
    uuids = {lun.volume.alias: lun.uuid for lun in there.luns if lun.uuid is not None}
    new = [lun.volume.alias for lun in plan.luns if lun.uuid is None]
    recorded = {alias: uuids[alias] for alias in new}
    if recorded != known:
        records.write(config.state_dir, plan.controller, recorded)
    if operation == "migrate":
        records.expect(config.state_dir, plan.controller)
    if operation in INCOMING:
        return
    reconcile.ensure(rpc, there, whole=operation == "prepare")
    lacks = next((path for path in plan.sockets if not os.path.exists(path)), None)  # noqa: PTH110
    if lacks is not None:
        raise ReconcileError(
            f"the virtlun target made no socket {lacks}; vhost_dir in virtlun.toml and the"
            " target's own folder differ: make them the same and define the domain again"
        )
    for error in failed.values():
        raise error


def _alarm(*_: object) -> NoReturn:
    raise TargetTimeout("the hook was stopped at its deadline (hook.deadline_s of virtlun.toml)")
