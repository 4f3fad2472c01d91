"""GET_METADATA and SET_METADATA: ours is not for clients, neither to see nor to change.

But for one thing: `virtlun domain prepare` sets the mark of a domain that has none of it yet.
"""

from __future__ import annotations

from plugin.gateway.call import Call
from plugin.gateway.errors import Code, Refused
from plugin.gateway.events import OUR_NAMESPACES
from plugin.gateway.messages import Domain
from plugin.gateway.upstream import AFFECT_CONFIG
from plugin.gateway.xdr import Reader
from pydataplane.domain import translate
from pydataplane.domain.translate import NAMESPACE


async def get(call: Call) -> None:
    """{dom, type, URI or nothing, flags}."""
    reader = Reader(call.payload)
    Domain.read(reader)
    reader.i32()
    uri = reader.optional(reader.string)
    if uri is not None and uri.startswith(OUR_NAMESPACES):
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
    if uri is not None and uri.startswith(OUR_NAMESPACES):
        raise Refused(
            Code.OPERATION_DENIED,
            f"domain {dom.name}: metadata of {uri} is virtlun's own: attach, update and detach "
            "disks change it",
        )
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
