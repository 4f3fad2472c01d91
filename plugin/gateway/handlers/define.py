"""DEFINE_XML and CREATE_XML: the domain gets our controller, its disks of ours move to metadata."""

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

from plugin import translate
from plugin.gateway.call import Call
from plugin.gateway.domains import current_xml, identity_of
from plugin.gateway.errors import GatewayError
from plugin.gateway.handlers.start import prepared
from plugin.gateway.messages import XmlCall
from plugin.gateway.procs import Proc
from plugin.translate import Definition


async def define(call: Call) -> None:
    """DEFINE_XML and DEFINE_XML_FLAGS."""
    args = XmlCall.read(call.payload, flags=call.header.procedure == Proc.DEFINE_XML_FLAGS)
    uuid = identity_of(args.xml)[1]
    async with call.session.gateway.locks.hold(f"domain:{uuid.hex() if uuid else args.xml[:64]}"):
        definition = await _translated(call, args.xml)
        reply = await call.forward(replace(args, xml=definition.xml).pack())
    await call.respond(reply)


async def create(call: Call) -> None:
    """CREATE_XML and CREATE_XML_WITH_FILES: define and start at once."""
    args = XmlCall.read(call.payload, flags=True, descriptors=call.header.with_fds)
    definition = await _translated(call, args.xml)
    payload = replace(args, xml=definition.xml).pack()
    if definition.plan is None:
        reply = await call.forward(payload)
    else:
        uuid = identity_of(definition.xml)[1]
        async with prepared(call, definition.plan, uuid) as attempt:
            reply = await call.forward(payload)
            attempt.started = reply.ok
    await call.respond(reply)


async def _translated(call: Call, xml: str) -> Definition:
    """Translates a client's domain, keeping what libvirtd's present definition has assigned."""
    gateway = call.session.gateway
    name, uuid = identity_of(xml)
    try:
        current = await current_xml(await call.session.own(), name, uuid)
    except GatewayError:
        current = None  # libvirtd's answer to the call itself says why
    new_uuid = uuid4()
    definition = translate.define(xml, gateway.settings, new_uuid=new_uuid, current_xml=current)
    luns = definition.plan.luns if definition.plan is not None else ()
    unknown = [lun.volume.alias for lun in luns if lun.uuid is None]
    if unknown and (uuids := await gateway.target.uuids(unknown)):
        definition = translate.define(
            xml, gateway.settings, new_uuid=new_uuid, current_xml=current, uuids=uuids
        )
    return definition
