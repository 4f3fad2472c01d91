"""The driver's volumes: lvols whose xattr `csi.volume` says that they are ours and what they are.

A volume's UUID, its handle, is made of the node and the name that the orchestrator chose
(RFC 9562, version 5). So a repeated CreateVolume finds what an earlier one began, however it
ended, and the driver needs no list of its own. The xattr is written last: an lvol of that UUID
without it is one that was never answered for, and is completed by the next call.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

from csi import DRIVER_NAME
from csi.errors import Code, Failure, describe, not_found, precondition
from csi.parameters import Parameters
from csi.proto import csi_pb2 as pb
from csi.sizes import size_within, wanted_bytes
from pydataplane.client import Client
from pydataplane.errors import RpcError
from pydataplane.volumes import (
    NAME,
    NO_DEVICE,
    Lvstore,
    Volume,
    VolumeError,
    VolumeNotFoundError,
    Volumes,
)

NAMESPACE = uuid.UUID("6a3e1f0c-0d4b-5c8e-9b55-76697274756c")
OWNER_XATTR = "csi.volume"
FORMATTING_XATTR = "csi.formatting"
NO_SPACE = -28


@dataclass(frozen=True)
class Owner:
    """What stands in OWNER_XATTR."""

    driver: str
    name: str
    """What the orchestrator calls it."""
    claim: str
    """NAMESPACE/NAME of the claim, or nothing."""
    parameters: str
    """Parameters.kept()."""

    @classmethod
    def parse(cls, text: str) -> Owner:
        """Returns what a xattr says; what a newer driver wrote beside it is left out."""
        found = json.loads(text)
        return cls(**{field.name: found[field.name] for field in fields(cls)})

    def read(self) -> Parameters:
        """Returns the class's parameters at creation."""
        return Parameters.model_validate_json(self.parameters, by_alias=True)


@dataclass(frozen=True)
class Owned:
    """A volume and what the driver knows of it."""

    volume: Volume
    owner: Owner

    @property
    def parameters(self) -> Parameters:
        """The class's parameters at creation."""
        return self.owner.read()


class OwnedVolumes:
    """The driver's volumes on one node's target."""

    def __init__(self, client: Client, node: str) -> None:
        """Uses `client` for every call; `node` is part of what a volume's UUID is made of."""
        self.volumes = Volumes(client)
        self._node = node
        self._owners: dict[str, Owner] = {}  # an owner never changes; of the size of the lvstores

    def handle(self, name: str) -> str:
        """Returns the UUID of the volume that the orchestrator calls `name`."""
        return str(uuid.uuid5(NAMESPACE, f"{self._node}/{name}"))

    def lvstore(self, name: str) -> Lvstore:
        """Returns an lvstore that a class names.

        Raises:
            Failure: RESOURCE_EXHAUSTED, this node has none of that name; another one may.
        """
        try:
            return self.volumes.lvstore(name)
        except VolumeNotFoundError as error:
            raise Failure(
                Code.RESOURCE_EXHAUSTED,
                f"node {self._node} has no lvstore {name}: make one with `virtlun lvstore create`, "
                "or name another in the StorageClass",
            ) from error

    def find(self, handle: str) -> Owned | None:
        """Returns the volume with this handle, or None; also None for an lvol of another owner."""
        volume = self._lvol(handle)
        owner = volume and self._owner(volume.uuid)
        return Owned(volume, owner) if volume and owner else None

    def get(self, handle: str) -> Owned:
        """Returns the volume with this handle.

        Raises:
            Failure: NOT_FOUND, there is none on this node, or it is not the driver's.
        """
        found = self.find(handle)
        if found is None:
            raise self.not_found(handle)
        return found

    def not_found(self, handle: str) -> Failure:
        """Returns the NOT_FOUND for a handle that is none of this node's volumes."""
        return not_found(f"volume {handle} is not one of {DRIVER_NAME} on node {self._node}")

    def all(self) -> Iterator[Owned]:
        """Yields the volumes in the order of their handles."""
        found = sorted(self.volumes.volumes(), key=lambda volume: volume.uuid)
        present = {volume.uuid for volume in found}
        for gone in set(self._owners) - present:
            self._owners.pop(gone, None)
        for volume in found:
            owner = self._owner(volume.uuid)
            if owner is not None:
                yield Owned(volume, owner)

    def create(self, owner: Owner, size: int, store: Lvstore, *, thin: bool) -> Owned:
        """Makes a volume of `size` bytes, whole clusters, or completes one begun before.

        Raises:
            Failure: ALREADY_EXISTS with other properties, RESOURCE_EXHAUSTED.
        """
        handle = self.handle(owner.name)
        volume = self._lvol(handle)
        if volume is None:
            name = owner.name if NAME.fullmatch(owner.name) else f"csi-{handle}"
            try:
                volume = self.volumes.create(f"{store.name}/{name}", size, thin=thin, uuid=handle)
            except VolumeError as error:
                raise Failure(Code.ALREADY_EXISTS, str(error)) from error
            except RpcError as error:
                if error.code != NO_SPACE:
                    raise
                raise Failure(
                    Code.RESOURCE_EXHAUSTED,
                    f"lvstore {store.name} of node {self._node} has {store.free} bytes free, and "
                    f"volume {owner.name} needs {size}: ask for less, delete volumes there or add "
                    "to the lvstore",
                ) from error
        elif self._owner(handle) is None and not _is(volume, size, store, thin=thin):
            self.volumes.delete(handle)  # begun by a call that was never answered; nobody has it
            return self.create(owner, size, store, thin=thin)
        if volume.uuid != handle:
            raise Failure(
                Code.ALREADY_EXISTS,
                f"{volume.path} exists already and is not of {DRIVER_NAME}: rename or delete it",
            )
        if self._owner(handle) is None:
            self.volumes.set_xattr(handle, OWNER_XATTR, json.dumps(asdict(owner)))
        return self.get(handle)

    def delete(self, handle: str) -> None:
        """Deletes a volume; one that is gone, or whose handle never was one of ours, is fine.

        Raises:
            Failure: FAILED_PRECONDITION, it is in use, or an lvol of another owner.
        """
        volume = self._lvol(handle)
        if volume is None:
            return
        if self._owner(handle) is None:
            raise precondition(
                f"lvol {volume.path} is not of {DRIVER_NAME}: delete it with `virtlun volume`"
            )
        self.volumes.delete(handle, missing_ok=True)
        self._owners.pop(handle, None)

    def grow(self, handle: str, wanted: pb.CapacityRange) -> Volume:
        """Grows a volume into a range; one that is as large already is left as it is.

        Raises:
            Failure: NOT_FOUND; OUT_OF_RANGE, no volume has such a size or the lvstore has no room.
                The orchestrator shows why with the claim, tries again later, and takes a smaller
                size instead if it is asked to; on RESOURCE_EXHAUSTED it would do neither.
        """
        volume = self.get(handle).volume
        store = self.lvstore(volume.lvstore)
        try:
            size = size_within(wanted, store, volume.size)
            if size <= volume.size:
                return volume
            return self.volumes.resize(handle, size)
        except (Failure, RpcError) as error:
            code, message = describe(error)
            if code is not Code.RESOURCE_EXHAUSTED:
                raise
            raise Failure(
                Code.OUT_OF_RANGE,
                f"volume {handle} cannot grow from {volume.size} to "
                f"{wanted_bytes(wanted)} bytes: lvstore {store.name} of node {self._node} has "
                f"{store.free} bytes free ({message}); ask for less, delete volumes there or add "
                "to the lvstore",
            ) from error

    def has_kernel_face(self, handle: str) -> bool:
        """Whether a device of a host stands on the volume, which has to be told of its growth."""
        exports = self.volumes.client.call("virtlun_export_list")
        return any(export["bdev_name"] == handle for export in exports)

    def formatting(self, handle: str) -> bool:
        """Whether mkfs was begun on a volume and not finished."""
        return FORMATTING_XATTR in self.volumes.xattrs(handle)

    def set_formatting(self, handle: str, *, begun: bool) -> None:
        """Notes that mkfs begins on a volume, or that it has finished."""
        if begun:
            self.volumes.set_xattr(handle, FORMATTING_XATTR, "1")
        else:
            self.volumes.remove_xattr(handle, FORMATTING_XATTR)

    def _lvol(self, handle: str) -> Volume | None:
        try:
            if str(uuid.UUID(handle)) != handle:
                return None
            return self.volumes.volume(handle)
        except (ValueError, VolumeNotFoundError):
            return None

    def _owner(self, handle: str) -> Owner | None:
        owner = self._owners.get(handle)
        if owner is not None:
            return owner
        owner = owner_of(self.volumes, handle)
        if owner is not None:
            self._owners[handle] = owner
        return owner


def owner_of(volumes: Volumes, handle: str) -> Owner | None:
    """Returns what a volume keeps of its owner, or None where it is not the driver's, or gone."""
    try:
        text = volumes.xattrs(handle).get(OWNER_XATTR)
    except RpcError as error:
        if error.code != NO_DEVICE:
            raise
        return None
    owner = Owner.parse(text) if text is not None else None
    return owner if owner is not None and owner.driver == DRIVER_NAME else None


def _is(volume: Volume, size: int, store: Lvstore, *, thin: bool) -> bool:
    return (volume.size, volume.lvstore, volume.thin) == (size, store.name, thin)
