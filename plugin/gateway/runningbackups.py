"""The backups that run, one for a domain, and what the last one of each was like."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace

import structlog

from plugin.gateway import snapshotsteps
from plugin.gateway.answers import LOOK_S
from plugin.gateway.backup.job import Backup, BackupJob, Part
from plugin.gateway.backup.launch import Launch, folder_in, unit_of
from plugin.gateway.backup.progress import Progress, Status
from plugin.gateway.call import Reply
from plugin.gateway.errors import Code, GatewayError, Refused, UpstreamError
from plugin.gateway.events import JobEvent
from plugin.gateway.journal import SnapshotEntry, StoredEntry
from plugin.gateway.lvolcheckpoints import Checkpoint
from plugin.gateway.messages import Domain
from plugin.gateway.recovery import recover
from plugin.gateway.services import Services
from plugin.gateway.target import Target
from plugin.gateway.upstream import RUNNING
from pydataplane.domain.translate.backups import BackupRequest

_log = structlog.get_logger(__name__)


def job_of(services: Services, dom: Domain) -> Backup | None:
    """Returns the backup of disks of ours that a domain has."""
    return services.backups.get(dom.uuid)


def has_no_backup(reply: Reply) -> bool:
    """Whether libvirtd says, after it has judged the call, that it has no backup of a domain."""
    return UpstreamError(reply.payload).code == Code.NO_DOMAIN_BACKUP


async def begin(
    services: Services,
    dom: Domain,
    request: BackupRequest,
    parts: Sequence[Part],
    checkpoint: Checkpoint | None,
    *,
    reuse: bool,
) -> None:
    """Takes the lvol snapshots, all at one instant, and begins to copy or to serve them.

    The caller holds the domain's lock. A checkpoint that is taken with it stays when the backup has
    begun, however that ends.

    Raises:
        GatewayError: it cannot be; nothing is left of it.
    """
    kept = checkpoint.held if checkpoint is not None else ()
    own = tuple(part.frozen for part in parts if part.frozen not in kept)
    held = (*kept, *own)
    state, _ = await (await services.admin()).state(dom)
    target = await services.target.of_volume(held[0].volume)
    entry = SnapshotEntry(
        operation="backup",
        uuid=dom.uuid_text,
        name=dom.name,
        snapshot=checkpoint.name if checkpoint is not None else "",
        held=held,
        resume=state == RUNNING and len({each.lvstore for each in held}) > 1,
        run=dom.id,
    )
    stored = services.journal.append(entry)
    job = BackupJob(
        target,
        Launch.of(unit_of(dom.uuid_text)),
        folder_in(services.config.listen.parent, dom.uuid_text),
        request,
        parts,
        reuse=reuse,
    )
    try:
        await snapshotsteps.hold_still(services, entry, dom)
        if checkpoint is not None:
            await target.take_checkpoint(checkpoint, own)
        else:
            await target.snapshot(own)
        await snapshotsteps.go_on(services, entry, dom)
        exported = tuple(part.frozen.uuid for part in parts)
        entry = replace(entry, resume=False, exported=exported)
        stored = services.journal.replace(stored, entry)
        await job.prepare()
        entry = replace(entry, files=tuple(job.new_files))
        stored = services.journal.replace(stored, entry)
        await job.start()
        left = replace(entry, held=own)
        stored = services.journal.replace(stored, left)
    except BaseException:
        await job.finish(Status.FAILED)
        # Its files are gone: what has such a name later is somebody else's.
        await recover(services, replace(stored, entry=replace(entry, files=())))
        raise
    services.ended_backups.pop(dom.uuid, None)
    task = asyncio.create_task(_carry_through(services, dom, job, target, left, stored))
    services.backups[dom.uuid] = Backup(job, task)
    _log.info("backup begun", domain=dom.name, disks=entry.dev, pull=request.server is not None)


async def _carry_through(
    services: Services,
    dom: Domain,
    job: BackupJob,
    target: Target,
    entry: SnapshotEntry,
    stored: StoredEntry,
) -> None:
    """Waits for a backup's end, and lets go of what it had."""
    end = Progress(Status.FAILED, 0, error="the gateway stopped")
    try:
        end = await job.run()
    finally:
        log = _log.bind(domain=dom.name, status=end.status.name.lower())
        try:
            await job.finish(end.status)
            try:
                await _unless_silent(target, _let_go(target, entry))
                services.journal.remove(stored)
            except GatewayError as error:
                # Its files are whole, or gone: none of such a name is to be removed later.
                stored = replace(stored, entry=replace(entry, files=()))
                with suppress(Refused):
                    services.journal.replace(stored, replace(entry, files=()))
                services.journal.pending.append(stored)
                log.warning("snapshots of a backup stay until the target answers", error=str(error))
        finally:
            # At once: for a client that asks it runs, or is one that ended.
            services.backups.pop(dom.uuid, None)
            services.ended_backups[dom.uuid] = end
        services.announce(JobEvent(dom, end))
        log.info("backup ended", bytes=end.done, error=end.error)


async def _let_go(target: Target, entry: SnapshotEntry) -> None:
    """Ends a backup's exports, and deletes the snapshots that were taken for it alone."""
    await target.end_exports(entry.exported)
    if entry.held:
        await target.delete_snapshots(entry.held)


async def _unless_silent(target: Target, work: Coroutine[None, None, None]) -> None:
    """Does what asks a target, for as long as that is not silent.

    Raises:
        GatewayError: it is, so the rest is to be done later; or the work's own.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=LOOK_S)
            if not task.done() and (why := target.silence) is not None:
                raise why
        await task
    finally:
        task.cancel()


async def end_of_gone(services: Services) -> None:
    """Ends the backups of domains that libvirtd has no more: no client could.

    Raises:
        GatewayError: libvirtd cannot be asked.
    """
    for uuid, backup in list(services.backups.items()):
        try:
            await (await services.admin()).lookup(uuid)
        except UpstreamError as error:
            if error.code != Code.NO_DOMAIN:
                raise
            backup.job.abort()


async def stop_all(services: Services) -> None:
    """Ends all backups: the gateway stops."""
    tasks = [backup.task for backup in services.backups.values()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
