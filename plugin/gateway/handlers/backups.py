"""Checkpoints and backups are of libvirtd's own disks; ours must be left out."""

from __future__ import annotations

import time
from functools import partial

from plugin.gateway.call import Call
from plugin.gateway.errors import GatewayError
from plugin.gateway.messages import Domain, DomainCall, pack_string, read_string
from plugin.gateway.services import Services
from plugin.gateway.upstream import XML_INACTIVE, XML_SECURE
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain.translate import (
    PREFIX,
    Definition,
    Settings,
    has_controller,
    listing,
    plan,
)

REDEFINE = 1
"""VIR_DOMAIN_CHECKPOINT_CREATE_REDEFINE."""


async def create_checkpoint(call: Call) -> None:
    """CHECKPOINT_CREATE_XML: {dom, xml, flags}."""
    args = DomainCall.read(call.payload, text=True, flags=True)
    again = bool(args.flags & REDEFINE)
    current = await _xml(call, args.dom, XML_INACTIVE | XML_SECURE if again else 0)
    if current is None:
        await call.pass_on()
        return
    settings = await settings_of(call.services, current)

    def without() -> str:
        if again:
            return listing.define_inside(args.text, current, settings).xml
        return listing.leave_out(args.text, current, settings)

    text = await call.parse(without, args.text)
    payload = DomainCall(args.dom, text, args.flags).pack(text=True, flags=True)
    await call.respond(await call.forward(payload))


async def settings_of(services: Services, xml: str) -> Settings:
    """Returns the settings with the folder of sockets for a domain (libvirtd's XML).

    Raises:
        GatewayError: its volumes are of several targets.
    """
    known = Definition(xml, await services.parse(lambda: plan(xml)))

    async def translated(_: Settings) -> Definition:
        return known

    return await services.target.settings(services.settings, translated)


async def begin_backup(call: Call) -> None:
    """BACKUP_BEGIN: {dom, backup XML, checkpoint XML or nothing, flags}."""
    reader = Reader(call.payload)
    dom, backup = Domain.read(reader), reader.string()
    checkpoint, flags = reader.optional(reader.string), reader.u32()
    xml = await _xml(call, dom, 0)
    if xml is None:
        await call.pass_on()
        return
    services = call.services
    without = partial(listing.leave_out, domain_xml=xml, settings=services.settings)
    backup = await call.parse(partial(without, backup, suffix=str(int(time.time()))), backup)
    if checkpoint is not None:
        checkpoint = await call.parse(partial(without, checkpoint), checkpoint)
    writer = dom.write(Writer()).string(backup)
    writer.optional(checkpoint, writer.string).u32(flags)
    await call.respond(await call.forward(bytes(writer)))


async def listed_xml(call: Call) -> None:
    """SNAPSHOT_GET_XML_DESC and CHECKPOINT_GET_XML_DESC: {{name, dom}, flags}."""
    reader = Reader(call.payload)
    reader.string()
    await _show(call, Domain.read(reader))


async def backup_xml(call: Call) -> None:
    """BACKUP_GET_XML_DESC: {dom, flags}."""
    await _show(call, Domain.read(Reader(call.payload)))


async def _show(call: Call, dom: Domain) -> None:
    reply = await call.forward()
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
    return found if has_controller(found) else None
