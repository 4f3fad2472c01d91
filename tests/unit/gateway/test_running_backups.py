"""What clients see of a backup while it ends: it runs, or is one that ended, at each moment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from plugin.gateway import runningbackups
from plugin.gateway.backup.daemon import Job
from plugin.gateway.backup.job import BackupJob
from plugin.gateway.backup.progress import Progress, Status
from plugin.gateway.errors import NoAnswer
from plugin.gateway.events import Announced
from plugin.gateway.journal import Journal, SnapshotEntry
from plugin.gateway.messages import Domain
from pydataplane.domain.errors import Refusal

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


class Exporter:
    """The part of plugin.gateway.target that ends exports, which may wait for ever."""

    def __init__(self, *, silent: bool = False) -> None:
        self.silence = NoAnswer(Refusal.TIMEOUT, "no answer for 2 s") if silent else None
        self.ended: list[tuple[str, ...]] = []

    async def end_exports(self, uuids: tuple[str, ...]) -> None:
        if self.silence is not None:
            await asyncio.Event().wait()
        self.ended.append(uuids)


def carried_through(folder: Path, target: Exporter) -> tuple[Any, Ending]:
    """Returns the services after a backup, which has one export, has come to its end."""
    journal = Journal(folder)
    entry = SnapshotEntry("backup", DOM.uuid_text, DOM.name, "", (), exported=("U",))
    told: list[Announced] = []
    services: Any = SimpleNamespace(
        backups={DOM.uuid: None}, ended_backups={}, journal=journal, announce=told.append
    )
    job: Any = Ending(services)
    given: Any = target
    stored = journal.append(entry)
    asyncio.run(runningbackups._carry_through(services, DOM, job, given, entry, stored))
    assert len(told) == 1
    return services, job


def test_there_is_no_moment_between_running_and_ended(tmp_path: Path) -> None:
    target = Exporter()
    services, job = carried_through(tmp_path, target)
    assert job.shown == [(True, False)]
    assert DOM.uuid not in services.backups
    assert services.ended_backups[DOM.uuid].status is Status.COMPLETED
    assert target.ended == [("U",)]
    assert list(tmp_path.iterdir()) == []


def test_a_silent_target_is_not_waited_for(tmp_path: Path) -> None:
    services, _ = carried_through(tmp_path, Exporter(silent=True))
    assert services.ended_backups[DOM.uuid].status is Status.COMPLETED
    (stored,) = services.journal.pending
    assert stored.entry.exported == ("U",), "to be ended later"
    assert len(list(tmp_path.iterdir())) == 1


class Copied:
    """A program that has copied one disk."""

    async def conclusion(self, name: str) -> Job:
        return Job(name, 512, 512, None)

    async def jobs(self) -> dict[str, Job]:
        return {}

    async def call(self, command: str, **_: Any) -> None:
        assert command == "blockdev-del"


def test_who_asks_after_the_end_does_not_change_how_it_was(tmp_path: Path) -> None:
    async def ended_then_asked() -> tuple[Progress, Progress]:
        nothing: Any = SimpleNamespace(server=None)
        job = BackupJob(nothing, nothing, tmp_path, nothing, (nothing,), reuse=False)
        worker: Any = Copied()
        job._worker = worker
        # Its snapshots are deleted after the end, which may take a while.
        return await job.run(), await job.progress()

    end, asked = asyncio.run(ended_then_asked())
    assert asked.status is Status.RUNNING
    assert (end.status, end.done, end.total) == (Status.COMPLETED, 512, 512)
