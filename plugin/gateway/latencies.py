"""How long operations of disks took, put together as each disk's XML wants it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pydataplane.client import Client
from pydataplane.domain.histograms import Histograms
from pydataplane.errors import NO_DATA, RpcError

Wanted = tuple[str, Histograms]
"""A bdev's name, and what of its latencies a disk wants."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """One operation of a disk."""

    operation: str
    starts: tuple[int, ...]
    """Where bins start, nanoseconds."""
    counts: tuple[int, ...]
    """How many operations each bin has."""


class Room:
    """How many bins there can be, of one domain or in one answer."""

    def __init__(self, bins: int) -> None:
        self.left = bins
        """How many more."""

    def take(self, wanted: tuple[Latencies, ...]) -> tuple[Latencies, ...]:
        """Returns what is wanted, as long as there is room for all of it; else nothing."""
        bins = sum(len(each.starts) for each in wanted)
        if bins > self.left:
            return ()
        self.left -= bins
        return wanted


BORDERS_MAX = 8192
"""Borders that are asked for in one exchange: 200 KiB with all else, and a target takes 1 MiB."""


def ask(client: Client, wanted: Collection[Wanted]) -> dict[Wanted, tuple[Latencies, ...]]:
    """Returns the latencies of bdevs; those that have none yet, or never will, are left out.

    One that should be counted and is not, as its target was started again, is from now on.

    Raises:
        TargetError: the target does not answer.
    """
    found: dict[Wanted, tuple[Latencies, ...]] = {}
    uncounted: set[str] = set()
    for some in _batches(wanted):
        answers = client.call_all(
            [
                ("virtlun_bdev_get_latencies", {"names": [bdev], "borders_ns": borders})
                for (bdev, _), borders in some
            ]
        )
        for (each, borders), answer in zip(some, answers, strict=True):
            bdev, histograms = each
            if isinstance(answer, RpcError):  # one that cannot be counted takes no other's away
                uncounted.update([bdev] if answer.code == NO_DATA else [])
                continue
            (told,) = answer
            counts = {item["operation"]: item["counts"] for item in told["operations"]}
            found[each] = tuple(
                _latencies(operation, starts, borders, counts.get(operation))
                for operation, starts in histograms
            )
    client.call_all(
        [("bdev_enable_histogram", {"name": bdev, "enable": True}) for bdev in sorted(uncounted)]
    )
    return found


def _batches(wanted: Collection[Wanted]) -> Iterator[list[tuple[Wanted, list[int]]]]:
    """Yields what is wanted, each with the borders to ask for, so many as fit one exchange."""
    batch: list[tuple[Wanted, list[int]]] = []
    inside = 0
    for each in wanted:
        borders = sorted({start for _, starts in each[1] for start in starts[1:]})
        if batch and inside + len(borders) > BORDERS_MAX:
            yield batch
            batch, inside = [], 0
        batch.append((each, borders))
        inside += len(borders)
    if batch:
        yield batch


def _latencies(
    operation: str, starts: tuple[int, ...], borders: list[int], below: list[int] | None
) -> Latencies:
    """Puts together what took less than each border, and all; None: there was nothing."""
    if below is None:
        return Latencies(operation, starts, (0,) * len(starts))
    reached = dict(zip(borders, below, strict=False))
    ends = [*(reached[start] for start in starts[1:]), below[-1]]
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return Latencies(operation, starts, tuple(counts))
