"""Starting a domain: its volumes, controller and LUNs exist before QEMU looks for them.

libvirt's `prepare` hook does the same where it is installed; both are safe to repeat. A domain
without a disk of ours starts whatever becomes of its controller: see
plugin.gateway.emptycontrollers. Nothing is done for a client that libvirtd is going to refuse:
where libvirtd asks polkit about each call, the gateway asks first. The controller is taken away
again if the start fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from uuid import UUID

import structlog

from plugin.gateway import copies, emptycontrollers, images, polkit, protection, records
from plugin.gateway.call import Call, Reply
from plugin.gateway.domains import identity_of, is_active
from plugin.gateway.errors import GatewayError, Refused, UpstreamError
from plugin.gateway.messages import Domain, DomainCall, XmlCall, read_string
from plugin.gateway.procs import Proc
from plugin.gateway.services import Services
from plugin.gateway.upstream import AFFECT_CONFIG, XML_INACTIVE, XML_SECURE, Upstream
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain import translate
from pydataplane.domain.errors import Refusal
from pydataplane.domain.images import of_plan
from pydataplane.domain.translate import Definition, LunPlan, Plan, controller_name
from pydataplane.lvols import Lvol

_log = structlog.get_logger(__name__)

PAUSED, AUTODESTROY, BYPASS_CACHE, FORCE_BOOT, RESET_NVRAM = 1, 2, 4, 8, 32
"""virDomainCreateFlags of a start."""

CREATE_FLAGS = PAUSED | AUTODESTROY | RESET_NVRAM
"""Those that virDomainCreateXML takes, too; the others are about a saved state."""

LEAVE_TRIES = 25
LEAVE_S = 0.2
"""How often, and how many seconds apart, the QEMU of a failed start is given to let go."""


@dataclass
class Attempt:
    """What the body of `prepared` starts, and whether it did."""

    plan: Plan
    """With the UUIDs of all volumes."""
    started: bool = False


async def start(call: Call) -> None:
    """CREATE, CREATE_WITH_FLAGS and CREATE_WITH_FILES."""
    offset = 4 if call.header.with_fds else 0  # the number of descriptors comes first
    flags = call.header.procedure != Proc.CREATE
    args = DomainCall.read(call.payload[offset:], flags=flags)
    async with call.services.domain_lock(args.dom.uuid):  # what is read must be what starts
        reply = await _start(call, args)
    await call.respond(reply)


async def _start(call: Call, args: DomainCall) -> Reply:
    """Starts a domain whose lock is held; returns libvirtd's reply."""
    try:
        admin = await call.services.admin()
        dom = await admin.lookup(args.dom.uuid)
        if not await call.caller.may((polkit.START,), dom.name, dom.uuid_text):
            raise Refused(Refusal.DENIED, "libvirtd is going to say so")
        await copies.resolve(call.services, dom.uuid)  # its definition may become another by that
        # Whoever may start a domain need not be allowed to read it, and is not shown this.
        xml, saved = await _xml_to_start(admin, dom, force=bool(args.flags & FORCE_BOOT))
    except GatewayError:
        return await call.forward()  # libvirtd says why
    plan = await call.services.parse(lambda: translate.plan(xml))
    await release_images(call.services, dom.uuid, plan)
    if plan is None or not plan.luns:
        if saved:
            return await _restore(call, admin, dom)
        return await _start_without_disks(call, args, admin, dom, xml)
    if saved:
        await protection.check_qemu(call.services, plan, xml)
    async with prepared(call, plan, dom.uuid, saved=saved) as attempt:
        if await admin.persistent(dom):
            await records.write(admin, dom, records.uuids_of(attempt.plan), AFFECT_CONFIG)
            if not saved:
                await _refit(call.services, admin, dom)
        reply = await call.forward()
        attempt.started = reply.ok
    return reply


async def _refit(services: Services, admin: Upstream, dom: Domain) -> None:
    """Gives a definition what its controller is to have now, for QEMU may be another since.

    As what is recorded of its volumes, it is the gateway's own to write. The caller holds the lock.
    """
    with suppress(UpstreamError):  # it starts as it is, then
        if await is_active(admin, dom.uuid):
            return  # libvirtd refuses to start it again
        xml = await admin.xml(dom, XML_INACTIVE | XML_SECURE)
        work = partial(translate.refitted, xml, services.settings, boots=True)
        fitted = await services.parse(work)
        if fitted is not None:
            await services.redefine(admin, dom.uuid, fitted)
            _log.info("what QEMU is told of its controller put right", domain=dom.name)
        if services.settings.protection:
            protection.tell(services, await services.parse(partial(translate.plan, fitted or xml)))


async def _start_without_disks(
    call: Call, args: DomainCall, admin: Upstream, dom: Domain, xml: str
) -> Reply:
    """Starts a domain that has no disk of ours, with a controller if it is to have one."""
    definition = None
    if emptycontrollers.is_wanted(call.services, xml) and await _can_create(call, args, admin, dom):
        with suppress(GatewayError):  # without it, then: libvirtd says what is wrong
            secure = await admin.xml(dom, XML_INACTIVE | XML_SECURE)
            definition = await emptycontrollers.with_controller(call.services, secure)
    if definition is not None and not await is_active(admin, dom.uuid):
        payload = XmlCall(definition.xml, args.flags & CREATE_FLAGS).pack()
        reply = await create_empty(call, definition, dom.uuid, payload)
        if reply is not None:
            bare = call.header.procedure == Proc.CREATE  # which has no result
            return replace(reply, payload=b"") if bare else reply
    return await call.forward()


async def create_empty(
    call: Call, definition: Definition, uuid: bytes, payload: bytes
) -> Reply | None:
    """Has libvirtd create a domain that has a controller and no LUN; None if that does not work.

    `payload` is that of CREATE_XML; the caller holds the domain's lock. Whatever it is that does
    not work (no target, no such device in QEMU, no room on the PCI bus), the domain may be fine
    without a controller.
    """
    services, plan = call.services, definition.plan
    assert plan is not None
    if not await emptycontrollers.make(services, plan):
        return None
    reply = await begun(services, plan, uuid, call.forward_as(Proc.CREATE_XML, payload))
    if reply.ok:
        return reply
    _log.warning(
        "a domain goes without a controller, with which libvirtd does not start it",
        domain=plan.domain,
        error=str(UpstreamError(reply.payload)),
    )
    return None


async def _can_create(call: Call, args: DomainCall, admin: Upstream, dom: Domain) -> bool:
    """Whether the client's start can be a virDomainCreateXML.

    That needs the right to write, takes no descriptors, and leaves a saved state where it is.
    """
    if call.header.with_fds or args.flags & ~(CREATE_FLAGS | BYPASS_CACHE | FORCE_BOOT):
        return False
    if not await call.caller.may((polkit.START, polkit.WRITE), dom.name, dom.uuid_text):
        return False
    if not args.flags & FORCE_BOOT:
        return True  # there is none: see _xml_to_start
    flags = DomainCall(dom).pack(flags=True)
    return Reader(await admin.call(Proc.HAS_MANAGED_SAVE_IMAGE, flags)).i32() == 0


async def _restore(call: Call, admin: Upstream, dom: Domain) -> Reply:
    """Starts a domain without a disk of ours from its saved state."""
    flags = dom.write(Writer()).u32(XML_SECURE)
    xml = read_string(await admin.call(Proc.MANAGED_SAVE_GET_XML_DESC, bytes(flags)))
    fitted = await emptycontrollers.fit(call.services, xml)
    if fitted.xml is not None:
        writer = dom.write(Writer())
        writer.optional(fitted.xml, writer.string).u32(0)
        await admin.call(Proc.MANAGED_SAVE_DEFINE_XML, bytes(writer))
    return await begun(call.services, fitted.made, dom.uuid, call.forward())


async def startable(
    call: Call, plan: Plan | None, xml: str | None, rights: tuple[str, ...]
) -> tuple[Plan, bytes] | None:
    """Returns what to prepare for the domain in `xml`, and its UUID, if the client has `rights`.

    None: it is libvirtd's alone, which says why not.
    """
    if plan is None or xml is None:
        return None
    name, uuid = await call.parse(lambda: identity_of(xml), xml)
    if uuid is None or not await call.caller.may(rights, name or "", str(UUID(bytes=uuid))):
        return None
    return plan, uuid


async def _xml_to_start(admin: Upstream, dom: Domain, *, force: bool) -> tuple[str, bool]:
    """Returns what libvirtd will start: a saved state's definition (True) if there is one.

    `force` is the client's wish that the saved state be thrown away.
    """
    if not force:
        with suppress(UpstreamError):
            payload = DomainCall(dom).pack(flags=True)
            return read_string(await admin.call(Proc.MANAGED_SAVE_GET_XML_DESC, payload)), True
    return await admin.xml(dom, XML_INACTIVE), False


@asynccontextmanager
async def prepared(
    call: Call, plan: Plan, uuid: bytes, *, saved: bool = False
) -> AsyncIterator[Attempt]:
    """Has all of `plan` in the target for the body, which starts the domain.

    The caller holds the domain's lock, and has read under it what the plan is made of. Volumes that
    never existed are made; not for a `saved` guest, which has seen its disks.

    Raises:
        Refused: a volume is lost or in use, or there is no target; nothing is left behind, but
            volumes that were made stay.
    """
    services = call.services
    if await is_active(await services.admin(), uuid):
        yield Attempt(plan)  # libvirtd refuses to start it again
        return
    copies.check_resolved(services, uuid)
    known = await records.known(services.hook, plan.controller)
    if plan.incoming or of_plan(plan):
        # What an earlier attempt left has images open, which would have to be opened anew.
        await services.target.release_idle(plan.controller)
    async with images.opened(call, plan, of_plan(plan)):
        plan = await services.target.find_volumes(plan, known)
        for lun in plan.luns:
            if lun.volume.source is not None:
                await check_free(call, plan, lun, await services.target.image(plan, lun))
            elif lun.uuid is not None:
                await check_free(call, plan, lun, await services.target.volume(lun.uuid))
        mib = 0 if saved else services.hook.create_missing_mib
        attempt = Attempt(await services.target.make_volumes(plan, mib))
        await services.target.ensure(attempt.plan)
    try:
        yield attempt
    finally:
        if not attempt.started:
            await release_failed(services, plan.controller, uuid)


async def begun(
    services: Services, made: Plan | None, uuid: bytes, starting: Awaitable[Reply]
) -> Reply:
    """Returns libvirtd's reply to `starting` a domain whose lock is held.

    If it does not start, the controller that was `made` for it is taken away again.
    """
    started = False
    try:
        reply = await starting
        started = reply.ok
    finally:
        if made is not None and not started:
            await release_failed(services, made.controller, uuid)
    return reply


async def release_failed(services: Services, controller: str, uuid: bytes) -> None:
    """Takes away the controller of a domain that did not start, once its QEMU has let go.

    Where libvirtd or the target does not answer, it stays for the reconcile loop.
    """
    with suppress(GatewayError):
        for _ in range(LEAVE_TRIES):
            if await is_active(await services.admin(), uuid):
                return
            if await services.target.release_idle(controller) != "busy":
                services.image_grants.forget(controller)
                return
            await asyncio.sleep(LEAVE_S)


async def release_images(services: Services, uuid: bytes, plan: Plan | None) -> None:
    """Has the target let go of what a domain (its UUID) had over the network and QEMU is to have.

    The domain's lock is held, and what it starts with is `plan`. It may start before the reconcile
    loop has seen that it ended. A target that does not answer keeps no such domain from starting.

    Raises:
        Refused: its last QEMU is connected still.
    """
    controller = controller_name(str(UUID(bytes=uuid)))
    kept = {lun.bdev_name for lun in of_plan(plan)} if plan is not None else set()
    if not services.image_grants.of(controller) - kept or copies.unresolved(services, uuid):
        return
    for _ in range(LEAVE_TRIES):
        try:
            if await is_active(await services.admin(), uuid):
                return  # libvirtd refuses to start it again
            if await services.target.release_idle(controller) != "busy":
                services.image_grants.forget(controller)
                return
        except GatewayError:
            return
        await asyncio.sleep(LEAVE_S)
    raise Refused(
        Refusal.NOT_POSSIBLE_NOW,
        f"the QEMU that domain {UUID(bytes=uuid)} had is still connected to the target, which has"
        " images open for it that are QEMU's own from this start on: start it again when that"
        " process has ended",
    )


async def check_free(call: Call, plan: Plan, lun: LunPlan, volume: Lvol) -> None:
    """Checks that no other domain holds a volume that runs or starts, unless both share it.

    A controller of a domain that does neither is a leftover and is deleted.

    Raises:
        Refused: names the domain that has it.
    """
    for holder in await call.services.target.holders(volume.uuid, besides=plan.controller):
        name = await _taken_by(call.services, holder, lun, volume)
        if name is not None:
            raise Refused(
                Refusal.VOLUME_IN_USE,
                f"volume {volume.path} is in use by domain {name}: detach it there first, "
                "or give the disk <shareable/> in both domains",
            )


async def _taken_by(services: Services, holder: str, lun: LunPlan, volume: Lvol) -> str | None:
    """Returns the name of the domain that keeps a volume from being a LUN; None if it does not.

    `holder` is the UUID in the name of a controller that has the volume.
    """
    admin = await services.admin()
    path = volume.path if volume.image is None else lun.volume.alias
    try:
        dom = await admin.lookup(UUID(holder).bytes)
    except (UpstreamError, ValueError):
        return holder  # not a domain of this libvirtd
    for _ in range(LEAVE_TRIES):
        if lun.shareable and await _shares(services, admin, dom, path):
            return None
        if not services.is_locked(dom.uuid):
            break
        # It is just being started or stopped. Its lock is not waited for: it may wait for ours.
        await asyncio.sleep(LEAVE_S)
    else:
        return dom.name
    async with services.domain_lock(dom.uuid):  # which is free, so that this does not wait
        if await is_active(admin, dom.uuid):
            return dom.name if await _keeps(services, admin, dom, volume) else None
        await copies.resolve(services, dom.uuid)
        if copies.unresolved(services, dom.uuid):
            return dom.name
        busy = await services.target.release_idle(controller_name(holder)) == "busy"
        return dom.name if busy else None


async def _keeps(services: Services, admin: Upstream, dom: Domain, volume: Lvol) -> bool:
    """Whether a running domain has a volume, and not what was left of a disk that it let go."""
    plan = translate.plan(await admin.xml(dom, 0))
    if plan is None or not await services.target.release_leftovers(plan):
        return True
    return dom.uuid_text in await services.target.holders(volume.uuid, besides="")


async def _shares(services: Services, admin: Upstream, dom: Domain, path: str) -> bool:
    """Whether a domain, running or not, has a volume as <shareable/>."""
    lun = translate.find(await admin.xml(dom, 0), path, services.settings)
    return lun is not None and lun.shareable
