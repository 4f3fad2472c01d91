"""Which latencies of a disk are counted: libvirt's <latency-histogram>, and who counts them.

The target does, for each bdev, in far finer steps than anybody asks for: what a disk says is how
they are put together when they are shown. So a volume that several VMs share has one histogram.

Standard library only: the hook is made of it.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import pairwise

from pydataplane.errors import RpcError
from pydataplane.methods import Rpc

OPERATIONS = ("read", "write", "flush")
"""libvirt's words, in its order, which are the target's, too."""

BINS_MAX = 32
"""Of one operation; QEMU has no bound, but all of them are in each answer about the domain."""

START_MAX_NS = (1 << 63) - 1
"""The target's own bound of a latency, nanoseconds."""

_NUMBERS = re.compile(r"[0-9]{1,19}(,[0-9]{1,19})*")

Histograms = tuple[tuple[str, tuple[int, ...]], ...]
"""Operations, in the order of `OPERATIONS`, each with where its bins start, in nanoseconds.

The first bin starts at 0, and the last has no end.
"""


def text_of(histograms: Histograms) -> str:
    """Returns them as they are kept: OPERATION=START,START,... and so on."""
    return " ".join(f"{name}={','.join(map(str, starts))}" for name, starts in histograms)


def parsed(text: str) -> Histograms | None:
    """Returns what `text_of` wrote; None if it is not that."""
    found: dict[str, tuple[int, ...]] = {}
    for word in text.split():
        name, _, numbers = word.partition("=")
        starts = tuple(map(int, numbers.split(","))) if _NUMBERS.fullmatch(numbers) else ()
        if name not in OPERATIONS or not are_starts(starts):
            return None
        found[name] = starts
    return tuple((name, found[name]) for name in OPERATIONS if name in found)


def are_starts(starts: tuple[int, ...]) -> bool:
    """Whether these are where bins can start: from 0 on, each after the one before it."""
    if not starts or len(starts) > BINS_MAX:
        return False
    ascending = all(a < b for a, b in pairwise(starts))
    return ascending and starts[0] == 0 and starts[-1] <= START_MAX_NS


def begin(rpc: Rpc, bdev: str) -> None:
    """Has a bdev's latencies be counted from now on, anew if they were already.

    No disk is lost for what cannot be counted: nothing is done where the target refuses.

    Raises:
        TargetError: it does not answer.
    """
    _count(rpc, bdev, enable=True)


def end(rpc: Rpc, bdev: str) -> None:
    """Ends that. Raises as `begin`."""
    _count(rpc, bdev, enable=False)


def _count(rpc: Rpc, bdev: str, *, enable: bool) -> None:
    with suppress(RpcError):
        rpc.call("bdev_enable_histogram", name=bdev, enable=enable)
