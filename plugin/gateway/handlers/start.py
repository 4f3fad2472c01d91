"""Starting a domain: its controller and LUNs exist before QEMU looks for them.

libvirt's `prepare` hook does the same where it is installed; both are safe to repeat. What this
makes is only what an authorised client has put into the domain's definition, and it is taken away
again if libvirtd refuses the start.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from uuid import UUID

from plugin import translate
from plugin.errors import Refusal
from plugin.gateway.call import Call
from plugin.gateway.errors import GatewayError, Refused, UpstreamError
from plugin.gateway.messages import DomainCall, read_string
from plugin.gateway.procs import Proc
from plugin.gateway.upstream import XML_INACTIVE, Upstream
from plugin.translate import LunPlan, Plan, controller_name
from pydataplane.volumes import Volume


@dataclass
class Attempt:
    """Whether the body of `prepared` started the domain."""

    started: bool = False


async def start(call: Call) -> None:
    """CREATE, CREATE_WITH_FLAGS and CREATE_WITH_FILES."""
    offset = 4 if call.header.with_fds else 0  # the number of descriptors comes first
    flags = call.header.procedure != Proc.CREATE
    args = DomainCall.read(call.payload[offset:], flags=flags)
    try:
        xml = await _xml_to_start(await call.session.own(), args)
    except GatewayError:
        await call.pass_on()  # libvirtd says why
        return
    plan = translate.plan(xml)
    if plan is None:
        await call.pass_on()
        return
    async with prepared(call, plan, args.dom.uuid) as attempt:
        reply = await call.forward()
        attempt.started = reply.ok
    await call.respond(reply)


async def _xml_to_start(own: Upstream, args: DomainCall) -> str:
    """Returns what libvirtd will start: the saved state's definition if there is one."""
    payload = DomainCall(args.dom).pack(flags=True)
    with suppress(UpstreamError):
        return read_string(await own.call(Proc.MANAGED_SAVE_GET_XML_DESC, payload))
    return await own.xml(args.dom, XML_INACTIVE)


@asynccontextmanager
async def prepared(call: Call, plan: Plan, uuid: bytes | None) -> AsyncIterator[Attempt]:
    """Holds the domain with all of `plan` in the target for the body, which starts the domain.

    Raises:
        Refused: a volume is missing or in use, or there is no target; nothing is left behind.
    """
    gateway = call.session.gateway
    async with gateway.locks.hold(f"domain:{uuid.hex() if uuid else plan.controller}"):
        attempt = Attempt()
        running = uuid is not None and await _is_active(await call.session.own(), uuid)
        if running:
            yield attempt  # libvirtd refuses to start it again
            return
        for lun in plan.luns:
            await check_free(call, plan, lun, await gateway.target.volume(lun.bdev_name))
        await gateway.target.ensure(plan)
        try:
            yield attempt
        finally:
            own = await call.session.own()
            if not attempt.started and not (uuid and await _is_active(own, uuid)):
                with suppress(GatewayError):
                    await gateway.target.release(plan.controller)


async def _is_active(own: Upstream, uuid: bytes) -> bool:
    try:
        return await own.active(await own.lookup(uuid))
    except GatewayError:
        return False


async def check_free(call: Call, plan: Plan, lun: LunPlan, volume: Volume) -> None:
    """Checks that no other running domain holds a volume, unless both say <shareable/>.

    A controller of a domain that does not run is a leftover and is deleted.

    Raises:
        Refused: names the domain that has it.
    """
    gateway = call.session.gateway
    for holder in await gateway.target.holders(volume.uuid, besides=plan.controller):
        admin = await gateway.admin()
        try:
            dom = await admin.lookup(UUID(holder).bytes)
            xml = await admin.xml(dom, 0) if await admin.active(dom) else None
        except (UpstreamError, ValueError):
            name = holder  # not a domain of this libvirtd
        else:
            if xml is None:
                await gateway.target.release(controller_name(holder))
                continue
            theirs = translate.find(xml, volume.path, gateway.settings)
            if lun.shareable and theirs is not None and theirs.shareable:
                continue
            name = dom.name
        raise Refused(
            Refusal.VOLUME_IN_USE,
            f"volume {volume.path} is in use by domain {name}: detach it there first, "
            "or give the disk <shareable/> in both domains",
        )
