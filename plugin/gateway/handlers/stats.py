"""CONNECT_GET_ALL_DOMAIN_STATS: our disks among block.N.*, the carrier left out."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from dataclasses import dataclass

from plugin.gateway.call import Call
from plugin.gateway.errors import GatewayError
from plugin.gateway.known import NOTHING, Seen
from plugin.gateway.messages import STRING, UINT, ULLONG, StatsRecord, TypedParam
from plugin.gateway.target import Usage
from pydataplane.domain.translate import LunPlan
from pydataplane.volumes import Volume

_BLOCK = re.compile(r"block\.(\d+)\.(.+)")
_COUNT = "block.count"


async def all_domains(call: Call) -> None:
    """Adds to each domain's record what its disks of ours did."""
    reply = await call.forward()
    if not reply.ok or _COUNT.encode() not in reply.payload:
        await call.respond(reply)
        return
    records = StatsRecord.read_all(reply.payload)
    found = await asyncio.gather(*(_seen(call, item) for item in records))
    numbers = await _numbers(call, [disks for disks in found if disks.ours])
    prefix = call.services.settings.path_prefix
    completed = [
        StatsRecord(item.dom, merged(item.params, disks.carrier, numbers.blocks(disks), prefix))
        if disks.ours
        else item
        for item, disks in zip(records, found, strict=True)
    ]
    await call.respond(reply, StatsRecord.pack_all(completed))


async def _seen(call: Call, record: StatsRecord) -> Seen:
    """Returns what a domain has of ours, which the client may know: libvirtd listed it.

    One domain that goes in between must not spoil the others' numbers.
    """
    try:
        return await call.services.known.current(record.dom)
    except GatewayError:
        return NOTHING


@dataclass(frozen=True)
class Numbers:
    """What the target knows of the volumes, by their bdevs' names."""

    usages: dict[str, Usage]
    volumes: dict[str, Volume]

    def blocks(self, disks: Seen) -> list[Block]:
        """Returns a domain's disks with their numbers; those of I/O only while it runs."""
        return [
            Block(
                lun,
                self.usages.get(lun.bdev_name) if disks.running else None,
                self.volumes.get(lun.bdev_name),
            )
            for lun in disks.luns
        ]


async def _numbers(call: Call, found: list[Seen]) -> Numbers:
    """Asks the target once for all; without one there are names alone, as libvirt does it."""
    names = [lun.bdev_name for disks in found for lun in disks.luns]
    target = call.services.target
    numbers = Numbers({}, {})
    with suppress(GatewayError):
        if names:
            numbers = Numbers(await target.usage(names), await target.volumes(names))
    return numbers


@dataclass(frozen=True)
class Block:
    """One disk of ours, with what could be learnt of it."""

    lun: LunPlan
    usage: Usage | None
    volume: Volume | None

    def params(self, number: int, path_prefix: str) -> list[TypedParam]:
        """Returns the parameters block.`number`.*, in libvirt's order."""
        found = [
            TypedParam("name", STRING, self.lun.dev),
            TypedParam("path", STRING, path_prefix + self.lun.volume.alias),
        ]
        if self.usage is not None:
            values = {
                "rd.reqs": self.usage.reads,
                "rd.bytes": self.usage.read_bytes,
                "rd.times": self.usage.read_ns,
                "wr.reqs": self.usage.writes,
                "wr.bytes": self.usage.written_bytes,
                "wr.times": self.usage.write_ns,
                "fl.reqs": self.usage.flushes,
                "fl.times": self.usage.flush_ns,
            }
            found += [TypedParam(name, ULLONG, value) for name, value in values.items()]
        if self.volume is not None:
            found += [
                TypedParam("allocation", ULLONG, self.volume.allocated),
                TypedParam("capacity", ULLONG, self.volume.size),
                TypedParam("physical", ULLONG, self.volume.allocated),
            ]
        return [TypedParam(f"block.{number}.{p.field}", p.kind, p.value) for p in found]


def merged(
    params: list[TypedParam], carrier: str | None, ours: list[Block], path_prefix: str
) -> list[TypedParam]:
    """Returns a domain's parameters without the carrier's block and with ours at the end."""
    if not any(param.field == _COUNT for param in params):
        return params
    blocks: dict[int, list[tuple[str, TypedParam]]] = {}
    others_before: list[TypedParam] = []
    others_after: list[TypedParam] = []
    for param in params:
        found = _BLOCK.fullmatch(param.field)
        if found:
            blocks.setdefault(int(found[1]), []).append((found[2], param))
        elif param.field != _COUNT:
            (others_after if blocks else others_before).append(param)
    kept = [
        block
        for _, block in sorted(blocks.items())
        if not any(name == "name" and param.value == carrier for name, param in block)
    ]
    result = [*others_before, TypedParam(_COUNT, UINT, len(kept) + len(ours))]
    for number, block in enumerate(kept):
        result += [
            TypedParam(f"block.{number}.{name}", param.kind, param.value) for name, param in block
        ]
    for number, item in enumerate(ours, len(kept)):
        result += item.params(number, path_prefix)
    return result + others_after
