"""Block jobs of disks of ours: those that run, or wait for a client's word, one for each disk.

They are of this gateway alone: of one that stops there is no job any more. What the target does for
one it carries through, and a job that waits for a word has changed nothing. But for copies: the
target goes on with one, and the next gateway has it again (plugin.gateway.copies).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from enum import IntEnum

from plugin.gateway.errors import Code, Refused
from plugin.gateway.events import Announced, BlockJobEvent
from plugin.gateway.journal import CopyEntry, StoredEntry
from plugin.gateway.messages import Domain
from pydataplane.domain.translate import LunPlan


class Kind(IntEnum):
    """virDomainBlockJobType."""

    PULL = 1
    COPY = 2
    COMMIT = 3
    ACTIVE_COMMIT = 4


class Status(IntEnum):
    """virConnectDomainEventBlockJobStatus."""

    COMPLETED = 0
    FAILED = 1
    CANCELED = 2
    READY = 3


@dataclass(eq=False)
class BlockJob:
    """One of a disk."""

    kind: Kind
    dom: Domain
    dev: str
    """Target dev of the disk."""
    path: str
    """The disk's source."""
    volume: str
    """UUID of its volume."""
    snapshots: tuple[str, ...] = ()
    """UUIDs of those that a commit merges, the nearest to the volume first."""
    copy: StoredEntry | None = None
    """Of a copy: what the journal has of it."""
    left: bool = False
    """Whether recovery is to find out what became of a copy, and has what the journal has."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """What its volume may be called where its UUID is not known."""
        return ("/".join(self.path.split("/")[-2:]),)

    @property
    def destination_xml(self) -> str:
        """Of a copy: a <disk> whose source is the destination."""
        entry = None if self.copy is None else self.copy.entry
        return entry.disk_xml if isinstance(entry, CopyEntry) else ""

    @property
    def waits(self) -> bool:
        """Whether it waits for a client's word, at once or when it is ready."""
        return self.kind in (Kind.ACTIVE_COMMIT, Kind.COPY)


class BlockJobs:
    """All of a gateway's."""

    def __init__(self, announce: Callable[[Announced], None]) -> None:
        """`announce` tells clients of what becomes of one."""
        self._announce = announce
        self._jobs: dict[tuple[bytes, str], BlockJob] = {}
        self._ready: set[tuple[bytes, str]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def of(self, dom: Domain, lun: LunPlan) -> BlockJob | None:
        """Returns the job of a disk; None where there is none."""
        job = self._jobs.get((dom.uuid, lun.dev))
        if job is not None and lun.bdev_name not in (job.volume, *job.aliases):
            self.forget(job)  # of another disk, that was detached
            return None
        return job

    def has(self, dom: Domain, dev: str) -> bool:
        """Whether the disk with this target dev has a job."""
        return (dom.uuid, dev) in self._jobs

    def check_free(self, dom: Domain, lun: LunPlan) -> None:
        """Raises Refused if a disk has a job already."""
        if self.of(dom, lun) is not None:
            raise Refused(
                Code.OPERATION_UNSUPPORTED, f"disk '{lun.dev}' already in active block job"
            )

    def check_none(self, dom: Domain) -> None:
        """Raises Refused if a disk of a domain is being copied."""
        if any(uuid == dom.uuid and job.kind is Kind.COPY for (uuid, _), job in self._jobs.items()):
            raise Refused(Code.OPERATION_INVALID, "domain has active block job")

    def copies(self) -> Iterator[tuple[BlockJob, bool]]:
        """Yields the copies of disks, and whether each is ready."""
        for key, job in self._jobs.items():
            if job.kind is Kind.COPY:
                yield job, key in self._ready

    def runs(self, job: BlockJob) -> bool:
        """Whether it is a job still."""
        return self._jobs.get((job.dom.uuid, job.dev)) is job

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Has a task of a job go on until it ends, or the gateway does."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends the tasks: what they follow goes on without this gateway."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def begin(self, job: BlockJob) -> None:
        """Notes a job of a disk that has none."""
        self._jobs[job.dom.uuid, job.dev] = job
        self._ready.discard((job.dom.uuid, job.dev))

    def forget(self, job: BlockJob) -> None:
        """Has a job be none any more."""
        if self._jobs.get((job.dom.uuid, job.dev)) is job:
            del self._jobs[job.dom.uuid, job.dev]
            self._ready.discard((job.dom.uuid, job.dev))

    def tell(self, job: BlockJob, status: Status, path: str | None = None) -> None:
        """Tells clients what became of a job (of a disk with that source now); they wait for it."""
        if status is Status.READY and self.runs(job):
            self._ready.add((job.dom.uuid, job.dev))
        self._announce(BlockJobEvent(job.dom, path or job.path, job.dev, job.kind, status))

    def domain_stopped(self, uuid: bytes) -> None:
        """Forgets what waits for a word about a disk of a domain (its UUID) that runs no more."""
        for job in list(self._jobs.values()):
            if job.dom.uuid == uuid and job.waits:
                self.forget(job)
