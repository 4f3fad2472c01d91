"""The threads that limit volumes by their classes; what they do the tests beside these look at."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from csi.classwatch import WORKERS, ClassWatch
from csi.cluster import Change
from csi.errors import Code
from csi.kinds import VOLUME, Kind
from csi.queue import Queue
from csi.targets import Targets
from csi.volumelimits import VolumeLimits
from csi.volumes import OwnedVolumes
from tests.support.fake_target import LVSTORE_UUID
from tests.support.wait import until
from tests.unit.csi.conftest import NODE, World, refused
from tests.unit.csi.fake_cluster import FakeCluster
from tests.unit.csi.test_classwatch import Told, Watched, persistent
from tests.unit.csi.test_moves import OTHER_LVSTORE, OTHER_NODE, say


class Running(ClassWatch):
    """Looks at names alone: at images until it is released, and at `broken` in vain."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.released = threading.Event()
        self.seen: Queue[str] = Queue()
        self.looks = 0

    def look_at(self, name: str) -> None:
        if name.startswith("image"):
            self.released.wait()
        elif name == "broken":
            self.looks += 1
            raise RuntimeError("a bug")
        self.seen.put(name)


def test_no_volume_waits_for_images_and_no_worker_ends_by_a_bug(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads are real: images come first, then more bugs than there are workers."""
    watched = Watched(world)
    pool = f"csi.virtlun.dev/pool-{LVSTORE_UUID}"
    images = [persistent(f"image{at}", "i", key=pool) for at in range(2 * WORKERS)]
    broken, last = [persistent("broken", "b")], [persistent("last", "l")]
    stopped = threading.Event()

    def watch(kind: Kind, ends: threading.Event, **_: Any) -> Iterator[Change]:
        assert (kind, ends) == (VOLUME, stopped)
        for each in (*images, *broken * (WORKERS + 1), *last):
            yield Change("gone", each)  # it is looked at each time
            yield Change("present", each)
            while each["metadata"]["name"] == "broken" and running.looks == 0:
                stopped.wait(0.01)
            running.looks = 0
        stopped.wait()

    monkeypatch.setattr(watched.cluster, "watch", watch)
    running = watched.made(Running)
    running.begin(stopped)
    try:
        until(running.seen.waiting, "the last volume to be looked at")
        due = running.seen.get()
        assert due is not None
        assert due.key == "last"
    finally:
        stopped.set()
        running.released.set()


def test_what_the_watch_told_is_not_believed_once_it_is_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both nodes' objects were made meanwhile, and another one's was used last."""
    cluster = world.cluster = FakeCluster()
    world.restart()
    handle = world.create().volume_id
    heard: dict[str, float] = {VOLUME.plural: time.monotonic()}
    monkeypatch.setattr(cluster, "_heard", heard)
    stopped, told = threading.Event(), threading.Event()

    def watch(*_: Any, **__: Any) -> Iterator[Change]:
        yield Change("complete", {})
        told.set()
        stopped.wait()

    monkeypatch.setattr(cluster, "watch", watch)
    volumes = OwnedVolumes(Targets([world.target]), NODE)
    parts = volumes, VolumeLimits(volumes.lvols), world.locks, world.persistent, Told()
    ClassWatch(*parts, cluster.connect).begin(stopped)
    try:
        assert told.wait(10)
        assert world.persistent.index.names(handle) == ()
        say(world, NODE, of=handle)
        say(world, OTHER_NODE, OTHER_LVSTORE, of=handle, name="restored")
        heard.clear()
        why = refused(lambda: world.stage(handle), Code.FAILED_PRECONDITION)
        assert "is of several PersistentVolumes" in why
    finally:
        stopped.set()
