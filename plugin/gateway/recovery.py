"""Recovers changes that were interrupted: each is completed or rolled back, never left half done.

An attach whose LUN the target has is completed, and so is a detach that the running domain's
metadata knows of; all else is rolled back. Either way the LUNs then follow the metadata
(plugin.gateway.reconcile).

All is done under the gateway's own identity: the client that began may be gone, or have lost its
rights, and what is restored is what was there before it.
"""

from __future__ import annotations

from contextlib import suppress

import structlog

from plugin.gateway.domains import is_running
from plugin.gateway.errors import Code, GatewayError, UpstreamError
from plugin.gateway.journal import Entry, StoredEntry
from plugin.gateway.messages import Domain
from plugin.gateway.reconcile import reconcile_domain
from plugin.gateway.services import Services
from plugin.gateway.upstream import AFFECT_CONFIG, AFFECT_LIVE, XML_INACTIVE, Upstream
from pydataplane.domain import translate
from pydataplane.domain.errors import TranslateError

_log = structlog.get_logger(__name__)


async def recover_all(services: Services) -> None:
    """Recovers what an earlier gateway left, and what we could not roll back at once."""
    for stored in [*services.journal.pending, *services.journal.orphans()]:
        async with services.domain_lock(stored.entry.dom_uuid):
            await recover(services, stored)


async def recover(services: Services, stored: StoredEntry, *, roll_back: bool = False) -> None:
    """Completes one change or rolls it back, always with `roll_back`.

    The caller holds the domain's lock. What cannot be done now (libvirtd is away) is logged and
    stays pending.
    """
    entry, journal = stored.entry, services.journal
    log = _log.bind(operation=entry.operation, domain=entry.name, dev=entry.dev)
    try:
        completed = await _recover(services, entry, roll_back=roll_back)
    except (GatewayError, TranslateError) as error:
        if stored not in journal.pending:
            journal.pending.append(stored)
            log.error("an interrupted change cannot be recovered yet", error=str(error))
        return
    if stored in journal.pending:
        journal.pending.remove(stored)
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
    if changed and not roll_back and entry.operation != "update":
        if entry.operation == "detach":
            return True
        with suppress(GatewayError):  # without a target it is not there
            if await services.target.has_lun(entry.controller, entry.target, entry.bdev):
                return True
    if changed:
        await _restore(admin, dom, entry.live, AFFECT_LIVE)
        with suppress(GatewayError):  # without a target: the reconcile loop does it later
            await reconcile_domain(services, dom)
    if entry.to_config and await admin.persistent(dom):
        config = await admin.xml(dom, XML_INACTIVE)
        if _changed(entry, config):
            if entry.config_xml is not None:
                await services.redefine(admin, entry.dom_uuid, entry.config_xml)
            else:
                await _restore(admin, dom, entry.config, AFFECT_CONFIG)
    return False


def _changed(entry: Entry, xml: str) -> bool:
    """Whether libvirtd's XML of one side may be as after the change."""
    if entry.operation == "update":
        return True
    plan = translate.plan(xml)
    has = plan is not None and any(lun.dev == entry.dev for lun in plan.luns)
    return has == (entry.operation == "attach")


async def _restore(admin: Upstream, dom: Domain, before: str | None, flags: int) -> None:
    await admin.set_metadata(dom, translate.settable(before) if before else None, flags)
