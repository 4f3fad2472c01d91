"""Calls about block jobs of disks of ours: how far one is, its end, its speed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from plugin.gateway import copies
from plugin.gateway.blockjobs import BlockJob, Kind, Status
from plugin.gateway.call import Call
from plugin.gateway.errors import Code, Refused
from plugin.gateway.handlers.block import find, is_unable
from plugin.gateway.messages import Domain
from plugin.gateway.services import Services
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain.errors import Refusal
from pydataplane.domain.translate import LunPlan

INFO_BYTES = 1
"""VIR_DOMAIN_BLOCK_JOB_INFO_BANDWIDTH_BYTES."""

MIB = 1 << 20

PIVOT = 2
"""VIR_DOMAIN_BLOCK_JOB_ABORT_PIVOT."""

AT_ONCE_S = 1.0
"""How long a client waits for what may refuse the job, such as a lack of room, seconds."""


async def disk_of(call: Call, dom: Domain, disk: str) -> LunPlan | None:
    """Returns the disk of ours that a call is to change, if the client may.

    None: the call is answered. libvirtd has judged it, and then not known what to do.
    """
    lun = await find(call, dom, disk, judged_later=True) if disk else None
    if lun is None:
        await call.pass_on()
        return None
    reply = await call.forward()
    if not is_unable(reply, lun):
        await call.respond(reply)
        return None
    return lun


async def carry_out(call: Call, job: BlockJob, work: Coroutine[None, None, None]) -> None:
    """Does the work of a job, which goes on when the client has gone; answers the call.

    Raises:
        GatewayError: it was refused at once.
    """
    jobs = call.services.block_jobs
    jobs.begin(job)
    task = asyncio.create_task(work)
    task.add_done_callback(lambda _: jobs.forget(job))
    done, _ = await asyncio.wait({task}, timeout=AT_ONCE_S)
    if done and (error := task.exception()) is not None:
        raise error
    await call.answer()

    def told(done: asyncio.Task[None]) -> None:
        failed = done.cancelled() or done.exception() is not None
        jobs.tell(job, Status.FAILED if failed else Status.COMPLETED)

    task.add_done_callback(told)


async def info(call: Call) -> None:
    """GET_BLOCK_JOB_INFO {dom, disk, flags}: found, type, bandwidth, cur, end.

    The numbers are bytes. Of a pull: what the volume has of its own, and its size; what waits for a
    word has nothing left to do.
    """
    reader = Reader(call.payload)
    dom, disk, flags = Domain.read(reader), reader.string(), reader.u32()
    lun = await find(call, dom, disk) if disk else None
    if lun is None:
        await call.pass_on()
        return
    job = call.services.block_jobs.of(dom, lun)
    writer = Writer()
    if job is None:
        await call.answer(bytes(writer.i32(0).i32(0).u64(0).u64(0).u64(0)))
        return
    if job.kind is Kind.COPY:
        await call.answer(await _copied(call.services, job, flags))
        return
    sizes = (await call.services.target.sizes([lun.bdev_name])).get(lun.bdev_name)
    have, size = (sizes.allocated, sizes.size) if sizes is not None else (0, 1)
    done = {Kind.PULL: min(have, size - 1), Kind.COMMIT: 0, Kind.ACTIVE_COMMIT: size}[job.kind]
    await call.answer(bytes(writer.i32(1).i32(job.kind).u64(0).u64(done).u64(size)))


async def _copied(services: Services, job: BlockJob, flags: int) -> bytes:
    """Returns how far a copy is; all is only copied when it is ready."""
    entry = copies.entry_of(job)
    target = await copies.home(services, entry)
    copy = await target.copy(copies.disk_of(entry), poll=True)
    if copy is None:  # who follows it is about to hear that
        return bytes(Writer().i32(1).i32(job.kind).u64(0).u64(0).u64(1))
    done = copy.total if copy.state == "ready" else min(copy.done, copy.total - 1)
    limit = copy.limit if flags & INFO_BYTES else -(-copy.limit // MIB)
    return bytes(Writer().i32(1).i32(job.kind).u64(limit).u64(done).u64(copy.total))


async def abort(call: Call) -> None:
    """BLOCK_JOB_ABORT {dom, disk, flags}: a commit or a copy is carried out, or given up."""
    reader = Reader(call.payload)
    dom, disk, flags = Domain.read(reader), reader.string(), reader.u32()
    lun = await disk_of(call, dom, disk)
    if lun is None:
        return
    jobs = call.services.block_jobs
    job = jobs.of(dom, lun)
    if job is None:
        raise Refused(Code.OPERATION_INVALID, f"disk {lun.dev} does not have an active block job")
    if not job.waits:
        raise Refused(
            Refusal.CANNOT_CHANGE,
            f"disk {lun.dev}: this block job of a virtlun volume cannot be stopped; it ends by"
            " itself",
        )
    if job.kind is Kind.COPY:
        await asyncio.shield(asyncio.create_task(_copy_ends(call.services, job, flags)))
        await call.answer()
        return
    if not flags & PIVOT:
        jobs.forget(job)
        await call.answer()
        jobs.tell(job, Status.CANCELED)
        return
    # The client may go meanwhile.
    await asyncio.shield(asyncio.create_task(merged(call.services, job)))
    jobs.forget(job)
    await call.answer()
    jobs.tell(job, Status.COMPLETED)


async def _copy_ends(services: Services, job: BlockJob, flags: int) -> None:
    """Has a disk go on with its copy, or with what it has.

    Raises:
        GatewayError: it is not all copied yet; what became of it is found out, if nobody knows.
    """
    async with services.domain_lock(job.dom.uuid):
        if not services.block_jobs.runs(job):
            raise Refused(
                Code.OPERATION_INVALID, f"disk {job.dev} does not have an active block job"
            )
        if not flags & PIVOT:
            await copies.cancel(services, job)
            return
        copy = await copies.look(services, job)
        if copy is None:
            raise Refused(Code.OPERATION_FAILED, f"the block job of disk {job.dev} has ended")
        if copy.state != "ready":
            raise Refused(Code.BLOCK_COPY_ACTIVE, f"block job '{job.dev}' not ready for pivot yet")
        await copies.pivot(services, job)


async def merged(services: Services, job: BlockJob) -> None:
    """Merges what a commit is to merge; safe to repeat.

    Raises:
        GatewayError: the target refuses; what was not merged is as it was.
    """
    target = await services.target.of_volume(job.volume)
    async with services.domain_lock(job.dom.uuid):
        await target.merge(job.snapshots)
