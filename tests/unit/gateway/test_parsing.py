"""Whose XML is read when: one client's never keeps another's waiting for long."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest

from plugin.gateway.messages import XmlCall
from plugin.gateway.parsing import SHORT, Parsers
from plugin.gateway.procs import Proc
from plugin.gateway.session import CALLS_MAX
from pydataplane.domain.xml.document import Document
from tests.unit.gateway.world import World, disk, plain, play, until

LIVE, CONFIG = 1, 2
LONG = SHORT + 1


def test_hostile_definitions_of_one_client_hold_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow: the one that is read here does not end before the other client has its disk."""
    lock, may_end = threading.Lock(), threading.Event()
    begun = at_a_time = most = 0
    parse = Document.__init__

    def slow(self: Document, text: str) -> None:
        nonlocal begun, at_a_time, most
        if "hostile" not in text:
            parse(self, text)
            return
        with lock:
            begun, at_a_time = begun + 1, at_a_time + 1
            most = max(most, at_a_time)
        assert may_end.wait(60)
        with lock:
            at_a_time -= 1
        parse(self, text)

    monkeypatch.setattr(Document, "__init__", slow)

    async def body(world: World) -> None:
        world.target.add_volume("lvs0/more")
        dom = world.domain(disks=disk())
        hostile, client = await world.client(), await world.client()
        texts = [
            plain(f"hostile-{nth}", str(UUID(int=nth)), disk() + "<a/>" * (SHORT // 4))
            for nth in range(1, CALLS_MAX + 2)
        ]
        defines = [XmlCall(text, 0).pack() for text in texts]
        last = defines.pop()
        try:
            for define in defines:
                await hostile.send(Proc.DEFINE_XML_FLAGS, define)
            await until(lambda: begun == 1)
            await client.attach(dom.ref, disk("lvs0/more", "sdc"), LIVE | CONFIG)
            await client.detach(dom.ref, disk("lvs0/more", "sdc"), LIVE | CONFIG)
            assert begun == 1
        finally:
            may_end.set()
        serial = await hostile.send(Proc.DEFINE_XML_FLAGS, last)
        await hostile.reply(serial)
        assert most == 1 and begun > CALLS_MAX

    play(tmp_path, body)


async def run_waiting_tasks() -> None:
    """Lets all tasks come to where they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_users_have_their_turns_and_then_their_connections() -> None:
    order: list[str] = []
    gate = threading.Event()

    async def scene() -> None:
        parsers = Parsers()
        one, same, other = (parsers.of_client(uid) for uid in (1, 1, 2))

        def work(name: str) -> None:
            assert gate.wait(60)
            order.append(name)

        tasks = []
        for client, name in (
            (one, "one 1"),
            (one, "one 2"),
            (one, "one 3"),
            (same, "same 1"),
            (same, "same 2"),
            (other, "other 1"),
            (other, "other 2"),
        ):
            tasks.append(asyncio.create_task(client.parse(partial(work, name), LONG)))
            await run_waiting_tasks()
        gate.set()
        await asyncio.gather(*tasks)
        parsers.close()

    asyncio.run(scene())
    # Of the two users one each, and of the first one's connections one after the other.
    assert order[:4] == ["one 1", "other 1", "same 1", "other 2"]
    assert order[4:] == ["one 2", "same 2", "one 3"]


def test_who_leaves_keeps_its_turn_until_the_thread_is_done() -> None:
    gate, second = threading.Event(), threading.Event()

    async def scene() -> None:
        parsers = Parsers()
        client = parsers.of_client(1)
        first = asyncio.create_task(client.parse(lambda: gate.wait(60), LONG))
        await run_waiting_tasks()
        first.cancel()
        next_one = asyncio.create_task(client.parse(second.set, LONG))
        await run_waiting_tasks()
        # Were the turn free, the work would be in the only thread's queue by now.
        assert not first.done() and not parsers._clients._work_queue.qsize()
        gate.set()
        await next_one
        assert first.cancelled() and second.is_set()
        parsers.close()

    asyncio.run(scene())


def test_a_users_turns_end_with_its_connections() -> None:
    async def scene() -> None:
        parsers = Parsers()
        clients = [parsers.of_client(uid) for uid in (1, 1, 2)]
        assert len(parsers._users) == 2
        clients.clear()
        assert not parsers._users
        parsers.close()

    asyncio.run(scene())
