"""Claims that wait for room: what is told of them, and when they are looked at again."""

from __future__ import annotations

from typing import Any

import pytest

from csi.kinds import CLAIM
from csi.objects import SELECTED_NODE
from csi.waitingclaims import ROOM, WaitingClaims
from tests.support.wait import until
from tests.unit.csi.fake_cluster import FakeCluster, Said

GIB = 1 << 30


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def waiting(cluster: FakeCluster) -> WaitingClaims:
    return WaitingClaims("node1", cluster.connect, wait_s=0.0, retry_s=0.0)


def add(cluster: FakeCluster, name: str, size: str, **changes: Any) -> None:
    """Adds a claim; `changes` are of its spec, but for `annotations`."""
    meta = {"name": name, "namespace": "shop", "annotations": changes.pop("annotations", {})}
    spec = {"resources": {"requests": {"storage": size}}, **changes}
    cluster.put(CLAIM, {"metadata": meta, "spec": spec})


def room(cluster: FakeCluster, name: str) -> str | None:
    """Returns what was noted at a claim; None if nothing was."""
    noted: str | None = cluster.objects[CLAIM.name, name]["metadata"]["annotations"].get(ROOM)
    return noted


def told(cluster: FakeCluster) -> list[str]:
    """Returns the names of the claims that were told that they wait for room."""
    assert all(
        (each.reason, each.warning, each.node, each.once) == ("WaitForRoom", True, "node1", False)
        for each in cluster.said
    )
    return [each.name for each in cluster.said]


def test_a_claim_without_room_is_told_why_and_looked_at_when_there_is(
    cluster: FakeCluster, waiting: WaitingClaims
) -> None:
    add(cluster, "data", "2Gi")
    waiting.asked("shop/data", "lvs0", GIB)
    until(lambda: cluster.said)
    assert told(cluster) == ["data"]
    assert cluster.said[0].message.startswith(
        f"waiting for a node with {2 * GIB} bytes free in lvstore lvs0: "
    )
    waiting.room("lvs0", 2 * GIB - 1)
    waiting.room("lvs1", 4 * GIB)
    add(cluster, "other", "3Gi")
    waiting.asked("shop/other", "lvs0", GIB)
    until(lambda: len(cluster.said) == 2)
    assert room(cluster, "data") is None
    waiting.room("lvs0", 2 * GIB)
    until(lambda: room(cluster, "data"))
    assert (room(cluster, "data") or "").startswith("node1 ")
    assert room(cluster, "other") is None


def test_room_that_came_while_others_had_time_is_not_missed(
    cluster: FakeCluster, waiting: WaitingClaims
) -> None:
    waiting._wait_s = 2.0
    add(cluster, "data", "2Gi")
    waiting.asked("shop/data", "lvs0", GIB)
    waiting.room("lvs0", 2 * GIB)
    until(lambda: room(cluster, "data"))
    assert not cluster.said


def test_a_claim_that_was_taken_or_has_room_or_is_gone_is_left_alone(
    cluster: FakeCluster, waiting: WaitingClaims
) -> None:
    add(cluster, "taken", "2Gi", annotations={SELECTED_NODE: "node2"})
    add(cluster, "bound", "2Gi", volumeName="pvc-1")
    add(cluster, "fits", "1Gi")
    add(cluster, "last", "2Gi")
    for name in ("taken", "bound", "fits", "gone", "last"):
        waiting.asked(f"shop/{name}", "lvs0", GIB)
    until(lambda: cluster.said)
    assert told(cluster) == ["last"]
    del cluster.objects[CLAIM.name, "last"]
    waiting.room("lvs0", 2 * GIB)  # gone meanwhile
    add(cluster, "next", "2Gi")
    waiting.asked("shop/next", "lvs0", GIB)
    until(lambda: told(cluster) == ["last", "next"])
    assert "patch PersistentVolumeClaim last" not in cluster.calls


def test_a_claim_is_looked_at_again_when_the_api_server_is_back(
    cluster: FakeCluster, waiting: WaitingClaims
) -> None:
    cluster.down = 1
    for name in ("first", "second"):
        add(cluster, name, "2Gi")
        waiting.asked(f"shop/{name}", "lvs0", GIB)
    until(lambda: len(cluster.said) == 2)
    assert set(told(cluster)) == {"first", "second"}
    cluster.down = 2
    waiting.room("lvs0", 2 * GIB)
    until(lambda: all(room(cluster, name) for name in ("first", "second")))


def test_a_claim_is_told_what_it_is_to_be_told_and_is_left_as_it_is(
    cluster: FakeCluster, waiting: WaitingClaims
) -> None:
    add(cluster, "data", "2Gi")
    cluster.down = 1
    waiting.tell("shop/gone", "CannotProvision", "nobody hears this")
    waiting.tell("shop/data", "CannotProvision", "use ReadWriteOnce")
    until(lambda: cluster.said)
    assert cluster.said == [
        Said("data", "CannotProvision", "use ReadWriteOnce", warning=True, node="node1", once=True)
    ]
    assert room(cluster, "data") is None


def test_outside_a_pod_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    waiting = WaitingClaims("node1")
    waiting.asked("shop/data", "lvs0", GIB)
    waiting.room("lvs0", 4 * GIB)
    assert not waiting._looked_at


def test_a_claim_that_makes_no_sense_stops_nobody_else(
    cluster: FakeCluster, waiting: WaitingClaims
) -> None:
    add(cluster, "odd", "a lot")
    add(cluster, "data", "2Gi")
    waiting.asked("shop/odd", "lvs0", GIB)
    waiting.asked("shop/data", "lvs0", GIB)
    until(lambda: cluster.said)
    assert told(cluster) == ["data"]
