"""Block commit: snapshots of a volume are merged upwards, while the volume is used.

libvirt's job of that name writes what a file has into the one below it, and drops the former. A
volume keeps its name whatever lies below it: so the snapshots go, and what lies above gets what it
needs of them. A commit of the disk itself (--active) waits for a client's word first, as libvirt's.
"""

from __future__ import annotations

from plugin.gateway import runningbackups
from plugin.gateway.blockjobs import BlockJob, Kind, Status
from plugin.gateway.call import Call
from plugin.gateway.errors import Code, Refused
from plugin.gateway.handlers import blockjobs
from plugin.gateway.handlers.block import check_shown
from plugin.gateway.lvolchain import Range
from plugin.gateway.messages import Domain
from plugin.gateway.services import Services
from plugin.gateway.xdr import Reader
from pydataplane.domain.translate import LunPlan

SHALLOW, DELETE, ACTIVE, RELATIVE, BANDWIDTH_BYTES = (1 << bit for bit in range(5))
"""virDomainBlockCommitFlags."""

FLAGS = 2 * BANDWIDTH_BYTES - 1


async def commit(call: Call) -> None:
    """BLOCK_COMMIT {dom, disk, base, top, bandwidth, flags}."""
    reader = Reader(call.payload)
    dom, disk = Domain.read(reader), reader.string()
    base, top = reader.optional(reader.string), reader.optional(reader.string)
    reader.u64()  # of the speed there is no limit
    flags = reader.u32()
    lun = await blockjobs.disk_of(call, dom, disk)
    if lun is None:
        return
    services = call.services
    prefix = services.settings.path_prefix
    path = prefix + lun.volume.alias
    active = top in (None, lun.dev, path)
    _check_flags(lun.dev, top, flags, active=active)
    await _check_possible(services, dom, lun)
    await services.target.lvol(lun.bdev_name)
    target = await services.target.of_volume((await check_shown(call, dom, lun)).uuid)
    wanted = Range(None if active else top, base, shallow=bool(flags & SHALLOW))
    going = await target.merged_by(lun.bdev_name, wanted, prefix)
    kind = Kind.ACTIVE_COMMIT if active else Kind.COMMIT
    job = BlockJob(kind, dom, lun.dev, path, lun.bdev_name, tuple(going))
    services.block_jobs.check_free(dom, lun)  # nobody began one meanwhile
    if not active:
        await blockjobs.carry_out(call, job, blockjobs.merged(services, job))
        return
    services.block_jobs.begin(job)
    await call.answer()
    services.block_jobs.tell(job, Status.READY)


def _check_flags(dev: str, top: str | None, flags: int, *, active: bool) -> None:
    """Raises Refused for flags that are unknown, or do not fit what is to be committed."""
    unknown = flags & ~FLAGS
    if unknown:
        raise Refused(Code.INVALID_ARG, f"unsupported flags (0x{unknown:x})")
    if active and not flags & ACTIVE:
        raise Refused(Code.INVALID_ARG, f"commit of '{dev}' active layer requires active flag")
    if not active and flags & ACTIVE:
        raise Refused(Code.INVALID_ARG, f"active commit requested but '{top}' is not active")


async def _check_possible(services: Services, dom: Domain, lun: LunPlan) -> None:
    """Raises Refused if the domain is off, or has another job in the way."""
    if not (await services.domain_cache.current(dom)).running:
        raise Refused(Code.OPERATION_INVALID, "domain is not running")
    services.block_jobs.check_free(dom, lun)
    if runningbackups.job_of(services, dom) is not None:
        raise Refused(
            Code.OPERATION_UNSUPPORTED,
            f"domain '{dom.name}' has a backup under way: wait for its end, or end it"
            f" (`virsh domjobabort {dom.name}`)",
        )
