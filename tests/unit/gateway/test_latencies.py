"""How latencies are asked for, of few disks and of many, and how much of them an answer has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from plugin.gateway.latencies import Latencies, Room, Wanted, ask
from pydataplane.client import Client
from pydataplane.domain.histograms import BINS_MAX, OPERATIONS, START_MAX_NS, Histograms
from pydataplane.errors import NO_DATA, NO_DEVICE, RpcError

REQUEST_MAX_BYTES = 1 << 20
"""What a target takes at a time, a batch included."""


class Asked:
    """A client whose target tells of each bdev, and refuses those that it is told to."""

    def __init__(self, refuse: Mapping[str, int] | None = None) -> None:
        self.refuse = refuse or {}
        self.enabled: list[str] = []

    def call_all(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Any]:
        assert len(json.dumps(requests)) < REQUEST_MAX_BYTES
        return [self._answer(method, params) for method, params in requests]

    def _answer(self, method: str, params: Mapping[str, Any]) -> Any:
        if method == "bdev_enable_histogram":
            self.enabled.append(params["name"])
            return True
        (name,) = params["names"]
        if name in self.refuse:
            return RpcError(self.refuse[name], "refused")
        borders = params["borders_ns"]
        counts = [*range(1, len(borders) + 1), 1000]
        return [{"name": name, "operations": [{"operation": "read", "counts": counts}]}]


def asked(client: Asked, wanted: Sequence[Wanted]) -> dict[Wanted, tuple[Latencies, ...]]:
    return ask(cast(Client, client), wanted)


def test_each_disk_has_its_own_bins() -> None:
    one: Histograms = (("read", (0, 10, 30)), ("write", (0, 20)))
    # Of 10, 20 and 30 ns one, two and three took less, of 1,000.
    assert asked(Asked(), [("a", one)]) == {
        ("a", one): (
            Latencies("read", (0, 10, 30), (1, 2, 997)),
            Latencies("write", (0, 20), (0, 0)),
        )
    }
    assert asked(Asked(), []) == {}


def test_very_many_bins_are_asked_for_in_several_exchanges() -> None:
    starts = (0, *range(START_MAX_NS - BINS_MAX + 2, START_MAX_NS + 1))
    assert len(starts) == BINS_MAX
    each: Histograms = tuple(
        (name, (0, *(start - nth * BINS_MAX for start in starts[1:])))
        for nth, name in enumerate(OPERATIONS)
    )
    wanted = [(f"{number:036}", each) for number in range(2000)]
    assert asked(Asked(), wanted).keys() == set(wanted)


def test_what_is_refused_of_one_takes_nothing_from_the_others() -> None:
    bins: Histograms = (("read", (0,)),)
    client = Asked({"gone": NO_DEVICE, "uncounted": NO_DATA, "odd": -5})
    found = asked(client, [(name, bins) for name in ("gone", "a", "uncounted", "odd", "b")])
    assert {bdev for bdev, _ in found} == {"a", "b"}
    assert client.enabled == ["uncounted"]


def test_what_does_not_fit_is_left_out_whole() -> None:
    room = Room(5)
    three, two = Latencies("read", (0, 1, 2), (0, 0, 0)), Latencies("write", (0, 1), (0, 0))
    assert room.take((three,)) == (three,)
    assert room.take((three,)) == ()
    assert room.take((two,)) == (two,)
    assert room.take(()) == () and room.left == 0
