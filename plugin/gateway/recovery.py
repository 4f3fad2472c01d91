"""Recovers changes that were interrupted: each is completed or rolled back, never left half done.

An attach whose LUN the target has is completed, and so is a detach that the running domain's
metadata knows of; all else is rolled back. Either way the change's own LUN then follows the
metadata; plugin.gateway.reconcile takes none from a running domain.

All is done under the gateway's own identity: the client that began may be gone, or have lost its
rights, and what is restored is what was there before it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import structlog

from plugin.gateway import copies, snapshotsteps
from plugin.gateway.domains import is_running
from plugin.gateway.errors import Code, GatewayError, NoAnswer, Refused, UpstreamError
from plugin.gateway.freezing import NotThawed
from plugin.gateway.journal import CopyEntry, Entry, SnapshotEntry, StoredEntry
from plugin.gateway.messages import Domain
from plugin.gateway.reconcile import reconcile_domain
from plugin.gateway.services import Services
from plugin.gateway.upstream import AFFECT_CONFIG, AFFECT_LIVE, XML_INACTIVE, Upstream
from pydataplane.domain import translate
from pydataplane.domain.errors import TranslateError
from pydataplane.domain.limits import NONE, limits_of

_log = structlog.get_logger(__name__)


async def recover_all(services: Services) -> None:
    """Recovers what an earlier gateway left, and what we could not roll back at once.

    Those of one domain in their order, those of several beside each other, so that one whose target
    does not answer keeps no other waiting.
    """
    of: dict[bytes, list[StoredEntry]] = {}
    for stored in [*services.journal.pending, *services.journal.orphans()]:
        of.setdefault(stored.entry.dom_uuid, []).append(stored)

    async def recover_domain(uuid: bytes, entries: list[StoredEntry]) -> None:
        for stored in entries:
            async with services.domain_lock(uuid):
                await recover(services, stored)

    async with asyncio.TaskGroup() as group:
        for uuid, entries in of.items():
            group.create_task(recover_domain(uuid, entries))


async def recover(services: Services, stored: StoredEntry, *, roll_back: bool = False) -> None:
    """Completes one change or rolls it back, always with `roll_back`.

    The caller holds the domain's lock. What cannot be done now (libvirtd is away) is logged and
    stays pending.
    """
    entry, journal = stored.entry, services.journal
    log = _log.bind(operation=entry.operation, domain=entry.name, dev=entry.dev)
    again = stored in journal.pending
    if again:
        journal.pending.remove(stored)
    try:
        if isinstance(entry, CopyEntry):
            await copies.recover(services, stored)
            return
        if isinstance(entry, SnapshotEntry):
            undefining = entry.operation == "undefine"
            finish = snapshotsteps.undefined if undefining else snapshotsteps.finished
            completed = await finish(services, entry)
        else:
            completed = entry.operation == "remove" or await _recover(
                services, entry, roll_back=roll_back
            )
        if isinstance(entry, Entry) and entry.operation not in ("update", "tune"):
            with suppress(Refused):
                # If that takes long, a later change of this disk is not to be taken for this one.
                stored = journal.to_remove(stored)
            await _remove_lun(services, entry)
    except (GatewayError, TranslateError) as error:
        if isinstance(error, NotThawed) and isinstance(entry, SnapshotEntry):
            with suppress(Refused):  # then all of it is done again
                # Nothing else is left to do.
                stored = journal.replace(stored, replace(entry, operation="thaw", held=()))
        journal.pending.append(stored)
        if not again:
            log.error("an interrupted change cannot be recovered yet", error=str(error))
        return
    journal.remove(stored)
    outcome = "completed" if completed else "rolled back"
    log.info("an interrupted change is recovered", outcome=outcome)


async def _recover(services: Services, entry: Entry, *, roll_back: bool) -> bool:
    """Returns whether the change was completed, not rolled back."""
    admin = await services.admin()
    try:
        dom = await admin.lookup(entry.dom_uuid)
        xml = await admin.xml(dom, 0)
    except UpstreamError as error:
        if error.code == Code.NO_DOMAIN:
            return False  # it was transient, and is gone with all that was changed
        raise
    changed = is_running(xml) and _changed(entry, xml)
    if changed and not roll_back and entry.operation not in ("update", "tune"):
        if entry.operation == "detach":
            return True
        with suppress(GatewayError):  # without a target it is not there
            if await services.target.has_disk(entry.address, entry.bdev):
                return True
    if changed:
        await _restore(admin, dom, entry.live, AFFECT_LIVE)
        if entry.limits is not None:
            await _limit_again(services, entry, entry.limits, await admin.xml(dom, 0))
        with suppress(GatewayError):  # without a target: the reconcile loop does it later
            await reconcile_domain(services, dom)
    if entry.to_config and await admin.persistent(dom):
        config = await admin.xml(dom, XML_INACTIVE)
        if _changed(entry, config):
            if entry.config_xml is not None:
                await services.redefine(admin, entry.dom_uuid, entry.config_xml)
            else:
                await _restore(admin, dom, entry.config, AFFECT_CONFIG)
    if roll_back and not changed and entry.front == "blk" and is_running(xml):
        with suppress(GatewayError):  # of a device that libvirtd has not our metadata counts not
            await _restore(admin, dom, entry.live, AFFECT_LIVE)
    return False


async def _limit_again(services: Services, entry: Entry, limits: dict[str, int], xml: str) -> None:
    """Gives the disk of a change of limits those that it had; they are its domain's if it says so.

    Raises:
        NoAnswer: of its target.
    """
    plan = translate.plan(xml)
    luns = [lun for lun in plan.luns if lun.dev == entry.dev] if plan is not None else []
    owner = entry.controller if any(lun.limits != NONE for lun in luns) else None
    try:
        await services.target.tune(entry.bdev, owner, limits_of(limits))
    except NoAnswer:
        raise
    except Refused as error:
        _log.warning("limits are not put back", domain=entry.name, dev=entry.dev, error=str(error))


async def _remove_lun(services: Services, entry: Entry) -> None:
    """Takes the LUN of an attach or detach away that the running domain has not in its metadata.

    Another volume under its number is none of this change's.
    """
    admin = await services.admin()
    try:
        xml = await admin.xml(await admin.lookup(entry.dom_uuid), 0)
    except UpstreamError as error:
        if error.code == Code.NO_DOMAIN:
            return
        raise
    plan = translate.plan(xml)
    taken = plan is not None and any(lun.target == entry.target for lun in plan.luns)
    if taken or not is_running(xml):
        return
    target, bdev = services.target, entry.bdev
    if "/" in bdev:
        bdev = (await target.uuids([bdev])).get(bdev, bdev)
    if await target.has_disk(entry.address, bdev):
        await target.remove(entry.address, bdev)
    else:
        await target.unlimit(bdev, entry.controller)


def _changed(entry: Entry, xml: str) -> bool:
    """Whether libvirtd's XML of one side may be as after the change."""
    if entry.operation in ("update", "tune"):
        return True
    plan = translate.plan(xml)
    has = plan is not None and any(lun.dev == entry.dev for lun in plan.luns)
    return has == (entry.operation == "attach")


async def _restore(admin: Upstream, dom: Domain, before: str | None, flags: int) -> None:
    await admin.set_metadata(dom, translate.settable(before) if before else None, flags)
