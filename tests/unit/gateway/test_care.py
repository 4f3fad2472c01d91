"""What the gateway does on libvirtd's own events."""

from __future__ import annotations

import asyncio
from typing import cast
from unittest.mock import Mock
from uuid import UUID

import pytest

from plugin.gateway import care
from plugin.gateway.care import Care
from plugin.gateway.locks import Locks
from plugin.gateway.messages import Domain
from plugin.gateway.server import Gateway
from plugin.gateway.xdr import Writer
from tests.unit.gateway.world import UUID_1

SHUTDOWN, STOPPED = 6, 5


def test_a_stop_during_the_work_for_another_event_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """QEMU's SHUTDOWN comes while the domain runs still, libvirtd's STOPPED after that."""
    dom = Domain("one", UUID(UUID_1).bytes, -1)
    seen: list[str] = []

    def happen(event: int) -> None:
        cared.happened(bytes(dom.write(Writer().i32(1)).i32(event).i32(0)))

    async def put_right(_: Gateway, which: Domain, *, only_stopped: bool) -> bool:
        assert only_stopped, "for one that runs still nothing may be made: it may just be stopping"
        seen.append(which.name)
        if len(seen) == 1:
            happen(STOPPED)
        return True

    async def body() -> None:
        happen(SHUTDOWN)
        for _ in range(3):
            await cared._release_stopped()

    gateway = Mock()
    gateway.locks = Locks()
    monkeypatch.setattr(care, "put_right", put_right)
    cared = Care(cast(Gateway, gateway))
    asyncio.run(body())
    assert seen == ["one", "one"]
