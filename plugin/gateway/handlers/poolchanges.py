"""Pools of ours: defined, started, stopped, undefined. The lvstore stays as it is."""

from __future__ import annotations

import structlog

from plugin.gateway.call import Call
from plugin.gateway.errors import Code, Refused
from plugin.gateway.handlers.pools import check_flags
from plugin.gateway.handlers.storage import check_active, check_rights, of_pool
from plugin.gateway.messages import XmlCall
from plugin.gateway.storage import volumes
from plugin.gateway.storage.events import Lifecycle, PoolEvent
from plugin.gateway.storage.pools import Pool
from plugin.gateway.storage.states import State
from plugin.gateway.storage.xml import check_same, read_pool
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
    await check_rights(call, pool, "write", "save")
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
    await check_rights(call, pool, "start", "write")
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


@of_pool("start")
async def start(call: Call, pool: Pool, args: Reader) -> None:
    """STORAGE_POOL_CREATE: {pool, flags}."""
    _check_no_build(pool, args.u32())
    _start(call, pool)
    await call.answer()


@of_pool("stop")
async def destroy(call: Call, pool: Pool, _: Reader) -> None:
    """STORAGE_POOL_DESTROY: it shows no volumes any more; domains keep theirs."""
    check_active(pool)
    _set(call, pool, State.INACTIVE)
    _tell(call, pool, Lifecycle.STOPPED)
    await call.answer()


@of_pool("delete")
async def undefine(call: Call, pool: Pool, _: Reader) -> None:
    """STORAGE_POOL_UNDEFINE: it is not shown any more, until it is defined again."""
    _check_stopped(pool)
    _set(call, pool, State.UNDEFINED)
    _tell(call, pool, Lifecycle.UNDEFINED)
    await call.answer()


def _check_stopped(pool: Pool) -> None:
    if pool.active:
        raise Refused(Code.OPERATION_INVALID, f"storage pool '{pool.name}' is still active")


@of_pool("format")
async def build(_call: Call, pool: Pool, _: Reader) -> None:
    """STORAGE_POOL_BUILD: {pool, flags}."""
    raise _cannot_build(pool)


@of_pool("format")
async def delete(_call: Call, pool: Pool, _: Reader) -> None:
    """STORAGE_POOL_DELETE: {pool, flags}: no call on a pool deletes an lvstore."""
    _check_stopped(pool)
    number = len(await volumes.every(pool))
    has = f"has {number} volume{'s'[: number != 1]}" if number else "is deleted with its file"
    how = "`virtlun pool remove`" if pool.store.is_pool else "`virtlun lvstore delete`"
    raise Refused(
        Refusal.CANNOT_CHANGE,
        f"pool {pool.name} is lvstore {pool.store.name}, which {has}: use {how}",
    )


@of_pool("refresh")
async def refresh(call: Call, pool: Pool, args: Reader) -> None:
    """STORAGE_POOL_REFRESH: {pool, flags}: what is shown is always what there is."""
    check_flags(args.u32())
    check_active(pool)
    _tell(call, pool, None)
    await call.answer()


@of_pool("write")
async def set_autostart(call: Call, pool: Pool, args: Reader) -> None:
    """STORAGE_POOL_SET_AUTOSTART: {pool, autostart}: it is always so."""
    if not args.i32():
        raise Refused(
            Refusal.CANNOT_CHANGE,
            f"pool {pool.name} is lvstore {pool.store.name}, which the target loads when it"
            " starts: it cannot be without autostart",
        )
    await call.answer()
