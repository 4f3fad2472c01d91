"""CONNECT_GET_ALL_DOMAIN_STATS about all domains; its reply is that of plugin.gateway.domstats.

A call that names domains passes unread, and only its reply is looked at.
"""

from __future__ import annotations

import asyncio

from plugin.gateway import libvirtdconf
from plugin.gateway.call import Call
from plugin.gateway.xdr import Reader

BYTES = 12
"""Arguments that name no domain: their number, the groups of statistics and the flags."""

_BLOCK = 1 << 5
"""VIR_DOMAIN_STATS_BLOCK; no group at all means each."""
_FILTERS = (1 << 14) - 1
"""virConnectListAllDomainsFlags, among the flags."""
_ACTIVE = 1


async def of_all(call: Call) -> None:
    """Asks the target while libvirtd puts its own statistics together."""
    stats = call.services.domain_stats
    reader = Reader(call.payload)
    reader.u32()
    groups, filters = reader.u32(), reader.u32() & _FILTERS
    # Who may see which domain is not known yet: where libvirtd decides that, it decides first.
    sees_all = call.caller.peer.uid == 0 or not libvirtdconf.judges_calls(
        call.services.config.libvirtd_conf
    )
    asks = sees_all and (not groups or groups & _BLOCK) and filters in (0, _ACTIVE)
    async with stats.round():
        ahead = asyncio.create_task(stats.ahead(running=filters == _ACTIVE)) if asks else None
        try:
            reply = await call.forward()
            shown = await stats.translated(reply.payload, ahead) if reply.ok else None
        finally:
            if ahead is not None:
                ahead.cancel()
    await call.respond(reply, shown)
