"""Memory for what is read whole: so much for a connection, and so much for all together.

That are calls, and messages of streams. A connection always has room for some short ones, whatever
others send. What is longer takes of a pool that all share, in the order in which it came, one user
after the other; until then no more is read of that connection, so the kernel holds up the client
that sends.
"""

from __future__ import annotations

import asyncio
from collections import deque

OWN_BYTES = 256 << 10
"""Of short calls, which each connection has beside the pool."""

SESSION_BYTES = 16 << 20
"""The most that one connection's calls take of the pool; the longest call has 12.2 MiB."""

POOL_BYTES = 64 << 20
"""What the calls of all connections take of the pool."""


class Budget:
    """The pool."""

    def __init__(self) -> None:
        self.held = 0
        """Bytes that calls have of it."""
        self._waiting: dict[int, deque[tuple[asyncio.Future[None], int]]] = {}
        """By user (number), in the order of their turns: who waits for how many bytes."""

    def share(self, uid: int) -> Share:
        """Returns the part of a new connection of this user (number)."""
        return Share(self, uid)

    async def take(self, uid: int, size: int) -> None:
        """Waits until there are `size` bytes for this user."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(uid, deque()).append((turn, size))
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(size)
            else:
                turn.cancel()
                self._serve()
            raise

    def give(self, size: int) -> None:
        """Gives `size` bytes back."""
        self.held -= size
        self._serve()

    def _serve(self) -> None:
        """Lets those go on for whom there is room, one of each user after the other.

        Whose turn it is waits for its room, however little the next one wants: else long calls
        would never come.
        """
        while self._waiting:
            uid, queue = next(iter(self._waiting.items()))
            while queue and queue[0][0].done():  # it has left
                queue.popleft()
            if queue:
                turn, size = queue[0]
                if self.held + size > POOL_BYTES:
                    return
                queue.popleft()
                self.held += size
                turn.set_result(None)
            del self._waiting[uid]
            if queue:
                self._waiting[uid] = queue  # behind the other users


class Share:
    """What one connection has of it; one task takes."""

    def __init__(self, pool: Budget, uid: int) -> None:
        self._pool = pool
        self._uid = uid
        self._own = 0
        self._drawn = 0
        self._given = asyncio.Event()

    async def take(self, size: int) -> Grant:
        """Waits until a call of `size` bytes, SESSION_BYTES at most, may be read."""
        if self._own + size <= OWN_BYTES:
            self._own += size
            return Grant(self, size, drawn=False)
        while self._drawn and self._drawn + size > SESSION_BYTES:
            self._given.clear()
            await self._given.wait()
        await self._pool.take(self._uid, size)
        self._drawn += size
        return Grant(self, size, drawn=True)

    def give(self, size: int, *, drawn: bool) -> None:
        """Takes back what a grant was for."""
        if drawn:
            self._drawn -= size
            self._pool.give(size)
        else:
            self._own -= size
        self._given.set()


class Grant:
    """Room for one call."""

    def __init__(self, share: Share, size: int, *, drawn: bool) -> None:
        self._share, self._size = share, size
        self.drawn = drawn
        """Whether it is of the pool, for which others may wait."""

    def release(self) -> None:
        """Gives it back: the call is answered. Not to be called twice."""
        self._share.give(self._size, drawn=self.drawn)
