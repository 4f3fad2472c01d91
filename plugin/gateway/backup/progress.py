"""How far a backup is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Status(IntEnum):
    """virDomainJobType."""

    RUNNING = 2
    COMPLETED = 3
    FAILED = 4
    CANCELLED = 5


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a backup is, or was at its end."""

    status: Status
    elapsed_s: float
    total: int = 0
    """Bytes to copy, as far as is known; in pull mode 0."""
    done: int = 0
    """Bytes of these that are copied."""
    error: str | None = None
