"""Which node has a volume: what the driver makes of the API server's answers."""

from __future__ import annotations

from typing import cast

import pytest

from csi.cluster import CLAIM, Cluster, ClusterError, Kind, NotFoundError, UnreachableError
from csi.errors import Code
from csi.objects import Object, PersistentVolume
from csi.volumenodes import IN_POD, VolumeNodes
from tests.unit.csi.conftest import refused


class FakeCluster:
    """NOT an API server: one that knows one volume."""

    def __init__(self) -> None:
        self.fail: ClusterError | None = None
        self.connected = 0
        #: What the claim of the volume asks for; None: it has none.
        self.asks: str | None = None

    def connect(self) -> Cluster:
        self.connected += 1
        return cast("Cluster", self)

    def volume_by_handle(self, handle: str) -> PersistentVolume:
        if self.fail:
            raise self.fail
        if handle != "there":
            raise NotFoundError("no PersistentVolume")
        return PersistentVolume(
            *("pv", "csi.virtlun.dev", handle, 4096, "4096"),
            block=True,
            node="node2",
            claim=("default", "data") if self.asks else None,
            deleting=False,
        )

    def get(self, kind: Kind, name: str, namespace: str) -> Object:
        assert (kind, name, namespace) == (CLAIM, "data", "default")
        if self.asks == "gone":
            raise NotFoundError("no PersistentVolumeClaim")
        return {"spec": {"resources": {"requests": {"storage": self.asks}}}}


def test_it_is_the_node_of_the_volumes_affinity() -> None:
    cluster = FakeCluster()
    found = VolumeNodes(cluster.connect)
    assert [found.node_of(each) for each in ("there", "nowhere", "there")] == [
        *("node2", None, "node2")
    ]
    assert cluster.connected == 1


def test_an_api_server_that_does_not_answer_is_asked_again() -> None:
    cluster = FakeCluster()
    found = VolumeNodes(cluster.connect)
    cluster.fail = UnreachableError("cannot list PersistentVolumes: it is tried again")
    assert "cannot list" in refused(lambda: found.node_of("there"), Code.UNAVAILABLE)
    cluster.fail = None
    assert found.node_of("there") == "node2"


def test_outside_a_pod_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(IN_POD, raising=False)
    assert VolumeNodes().node_of("there") is None


def test_it_is_to_be_as_large_as_its_object_says_where_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = FakeCluster()
    found = VolumeNodes(cluster.connect)
    assert [found.capacity_of(each) for each in ("there", "nowhere")] == [4096, 0]
    cluster.fail = UnreachableError("cannot list PersistentVolumes: it is tried again")
    assert found.capacity_of("there") == 0
    monkeypatch.delenv(IN_POD, raising=False)
    assert VolumeNodes().capacity_of("there") == 0


def test_a_claim_that_asks_for_less_than_its_volume_says_is_believed() -> None:
    cluster = FakeCluster()
    found = VolumeNodes(cluster.connect)
    assert found.asked_of("there") is None
    for asks, asked, capacity in (("1Ki", 1024, 1024), ("8Ki", 8192, 4096), ("gone", None, 4096)):
        cluster.asks = asks
        assert found.asked_of("there") == asked
        assert found.capacity_of("there") == capacity
    assert found.asked_of("nowhere") is None
    cluster.fail = UnreachableError("cannot list PersistentVolumes: it is tried again")
    assert "cannot list" in refused(lambda: found.asked_of("there"), Code.UNAVAILABLE)
