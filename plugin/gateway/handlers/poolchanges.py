"""Pools of ours: defined, started, stopped, undefined. The lvstore stays as it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from plugin.gateway.call import Call
from plugin.gateway.errors import Code, Refused
from plugin.gateway.handlers.pools import check_flags
from plugin.gateway.handlers.storage import check_active, check_pool, pool_of
from plugin.gateway.messages import XmlCall
from plugin.gateway.storage import volumes
from plugin.gateway.storage.events import Lifecycle, PoolEvent
from plugin.gateway.storage.pools import Pool
from plugin.gateway.storage.refs import StoragePool
from plugin.gateway.storage.states import State
from plugin.gateway.storage.xml import check_pool as check_same
from plugin.gateway.storage.xml import read_pool
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain.errors import Refusal

VALIDATE = 1
"""VIR_STORAGE_POOL_DEFINE_VALIDATE."""

BUILDS = 1 | 2 | 4
"""VIR_STORAGE_POOL_CREATE_WITH_BUILD and its kinds."""

_log = structlog.get_logger(__name__)


async def define(call: Call) -> None:
    """STORAGE_POOL_DEFINE_XML: {xml, flags}."""
    args = XmlCall.read(call.payload, flags=True)
    pool = await _meant(call, args.xml)
    if pool is None:
        await call.pass_on()
        return
    await check_pool(call, pool, "write", "save")
    check_flags(args.flags or 0, VALIDATE)
    if pool.state is State.UNDEFINED:
        _set(call, pool, State.INACTIVE)
    _tell(call, pool, Lifecycle.DEFINED)
    await call.answer(bytes(pool.ref.write(Writer())))


async def create(call: Call) -> None:
    """STORAGE_POOL_CREATE_XML: {xml, flags}: defines and starts it."""
    args = XmlCall.read(call.payload, flags=True)
    pool = await _meant(call, args.xml)
    if pool is None:
        await call.pass_on()
        return
    await check_pool(call, pool, "start", "write")
    _check_no_build(pool, args.flags or 0)
    _start(call, pool)
    await call.answer(bytes(pool.ref.write(Writer())))


async def _meant(call: Call, xml: str) -> Pool | None:
    """Returns the pool of ours that XML names, which it has to fit; None: libvirtd's.

    Raises:
        Refused: it names one of ours that there is not, or contradicts what it is.
    """
    pools = call.services.pools
    if not pools.prefix or (pools.prefix not in xml and "&" not in xml):
        return None
    wanted = await call.parse(lambda: read_pool(xml), xml)
    if wanted is None or wanted.name is None or not pools.may_be(wanted.name):
        return None
    pool = await pools.named(wanted.name, undefined=True)
    if pool is None:
        store = wanted.name.removeprefix(pools.prefix)
        raise Refused(
            Refusal.NO_STORE,
            f"pool {wanted.name} would be lvstore {store}, which is not there: make it with"
            f" `virtlun lvstore create {store}`, or choose a name that does not begin with"
            f" {pools.prefix}",
        )
    check_same(pool, wanted)
    return pool


def _check_no_build(pool: Pool, flags: int) -> None:
    if flags & BUILDS:
        raise _cannot_build(pool)
    check_flags(flags)


def _cannot_build(pool: Pool) -> Refused:
    return Refused(
        Refusal.CANNOT_CHANGE,
        f"pool {pool.name} is lvstore {pool.store.name}, which is made already: start it without"
        " building",
    )


def _start(call: Call, pool: Pool) -> None:
    if pool.active:
        raise Refused(Code.OPERATION_INVALID, f"storage pool '{pool.name}' is already active")
    _set(call, pool, State.ACTIVE)
    _tell(call, pool, Lifecycle.STARTED)


def _set(call: Call, pool: Pool, state: State) -> None:
    call.services.pools.set_state(pool, state)
    _log.info("pool changed", pool=pool.name, state=state.value)


def _tell(call: Call, pool: Pool, what: Lifecycle | None) -> None:
    call.services.announce(PoolEvent(pool.ref, what))


@asynccontextmanager
async def _changing(call: Call, *rights: str) -> AsyncIterator[tuple[Pool | None, Reader]]:
    """Gives the pool of ours that a call begins with, and what else it has, and answers the call.

    None: it is not ours; libvirtd answers then.
    """
    args = Reader(call.payload)
    pool = await pool_of(call, StoragePool.read(args))
    if pool is None:
        await call.pass_on()
        yield None, args
        return
    await check_pool(call, pool, *rights)
    yield pool, args
    await call.answer()


async def start(call: Call) -> None:
    """STORAGE_POOL_CREATE: {pool, flags}."""
    async with _changing(call, "start") as (pool, args):
        if pool is not None:
            _check_no_build(pool, args.u32())
            _start(call, pool)


async def destroy(call: Call) -> None:
    """STORAGE_POOL_DESTROY: it shows no volumes any more; domains keep theirs."""
    async with _changing(call, "stop") as (pool, _):
        if pool is not None:
            check_active(pool)
            _set(call, pool, State.INACTIVE)
            _tell(call, pool, Lifecycle.STOPPED)


async def undefine(call: Call) -> None:
    """STORAGE_POOL_UNDEFINE: it is not shown any more, until it is defined again."""
    async with _changing(call, "delete") as (pool, _):
        if pool is not None:
            _check_stopped(pool)
            _set(call, pool, State.UNDEFINED)
            _tell(call, pool, Lifecycle.UNDEFINED)


def _check_stopped(pool: Pool) -> None:
    if pool.active:
        raise Refused(Code.OPERATION_INVALID, f"storage pool '{pool.name}' is still active")


async def build(call: Call) -> None:
    """STORAGE_POOL_BUILD: {pool, flags}."""
    async with _changing(call, "format") as (pool, _):
        if pool is not None:
            raise _cannot_build(pool)


async def delete(call: Call) -> None:
    """STORAGE_POOL_DELETE: {pool, flags}: no call on a pool deletes an lvstore."""
    async with _changing(call, "format") as (pool, _):
        if pool is None:
            return
        _check_stopped(pool)
        number = len(await volumes.every(pool))
        has = f"has {number} volume{'s'[: number != 1]}" if number else "is deleted with its file"
        how = "`virtlun pool remove`" if pool.store.is_pool else "`virtlun lvstore delete`"
        raise Refused(
            Refusal.CANNOT_CHANGE,
            f"pool {pool.name} is lvstore {pool.store.name}, which {has}: use {how}",
        )


async def refresh(call: Call) -> None:
    """STORAGE_POOL_REFRESH: {pool, flags}: what is shown is always what there is."""
    async with _changing(call, "refresh") as (pool, args):
        if pool is not None:
            check_flags(args.u32())
            check_active(pool)
            _tell(call, pool, None)


async def set_autostart(call: Call) -> None:
    """STORAGE_POOL_SET_AUTOSTART: {pool, autostart}: it is always so."""
    async with _changing(call, "write") as (pool, args):
        if pool is not None and not args.i32():
            raise Refused(
                Refusal.CANNOT_CHANGE,
                f"pool {pool.name} is lvstore {pool.store.name}, which the target loads when it"
                " starts: it cannot be without autostart",
            )
