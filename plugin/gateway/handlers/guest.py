"""GET_FSINFO and GET_GUEST_INFO: file systems are on the client's disks, not on what carries them.

libvirtd judges the client and asks the guest's agent. A guest with one disk of ours needs no more.
Of others the gateway asks the agent itself, as the client; a client that may not do that is shown
no name of a disk of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from plugin.gateway import guestdisks
from plugin.gateway.call import Call
from plugin.gateway.errors import GatewayError
from plugin.gateway.guestdisks import Names
from plugin.gateway.messages import Domain
from plugin.gateway.xdr import Reader

AGENT_S = 5
"""How long the guest's agent may take for an answer, seconds; libvirtd gives it as long."""


async def filesystems(call: Call) -> None:
    """GET_FSINFO: {dom, flags}."""
    await _complete(call, guestdisks.filesystems, all_disks=False)


async def info(call: Call) -> None:
    """GET_GUEST_INFO: {dom, types, flags}."""
    await _complete(call, guestdisks.info, all_disks=True)


async def _complete(
    call: Call, change: Callable[[bytes, Names], bytes], *, all_disks: bool
) -> None:
    """Answers with libvirtd's result in which `change` has put the client's disks."""
    reply = await call.forward()
    payload = reply.payload
    if reply.ok:
        names = await _names(call, payload, all_disks=all_disks)
        if names is not None:
            payload = await call.services.parse(partial(change, payload, names))
    await call.respond(reply, payload)


async def _names(call: Call, payload: bytes, *, all_disks: bool) -> Names | None:
    """Returns what is known of the guest's disks; None if the carrier is not named."""
    dom = Domain.read(Reader(call.payload))
    try:
        seen = await call.services.domain_cache.current(dom)
    except GatewayError:
        return None  # gone meanwhile
    if seen.carrier is None or seen.carrier.encode() not in payload:
        return None
    # A virtio-blk disk libvirtd finds by itself, under the client's own name for it.
    luns = [lun for lun in seen.luns if lun.front == "scsi"]
    devs = {lun.target: lun.dev for lun in luns}
    naas = {naa: lun.dev for lun in luns if (naa := guestdisks.naa_of(lun)) is not None}
    names = Names(seen.carrier, devs, naas=naas)
    if len(devs) > 1:
        parse = call.services.parse
        with suppress(GatewayError):  # it may not, or the agent does not answer any more
            own = await call.caller.own()
            text = await own.ask_agent(dom, guestdisks.ASK_FILESYSTEMS, AGENT_S)
            names = replace(names, below=await parse(partial(guestdisks.disks_below, text)))
            if all_disks and b"disk." in payload:
                text = await own.ask_agent(dom, guestdisks.ASK_DISKS, AGENT_S)
                names = replace(names, disks=await parse(partial(guestdisks.disks, text)))
    return names
