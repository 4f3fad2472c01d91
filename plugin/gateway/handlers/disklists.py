"""Edits the <disks> of checkpoints, backups and snapshots that libvirtd makes: ours are left out.

libvirtd makes checkpoints and backups of its own disks alone, and knows nothing of ours. So what it
is sent lists none of ours, and what a client is shown lists ours as left out.
"""

from __future__ import annotations

import time
from functools import partial

from plugin.gateway.call import Call, Reply
from plugin.gateway.errors import GatewayError
from plugin.gateway.messages import Domain, DomainCall, pack_string, read_string
from plugin.gateway.services import Services
from plugin.gateway.upstream import XML_INACTIVE, XML_SECURE
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain.translate import (
    PREFIX,
    Definition,
    Settings,
    has_devices,
    listing,
    plan,
)

REDEFINE = 1
"""VIR_DOMAIN_CHECKPOINT_CREATE_REDEFINE."""


async def checkpoint(call: Call, args: DomainCall) -> Reply:
    """Has libvirtd take a checkpoint, or define one anew, without disks of ours.

    Raises:
        GatewayError, TranslateError: one of ours is not left out.
    """
    again = bool(args.flags & REDEFINE)
    current = await _xml(call, args.dom, XML_INACTIVE | XML_SECURE if again else 0)
    if current is None:
        return await call.forward()
    settings = await settings_of(call.services, current)

    def without() -> str:
        if again:
            return listing.define_inside(args.text, current, settings).xml
        return listing.leave_out(args.text, current, settings)

    text = await call.parse(without, args.text)
    return await call.forward(DomainCall(args.dom, text, args.flags).pack(text=True, flags=True))


async def backup(call: Call, dom: Domain, xml: str, checkpoint: str | None, flags: int) -> Reply:
    """Has libvirtd begin a backup without disks of ours, with the XML of a checkpoint or without.

    Raises:
        GatewayError, TranslateError: one of ours is not left out.
    """
    current = await _xml(call, dom, 0)
    if current is None:
        return await call.forward()
    settings = call.services.settings
    without = partial(listing.leave_out, domain_xml=current, settings=settings)
    text = await call.parse(partial(without, xml, suffix=str(int(time.time()))), xml)
    if checkpoint is not None:
        checkpoint = await call.parse(partial(without, checkpoint), checkpoint)
    writer = dom.write(Writer()).string(text)
    writer.optional(checkpoint, writer.string).u32(flags)
    return await call.forward(bytes(writer))


async def settings_of(services: Services, xml: str) -> Settings:
    """Returns the settings with the folder of sockets for a domain (libvirtd's XML).

    Raises:
        GatewayError: its volumes are of several targets.
    """
    known = Definition(xml, await services.parse(lambda: plan(xml)))

    async def translated(_: Settings) -> Definition:
        return known

    return await services.target.settings(services.settings, translated)


async def listed_xml(call: Call) -> None:
    """SNAPSHOT_GET_XML_DESC: {{name, dom}, flags}."""
    reader = Reader(call.payload)
    reader.string()
    await show(call, Domain.read(reader), await call.forward())


async def show(call: Call, dom: Domain, reply: Reply) -> None:
    """Answers with XML that lists disks as the client is to see it; `reply` is libvirtd's."""
    if not reply.ok:
        await call.respond(reply)
        return
    current = await _xml(call, dom, 0)
    if current is None and PREFIX.encode() not in reply.payload:
        await call.respond(reply)
        return
    settings, text = call.services.settings, read_string(reply.payload)
    shown = await call.services.parse(
        lambda: listing.present_listing(text, settings, domain_xml=current)
    )
    await call.respond(reply, pack_string(shown))


async def _xml(call: Call, dom: Domain, flags: int) -> str | None:
    """Returns libvirtd's XML of a domain with a controller of ours; None of another one.

    None as well if the client may not read it: libvirtd's answer to the call itself says why.
    """
    try:
        found = await (await call.caller.own()).xml(dom, flags)
    except GatewayError:
        return None
    return found if has_devices(found) else None
