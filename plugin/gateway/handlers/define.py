"""DEFINE_XML and CREATE_XML: the domain gets our controller, its disks of ours move to metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from uuid import UUID, uuid4

from plugin.gateway import emptycontrollers, polkit, protection, records
from plugin.gateway.call import Call, Reply
from plugin.gateway.domains import current_xml, identity_at_once, identity_of
from plugin.gateway.errors import Code, GatewayError, UpstreamError
from plugin.gateway.handlers.start import create_empty, prepared, release_images, startable
from plugin.gateway.messages import Domain, XmlCall
from plugin.gateway.parsing import SHORT
from plugin.gateway.procs import Proc
from plugin.gateway.upstream import AFFECT_CONFIG, Upstream
from pydataplane.domain import translate
from pydataplane.domain.translate import Definition, controller_name


@dataclass(frozen=True)
class Translation:
    """A client's domain with what decides its translation."""

    xml: str
    call: Call
    new_uuid: UUID
    """What the domain gets if it has none."""
    current: str | None
    """libvirtd's present definition, None if there is none."""

    async def with_uuids(self, uuids: Mapping[str, str] | None = None) -> Definition:
        """Translates it, with the UUIDs of volumes (by LVSTORE/LVOL) in its metadata."""
        return await self.call.services.define(
            self.xml,
            new_uuid=self.new_uuid,
            current_xml=self.current,
            uuids=uuids,
            client=self.call.parser,
        )


async def define(call: Call) -> None:
    """DEFINE_XML and DEFINE_XML_FLAGS."""
    services = call.services
    args = XmlCall.read(call.payload, flags=call.header.procedure == Proc.DEFINE_XML_FLAGS)
    name, uuid, foreign = await _looked_at(call, args.xml)
    async with services.locks.hold(f"domain:{uuid.hex() if uuid else args.xml[:64]}"):
        new, marked = False, True
        if uuid is not None:
            dom = Domain(name or "-", uuid, -1)  # it is found by the UUID
            new, marked = await _present(await services.admin(), dom)
        if foreign and not marked:  # it stays as it is, and is not parsed
            reply = await call.forward()
        else:
            _, definition = await _translated(call, args.xml, new=new, new_uuid=uuid4())
            reply = await call.forward(replace(args, xml=definition.xml).pack())
        if uuid is not None:
            services.domain_cache.changed(uuid)
        if new and uuid is not None and reply.ok:
            await records.forget(services.hook, controller_name(UUID(bytes=uuid)))
    await call.respond(reply)


async def create(call: Call) -> None:
    """CREATE_XML and CREATE_XML_WITH_FILES: define and start at once."""
    services, new_uuid = call.services, uuid4()
    args = XmlCall.read(call.payload, flags=True, descriptors=call.header.with_fds)
    name, uuid, foreign = await _looked_at(call, args.xml)
    # What is read of the domain that there may be must be so still when this one starts.
    async with services.domain_lock(uuid or new_uuid.bytes):
        # What gets a controller is parsed, and what is known by its name alone.
        marked = services.config.controllers_for_all or uuid is None
        if foreign and not marked and uuid is not None:
            _, marked = await _present(await services.admin(), Domain(name or "-", uuid, -1))
        if foreign and not marked:
            if uuid is not None:
                await release_images(services, uuid, None)
            reply = await call.forward()
        else:
            reply = await _create(call, args, new_uuid, uuid)
    await call.respond(reply)


async def _looked_at(call: Call, xml: str) -> tuple[str | None, bytes | None, bool]:
    """Returns name and UUID in a client's domain, and whether its bytes have nothing of ours."""
    settings = call.services.settings
    identity = identity_at_once(xml) if len(xml) <= SHORT else None
    if identity is not None:  # no thread is worth that
        return *identity, translate.is_foreign(xml, settings)
    (name, uuid), foreign = await call.parse(
        lambda: (identity_of(xml), translate.is_foreign(xml, settings)), xml
    )
    return name, uuid, foreign


async def _create(call: Call, args: XmlCall, new_uuid: UUID, uuid: bytes | None) -> Reply:
    """Creates a domain whose lock is held; returns libvirtd's reply."""
    translation, definition = await _translated(call, args.xml, new=False, new_uuid=new_uuid)
    if uuid is not None:
        await release_images(call.services, uuid, definition.plan)
    if definition.plan is None:
        return await _create_without_disks(call, args, definition, new_uuid)
    payload = replace(args, xml=definition.xml).pack()
    found = await startable(call, definition.plan, definition.xml, (polkit.WRITE, polkit.START))
    if found is None:
        return await call.forward(payload)  # libvirtd says why not
    protection.tell(call.services, definition.plan)
    async with prepared(call, *found) as attempt:
        known = records.uuids_of(attempt.plan)
        payload = replace(args, xml=(await translation.with_uuids(known)).xml).pack()
        reply = await call.forward(payload)
        attempt.started = reply.ok
    return reply


async def _create_without_disks(
    call: Call, args: XmlCall, definition: Definition, new_uuid: UUID
) -> Reply:
    """Creates a domain that has no disk of ours, with a controller if it is to have one."""
    services = call.services
    if emptycontrollers.is_wanted(services, definition.xml) and not call.header.with_fds:
        made = await emptycontrollers.with_controller(services, args.xml, new_uuid, call.parser)
        rights = (polkit.WRITE, polkit.START)
        found = await startable(call, made.plan, made.xml, rights) if made is not None else None
        if made is not None and found is not None:
            _, uuid = found
            reply = await create_empty(call, made, uuid, replace(args, xml=made.xml).pack())
            if reply is not None:
                return reply
    return await call.forward(replace(args, xml=definition.xml).pack())


async def _present(admin: Upstream, dom: Domain) -> tuple[bool, bool]:
    """Whether libvirtd has no such domain, and whether its definition may have metadata of ours."""
    try:
        return False, await admin.metadata(dom, AFFECT_CONFIG) is not None
    except UpstreamError as error:  # of a transient domain, too
        new = error.code == Code.NO_DOMAIN
        return new, not new


async def _translated(
    call: Call, xml: str, *, new: bool, new_uuid: UUID
) -> tuple[Translation, Definition]:
    """Translates a client's domain, keeping what libvirtd's present definition has assigned.

    That is read under the gateway's own identity: a client that may change a domain need not be
    allowed to read it, and it is not shown what is kept. `new`: records of old are not its own.
    `new_uuid` becomes its UUID if it has none. The caller holds the domain's lock.
    """
    services = call.services
    name, uuid = await call.parse(lambda: identity_of(xml), xml)
    try:
        current = await current_xml(await services.admin(), name, uuid)
    except GatewayError:
        current = None  # libvirtd's answer to the call itself says why
    translation = Translation(xml, call, new_uuid, current)
    definition = await translation.with_uuids()
    plan = definition.plan
    unknown = [lun.volume.alias for lun in plan.luns if lun.uuid is None] if plan else []
    if plan is not None and unknown:
        recorded = {} if new else await records.known(services.hook, plan.controller)
        found = await services.target.uuids([alias for alias in unknown if alias not in recorded])
        uuids = found | {alias: recorded[alias] for alias in unknown if alias in recorded}
        if uuids:
            definition = await translation.with_uuids(uuids)
    return translation, definition
