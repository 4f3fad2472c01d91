"""CONNECT_GET_ALL_DOMAIN_STATS: our disks among block.N.*, the carrier left out."""

from __future__ import annotations

import re
from dataclasses import dataclass

from plugin import translate
from plugin.errors import TranslateError
from plugin.gateway.call import Call
from plugin.gateway.domains import carrier_dev, is_running
from plugin.gateway.errors import GatewayError
from plugin.gateway.messages import STRING, UINT, ULLONG, StatsRecord, TypedParam
from plugin.gateway.target import Usage
from plugin.translate import LunPlan
from pydataplane.volumes import Volume

_BLOCK = re.compile(r"block\.(\d+)\.(.+)")
_COUNT = "block.count"


async def all_domains(call: Call) -> None:
    """Adds to each domain's record what its disks of ours did."""
    reply = await call.forward()
    if not reply.ok or _COUNT.encode() not in reply.payload:
        await call.respond(reply)
        return
    records = [await _completed(call, item) for item in StatsRecord.read_all(reply.payload)]
    await call.respond(reply, StatsRecord.pack_all(records))


async def _completed(call: Call, record: StatsRecord) -> StatsRecord:
    """Returns the record with our disks; unchanged if there are none or they cannot be asked for.

    One domain that stops in between, or a target that is down, must not spoil the others' numbers.
    """
    try:
        own = await call.session.own()
        if await own.metadata(record.dom, 0) is None:
            return record
        xml = await own.xml(record.dom, 0)
        plan = translate.plan(xml)
    except (GatewayError, TranslateError):
        return record
    luns = plan.luns if plan is not None else ()
    target = call.session.gateway.target
    usages: dict[str, Usage] = {}
    volumes: dict[str, Volume] = {}
    try:
        if luns and is_running(xml):
            usages = await target.usage([lun.bdev_name for lun in luns])
        volumes = {lun.bdev_name: await target.volume(lun.bdev_name) for lun in luns}
    except GatewayError:
        pass  # names alone, as libvirt does for a disk that cannot be read
    ours = [Block(lun, usages.get(lun.bdev_name), volumes.get(lun.bdev_name)) for lun in luns]
    prefix = call.session.gateway.settings.path_prefix
    return StatsRecord(record.dom, merged(record.params, carrier_dev(xml), ours, prefix))


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
