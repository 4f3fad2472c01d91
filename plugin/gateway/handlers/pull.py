"""Block pull: a volume is given all that it has of snapshots, while it is used.

libvirt's job of that name copies what lies below a file into it. The target does that by itself
(bdev_lvol_inflate); the job is the call to it, and goes on when the client has gone. It cannot be
stopped.
"""

from __future__ import annotations

import structlog

from plugin.gateway.blockjobs import BlockJob, Kind
from plugin.gateway.call import Call
from plugin.gateway.errors import GatewayError, Refused
from plugin.gateway.handlers import blockjobs
from plugin.gateway.handlers.block import check_shown
from plugin.gateway.messages import Domain
from plugin.gateway.services import Services
from plugin.gateway.xdr import Reader
from pydataplane.domain.errors import Refusal
from pydataplane.domain.translate import LunPlan

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
    lun = await blockjobs.disk_of(call, dom, disk)
    if lun is None:
        return
    if base is not None:
        raise Refused(
            Refusal.CANNOT_CHANGE,
            f"disk {lun.dev}: a virtlun volume gets all that it has of snapshots, not what is above"
            " one of them: leave the base out",
        )
    services = call.services
    services.block_jobs.check_free(dom, lun)
    await services.target.lvol(lun.bdev_name)
    await check_shown(call, dom, lun)
    services.block_jobs.check_free(dom, lun)  # nobody began one meanwhile
    path = services.settings.path_prefix + lun.volume.alias
    job = BlockJob(Kind.PULL, dom, lun.dev, path, lun.bdev_name)
    await blockjobs.carry_out(call, job, _inflated(services, lun))


async def _inflated(services: Services, lun: LunPlan) -> None:
    volume = await services.target.lvol(lun.bdev_name)
    target = await services.target.of_volume(volume.uuid)
    try:
        await target.inflate(volume)
    except GatewayError as error:
        _log.warning("block pull failed", volume=volume.path, error=str(error))
        raise
    _log.info("block pull done", volume=volume.path)
