"""What is read of Kubernetes objects, as the API server sends them."""

from __future__ import annotations

from typing import Any

import pytest

from csi.objects import Claim, PersistentVolume, StorageClass, Vmi, quantity_bytes

GIB = 1 << 30
HANDLE = "5f0c7b0e-8c1e-5a3e-9d1c-4f5a3a1f2b00"


def volume(**spec: Any) -> dict[str, Any]:
    """Returns a PersistentVolume of ours as the provisioner makes it."""
    terms = [
        {"matchExpressions": [{"key": "csi.virtlun.dev/node", "operator": "In", "values": ["n1"]}]}
    ]
    return {
        "metadata": {"name": "pvc-1"},
        "spec": {
            "capacity": {"storage": "2Gi"},
            "volumeMode": "Block",
            "csi": {"driver": "csi.virtlun.dev", "volumeHandle": HANDLE},
            "claimRef": {"namespace": "ns", "name": "data", "uid": "u"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
            "volumeAttributesClassName": "slow",
            **spec,
        },
    }


def claim(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "ns", "name": "data", "uid": "u", "resourceVersion": "7"},
        "spec": {"volumeMode": "Block", "storageClassName": "fast", "volumeName": "pvc-1"},
        "status": status,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1Gi", GIB),
        ("1.5Gi", 3 * GIB // 2),
        ("500M", 500_000_000),
        ("1k", 1000),
        ("1e9", 1_000_000_000),
        ("1E3", 1000),
        ("2E", 2 * 10**18),
        ("128974848", 128974848),
        ("128974848000m", 128974848),
        ("1500m", 2),
    ],
)
def test_a_quantity_is_bytes_rounded_up(text: str, expected: int) -> None:
    assert quantity_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1GiB", "one", "0x10", "1gi"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity_bytes(text)


def test_a_volume_of_ours_tells_its_lvol_and_its_node() -> None:
    found = PersistentVolume.of(volume())
    assert (found.handle, found.node, found.ours, found.block) == (HANDLE, "n1", True, True)
    assert (found.capacity, found.quantity) == (2 * GIB, "2Gi")
    assert found.claim == ("ns", "data")
    assert found.attributes_class == "slow"


def test_a_volume_of_another_driver_has_no_node_of_ours() -> None:
    other = volume(csi={"driver": "other.example.org", "volumeHandle": "x"}, nodeAffinity=None)
    found = PersistentVolume.of(other)
    assert (found.ours, found.node) == (False, None)
    bound = Claim.of(claim(phase="Bound", capacity={"storage": "2Gi"}), found)
    assert (bound.handle, bound.node, bound.volume_name) == (None, None, "pvc-1")


def test_a_volume_without_csi_is_read_too() -> None:
    found = PersistentVolume.of(volume(csi=None, hostPath={"path": "/x"}, claimRef=None))
    assert (found.driver, found.handle, found.claim) == ("", "", None)
    assert PersistentVolume.of(volume(volumeAttributesClassName=None)).attributes_class is None


def test_a_bound_claim_tells_its_lvol() -> None:
    bound = Claim.of(
        claim(phase="Bound", capacity={"storage": "2Gi"}), PersistentVolume.of(volume())
    )
    assert (bound.handle, bound.node, bound.capacity, bound.expanding) == (
        HANDLE,
        "n1",
        2 * GIB,
        False,
    )


def test_a_claim_that_is_being_expanded_says_so() -> None:
    condition = {"type": "FileSystemResizePending", "status": "True"}
    assert Claim.of(claim(phase="Bound", conditions=[condition]), None).expanding
    condition["type"] = "Resizing"  # the controller's part, which is not over
    assert not Claim.of(claim(phase="Bound", conditions=[condition]), None).expanding


def test_a_waiting_claim_tells_the_node_chosen_for_it() -> None:
    waiting = claim(phase="Pending")
    assert Claim.of(waiting, None).selected_node is None
    waiting["metadata"]["annotations"] = {"volume.kubernetes.io/selected-node": "n2"}
    assert Claim.of(waiting, None).selected_node == "n2"


def test_a_class_says_whether_its_volumes_wait() -> None:
    found = {"metadata": {"name": "fast"}, "provisioner": "csi.virtlun.dev"}
    assert StorageClass.of(found).ours
    assert not StorageClass.of(found).waits
    assert StorageClass.of({**found, "volumeBindingMode": "WaitForFirstConsumer"}).waits


def test_a_virtual_machine_tells_its_pods_on_a_node() -> None:
    meta = {"namespace": "ns", "name": "vm", "uid": "u"}
    status = {"phase": "Running", "nodeName": "n1", "activePods": {"b": "n1", "c": "n2"}}
    found = Vmi.of({"metadata": meta, "status": status})
    assert (found.phase, found.node) == ("Running", "n1")
    assert found.pods_on("n1") == ("b",)
    assert found.pods_on("n3") == ()
    assert Vmi.of({"metadata": meta}).phase == "Pending"


@pytest.mark.parametrize(
    ("state", "migrating"),
    [
        (None, False),
        ({"targetNode": "n2"}, True),
        ({"startTimestamp": "2026-11-21T00:00:00Z"}, True),
        ({"targetNode": "n2", "completed": True}, False),
        ({"targetNode": "n2", "completed": True, "failed": True}, False),
        ({"targetNode": "n2", "endTimestamp": "2026-11-21T00:00:00Z"}, False),
    ],
)
def test_a_virtual_machine_tells_whether_it_is_about_to_move(
    state: dict[str, Any] | None, migrating: bool
) -> None:
    meta = {"namespace": "ns", "name": "vm", "uid": "u"}
    found = {"metadata": meta, "status": {"phase": "Running", "migrationState": state}}
    assert Vmi.of(found).migrating == migrating


def test_a_volume_of_a_pool_is_no_node_s() -> None:
    place = {"key": "csi.virtlun.dev/pool-5f0c7b0e", "operator": "In", "values": ["true"]}
    terms = [{"matchExpressions": [place]}]
    found = PersistentVolume.of(volume(nodeAffinity={"required": {"nodeSelectorTerms": terms}}))
    assert (found.node, found.in_pool) == (None, True)
    assert not PersistentVolume.of(volume()).in_pool
