"""Snapshots, checkpoints and backups are of libvirtd's own disks; ours must be left out."""

from __future__ import annotations

import time
from functools import partial

from plugin.gateway.call import Call
from plugin.gateway.errors import GatewayError, Refused
from plugin.gateway.messages import Domain, DomainCall, pack_string, read_string
from plugin.gateway.upstream import XML_INACTIVE, XML_SECURE
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain.errors import Refusal
from pydataplane.domain.translate import (
    PREFIX,
    Definition,
    Settings,
    has_controller,
    listing,
    plan,
)

REDEFINE = 1
DISK_ONLY = 16
"""VIR_DOMAIN_SNAPSHOT_CREATE_REDEFINE and _DISK_ONLY; the first also of checkpoints."""


async def create(call: Call) -> None:
    """SNAPSHOT_CREATE_XML: {dom, xml, flags}."""
    args = DomainCall.read(call.payload, text=True, flags=True)
    await _create(call, args, inside=not args.flags & (REDEFINE | DISK_ONLY))


async def create_checkpoint(call: Call) -> None:
    """CHECKPOINT_CREATE_XML: {dom, xml, flags}."""
    await _create(call, DomainCall.read(call.payload, text=True, flags=True), inside=False)


async def _create(call: Call, args: DomainCall, *, inside: bool) -> None:
    """Passes the call on without disks of ours; `inside`: the XML may ask for an internal one."""
    again = bool(args.flags & REDEFINE)
    current = await _xml(call, args.dom, XML_INACTIVE | XML_SECURE if again else 0)
    if current is None:
        await call.pass_on()
        return
    if inside and await call.parse(lambda: listing.is_internal(args.text), args.text):
        raise Refused(Refusal.UNSUPPORTED, _why_not_inside(args.dom, current))
    change = listing.define_inside if again else listing.leave_out
    services = call.services
    known = Definition(current, await services.parse(lambda: plan(current)))

    async def translated(_: Settings) -> Definition:
        return known

    settings = await services.target.settings(services.settings, translated)
    text = await call.parse(lambda: change(args.text, current, settings), args.text)
    payload = DomainCall(args.dom, text, args.flags).pack(text=True, flags=True)
    await call.respond(await call.forward(payload))


def _why_not_inside(dom: Domain, current: str) -> str:
    """Says why a snapshot of a domain with a controller cannot be inside of its disks' files.

    libvirt wants each disk in it that is not read-only, and knows of none in a vhost-user device.
    """
    known = plan(current)
    way = "take an external one of its other disks (`virsh snapshot-create-as --disk-only`)"
    if known is None or not known.luns:
        way = (
            "shut it off first, or start it without a controller (`controllers` in virtlun.toml), "
            f"or {way}"
        )
    return (
        f"domain '{dom.name}' has a virtlun controller, so a snapshot inside of its disks' files"
        f" is not possible: {way}"
    )


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


async def xml(call: Call) -> None:
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
