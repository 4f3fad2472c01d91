"""The cache of domains: read once, invalidated by a change, never served when stale."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from plugin.gateway.errors import GatewayError
from plugin.gateway.messages import Domain, DomainCall
from plugin.gateway.procs import Proc
from plugin.gateway.xdr import Writer
from tests.unit.gateway.fake_libvirtd import REQUESTS_MAX, FakeDomain
from tests.unit.gateway.world import UUID_1, UUID_2, World, disk, plain, play, until

STARTED, DEFINED = 2, 0


def lifecycle(dom: Domain, event: int) -> bytes:
    return bytes(dom.write(Writer().i32(1)).i32(event).i32(0))


def metadata_changed(dom: Domain) -> bytes:
    args = dom.write(Writer().i32(1)).i32(2)
    return bytes(args.optional("https://virtlun.dev/xmlns/disks/1", args.string))


def reads(world: World) -> int:
    return world.libvirtd.calls().count(Proc.GET_XML_DESC)


def rename(dom: FakeDomain, dev: str) -> None:
    """Changes the disk's target dev as somebody who talks to libvirtd itself."""
    assert dom.live is not None
    dom.live = dom.live.replace('dev="sdb"', f'dev="{dev}"').replace("dev='sdb'", f"dev='{dev}'")


def test_a_domain_is_read_once_for_all_who_ask(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        cache = world.gateway.services.domain_cache
        found = await asyncio.gather(*(cache.current(dom.ref) for _ in range(10)))
        assert all(item is found[0] for item in found)
        assert (found[0].running, found[0].carrier, len(found[0].luns)) == (True, "ubda", 1)
        await cache.current(dom.ref)
        assert reads(world) == 1

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("proc", "event"),
    [
        (Proc.CALLBACK_METADATA_CHANGE, metadata_changed),
        (Proc.CALLBACK_LIFECYCLE, lambda dom: lifecycle(dom, STARTED)),
        (Proc.CALLBACK_LIFECYCLE, lambda dom: lifecycle(dom, DEFINED)),
    ],
)
def test_libvirtds_events_make_it_read_again(tmp_path: Path, proc: Proc, event: object) -> None:
    async def body(world: World) -> None:
        dom, other = world.domain(disks=disk()), world.domain("two", UUID_2)
        cache = world.gateway.services.domain_cache
        assert (await cache.current(dom.ref)).luns[0].dev == "sdb"
        await cache.current(other.ref)
        rename(dom, "sdq")
        assert callable(event)
        await world.libvirtd.event(proc, event(dom.ref))
        await until(lambda: dom.uuid not in cache._domains)
        assert (await cache.current(dom.ref)).luns[0].dev == "sdq"
        await cache.current(other.ref)
        assert reads(world) == 3, "the other one did not change"

    play(tmp_path, body)


def test_what_changes_while_it_is_read_is_not_kept(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        cache = world.gateway.services.domain_cache
        world.libvirtd.delay_s[Proc.GET_XML_DESC] = 0.2
        reading = asyncio.create_task(cache.current(dom.ref))
        await until(lambda: reads(world) == 1)
        cache.event(metadata_changed(dom.ref))
        rename(dom, "sdq")
        await reading
        assert (await cache.current(dom.ref)).luns[0].dev == "sdq"
        assert reads(world) == 2

    play(tmp_path, body)


def test_all_is_forgotten_with_the_connection_of_the_events(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        cache = world.gateway.services.domain_cache
        await cache.current(dom.ref)
        await world.libvirtd.stop()
        await until(lambda: not cache._domains)
        await world.libvirtd.start()
        await cache.current(dom.ref)
        events = [
            item
            for item in world.libvirtd.connections
            if Proc.CALLBACK_REGISTER_ANY in [proc for proc, _ in item.calls]
        ]
        assert len(events) == 2, "with events again before it is read"
        assert [proc for proc, _ in events[1].calls].count(Proc.CALLBACK_REGISTER_ANY) == 3

    play(tmp_path, body)


def test_a_change_of_ours_is_seen_by_the_next_call_without_an_event(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        world.target.add_volume("lvs0/more")
        client = await world.client()
        args = DomainCall(dom.ref, "sdc").pack(text=True)
        await client.call(Proc.BLOCK_STATS, DomainCall(dom.ref, "sdb").pack(text=True))
        await client.attach(dom.ref, disk("lvs0/more", "sdc"), 1)
        assert await client.call(Proc.BLOCK_STATS, args)

    play(tmp_path, body)


def test_reads_that_hang_hold_up_no_change(tmp_path: Path) -> None:
    """libvirtd serves few calls of a connection at a time, so they have one of their own."""

    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        world.target.add_volume("lvs0/more")
        client = await world.client()
        end = asyncio.Event()
        slow = [
            world.domain(f"slow{n}", f"33333333-3333-4333-8333-33333333333{n}")
            for n in range(REQUESTS_MAX)
        ]
        world.libvirtd.slow = {item.uuid: end for item in slow}
        cache = world.gateway.services.domain_cache
        reading = [asyncio.create_task(cache.current(item.ref)) for item in slow]
        try:
            await until(lambda: reads(world) == len(slow))
            async with asyncio.timeout(30):
                await client.attach(dom.ref, disk("lvs0/more", "sdc"), 1)
            assert not any(task.done() for task in reading)
        finally:
            end.set()
            await asyncio.gather(*reading)
        assert "lvs0/more" in str(dom.live)

    play(tmp_path, body)


def test_a_domain_that_is_not_there_is_not_remembered(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        cache = world.gateway.services.domain_cache
        dom = world.libvirtd.add("one", config=plain())
        ref = dom.ref
        del world.libvirtd.domains[ref.uuid]
        with pytest.raises(GatewayError, match="not found"):
            await cache.current(ref)
        assert not cache._domains
        world.domain("one", UUID_1, disks=disk())
        assert (await cache.current(ref)).ours

    play(tmp_path, body)


def test_where_libvirtd_judges_each_call_it_is_asked_each_time(tmp_path: Path) -> None:
    conf = tmp_path / "libvirtd.conf"
    conf.write_text('access_drivers = ["polkit"]\n')

    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        client = await world.client()
        args = DomainCall(dom.ref, "sdb").pack(text=True)
        for _ in range(3):
            await client.call(Proc.BLOCK_STATS, args)
        assert world.libvirtd.calls().count(Proc.GET_METADATA) == 3
        assert reads(world) == 1

    play(tmp_path, body, libvirtd_conf=conf)
