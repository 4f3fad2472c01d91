"""BACKUP_BEGIN: what a domain's disks have, or what has changed since a checkpoint, is copied.

Of disks of ours we make the backup ourselves: see `plugin.gateway.backup`. One of libvirtd's own
disks is libvirtd's, with ours left out. A backup of both kinds is refused.
"""

from __future__ import annotations

from uuid import uuid4

from plugin.gateway import domcheckpoints, runningbackups
from plugin.gateway.backup.job import Part
from plugin.gateway.call import Call, Reply
from plugin.gateway.errors import Code, Refused
from plugin.gateway.handlers import checkpoints, disklists
from plugin.gateway.handlers.snapshots import UNKNOWN, has_controller, judge
from plugin.gateway.lvolcheckpoints import Checkpoint
from plugin.gateway.messages import Domain, pack_string
from plugin.gateway.upstream import XML_SECURE
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain.errors import Refusal
from pydataplane.domain.translate.backups import (
    BackupDisk,
    BackupRequest,
    CheckpointRequest,
    backup_requested,
    checkpoint_requested,
)
from pydataplane.domain.translate.snapshotxml import DiskSnapshot

REUSE_EXTERNAL = 1
"""VIR_DOMAIN_BACKUP_BEGIN_REUSE_EXTERNAL."""


async def begin(call: Call) -> None:
    """BACKUP_BEGIN: {dom, backup XML, checkpoint XML or nothing, flags}."""
    reader = Reader(call.payload)
    dom, xml = Domain.read(reader), reader.string()
    checkpoint, flags = reader.optional(reader.string), reader.u32()
    if not await has_controller(call, dom):
        await call.pass_on()
        return
    async with call.services.domain_lock(dom.uuid):
        reply = await _begin(call, dom, xml, checkpoint, flags)
    await call.give(reply)


async def _begin(
    call: Call, dom: Domain, xml: str, checkpoint: str | None, flags: int
) -> Reply | None:
    """Begins a backup; returns libvirtd's reply, or None if it is ours and has begun."""
    services = call.services
    admin = await services.admin()
    current = await admin.xml(dom, XML_SECURE)
    settings = services.settings
    request = await call.parse(lambda: backup_requested(xml, current, settings), xml)
    if request is None or not request.disks:
        return await disklists.backup(call, dom, xml, checkpoint, flags)
    wanted: CheckpointRequest | None = None
    if checkpoint is not None:
        text = checkpoint
        wanted = await call.parse(lambda: checkpoint_requested(text, current, settings), text)
    if checkpoint is not None and wanted is None:
        return await disklists.backup(call, dom, xml, checkpoint, flags)
    writer = dom.write(Writer()).string(xml)
    writer.optional(checkpoint, writer.string).u32(flags | UNKNOWN)
    refusal = await judge(call, bytes(writer))
    if refusal is not None:
        return refusal
    dom = await admin.lookup(dom.uuid)
    services.block_jobs.check_none(dom)
    _check(dom, request, flags)
    if dom.uuid in services.backups:
        raise Refused(Code.OPERATION_INVALID, "another backup job is already running")
    known = await domcheckpoints.of_domain(services, dom)
    taken = None
    if wanted is not None and wanted.luns:
        taken = await checkpoints.new(call, dom, wanted, known)
    parts = [await _part(call, disk, taken, known) for disk in request.disks]
    await runningbackups.begin(
        services, dom, request, parts, taken, reuse=bool(flags & REUSE_EXTERNAL)
    )
    return None


def _check(dom: Domain, request: BackupRequest, flags: int) -> None:
    """Refuses what cannot be.

    Raises:
        Refused: says why.
    """
    if flags & ~REUSE_EXTERNAL:
        raise Refused(Code.INVALID_ARG, f"unsupported flags (0x{flags & ~REUSE_EXTERNAL:x})")
    ours = ", ".join(disk.lun.dev for disk in request.disks)
    if request.others:
        raise Refused(
            Refusal.UNSUPPORTED,
            f"domain '{dom.name}': a backup is of virtlun disks ({ours}) or of libvirt's own"
            f" ({', '.join(request.others)}), not of both: make two, each with backup='no' for the"
            " disks of the other",
        )
    if request.server is not None:
        return
    for disk in request.disks:
        if disk.file is None:
            where = "<target dev=>" if disk.block else "<target file=>"
            raise Refused(
                Refusal.UNSUPPORTED,
                f"refusing to generate file name for disk '{disk.lun.dev}': say {where} in the"
                " backup's XML",
            )
        if not disk.file.startswith("/"):
            raise Refused(
                Refusal.UNSUPPORTED,
                f"disk '{disk.lun.dev}': {disk.file} must be an absolute path",
            )
        if disk.incremental is not None and disk.form == "raw" and not flags & REUSE_EXTERNAL:
            raise Refused(
                Refusal.UNSUPPORTED,
                f"disk '{disk.lun.dev}': a raw file of what has changed would not tell where that"
                " is: take qcow2, or --reuse-external with a copy of the checkpoint's contents",
            )


async def _part(
    call: Call, disk: BackupDisk, taken: Checkpoint | None, known: list[Checkpoint]
) -> Part:
    """Returns what a disk's backup is of.

    Raises:
        GatewayError: its checkpoint is not there.
    """
    volume = await call.services.target.lvol(disk.lun.bdev_name)
    since: DiskSnapshot | None = None
    if disk.incremental is not None:
        at = domcheckpoints.position(known, disk.incremental)
        if at is None:
            raise Refused(
                Code.NO_DOMAIN_CHECKPOINT,
                f"Checkpoint '{disk.incremental}' for incremental backup of disk"
                f" '{disk.lun.dev}' not found",
            )
        since = known[at].of(volume.uuid)
        if since is None:
            raise Refused(
                Code.CHECKPOINT_INCONSISTENT,
                f"checkpoint '{disk.incremental}' does not have disk '{disk.lun.dev}'",
            )
    frozen = taken.of(volume.uuid) if taken is not None else None
    if frozen is None:
        uuid = str(uuid4())
        name = f"{volume.name}@backup-{uuid[:8]}"
        frozen = DiskSnapshot(disk.lun.dev, volume.uuid, volume.lvstore, name, uuid)
    return Part(disk, frozen, since, volume.size)


async def xml(call: Call) -> None:
    """BACKUP_GET_XML_DESC: {dom, flags}."""
    dom = Domain.read(Reader(call.payload))
    reply = await call.forward()
    backup = runningbackups.job_of(call.services, dom)
    if not reply.ok and backup is not None and runningbackups.has_no_backup(reply):
        await call.answer(pack_string(backup.job.xml))
    else:
        await disklists.show(call, dom, reply)
