"""What the API server tells of a kind of objects, for as long as a program runs.

`Cluster.watch` goes on by itself over all that it expects; what nobody expects begins it anew here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import structlog

from csi.cluster import Change, Cluster
from csi.clustererrors import ClusterError
from csi.kinds import Kind

BROKEN_S = 5.0
"""Seconds before a watch begins anew that ended."""

log = structlog.get_logger()


def follow(
    connect: Callable[[], Cluster],
    kind: Kind,
    stop: threading.Event,
    note: Callable[[Change], None],
    *,
    labels: Mapping[str, str] | None = None,
) -> None:
    """Calls `note` with each change of a kind, those of `labels` alone, until `stop` is set.

    `connect` is called as often as the watch begins anew; what vanished before that is told, too.
    An object that `note` cannot read (a KeyError, TypeError or ValueError) is left out, and the
    others go on.
    """
    known: set[tuple[str, str]] = set()
    while not stop.is_set():
        try:
            for change in connect().watch(kind, stop, labels=labels, known=known):
                _note(kind, change, note)
        except ClusterError as error:
            log.warning("cannot watch", kind=kind.plural, reason=str(error))
        except Exception:
            log.exception("a watch failed unexpectedly", kind=kind.plural)
        stop.wait(BROKEN_S)


def _note(kind: Kind, change: Change, note: Callable[[Change], None]) -> None:
    try:
        note(change)
    except (KeyError, TypeError, ValueError) as error:
        meta = change.object.get("metadata") or {}
        log.error(
            "an object is not as it should be",
            kind=kind.plural,
            namespace=meta.get("namespace"),
            name=meta.get("name"),
            reason=repr(error),
        )
