"""Pools of ours, listed beside libvirtd's own, looked up and described."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from plugin.gateway.call import Call
from plugin.gateway.errors import Code, Refused, UpstreamError
from plugin.gateway.handlers.storage import check_rights, may_see, of_pool, pool_of_volume
from plugin.gateway.messages import pack_string, read_string
from plugin.gateway.procs import Proc
from plugin.gateway.storage.pools import Pool
from plugin.gateway.storage.refs import (
    POOLS_MAX,
    StoragePool,
    StorageVol,
    pack_count,
    pack_names,
    read_names,
)
from plugin.gateway.storage.xml import pool_xml
from plugin.gateway.xdr import Reader, Writer

INACTIVE, ACTIVE = 1, 2
PERSISTENT, TRANSIENT = 4, 8
AUTOSTART, NO_AUTOSTART = 16, 32
ZFS = 1 << 17
"""virConnectListAllStoragePoolsFlags."""
TYPES = (1 << 20) - (1 << 6)
"""All of them that name a type."""

XML_INACTIVE = 1
"""VIR_STORAGE_XML_INACTIVE: ours have one definition."""

STATE_INACTIVE, STATE_RUNNING = 0, 2
"""virStoragePoolState."""


def matches(pool: Pool, flags: int) -> bool:
    """Whether a pool is in a list with these flags; of each kind none means all."""
    own = (ACTIVE if pool.active else INACTIVE) | PERSISTENT | AUTOSTART | ZFS
    kinds = (ACTIVE | INACTIVE, PERSISTENT | TRANSIENT, AUTOSTART | NO_AUTOSTART, TYPES)
    return all(not flags & kind or flags & kind & own for kind in kinds)


async def _ours(call: Call, flags: int) -> list[Pool]:
    return [
        pool
        for pool in await call.services.pools.shown()
        if matches(pool, flags) and await may_see(call, pool)
    ]


async def list_all(call: Call) -> None:
    """CONNECT_LIST_ALL_STORAGE_POOLS: {need_results, flags}."""
    args = Reader(call.payload)
    wanted, flags = args.i32(), args.u32()
    reply = await call.forward()
    if not reply.ok:
        await call.respond(reply)
        return
    theirs = Reader(reply.payload)
    pools = theirs.array(lambda: StoragePool.read(theirs), POOLS_MAX)
    count = theirs.u32()
    ours = (await _ours(call, flags))[: max(0, POOLS_MAX - count)]
    if wanted:
        pools += [pool.ref for pool in ours]
    writer = Writer()
    writer.array(pools, lambda pool: pool.write(writer)).u32(count + len(ours))
    await call.respond(reply, bytes(writer))


async def count(call: Call) -> None:
    """CONNECT_NUM_OF_STORAGE_POOLS, _DEFINED_STORAGE_POOLS: those that are active, or are not."""
    reply = await call.forward()
    if not reply.ok:
        await call.respond(reply)
        return
    ours = await _ours(call, _side(call))
    await call.respond(reply, pack_count(Reader(reply.payload).i32() + len(ours)))


async def list_names(call: Call) -> None:
    """CONNECT_LIST_STORAGE_POOLS, _DEFINED_STORAGE_POOLS: {maxnames}."""
    most = min(Reader(call.payload).i32(), POOLS_MAX)
    reply = await call.forward()
    if not reply.ok:
        await call.respond(reply)
        return
    names = read_names(reply.payload, POOLS_MAX)
    ours = [pool.name for pool in await _ours(call, _side(call))]
    await call.respond(reply, pack_names((names + ours)[: max(most, len(names))]))


def _side(call: Call) -> int:
    active = (Proc.NUM_OF_STORAGE_POOLS, Proc.LIST_STORAGE_POOLS)
    return ACTIVE if call.header.procedure in active else INACTIVE


async def look_up_name(call: Call) -> None:
    """STORAGE_POOL_LOOKUP_BY_NAME."""
    name = read_string(call.payload)
    await _answer_with(call, await call.services.pools.named(name))


async def look_up_uuid(call: Call) -> None:
    """STORAGE_POOL_LOOKUP_BY_UUID: ours where libvirtd has none."""
    uuid = Reader(call.payload).fixed(16)
    await _after_libvirtd(call, lambda: call.services.pools.with_uuid(uuid))


async def look_up_volume(call: Call) -> None:
    """STORAGE_POOL_LOOKUP_BY_VOLUME."""
    volume = StorageVol.read(Reader(call.payload))
    await _answer_with(call, await pool_of_volume(call, volume))


async def look_up_path(call: Call) -> None:
    """STORAGE_POOL_LOOKUP_BY_TARGET_PATH: ours where libvirtd has none."""
    path = read_string(call.payload).rstrip("/")
    pools = call.services.pools

    async def find() -> Pool | None:
        at = pools.split(f"{path}/-")
        return await pools.named(at[0]) if at is not None else None

    await _after_libvirtd(call, find)


async def _after_libvirtd(call: Call, find: Callable[[], Awaitable[Pool | None]]) -> None:
    reply = await call.forward()
    if not reply.ok and UpstreamError(reply.payload).code == Code.NO_STORAGE_POOL:
        pool = await find()
        if pool is not None:
            await _give(call, pool)
            return
    await call.respond(reply)


async def _answer_with(call: Call, pool: Pool | None) -> None:
    if pool is None:
        await call.pass_on()
        return
    await _give(call, pool)


async def _give(call: Call, pool: Pool) -> None:
    await check_rights(call, pool, "getattr")
    await call.answer(bytes(pool.ref.write(Writer())))


@of_pool("read")
async def info(call: Call, pool: Pool, _: Reader) -> None:
    """STORAGE_POOL_GET_INFO: state, capacity, allocation and available bytes."""
    store = pool.store
    if not pool.active:  # as libvirt has it
        await call.answer(bytes(Writer().u32(STATE_INACTIVE).u64(0).u64(0).u64(0)))
        return
    writer = Writer().u32(STATE_RUNNING).u64(store.total)
    await call.answer(bytes(writer.u64(store.total - store.free).u64(store.free)))


@of_pool("read")
async def xml(call: Call, pool: Pool, args: Reader) -> None:
    """STORAGE_POOL_GET_XML_DESC: {pool, flags}."""
    check_flags(args.u32(), XML_INACTIVE)
    await call.answer(pack_string(pool_xml(pool)))


@of_pool("read")
async def autostart(call: Call, _pool: Pool, _: Reader) -> None:
    """STORAGE_POOL_GET_AUTOSTART: always, as the target loads its lvstores when it starts."""
    await call.answer(pack_count(1))


@of_pool("read")
async def is_active(call: Call, pool: Pool, _: Reader) -> None:
    """STORAGE_POOL_IS_ACTIVE."""
    await call.answer(pack_count(int(pool.active)))


@of_pool("read")
async def is_persistent(call: Call, _pool: Pool, _: Reader) -> None:
    """STORAGE_POOL_IS_PERSISTENT."""
    await call.answer(pack_count(1))


def check_flags(flags: int, known: int = 0) -> None:
    """Refuses flags that a call does not have, in libvirt's words."""
    if flags & ~known:
        raise Refused(Code.INVALID_ARG, f"unsupported flags (0x{flags & ~known:x})")
