"""Block jobs of disks of ours: those that run, or wait for a client's word, one for each disk.

They are of this gateway alone: of one that stops there is no job any more. What the target does for
one it carries through, and a job that waits for a word has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from plugin.gateway.errors import Code, Refused
from plugin.gateway.events import Announced, BlockJobEvent
from plugin.gateway.messages import Domain
from pydataplane.domain.translate import LunPlan


class Kind(IntEnum):
    """virDomainBlockJobType."""

    PULL = 1
    COMMIT = 3
    ACTIVE_COMMIT = 4


class Status(IntEnum):
    """virConnectDomainEventBlockJobStatus."""

    COMPLETED = 0
    FAILED = 1
    CANCELED = 2
    READY = 3


@dataclass(frozen=True)
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

    @property
    def waits(self) -> bool:
        """Whether it is ready, and waits for a client's word."""
        return self.kind is Kind.ACTIVE_COMMIT


class BlockJobs:
    """All of a gateway's."""

    def __init__(self, announce: Callable[[Announced], None]) -> None:
        """`announce` tells clients of what becomes of one."""
        self._announce = announce
        self._jobs: dict[tuple[bytes, str], BlockJob] = {}

    def of(self, dom: Domain, lun: LunPlan) -> BlockJob | None:
        """Returns the job of a disk; None where there is none."""
        job = self._jobs.get((dom.uuid, lun.dev))
        if job is not None and job.volume != lun.bdev_name:
            self.forget(job)  # of another disk, that was detached
            return None
        return job

    def check_free(self, dom: Domain, lun: LunPlan) -> None:
        """Raises Refused if a disk has a job already."""
        if self.of(dom, lun) is not None:
            raise Refused(
                Code.OPERATION_UNSUPPORTED, f"disk '{lun.dev}' already in active block job"
            )

    def begin(self, job: BlockJob) -> None:
        """Notes a job of a disk that has none."""
        self._jobs[job.dom.uuid, job.dev] = job

    def forget(self, job: BlockJob) -> None:
        """Has a job be none any more."""
        if self._jobs.get((job.dom.uuid, job.dev)) is job:
            del self._jobs[job.dom.uuid, job.dev]

    def tell(self, job: BlockJob, status: Status) -> None:
        """Tells clients what became of a job; those who began it wait for that."""
        self._announce(BlockJobEvent(job.dom, job.path, job.dev, job.kind, status))

    def domain_stopped(self, uuid: bytes) -> None:
        """Forgets what waits for a word about a disk of a domain (its UUID) that runs no more."""
        for job in list(self._jobs.values()):
            if job.dom.uuid == uuid and job.waits:
                self.forget(job)
