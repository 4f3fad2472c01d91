"""Volumes of ours, as those of pools: listed, looked up and described."""

from __future__ import annotations

from collections.abc import Callable

from plugin.gateway.call import Call, Reply
from plugin.gateway.errors import Code, Refused
from plugin.gateway.handlers.pools import check_flags
from plugin.gateway.handlers.storage import (
    check_active,
    check_pool,
    named,
    pool_of,
    seen,
    volume_of,
)
from plugin.gateway.messages import pack_string, read_string
from plugin.gateway.storage import volumes
from plugin.gateway.storage.pools import Pool
from plugin.gateway.storage.refs import (
    VOLUMES_MAX,
    StoragePool,
    StorageVol,
    pack_count,
    pack_names,
)
from plugin.gateway.storage.xml import volume_xml
from plugin.gateway.xdr import Reader, Writer
from pydataplane.lvols import Volume

BLOCK = 1
"""VIR_STORAGE_VOL_BLOCK."""
PHYSICAL = 1
"""VIR_STORAGE_VOL_GET_PHYSICAL; what is allocated, here as well."""


async def _listed(call: Call, args: Reader) -> tuple[Pool, list[Volume]] | None:
    """Returns the pool that a call begins with, and its volumes; None: it is not ours."""
    pool = await pool_of(call, StoragePool.read(args))
    if pool is None:
        return None
    await check_pool(call, pool, "search-storage-vols")
    check_active(pool)
    return pool, await seen(call, pool, (await volumes.every(pool))[:VOLUMES_MAX])


async def list_all(call: Call) -> None:
    """STORAGE_POOL_LIST_ALL_VOLUMES: {pool, need_results, flags}."""
    args = Reader(call.payload)
    found = await _listed(call, args)
    if found is None:
        await call.pass_on()
        return
    pool, listed = found
    wanted = args.i32()
    check_flags(args.u32())
    refs = [pool.volume_ref(volume.name) for volume in listed] if wanted else []
    writer = Writer()
    writer.array(refs, lambda ref: ref.write(writer)).u32(len(listed))
    await call.answer(bytes(writer))


async def count(call: Call) -> None:
    """STORAGE_POOL_NUM_OF_VOLUMES."""
    found = await _listed(call, Reader(call.payload))
    await call.give(await call.forward() if found is None else pack_count(len(found[1])))


async def list_names(call: Call) -> None:
    """STORAGE_POOL_LIST_VOLUMES: {pool, maxnames}."""
    args = Reader(call.payload)
    found = await _listed(call, args)
    if found is None:
        await call.pass_on()
        return
    most = max(0, args.i32())
    await call.answer(pack_names([volume.name for volume in found[1]][:most]))


async def look_up_name(call: Call) -> None:
    """STORAGE_VOL_LOOKUP_BY_NAME: {pool, name}."""
    args = Reader(call.payload)
    pool = await pool_of(call, StoragePool.read(args))
    if pool is None:
        await call.pass_on()
        return
    check_active(pool)
    await _give(call, pool, args.string())


async def look_up_path(call: Call) -> None:
    """STORAGE_VOL_LOOKUP_BY_PATH and _BY_KEY: a path is the key as well."""
    path = read_string(call.payload)
    pools = call.services.pools
    at = pools.split(path)
    pool = await pools.named(at[0]) if at is not None else None
    if at is None or pool is None:
        await call.pass_on()
        return
    if not pool.active:
        raise Refused(Code.NO_STORAGE_VOL, f"no storage vol with matching path '{path}'")
    await _give(call, pool, at[1])


async def _give(call: Call, pool: Pool, name: str) -> None:
    volume = await named(call, pool, name, "getattr")
    await call.answer(bytes(pool.volume_ref(volume.name).write(Writer())))


async def info(call: Call) -> None:
    """STORAGE_VOL_GET_INFO: type, capacity and allocated bytes."""
    await call.give(await _read(call, _info))


async def info_flags(call: Call) -> None:
    """STORAGE_VOL_GET_INFO_FLAGS: as `info`, or what it takes."""
    await call.give(await _read(call, _info, known=PHYSICAL))


def _info(_: Pool, volume: Volume) -> bytes:
    return bytes(Writer().i32(BLOCK).u64(volume.size).u64(volume.allocated))


async def xml(call: Call) -> None:
    """STORAGE_VOL_GET_XML_DESC: {vol, flags}."""
    await call.give(await _read(call, lambda *of: pack_string(volume_xml(*of)), known=0))


async def path(call: Call) -> None:
    """STORAGE_VOL_GET_PATH."""
    await call.give(await _read(call, lambda p, v: pack_string(p.volume_path(v.name))))


async def _read(
    call: Call, work: Callable[[Pool, Volume], bytes], *, known: int | None = None
) -> Reply | bytes:
    """Returns the result for a volume of ours that the client may read, else libvirtd's reply."""
    args = Reader(call.payload)
    found = await volume_of(call, StorageVol.read(args), "read")
    if found is None:
        return await call.forward()
    if known is not None:
        check_flags(args.u32(), known)
    return work(*found)
