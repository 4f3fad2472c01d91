"""Volumes of ours, as those of pools: made, copied, resized, wiped and deleted."""

from __future__ import annotations

from contextlib import suppress
from uuid import UUID

import structlog

from plugin.gateway.call import Call
from plugin.gateway.errors import Code, GatewayError, Refused
from plugin.gateway.handlers.block import cuts_off
from plugin.gateway.handlers.pools import check_flags
from plugin.gateway.handlers.storage import (
    changing,
    check_active,
    check_volume,
    of_pool,
    of_volume,
    pool_of,
    pool_of_volume,
    volume_named,
    volume_of,
)
from plugin.gateway.procs import Proc
from plugin.gateway.storage import volumes
from plugin.gateway.storage.events import PoolEvent
from plugin.gateway.storage.pools import Pool
from plugin.gateway.storage.refs import StoragePool, StorageVol
from plugin.gateway.storage.xml import read_volume
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain.errors import Refusal
from pydataplane.lvols import Volume

VALIDATE = 4
"""VIR_STORAGE_VOL_CREATE_VALIDATE."""
REFLINK = 2
"""VIR_STORAGE_VOL_CREATE_REFLINK: a copy that shares what it can, as ours always do."""

ALLOCATE, DELTA, SHRINK = 1, 2, 4
"""virStorageVolResizeFlags."""

ALGORITHM_ZERO = 0
"""VIR_STORAGE_VOL_WIPE_ALG_ZERO."""

_log = structlog.get_logger(__name__)


@of_pool()
async def create(call: Call, pool: Pool, args: Reader) -> None:
    """STORAGE_VOL_CREATE_XML: {pool, xml, flags}."""
    xml, flags = args.string(), args.u32()
    check_active(pool)
    wanted = await call.parse(lambda: read_volume(xml, pool.name), xml)
    await check_volume(call, pool, pool.volume_ref(wanted.name), "create")
    check_flags(flags, VALIDATE)
    async with changing(call, pool, wanted.name):
        made = await volumes.create(pool, wanted.name, wanted.capacity, thin=wanted.thin)
    _changed(call, pool, made, "created")
    await call.answer(bytes(pool.volume_ref(made.name).write(Writer())))


async def create_from(call: Call) -> None:
    """STORAGE_VOL_CREATE_XML_FROM: {pool, xml, clonevol, flags}."""
    args = Reader(call.payload)
    pool = await pool_of(call, StoragePool.read(args))
    xml, of, flags = args.string(), StorageVol.read(args), args.u32()
    if pool is None:
        if await pool_of_volume(call, of) is not None:
            raise _other_pool(of, "another pool")
        await call.pass_on()
        return
    check_active(pool)
    found = await volume_of(call, of, "read")
    if found is None or found[0].store.uuid != pool.store.uuid:
        raise _other_pool(of, pool.name)
    _, source = found
    wanted = await call.parse(lambda: read_volume(xml, pool.name, capacity=source.size), xml)
    await check_volume(call, pool, pool.volume_ref(wanted.name), "create")
    check_flags(flags, VALIDATE | REFLINK)
    async with changing(call, pool, wanted.name, source.name):
        made = await volumes.clone(pool, source, wanted.name, wanted.capacity)
    _changed(call, pool, made, "cloned")
    await call.answer(bytes(pool.volume_ref(made.name).write(Writer())))


def _other_pool(of: StorageVol, to: str) -> Refused:
    return Refused(
        Refusal.CANNOT_CHANGE,
        f"volume {of.pool}/{of.name} cannot be copied to {to} at once: make a volume there, and"
        " copy with vol-download and vol-upload",
    )


@of_volume("delete")
async def delete(call: Call, pool: Pool, volume: Volume, args: Reader) -> None:
    """STORAGE_VOL_DELETE: {vol, flags}."""
    check_flags(args.u32())
    async with changing(call, pool, volume.name):
        await check_unused(call, pool, volume)
        await volumes.delete(pool, volume)
    _changed(call, pool, volume, "deleted")
    await call.answer()


@of_volume("resize")
async def resize(call: Call, pool: Pool, volume: Volume, args: Reader) -> None:
    """STORAGE_VOL_RESIZE: {vol, capacity, flags}; guests are told by the target."""
    given, flags = args.u64(), args.u32()
    check_flags(flags, ALLOCATE | DELTA | SHRINK)
    name = f"volume {pool.name}/{volume.name}"
    # The second is that of `virsh blockresize`: whoever changes the size has seen what it is.
    locks = call.services.locks
    async with changing(call, pool, volume.name), locks.hold(f"volume:{volume.uuid}"):
        volume = await volume_named(call, pool, volume.name, "resize")
        if flags & ALLOCATE and volume.thin:
            raise Refused(
                Refusal.CANNOT_CHANGE,
                f"{name} is thin: what it grows by is allocated when it is written",
            )
        change = -given if flags & SHRINK else given
        capacity = volume.size + change if flags & DELTA else given
        if capacity <= 0:
            raise Refused(Code.INVALID_ARG, f"{name} cannot have 0 bytes")
        if capacity < volume.size:
            if not flags & SHRINK:
                raise Refused(
                    Code.INVALID_ARG,
                    "can't shrink capacity below current capacity unless shrink flag explicitly"
                    " specified",
                )
            await check_unused(call, pool, volume)
            if not call.services.config.allow_shrink:
                raise cuts_off(name, volume, capacity)
        await pool.target.resize(volume, capacity)
    _changed(call, pool, volume, "resized")
    await call.answer()


@of_volume("format")
async def wipe(call: Call, pool: Pool, volume: Volume, args: Reader) -> None:
    """STORAGE_VOL_WIPE and _WIPE_PATTERN: {vol, flags} and {vol, algorithm, flags}."""
    pattern = call.header.procedure == Proc.STORAGE_VOL_WIPE_PATTERN
    algorithm = args.u32() if pattern else ALGORITHM_ZERO
    check_flags(args.u32())
    if algorithm != ALGORITHM_ZERO:
        raise Refused(
            Refusal.CANNOT_CHANGE,
            f"volume {pool.name}/{volume.name} can be wiped with zeros only: leave the algorithm"
            " out",
        )
    async with changing(call, pool, volume.name):
        await check_unused(call, pool, volume)
        await volumes.wipe(pool, volume, call.services.pools.leftovers)
    _changed(call, pool, volume, "wiped")
    await call.answer()


def _changed(call: Call, pool: Pool, volume: Volume, what: str) -> None:
    _log.info("volume changed", volume=volume.path, what=what)
    call.services.announce(PoolEvent(pool.ref))


async def check_unused(call: Call, pool: Pool, volume: Volume) -> None:
    """Refuses a volume that a running domain has as a disk.

    Raises:
        Refused: with the domain's name, if the client may know it.
    """
    users = await pool.target.holders(volume.uuid, "")
    if not users:
        return
    name = "another domain"
    with suppress(GatewayError, ValueError):
        name = f"domain {(await (await call.caller.own()).lookup(UUID(users[0]).bytes)).name}"
    raise Refused(
        Refusal.VOLUME_IN_USE,
        f"volume {pool.name}/{volume.name} is a disk of {name}, which runs: detach it, or stop the"
        " domain",
    )
