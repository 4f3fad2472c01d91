"""Volumes of ours, as those of pools: listed, looked up and described."""

from __future__ import annotations

from plugin.gateway.call import Call
from plugin.gateway.errors import Code, Refused
from plugin.gateway.handlers.pools import check_flags
from plugin.gateway.handlers.storage import (
    check_active,
    of_pool,
    of_volume,
    seen,
    volume_named,
)
from plugin.gateway.messages import pack_string, read_string
from plugin.gateway.storage import volumes
from plugin.gateway.storage.pools import Pool
from plugin.gateway.storage.refs import (
    VOLUMES_MAX,
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


async def _listed(call: Call, pool: Pool) -> list[Volume]:
    """Returns the volumes of a pool that are in a list for the client."""
    check_active(pool)
    return await seen(call, pool, (await volumes.every(pool))[:VOLUMES_MAX])


@of_pool("search-storage-vols")
async def list_all(call: Call, pool: Pool, args: Reader) -> None:
    """STORAGE_POOL_LIST_ALL_VOLUMES: {pool, need_results, flags}."""
    wanted = args.i32()
    check_flags(args.u32())
    listed = await _listed(call, pool)
    refs = [pool.volume_ref(volume.name) for volume in listed] if wanted else []
    writer = Writer()
    writer.array(refs, lambda ref: ref.write(writer)).u32(len(listed))
    await call.answer(bytes(writer))


@of_pool("search-storage-vols")
async def count(call: Call, pool: Pool, _: Reader) -> None:
    """STORAGE_POOL_NUM_OF_VOLUMES."""
    await call.answer(pack_count(len(await _listed(call, pool))))


@of_pool("search-storage-vols")
async def list_names(call: Call, pool: Pool, args: Reader) -> None:
    """STORAGE_POOL_LIST_VOLUMES: {pool, maxnames}."""
    most = max(0, args.i32())
    listed = await _listed(call, pool)
    await call.answer(pack_names([volume.name for volume in listed][:most]))


@of_pool()
async def look_up_name(call: Call, pool: Pool, args: Reader) -> None:
    """STORAGE_VOL_LOOKUP_BY_NAME: {pool, name}."""
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
    volume = await volume_named(call, pool, name, "getattr")
    await call.answer(bytes(pool.volume_ref(volume.name).write(Writer())))


@of_volume("read")
async def info(call: Call, _: Pool, volume: Volume, _args: Reader) -> None:
    """STORAGE_VOL_GET_INFO: type, capacity and allocated bytes."""
    await call.answer(_info(volume))


@of_volume("read")
async def info_flags(call: Call, _: Pool, volume: Volume, args: Reader) -> None:
    """STORAGE_VOL_GET_INFO_FLAGS: as `info`, or what it takes."""
    check_flags(args.u32(), PHYSICAL)
    await call.answer(_info(volume))


def _info(volume: Volume) -> bytes:
    return bytes(Writer().i32(BLOCK).u64(volume.size).u64(volume.allocated))


@of_volume("read")
async def xml(call: Call, pool: Pool, volume: Volume, args: Reader) -> None:
    """STORAGE_VOL_GET_XML_DESC: {vol, flags}."""
    check_flags(args.u32())
    await call.answer(pack_string(volume_xml(pool, volume)))


@of_volume("read")
async def path(call: Call, pool: Pool, volume: Volume, _: Reader) -> None:
    """STORAGE_VOL_GET_PATH."""
    await call.answer(pack_string(pool.volume_path(volume.name)))
