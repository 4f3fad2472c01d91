"""REVERT_TO_SNAPSHOT and SNAPSHOT_DELETE of snapshots that have disks of ours.

Those that have none are libvirtd's alone. All that can be refused is, before anything changes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from plugin.gateway import domsnapshots, images, snapshotsteps
from plugin.gateway.call import Call, Reply
from plugin.gateway.domsnapshots import (
    CHILDREN,
    CHILDREN_ONLY,
    METADATA_ONLY,
    REVERT_FORCE,
    REVERT_PAUSED,
    REVERT_RESET_NVRAM,
    REVERT_RUNNING,
    Snapshot,
)
from plugin.gateway.errors import Code, GatewayError, Refused, UpstreamError
from plugin.gateway.handlers import snapshotowners
from plugin.gateway.handlers.snapshots import UNKNOWN, judge, memory_file
from plugin.gateway.handlers.start import check_free
from plugin.gateway.journal import SnapshotEntry
from plugin.gateway.messages import DomainCall
from plugin.gateway.procs import Proc
from plugin.gateway.recovery import recover
from plugin.gateway.services import Services
from plugin.gateway.upstream import Upstream
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain import translate
from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.images import of_plan
from pydataplane.domain.translate import LunPlan, Plan
from pydataplane.domain.translate.snapshotxml import DiskSnapshot, SnapshotXml, domain_of

RESET_NVRAM = 32
"""VIR_DOMAIN_START_RESET_NVRAM."""


async def revert(call: Call) -> None:
    """REVERT_TO_SNAPSHOT: {{name, dom}, flags}."""
    reader = Reader(call.payload)
    snapshot, flags = Snapshot.read(reader), reader.u32()
    async with call.services.domain_lock(snapshot.dom.uuid):
        found = await domsnapshots.read(await call.services.admin(), snapshot)
        if found is None or not found.held:
            reply = await _revert_theirs(call, snapshot, flags, found)
        else:
            reply = await _revert(call, snapshot, flags, found)
    await call.give(reply)


async def delete(call: Call) -> None:
    """SNAPSHOT_DELETE: {{name, dom}, flags}."""
    reader = Reader(call.payload)
    snapshot, flags = Snapshot.read(reader), reader.u32()
    async with call.services.domain_lock(snapshot.dom.uuid):
        going = {} if flags & METADATA_ONLY else await _going(call, snapshot, flags)
        ours = any(item is not None and item.held for item in going.values())
        reply = await (_delete(call, snapshot, flags, going) if ours else call.forward())
    await call.give(reply)


async def _revert_theirs(
    call: Call, snapshot: Snapshot, flags: int, found: SnapshotXml | None
) -> Reply | None:
    """Has libvirtd revert to a snapshot without a disk of ours, or that it does not have.

    Raises:
        Refused: it has the memory of a guest that has disks of ours.
        TranslateError: that of a guest whose QEMU lacks what it was offered.
    """
    if found is not None and found.has_memory and found.left_of_ours and not flags & REVERT_FORCE:
        refusal = await _judged(call, snapshot, flags)
        if refusal is not None:
            return refusal
        raise _risky(snapshot, found.name, found.left_of_ours)
    if found is not None and found.has_memory:
        xml = await domsnapshots.xml_of(await call.services.admin(), snapshot)
        inside = await call.services.parse(partial(domain_of, xml))
        try:
            await _check_qemu(call.services, inside or "")
        except TranslateError:
            refusal = await _judged(call, snapshot, flags)
            if refusal is not None:
                return refusal
            raise
    return await call.forward()


async def _check_qemu(services: Services, then: str) -> None:
    """Refuses to have a guest go on with a QEMU that lacks what it was offered; `then` is its XML.

    libvirtd starts that QEMU when the guest that runs now is gone.

    Raises:
        TranslateError: UNSUPPORTED.
    """
    await services.parse(partial(translate.check_protection, then, services.settings))


def _risky(snapshot: Snapshot, name: str, left: tuple[str, ...]) -> Refused:
    return Refused(
        Code.SNAPSHOT_REVERT_RISKY,
        f"snapshot {name} has the memory of {snapshot.dom.name}, but not what {', '.join(left)} had"
        " then: what the guest keeps of it in memory would damage it",
    )


async def _judged(call: Call, snapshot: Snapshot, flags: int) -> Reply | None:
    return await judge(call, bytes(snapshot.write(Writer()).u32(flags | UNKNOWN)))


async def _revert(call: Call, snapshot: Snapshot, flags: int, found: SnapshotXml) -> Reply | None:
    """Reverts a domain whose lock is held; returns libvirtd's refusal, or None if it is done."""
    refusal = await _judged(call, snapshot, flags)
    if refusal is not None:
        return refusal
    known = REVERT_RUNNING | REVERT_PAUSED | REVERT_FORCE | REVERT_RESET_NVRAM
    if flags & ~known:
        raise Refused(Code.INVALID_ARG, f"unsupported flags (0x{flags & ~known:x})")
    services = call.services
    admin = await services.admin()
    dom = await admin.lookup(snapshot.dom.uuid)
    snapshot = Snapshot(snapshot.name, dom)
    plan = await _check_revert(call, admin, snapshot, flags, found)
    start: int | None = None
    if found.memory_file is not None or flags & (REVERT_RUNNING | REVERT_PAUSED):
        paused = bool(flags & REVERT_PAUSED) or (
            found.state == "paused" and not flags & REVERT_RUNNING
        )
        start = snapshotsteps.START_PAUSED if paused else 0
        if flags & REVERT_RESET_NVRAM:
            start |= RESET_NVRAM
    entry = SnapshotEntry(
        operation="revert",
        uuid=dom.uuid_text,
        name=dom.name,
        snapshot=snapshot.name,
        held=found.held,
        start=start,
        memory_file=found.memory_file,
    )
    far = of_plan(plan) if plan is not None and start is not None else []
    async with _opened(call, plan, far):
        stored = services.journal.append(entry)
        try:
            await snapshotsteps.revert(services, entry, dom)
        except (GatewayError, TranslateError):
            services.journal.remove(stored)  # the client is told, and may do it again
            raise
        except BaseException:
            services.journal.pending.append(stored)
            raise
        services.journal.remove(stored)
    return None


@asynccontextmanager
async def _opened(call: Call, plan: Plan | None, far: list[LunPlan]) -> AsyncIterator[None]:
    """Opens the images that the domain starts with, in the client's name, while nothing is done.

    Raises:
        GatewayError: one cannot be had, or another domain has it.
    """
    if plan is None or not far:
        yield
        return
    async with images.opened(call, plan, far):
        for lun in far:
            await check_free(call, plan, lun, await call.services.target.image(plan, lun))
        yield


async def _check_revert(
    call: Call, admin: Upstream, snapshot: Snapshot, flags: int, found: SnapshotXml
) -> Plan | None:
    """Refuses what libvirt refuses, and what would leave the domain without its disks.

    Returns what the domain is to have of the target.

    Raises:
        GatewayError, TranslateError: says why; nothing has changed.
    """
    services, dom = call.services, snapshot.dom
    if found.external or found.internal:
        raise Refused(
            Refusal.UNSUPPORTED,
            f"snapshot {found.name} has {', '.join(found.external + found.internal)} beside virtlun"
            f" disks, and libvirt cannot revert to a file outside of a disk: shut {dom.name} off,"
            f" `virtlun volume rollback` its volumes ({', '.join(h.path for h in found.held)}), and"
            " give it the files below those it has now",
        )
    if not await admin.persistent(dom):
        raise Refused(
            Code.OPERATION_INVALID,
            f"domain {dom.name} is transient: it ends with its QEMU, and would not come back;"
            " define it first",
        )
    if not flags & REVERT_FORCE:
        if (
            found.memory_file is None
            and Reader(
                await admin.call(Proc.HAS_MANAGED_SAVE_IMAGE, DomainCall(dom).pack(flags=True))
            ).i32()
        ):
            raise Refused(
                Code.SNAPSHOT_REVERT_RISKY,
                "snapshot without memory state, removal of existing managed saved state strongly"
                " recommended to avoid corruption",
            )
        if found.memory_file is not None and found.left:
            raise _risky(snapshot, found.name, found.left)
    if found.memory_file is not None:
        await _check_qemu(services, await snapshotsteps.saved_xml(admin, dom, found.memory_file))
    target = await services.target.of_volume(found.held[0].volume)
    gone = await target.missing_snapshots(found.held)
    if gone:
        raise Refused(
            Refusal.NO_VOLUME,
            f"snapshot {found.name}: {', '.join(f'{h.path} of disk {h.dev}' for h in gone)} is not"
            " there any more",
        )
    await snapshotowners.check(call, target, snapshot, found.held)
    xml = await domsnapshots.xml_of(admin, snapshot)
    plan = await services.parse(lambda: translate.plan(domain_of(xml) or ""))
    if plan is not None:
        for lun in (lun for lun in plan.luns if lun.volume.source is None):
            await check_free(call, plan, lun, await services.target.volume(lun.bdev_name))
    for each in found.held:  # the running domain may have had more than its definition
        await snapshotowners.check_unused(services, dom, each)
    return plan


async def _going(call: Call, snapshot: Snapshot, flags: int) -> dict[Snapshot, SnapshotXml | None]:
    """Returns what a deletion is of, each behind its children; nothing where libvirtd has none."""
    try:
        admin = await call.services.admin()
        below = []
        if flags & (CHILDREN | CHILDREN_ONLY):
            below = await domsnapshots.descendants(admin, snapshot)
        wanted = [*reversed(below), *(() if flags & CHILDREN_ONLY else (snapshot,))]
        return {each: await domsnapshots.read(admin, each) for each in wanted}
    except UpstreamError as error:
        if error.code in (Code.NO_DOMAIN_SNAPSHOT, Code.NO_DOMAIN):
            return {}
        raise


async def _delete(
    call: Call, snapshot: Snapshot, flags: int, going: dict[Snapshot, SnapshotXml | None]
) -> Reply | None:
    """Deletes snapshots one by one; returns libvirtd's refusal, or None if it is done."""
    refusal = await _judged(call, snapshot, flags)
    if refusal is not None:
        return refusal
    if flags & ~(CHILDREN | CHILDREN_ONLY):
        raise Refused(Code.INVALID_ARG, f"unsupported flags (0x{flags:x})")
    services = call.services
    held = [(each.name, item.held) for each, item in going.items() if item is not None]
    first = next(h for _, some in held for h in some)
    target = await services.target.of_volume(first.volume)
    for each, item in going.items():
        if item is not None and item.held:
            having = await services.target.of_volume(item.held[0].volume)
            await snapshotowners.check(call, having, each, item.held)
    await target.check_deletable(held)
    for each, item in going.items():
        await _delete_one(call, each, item)
    return None


async def _delete_one(call: Call, snapshot: Snapshot, found: SnapshotXml | None) -> None:
    """Deletes one snapshot: libvirtd's part of it, if it has one, and its lvol snapshots.

    Of disks of ours alone libvirtd knows to the end, so that the same call again goes on there.
    """
    services = call.services
    own = await call.caller.own()
    held: tuple[DiskSnapshot, ...] = found.held if found is not None else ()
    entry = SnapshotEntry(
        operation="delete",
        uuid=snapshot.dom.uuid_text,
        name=snapshot.dom.name,
        snapshot=snapshot.name,
        held=held,
    )
    if found is None or not held or found.external or found.internal:
        stored = services.journal.append(entry)
        try:
            await domsnapshots.delete(own, snapshot, 0)
        except BaseException:
            await recover(services, stored)
            raise
        try:
            await snapshotsteps.delete_held(services, entry)
        except GatewayError as error:
            services.journal.pending.append(stored)
            raise Refused(
                Code.OPERATION_FAILED,
                f"snapshot {snapshot.name} is deleted, but {', '.join(h.path for h in held)} stays"
                f" until the target does that, too: {error}",
            ) from error
        services.journal.remove(stored)
    else:
        await snapshotsteps.delete_held(services, entry)
        await domsnapshots.delete(own, snapshot, METADATA_ONLY)
    if found is not None and found.memory_file is not None:
        _remove(services, snapshot, Path(found.memory_file))


def _remove(services: Services, snapshot: Snapshot, file: Path) -> None:
    """Removes the memory of a snapshot that is gone, where it is the gateway's to remove."""
    if file == memory_file(services, snapshot):
        with suppress(OSError):  # somebody took it away
            file.unlink()
