"""Limits that come by the watch of PersistentVolumes, with doubles of API server and target."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from csi import TOPOLOGY_KEY
from csi.classwatch import AGAIN_S, TOLD_AFTER, ClassWatch
from csi.cluster import Change
from csi.kinds import ATTRIBUTES_CLASS, CLAIM, VOLUME, Kind
from csi.objects import Object, PersistentVolume
from csi.queue import Queue
from csi.targets import Targets
from csi.volumelimits import VolumeLimits
from csi.volumenodes import VolumeNodes
from csi.volumes import OwnedVolumes
from csi.waitingclaims import WaitingClaims
from pydataplane.errors import TargetTimeout, TargetUnavailable
from tests.support.fake_target import LVSTORE, LVSTORE_UUID
from tests.unit.csi.conftest import NODE, World, block
from tests.unit.csi.fake_cluster import FakeCluster

Watch = TypeVar("Watch", bound=ClassWatch)
PV = "pvc-1"
"""What csi-provisioner calls both volume and PersistentVolume."""
OTHER_UUID = f"{LVSTORE_UUID[:13]}-4000-8000-000000000001"
"""An lvstore's or pool's whose handles begin alike."""
LIMITED = {"total_iops_sec": 500}


def persistent(
    name: str, handle: str, of: str | None = "silver", key: str = TOPOLOGY_KEY, value: str = NODE
) -> Object:
    """Returns a PersistentVolume of a class for the claim `data`, where a label has a value."""
    terms = [{"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]}]
    spec = {
        "csi": {"driver": "csi.virtlun.dev", "volumeHandle": handle},
        "claimRef": {"namespace": "ns", "name": "data"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
    }
    return {
        "metadata": {"name": name},
        "spec": spec | ({"volumeAttributesClassName": of} if of else {}),
    }


class Told(WaitingClaims):
    """Keeps what claims are told."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str, str]] = []

    def tell(self, claim: str, reason: str, message: str) -> None:
        self.said.append((claim, reason, message))


class RecordingQueue(Queue[str]):
    """Writes down what is put into it."""

    def __init__(self, into: list[tuple[str, float]]) -> None:
        super().__init__()
        self._into = into

    def put(self, key: str, after_s: float = 0.0) -> None:
        self._into.append((key, after_s))


class Watched:
    """A watch of what is in `cluster`, fed by hand, with one volume of the claim `data`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.cluster = FakeCluster()
        self.told = Told()
        self.handle = world.create().volume_id
        self.asked(None)
        self.define("silver", iops="500")
        self.queued: list[tuple[str, float]] = []
        self.pool = {"node": "true", "key": f"csi.virtlun.dev/pool-{LVSTORE_UUID}"}
        self.watch = self.made(ClassWatch, lambda: RecordingQueue(self.queued))

    def made(self, kind: type[Watch], queue: Callable[[], Queue[str]] = Queue) -> Watch:
        """Returns a watch that has seen nothing."""
        volumes = OwnedVolumes(Targets([self.world.target]), NODE)
        limits = VolumeLimits(volumes.lvols)
        nodes = VolumeNodes(NODE, self.cluster.connect)
        parts = volumes, limits, self.world.locks, nodes, self.told
        return kind(*parts, self.cluster.connect, queue)

    def define(self, name: str, driver: str = "csi.virtlun.dev", **parameters: str) -> None:
        """Makes a class."""
        given = {"metadata": {"name": name}, "driverName": driver, "parameters": parameters}
        self.cluster.put(ATTRIBUTES_CLASS, given)

    def asked(self, name: str | None, volume: str = PV) -> None:
        """Has the claim name a class."""
        spec = {"volumeName": volume} | ({"volumeAttributesClassName": name} if name else {})
        self.cluster.put(CLAIM, {"metadata": {"name": "data", "namespace": "ns"}, "spec": spec})

    def noted(
        self, name: str | None, node: str = NODE, key: str = TOPOLOGY_KEY, volume: str = PV
    ) -> None:
        """Has csi-resizer note a class at the volume, and does what is to be done at once."""
        self.queued.clear()
        found = persistent(volume, self.handle, name, key, node)
        self.cluster.put(VOLUME, dict(found))
        self.watch.note(Change("present", found))
        for entry in list(self.queued):
            assert entry == (volume, 0)
            self.queued.remove(entry)
            self.watch.look_at(volume)

    @property
    def limits(self) -> dict[str, int]:
        """What the target has."""
        return self.world.target.volume(self.handle).limits


@pytest.fixture
def watched(world: World) -> Watched:
    """A watch of one volume."""
    return Watched(world)


def test_a_volume_is_limited_when_its_class_is_noted(watched: Watched) -> None:
    watched.noted(None)
    watched.asked("silver")
    watched.noted("silver")
    assert (watched.limits, watched.queued) == (LIMITED, [])
    watched.define("gold", iops="0", readThroughput="1")
    watched.asked("gold")
    watched.noted("gold")
    assert watched.limits == {"read_bytes_sec": 1 << 20}


def test_other_changes_of_it_are_not_looked_at(watched: Watched) -> None:
    watched.asked("silver")
    watched.noted("silver")
    watched.cluster.calls.clear()
    watched.noted("silver")
    assert watched.cluster.calls == []
    watched.watch.note(Change("gone", {"metadata": {"name": PV}}))
    watched.watch.note(Change("complete", {}))
    watched.watch.look_at(PV)
    assert watched.cluster.calls == []


def test_nor_are_volumes_of_other_nodes(watched: Watched) -> None:
    watched.asked("silver")
    watched.noted("silver", node="node2")
    assert (watched.limits, watched.cluster.calls) == ({}, [])


@pytest.mark.parametrize("claims", [None, "gold"])
def test_a_class_that_the_claim_does_not_ask_for_is_not_believed(
    watched: Watched, claims: str | None
) -> None:
    """Any node's account may note one at any volume; the claim is looked at again."""
    watched.asked(claims)
    watched.noted("silver")
    assert (watched.limits, watched.queued) == ({}, [(PV, AGAIN_S)])
    watched.asked("silver")
    watched.watch.look_at(PV)
    assert watched.limits == LIMITED


def test_nor_one_of_a_claim_that_has_another_volume(watched: Watched) -> None:
    watched.asked("silver", volume="other")
    watched.noted("silver")
    assert watched.limits == {}


@pytest.mark.parametrize("uuid", [LVSTORE_UUID, OTHER_UUID])
def test_nor_a_volume_that_another_node_calls_an_image_of_a_pool(
    watched: Watched, uuid: str
) -> None:
    """Its credentials make PersistentVolumes of pools, with any handle, for a claim of its own."""
    watched.define("mine", iops="0")
    watched.asked("silver")
    watched.noted("silver")
    watched.asked("mine", volume="forged")
    watched.noted("mine", node="true", key=f"csi.virtlun.dev/pool-{uuid}", volume="forged")
    assert (watched.limits, watched.queued) == (LIMITED, [])


def test_nor_a_second_volume_of_an_image(world: World) -> None:
    world.target.pools.add(LVSTORE)
    watched = Watched(world)
    world.stage(watched.handle, block())
    watched.asked("silver")
    watched.noted("silver", **watched.pool)
    watched.define("mine", iops="0")
    watched.asked("mine", volume="forged")
    watched.noted("mine", **watched.pool, volume="forged")
    assert (watched.limits, watched.queued) == (LIMITED, [("forged", AGAIN_S)])


def test_a_volume_is_limited_once_the_other_one_of_its_handle_is_gone(world: World) -> None:
    world.target.pools.add(LVSTORE)
    watched = Watched(world)
    world.stage(watched.handle, block())
    watched.noted(None, **watched.pool, volume="other")
    watched.asked("silver", volume="again")
    watched.noted("silver", **watched.pool, volume="again")
    assert (watched.limits, watched.queued) == ({}, [("again", AGAIN_S)])
    del watched.cluster.objects[VOLUME.name, "other"]
    watched.watch.look_at("again")
    assert watched.limits == LIMITED


def test_a_volume_that_an_administrator_has_made_anew_is_limited(watched: Watched) -> None:
    watched.cluster.volumes[watched.handle] = PersistentVolume(
        *("again", "csi.virtlun.dev", watched.handle, 4096, "4096"),
        block=True,
        node=NODE,
        claim=("ns", "data"),
        deleting=False,
    )
    watched.asked("silver", volume="again")
    watched.noted("silver", volume="again")
    assert watched.limits == LIMITED


def test_an_image_is_limited_where_it_is_used(world: World) -> None:
    world.target.pools.add(LVSTORE)
    watched = Watched(world)
    world.stage(watched.handle, block())
    watched.asked("silver")
    watched.noted("silver", **watched.pool)
    assert watched.limits == LIMITED
    world.unstage(watched.handle)
    assert watched.limits == {}
    world.stage(watched.handle, block())
    assert watched.limits == LIMITED


def test_of_two_classes_the_later_one_counts_whoever_is_late(watched: Watched) -> None:
    """Its class is read for one look while the volume gets another class, which is looked at."""
    watched.define("gold", iops="9")
    watched.asked("silver")
    read = watched.cluster.get

    def overtaken(kind: Kind, name: str, namespace: str | None = None) -> Object:
        answer = read(kind, name, namespace)
        if kind is ATTRIBUTES_CLASS:
            watched.cluster.get = read  # type: ignore[method-assign]
            watched.asked("gold")
            watched.noted("gold")
        return answer

    watched.cluster.get = overtaken  # type: ignore[method-assign]
    watched.noted("silver")
    assert watched.limits == {"total_iops_sec": 9}


def test_a_driver_that_begins_anew_looks_at_all(watched: Watched) -> None:
    watched.asked("silver")
    watched.noted("silver")
    watched.world.target.volume(watched.handle).limits.clear()
    watched.watch = watched.made(ClassWatch, lambda: RecordingQueue(watched.queued))
    watched.noted("silver")
    assert watched.limits == LIMITED


def _target_away(watched: Watched) -> None:
    watched.world.target.fail["virtlun_bdev_get_limits"] = TargetUnavailable("gone")


def _server_away(watched: Watched) -> None:
    watched.cluster.down = 1


def _broken(watched: Watched) -> None:
    watched.world.target.fail["virtlun_bdev_get_limits"] = RuntimeError("a bug")


@pytest.mark.parametrize("away", [_target_away, _server_away, _broken])
def test_what_fails_is_tried_again_and_the_claim_is_told_when_it_lasts(
    watched: Watched, away: Callable[[Watched], None]
) -> None:
    watched.asked("silver")
    away(watched)
    watched.noted("silver")
    assert (watched.limits, len(watched.queued)) == ({}, 1)
    for _ in range(TOLD_AFTER - 1):
        assert watched.told.said == []
        away(watched)
        watched.watch.look_at(PV)
    [(claim, reason, message)] = watched.told.said
    assert (claim, reason) == ("ns/data", "NotLimited")
    assert "of VolumeAttributesClass silver are not set on node node1 yet" in message
    watched.watch.look_at(PV)
    assert watched.limits == LIMITED


@pytest.mark.parametrize(
    ("driver", "parameters", "said"),
    [
        ("csi.virtlun.dev", {"iops": "fast"}, "iops: 'fast'"),
        ("ebs.csi.aws.com", {"iops": "3000"}, "is of ebs.csi.aws.com"),
    ],
)
def test_a_class_that_is_none_of_ours_is_told_of(
    watched: Watched, driver: str, parameters: dict[str, str], said: str
) -> None:
    watched.define("silver", driver, **parameters)
    watched.asked("silver")
    watched.noted("silver")
    watched.watch.look_at(PV)
    [(_, _, message)] = watched.told.said
    assert said in message
    assert watched.limits == {}
    assert watched.queued == [(PV, AGAIN_S)] * 2


def test_a_volume_that_waits_for_its_key_is_looked_at_again(watched: Watched) -> None:
    watched.asked("silver")
    watched.world.target.loaded = False
    watched.noted("silver")
    assert watched.queued == [(PV, AGAIN_S)]
    watched.world.target.loaded = True
    watched.watch.look_at(PV)
    assert watched.limits == LIMITED


def test_while_its_target_is_away_the_api_server_is_not_asked(watched: Watched) -> None:
    watched.asked("silver")
    watched.world.target.refuse["bdev_get_bdevs"] = TargetUnavailable("gone")
    for look in range(3):
        watched.noted("silver")
        watched.watch.look_at(PV)
        assert watched.cluster.calls == [], look
    del watched.world.target.refuse["bdev_get_bdevs"]
    watched.watch.look_at(PV)
    assert watched.limits == LIMITED


def test_nor_is_it_of_a_volume_whose_claim_is_gone(watched: Watched) -> None:
    watched.noted("silver")
    assert watched.queued == [(PV, AGAIN_S)]
    released = {"metadata": {"name": PV}, "spec": {}, "status": {"phase": "Released"}}
    watched.watch.note(Change("present", released))
    watched.queued.clear()
    watched.cluster.calls.clear()
    watched.watch.look_at(PV)
    assert (watched.queued, watched.cluster.calls) == ([], [])


def test_an_image_of_a_cluster_that_hangs_is_not_locked_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or what kubelet wants of it, and of the host alone, is refused."""
    world.target.pools.add(LVSTORE)
    watched = Watched(world)
    watched.asked("silver")
    watched.noted("silver", **watched.pool)
    watched.define("gold", iops="9")
    watched.asked("gold")

    def hangs(name: str) -> None:
        with world.locks.hold(name):
            raise TargetTimeout(f"nothing of {name}")

    monkeypatch.setattr(world.target, "virtlun_lvol_get_xattrs", hangs)
    watched.noted("gold", **watched.pool)
    [(_, wait)] = watched.queued
    assert wait < AGAIN_S
    for _ in range(TOLD_AFTER - 1):
        watched.watch.look_at(PV)
    [(_, _, message)] = watched.told.said
    assert "nothing of" in message
