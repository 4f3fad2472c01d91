"""A watch that goes on whatever goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import pytest

from csi import follow
from csi.cluster import Change
from csi.clustererrors import UnreachableError
from csi.kinds import VOLUME, Kind
from tests.unit.csi.fake_cluster import FakeCluster

COMPLETE = Change("complete", {})


def present(name: str) -> Change:
    return Change("present", {"metadata": {"name": name}})


@pytest.mark.parametrize("failure", [UnreachableError("it is away"), RuntimeError("a bug")])
def test_it_begins_anew_and_leaves_out_what_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    monkeypatch.setattr(follow, "BROKEN_S", 0.0)
    cluster, stop, seen = FakeCluster(), threading.Event(), []

    def watch(
        kind: Kind,
        ends: threading.Event,
        *,
        labels: Mapping[str, str] | None,
        known: set[tuple[str, str]],
    ) -> Iterator[Change]:
        assert (kind, ends, labels) == (VOLUME, stop, {"a": "b"})
        assert len(known) == cluster.connected - 1  # what was told before
        known.add(("", f"right{cluster.connected}"))
        yield from (present("wrong"), present(f"right{cluster.connected}"))
        if cluster.connected == 1:
            raise failure
        yield COMPLETE
        stop.set()

    def note(change: Change) -> None:
        if change.what == "complete":
            seen.append("complete")
        elif change.object["metadata"]["name"] == "wrong":
            raise KeyError("spec")
        else:
            seen.append(change.object["metadata"]["name"])

    monkeypatch.setattr(cluster, "watch", watch)
    follow.follow(cluster.connect, VOLUME, stop, note, labels={"a": "b"})
    assert seen == ["right1", "right2", "complete"]
