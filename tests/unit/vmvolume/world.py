"""Objects for the tests of the VmVolume controller, as the API server and the target give them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from csi.kubevirt.lun import Lun
from csi.kubevirt.vmvolume.decide import Seen
from csi.kubevirt.vmvolume.model import FINALIZER, VmVolume
from csi.objects import Claim, PersistentVolume, StorageClass, Vmi

NODE, OTHER = "node1", "node2"
POD, OLD_POD = "11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"
HANDLE = "5f0c7b0e-8c1e-5a3e-9d1c-4f5a3a1f2b00"
MIB = 1 << 20
NOW = 1_800_000_000.0
DRIVER = "csi.virtlun.dev"


def vm_volume(
    status: dict[str, Any] | None = None,
    *,
    finalizer: bool = False,
    deleted_at: str | None = None,
    name: str = "extra",
    created: str = "2027-01-15T07:00:00Z",
    version: int = 5,
    **spec: Any,
) -> VmVolume:
    """Returns a VmVolume that wants claim `data` for machine `vm`."""
    meta: dict[str, Any] = {
        "namespace": "ns",
        "name": name,
        "uid": f"uid-{name}",
        "generation": 1,
        "resourceVersion": str(version),
        "creationTimestamp": created,
        "finalizers": [FINALIZER] * finalizer,
    }
    if deleted_at:
        meta["deletionTimestamp"] = deleted_at
    return VmVolume.of(
        {
            "apiVersion": "virtlun.dev/v1alpha1",
            "kind": "VmVolume",
            "metadata": meta,
            "spec": {"vmName": "vm", "claimName": "data", **spec},
            "status": status or {},
        }
    )


def machine(
    phase: str = "Running",
    node: str | None = NODE,
    *,
    deleting: bool = False,
    pods: dict[str, str] | None = None,
    volumes: list[dict[str, Any]] | None = None,
) -> Vmi:
    """Returns the machine."""
    meta: dict[str, Any] = {"namespace": "ns", "name": "vm", "uid": "uid-vm"}
    if deleting:
        meta["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    status = {"phase": phase, "nodeName": node, "activePods": pods or {POD: node or NODE}}
    return Vmi.of({"metadata": meta, "spec": {"volumes": volumes or []}, "status": status})


def pv(
    node: str | None = NODE, size: int = 64 * MIB, driver: str = DRIVER, *, block: bool = True
) -> PersistentVolume:
    """Returns the claim's volume."""
    return PersistentVolume(
        name="pvc-1",
        driver=driver,
        handle=HANDLE,
        capacity=size,
        quantity=str(size),
        block=block,
        node=node,
        claim=("ns", "data"),
        deleting=False,
    )


def claim(volume: PersistentVolume | None, *, finalizer: bool = False, **changes: Any) -> Claim:
    """Returns the claim, bound to the volume if there is one."""
    found = {
        "metadata": {
            "namespace": "ns",
            "name": "data",
            "uid": "uid-data",
            "resourceVersion": "7",
            "finalizers": ["kubernetes.io/pvc-protection"] + [FINALIZER] * finalizer,
        },
        "spec": {"volumeMode": "Block", "storageClassName": "fast"},
        "status": {"phase": "Bound" if volume else "Pending"},
    }
    return replace(Claim.of(found, volume), **changes)


def lun(target: int = 1, **changes: Any) -> Lun:
    """Returns the claim's LUN, which the guest has seen."""
    found = Lun(
        target=target,
        volume=HANDLE,
        serial=None,
        read_only=False,
        removable=True,
        block_size=512,
        removal_prevented=False,
        handed_over=False,
        attached_at=NOW - 1,
        event_at=NOW - 0.9,
        guest_seen_at=NOW - 0.8,
        resize_event_at=None,
    )
    return replace(found, **changes)


LATE = StorageClass("fast", DRIVER, waits=True)
EARLY = StorageClass("fast", DRIVER, waits=False)
FOREIGN = StorageClass("fast", "other.example.org", waits=False)


def seen(**changes: Any) -> Seen:
    """Returns what is the case when all is there and the disk can be attached."""
    found = Seen(
        node=NODE,
        now=NOW,
        volume=vm_volume(),
        machine=machine(),
        claim=claim(pv()),
        pod=POD,
        size=64 * MIB,
    )
    return replace(found, **changes)
