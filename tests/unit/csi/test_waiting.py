"""Claims that wait for room: what is told of them, and when they are looked at again."""

from __future__ import annotations

from typing import Any, cast

import pytest

from csi.cluster import Cluster, NotFoundError, UnreachableError
from csi.objects import SELECTED_NODE
from csi.waiting import ROOM, WaitingClaims
from tests.support.wait import until

GIB = 1 << 30


class FakeCluster:
    """NOT an API server: claims in a dictionary; notes what is said of them."""

    def __init__(self) -> None:
        self.claims: dict[str, dict[str, Any]] = {}
        self.said: list[tuple[str, str]] = []
        self.down = 0

    def connect(self) -> Cluster:
        return cast("Cluster", self)

    def add(self, name: str, size: str, **spec: str) -> dict[str, Any]:
        requests = {"resources": {"requests": {"storage": size}}}
        made: dict[str, Any] = {"metadata": {"name": name}, "spec": {**requests, **spec}}
        self.claims[name] = made
        return made

    def get(self, _: object, name: str, namespace: str) -> dict[str, Any]:
        assert namespace == "shop"
        if self.down:
            self.down -= 1
            raise UnreachableError("cannot read it: it is tried again")
        if name not in self.claims:
            raise NotFoundError("is it there?")
        return self.claims[name]

    def event(
        self,
        about: dict[str, Any],
        reason: str,
        message: str,
        *,
        warning: bool,
        node: str,
        once: bool = False,
    ) -> None:
        assert (reason, warning, node) == (
            "CannotProvision" if once else "WaitForRoom",
            True,
            "node1",
        )
        self.said.append((about["metadata"]["name"], message))

    def patch(self, _: object, name: str, namespace: str, change: dict[str, Any]) -> None:
        self.get(_, name, namespace)["metadata"].update(change["metadata"])


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def waiting(cluster: FakeCluster) -> WaitingClaims:
    return WaitingClaims("node1", cluster.connect, wait_s=0.0, retry_s=0.0)


def touched(claim: dict[str, Any]) -> bool:
    return ROOM in claim["metadata"].get("annotations", {})


def test_a_claim_without_room_is_told_why_and_looked_at_when_there_is(
    cluster: FakeCluster, waiting: WaitingClaims
) -> None:
    claim = cluster.add("data", "2Gi")
    waiting.asked("shop/data", "lvs0", GIB)
    until(lambda: cluster.said)
    ((name, message),) = cluster.said
    assert name == "data"
    assert message.startswith(f"waiting for a node with {2 * GIB} bytes free in lvstore lvs0: ")
    waiting.room("lvs0", 2 * GIB - 1)
    waiting.room("lvs1", 4 * GIB)
    other = cluster.add("other", "3Gi")
    waiting.asked("shop/other", "lvs0", GIB)
    until(lambda: len(cluster.said) == 2)
    assert not touched(claim)
    waiting.room("lvs0", 2 * GIB)
    until(lambda: touched(claim))
    assert claim["metadata"]["annotations"][ROOM].startswith("node1 ")
    assert not touched(other)


def test_room_that_came_while_others_had_time_is_not_missed(
    cluster: FakeCluster, waiting: WaitingClaims
) -> None:
    waiting._wait_s = 0.2
    claim = cluster.add("data", "2Gi")
    waiting.asked("shop/data", "lvs0", GIB)
    waiting.room("lvs0", 2 * GIB)
    until(lambda: touched(claim))
    assert not cluster.said


def test_a_claim_that_was_taken_or_has_room_or_is_gone_is_left_alone(
    cluster: FakeCluster, waiting: WaitingClaims
) -> None:
    cluster.add("taken", "2Gi")["metadata"]["annotations"] = {SELECTED_NODE: "node2"}
    cluster.add("bound", "2Gi", volumeName="pvc-1")
    cluster.add("fits", "1Gi")
    last = cluster.add("last", "2Gi")
    for name in ("taken", "bound", "fits", "gone", "last"):
        waiting.asked(f"shop/{name}", "lvs0", GIB)
    until(lambda: cluster.said)
    assert [name for name, _ in cluster.said] == ["last"]
    del cluster.claims["last"]
    waiting.room("lvs0", 2 * GIB)  # gone meanwhile
    cluster.add("next", "2Gi")
    waiting.asked("shop/next", "lvs0", GIB)
    until(lambda: len(cluster.said) == 2)
    assert not touched(last)


def test_a_claim_is_looked_at_again_when_the_api_server_is_back(
    cluster: FakeCluster, waiting: WaitingClaims
) -> None:
    cluster.down = 1
    for name in ("first", "second"):
        cluster.add(name, "2Gi")
        waiting.asked(f"shop/{name}", "lvs0", GIB)
    until(lambda: len(cluster.said) == 2)
    assert {name for name, _ in cluster.said} == {"first", "second"}
    cluster.down = 2
    waiting.room("lvs0", 2 * GIB)
    until(lambda: all(touched(claim) for claim in cluster.claims.values()))


def test_a_claim_is_told_what_it_is_to_be_told_and_is_left_as_it_is(
    cluster: FakeCluster, waiting: WaitingClaims
) -> None:
    claim = cluster.add("data", "2Gi")
    cluster.down = 1
    waiting.tell("shop/gone", "CannotProvision", "nobody hears this")
    waiting.tell("shop/data", "CannotProvision", "use ReadWriteOnce")
    until(lambda: cluster.said)
    assert cluster.said == [("data", "use ReadWriteOnce")]
    assert not touched(claim)


def test_outside_a_pod_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    waiting = WaitingClaims("node1")
    waiting.asked("shop/data", "lvs0", GIB)
    waiting.room("lvs0", 4 * GIB)
    assert not waiting._looked_at


def test_a_claim_that_makes_no_sense_stops_nobody_else(
    cluster: FakeCluster, waiting: WaitingClaims
) -> None:
    cluster.add("odd", "a lot")
    cluster.add("data", "2Gi")
    waiting.asked("shop/odd", "lvs0", GIB)
    waiting.asked("shop/data", "lvs0", GIB)
    until(lambda: cluster.said)
    assert [name for name, _ in cluster.said] == ["data"]
