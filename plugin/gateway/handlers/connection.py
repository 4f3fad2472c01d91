"""Calls about the connection itself: identity and event registrations."""

from __future__ import annotations

from plugin.gateway.call import Call
from plugin.gateway.errors import Code, Refused
from plugin.gateway.xdr import Reader


async def set_identity(call: Call) -> None:
    """CONNECT_SET_IDENTITY: for root only, as other libvirt daemons call it for their clients.

    libvirtd would take it from anybody on its read-write socket; from a client whose identity we
    have just handed on, that would be a way to another's rights.
    """
    if call.caller.peer.uid != 0:
        raise Refused(Code.OPERATION_DENIED, "only root may act under another identity")
    reply = await call.forward()
    if reply.ok:
        await call.caller.adopt_identity(call.payload)
    await call.respond(reply)


async def register(call: Call) -> None:
    """CONNECT_DOMAIN_EVENT_CALLBACK_REGISTER_ANY."""
    reply = await call.forward()
    if reply.ok:
        call.subscriptions.registered(call.payload, reply.payload)
    await call.respond(reply)


async def deregister(call: Call) -> None:
    """CONNECT_DOMAIN_EVENT_CALLBACK_DEREGISTER_ANY."""
    reply = await call.forward()
    if reply.ok:
        call.subscriptions.deregistered(call.payload)
    await call.respond(reply)


async def register_legacy(call: Call) -> None:
    """CONNECT_DOMAIN_EVENT_REGISTER_ANY."""
    reply = await call.forward()
    if reply.ok:
        call.subscriptions.legacy.add(Reader(call.payload).i32())
    await call.respond(reply)


async def deregister_legacy(call: Call) -> None:
    """CONNECT_DOMAIN_EVENT_DEREGISTER_ANY."""
    reply = await call.forward()
    if reply.ok:
        call.subscriptions.legacy.discard(Reader(call.payload).i32())
    await call.respond(reply)
