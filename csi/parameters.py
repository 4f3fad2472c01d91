"""The parameters of a StorageClass; schemas/csi/storageclass.schema.json is made from them.

Kubernetes gives every parameter as text. What they amount to is kept with the volume and comes
back in its context, so that a node needs no class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from csi import DRIVER_NAME
from csi.errors import Failure, invalid
from pydataplane.lvstores import Lvstore

Model = TypeVar("Model", bound=BaseModel)
FileSystem = Literal["ext4", "xfs"]
Face = Literal["kernel", "vhost"]

PROVISIONER_PREFIX = "csi.storage.k8s.io/"
PROVISIONERS = {
    f"{PROVISIONER_PREFIX}{key}" for key in ("fstype", "pvc/name", "pvc/namespace", "pv/name")
}
GIVEN_MAX = 64
"""Characters of a wrong value that a refusal repeats."""


class Parameters(BaseModel):
    """What a StorageClass of csi.virtlun.dev can say; a parameter it does not know is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True
    )

    lvstore: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Name of the lvstore on the node that volumes come from, or of the pool of Ceph, in which any
    node that has it makes them; a UUID is taken as well."""
    thin: Literal["true", "false"] = "false"
    """Take space when it is written to, instead of all at once. Volumes of a pool of Ceph do in any
    case; there it says that what is made of a snapshot or volume shares its data, and keeps it from
    being deleted, instead of being a copy."""
    overcommit: str | None = Field(default=None, pattern=r"^[1-9][0-9]{0,3}(\.[0-9]{1,2})?$")
    """For thin volumes: how many times its size the volumes of an lvstore may have together, thick
    ones included, such as 1.5. Without it there is no limit, and a class's capacity is what is
    free: each claim is judged by itself, so all together may be any multiple of the lvstore, and
    when that is full, writes to its thin volumes fail for lack of space (a machine is paused)."""
    fs_type: FileSystem = Field(default="ext4", alias="fsType")
    """File system of volumes for which neither claim nor class's csi.storage.k8s.io/fstype has
    one."""
    block_size: Literal["512", "4096"] = Field(default="512", alias="blockSize")
    """Logical block size of the device that pods get, and of the disk that a virtual machine gets,
    bytes. SeaBIOS boots from 512 only."""
    encryption_key: str | None = Field(
        default=None, alias="encryptionKey", pattern=r"^[!-.0-~]{1,255}$"
    )
    """Name of the key that the data of volumes is encrypted with, on the node's disk; what is made
    of a volume has its key. The node's target has to have it (`virtlun key create`), also after
    each restart: until then volumes wait."""
    face: Face = "kernel"
    """What a node publishes: a kernel block device, or a directory with a vhost-user socket for a
    virtual machine."""

    @model_validator(mode="after")
    def _thin_alone(self) -> Self:
        if self.overcommit is not None and self.thin != "true":
            raise PydanticCustomError(
                "overcommit", 'it is for thin volumes: add thin: "true", or leave it out'
            )
        return self

    @property
    def pool(self) -> str:
        """What claims of the class share the room of, as people read it."""
        if self.overcommit is None:
            return self.lvstore
        return f"{self.lvstore} (overcommit {self.overcommit})"

    def promised_most(self, store: Lvstore) -> int | None:
        """Returns the bytes that all volumes of an lvstore may have; None for no limit."""
        if self.overcommit is None or not store.tells_room:
            return None
        return int(Decimal(self.overcommit) * store.total)

    def kept(self) -> str:
        """Returns the text that the volume keeps; equal for equal parameters."""
        kept = self.model_dump(by_alias=True, mode="json", exclude_none=True)
        return json.dumps(kept, sort_keys=True)

    def context(self) -> dict[str, str]:
        """Returns what a node needs to know of them, as a volume context."""
        return {
            f"{DRIVER_NAME}/fsType": self.fs_type,
            f"{DRIVER_NAME}/blockSize": self.block_size,
            f"{DRIVER_NAME}/face": self.face,
        }


def read(given: Mapping[str, str]) -> Parameters:
    """Returns the parameters of a class, without the provisioner's own.

    external-provisioner takes those out for CreateVolume (and refuses ones that it does not know),
    but gives them as they are to GetCapacity.

    Raises:
        Failure: INVALID_ARGUMENT; the text names the parameter and what is possible.
    """
    return parsed(given, Parameters, "StorageClass parameter")


def parsed(given: Mapping[str, str], model: type[Model], what: str) -> Model:
    """Returns what a class's parameters say, without those that Kubernetes' sidecars add.

    `what` is what the text of a refusal calls each of them.

    Raises:
        Failure: INVALID_ARGUMENT; the text names the parameter and what is possible.
    """
    ours = {key: value for key, value in given.items() if key not in PROVISIONERS}
    try:
        return model.model_validate(ours, by_alias=True, by_name=False)
    except ValidationError as error:
        raise _explained(error, ours, model, what) from error


def claim(given: Mapping[str, str]) -> str:
    """Returns `NAMESPACE/NAME` of the claim, or nothing where the provisioner does not tell."""
    parts = [given.get(f"{PROVISIONER_PREFIX}pvc/{key}", "") for key in ("namespace", "name")]
    return "/".join(parts) if all(parts) else ""


def volume_name(given: Mapping[str, str]) -> str:
    """Returns the PersistentVolume's name, or nothing where csi-resizer does not tell."""
    return given.get(f"{PROVISIONER_PREFIX}pv/name", "")


def _explained(
    error: ValidationError, given: Mapping[str, str], model: type[BaseModel], what: str
) -> Failure:
    """Returns INVALID_ARGUMENT for parameters that a model refuses."""
    first = error.errors()[0]
    context = first.get("ctx", {})
    loc = ".".join(str(part) for part in first["loc"])
    name = loc or str(context.get("parameter", first["type"]))
    known = ", ".join(field.alias or key for key, field in model.model_fields.items())
    if first["type"] == "missing":
        return invalid(f"{what} {name} is missing: name it, for example lvs0")
    if first["type"] == "extra_forbidden":
        return invalid(f"{what} {name} is not known: the parameters are {known}")
    return invalid(f"{what} {name}: '{given.get(name, '')[:GIVEN_MAX]}': {first['msg']}")


def schema(model: type[BaseModel] = Parameters) -> dict[str, Any]:
    """Returns the JSON Schema of a class's parameters, which Kubernetes gives as texts."""
    found = model.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | found


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
