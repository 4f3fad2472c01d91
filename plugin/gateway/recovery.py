"""Settles changes that were cut off: each is finished, or taken back, never left half done.

An attach whose LUN the target has is finished, and so is a detach that the running domain's
metadata knows of; all else is taken back. Either way the LUNs then follow the metadata
(plugin.gateway.reconcile).

All is done under the gateway's own identity: the client that began may be gone, or have lost its
rights, and what is restored is what was there before it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from plugin import translate
from plugin.errors import TranslateError
from plugin.gateway.domains import is_running, without_prefixes
from plugin.gateway.errors import Code, GatewayError, UpstreamError
from plugin.gateway.notes import Kept, Note
from plugin.gateway.reconcile import put_right
from plugin.gateway.upstream import AFFECT_CONFIG, AFFECT_LIVE, XML_INACTIVE

if TYPE_CHECKING:
    from plugin.gateway.messages import Domain
    from plugin.gateway.server import Gateway
    from plugin.gateway.upstream import Upstream

_log = structlog.get_logger(__name__)


async def settle_left(gateway: Gateway) -> None:
    """Settles what a gateway left that ended, or that we could not take back at once."""
    for kept in [*gateway.unsettled, *gateway.notes.left()]:
        async with gateway.locks.hold(f"domain:{kept.note.dom_uuid.hex()}"):
            await settle(gateway, kept)


async def settle(gateway: Gateway, kept: Kept, *, back: bool = False) -> None:
    """Settles one change; the caller holds the domain's lock. With `back` it is taken back.

    What cannot be done now (libvirtd is away) is logged and stays to be done.
    """
    note = kept.note
    log = _log.bind(operation=note.operation, domain=note.name, dev=note.dev)
    try:
        finished = await _settle(gateway, note, back=back)
    except (GatewayError, TranslateError) as error:
        if kept not in gateway.unsettled:
            gateway.unsettled.append(kept)
            log.error("a change that was cut off cannot be settled yet", error=str(error))
        return
    if kept in gateway.unsettled:
        gateway.unsettled.remove(kept)
    gateway.notes.drop(kept)
    outcome = "finished" if finished else "taken back"
    log.info("a change that was cut off is settled", outcome=outcome)


async def _settle(gateway: Gateway, note: Note, *, back: bool) -> bool:
    """Returns whether the change was finished, not taken back."""
    admin = await gateway.admin()
    try:
        dom = await admin.lookup(note.dom_uuid)
        xml = await admin.xml(dom, 0)
    except UpstreamError as error:
        if error.code == Code.NO_DOMAIN:
            return False  # it was transient, and is gone with all that was changed
        raise
    changed = is_running(xml) and _changed(note, xml)
    if changed and not back and note.operation != "update":
        if note.operation == "detach":
            return True
        with suppress(GatewayError):  # without a target it is not there
            if await gateway.target.has_lun(note.controller, note.target, note.bdev):
                return True
    if changed:
        await _restore(admin, dom, note.live, AFFECT_LIVE)
        with suppress(GatewayError):  # without a target: it is put right when that is back
            await put_right(gateway, dom)
    if note.to_config and await admin.persistent(dom):
        config = await admin.xml(dom, XML_INACTIVE)
        if _changed(note, config):
            if note.config_xml is not None:
                await admin.define(note.config_xml)
            else:
                await _restore(admin, dom, note.config, AFFECT_CONFIG)
    return False


def _changed(note: Note, xml: str) -> bool:
    """Whether libvirtd's XML of one side may be as after the change."""
    if note.operation == "update":
        return True
    plan = translate.plan(xml)
    has = plan is not None and any(lun.dev == note.dev for lun in plan.luns)
    return has == (note.operation == "attach")


async def _restore(admin: Upstream, dom: Domain, before: str | None, flags: int) -> None:
    await admin.set_metadata(dom, without_prefixes(before) if before else None, flags)
