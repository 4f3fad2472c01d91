"""GET_METADATA and SET_METADATA: ours is not for clients, neither to see nor to change."""

from __future__ import annotations

from plugin.gateway.call import Call
from plugin.gateway.errors import Code, Refused
from plugin.gateway.events import OUR_NAMESPACES
from plugin.gateway.messages import Domain
from plugin.gateway.xdr import Reader


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
    uri = [reader.optional(reader.string) for _ in range(3)][2]
    if uri is not None and uri.startswith(OUR_NAMESPACES):
        raise Refused(
            Code.OPERATION_DENIED,
            f"domain {dom.name}: metadata of {uri} is virtlun's own: attach, update and detach "
            "disks change it",
        )
    await call.pass_on()
