"""Which volumes a domain has had, by UUID: what tells a lost volume from one that never existed.

The domain's metadata is the place for it; the gateway writes it at define, attach and start. What
is started behind its back the hook records in a file of its own (see pydataplane.domain.records),
for it cannot change the metadata. What is there counts until the metadata says it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from plugin.config import HookSection
from plugin.gateway.errors import Refused
from plugin.gateway.messages import Domain
from plugin.gateway.services import Services
from plugin.gateway.upstream import AFFECT_CONFIG, AFFECT_LIVE, XML_INACTIVE, Upstream
from pydataplane.domain import records, translate
from pydataplane.domain.errors import RecordError, Refusal
from pydataplane.domain.translate import Plan

_log = structlog.get_logger(__name__)


async def known(hook: HookSection, controller: str) -> dict[str, str]:
    """Returns the UUIDs (by LVSTORE/LVOL) that the hook recorded for a domain's controller.

    Raises:
        Refused: there is a record that cannot be read; to go on might hide a loss.
    """
    try:
        return await asyncio.to_thread(records.read, str(hook.state_dir), controller)
    except RecordError as error:
        raise Refused(Refusal.NO_VOLUME, str(error)) from error


async def forget(hook: HookSection, controller: str) -> None:
    """Removes the hook's record, for a domain that is new or whose metadata says it all.

    Raises:
        Refused: it cannot be removed.
    """
    try:
        await asyncio.to_thread(records.write, str(hook.state_dir), controller, {})
    except RecordError as error:
        raise Refused(Refusal.INTERNAL, str(error)) from error


async def write(admin: Upstream, dom: Domain, uuids: Mapping[str, str], flags: int) -> bool:
    """Puts UUIDs (by LVSTORE/LVOL) into one side's metadata where it lacks them; False if none.

    `flags` is AFFECT_LIVE or AFFECT_CONFIG. The gateway's own bookkeeping, under its own identity:
    whoever may start a domain need not be allowed to change it.

    Raises:
        UpstreamError: libvirtd refuses.
    """
    assert flags in (AFFECT_LIVE, AFFECT_CONFIG)
    xml = await admin.xml(dom, XML_INACTIVE if flags == AFFECT_CONFIG else 0)
    element = translate.identify(xml, uuids)
    if element is not None:
        await admin.set_metadata(dom, element, flags)
    return element is not None


async def take_over(services: Services, dom: Domain) -> bool:
    """Puts the UUIDs of a domain's volumes into its metadata, where they are missing there.

    They are what the hook recorded, else those of the volumes that have the names now. The caller
    holds the domain's lock. False: some are of volumes that are not there.

    Raises:
        GatewayError, TranslateError: it cannot be done.
    """
    admin = await services.admin()
    sides = []
    if await admin.active(dom):
        sides.append((AFFECT_LIVE, await admin.xml(dom, 0)))
    if await admin.persistent(dom):
        sides.append((AFFECT_CONFIG, await admin.xml(dom, XML_INACTIVE)))
    plans = [(flags, plan) for flags, xml in sides if (plan := translate.plan(xml)) is not None]
    unknown = {lun.volume.alias for _, p in plans for lun in p.luns if lun.uuid is None}
    if not unknown:
        return True
    controller = translate.controller_name(dom.uuid_text)
    recorded = await known(services.hook, controller)
    found = await services.target.uuids(sorted(unknown - recorded.keys()))
    for flags, _ in plans:
        if await write(admin, dom, found | recorded, flags):
            _log.info("volumes recorded", domain=dom.name)
    await forget(services.hook, controller)
    return unknown <= recorded.keys() | found.keys()


def uuids_of(plan: Plan) -> dict[str, str]:
    """Returns the UUIDs in a plan, by LVSTORE/LVOL."""
    return {lun.volume.alias: lun.uuid for lun in plan.luns if lun.uuid is not None}
