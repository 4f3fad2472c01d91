"""What the handlers of pools and volumes share: whether they are ours, and the client's rights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import wraps

from plugin.gateway.call import Call, Handler
from plugin.gateway.errors import Code, Refused
from plugin.gateway.locks import volume_name
from plugin.gateway.storage import volumes
from plugin.gateway.storage.pools import Pool
from plugin.gateway.storage.refs import StoragePool, StorageVol
from plugin.gateway.storage.rights import (
    pool_action,
    pool_details,
    volume_action,
    volume_details,
)
from plugin.gateway.xdr import Reader
from pydataplane.domain.errors import Refusal
from pydataplane.lvols import Volume

PoolWork = Callable[[Call, Pool, Reader], Awaitable[None]]
VolumeWork = Callable[[Call, Pool, Volume, Reader], Awaitable[None]]

ASKED_AT_A_TIME = 8
"""Questions to polkit about volumes in a list."""

BUSY_S = 10.0
"""How long a call waits for others that change the same volume, seconds.

libvirt refuses what is in use at once; here what was begun may just be at its end.
"""

DENIED = "access denied: 'QEMU' denied access"
"""As libvirt says it."""


async def pool_of(call: Call, ref: StoragePool) -> Pool | None:
    """Returns the pool of ours that a client means, or None.

    Raises:
        GatewayError: it can be ours, and no target answers.
    """
    pools = call.services.pools
    return await pools.with_uuid(ref.uuid, ref.name) if pools.may_be(ref.name) else None


async def check_rights(call: Call, pool: Pool, *rights: str) -> None:
    """Refuses what the client may not do to a pool, by the rights of storage_pool."""
    actions = [pool_action(right) for right in rights]
    if not await call.caller.may_do(actions, pool_details(pool.ref)):
        raise Refused(Code.ACCESS_DENIED, DENIED)


async def may_see(call: Call, pool: Pool) -> bool:
    """Whether a pool is in a list for the client."""
    return await call.caller.may_do([pool_action("getattr")], pool_details(pool.ref))


async def check_volume(call: Call, pool: Pool, ref: StorageVol, right: str) -> None:
    """Refuses what the client may not do to a volume, by a right of storage_vol."""
    details = volume_details(pool.ref, ref)
    if not await call.caller.may_do([volume_action(right)], details):
        raise Refused(Code.ACCESS_DENIED, DENIED)


def check_active(pool: Pool) -> None:
    """Refuses what needs a pool that is started, in libvirt's words."""
    if not pool.active:
        raise Refused(Code.OPERATION_INVALID, f"storage pool '{pool.name}' is not active")


async def pool_of_volume(call: Call, ref: StorageVol) -> Pool | None:
    """Returns the pool of ours that has the volume that a client means; None: it is not ours.

    The key says whose it is, as libvirtd may have a pool of the same name: what is to be done to a
    volume of one is never done to one of the other.

    Raises:
        GatewayError: there is no such pool, or its target does not answer.
    """
    pools = call.services.pools
    if pools.split(ref.key) is None:
        return None
    pool = await pools.named(ref.pool)
    if pool is None or ref.key != pool.volume_path(ref.name):
        raise Refused(Code.NO_STORAGE_VOL, f"no storage vol with matching key {ref.key}")
    return pool


async def volume_of(call: Call, ref: StorageVol, right: str) -> tuple[Pool, Volume] | None:
    """Returns the volume of ours that a client means and may do this to; None: it is not ours.

    Raises:
        GatewayError: there is no such volume, the client may not, or no target answers.
    """
    pool = await pool_of_volume(call, ref)
    if pool is None:
        return None
    check_active(pool)
    return pool, await volume_named(call, pool, ref.name, right)


async def volume_named(call: Call, pool: Pool, name: str, right: str) -> Volume:
    """Returns a volume of a pool by its name.

    Raises:
        GatewayError: there is none, or the client may not do this to it.
    """
    volume = await volumes.find(pool, name)
    if volume is None:
        raise Refused(
            Code.NO_STORAGE_VOL, f"no storage vol with matching name '{name}' in {pool.name}"
        )
    await check_volume(call, pool, pool.volume_ref(volume.name), right)
    return volume


async def seen(call: Call, pool: Pool, found: Iterable[Volume]) -> list[Volume]:
    """Returns those of a pool's volumes that are in a list for the client."""
    listed = list(found)
    if not call.caller.is_judged:
        return listed
    slots = asyncio.Semaphore(ASKED_AT_A_TIME)

    async def may(volume: Volume) -> bool:
        details = volume_details(pool.ref, pool.volume_ref(volume.name))
        async with slots:
            return await call.caller.may_do([volume_action("getattr")], details)

    verdicts = await asyncio.gather(*(may(volume) for volume in listed))
    return [volume for volume, allowed in zip(listed, verdicts, strict=True) if allowed]


@asynccontextmanager
async def changing(call: Call, pool: Pool, *names: str) -> AsyncIterator[None]:
    """Holds volumes of a pool, there or not, while the body makes, changes or deletes them.

    What is left of them from an up- or download that was cut off has ended then.

    Raises:
        GatewayError: another call has one for longer than BUSY_S, or the target does not answer.
    """
    locks, store = call.services.locks, pool.store.uuid
    async with AsyncExitStack() as held:
        for name in sorted(set(names)):
            lock = locks.hold(volume_name(store, name), wait_s=BUSY_S)
            try:
                await held.enter_async_context(lock)
            except TimeoutError as error:
                raise Refused(
                    Refusal.VOLUME_IN_USE,
                    f"volume {pool.name}/{name} is being written, wiped or made by another call:"
                    " try again when that has ended, or end its client",
                ) from error
            await call.services.pools.leftovers.end_of(pool.target, store, name)
        yield


def of_pool(*rights: str) -> Callable[[PoolWork], Handler]:
    """Makes a handler of what answers a call that begins with a pool, where that is one of ours.

    It gets the pool, to which the client has these rights, and the other arguments. Of a pool that
    is not ours libvirtd answers.
    """

    def handler_of(work: PoolWork) -> Handler:
        @wraps(work)
        async def handler(call: Call) -> None:
            args = Reader(call.payload)
            pool = await pool_of(call, StoragePool.read(args))
            if pool is None:
                await call.pass_on()
                return
            if rights:
                await check_rights(call, pool, *rights)
            await work(call, pool, args)

        return handler

    return handler_of


def of_volume(right: str) -> Callable[[VolumeWork], Handler]:
    """The same for a call that begins with a volume; its pool is active."""

    def handler_of(work: VolumeWork) -> Handler:
        @wraps(work)
        async def handler(call: Call) -> None:
            args = Reader(call.payload)
            found = await volume_of(call, StorageVol.read(args), right)
            if found is None:
                await call.pass_on()
                return
            await work(call, *found, args)

        return handler

    return handler_of
