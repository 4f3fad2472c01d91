"""Which PersistentVolumes have a handle, by what a watch tells."""

from __future__ import annotations

from typing import Any

from csi import TOPOLOGY_KEY
from csi.cluster import Change
from csi.volumeindex import Known, VolumeIndex

COMPLETE = Change("complete", {})


def names(index: VolumeIndex, handle: str) -> tuple[str, ...] | None:
    known = index.of(handle)
    return None if known is None else tuple(sorted(each.name for each in known))


def volume(name: str, handle: str, driver: str = "csi.virtlun.dev") -> dict[str, Any]:
    source = {"driver": driver, "volumeHandle": handle}
    return {"metadata": {"name": name}, "spec": {"csi": source}}


def test_nothing_is_known_before_all_is_told() -> None:
    index = VolumeIndex()
    index.note(Change("present", volume("a", "h1")))
    assert names(index, "h1") is None
    index.note(COMPLETE)
    assert (names(index, "h1"), names(index, "h2")) == (("a",), ())


def test_names_come_and_go_and_other_drivers_have_none() -> None:
    index = VolumeIndex()
    index.note(COMPLETE)
    other = volume("c", "h1", "csi.example.org")
    for each in (volume("a", "h1"), volume("b", "h1"), other, volume("a", "h1")):
        index.note(Change("present", each))
    assert names(index, "h1") == ("a", "b")
    # One of this name was made anew while nobody saw it: of another handle, then of another driver.
    index.note(Change("present", volume("a", "h2")))
    assert (names(index, "h1"), names(index, "h2")) == (("b",), ("a",))
    index.note(Change("present", volume("b", "h1", "csi.example.org")))
    for name in ("a", "c", "never"):
        index.note(Change("gone", {"metadata": {"name": name}}))
    assert (names(index, "h1"), names(index, "h2")) == ((), ())


def test_where_and_when_is_kept_as_it_is_at_last() -> None:
    index = VolumeIndex()
    index.note(COMPLETE)
    for node in ("node1", "node2"):
        one = volume("a", "h1")
        one["metadata"]["creationTimestamp"] = "2026-11-01T00:00:00Z"
        expression = {"key": TOPOLOGY_KEY, "operator": "In", "values": [node]}
        terms = [{"matchExpressions": [expression]}]
        one["spec"]["nodeAffinity"] = {"required": {"nodeSelectorTerms": terms}}
        index.note(Change("present", one))
    assert index.of("h1") == (Known("a", "node2", "2026-11-01T00:00:00Z"),)
