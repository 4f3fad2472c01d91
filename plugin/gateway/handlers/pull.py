"""Block pull: a volume is given all that it has of snapshots, while it is used.

libvirt's job of that name copies what lies below a file into it. The target does that by itself
(bdev_lvol_inflate); the job is the call to it, and goes on when the client has gone. It cannot be
stopped, and of a gateway that stops there is no job any more, while the target carries it through.
"""

from __future__ import annotations

import asyncio

import structlog

from plugin.gateway.call import Call, Reply
from plugin.gateway.errors import Code, GatewayError, Refused, UpstreamError
from plugin.gateway.events import PullEvent
from plugin.gateway.handlers.block import find
from plugin.gateway.messages import Domain
from plugin.gateway.services import Services
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain.errors import Refusal
from pydataplane.domain.translate import LunPlan

PULL = 1
"""VIR_DOMAIN_BLOCK_JOB_TYPE_PULL."""

AT_ONCE_S = 1.0
"""How long a client waits for what may refuse the job, such as a lack of room, seconds."""

_log = structlog.get_logger(__name__)


async def pull(call: Call) -> None:
    """BLOCK_PULL {dom, disk, bandwidth, flags}."""
    reader = Reader(call.payload)
    dom, disk = Domain.read(reader), reader.string()
    await begin(call, dom, disk, base=None)


async def begin(call: Call, dom: Domain, disk: str, *, base: str | None) -> None:
    """Begins the job for a disk of ours, unless there is nothing to pull; others pass.

    Raises:
        GatewayError: it cannot be.
    """
    lun = await find(call, dom, disk, judged_later=True) if disk else None
    if lun is None:
        await call.pass_on()
        return
    refusal = await _judged(call)
    if refusal is not None:
        await call.respond(refusal)
        return
    if base is not None:
        raise Refused(
            Refusal.CANNOT_CHANGE,
            f"disk {lun.dev}: a virtlun volume gets all that it has of snapshots, not what is above"
            " one of them: leave the base out",
        )
    services = call.services
    key = (dom.uuid, lun.dev)
    if key in services.pulls:
        raise Refused(Code.OPERATION_UNSUPPORTED, f"disk '{lun.dev}' already in active block job")
    task = asyncio.create_task(_inflated(services, lun))
    services.pulls[key] = task
    task.add_done_callback(lambda _: services.pulls.pop(key, None))
    done, _ = await asyncio.wait({task}, timeout=AT_ONCE_S)
    if done and (error := task.exception()) is not None:
        raise error
    await call.answer()
    task.add_done_callback(lambda done: _announce(services, dom, lun, done))


def _announce(services: Services, dom: Domain, lun: LunPlan, done: asyncio.Task[None]) -> None:
    """Tells clients of the job's end; those who began it wait for that."""
    path = services.settings.path_prefix + lun.volume.alias
    failed = done.cancelled() or done.exception() is not None
    services.announce(PullEvent(dom, path, lun.dev, failed))


async def _judged(call: Call) -> Reply | None:
    """Has libvirtd judge the call, which then finds that it does not know the disk."""
    reply = await call.forward()
    if reply.ok or UpstreamError(reply.payload).code != Code.INVALID_ARG:
        return reply
    return None


async def _inflated(services: Services, lun: LunPlan) -> None:
    volume = await services.target.volume(lun.bdev_name)
    target = await services.target.of_volume(volume.uuid)
    try:
        await target.inflate(volume)
    except GatewayError as error:
        _log.warning("block pull failed", volume=volume.path, error=str(error))
        raise
    _log.info("block pull done", volume=volume.path)


async def progress(services: Services, dom: Domain, lun: LunPlan) -> bytes:
    """Returns the result of GET_BLOCK_JOB_INFO for a disk of ours: found, type, speed, cur, end.

    The numbers are bytes of the volume: what it has of its own, and its size.
    """
    writer = Writer()
    if (dom.uuid, lun.dev) not in services.pulls:
        return bytes(writer.i32(0).i32(0).u64(0).u64(0).u64(0))
    sizes = (await services.target.sizes([lun.bdev_name])).get(lun.bdev_name)
    have, size = (sizes.allocated, sizes.size) if sizes is not None else (0, 1)
    return bytes(writer.i32(1).i32(PULL).u64(0).u64(min(have, size - 1)).u64(size))
