"""Clients register for events of pools; libvirtd's own come from libvirtd."""

from __future__ import annotations

from plugin.gateway.call import Call
from plugin.gateway.errors import Code, Refused
from plugin.gateway.handlers.storage import check_rights, pool_of
from plugin.gateway.storage.events import LIFECYCLE, REFRESH
from plugin.gateway.storage.refs import StoragePool, pack_count
from plugin.gateway.xdr import Reader


async def register(call: Call) -> None:
    """CONNECT_STORAGE_POOL_EVENT_REGISTER_ANY: {eventID, pool or none}."""
    args = Reader(call.payload)
    event = args.i32()
    ref = args.optional(lambda: StoragePool.read(args))
    subscriptions = call.subscriptions.pools
    pool = await pool_of(call, ref) if ref is not None else None
    if pool is not None:
        await check_rights(call, pool, "getattr")
        if event not in (LIFECYCLE, REFRESH):
            raise Refused(Code.INVALID_ARG, f"unsupported storage pool event ID {event}")
        await call.answer(pack_count(subscriptions.register(event, pool.ref)))
        return
    reply = await call.forward()
    if reply.ok and ref is None:
        subscriptions.registered(call.payload, reply.payload)
    await call.respond(reply)


async def deregister(call: Call) -> None:
    """CONNECT_STORAGE_POOL_EVENT_DEREGISTER_ANY: {callbackID}."""
    callback, pools = Reader(call.payload).i32(), call.subscriptions.pools
    reply = None if pools.is_own(callback) else await call.forward()
    if reply is None or reply.ok:
        pools.deregistered(callback)
    await call.give(reply)
