"""Questions that many ask at the same time, put as one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Joined(Generic[T]):
    """One question about names at a time; who asks meanwhile shares the next one.

    So however many ask, two questions are under way or wait, and nobody gets an answer to what was
    asked before it came.
    """

    def __init__(self, ask: Callable[[list[str]], Awaitable[dict[str, T]]]) -> None:
        """`ask` takes names, each once, and returns what is known by name."""
        self._ask = ask
        self._turn = asyncio.Lock()
        self._names: set[str] = set()
        self._next: asyncio.Task[dict[str, T]] | None = None

    async def about(self, names: Iterable[str]) -> dict[str, T]:
        """Returns what is known of `names` now; raises what `ask` raises."""
        wanted = list(names)
        self._names.update(wanted)
        if self._next is None:
            self._next = asyncio.create_task(self._put())
        # One who leaves must not take the answer from the others.
        found = await asyncio.shield(self._next)
        return {name: found[name] for name in wanted if name in found}

    async def _put(self) -> dict[str, T]:
        async with self._turn:
            names, self._names, self._next = self._names, set(), None
            return await self._ask(sorted(names))
