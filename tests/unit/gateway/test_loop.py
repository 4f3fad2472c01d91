"""What the gateway does on libvirtd's own events."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import UUID

import pytest

from plugin.config import Config, GatewaySection
from plugin.gateway import loop
from plugin.gateway.messages import Domain
from plugin.gateway.server import Gateway
from plugin.gateway.services import Services
from plugin.gateway.xdr import Writer
from tests.unit.gateway.world import UUID_1

SHUTDOWN, STOPPED = 6, 5


def test_a_stop_during_the_work_for_another_event_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """QEMU's SHUTDOWN comes while the domain runs still, libvirtd's STOPPED after that."""
    dom = Domain("one", UUID(UUID_1).bytes, -1)
    seen: list[str] = []
    gateway = Gateway(Config(gateway=GatewaySection(state_dir=tmp_path)))

    def event(number: int) -> None:
        gateway.loop.lifecycle_event(bytes(dom.write(Writer().i32(1)).i32(number).i32(0)))

    async def reconcile_domain(_: Services, which: Domain, *, only_stopped: bool) -> bool:
        assert only_stopped, "for one that runs still nothing may be made: it may just be stopping"
        seen.append(which.name)
        if len(seen) == 1:
            event(STOPPED)
        return True

    async def body() -> None:
        event(SHUTDOWN)
        for _ in range(3):
            await gateway.loop._release_stopped()

    monkeypatch.setattr(loop, "reconcile_domain", reconcile_domain)
    asyncio.run(body())
    assert seen == ["one", "one"]
