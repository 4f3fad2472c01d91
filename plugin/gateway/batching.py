"""Batches questions that many callers ask at the same time, so that a target is asked once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Batcher(Generic[K, T]):
    """Asks one batch of names at a time; callers that come meanwhile share the next batch.

    So at most two batches are under way or wait, and no caller gets an answer to a question that
    was asked before it came.
    """

    def __init__(self, ask: Callable[[list[K]], Awaitable[dict[K, T]]]) -> None:
        """`ask` takes names, each once, and returns what is known by name."""
        self._ask = ask
        self._turn = asyncio.Lock()
        self._names: set[K] = set()
        self._next: asyncio.Task[dict[K, T]] | None = None

    async def get(self, names: Iterable[K]) -> Mapping[K, T]:
        """Returns what is known of `names` now, and of what others asked for at the same time.

        It is one mapping for all of them, so that thousands of names are not sorted out for each.
        Raises what `ask` raises.
        """
        self._names.update(names)
        if self._next is None:
            self._next = asyncio.create_task(self._put())
        # One who leaves must not take the answer from the others.
        return await asyncio.shield(self._next)

    async def _put(self) -> dict[K, T]:
        async with self._turn:
            names, self._names, self._next = self._names, set(), None
            return await self._ask(list(names))
