"""Block calls on our disks: size, statistics, resize."""

from __future__ import annotations

from plugin.gateway.call import Call, Reply
from plugin.gateway.domaincache import NOTHING, CachedDomain
from plugin.gateway.errors import Code, GatewayError, Refused, UpstreamError
from plugin.gateway.messages import (
    LLONG,
    DiskNumberCall,
    Domain,
    DomainCall,
    TypedParam,
    pack_params,
)
from plugin.gateway.usage import Usage
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain.errors import Refusal
from pydataplane.domain.translate import LunPlan, controller_name
from pydataplane.lvols import Lvol

STATS_PARAMS_MAX = 16
"""REMOTE_DOMAIN_BLOCK_STATS_PARAMETERS_MAX."""

RESIZE_BYTES = 1
RESIZE_CAPACITY = 2
RESIZE_EXTEND = 4

U64_MAX = (1 << 64) - 1


async def seen(call: Call, dom: Domain, *, judged_later: bool = False) -> CachedDomain:
    """Returns what a domain has of ours, if the client may read it.

    With `judged_later` that is not asked: for calls that need another right, which libvirtd judges
    before they are done.
    """
    try:
        if not judged_later:
            await call.caller.check_may_read(dom)
        return await call.services.domain_cache.current(dom)
    except GatewayError:
        return NOTHING  # libvirtd's answer to the call itself says why


async def find(call: Call, dom: Domain, path: str, *, judged_later: bool = False) -> LunPlan | None:
    """Returns the disk of ours that `path` means; `judged_later` as for `seen`.

    Raises:
        Refused: it means what carries them, which no client sees.
    """
    return named(call, await seen(call, dom, judged_later=judged_later), path)


def named(call: Call, domain: CachedDomain, path: str) -> LunPlan | None:
    """Returns the disk of ours that `path` means in a domain.

    Raises:
        Refused: as `find`.
    """
    lun = domain.find(path, call.services.settings)
    if lun is None and path and path == domain.carrier:
        raise Refused(Code.INVALID_ARG, f"invalid path {path} not assigned to domain")
    return lun


def is_unable(judged: Reply, lun: LunPlan) -> bool:
    """Whether libvirtd has nothing against a call about a disk of ours but that it is ours.

    It does not know a LUN; a virtio-blk disk is a device of its own, with which it cannot do that.
    """
    if judged.ok:
        return False
    code = UpstreamError(judged.payload).code
    unsupported = lun.front == "blk" and code == Code.OPERATION_UNSUPPORTED
    return code == Code.INVALID_ARG or unsupported


async def check_shown(call: Call, dom: Domain, lun: LunPlan) -> Lvol:
    """Returns the volume of a running domain's disk, which its controller has to show.

    Metadata can be written at libvirtd itself: it is no reason to change a volume that another
    domain may have.

    Raises:
        GatewayError: it does not, or nobody can tell.
    """
    target = call.services.target
    volume = await target.volume(lun.bdev_name)
    address = lun.address(controller_name(dom.uuid_text))
    if not await target.has_disk(address, volume.uuid):
        raise Refused(
            Refusal.NOT_POSSIBLE_NOW,
            f"disk {lun.dev}: the controller of {dom.name} does not show volume {volume.path} now:"
            f" see the gateway's log, or stop {dom.name} and start it again",
        )
    return volume


async def info(call: Call) -> None:
    """GET_BLOCK_INFO: allocation, capacity and physical size in bytes."""
    args = DomainCall.read(call.payload, text=True, flags=True)
    lun = await find(call, args.dom, args.text)
    if lun is None:
        await call.pass_on()
        return
    if args.flags:
        raise Refused(Code.INVALID_ARG, f"unsupported flags (0x{args.flags:x})")
    found = await call.services.target.sizes([lun.bdev_name])
    sizes = found.get(lun.bdev_name)
    if sizes is None:
        raise call.services.target.missing(lun)
    result = Writer().u64(sizes.allocated).u64(sizes.size).u64(sizes.allocated)
    await call.answer(bytes(result))


async def stats(call: Call) -> None:
    """BLOCK_STATS; an empty path means the sum over all disks."""
    args = DomainCall.read(call.payload, text=True)
    usage = await _usage(call, args)
    if usage is None:
        await call.pass_on()
        return
    values = [usage.reads, usage.read_bytes, usage.writes, usage.written_bytes]
    if not args.text:
        theirs = await _others(call)
        values = [value + theirs.i64() for value in values]
    result = Writer()
    for value in (*values, -1):  # as libvirt's QEMU driver: errors are not counted
        result.i64(value)
    await call.answer(bytes(result))


async def stats_flags(call: Call) -> None:
    """BLOCK_STATS_FLAGS; asked for 0 parameters it tells how many there are."""
    reader = Reader(call.payload)
    args = DomainCall(Domain.read(reader), reader.string())
    wanted, _ = reader.i32(), reader.u32()
    usage = await _usage(call, args)
    if usage is None:
        await call.pass_on()
        return
    values = _fields(usage)
    if not args.text:
        theirs = await _others(call)
        for param in theirs.array(lambda: TypedParam.read(theirs), STATS_PARAMS_MAX):
            values[param.field] = values.get(param.field, 0) + int(param.value)
    params = [TypedParam(name, LLONG, value) for name, value in values.items()]
    if not wanted:
        await call.answer(pack_params([]) + bytes(Writer().i32(len(params))))
        return
    params = params[: max(0, wanted)]
    await call.answer(pack_params(params) + bytes(Writer().i32(len(params))))


async def _others(call: Call) -> Reader:
    """Returns libvirtd's result of the call: the statistics of all disks that are its own.

    Raises:
        UpstreamError: its refusal.
    """
    reply = await call.forward()
    if not reply.ok:
        raise UpstreamError(reply.payload)
    return Reader(reply.payload)


async def _usage(call: Call, args: DomainCall) -> Usage | None:
    """Returns what the disk did, or all of ours with an empty path.

    None where libvirtd is to answer: the disk is not ours, or the domain does not run.
    """
    domain = await seen(call, args.dom)
    luns = domain.luns
    if args.text:
        lun = named(call, domain, args.text)
        luns = (lun,) if lun is not None else ()
    if not luns or not domain.running:
        return None
    found = await call.services.target.usage([domain.unit(lun) for lun in luns])
    total = Usage(0, 0, 0, 0, 0, 0)
    for lun in luns:
        usage = found.get(domain.unit(lun))
        if usage is None:
            raise call.services.target.missing(lun)
        total = total + usage
    return total


def _fields(usage: Usage) -> dict[str, int]:
    """Returns libvirt's names for BLOCK_STATS_FLAGS, in the order of its QEMU driver."""
    return {
        "wr_bytes": usage.written_bytes,
        "wr_operations": usage.writes,
        "rd_bytes": usage.read_bytes,
        "rd_operations": usage.reads,
        "flush_operations": usage.flushes,
        "wr_total_times": usage.write_ns,
        "rd_total_times": usage.read_ns,
        "flush_total_times": usage.flush_ns,
    }


def cuts_off(what: str, volume: Lvol, size: int) -> Refused:
    """Returns the refusal of `size` bytes for a volume, where `allow_shrink` does not allow it."""
    return Refused(
        Refusal.BAD_ARGUMENT,
        f"{what} has {volume.size} bytes, and {size} would cut off data: to shrink it all the same,"
        f" use {_shrinking(volume)}",
    )


def _shrinking(volume: Lvol) -> str:
    """Returns how a volume is made smaller."""
    if volume.image is not None:
        return "what its cluster or server has for that, while nobody uses it"
    return f"`virtlun volume resize {volume.path} SIZE --shrink`"


async def resize(call: Call) -> None:
    """BLOCK_RESIZE: the volume grows, the running guest is told by the target.

    The size is rounded up to whole clusters, never down. A shrink cuts off data, so it needs
    `allow_shrink` in the configuration. CAPACITY means "as large as the storage is": that is what
    a volume always is.
    """
    args = DiskNumberCall.read(call.payload)
    # Nobody detaches the disk meanwhile: the volume might be another domain's by then.
    async with call.services.domain_lock(args.dom.uuid):
        answer = await _resize(call, args)
    if answer is None:
        await call.answer()
    else:
        await call.respond(answer)


async def _resize(call: Call, args: DiskNumberCall) -> Reply | None:
    """Resizes a disk of ours; returns libvirtd's reply where that is the answer."""
    lun = await find(call, args.dom, args.disk, judged_later=True)
    if lun is None:
        return await call.forward()
    unknown = args.flags & ~(RESIZE_BYTES | RESIZE_CAPACITY | RESIZE_EXTEND)
    if unknown:
        raise Refused(Code.INVALID_ARG, f"unsupported flags (0x{unknown:x})")
    size = args.number if args.flags & RESIZE_BYTES else args.number * 1024
    if size > U64_MAX:
        raise Refused(Code.OVERFLOW, f"size must be less than {U64_MAX // 1024}")
    # libvirtd judges the call in its own words (permission, read-only, domain not running) before
    # it finds that it does not know the disk, or that it cannot resize such a device.
    judged = await call.forward(
        bytes(args.dom.write(Writer()).string(args.disk).u64(size).u32(RESIZE_BYTES))
    )
    if not is_unable(judged, lun):
        return judged
    services = call.services
    services.block_jobs.check_free(args.dom, lun)
    if lun.read_only:
        raise Refused(Refusal.CANNOT_CHANGE, f"can't resize empty or readonly disk '{lun.dev}'")
    uuid = (await check_shown(call, args.dom, lun)).uuid
    async with services.locks.hold(f"volume:{uuid}"):
        volume = await services.target.volume(uuid)
        if args.flags & RESIZE_CAPACITY:
            if args.number:
                raise Refused(Code.INVALID_ARG, "size must be zero when resizing to capacity")
            size = volume.size
        if not size:
            raise Refused(Code.INVALID_ARG, "size must be greater than zero")
        cluster = await services.target.cluster_size(volume)
        rounded = -(-size // cluster) * cluster
        if rounded < volume.size and (
            args.flags & RESIZE_EXTEND or not services.config.allow_shrink
        ):
            raise cuts_off(f"disk {lun.dev}", volume, size)
        if rounded != volume.size:
            await services.target.resize(volume, rounded)
    return None
