"""Latencies of bdevs: histograms of the target, and what is between two looks at them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from pydataplane.client import Client
from pydataplane.errors import METHOD_NOT_FOUND, RpcError

FINE_NS = tuple(round(1000 * 2 ** (step / 4)) for step in range(109))
"""Borders from 1 µs to 134 s, four each time that they double: a percentile is good to a fifth."""

Counts = Mapping[str, Sequence[int]]
"""By operation how many took less than each border, and how many there were."""


class Counting:
    """Has a target count the latencies of bdevs, and ends what it began."""

    def __init__(self, target: Client) -> None:
        self._target = target
        self._begun: set[str] = set()
        self._refused: set[str] = set()

    def begin(self, names: Collection[str], known: Mapping[str, Counts] | None) -> None:
        """Begins with those of the bdevs that are not counted.

        `known` is what the target has told (`counted`). One that cannot count is left as it is, and
        so is a bdev that is gone, or whose counting was refused, for as long as it is there.
        """
        if known is None:
            return
        self._refused.intersection_update(names)
        for name in names:
            if name in known or name in self._refused:
                continue
            # Before the target hears of it: an interruption may come before the answer.
            self._begun.add(name)
            try:
                self._target.call("bdev_enable_histogram", name=name, enable=True)
            except RpcError:
                self._begun.discard(name)
                self._refused.add(name)

    def end(self) -> None:
        """Ends what was begun."""
        for name in self._begun:
            with suppress(RpcError):
                self._target.call("bdev_enable_histogram", name=name, enable=False)
        self._begun.clear()


def counted(target: Client, borders_ns: Sequence[int]) -> dict[str, Counts] | None:
    """Returns what was counted, by name of bdev; None of a target that cannot count."""
    try:
        told = target.call("virtlun_bdev_get_latencies", borders_ns=list(borders_ns))
    except RpcError as error:
        if error.code != METHOD_NOT_FOUND:
            raise
        return None
    return {
        bdev["name"]: {each["operation"]: each["counts"] for each in bdev["operations"]}
        for bdev in told
    }


def between(before: Counts, after: Counts, operations: Iterable[str]) -> list[int]:
    """Returns how many of these operations took less than each border from one look to the next.

    Where counting began anew in between, all that was counted since.
    """
    sums: list[int] = []
    for operation in operations:
        new, old = after.get(operation), before.get(operation)
        if not new:
            continue
        if not old or new[-1] < old[-1]:
            old = [0] * len(new)
        apart = [now - then for now, then in zip(new, old, strict=True)]
        sums = [a + b for a, b in zip(sums, apart, strict=True)] if sums else apart
    return sums


def percentile_ns(counts: Sequence[int], share: float) -> float | None:
    """Returns the latency that this share of operations stayed below, in nanoseconds.

    `counts` are those of `FINE_NS`; None where there were no operations. Between two borders
    latencies count as spread evenly.
    """
    if not counts or counts[-1] <= 0:
        return None
    wanted = share * counts[-1]
    below, border = 0, 0
    for reached, next_border in zip(counts, FINE_NS, strict=False):
        if reached >= wanted:
            within = (wanted - below) / max(reached - below, 1)
            return border + within * (next_border - border)
        below, border = reached, next_border
    return float(FINE_NS[-1])
