"""What many callers ask at the same time is asked once."""

from __future__ import annotations

import asyncio

from plugin.gateway.batching import Batcher


def test_who_asks_meanwhile_shares_the_next_question() -> None:
    asked: list[list[str]] = []
    gate, begun = asyncio.Event(), asyncio.Event()

    async def ask(names: list[str]) -> dict[str, int]:
        asked.append(names)
        begun.set()
        await gate.wait()
        return {name: len(asked) for name in names if name != "gone"}

    async def body() -> None:
        batcher: Batcher[str, int] = Batcher(ask)
        first = asyncio.create_task(batcher.get(["a"]))
        await begun.wait()
        more = [asyncio.create_task(batcher.get([name, "gone"])) for name in ("a", "b", "b")]
        await asyncio.sleep(0)
        more[2].cancel()
        gate.set()
        # The later ones are not told what was found before they asked.
        assert await first == {"a": 1}
        assert [await task for task in more[:2]] == [{"a": 2, "b": 2}] * 2
        assert [sorted(names) for names in asked] == [["a"], ["a", "b", "gone"]]
        assert await batcher.get(["c"]) == {"c": 3}

    asyncio.run(body())


def test_an_error_is_for_all_who_asked_and_none_who_asks_later() -> None:
    failing = True

    async def ask(names: list[str]) -> dict[str, int]:
        if failing:
            raise ValueError("no")
        return dict.fromkeys(names, 1)

    async def body() -> None:
        nonlocal failing
        batcher: Batcher[str, int] = Batcher(ask)
        outcomes = await asyncio.gather(
            *(batcher.get([name]) for name in "ab"), return_exceptions=True
        )
        assert [type(item) for item in outcomes] == [ValueError, ValueError]
        failing = False
        assert await batcher.get(["a"]) == {"a": 1}

    asyncio.run(body())
