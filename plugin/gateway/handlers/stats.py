"""CONNECT_GET_ALL_DOMAIN_STATS: our disks among block.N.*, the carrier left out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from plugin.gateway.call import Call, Reply
from plugin.gateway.errors import GatewayError
from plugin.gateway.known import NOTHING, Seen
from plugin.gateway.messages import Domain
from plugin.gateway.statistics import COUNT, Block, merged, records
from plugin.gateway.target import Usage
from pydataplane.volumes import Sizes

TURN = 16
"""Records after which other clients get their turn."""

LONG_BYTES = 65_536
"""Results longer than this are changed one after the other, for all clients: however many poll,
a change that is under way waits for one of them at a time."""


async def all_domains(call: Call) -> None:
    """Adds to each domain's record what its disks of ours did."""
    reply = await call.forward()
    payload = reply.payload
    if not reply.ok or COUNT not in payload:
        await call.respond(reply)
        return
    if len(payload) <= LONG_BYTES:
        await _complete(call, reply)
        return
    async with call.services.locks.hold("statistics"):
        await _complete(call, reply)


async def _complete(call: Call, reply: Reply) -> None:
    payload = reply.payload
    found = records(payload)
    known = call.services.known
    seen = [known.at_once(record.uuid) for record in found]
    missing = [nth for nth, item in enumerate(seen) if item is None]
    asked = (_seen(call, found[nth].domain(payload)) for nth in missing)
    for nth, item in zip(missing, await asyncio.gather(*asked), strict=True):
        seen[nth] = item
    disks = [item or NOTHING for item in seen]
    if not any(item.ours for item in disks):
        await call.respond(reply)
        return
    usages, sizes = await _numbers(call, disks)
    prefix = call.services.settings.path_prefix
    parts = [payload[:4]]
    for nth, (record, item) in enumerate(zip(found, disks, strict=True)):
        if nth % TURN == TURN - 1:
            await asyncio.sleep(0)
        if not item.ours:
            parts.append(payload[record.start : record.end])
            continue
        blocks = [
            Block(
                lun.dev,
                prefix + lun.volume.alias,
                usages.get(lun.bdev_name) if item.running else None,
                sizes.get(lun.bdev_name),
            )
            for lun in item.luns
        ]
        parts.append(merged(payload, record, item.carrier, blocks))
    await call.respond(reply, b"".join(parts))


async def _seen(call: Call, dom: Domain) -> Seen:
    """Returns what a domain has of ours, which the client may know: libvirtd listed it.

    One domain that goes in between must not spoil the others' numbers.
    """
    try:
        return await call.services.known.current(dom)
    except GatewayError:
        return NOTHING


async def _numbers(
    call: Call, disks: Sequence[Seen]
) -> tuple[Mapping[str, Usage], Mapping[str, Sizes]]:
    """Asks the target once for all; without one there are names alone, as libvirt does it."""
    target = call.services.target
    used = [lun.bdev_name for item in disks if item.running for lun in item.luns]
    names = [lun.bdev_name for item in disks for lun in item.luns]
    usages: Mapping[str, Usage] = {}
    sizes: Mapping[str, Sizes] = {}
    with suppress(GatewayError):
        if used:
            usages = await target.usage(used)
        if names:
            sizes = await target.sizes(names)
    return usages, sizes
