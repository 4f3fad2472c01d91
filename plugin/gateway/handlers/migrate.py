"""Migration: XML that a client gives is translated, and the destination has the LUNs first.

The source's libvirtd makes the XML for the destination from its own, which has the controller in
it. `begin` and `perform` take a client's instead (`virsh migrate --xml`, Nova), written from what
dumpxml shows. `prepare` is called on the destination: the controller's socket is moved to where it
is on that host, and controller and LUNs are there before QEMU is. A guest without a disk of ours is
sent with what stands in for its controller, for the other host need not know of us, unless it
carries protection information; `prepare` puts a controller in its place where it can. Versions of
libvirt before 1.1.0 (begin without parameters) and after are served alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

from plugin.gateway import copies, emptycontrollers, inflight, polkit, protection
from plugin.gateway.call import Call, Reply
from plugin.gateway.domains import identity_of
from plugin.gateway.errors import Code, GatewayError, Refused
from plugin.gateway.handlers import guestxml
from plugin.gateway.handlers.start import begun, prepared, startable
from plugin.gateway.messages import STRING, Domain, TypedParam
from plugin.gateway.procs import Proc
from plugin.gateway.upstream import XML_INACTIVE, XML_MIGRATABLE, XML_SECURE
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain import translate
from pydataplane.domain.translate import Plan

PARAMS_MAX = 64
"""REMOTE_DOMAIN_MIGRATE_PARAM_LIST_MAX."""

COOKIE_MAX_BYTES = 4_194_304
"""REMOTE_MIGRATE_COOKIE_MAX."""

DEST_XML = "destination_xml"
PERSIST_XML = "persistent_xml"
"""VIR_MIGRATE_PARAM_DEST_XML and _PERSIST_XML."""

MIGRATE_DISKS = "migrate_disks"
"""VIR_MIGRATE_PARAM_MIGRATE_DISKS: those that libvirt copies, and no others."""

POST_COPY, COPY_ALL, COPY_CHANGED = 1 << 15, 1 << 6, 1 << 7
"""VIR_MIGRATE_POSTCOPY, _NON_SHARED_DISK and _NON_SHARED_INC."""

_NO_UUID = UUID(int=0)

_RIGHTS = (polkit.MIGRATE, polkit.START, polkit.WRITE)
"""What libvirt asks of whoever prepares a destination (remote_protocol.x, MIGRATE_PREPARE3)."""


async def begin(call: Call) -> None:
    """MIGRATE_BEGIN3: {dom, xml or nothing, flags, name or nothing, bandwidth}."""
    await _with_xml(call)


async def perform(call: Call) -> None:
    """MIGRATE_PERFORM3: {dom, xml or nothing, cookie, URIs, flags, name or nothing, bandwidth}."""
    await _with_xml(call)


async def _with_xml(call: Call) -> None:
    reader = Reader(call.payload)
    dom, xml = Domain.read(reader), reader.optional(reader.string)
    after = Reader(call.payload[reader.offset :])
    if call.header.procedure == Proc.MIGRATE_PERFORM3:
        after.opaque(COOKIE_MAX_BYTES)
        after.optional(after.string)
        after.optional(after.string)
    await _check_possible(call, dom, after.u64())
    if xml is None:
        xml = await _without_target(call, dom)
    else:
        current = await _current(call, dom, XML_SECURE)
        xml = await guestxml.translated(call, xml, current, elsewhere=True)
        xml = await _standing_in(call, xml) or xml
    if xml is None:
        await call.pass_on()
        return
    writer = dom.write(Writer())
    writer.optional(xml, writer.string)
    await call.respond(await call.forward(bytes(writer) + call.payload[reader.offset :]))


async def begin_params(call: Call) -> None:
    """MIGRATE_BEGIN3_PARAMS: {dom, params, flags}."""
    reader = Reader(call.payload)
    dom = Domain.read(reader)
    await _with_params(call, dom, reader, bytes(dom.write(Writer())))


async def perform_params(call: Call) -> None:
    """MIGRATE_PERFORM3_PARAMS: {dom, URI or nothing, params, cookie, flags}."""
    reader = Reader(call.payload)
    dom = Domain.read(reader)
    reader.optional(reader.string)
    await _with_params(call, dom, reader, call.payload[: reader.offset])


async def _with_params(call: Call, dom: Domain, reader: Reader, before: bytes) -> None:
    """Translates the XML among the parameters that `reader` has come to."""
    params = reader.array(lambda: TypedParam.read(reader), PARAMS_MAX)
    after = Reader(call.payload[reader.offset :])
    if call.header.procedure == Proc.MIGRATE_PERFORM3_PARAMS:
        after.opaque(COOKIE_MAX_BYTES)
    flags = after.u32()
    if any(item.field == MIGRATE_DISKS for item in params):
        flags &= ~(COPY_ALL | COPY_CHANGED)
    await _check_possible(call, dom, flags)
    given = {item.field for item in params}
    if DEST_XML not in given and (own := await _without_target(call, dom)) is not None:
        params.append(TypedParam(DEST_XML, STRING, own))
    elif not given & {DEST_XML, PERSIST_XML}:
        await call.pass_on()
        return
    sides = {DEST_XML: XML_SECURE, PERSIST_XML: XML_SECURE | XML_INACTIVE}
    writer = Writer()
    writer.u32(len(params))
    for item in params:
        if item.field in given & sides.keys() and item.kind == STRING:
            current = await _current(call, dom, sides[item.field])
            running = item.field == DEST_XML
            xml = await guestxml.translated(
                call, str(item.value), current, running=running, elsewhere=True
            )
            if running:
                xml = await _standing_in(call, xml) or xml
            item = replace(item, value=xml)  # noqa: PLW2901
        item.write(writer)
    rest = call.payload[reader.offset :]
    await call.respond(await call.forward(before + bytes(writer) + rest))


async def _check_possible(call: Call, dom: Domain, flags: int) -> None:
    """Refuses what would lose something that a guest has of us, before anything is done.

    Raises:
        Refused: says what, and what to do instead.
    """
    await copies.check_none(call, dom)
    await inflight.check_call(call, dom)
    if flags & (POST_COPY | COPY_ALL | COPY_CHANGED):
        async with call.for_who_sees(dom):
            await _check_flags(call, dom, flags)


async def _check_flags(call: Call, dom: Domain, flags: int) -> None:
    current = await _current(call, dom, XML_SECURE)
    plan = None if current is None else await call.parse(lambda: translate.plan(current), current)
    if plan is None or not plan.luns:
        return
    if flags & POST_COPY:
        raise Refused(
            Code.OPERATION_UNSUPPORTED,
            f"domain '{dom.name}' has disks of virtlun, whose target has to reach all of the"
            " guest's memory while it runs, so post-copy is not possible: migrate it without"
            " --postcopy",
        )
    if flags & (COPY_ALL | COPY_CHANGED):
        raise Refused(
            Code.OPERATION_UNSUPPORTED,
            f"domain '{dom.name}' has disks of virtlun, whose volumes libvirt does not copy"
            " (those of a pool of Ceph are there already, others need their content there first):"
            " migrate it without --copy-storage-all, or name the disks to be copied with"
            " --migrate-disks",
        )


async def prepare(call: Call) -> None:
    """MIGRATE_PREPARE3 and _PREPARE_TUNNEL3: {cookie, ..., xml}; XML is all that counts here."""
    reader = Reader(call.payload)
    reader.opaque(COOKIE_MAX_BYTES)
    if call.header.procedure == Proc.MIGRATE_PREPARE3:
        reader.optional(reader.string)  # the URI
    reader.u64()
    reader.optional(reader.string)  # the new name
    reader.u64()
    before = call.payload[: reader.offset]
    xml = reader.string()
    reader.end()
    await _prepare(call, xml, lambda new: before + bytes(Writer().string(new)))


async def prepare_params(call: Call) -> None:
    """MIGRATE_PREPARE3_PARAMS and _PREPARE_TUNNEL3_PARAMS: {params, cookie, flags}."""
    reader = Reader(call.payload)
    params = reader.array(lambda: TypedParam.read(reader), PARAMS_MAX)
    rest = call.payload[reader.offset :]
    xml = next((str(p.value) for p in params if p.field == DEST_XML and p.kind == STRING), None)
    if xml is None:
        await call.pass_on()
        return

    def payload(new: str) -> bytes:
        writer = Writer()
        given = [replace(p, value=new) if p.field == DEST_XML else p for p in params]
        return bytes(writer.array(given, lambda item: item.write(writer))) + rest

    await _prepare(call, xml, payload)


async def _prepare(call: Call, xml: str, payload: Callable[[str], bytes]) -> None:
    """Makes the destination ready for the domain in `xml` and passes on the call with it."""
    if not await call.parse(lambda: translate.has_devices(xml), xml):
        await call.pass_on()  # without a controller on the source there is none here
        return
    uuid = (await call.parse(lambda: identity_of(xml), xml))[1]
    if uuid is None:
        await call.pass_on()  # no libvirtd sends that
        return
    async with call.services.domain_lock(uuid):
        reply = await _prepare_held(call, xml, payload)
    await call.respond(reply)


async def _prepare_held(call: Call, xml: str, payload: Callable[[str], bytes]) -> Reply:
    """As `_prepare`, for a domain whose lock is held."""
    carried = await call.parse(lambda: translate.has_controller(xml), xml)
    definition = await call.services.define(
        xml, new_uuid=_NO_UUID, controller=carried, client=call.parser, served_in=xml, running=True
    )
    found = await startable(call, definition.plan, definition.xml, _RIGHTS)
    if found is None:
        return await call.forward(payload(definition.xml))
    await protection.check_qemu(call.services, found[0], definition.xml, call.parser)
    if not found[0].luns:
        return await _prepare_without_disks(call, definition.xml, found, payload)
    plan = replace(found[0], incoming=True)
    async with prepared(call, plan, found[1], saved=True) as attempt:
        reply = await call.forward(payload(definition.xml))
        attempt.started = reply.ok
    return reply


async def _prepare_without_disks(
    call: Call, xml: str, found: tuple[Plan, bytes], payload: Callable[[str], bytes]
) -> Reply:
    """Makes the destination ready for a guest that has a controller and no disk of ours."""
    plan, uuid = found
    made = await emptycontrollers.make(call.services, plan)
    if not made and plan.protection:
        raise protection.unserved(plan)
    given = xml if made else await _standing_in(call, xml) or xml
    return await begun(call.services, plan if made else None, uuid, call.forward(payload(given)))


async def _without_target(call: Call, dom: Domain) -> str | None:
    """Returns the running domain with what stands in for its controller, for another host.

    None if it has none or disks of ours, or if the client may not read it.
    """
    current = await _current(call, dom, XML_SECURE | XML_MIGRATABLE)
    return await _standing_in(call, current) if current is not None else None


async def _standing_in(call: Call, xml: str) -> str | None:
    """Returns a domain with what stands in for its controller; None as `without_target`."""
    return await call.parse(lambda: translate.without_target(xml), xml)


async def _current(call: Call, dom: Domain, flags: int) -> str | None:
    """Returns libvirtd's XML of the domain; None where the client may not read it."""
    try:
        return await (await call.caller.own()).xml(dom, flags)
    except GatewayError:
        return None
