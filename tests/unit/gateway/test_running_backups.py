"""What clients see of a backup while it ends: it runs, or is one that ended, at each moment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from plugin.gateway import runningbackups
from plugin.gateway.backup.progress import Progress, Status
from plugin.gateway.events import Announced
from plugin.gateway.journal import Journal, SnapshotEntry
from plugin.gateway.messages import Domain

DOM = Domain("vm", bytes(16), 1)


class Ending:
    """A backup that comes to its end at once."""

    def __init__(self, services: Any) -> None:
        self._services = services
        self.shown: list[tuple[bool, bool]] = []

    async def run(self) -> Progress:
        return Progress(Status.COMPLETED, 1.0)

    async def finish(self, end: Status) -> None:
        assert end is Status.COMPLETED
        services = self._services
        self.shown.append((DOM.uuid in services.backups, DOM.uuid in services.ended_backups))


def test_there_is_no_moment_between_running_and_ended(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    entry = SnapshotEntry("backup", DOM.uuid_text, DOM.name, "", ())
    told: list[Announced] = []
    services: Any = SimpleNamespace(
        backups={DOM.uuid: None}, ended_backups={}, journal=journal, announce=told.append
    )
    job: Any = Ending(services)
    asyncio.run(runningbackups._carry_through(services, DOM, job, entry, journal.append(entry)))
    assert job.shown == [(True, False)]
    assert DOM.uuid not in services.backups
    assert services.ended_backups[DOM.uuid].status is Status.COMPLETED
    assert len(told) == 1
    assert list(tmp_path.iterdir()) == []
