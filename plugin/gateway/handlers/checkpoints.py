"""Checkpoints: moments since which a backup has what has changed.

Of disks of ours an lvol snapshot holds each, so a checkpoint takes as much space as is written over
since, until it is deleted. Those of libvirtd's own disks are libvirtd's alone; one of both kinds is
refused.
"""

from __future__ import annotations

import time
from dataclasses import replace
from uuid import uuid4

import structlog

from plugin.gateway import domcheckpoints, snapshotsteps
from plugin.gateway.call import Call, Reply
from plugin.gateway.domcheckpoints import (
    CHECKPOINTS_MAX,
    CHILDREN,
    CHILDREN_ONLY,
    METADATA_ONLY,
    QUIESCE,
    REDEFINE,
    REDEFINE_VALIDATE,
    XML_SIZE,
    Named,
)
from plugin.gateway.errors import Code, Refused, UpstreamError
from plugin.gateway.handlers import disklists, snapshotowners
from plugin.gateway.handlers.snapshots import UNKNOWN, has_controller, judge
from plugin.gateway.journal import SnapshotEntry
from plugin.gateway.lvolcheckpoints import Checkpoint, snapshot_name
from plugin.gateway.messages import Domain, DomainCall, pack_string
from plugin.gateway.recovery import recover
from plugin.gateway.upstream import RUNNING, XML_SECURE
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain.errors import Refusal
from pydataplane.domain.translate.backups import (
    CheckpointRequest,
    checkpoint_requested,
    show_checkpoint,
)
from pydataplane.domain.translate.snapshotxml import DiskSnapshot
from pydataplane.volumenames import VOLUME_NAME

CREATE_FLAGS = REDEFINE | QUIESCE | REDEFINE_VALIDATE

_log = structlog.get_logger(__name__)


async def create(call: Call) -> None:
    """CHECKPOINT_CREATE_XML: {dom, xml, flags}."""
    args = DomainCall.read(call.payload, text=True, flags=True)
    if not await has_controller(call, args.dom):
        await call.pass_on()
        return
    async with call.services.domain_lock(args.dom.uuid):
        answer = await _create(call, args)
    await call.give(answer)


async def _create(call: Call, args: DomainCall) -> Reply | bytes:
    services = call.services
    admin = await services.admin()
    xml = await admin.xml(args.dom, XML_SECURE)
    request = await call.parse(
        lambda: checkpoint_requested(args.text, xml, services.settings), args.text
    )
    if request is None or not request.luns:
        return await disklists.checkpoint(call, args)
    asked = replace(args, flags=args.flags | UNKNOWN).pack(text=True, flags=True)
    refusal = await judge(call, asked, QUIESCE)  # libvirt 9.0 has none for its own disks
    if refusal is not None:
        return refusal
    if args.flags & ~CREATE_FLAGS:
        raise Refused(Code.INVALID_ARG, f"unsupported flags (0x{args.flags & ~CREATE_FLAGS:x})")
    dom = await admin.lookup(args.dom.uuid)
    if args.flags & REDEFINE:
        await _define(call, dom, request)
        return bytes(Named(request.name or "", dom).write(Writer()))
    services.block_jobs.check_none(dom)
    known = await domcheckpoints.of_domain(services, dom)
    checkpoint = await new(call, dom, request, known)
    await _take(call, dom, checkpoint, quiesce=bool(args.flags & QUIESCE))
    return bytes(Named(checkpoint.name, dom).write(Writer()))


async def new(
    call: Call, dom: Domain, request: CheckpointRequest, known: list[Checkpoint]
) -> Checkpoint:
    """Returns a checkpoint that can be taken beside those that are known.

    The caller holds the domain's lock.

    Raises:
        GatewayError: it cannot be.
    """
    if request.others:
        ours = ", ".join(lun.dev for lun in request.luns)
        raise Refused(
            Refusal.UNSUPPORTED,
            f"domain '{dom.name}': a checkpoint is of virtlun disks ({ours}) or of libvirt's own"
            f" ({', '.join(request.others)}), not of both: make two, each with"
            " --diskspec DISK,checkpoint=no for the disks of the other",
        )
    created_ns = time.time_ns()
    name = request.name or str(created_ns // 1_000_000_000)
    if domcheckpoints.position(known, name) is not None:
        raise Refused(Code.OPERATION_FAILED, f"domain moment {name} already exists: choose another")
    if known:
        created_ns = max(created_ns, known[-1].created_ns + 1)
    held = []
    for lun in request.luns:
        volume = await call.services.target.lvol(lun.bdev_name)
        lvol = snapshot_name(volume.name, name)
        if not VOLUME_NAME.fullmatch(lvol):
            raise Refused(
                Refusal.BAD_ARGUMENT,
                f"invalid checkpoint name '{name}': {lvol}, under which the target has it, may have"
                " up to 64 letters, digits, dots, hyphens and underscores of ASCII",
            )
        held.append(DiskSnapshot(lun.dev, volume.uuid, volume.lvstore, lvol, str(uuid4())))
    return Checkpoint(name, dom.uuid_text, created_ns, request.description, tuple(held))


async def _take(call: Call, dom: Domain, checkpoint: Checkpoint, *, quiesce: bool) -> None:
    services = call.services
    admin = await services.admin()
    target = await services.target.of_volume(checkpoint.held[0].volume)
    state, _ = await admin.state(dom)
    entry = SnapshotEntry(
        operation="checkpoint",
        uuid=dom.uuid_text,
        name=dom.name,
        snapshot=checkpoint.name,
        held=checkpoint.held,
        resume=state == RUNNING and len({each.lvstore for each in checkpoint.held}) > 1,
        thaw=quiesce and await admin.active(dom),
        run=dom.id,
    )
    stored = services.journal.append(entry)
    try:
        await snapshotsteps.hold_still(services, entry, dom)
        await target.take_checkpoint(checkpoint, ())
        await snapshotsteps.go_on(services, entry, dom)
    except BaseException as error:
        await recover(services, snapshotsteps.unfrozen(services, stored, error))
        raise
    services.journal.remove(stored)
    _log.info("checkpoint taken", domain=dom.name, checkpoint=checkpoint.name, disks=entry.dev)


async def _define(call: Call, dom: Domain, request: CheckpointRequest) -> None:
    """Has lvol snapshots that are there be a checkpoint, under its name."""
    services, name = call.services, request.name
    if not name:
        raise Refused(Code.XML_ERROR, "a redefined checkpoint must have a name")
    known = await domcheckpoints.of_domain(services, dom)
    if domcheckpoints.position(known, name) is not None:
        return
    held = []
    for lun in request.luns:
        volume = await services.target.lvol(lun.bdev_name)
        lvol = snapshot_name(volume.name, name)
        there = await services.target.volume(f"{volume.lvstore}/{lvol}")
        held.append(DiskSnapshot(lun.dev, volume.uuid, volume.lvstore, lvol, there.uuid))
    created_ns = request.created_s * 1_000_000_000 if request.created_s else time.time_ns()
    parent = domcheckpoints.position(known, request.parent or "")
    if parent is not None:  # of several in one second its time does not tell which was first
        created_ns = max(created_ns, known[parent].created_ns + 1)
    while any(each.created_ns == created_ns for each in known):
        created_ns += 1
    target = await services.target.of_volume(held[0].volume)
    await snapshotowners.check_checkpoint(call, target, dom, name, held)
    await target.define_checkpoint(
        Checkpoint(name, dom.uuid_text, created_ns, request.description, tuple(held))
    )


async def listed(call: Call) -> None:
    """LIST_ALL_CHECKPOINTS: {dom, need_results, flags}."""
    reader = Reader(call.payload)
    dom, wanted, flags = Domain.read(reader), reader.i32(), reader.u32()
    reply = await call.forward()
    if not reply.ok or not await has_controller(call, dom):
        await call.respond(reply)
        return
    ours = await domcheckpoints.of_domain(call.services, dom)
    found = domcheckpoints.filtered(ours, flags, roots=True)
    await call.respond(reply, _with(reply, dom, found, wanted=bool(wanted)))


async def children(call: Call) -> None:
    """CHECKPOINT_LIST_ALL_CHILDREN: {{name, dom}, need_results, flags}."""
    reader = Reader(call.payload)
    of, wanted, flags = Named.read(reader), reader.i32(), reader.u32()
    reply = await call.forward()
    ours = await _known(call, reply, of)
    if ours is None:
        await call.respond(reply)
        return
    known, at = ours
    below = known[at + 1 :]
    if not flags & domcheckpoints.ROOTS_OR_DESCENDANTS:
        below = below[:1]
    names = [each for each in domcheckpoints.filtered(known, flags, roots=False) if each in below]
    empty = Reply(reply.header, bytes(Writer().u32(0).i32(0)))
    await call.answer(_with(empty, of.dom, names, wanted=bool(wanted)))


async def look_up(call: Call) -> None:
    """CHECKPOINT_LOOKUP_BY_NAME: {dom, name, flags}."""
    reader = Reader(call.payload)
    dom, name = Domain.read(reader), reader.string()
    reply = await call.forward()
    if await _known(call, reply, Named(name, dom)) is None:
        await call.respond(reply)
    else:
        await call.answer(bytes(Named(name, dom).write(Writer())))


async def parent(call: Call) -> None:
    """CHECKPOINT_GET_PARENT: {{name, dom}, flags}."""
    of = Named.read(Reader(call.payload))
    reply = await call.forward()
    ours = await _known(call, reply, of)
    if ours is None:
        await call.respond(reply)
        return
    known, at = ours
    if at == 0:
        raise Refused(Code.NO_DOMAIN_CHECKPOINT, f"checkpoint '{of.name}' does not have a parent")
    await call.answer(bytes(Named(known[at - 1].name, of.dom).write(Writer())))


async def xml(call: Call) -> None:
    """CHECKPOINT_GET_XML_DESC: {{name, dom}, flags}.

    Of disks of ours no domain is in it: the lvol snapshots have what is needed.
    """
    reader = Reader(call.payload)
    of, flags = Named.read(reader), reader.u32()
    reply = await call.forward()
    ours = await _known(call, reply, of)
    if ours is None:
        await disklists.show(call, of.dom, reply)
        return
    known, at = ours
    checkpoint = known[at]
    sizes: list[tuple[str, int | None]] = [(each.dev, None) for each in checkpoint.held]
    if flags & XML_SIZE:
        target = await call.services.target.of_volume(checkpoint.held[0].volume)
        sizes = [(each.dev, await target.changed_since(each)) for each in checkpoint.held]
    text = show_checkpoint(
        checkpoint.name,
        checkpoint.description,
        known[at - 1].name if at else None,
        checkpoint.created_s,
        sizes,
    )
    await call.answer(pack_string(text))


async def delete(call: Call) -> None:
    """CHECKPOINT_DELETE: {{name, dom}, flags}."""
    reader = Reader(call.payload)
    of, flags = Named.read(reader), reader.u32()
    async with call.services.domain_lock(of.dom.uuid):
        known: list[Checkpoint] = []
        if await has_controller(call, of.dom):
            known = await domcheckpoints.of_domain(call.services, of.dom)
        at = domcheckpoints.position(known, of.name)
        if at is None:
            reply: Reply | None = await call.forward()
        else:
            reply = await _delete(call, of, flags, known, at)
    await call.give(reply)


async def _delete(
    call: Call, of: Named, flags: int, known: list[Checkpoint], at: int
) -> Reply | None:
    """Deletes checkpoints one by one; returns libvirtd's refusal, or None if it is done."""
    refusal = await judge(call, bytes(of.write(Writer()).u32(flags | UNKNOWN)))
    if refusal is not None:
        return refusal
    if flags & ~(CHILDREN | METADATA_ONLY | CHILDREN_ONLY):
        raise Refused(Code.INVALID_ARG, f"unsupported flags (0x{flags:x})")
    going = [] if flags & CHILDREN_ONLY else [known[at]]
    if flags & (CHILDREN | CHILDREN_ONLY):
        going = [*reversed(known[at + 1 :]), *going]
    if not going:
        return None
    if of.dom.uuid in call.services.backups and not flags & METADATA_ONLY:
        raise Refused(
            Code.OPERATION_INVALID,
            f"a backup reads what domain '{of.dom.name}' had: wait for its end, or end it"
            " (`virsh domjobabort`)",
        )
    target = await call.services.target.of_volume(known[at].held[0].volume)
    if flags & METADATA_ONLY:
        for each in going:
            await target.forget_checkpoints(each.held)
        return None
    await target.check_deletable([(each.name, each.held) for each in going])
    for each in going:
        # What is left of one that is interrupted is still a checkpoint: the same call goes on.
        await target.delete_snapshots(each.held)
    return None


async def _known(call: Call, reply: Reply, of: Named) -> tuple[list[Checkpoint], int] | None:
    """Returns a domain's checkpoints of ours, and which `of` is; None if it is none.

    `reply` is libvirtd's: it has judged the call before it says that there is no such checkpoint.
    """
    if reply.ok or UpstreamError(reply.payload).code != Code.NO_DOMAIN_CHECKPOINT:
        return None
    if not await has_controller(call, of.dom):
        return None
    known = await domcheckpoints.of_domain(call.services, of.dom)
    at = domcheckpoints.position(known, of.name)
    return None if at is None else (known, at)


def _with(reply: Reply, dom: Domain, ours: list[Checkpoint], *, wanted: bool) -> bytes:
    """Returns a list of libvirtd's with ours behind; without `wanted` it is a number alone."""
    reader = Reader(reply.payload)
    theirs = reader.array(lambda: Named.read(reader), CHECKPOINTS_MAX)
    count = reader.i32() + len(ours)
    every = [*theirs, *(Named(each.name, dom) for each in ours)] if wanted else []
    writer = Writer()
    return bytes(writer.array(every, lambda each: each.write(writer)).i32(count))
