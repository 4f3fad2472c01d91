"""SET_BLOCK_THRESHOLD on our disks: see plugin.gateway.thresholds."""

from __future__ import annotations

import re

import structlog

from plugin.gateway.call import Call, Reply
from plugin.gateway.domains import check_may_change
from plugin.gateway.errors import Code, Refused
from plugin.gateway.handlers.block import check_shown, find
from plugin.gateway.messages import DiskNumberCall
from plugin.gateway.thresholds import Threshold
from plugin.gateway.upstream import AFFECT_LIVE
from pydataplane.domain.errors import Refusal
from pydataplane.domain.translate import LunPlan
from pydataplane.lvols import Lvol

_log = structlog.get_logger(__name__)

_INDEXED = re.compile(r"(?P<disk>.*)\[(?P<index>[0-9]{1,9})\]")
"""A disk, and which image of its chain."""
_TOP = 1
"""What libvirt calls the only image of a disk; 0 is the one on top, whichever it is."""


async def set_(call: Call) -> None:
    """SET_BLOCK_THRESHOLD: has an event come once when more is allocated; 0 takes that back."""
    args = DiskNumberCall.read(call.payload)
    # Nobody attaches another disk in the place of this one meanwhile.
    async with call.services.domain_lock(args.dom.uuid):
        answer = await _set(call, args)
    await call.give(answer)


async def _set(call: Call, args: DiskNumberCall) -> Reply | None:
    """Sets one of a disk of ours; returns libvirtd's reply where that is the answer."""
    services = call.services
    indexed = _INDEXED.fullmatch(args.disk)
    disk = args.disk if indexed is None else indexed["disk"]
    lun = await find(call, args.dom, disk, judged_later=True)
    if lun is None:
        return await call.forward()
    # It needs what this needs: domain:write, and a domain that runs.
    await check_may_change(await call.caller.own(), args.dom, AFFECT_LIVE)
    if args.flags:
        raise Refused(Code.INVALID_ARG, f"unsupported flags (0x{args.flags:x})")
    name = lun.dev if indexed is None else f"{lun.dev}[{int(indexed['index'])}]"
    if indexed is not None and int(indexed["index"]) > _TOP:
        raise Refused(
            Code.INVALID_ARG,
            f"{name}: a virtlun volume is one image: name it {lun.dev}, or {lun.dev}[{_TOP}]",
        )
    if not args.number:
        services.thresholds.forget(args.dom.uuid, lun.dev)
        return None
    _check_thin(lun, await check_shown(call, args.dom, lun))
    dom = await (await services.admin()).lookup(args.dom.uuid)
    services.thresholds.set(dom, lun.dev, Threshold(args.number, name))
    _log.info("threshold set", domain=dom.name, dev=lun.dev, allocated=args.number)
    return None


def _check_thin(lun: LunPlan, volume: Lvol) -> None:
    """Refuses what allocates nothing as it is written to, or not where the target knows.

    Raises:
        Refused: says which.
    """
    if volume.image is not None:
        raise Refused(
            Refusal.CANNOT_CHANGE,
            f"disk {lun.dev}: what {lun.volume.alias} has allocated its server alone knows: write"
            " thresholds are for thin volumes of lvstores",
        )
    if not volume.thin:
        raise Refused(
            Refusal.CANNOT_CHANGE,
            f"disk {lun.dev}: volume {volume.path} is thick, with all of its size allocated: write"
            " thresholds are for thin volumes",
        )
