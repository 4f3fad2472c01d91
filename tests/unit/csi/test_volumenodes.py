"""Which node has a volume: what the driver makes of the API server's answers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from csi.attributes import read
from csi.clustererrors import UnreachableError
from csi.errors import Code
from csi.kinds import ATTRIBUTES_CLASS, CLAIM
from csi.objects import PersistentVolume
from csi.volumenodes import IN_POD, VolumeNodes
from csi.volumes import OwnedVolume, Owner
from pydataplane.lvols import Volume
from tests.unit.csi.conftest import refused
from tests.unit.csi.fake_cluster import FakeCluster

THERE = OwnedVolume(
    Volume("lvs0", "pvc-1", "there", 4096, thin=True, block_size=512, allocated=0),
    Owner("csi.virtlun.dev", "pvc-1", "", "{}"),
)
"""The volume of that handle, on a target of node2."""
NOWHERE = replace(THERE, volume=replace(THERE.volume, uuid="nowhere"))


def knows(claim: bool = False) -> FakeCluster:
    """Returns an API server that knows one volume, which a claim has or not."""
    cluster = FakeCluster()
    cluster.volumes["there"] = PersistentVolume(
        *("pv", "csi.virtlun.dev", "there", 4096, "4096"),
        block=True,
        node="node2",
        claim=("default", "data") if claim else None,
        deleting=False,
    )
    return cluster


def test_it_is_the_node_of_the_volumes_affinity() -> None:
    cluster = knows()
    found = VolumeNodes("node2", cluster.connect)
    assert [found.node_of(each) for each in ("there", "nowhere", "there")] == [
        *("node2", None, "node2")
    ]
    assert cluster.connected == 1


def test_a_volume_of_a_pool_is_of_no_node() -> None:
    cluster = knows()
    cluster.volumes["there"] = replace(cluster.volumes["there"], node=None, in_pool=True)
    assert VolumeNodes("node2", cluster.connect).node_of("there") == ""


def test_an_api_server_that_does_not_answer_is_asked_again() -> None:
    cluster = knows()
    found = VolumeNodes("node2", cluster.connect)
    cluster.failure = UnreachableError("cannot list PersistentVolumes: it is tried again")
    assert "cannot list" in refused(lambda: found.node_of("there"), Code.UNAVAILABLE)
    cluster.failure = None
    assert found.node_of("there") == "node2"


def test_outside_a_pod_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(IN_POD, raising=False)
    assert VolumeNodes("node2").node_of("there") is None


def test_it_is_to_be_as_large_as_its_object_says_where_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = knows()
    found = VolumeNodes("node2", cluster.connect)
    assert [found.capacity_of(each) for each in (THERE, NOWHERE)] == [4096, 0]
    cluster.failure = UnreachableError("cannot list PersistentVolumes: it is tried again")
    assert found.capacity_of(THERE) == 0
    monkeypatch.delenv(IN_POD, raising=False)
    assert VolumeNodes("node2").capacity_of(THERE) == 0


def test_its_class_is_the_one_that_its_claim_asks_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = knows(claim=True)
    found = VolumeNodes("node2", cluster.connect)
    spec = {"volumeName": "pv", "volumeAttributesClassName": "slow"}
    cluster.put(CLAIM, {"metadata": {"name": "data", "namespace": "default"}, "spec": spec})
    assert found.class_of(THERE) is None
    cluster.volumes["there"] = replace(cluster.volumes["there"], attributes_class="slow")
    assert found.class_of(THERE) is None  # it was deleted by force
    slow = {"driverName": "csi.virtlun.dev", "parameters": {"iops": "5"}}
    cluster.put(ATTRIBUTES_CLASS, {"metadata": {"name": "slow"}, **slow})
    assert found.class_of(THERE) == read({"iops": "5"})
    assert found.class_of(NOWHERE) is None
    cluster.failure = UnreachableError("cannot list PersistentVolumes: it is tried again")
    assert found.class_of(THERE) is None
    monkeypatch.delenv(IN_POD, raising=False)
    assert VolumeNodes("node2").class_of(THERE) is None


def test_a_claim_that_asks_for_less_than_its_volume_says_is_believed() -> None:
    cluster = knows()
    found = VolumeNodes("node2", cluster.connect)
    assert found.asked_of(THERE) is None
    cluster = knows(claim=True)
    found = VolumeNodes("node2", cluster.connect)
    for asks, asked, capacity in ((None, None, 4096), ("1Ki", 1024, 1024), ("8Ki", 8192, 4096)):
        if asks:  # else it is gone
            spec = {"resources": {"requests": {"storage": asks}}}
            cluster.put(CLAIM, {"metadata": {"name": "data", "namespace": "default"}, "spec": spec})
        assert found.asked_of(THERE) == asked
        assert found.capacity_of(THERE) == capacity
    assert found.asked_of(NOWHERE) is None
    cluster.failure = UnreachableError("cannot list PersistentVolumes: it is tried again")
    assert "cannot list" in refused(lambda: found.asked_of(THERE), Code.UNAVAILABLE)


def test_the_word_of_a_volume_that_another_node_can_have_made_does_not_count() -> None:
    """It would grow and limit what is staged here."""
    cluster = knows(claim=True)
    found = VolumeNodes("node2", cluster.connect)
    spec: dict[str, object] = {"volumeName": "pv", "volumeAttributesClassName": "mine"}
    spec["resources"] = {"requests": {"storage": "1Ti"}}
    cluster.put(CLAIM, {"metadata": {"name": "data", "namespace": "default"}, "spec": spec})
    mine = {"driverName": "csi.virtlun.dev", "parameters": {"iops": "0"}}
    cluster.put(ATTRIBUTES_CLASS, {"metadata": {"name": "mine"}, **mine})
    real = replace(cluster.volumes["there"], attributes_class="mine")
    image = replace(THERE, volume=replace(THERE.volume, pool="its UUID"))
    in_pool = replace(real, node=None, in_pool=True)
    for owned, forged, counts in [
        (THERE, real, True),
        (THERE, in_pool, False),
        (THERE, replace(real, in_pool=True), False),
        (THERE, replace(real, node="node1"), False),
        (THERE, replace(in_pool, node="node2"), False),
        (image, in_pool, True),
        (image, real, False),
    ]:
        cluster.volumes["there"] = forged
        assert found.counts(forged, owned) == counts
        assert (found.capacity_of(owned), found.asked_of(owned), found.class_of(owned)) == (
            (4096, 1 << 40, read({"iops": "0"})) if counts else (0, None, None)
        )


def test_a_second_volume_of_a_handle_does_not_count_beside_the_one_of_its_name() -> None:
    cluster = knows()
    second = cluster.volumes["there"]
    first = replace(second, name="pvc-1", capacity=8192)
    cluster.volumes |= {"first": first}
    found = VolumeNodes("node2", cluster.connect)
    assert found.of(THERE) == first
    assert (found.counts(first, THERE), found.counts(second, THERE)) == (True, False)
    assert found.capacity_of(THERE) == 8192


def test_one_that_is_released_does_not_keep_another_from_counting() -> None:
    """As it is kept (Retain) when an administrator makes one anew for what it has."""
    cluster = knows()
    again = cluster.volumes["there"]
    cluster.volumes |= {"kept": replace(again, name="pvc-1", released=True)}
    found = VolumeNodes("node2", cluster.connect)
    assert found.of(THERE) == again
    assert found.counts(again, THERE)
    assert not found.counts(cluster.volumes["kept"], THERE)
    found.check_counts("pv", THERE)
    refused(partial(found.check_counts, "pvc-1", THERE), Code.FAILED_PRECONDITION)
    del cluster.volumes["there"]
    assert found.of(THERE) is None


def test_a_forged_one_does_not_keep_the_only_one_that_fits_from_counting() -> None:
    """Whichever of them is told last."""
    cluster = knows()
    real = cluster.volumes["there"]
    forged = {
        "first": replace(real, name="aa", node=None, in_pool=True),
        "last": replace(real, name="zz", node=None, in_pool=True),
        "named": replace(real, name="pvc-1", node="node1"),
        "others": replace(real, name="other", driver="ebs.csi.aws.com"),
    }
    cluster.volumes = {"first": forged.pop("first"), "there": real} | forged
    found = VolumeNodes("node2", cluster.connect)
    assert found.of(THERE) == real
    found.check_counts("pv", THERE)
    refused(partial(found.check_counts, "zz", THERE), Code.FAILED_PRECONDITION)


def test_of_several_that_fit_none_counts_unless_it_has_the_name() -> None:
    image = replace(THERE, volume=replace(THERE.volume, pool="its UUID"))
    cluster = knows()
    one = replace(cluster.volumes["there"], node=None, in_pool=True)
    cluster.volumes = {"one": one, "two": replace(one, name="zz")}
    found = VolumeNodes("node2", cluster.connect)
    assert found.of(image) is None
    assert not any(found.counts(each, image) for each in cluster.volumes.values())
    assert (found.capacity_of(image), found.asked_of(image)) == (0, None)
    cluster.volumes["named"] = replace(one, name="pvc-1")
    assert found.of(image) == cluster.volumes["named"]


def test_csi_resizer_is_told_whose_word_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = knows()
    real = cluster.volumes["there"]
    cluster.volumes |= {"first": replace(real, name="pvc-1")}
    found = VolumeNodes("node2", cluster.connect)
    found.check_counts("pvc-1", THERE)
    for name in ("pv", "nobody's"):
        message = refused(partial(found.check_counts, name, THERE), Code.FAILED_PRECONDITION)
        assert f"PersistentVolume {name} has no say in volume there" in message
        assert "set its reclaimPolicy to Retain, then delete it" in message
    cluster.volumes["first"] = replace(real, name="pvc-1", node=None, in_pool=True)
    refused(partial(found.check_counts, "pvc-1", THERE), Code.FAILED_PRECONDITION)
    cluster.failure = UnreachableError("cannot read PersistentVolumes: it is tried again")
    refused(partial(found.check_counts, "pvc-1", THERE), Code.UNAVAILABLE)
    monkeypatch.delenv(IN_POD, raising=False)
    VolumeNodes("node2").check_counts("pv", THERE)
