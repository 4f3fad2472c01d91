"""How long operations of disks took, put together as each disk's XML wants it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pydataplane.client import Client
from pydataplane.domain.histograms import Histograms
from pydataplane.errors import METHOD_NOT_FOUND, NO_DATA, NO_DEVICE, NO_KEY, RpcError

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


def ask(client: Client, wanted: Collection[Wanted]) -> dict[Wanted, tuple[Latencies, ...]]:
    """Returns the latencies of bdevs; those that have none yet, or never will, are left out.

    One that should be counted and is not, as its target was started again, is from now on.

    Raises:
        TargetError: the target refuses or does not answer.
    """
    asked = list(wanted)
    borders = [sorted({start for _, starts in each for start in starts[1:]}) for _, each in asked]
    answers = client.call_all(
        [
            ("virtlun_bdev_get_latencies", {"names": [bdev], "borders_ns": at})
            for (bdev, _), at in zip(asked, borders, strict=True)
        ]
    )
    found: dict[Wanted, tuple[Latencies, ...]] = {}
    uncounted: set[str] = set()
    for each, at, answer in zip(asked, borders, answers, strict=True):
        bdev, histograms = each
        if not isinstance(answer, RpcError):
            (told,) = answer
            counts = {item["operation"]: item["counts"] for item in told["operations"]}
            found[each] = tuple(
                _latencies(operation, starts, at, counts.get(operation))
                for operation, starts in histograms
            )
        elif answer.code == NO_DATA:
            uncounted.add(bdev)
        elif answer.code not in (NO_DEVICE, NO_KEY, METHOD_NOT_FOUND):
            raise answer
    # Who cannot be counted has nothing to show; whoever shows the disk anew is told why.
    client.call_all(
        [("bdev_enable_histogram", {"name": bdev, "enable": True}) for bdev in sorted(uncounted)]
    )
    return found


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
