"""A domain's job, where it is a backup of disks of ours: GET_JOB_INFO, GET_JOB_STATS, ABORT_JOB.

libvirtd answers about every other one.
"""

from __future__ import annotations

from plugin.gateway import polkit, runningbackups
from plugin.gateway.backup.progress import Progress
from plugin.gateway.call import Call
from plugin.gateway.errors import Code, Refused
from plugin.gateway.events import job_params
from plugin.gateway.messages import Domain, DomainCall, pack_params
from plugin.gateway.xdr import Reader, Writer

COMPLETED, KEEP_COMPLETED = 1, 2
"""virDomainGetJobStatsFlags."""


async def info(call: Call) -> None:
    """GET_JOB_INFO: {dom}; the result is virDomainJobInfo."""
    dom = Domain.read(Reader(call.payload))
    progress = await _of(call, dom)
    if progress is None:
        await call.pass_on()
        return
    left = progress.total - progress.done
    writer = Writer().i32(progress.status).u64(int(progress.elapsed_s * 1000)).u64(0)
    for value in (
        progress.total,
        progress.done,
        left,
        0,
        0,
        0,
        progress.total,
        progress.done,
        left,
    ):
        writer.u64(value)
    await call.answer(bytes(writer))


async def stats(call: Call) -> None:
    """GET_JOB_STATS: {dom, flags}."""
    args = DomainCall.read(call.payload, flags=True)
    ended = call.services.ended_backups
    if args.flags & COMPLETED:
        progress = ended.get(args.dom.uuid)
        if progress is None or args.dom.uuid in call.services.backups:
            await call.pass_on()
            return
        await call.caller.check_may_read(args.dom)
        if not args.flags & KEEP_COMPLETED:
            ended.pop(args.dom.uuid, None)  # somebody else may have asked meanwhile
    else:
        found = await _of(call, args.dom)
        if found is None:
            await call.pass_on()
            return
        progress = found
    await call.answer(bytes(Writer().i32(progress.status)) + pack_params(job_params(progress)))


async def abort(call: Call) -> None:
    """ABORT_JOB: {dom}, and ABORT_JOB_FLAGS: {dom, flags}."""
    dom = Domain.read(Reader(call.payload))
    backup = runningbackups.job_of(call.services, dom)
    if backup is None:
        await call.pass_on()
        return
    if not await call.caller.may((polkit.WRITE,), dom.name, dom.uuid_text):
        raise Refused(Code.ACCESS_DENIED, "access denied")
    backup.job.abort()
    await backup.ended()
    await call.answer()


async def _of(call: Call, dom: Domain) -> Progress | None:
    """Returns how far a backup of disks of ours is; None if there is none."""
    backup = runningbackups.job_of(call.services, dom)
    if backup is None:
        return None
    await call.caller.check_may_read(dom)
    return await backup.job.progress()
