"""The <latency-histogram> elements of a client's <disk>: read and checked.

They stand in <statistics> of <driver>, as in libvirt 12.1 and newer, and each `start` is a number
of nanoseconds. One without `type` is of each operation that has none of its own.
"""

from __future__ import annotations

import re

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.histograms import (
    BINS_MAX,
    OPERATIONS,
    START_MAX_NS,
    Histograms,
    are_starts,
)
from pydataplane.domain.xml.document import Node

_NUMBER = re.compile(r"[0-9]{1,19}")


def read(node: Node) -> Histograms:
    """Reads what a <disk> wants counted; what cannot be is left for `check`."""
    found: dict[str | None, tuple[int, ...]] = {}
    for element in _elements(node):
        starts = _starts(element)
        if starts is not None and are_starts(starts):
            found.setdefault(element.attrs.get("type"), starts)
    of_each = found.get(None)
    wanted = ((name, found.get(name, of_each)) for name in OPERATIONS)
    return tuple((name, starts) for name, starts in wanted if starts is not None)


def check(node: Node, what: str) -> None:
    """Refuses histograms that cannot be.

    Raises:
        TranslateError: BAD_XML, bins that do not ascend or are no numbers, or more than one
            histogram of an operation; UNSUPPORTED, more bins than there can be.
    """
    seen = set()
    for element in _elements(node):
        kind = element.attrs.get("type")
        if kind in seen:
            of_what = f"type='{kind}'" if kind is not None else "no type"
            raise TranslateError(
                Refusal.BAD_XML, f"{what}: there is more than one <latency-histogram> of {of_what}"
            )
        seen.add(kind)
        starts = _starts(element)
        if starts is not None and len(starts) > BINS_MAX:
            raise TranslateError(
                Refusal.UNSUPPORTED,
                f"{what}: a <latency-histogram> has at most {BINS_MAX} bins with the one from 0 on",
            )
        if starts is None or not are_starts(starts):
            raise TranslateError(
                Refusal.BAD_XML,
                f"{what}: a <latency-histogram> needs one <bin start='NANOSECONDS'/> or more, each"
                f" with a larger start than the one before it, at most {START_MAX_NS}",
            )


def _elements(node: Node) -> list[Node]:
    driver = node.child("driver")
    statistics = driver.child("statistics") if driver is not None else None
    return list(statistics.every("latency-histogram")) if statistics is not None else []


def _starts(element: Node) -> tuple[int, ...] | None:
    """Returns where the bins start, with one from 0 on; None if one is no number or there is none.

    Whether they can start so is for `are_starts`.
    """
    texts = [each.attrs.get("start", "") for each in element.every("bin")]
    if not texts or not all(_NUMBER.fullmatch(text) for text in texts):
        return None
    given = tuple(map(int, texts))
    return given if given[0] == 0 else (0, *given)
