"""The limits of requests: what is read of a bdev, and how seldom a target is asked for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from plugin.gateway import blocklimits
from plugin.gateway.blocklimits import BlockLimits, KnownLimits, ask, limits_of
from plugin.gateway.errors import NoAnswer
from pydataplane.domain.errors import Refusal
from pydataplane.errors import RpcError
from tests.support.fake_target import FakeTarget
from tests.support.wait import until

MIB = 1 << 20
LIMITS = BlockLimits(512, MIB)


def bdev(**changed: Any) -> Any:
    target = FakeTarget()
    target.add_volume("lvs0/v", uuid="b0000000-0000-4000-8000-000000000001")
    (item,) = target.bdev_get_bdevs("lvs0/v")
    return item | changed


CEPH = {"rbd": {"pool_name": "p", "rbd_name": "i", "object_size": 4 * MIB}}


@pytest.mark.parametrize(
    ("changed", "limits"),
    [
        ({}, BlockLimits(512, MIB)),
        ({"block_size": 4096, "preferred_unmap_granularity": 1}, BlockLimits(4096, 4096)),
        ({"supported_io_types": {"unmap": False}}, BlockLimits(512)),
        ({"preferred_unmap_granularity": 0}, BlockLimits(512)),
        ({"driver_specific": CEPH}, BlockLimits(512, MIB, 4 * MIB)),
        ({"driver_specific": {"rbd": {"pool_name": "p"}}}, BlockLimits(512, MIB)),  # SPDK's
        ({"block_size": 520, "md_size": 8, "md_interleave": True}, BlockLimits(512, MIB)),
        ({"md_size": 8, "md_interleave": False}, BlockLimits(512, MIB)),
    ],
)
def test_what_a_bdev_tells_is_in_bytes(changed: dict[str, Any], limits: BlockLimits) -> None:
    assert limits_of(bdev(**changed)) == limits


def test_a_target_that_does_not_tell_how_it_discards_is_no_error() -> None:
    item = bdev()
    del item["preferred_unmap_granularity"]
    assert limits_of(item) == BlockLimits(512)


def test_one_that_is_refused_takes_no_other_ones_away() -> None:
    target = FakeTarget()
    target.add_volume("lvs0/v")
    target.add_volume("lvs0/w")
    answered = target.bdev_get_bdevs

    def refuses(name: str | None = None) -> list[dict[str, Any]]:
        if name == "lvs0/w":
            raise RpcError(-5, "Ceph does not answer")
        return answered(name)

    target.bdev_get_bdevs = refuses  # type: ignore[method-assign]
    assert ask(target, ["lvs0/w", "lvs0/v", "lvs0/gone"]) == {"lvs0/v": LIMITS}


class Asked:
    """Answers for bdevs, and notes which it was asked about."""

    def __init__(self) -> None:
        self.names: list[list[str]] = []
        self.fails = False
        self.answers = asyncio.Event()
        self.answers.set()

    async def __call__(self, names: list[str]) -> dict[str, BlockLimits]:
        self.names.append(sorted(names))
        await self.answers.wait()
        if self.fails:
            raise NoAnswer(Refusal.TIMEOUT, "no answer")
        return {name: LIMITS for name in names if name != "gone"}


Pass = Callable[[float], None]


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Pass:
    """Has time go by, in seconds, as `KnownLimits` sees it."""
    gone = 0.0
    clock = type("Clock", (), {"monotonic": staticmethod(lambda: time.monotonic() + gone)})
    monkeypatch.setattr(blocklimits, "time", clock)

    def wait(seconds: float) -> None:
        nonlocal gone
        gone += seconds

    return wait


def test_each_bdev_is_asked_about_once_in_a_while(later: Pass) -> None:
    async def body() -> None:
        asked = Asked()
        known = KnownLimits(asked)
        assert await known.of(["a", "b"]) == {"a": LIMITS, "b": LIMITS}
        assert "c" in await known.of(["a", "c"])
        assert "gone" not in await known.of(["a", "gone"])
        assert await known.of([]) == await known.of(["a", "b", "c"])
        assert asked.names == [["a", "b"], ["c"], ["gone"]]
        later(blocklimits.AGE_S + 1)
        assert await known.of(["b"]) == {"b": LIMITS}, "what nobody wants any more is not kept"
        assert asked.names[3:] == [["b"]]

    asyncio.run(body())


def test_a_target_that_does_not_answer_is_left_alone_for_a_while(later: Pass) -> None:
    async def body() -> None:
        asked = Asked()
        asked.fails = True
        known = KnownLimits(asked)
        for _ in range(3):
            assert await known.of(["a"]) == {}
        assert len(asked.names) == 1
        asked.fails = False
        later(blocklimits.RETRY_S + 1)
        assert await known.of(["a"]) == {"a": LIMITS}

    asyncio.run(body())


def test_nobody_waits_long_and_what_comes_late_is_known_then(
    later: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        monkeypatch.setattr(blocklimits, "WAIT_S", 0.05)
        asked = Asked()
        asked.answers.clear()
        known = KnownLimits(asked)
        for _ in range(2):
            assert await asyncio.wait_for(known.of(["a"]), 10) == {}
        asked.answers.set()
        await asyncio.to_thread(until, lambda: bool(known._known), "the late answer")
        assert await known.of(["a"]) == {"a": LIMITS}
        assert asked.names == [["a"]]

    asyncio.run(body())
