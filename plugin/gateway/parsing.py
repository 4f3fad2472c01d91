"""The threads in which XML is read, and which client's comes next.

A client's XML may be long, and made to be slow. Whoever reads it holds Python's interpreter lock
meanwhile, so that more threads would be no faster. Of each connection one text is read at a time,
and one of all connections of a user: what else they send waits here, in the order in which it came,
and not before other users' in a queue of the threads.

What libvirtd gave us has threads of its own, as a change of a disk needs it, and a device's XML, if
it is no longer than devices are, is read there. Replies that are shown, of which many clients may
ask for many, have a thread of their own, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

DOMAINS = 2
"""Threads for libvirtd's XML, so that a long one does not hold up all others."""

SHORT = 16_384
"""Characters of a short text; a <disk> has some hundreds. The slowest takes about 20 ms."""


class _User:
    """What is held while a text of one user's is read, on whichever of its connections."""

    def __init__(self) -> None:
        self.long = asyncio.Lock()
        self.short = asyncio.Lock()


class _Turns:
    """One connection's turns at some threads."""

    def __init__(self, threads: ThreadPoolExecutor, of_user: asyncio.Lock) -> None:
        self._threads = threads
        self._of_user = of_user
        self._mine = asyncio.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        # A connection waits for its user once at a time, so each of the user's has its turn.
        async with self._mine, self._of_user:
            under_way = asyncio.get_running_loop().run_in_executor(self._threads, work)
            try:
                return await asyncio.shield(under_way)
            except asyncio.CancelledError:
                # A thread cannot be stopped: leaving early must not bring the next turn forward.
                await asyncio.wait([under_way])
                if not under_way.cancelled():
                    under_way.exception()  # nobody else asks for it
                raise


class ClientParser:
    """Reads what one connection sends."""

    def __init__(
        self, clients: ThreadPoolExecutor, domains: ThreadPoolExecutor, user: _User
    ) -> None:
        """Reads long texts in `clients`, short ones in `domains`."""
        self._user = user  # for as long as the connection is there
        self._long = _Turns(clients, user.long)
        self._short = _Turns(domains, user.short)

    async def parse(self, work: Callable[[], T], chars: int) -> T:
        """Does what parses `chars` characters of the client's XML, when it is its turn."""
        return await (self._short if chars <= SHORT else self._long).run(work)


class Parsers:
    """The threads of one gateway."""

    def __init__(self) -> None:
        """Starts none yet."""
        self._clients = ThreadPoolExecutor(1, "xml of clients")
        self.domains = ThreadPoolExecutor(DOMAINS, "xml of domains")
        """For what libvirtd gave us."""
        self.replies = ThreadPoolExecutor(1, "xml of replies")
        """For replies that are translated."""
        self._users: WeakValueDictionary[int, _User] = WeakValueDictionary()

    def of_client(self, uid: int) -> ClientParser:
        """Returns what reads the XML of a new connection of this user (number)."""
        user = self._users.get(uid)
        if user is None:
            user = self._users[uid] = _User()
        return ClientParser(self._clients, self.domains, user)

    def close(self) -> None:
        """Lets the threads go; what waits for one is cancelled."""
        for threads in (self._clients, self.domains, self.replies):
            threads.shutdown(wait=False, cancel_futures=True)
