"""Who waits for whose threads: pollers keep no change waiting, and names of users nobody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from plugin.gateway.peer import Peer
from plugin.gateway.procs import Proc
from plugin.gateway.target import CHANGES_MAX, POLLS_MAX, Target
from plugin.gateway.usage import Unit
from pydataplane.watchedclient import WatchedClient
from tests.unit.gateway.world import World, play, until

POLLS: dict[str, Callable[[Target], Awaitable[object]]] = {
    "usage": lambda target: target.usage([Unit("vm-1", 0)]),
    "sizes": lambda target: target.sizes(["lvs0/a"]),
    "suspended": lambda target: target.suspended(),
}


class Hanging:
    """A FAKE of the JSON-RPC client: one method alone is answered before `end` is set."""

    path = "/none"

    def __init__(self, answered: str) -> None:
        self.answered = answered
        self.end = threading.Event()
        self.hanging = 0
        self._lock = threading.Lock()

    def call(self, method: str, **_: object) -> Any:
        if method != self.answered:
            with self._lock:
                self.hanging += 1
            assert self.end.wait(60)
        return [] if method == "virtlun_vhost_get_stats" else {}

    def close(self) -> None:
        """Has nothing to close."""


@pytest.mark.parametrize("poll", POLLS)
def test_a_change_does_not_wait_for_pollers(poll: str) -> None:
    async def scene() -> None:
        client = Hanging(answered="vhost_get_controllers")
        target = Target(cast("WatchedClient", client))
        polls = [
            asyncio.ensure_future(POLLS[poll](target)) for _ in range(POLLS_MAX + CHANGES_MAX + 1)
        ]
        try:
            await until(lambda: client.hanging >= POLLS_MAX)
            async with asyncio.timeout(30):
                await target.ping()
            assert client.hanging == POLLS_MAX, "at a time"
        finally:
            client.end.set()
            await asyncio.gather(*polls, return_exceptions=True)
            target.close()

    asyncio.run(scene())


def test_names_of_users_that_do_not_come_hold_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may come from a directory server that hangs."""
    end, lock = threading.Event(), threading.Lock()
    asked: list[threading.Thread] = []
    identity = Peer.identity

    def first_hangs(peer: Peer) -> bytes:
        with lock:
            asked.append(threading.current_thread())
            first = len(asked) == 1
        assert not first or end.wait(60)
        return identity(peer)

    monkeypatch.setattr(Peer, "identity", first_hangs)

    async def body(world: World) -> None:
        slow = world.raw_client()
        try:
            serial = await slow.send(Proc.AUTH_LIST)
            await until(lambda: len(asked) == 1)
            assert asked[0] is not threading.main_thread()
            client = await world.client()
            world.domain()
            await client.call(Proc.LIST_ALL_DOMAINS)
        finally:
            end.set()
        await slow.reply(serial)

    play(tmp_path, body)
