"""GET_METADATA and SET_METADATA: ours is not for clients, neither to see nor to change.

But for two things: `virtlun domain prepare` sets the mark of a domain that has none of it yet, and
clients say which disks over the network are ours (pydataplane.domain.translate.networkchoice). The
definition follows what they say at once, as if it was defined anew; a guest keeps what it has.
"""

from __future__ import annotations

from uuid import UUID

import structlog

from plugin.gateway.call import Call, Reply
from plugin.gateway.domains import check_may_change, sides
from plugin.gateway.errors import Code, Refused
from plugin.gateway.events import is_our_own
from plugin.gateway.messages import Domain
from plugin.gateway.upstream import AFFECT_CONFIG, XML_INACTIVE, XML_SECURE, Upstream
from plugin.gateway.xdr import Reader
from pydataplane.domain import translate
from pydataplane.domain.names import NETWORK_NAMESPACE
from pydataplane.domain.translate import NAMESPACE, networkchoice

_NO_UUID = UUID(int=0)
"""For domains that libvirtd gave: they have a UUID."""

_log = structlog.get_logger(__name__)


async def get(call: Call) -> None:
    """{dom, type, URI or nothing, flags}."""
    reader = Reader(call.payload)
    Domain.read(reader)
    reader.i32()
    if is_our_own(reader.optional(reader.string)):
        raise Refused(Code.NO_DOMAIN_METADATA, "Requested metadata element is not present")
    await call.pass_on()


async def set_(call: Call) -> None:
    """{dom, type, XML or nothing, key or nothing, URI or nothing, flags}."""
    reader = Reader(call.payload)
    dom = Domain.read(reader)
    reader.i32()
    text, _, uri = (reader.optional(reader.string) for _ in range(3))
    if text is not None and (text, uri) == (translate.mark(dom.uuid_text), NAMESPACE):
        await _mark(call, dom, reader.u32())
        return
    if is_our_own(uri):
        raise Refused(
            Code.OPERATION_DENIED,
            f"domain {dom.name}: metadata of {uri} is virtlun's own: attach, update and detach "
            "disks change it",
        )
    if uri == NETWORK_NAMESPACE:
        await call.respond(await _choose(call, dom, text, reader.u32()))
        return
    await call.pass_on()


async def _mark(call: Call, dom: Domain, flags: int) -> None:
    """Lets libvirtd mark a persistent definition, which must not lose what it has of ours."""
    if flags != AFFECT_CONFIG:
        raise Refused(Code.INVALID_ARG, "the mark is one of the persistent definition: --config")
    async with call.services.domain_lock(dom.uuid):
        own = await call.caller.own()
        if await own.metadata(dom, AFFECT_CONFIG) is None:
            reply = await call.forward()
        else:  # it is marked, or has disks of ours; what needs no change needs no right to change
            await call.answer()
            return
    await call.respond(reply)


async def _choose(call: Call, dom: Domain, text: str | None, flags: int) -> Reply:
    """Has libvirtd keep which disks over the network are ours, and the definition follow.

    Where that changes whose a disk is, libvirtd gets both as one definition, and the call itself
    after that. Nothing has changed where either is refused. Where the gateway ends between the two,
    the same call completes it.

    Raises:
        TranslateError: `text` is not to be understood, or this host does not allow what it asks.
        UpstreamError: libvirtd refuses the definition.
    """
    services, own = call.services, await call.caller.own()
    await check_may_change(own, dom, flags)  # whoever may not is told that, and nothing else
    async with services.domain_lock(dom.uuid):
        admin = await services.admin()
        both = await sides(admin, dom, flags)
        follows = both.to_config and both.config is not None
        shown = await _definition(admin, dom) if follows else both.live or ""
        said = await call.parse(lambda: networkchoice.saying(shown, text), text or "")
        if both.to_live:
            await services.parse(lambda: networkchoice.check_allowed(said, services.settings))
        if not follows:
            return await call.forward()
        made = await services.define(said, new_uuid=_NO_UUID, current_xml=said)
        was, served = (networkchoice.served_in(xml) for xml in (shown, made.xml))
        if was == served:
            return await call.forward()
        await services.redefine(own, dom.uuid, made.xml)
        reply = await call.forward()
        if reply.ok:
            _log.info("a domain's disks over the network", domain=dom.name, served=served)
        else:  # for another reason than the change, which it may not stay without
            await services.redefine(admin, dom.uuid, shown)
    return reply


async def _definition(admin: Upstream, dom: Domain) -> str:
    """Returns libvirtd's definition, with its passwords: it is not shown to anybody."""
    return await admin.xml(dom, XML_INACTIVE | XML_SECURE)
