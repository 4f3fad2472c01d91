"""The VmVolume as an object of Kubernetes.

`Spec` and `Status` are its one definition; schemas/kubevirt/vmvolume.schema.json and the
CustomResourceDefinition in examples/kubernetes/kubevirt/ are made from them (see `crd`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from csi import LUN_FINALIZER
from csi.kubevirt.lun import Lun
from csi.objects import Object

FINALIZER = LUN_FINALIZER
Phase = Literal["Pending", "Attached", "Releasing", "Failed"]
NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
"""An object's name (RFC 1123)."""


class Model(BaseModel):
    """A part of the object, whose members have Kubernetes' names."""

    model_config = ConfigDict(
        alias_generator=to_camel, frozen=True, populate_by_name=True, use_attribute_docstrings=True
    )

    def plain(self) -> dict[str, Any]:
        """Returns it as JSON, without what is not set."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Spec(Model):
    """What the user wants. Only releaseTimeoutSeconds can be changed later."""

    vm_name: str = Field(min_length=1, max_length=63, pattern=NAME)
    """Name of the VirtualMachine (and so of its VirtualMachineInstance) in this namespace that
    gets the disk. It has to have a controller: see the label virtlun.dev/controller."""
    claim_name: str = Field(min_length=1, max_length=253, pattern=NAME)
    """Name of the PersistentVolumeClaim in this namespace: Block mode, of a StorageClass of
    csi.virtlun.dev, used by no pod."""
    read_only: bool = False
    """The guest cannot write to the disk."""
    removable: bool = True
    """The guest can keep the disk while it is in use: it is asked for (PREVENT ALLOW MEDIUM
    REMOVAL) and, on deletion, waited for. Without it a deletion takes the disk away at once."""
    serial: str | None = Field(default=None, pattern=r"^[ -~]{1,64}$")
    """Serial number that the guest sees, 1 to 64 printable ASCII characters; the volume's UUID
    where there is none."""
    release_timeout_seconds: int = Field(default=30, ge=0, le=86400)
    """How long a deletion waits for a guest that has the disk in use, before it takes the disk
    away by force."""


class Condition(Model):
    """As metav1.Condition."""

    type: str = Field(max_length=316)
    """Attached: the disk is a LUN of the machine. SeenByGuest: the guest has read its size."""
    status: Literal["True", "False", "Unknown"]
    """Whether it is so."""
    reason: str = Field(min_length=1, max_length=1024)
    """Why, as one word for programs."""
    message: str = Field(max_length=32768)
    """Why, as one sentence."""
    last_transition_time: str = Field(json_schema_extra={"format": "date-time"})
    """When its status changed."""
    observed_generation: int = Field(default=0, ge=0, json_schema_extra={"format": "int64"})
    """The generation of the object that it is about."""


class Status(Model):
    """What is the case. The controller on the machine's node writes it."""

    phase: Phase | None = None
    """Pending: it waits for what the message says. Attached: the guest has the disk. Releasing: it
    is being deleted and waits for what the message says, most often for the guest, which has it in
    use. Failed: it does not come to be unless the claim, the machine or this object changes."""
    message: str | None = None
    """The same as one sentence, with what to do."""
    node: str | None = None
    """The node of the machine's pod, whose target has the volume."""
    pod: str | None = None
    """UID of the machine's pod."""
    volume: str | None = None
    """UUID of the volume."""
    target: int | None = Field(default=None, ge=0, le=254)
    """SCSI target of the machine's controller; the LUN is 0."""
    attached_at: str | None = Field(default=None, json_schema_extra={"format": "date-time"})
    """When the event that tells the guest of the disk was in its ring; for a guest that was not
    connected, when the LUN was made."""
    guest_seen_at: str | None = Field(default=None, json_schema_extra={"format": "date-time"})
    """When the guest first read the disk's size."""
    observed_generation: int | None = Field(default=None, json_schema_extra={"format": "int64"})
    """The generation of the object that this is about."""
    conditions: tuple[Condition, ...] = Field(
        default=(),
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    )
    """The same for programs: see their types."""

    def tells_of(self, pod: str, lun: Lun) -> bool:
        """Whether it is about this very LUN."""
        return (self.pod, self.target, self.volume) == (pod, lun.target, lun.volume)


@dataclass(frozen=True)
class VmVolume:
    """A VmVolume as the API server has it."""

    namespace: str
    name: str
    uid: str
    generation: int
    created: str
    """As metadata.creationTimestamp: RFC 3339, whole seconds."""
    deleted_at: float | None
    """When its deletion was asked for, seconds since the epoch; None: it was not. It is the
    server's time, rounded down, or this node's if this program saw it come."""
    finalizer: bool
    """Whether it has ours."""
    resource_version: str
    spec: Spec
    status: Status
    object: Object
    """It as JSON."""

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.namespace, self.name

    @property
    def claim_key(self) -> tuple[str, str]:
        """Namespace and name of its claim."""
        return self.namespace, self.spec.claim_name

    @property
    def vm_key(self) -> tuple[str, str]:
        """Namespace and name of its machine."""
        return self.namespace, self.spec.vm_name

    @classmethod
    def of(cls, found: Object) -> VmVolume:
        """Reads one as the server sends it.

        Raises:
            ValueError: it is not as the CustomResourceDefinition has it.
        """
        meta = found["metadata"]
        deleted = meta.get("deletionTimestamp")
        return cls(
            namespace=meta["namespace"],
            name=meta["name"],
            uid=meta["uid"],
            generation=meta.get("generation", 0),
            created=meta.get("creationTimestamp", ""),
            deleted_at=datetime.fromisoformat(deleted).timestamp() if deleted else None,
            finalizer=FINALIZER in (meta.get("finalizers") or ()),
            resource_version=meta.get("resourceVersion", ""),
            spec=Spec.model_validate(found.get("spec") or {}),
            status=Status.model_validate(found.get("status") or {}),
            object=found,
        )


def time_text(seconds: float) -> str:
    """Returns a time, seconds since the epoch, as Kubernetes' MicroTime has it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
