"""Memory for calls: so much for a connection, so much for all, and whose turn it is."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from plugin.gateway import budget
from plugin.gateway.budget import Budget, Grant
from plugin.gateway.messages import XmlCall
from plugin.gateway.procs import Proc
from plugin.gateway.wire import HEADER_BYTES, MessageType, message
from tests.unit.gateway.world import UUID_1, UUID_2, TestClient, World, disk, plain, play, until

KIB = 1 << 10


def drawn(monkeypatch: pytest.MonkeyPatch, body: Callable[[Budget], Awaitable[None]]) -> None:
    """Runs `body` with a pool of 4 bytes, of which a connection may have all, and none its own."""
    for name, value in (("OWN_BYTES", 0), ("SESSION_BYTES", 4), ("POOL_BYTES", 4)):
        monkeypatch.setattr(budget, name, value)

    async def scene() -> None:
        pool = Budget()
        async with asyncio.timeout(30):
            await body(pool)
        assert pool.held == 0 and not pool._waiting

    asyncio.run(scene())


def test_users_have_their_turns_however_many_connections_one_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(pool: Budget) -> None:
        order: list[str] = []

        async def call(name: str, uid: int) -> None:
            grant = await pool.share(uid).take(4)
            order.append(name)
            await asyncio.sleep(0)
            grant.release()

        names = [("a1", 1), ("a2", 1), ("a3", 1), ("a4", 1), ("b1", 2), ("b2", 2), ("c1", 3)]
        await asyncio.gather(*(call(*item) for item in names))
        assert order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]

    drawn(monkeypatch, body)


def test_who_leaves_takes_nothing_along(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(pool: Budget) -> None:
        first = await pool.share(1).take(3)
        waiting = [
            asyncio.create_task(pool.share(uid).take(size)) for uid, size in ((1, 4), (2, 1))
        ]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting), "each in its turn"
        waiting[0].cancel()
        second: Grant = await waiting[1]
        third = asyncio.create_task(pool.share(1).take(1))
        await asyncio.sleep(0)
        first.release()  # `third` is served and cancelled in the same moment
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)
        second.release()

    drawn(monkeypatch, body)


def test_a_connection_has_so_much_and_the_next_call_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(pool: Budget) -> None:
        monkeypatch.setattr(budget, "POOL_BYTES", 100)
        share = pool.share(1)
        first, second = await share.take(2), await share.take(2)
        third = asyncio.create_task(share.take(1))
        other = await pool.share(1).take(4)
        assert not third.done()
        first.release()
        for grant in (await third, second, other):
            grant.release()

    drawn(monkeypatch, body)


async def define(client: TestClient, length: int) -> int:
    """Sends a definition of at least `length` bytes; returns its serial."""
    xml = plain(devices=disk() + f"<!--{'x' * length}-->")
    return await client.send(Proc.DEFINE_XML, XmlCall(xml, None).pack())


def test_long_calls_wait_to_be_read_and_short_ones_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "SESSION_BYTES", 200 * KIB)
    monkeypatch.setattr(budget, "POOL_BYTES", 500 * KIB)
    monkeypatch.setattr(budget, "OWN_BYTES", 16 * KIB)

    async def body(world: World) -> None:
        services = world.gateway.services
        clients = [await world.client() for _ in range(10)]
        async with services.domain_lock(bytes.fromhex(UUID_1.replace("-", ""))):
            sending = [
                asyncio.create_task(define(client, 90 * KIB))
                for client in clients
                for _ in range(4)
            ]
            await until(lambda: services.budget.held > 400 * KIB)
            other = world.domain("two", UUID_2)
            await (await world.client()).attach(other.ref, disk(), 1)
            assert 400 * KIB < services.budget.held <= 500 * KIB
        serials = await asyncio.gather(*sending)
        for nth, serial in enumerate(serials):
            await clients[nth // 4].reply(serial, deadline_s=50)
        await until(lambda: services.budget.held == 0)

    play(tmp_path, body)


def test_who_begins_a_long_call_and_leaves_or_stalls_gives_its_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        pool = world.gateway.services.budget
        whole = message(MessageType.CALL, Proc.DEFINE_XML, 9, bytes(1 << 20))
        for leaves in (True, False):
            monkeypatch.setattr("plugin.gateway.session.STALL_S", 60.0 if leaves else 0.2)
            client = await world.client()
            await client.channel.send(whole[: HEADER_BYTES + 100])
            if leaves:
                await until(lambda: pool.held > 0)
                client.channel.close()
            else:
                assert await client.closed()
            await until(lambda: pool.held == 0)
        client = await world.client()
        too_long = struct.pack(">I", 30 << 20) + whole[4:HEADER_BYTES]
        await client.channel.send(too_long)
        assert await client.closed()
        assert pool.held == 0

    play(tmp_path, body)
