"""What clients are told of pools: that one started or stopped, or has other volumes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from plugin.gateway.procs import Proc
from plugin.gateway.storage.refs import StoragePool
from plugin.gateway.wire import MessageType, message
from plugin.gateway.xdr import Reader, Writer

LIFECYCLE, REFRESH = 0, 1
"""virStoragePoolEventID."""

OWN = 1 << 30
"""From here on are the callback ids of registrations for a pool of ours, of which libvirtd knows
nothing; its own are counted from 0."""


class Lifecycle(IntEnum):
    """virStoragePoolEventLifecycleType."""

    DEFINED = 0
    UNDEFINED = 1
    STARTED = 2
    STOPPED = 3


@dataclass(frozen=True)
class PoolEvent:
    """A pool started, stopped, or the like; None: it has, or may have, other volumes."""

    pool: StoragePool
    what: Lifecycle | None = None


class PoolSubscriptions:
    """What one client registered for."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._callbacks: dict[int, tuple[int, bytes | None]] = {}
        self._next = OWN

    def registered(self, args: bytes, result: bytes) -> None:
        """Notes what libvirtd has taken: CONNECT_STORAGE_POOL_EVENT_REGISTER_ANY for all pools."""
        self._callbacks[Reader(result).i32()] = (Reader(args).i32(), None)

    def register(self, event: int, pool: StoragePool) -> int:
        """Notes what is for a pool of ours; returns its callback id."""
        self._next += 1
        self._callbacks[self._next] = (event, pool.uuid)
        return self._next

    def is_own(self, callback: int) -> bool:
        """Whether there is such a registration, and libvirtd knows nothing of it."""
        return callback >= OWN and callback in self._callbacks

    def deregistered(self, callback: int) -> None:
        """Forgets a registration."""
        self._callbacks.pop(callback, None)

    def messages(self, event: PoolEvent) -> list[bytes]:
        """Returns the messages to send to the client."""
        kind = REFRESH if event.what is None else LIFECYCLE
        found = []
        for callback, (wanted, uuid) in self._callbacks.items():
            if wanted != kind or uuid not in (None, event.pool.uuid):
                continue
            body, proc = event.pool.write(Writer().i32(callback)), Proc.STORAGE_POOL_EVENT_REFRESH
            if event.what is not None:
                body.i32(event.what).i32(0)
                proc = Proc.STORAGE_POOL_EVENT_LIFECYCLE
            found.append(message(MessageType.MESSAGE, proc, 0, bytes(body)))
        return found
