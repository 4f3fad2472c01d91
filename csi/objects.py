"""What the driver reads of Kubernetes objects: claims, volumes, virtual machines.

Each class takes the few fields that somebody here decides by, of the object as JSON; the rest of
an object is not looked at, so one with fields of a later release reads the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightkube.utils.quantity import parse_quantity

from csi import DRIVER_NAME, LVSTORE_KEY, POOL_KEY, RECEIVED_KEY, TOPOLOGY_KEY

Object = Mapping[str, Any]
"""An object as JSON."""

SELECTED_NODE = "volume.kubernetes.io/selected-node"
"""On a claim: the node that its first consumer is on, for which the provisioner waits."""
EXPANDING = "FileSystemResizePending"
RESIZE_CONDITIONS = {
    EXPANDING,
    "Resizing",
    "ControllerResizeError",
    "NodeResizeError",
}
EXPONENT = re.compile("E(?=[+-]?[0-9])")


def is_ours(volume: Object) -> bool:
    """Whether a core/v1 PersistentVolume is of this driver."""
    return ((volume.get("spec") or {}).get("csi") or {}).get("driver") == DRIVER_NAME


def handle_of(volume: Object) -> str:
    """Returns the handle of a core/v1 PersistentVolume of this driver; nothing of another's."""
    return volume["spec"]["csi"].get("volumeHandle") or "" if is_ours(volume) else ""


@dataclass(frozen=True)
class PersistentVolume:
    """A volume as the cluster has it."""

    name: str
    driver: str
    """The CSI driver, or nothing for a volume of another kind."""
    handle: str
    """The driver's name of it; of ours, the lvol's UUID. Nothing for a volume of another kind."""
    capacity: int
    """Bytes."""
    quantity: str
    """The capacity as the object says it, for another object's status."""
    block: bool
    """Whether its mode is Block."""
    node: str | None
    """Our node that it is tied to; None where it is not, or not ours."""
    claim: tuple[str, str] | None
    """Namespace and name of the claim that it is reserved for."""
    deleting: bool
    attributes_class: str | None = None
    """The VolumeAttributesClass that csi-provisioner or csi-resizer has had the driver apply."""
    in_pool: bool = False
    """Whether it is an image of a pool of Ceph, which every node that has the pool can use."""
    bound: bool = False
    """Whether it is bound to its claim, which no node's credentials say."""
    released: bool = False
    """Whether its claim is gone: it is Released, or Failed."""
    retained: bool = False
    """Whether its volume is to stay when its claim is gone."""
    lvstore: str = ""
    """UUID of the lvstore that a node's driver took it over in; nothing: the handle tells it."""
    received: str = ""
    """The snapshot that a volume has to have to be taken over; nothing: none is to be."""
    claim_uid: str = ""
    """UID of the claim; nothing: the first one of that name."""
    storage_class: str = ""
    context: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What CreateVolume said that nodes need to know."""

    @property
    def ours(self) -> bool:
        """Whether it is a volume of this driver."""
        return self.driver == DRIVER_NAME

    @classmethod
    def of(cls, found: Object) -> PersistentVolume:
        """Reads a core/v1 PersistentVolume."""
        spec = found["spec"]
        csi = spec.get("csi") or {}
        claim = spec.get("claimRef")
        notes = found["metadata"].get("annotations") or {}
        quantity = (spec.get("capacity") or {}).get("storage", "0")
        return cls(
            name=found["metadata"]["name"],
            driver=csi.get("driver", ""),
            handle=csi.get("volumeHandle", ""),
            capacity=quantity_bytes(quantity),
            quantity=quantity,
            block=spec.get("volumeMode") == "Block",
            node=_tied_to(spec),
            attributes_class=spec.get("volumeAttributesClassName") or None,
            in_pool=any(each["key"].startswith(POOL_KEY) for each in _places(spec)),
            claim=(claim.get("namespace", ""), claim.get("name", "")) if claim else None,
            deleting="deletionTimestamp" in found["metadata"],
            bound=(found.get("status") or {}).get("phase") == "Bound",
            released=is_released(found),
            retained=spec.get("persistentVolumeReclaimPolicy") == "Retain",
            lvstore=notes.get(LVSTORE_KEY, ""),
            received=notes.get(RECEIVED_KEY, ""),
            claim_uid=(claim or {}).get("uid", ""),
            storage_class=spec.get("storageClassName") or "",
            context=csi.get("volumeAttributes") or {},
        )


@dataclass(frozen=True)
class Claim:
    """A claim, together with the volume that it is bound to."""

    namespace: str
    name: str
    uid: str
    phase: str
    """Pending, Bound or Lost."""
    block: bool
    """Whether its mode is Block; else Filesystem."""
    read_only: bool
    """Whether ReadOnlyMany is all that it asks for."""
    shared: bool
    """Whether it asks for ReadWriteMany, as KubeVirt wants of what a machine migrates with."""
    storage_class: str | None
    capacity: int
    """Bytes that the claim's status tells; 0 until it is bound."""
    selected_node: str | None
    """The node of its first consumer, where somebody chose one."""
    expanding: bool
    """Its volume is to take a new size on its node, and the claim's status does not tell the end
    of that yet (FileSystemResizePending, which there is without a file system, too)."""
    deleting: bool
    finalizers: tuple[str, ...]
    resource_version: str
    volume: PersistentVolume | None
    """None until it is bound."""
    object: Object
    """The claim as JSON."""

    @property
    def volume_name(self) -> str | None:
        """The name of the volume that it is bound to."""
        return self.volume.name if self.volume else None

    @property
    def handle(self) -> str | None:
        """The lvol's UUID where it is bound to a volume of ours."""
        return self.volume.handle if self.volume and self.volume.ours else None

    @property
    def node(self) -> str | None:
        """The node whose target has the lvol."""
        return self.volume.node if self.volume and self.volume.ours else None

    @classmethod
    def of(cls, found: Object, volume: PersistentVolume | None) -> Claim:
        """Reads a core/v1 PersistentVolumeClaim and takes the volume that it names."""
        meta, spec, status = found["metadata"], found["spec"], found.get("status") or {}
        conditions = status.get("conditions") or ()
        kinds = {each["type"] for each in conditions if each.get("status") == "True"}
        return cls(
            namespace=meta["namespace"],
            name=meta["name"],
            uid=meta["uid"],
            phase=status.get("phase", "Pending"),
            block=spec.get("volumeMode") == "Block",
            read_only=set(spec.get("accessModes") or ()) == {"ReadOnlyMany"},
            shared="ReadWriteMany" in (spec.get("accessModes") or ()),
            storage_class=spec.get("storageClassName"),
            capacity=quantity_bytes((status.get("capacity") or {}).get("storage", "0")),
            selected_node=(meta.get("annotations") or {}).get(SELECTED_NODE),
            expanding=EXPANDING in kinds,
            deleting="deletionTimestamp" in meta,
            finalizers=tuple(meta.get("finalizers") or ()),
            resource_version=meta["resourceVersion"],
            volume=volume,
            object=found,
        )


@dataclass(frozen=True)
class StorageClass:
    """A class of claims."""

    name: str
    provisioner: str
    waits: bool
    """Its volumes are made when their first consumer is placed (WaitForFirstConsumer)."""

    @property
    def ours(self) -> bool:
        """Whether its volumes are of this driver."""
        return self.provisioner == DRIVER_NAME

    @classmethod
    def of(cls, found: Object) -> StorageClass:
        """Reads a storage.k8s.io/v1 StorageClass."""
        waits = found.get("volumeBindingMode") == "WaitForFirstConsumer"
        return cls(found["metadata"]["name"], found["provisioner"], waits)


@dataclass(frozen=True)
class Vmi:
    """A virtual machine that runs, is about to or did: KubeVirt's VirtualMachineInstance."""

    namespace: str
    name: str
    uid: str
    phase: str
    """Pending, Scheduling, Scheduled, Running, Succeeded, Failed or Unknown."""
    node: str | None
    """The node that it runs on, or was given to."""
    pods: Mapping[str, str]
    """Its launcher pods: uid to node; two of them during a migration."""
    migrating: bool
    """It is about to leave its node, or on its way."""
    deleting: bool
    object: Object
    """The VMI as JSON."""

    def pods_on(self, node: str) -> tuple[str, ...]:
        """Returns the uids of its launcher pods on a node, in order."""
        return tuple(sorted(pod for pod, place in self.pods.items() if place == node))

    @classmethod
    def of(cls, found: Object) -> Vmi:
        """Reads a kubevirt.io/v1 VirtualMachineInstance."""
        meta, status = found["metadata"], found.get("status") or {}
        migration = status.get("migrationState") or {}
        over = any(migration.get(how) for how in ("completed", "failed", "endTimestamp"))
        return cls(
            namespace=meta["namespace"],
            name=meta["name"],
            uid=meta["uid"],
            phase=status.get("phase") or "Pending",
            node=status.get("nodeName") or None,
            pods=dict(status.get("activePods") or {}),
            migrating=bool(migration) and not over,
            deleting="deletionTimestamp" in meta,
            object=found,
        )


def is_released(found: Object) -> bool:
    """Whether the claim of a core/v1 PersistentVolume is gone."""
    return (found.get("status") or {}).get("phase") in ("Released", "Failed")


def quantity_bytes(text: str) -> int:
    """Returns a Kubernetes quantity (`1Gi`, `1.5G`, `1e9`, `128974848000m`), rounded up.

    Raises:
        ValueError: it is not one.
    """
    try:
        # The API server writes exponents small; a person may not have.
        value = parse_quantity(EXPONENT.sub("e", text))
    except ValueError as error:
        raise ValueError(f"'{text}' is not a quantity, such as 1Gi") from error
    assert value is not None
    return math.ceil(value)


def _tied_to(spec: Object) -> str | None:
    """Returns the node of ours that a volume's affinity names, if it is exactly one."""
    nodes = {
        value
        for each in _places(spec)
        if each["key"] == TOPOLOGY_KEY and each["operator"] == "In"
        for value in each.get("values") or ()
    }
    return nodes.pop() if len(nodes) == 1 else None


def _places(spec: Object) -> list[Object]:
    """Returns all that a volume's affinity asks of its node's labels."""
    required = (spec.get("nodeAffinity") or {}).get("required") or {}
    terms = required.get("nodeSelectorTerms") or ()
    return [each for term in terms for each in term.get("matchExpressions") or ()]
