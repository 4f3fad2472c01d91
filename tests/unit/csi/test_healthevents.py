"""What claims are told of their volumes' health, over doubles of target, host and API server."""

from __future__ import annotations

import pytest

from csi import DRIVER_NAME
from csi.clustererrors import NotFoundError, UnreachableError
from csi.healthevents import HEALTHY, QUIET_LOOKS, HealthEvents
from csi.kinds import CLAIM
from csi.objects import PersistentVolume
from csi.targets import Targets
from csi.vhostface import VhostFace
from csi.volumehealth import Entry, VolumeHealth
from pydataplane.errors import TargetUnavailable
from tests.unit.csi.conftest import NODE, World
from tests.unit.csi.fake_cluster import FakeCluster

LOOK_S = 3.0


class Watched:
    """A volume that a pod has, and that is looked at."""

    def __init__(self, world: World, face: str) -> None:
        self.world = world
        self.handle = world.create(parameters={"face": face}).volume_id
        world.stage(self.handle)
        world.publish(self.handle)
        self.cluster = FakeCluster()
        self.cluster.volumes[self.handle] = PersistentVolume(
            *("pv", DRIVER_NAME, self.handle, 64 << 20, "64Mi"),
            block=False,
            node=NODE,
            claim=("shop", "data"),
            deleting=False,
        )
        self.cluster.put(CLAIM, {"metadata": {"name": "data", "namespace": "shop"}})
        targets = Targets([world.target])
        self.health = VolumeHealth(targets, world.host, VhostFace(targets))
        self.events = HealthEvents(self.health, NODE, self.cluster.connect, look_s=LOOK_S)
        self.now = 1000.0

    def look(self, times: int = 1, *, away: bool = False) -> list[tuple[str, bool]]:
        """Looks, and returns what was said since."""
        before = len(self.cluster.said)
        for _ in range(times):
            if away:
                self.world.target.fail["virtlun_export_list"] = TargetUnavailable("no answer")
            self.events.look(self.now)
            self.now += LOOK_S
        said = self.cluster.said[before:]
        assert all((each.name, each.node) == ("data", NODE) for each in said)
        return [(each.reason, each.warning) for each in said]


@pytest.fixture
def watched(world: World) -> Watched:
    return Watched(world, "kernel")


@pytest.fixture(params=["kernel", "vhost"])
def of_any_face(world: World, request: pytest.FixtureRequest) -> Watched:
    return Watched(world, request.param)


def test_what_lasts_is_told_once_and_so_is_its_end(of_any_face: Watched) -> None:
    assert of_any_face.look(3) == []
    assert of_any_face.look(1, away=True) == []
    assert of_any_face.look(5, away=True) == [("TargetAway", True)]
    (said,) = of_any_face.cluster.said
    assert said.message == f"on node {NODE}: I/O waits for its target: no answer"
    assert of_any_face.look(20) == [(HEALTHY, False)]


def test_a_restart_of_the_target_is_not_told(watched: Watched) -> None:
    for _ in range(10):
        assert watched.look(1, away=True) == []
        assert watched.look(1) == []


def test_a_volume_that_comes_and_goes_is_told_of_once_in_six_looks(watched: Watched) -> None:
    begun = watched.now
    for _ in range(20):
        watched.look(2, away=True)
        watched.look(2)
    assert 2 < len(watched.cluster.said) <= (watched.now - begun) / (QUIET_LOOKS * LOOK_S) + 1


def test_a_failed_flush_is_told_until_it_is_cleared(of_any_face: Watched) -> None:
    of_any_face.world.target.flush_error = (
        "a flush failed 3 s ago; flushes fail until it is cleared"
    )
    assert of_any_face.look(3) == [("FlushFailed", True)]
    assert "a flush failed 3 s ago" in of_any_face.cluster.said[-1].message
    # The sentence says how long ago; that is no other state.
    of_any_face.world.target.flush_error = (
        "a flush failed 40 s ago; flushes fail until it is cleared"
    )
    assert of_any_face.look(20) == []
    of_any_face.world.target.flush_error = None
    assert of_any_face.look(20) == [(HEALTHY, False)]


def test_another_state_is_told_too(watched: Watched) -> None:
    watched.world.target.survives = "restart"
    assert watched.look(2) == [("NoCrashRecovery", True)]
    watched.world.host.dead.add(watched.handle)
    assert watched.look(20) == [("DeviceDead", True)]


def test_an_api_server_that_is_away_is_asked_again(watched: Watched) -> None:
    watched.cluster.failure = UnreachableError("it does not answer")
    assert watched.look(20, away=True) == []
    watched.cluster.failure = None
    assert watched.look(20, away=True) == [("TargetAway", True)]


def test_what_has_no_claim_is_told_to_nobody(watched: Watched) -> None:
    watched.cluster.failure = NotFoundError("no PersistentVolume has it")
    assert watched.look(5, away=True) == []
    watched.cluster.failure = None
    assert watched.look(5, away=True) == []


def test_of_what_no_driver_made_no_object_is_looked_for(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would list all PersistentVolumes."""
    other = "4b1d6e9e-94f4-4a5c-8a2b-1f2f3a4b5c6d"
    away = [Entry(reason="TargetAway", message="I/O waits")]
    monkeypatch.setattr(watched.health, "volumes", lambda: ["csi-0a1b", other])
    monkeypatch.setattr(watched.health, "entries_of", lambda found: dict.fromkeys(found, away))
    assert watched.look(20) == []
    assert watched.cluster.connected == 0


def test_a_volume_that_has_left_the_node_is_forgotten(of_any_face: Watched) -> None:
    of_any_face.look(2, away=True)
    of_any_face.world.unpublish(of_any_face.handle)
    of_any_face.world.host.detach(of_any_face.handle)
    assert of_any_face.look(20) == []


def test_nothing_is_told_outside_of_a_pod(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    targets = Targets([world.target])
    health = VolumeHealth(targets, world.host, VhostFace(targets))
    events = HealthEvents(health, NODE)
    events.start()
    assert world.target.calls == []
