"""Block copy: a disk of ours is copied to another volume of its target while its guest uses it.

libvirt's job of that name mirrors a disk into a file. Here the target does it: when all is copied,
the disk goes on with the copy (pivot) or with what it has, as the client then says. The lvol
snapshots below the volume are not copied: the copy has what the guest sees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import structlog

from plugin.gateway import copies, domcheckpoints, domsnapshots, runningbackups
from plugin.gateway.blockjobs import Kind
from plugin.gateway.call import Call
from plugin.gateway.errors import Code, GatewayError, Refused
from plugin.gateway.handlers import blockjobs, pull
from plugin.gateway.handlers.block import find
from plugin.gateway.journal import CopyEntry
from plugin.gateway.messages import Domain, TypedParam
from plugin.gateway.services import Services
from plugin.gateway.target import Target
from plugin.gateway.xdr import Reader
from pydataplane.domain import translate
from pydataplane.domain.errors import Refusal
from pydataplane.domain.translate import LunPlan, VolumeRef
from pydataplane.domain.xml.document import escape
from pydataplane.lvols import Lvol

_log = structlog.get_logger(__name__)

SHALLOW, REUSE_EXT, TRANSIENT_JOB, SYNCHRONOUS_WRITES = (1 << bit for bit in range(4))
"""virDomainBlockCopyFlags; the last says what the target does always."""
COPY_FLAGS = 2 * SYNCHRONOUS_WRITES - 1

REBASE_SHALLOW, REBASE_REUSE, REBASE_RAW, REBASE_COPY, REBASE_RELATIVE, REBASE_DEV, REBASE_BYTES = (
    1 << bit for bit in range(7)
)
"""virDomainBlockRebaseFlags."""

SPEED_BYTES = 1
"""VIR_DOMAIN_BLOCK_JOB_SPEED_BANDWIDTH_BYTES."""

PARAMS_MAX = 16
"""REMOTE_DOMAIN_BLOCK_COPY_PARAMETERS_MAX."""

MIB = 1 << 20
SPEED_MAX = (1 << 63) - 1
"""Bytes a second."""

_IN_THE_GUEST = "attach the other disk, too, and copy in the guest, or shut the guest down and copy"


@dataclass(frozen=True)
class CopyRequest:
    """What a client asks for."""

    dom: Domain
    disk: str
    disk_xml: str
    """A <disk> with the destination as its source."""
    limit: int
    """Bytes a second; 0: as many as the disks can."""
    shallow: bool
    reuse: bool
    """The destination is there."""
    transient: bool
    """The client knows that the job does not outlive the running domain."""


async def copy(call: Call) -> None:
    """BLOCK_COPY {dom, disk, dest, params, flags}."""
    reader = Reader(call.payload)
    dom, disk, dest = Domain.read(reader), reader.string(), reader.string()
    params = reader.array(lambda: TypedParam.read(reader), PARAMS_MAX)
    flags = reader.u32()
    given = {param.field: param.value for param in params}
    bandwidth = given.get("bandwidth", 0)
    wanted = CopyRequest(
        dom,
        disk,
        dest,
        bandwidth if isinstance(bandwidth, int) else 0,
        shallow=bool(flags & SHALLOW),
        reuse=bool(flags & REUSE_EXT),
        transient=bool(flags & TRANSIENT_JOB),
    )
    await _begin(call, wanted, unknown=flags & ~COPY_FLAGS)


async def rebase(call: Call) -> None:
    """BLOCK_REBASE {dom, disk, base, bandwidth, flags}; with a flag it copies to `base`.

    Without it, it is a pull, from what is above `base` where there is one.
    """
    reader = Reader(call.payload)
    dom, disk, base = Domain.read(reader), reader.string(), reader.optional(reader.string)
    bandwidth, flags = reader.u64(), reader.u32()
    if not flags & REBASE_COPY:
        await pull.begin(call, dom, disk, base=base)
        return
    if base is None:
        await call.pass_on()
        return
    kind, name = ("block", "dev") if flags & REBASE_DEV else ("file", "file")
    dest = f"<disk type='{kind}'><source {name}='{escape(base)}'/></disk>"
    wanted = CopyRequest(
        dom,
        disk,
        dest,
        bandwidth if flags & REBASE_BYTES else bandwidth * MIB,
        shallow=bool(flags & REBASE_SHALLOW),
        reuse=bool(flags & REBASE_REUSE),
        # As libvirt: it always was so with this call.
        transient=False,
    )
    await _begin(call, wanted, unknown=0)


async def _begin(call: Call, wanted: CopyRequest, *, unknown: int) -> None:
    """Begins a copy of a disk of ours; others pass.

    Raises:
        GatewayError: it cannot be.
    """
    services = call.services
    ref = await call.parse(
        lambda: translate.volume_of(wanted.disk_xml, services.settings), wanted.disk_xml
    )
    found = await find(call, wanted.dom, wanted.disk, judged_later=True)
    if found is None and ref is not None:
        raise Refused(
            Refusal.CANNOT_CHANGE,
            f"QEMU cannot copy a disk to virtlun volume {ref.alias}, which it does not open: "
            + _IN_THE_GUEST,
        )
    lun = await blockjobs.disk_of(call, wanted.dom, wanted.disk)
    if lun is None:
        return
    if unknown:
        raise Refused(Code.INVALID_ARG, f"unsupported flags (0x{unknown:x})")
    if wanted.limit > SPEED_MAX:
        raise Refused(Code.OVERFLOW, f"bandwidth must be less than {SPEED_MAX} bytes/s")
    async with services.domain_lock(wanted.dom.uuid):
        dom = await _check_possible(services, wanted, lun)
        if ref is None:
            raise Refused(
                Refusal.CANNOT_CHANGE,
                f"disk {lun.dev}: a virtlun volume is copied to another volume of its target alone"
                f" ({services.settings.path_prefix}LVSTORE/NAME): `virtlun volume export` copies"
                " it to a file",
            )
        if translate.volume_format(wanted.disk_xml) not in (None, "raw"):
            raise Refused(
                Code.CONFIG_UNSUPPORTED,
                f"disk {lun.dev}: what is on a virtlun volume is raw: copy it as that",
            )
        volume = await services.target.lvol(lun.bdev_name)
        await _check_home(services, dom, lun, ref)
        if wanted.shallow and await _has_parent(services, volume):
            raise Refused(
                Code.CONFIG_UNSUPPORTED,
                f"disk {lun.dev}: a virtlun volume is copied with all that it has of snapshots:"
                " leave --shallow out",
            )
        target = await services.target.of_volume(volume.uuid)
        await _start(services, target, dom, lun, volume, ref, wanted)
    await call.answer()


async def _check_possible(services: Services, wanted: CopyRequest, lun: LunPlan) -> Domain:
    """Returns the domain as it runs.

    Raises:
        GatewayError: it does not, or has something in the way of a copy.
    """
    dom = wanted.dom
    if not (await services.domain_cache.current(dom)).running:
        raise Refused(Code.OPERATION_INVALID, "domain is not running")
    services.block_jobs.check_free(dom, lun)
    admin = await services.admin()
    if not wanted.transient and await admin.persistent(dom):
        raise Refused(Code.OPERATION_INVALID, "domain is not transient")
    if lun.shareable:
        raise Refused(
            Code.OPERATION_UNSUPPORTED,
            f"disk {lun.dev} is shareable: what others write to it meanwhile would be lost",
        )
    if runningbackups.job_of(services, dom) is not None:
        raise Refused(
            Code.OPERATION_UNSUPPORTED,
            f"domain '{dom.name}' has a backup under way: wait for its end, or end it"
            f" (`virsh domjobabort {dom.name}`)",
        )
    snapshots = await domsnapshots.count(admin, dom)
    checkpoints = len(await domcheckpoints.of_domain(services, dom))
    for count, what, delete in (
        (snapshots, "snapshots", "snapshot-delete"),
        (checkpoints, "checkpoints", "checkpoint-delete"),
    ):
        if count:
            raise Refused(
                Code.OPERATION_UNSUPPORTED,
                f"domain '{dom.name}' has {count} {what}, which stay with the volume that disk"
                f" {lun.dev} has now, without it: delete them first (`virsh {delete}`)",
            )
    return await admin.lookup(dom.uuid)


async def _check_home(services: Services, dom: Domain, lun: LunPlan, ref: VolumeRef) -> None:
    """Refuses a destination in another target than the domain's controller."""
    plan = (await services.domain_cache.current(dom)).plan
    if plan is not None:
        await services.target.check_home(plan, replace(lun, volume=ref, uuid=None))


async def _has_parent(services: Services, volume: Lvol) -> bool:
    target = await services.target.of_volume(volume.uuid)
    return await target.has_parent(volume.uuid)


async def _start(
    services: Services,
    target: Target,
    dom: Domain,
    lun: LunPlan,
    volume: Lvol,
    ref: VolumeRef,
    wanted: CopyRequest,
) -> None:
    """Makes the destination, and has the target begin; or nothing of it all.

    Raises:
        GatewayError: it does not.
    """
    destination = await target.make_destination(ref.alias, volume, reuse=wanted.reuse)
    prefix = services.settings.path_prefix
    entry = CopyEntry(
        operation="copy",
        uuid=dom.uuid_text,
        name=dom.name,
        dev=lun.dev,
        target=lun.target,
        source=volume.uuid,
        source_path=prefix + lun.volume.alias,
        destination=destination.uuid,
        destination_path=prefix + ref.alias,
        disk_xml=wanted.disk_xml,
        front=lun.front,
    )
    stored = services.journal.append(entry)
    try:
        disk = copies.disk_of(entry)
        await target.start_copy(disk, destination.uuid, wanted.limit)
    except BaseException:
        services.journal.remove(stored)
        if not wanted.reuse:
            try:
                await target.delete_volume(destination.uuid)
            except GatewayError as error:
                _log.warning("a new volume stays", volume=ref.alias, error=str(error))
        raise
    copies.begin(services, dom, stored)
    _log.info("block copy begun", domain=dom.name, dev=lun.dev, to=ref.alias)


async def set_speed(call: Call) -> None:
    """BLOCK_JOB_SET_SPEED {dom, disk, bandwidth, flags}."""
    reader = Reader(call.payload)
    dom, disk = Domain.read(reader), reader.string()
    bandwidth, flags = reader.u64(), reader.u32()
    lun = await blockjobs.disk_of(call, dom, disk)
    if lun is None:
        return
    if flags & ~SPEED_BYTES:
        raise Refused(Code.INVALID_ARG, f"unsupported flags (0x{flags & ~SPEED_BYTES:x})")
    limit = bandwidth if flags & SPEED_BYTES else bandwidth * MIB
    if limit > SPEED_MAX:
        raise Refused(Code.OVERFLOW, f"bandwidth must be less than {SPEED_MAX} bytes/s")
    job = call.services.block_jobs.of(dom, lun)
    if job is None:
        raise Refused(Code.OPERATION_INVALID, f"disk {lun.dev} does not have an active block job")
    if job.kind is not Kind.COPY:
        raise Refused(
            Refusal.CANNOT_CHANGE,
            f"disk {lun.dev}: this block job of a virtlun volume has no limit of its speed",
        )
    entry = copies.entry_of(job)
    target = await copies.home(call.services, entry)
    await target.limit_copy(copies.disk_of(entry), limit)
    await call.answer()
