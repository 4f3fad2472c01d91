"""Named locks: one operation at a time on a domain or a volume, across all clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Locks:
    """Locks by name that exist only while somebody holds or wants them."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: dict[str, int] = {}

    @asynccontextmanager
    async def hold(self, name: str, *, wait_s: float | None = None) -> AsyncIterator[None]:
        """Holds the lock `name` for the body, first come first served.

        Raises:
            TimeoutError: others had it for `wait_s` seconds; None: it is waited for.
        """
        lock = self._locks.setdefault(name, asyncio.Lock())
        self._users[name] = self._users.get(name, 0) + 1
        try:
            async with asyncio.timeout(wait_s):
                await lock.acquire()
            try:
                yield
            finally:
                lock.release()
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name], self._locks[name]

    def is_held(self, name: str) -> bool:
        """Whether somebody holds or wants the lock `name`."""
        return name in self._locks


def volume_name(store: str, name: str) -> str:
    """Returns the lock of what a volume of an lvstore (its UUID) is called, there or not."""
    return f"volume:{store}/{name}"
