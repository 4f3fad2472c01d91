"""Makes the target's LUNs follow what the domains' metadata says; run when the gateway starts.

It finishes or takes back what a gateway that died in between left half done, and gives running
domains their LUNs again after a target came back empty. And it takes over what the hook recorded
while there was no gateway: see plugin.gateway.records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from plugin import translate
from plugin.errors import TranslateError
from plugin.gateway import records
from plugin.gateway.errors import GatewayError

if TYPE_CHECKING:
    from plugin.gateway.messages import Domain
    from plugin.gateway.server import Gateway

_log = structlog.get_logger(__name__)


async def reconcile(gateway: Gateway) -> None:
    """Goes through all domains once. A domain that cannot be put right is logged and left."""
    try:
        domains = await (await gateway.admin()).domains(0)
    except GatewayError as error:
        _log.warning("not reconciled: libvirtd cannot be asked", error=str(error))
        return
    for dom in domains:
        try:
            async with gateway.locks.hold(f"domain:{dom.uuid.hex()}"):
                await records.take_over(gateway, dom)
                await _reconcile(gateway, dom)
        except (GatewayError, TranslateError) as error:
            _log.warning("not reconciled", domain=dom.name, error=str(error))


async def _reconcile(gateway: Gateway, dom: Domain) -> None:
    admin = await gateway.admin()
    if not await admin.active(dom):
        controller = translate.controller_name(dom.uuid_text)
        if await gateway.target.exists(controller):
            await gateway.target.release(controller)
            _log.info("controller of a stopped domain released", domain=dom.name)
        return
    plan = translate.plan(await admin.xml(dom, 0))
    if plan is None:
        return
    added = await gateway.target.ensure(plan, whole=False)
    if added:
        _log.info("LUNs put right", domain=dom.name, devs=[lun.dev for lun in added])
