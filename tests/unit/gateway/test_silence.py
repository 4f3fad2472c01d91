"""Targets that accept and never answer, as one that is stopped: who waits, and how long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from plugin.gateway import emptycontrollers
from plugin.gateway.journal import Entry
from plugin.gateway.messages import DomainCall
from plugin.gateway.procs import Proc
from plugin.gateway.recovery import recover_all
from plugin.gateway.target import POLLS_MAX
from pydataplane import watchedclient
from pydataplane.domain import translate
from tests.support.fake_socket import SocketTarget
from tests.unit.gateway.world import UUID_1, UUID_2, ReplyError, World, disk, play, until

LIVE = 1
FOREVER_S = 3600.0
"""A deadline that no test lives to see."""


@contextmanager
def mute_target(folder: Path) -> Iterator[SocketTarget]:
    """A second target, beside the first one of a World in `folder`, that never answers."""
    (folder / "gold").mkdir()
    gold = SocketTarget(folder / "gold/target")
    with gold.serve(mute=True):
        yield gold


async def attach(world: World) -> None:
    dom = world.domain()
    client = await world.client()
    await client.attach(dom.ref, disk(), LIVE)
    await client.detach(dom.ref, disk(), LIVE)


async def start(world: World) -> None:
    dom = world.domain(running=False, disks=disk())
    await (await world.client()).call(Proc.CREATE, DomainCall(dom.ref).pack())
    assert dom.live is not None and translate.has_controller(dom.live)


async def block_stats(world: World) -> None:
    dom = world.domain(disks=disk())
    client = await world.client()
    await client.call(Proc.BLOCK_STATS, DomainCall(dom.ref, "sdb").pack(text=True))


@pytest.mark.parametrize("work", [attach, start, block_stats])
def test_what_is_not_about_a_silent_target_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[World], Awaitable[None]]
) -> None:
    """With the deadline of an hour: whoever waited for it would not be there in time."""
    monkeypatch.setattr(watchedclient, "SILENT_S", 1.0)
    with mute_target(tmp_path):
        play(tmp_path, work, timeout_s=FOREVER_S)


def test_what_is_about_a_silent_target_ends_with_the_name_of_its_socket(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        clients = [await world.client() for _ in range(12)]
        tries = (client.attach(dom.ref, disk("gold0/data"), LIVE) for client in clients)
        for outcome in await asyncio.gather(*tries, return_exceptions=True):
            assert isinstance(outcome, ReplyError)
            assert f"no answer from {gold.path} " in str(outcome)
        await clients[0].attach(dom.ref, disk(), LIVE)

    with mute_target(tmp_path) as gold:
        play(tmp_path, body, timeout_s=3)


def test_statistics_of_a_disk_of_a_silent_target_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchedclient, "SILENT_S", 1.0)

    async def body(world: World) -> None:
        world.target.add_volume("gold0/data")
        dom = world.domain(disks=disk("gold0/data"))
        del world.target.volumes["gold0/data"]
        world.target.controllers.clear()
        client = await world.client()
        args = DomainCall(dom.ref, "sdb").pack(text=True)
        with pytest.raises(ReplyError, match=f"no answer from {gold.path} for "):
            await client.call(Proc.BLOCK_STATS, args)

    with mute_target(tmp_path) as gold:
        play(tmp_path, body, timeout_s=FOREVER_S)


def test_neither_statistics_nor_a_domain_without_a_disk_of_ours_wait_for_the_only_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchedclient, "SILENT_S", 1.0)
    monkeypatch.setattr(emptycontrollers, "MAKE_S", FOREVER_S)

    async def body(world: World) -> None:
        dom, other = world.domain(disks=disk()), world.domain("two", UUID_2, running=False)
        world.target.stop()
        world.target.start(mute=True)
        client = await world.client()
        for _ in range(POLLS_MAX + 2):
            args = DomainCall(dom.ref, "sdb").pack(text=True)
            with pytest.raises(ReplyError, match=f"no answer from {world.target.path} for "):
                await client.call(Proc.BLOCK_STATS, args)
        await client.call(Proc.CREATE, DomainCall(other.ref).pack())
        assert other.live is not None and not translate.has_controller(other.live)

    play(tmp_path, body, timeout_s=FOREVER_S)


def test_an_interrupted_change_that_waits_keeps_no_other_domains_waiting(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        services = world.gateway.services
        bdev = world.target.volumes["lvs0/data"].uuid
        for name, uuid in (("one", UUID_1), ("two", UUID_2)):
            world.domain(name, uuid)
            entry = Entry("remove", uuid, name, "sdb", 0, bdev, True, None, None, None)
            services.journal.pending.append(services.journal.append(entry))
        first, second = services.journal.pending
        async with services.domain_lock(first.entry.dom_uuid):
            recovering = asyncio.create_task(recover_all(services))
            await until(lambda: not second.path.exists())
            assert first.path.exists()
        await recovering
        assert not first.path.exists()

    play(tmp_path, body)
