"""Which PersistentVolumes have a handle, by what a watch tells."""

from __future__ import annotations

import time
from typing import Any

from csi.cluster import SILENCE_S, Change
from csi.volumeindex import VolumeIndex

COMPLETE = Change("complete", {})


def volume(name: str, handle: str, driver: str = "csi.virtlun.dev") -> dict[str, Any]:
    source = {"driver": driver, "volumeHandle": handle}
    return {"metadata": {"name": name}, "spec": {"csi": source}}


def test_nothing_is_known_before_all_is_told() -> None:
    index = VolumeIndex()
    index.note(Change("present", volume("a", "h1")))
    assert index.names("h1") is None
    index.note(COMPLETE)
    assert (index.names("h1"), index.names("h2")) == (("a",), ())


def test_names_come_and_go_and_other_drivers_have_none() -> None:
    index = VolumeIndex()
    index.note(COMPLETE)
    other = volume("c", "h1", "csi.example.org")
    for each in (volume("a", "h1"), volume("b", "h1"), other, volume("a", "h1")):
        index.note(Change("present", each))
    assert index.names("h1") == ("a", "b")
    # One of this name was made anew while nobody saw it: of another handle, then of another driver.
    index.note(Change("present", volume("a", "h2")))
    assert (index.names("h1"), index.names("h2")) == (("b",), ("a",))
    index.note(Change("present", volume("b", "h1", "csi.example.org")))
    for name in ("a", "c", "never"):
        index.note(Change("gone", {"metadata": {"name": name}}))
    assert (index.names("h1"), index.names("h2")) == ((), ())


def test_nothing_is_known_while_the_watch_is_cut_off_or_silent() -> None:
    index = VolumeIndex()
    for change in (Change("present", volume("a", "h1")), COMPLETE):
        index.note(change)
    for silence, known in ((0.0, ("a",)), (SILENCE_S + 1, None), (0.0, ("a",))):
        index.heard = lambda silence=silence: time.monotonic() - silence  # type: ignore[misc]
        assert index.names("h1") == known
    index.heard = lambda: None
    assert index.names("h1") is None
