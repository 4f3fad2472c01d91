"""Replies with a domain's XML: what passes unread, what is translated, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock
from uuid import UUID

import pytest

from plugin.gateway import xmlcache
from plugin.gateway.blockjobs import BlockJobs
from plugin.gateway.messages import pack_string
from plugin.gateway.procs import Proc
from plugin.gateway.xmlcache import XmlCache
from pydataplane.domain import translate
from pydataplane.domain.translate import Settings
from tests.unit.gateway.world import UUID_1, World, disk, plain, play, until


@pytest.fixture
def presented(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """Counts the translations."""
    counting = Mock(side_effect=translate.present)
    monkeypatch.setattr("pydataplane.domain.translate.present", counting)
    yield counting


def test_the_same_reply_is_translated_once_for_all_clients(tmp_path: Path, presented: Mock) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        for _ in range(3):
            client = await world.client()
            for _ in range(3):
                xml = await client.xml(dom.ref)
                assert "lvs0/data" in xml and "vhostuser" not in xml
        assert presented.call_count == 1
        # Each of them was judged and formatted by libvirtd, for this client.
        assert world.libvirtd.calls().count(Proc.GET_XML_DESC) == 9

    play(tmp_path, body)


def test_what_the_gateway_has_read_is_translated_before_a_client_asks(
    tmp_path: Path, presented: Mock
) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        await world.gateway.services.domain_cache.current(dom.ref)
        await until(lambda: bool(world.gateway.services.xml_cache._made))
        assert presented.call_count == 1
        client = await world.client()
        assert "vhostuser" not in await client.xml(dom.ref)
        assert presented.call_count == 1

    play(tmp_path, body)


def test_a_reply_that_is_being_made_is_made_once(presented: Mock, tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        assert dom.live is not None
        cache = world.gateway.services.xml_cache
        prefetching = cache.prefetch(dom.live)
        made = await asyncio.gather(
            prefetching, *(cache.translated(pack_string(dom.live)) for _ in range(5))
        )
        assert len(set(made[1:])) == 1 and presented.call_count == 1

    play(tmp_path, body)


def test_a_domain_that_changed_is_shown_as_it_is(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain(disks=disk())
        client = await world.client()
        assert "sdb" in await client.xml(dom.ref)
        assert dom.live is not None
        dom.live = dom.live.replace('"sdb"', '"sdq"').replace("'sdb'", "'sdq'")  # behind our back
        assert "sdq" in await client.xml(dom.ref)

    play(tmp_path, body)


def test_a_domain_without_anything_of_ours_is_not_parsed(tmp_path: Path, presented: Mock) -> None:
    async def body(world: World) -> None:
        text = (
            "<domain type='qemu'><name>n</name>"
            "<uuid>22222222-2222-4222-8222-222222222222</uuid></domain>"
        )
        dom = world.libvirtd.add("n", config=text)
        client = await world.client()
        assert await client.xml(dom.ref) == text
        assert not presented.called

    play(tmp_path, body)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xmlcache, "MAX_BYTES", 10_000)
    with ThreadPoolExecutor(1) as workers:
        cache = XmlCache(workers, BlockJobs(Mock()))
        for n in range(50):
            cache._store(bytes([n]), bytes(1000))
            assert cache._size == sum(len(made) for made in cache._made.values()) <= 10_000
        assert list(cache._made) == [bytes([n]) for n in range(40, 50)], "the last ones"


def test_a_long_reply_is_translated_each_time(
    presented: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = translate.define(plain(devices=disk()), Settings(), new_uuid=UUID(UUID_1))
    payload = pack_string(made.xml)
    monkeypatch.setattr(xmlcache, "MAX_REPLY_BYTES", 10)

    async def twice() -> None:
        with ThreadPoolExecutor(1) as workers:
            cache = XmlCache(workers, BlockJobs(Mock()))
            assert await cache.translated(payload) == await cache.translated(payload)
            assert not cache._made

    asyncio.run(twice())
    assert presented.call_count == 2


def test_a_reply_that_is_known_is_not_waited_for(presented: Mock) -> None:
    with ThreadPoolExecutor(1) as workers:
        cache = XmlCache(workers, BlockJobs(Mock()))
        without = pack_string("<domain/>")
        assert cache.at_once(without) is without
        assert cache.at_once(pack_string("<domain>virtlun</domain>")) is None
        assert not presented.called


def test_what_the_gateway_has_read_is_digested_once(
    presented: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    xml = translate.define(plain(devices=disk()), Settings(), new_uuid=UUID(UUID_1)).xml
    digests = Mock(side_effect=xmlcache._digest)
    monkeypatch.setattr(xmlcache, "_digest", digests)

    async def twice() -> None:
        with ThreadPoolExecutor(1) as workers:
            cache = XmlCache(workers, BlockJobs(Mock()))
            for times in (1, 2):
                await cache.prefetch(xml)
                assert (digests.call_count, presented.call_count) == (times, 1)
            await cache.prefetch("<domain/>")
            assert digests.call_count == 2
            assert cache.at_once(pack_string(xml)) is not None

    asyncio.run(twice())


def test_what_is_not_kept_as_a_disk_is_copied_is_not_made_before_a_client_asks(
    presented: Mock,
) -> None:
    xml = translate.define(plain(devices=disk()), Settings(), new_uuid=UUID(UUID_1)).xml
    copied = Mock(dev="sdb", destination_xml="<disk/>", dom=Mock(uuid_text=UUID_1))

    async def prefetch() -> None:
        with ThreadPoolExecutor(1) as workers:
            cache = XmlCache(workers, Mock(copies=lambda: [(copied, True)]))
            await cache.prefetch(xml)

    asyncio.run(prefetch())
    assert not presented.called
