"""The driver's volumes: lvols whose xattr `csi.volume` says that they are ours and what they are.

A volume's UUID, its handle, is made of the lvstore, the node and the name that the orchestrator
chose (`handles`). So a repeated CreateVolume finds what an earlier one made, however it ended, the
driver needs no list of its own, and a volume that is gone is told from one whose lvstore is not
loaded. The lvol is made with the xattr, in one change of the lvstore: what was made is listed.

A pool of Ceph is an lvstore here, of which every node that has it sees the same: the node is no
part of those handles, so that all make, find and delete the same volume. There the image is made
before its xattr and UUID are noted; what a node left that died in between the next one deletes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from csi import DRIVER_NAME, handles
from csi.errors import Code, Failure, describe, not_found, precondition
from csi.hostdevice import exports
from csi.lvols import Lvols
from csi.parameters import Parameters
from csi.proto import csi_pb2 as pb
from csi.room import Room
from csi.sizes import size_within, wanted_bytes
from csi.targets import Answer, Targets
from csi.xattrjson import XattrJson
from pydataplane.client import Client
from pydataplane.errors import (
    BAD_PARAMETERS,
    NO_DEVICE,
    NO_SPACE,
    RpcError,
    VolumeError,
    VolumeNotFoundError,
)
from pydataplane.lvols import Volume
from pydataplane.lvstores import Lvstore
from pydataplane.volumenames import NAME
from pydataplane.volumes import Volumes

OWNER_XATTR = "csi.volume"
BEFORE_XATTR = "csi.volume.before"
"""What OWNER_XATTR said before a volume received what is newer (plugin.streams.receiving)."""
FORMATTING_XATTR = "csi.formatting"


@dataclass(frozen=True)
class Owner(XattrJson):
    """What stands in OWNER_XATTR."""

    driver: str
    name: str
    """What the orchestrator calls it."""
    claim: str
    """NAMESPACE/NAME of the claim, or nothing."""
    parameters: str
    """Parameters.kept()."""
    content: str = ""
    """What it was made of (csi.contentsource), or nothing."""

    def read(self) -> Parameters:
        """Returns the class's parameters at creation."""
        return Parameters.model_validate_json(self.parameters, by_alias=True)


@dataclass(frozen=True)
class OwnedVolume:
    """A volume and what the driver knows of it."""

    volume: Volume
    owner: Owner

    @property
    def parameters(self) -> Parameters:
        """The class's parameters at creation."""
        return self.owner.read()


@dataclass(frozen=True)
class Held:
    """An lvstore, and the driver's volumes in it."""

    store: Lvstore
    volumes: list[OwnedVolume]
    mismatches: int | None
    """Reads that met other data than was written; None: it has no checksums."""


class OwnedVolumes:
    """The driver's volumes on one node's targets."""

    def __init__(self, targets: Targets, node: str) -> None:
        """Finds volumes on `targets`; `node` is part of what a volume's UUID is made of."""
        self.targets = targets
        self.lvols = Lvols(targets, node)
        self.room = Room(targets, node)
        self._owners: dict[str, Owner] = {}  # an owner never changes; of the size of the lvstores

    def handle(self, name: str, store: Lvstore) -> str:
        """Returns the UUID of the volume that the orchestrator calls `name`, made or not."""
        handle = handles.make(store.uuid, self.lvols.node_in(store), name)
        if store.is_pool:
            return handle
        before = handles.without_lvstore(self.lvols.node, name)
        # Of its target alone: others may be away.
        made_before = self.lvols.in_lvstore_of(handle, before)
        if made_before is not None and made_before.lvstore == store.name:
            return before
        return handle

    def known(self, name: str) -> list[str]:
        """Returns the handles of volumes called so that were seen, without asking the target."""
        owners = list(self._owners.items())
        return [handle for handle, owner in owners if owner.name == name]

    def find(self, handle: str) -> OwnedVolume | None:
        """Returns the volume with this handle, or None; also None for an lvol of another owner."""
        volume = self.lvols.find(handle)
        owner = volume and self._owner(volume.uuid)
        return OwnedVolume(volume, owner) if volume and owner else None

    def get(self, handle: str) -> OwnedVolume:
        """Returns the volume with this handle.

        Raises:
            Failure: NOT_FOUND, there is none on this node, or it is not the driver's; UNAVAILABLE,
                its lvstore is not loaded.
        """
        found = self.find(handle)
        if found is None:
            raise self.missing(handle)
        return found

    def missing(self, handle: str) -> Failure:
        """Returns why a handle is none of this node's volumes: NOT_FOUND, or UNAVAILABLE."""
        if handles.is_uuid(handle) and not self.lvols.stores_of(handle):
            return self.lvols.not_loaded(handle)
        return not_found(f"volume {handle} is not one of {DRIVER_NAME} on node {self.lvols.node}")

    def all(self) -> Iterator[OwnedVolume]:
        """Yields the volumes in the order of their handles."""
        found = self.targets.gather(self._of_target)
        present = {owned.volume.uuid for owned in found}
        for gone in set(self._owners) - present:
            self._owners.pop(gone, None)
        yield from sorted(found, key=lambda owned: owned.volume.uuid)

    def by_store(self) -> list[Answer[list[Held]]]:
        """Returns what each target has: its lvstores, each with the driver's volumes in it."""

        def stores(client: Client) -> list[Held]:
            found = self._of_target(client)
            volumes = Volumes(client)
            return [
                Held(
                    store,
                    [owned for owned in found if owned.volume.lvstore == store.name],
                    checksums["mismatches"] if (checksums := volumes.checksums(store)) else None,
                )
                for store in volumes.lvstores()
            ]

        return self.targets.ask(stores)

    def _of_target(self, client: Client) -> list[OwnedVolume]:
        """Returns the driver's volumes on one target, those that wait for their key, too."""
        volumes = Volumes(client)
        lvols = (lvol for lvol in volumes.all() if not lvol.snapshot and may_be_ours(lvol))
        found = ((lvol, self._owner(lvol.uuid, volumes)) for lvol in lvols)
        return [OwnedVolume(volume, owner) for volume, owner in found if owner is not None]

    def create(self, owner: Owner, size: int, store: Lvstore, *, thin: bool) -> OwnedVolume:
        """Makes a volume of `size` bytes, whole clusters, or completes one begun before.

        Raises:
            Failure: ALREADY_EXISTS with other properties, RESOURCE_EXHAUSTED.
        """
        handle = self.handle(owner.name, store)
        volume = self.lvols.find(handle)
        thin = thin or store.is_pool
        if volume is None:
            name = lvol_name(owner.name, handle)
            self.clear_remnant(handle, store, name)
            try:
                with self.room.promise(owner.read(), store, size):
                    volume = self._make(f"{store.name}/{name}", size, owner, thin=thin, uuid=handle)
            except VolumeError as error:
                raise Failure(Code.ALREADY_EXISTS, str(error)) from error
            except RpcError as error:
                if error.code != NO_SPACE:
                    raise
                raise Failure(
                    Code.RESOURCE_EXHAUSTED,
                    f"lvstore {store.name} of node {self.lvols.node} has {store.free} bytes free, "
                    f"and volume {owner.name} needs {size} ({error.message}): ask for less, delete "
                    "volumes there or add to the lvstore",
                ) from error
        elif self._owner(handle) is None and not _is(volume, size, store, thin=thin):
            if BEFORE_XATTR in self.lvols.at(handle).xattrs(handle):
                raise Failure(
                    Code.ALREADY_EXISTS,
                    f"volume {volume.path} exists already, and has received what is newer: choose "
                    "another name, or delete it",
                )
            # Begun by a call that was never answered: nobody has it.
            self.lvols.at(handle).delete(handle)
            return self.create(owner, size, store, thin=thin)
        if volume.uuid != handle:
            raise Failure(
                Code.ALREADY_EXISTS,
                f"{volume.path} exists already and is not of {DRIVER_NAME}: rename or delete it",
            )
        if self._owner(handle) is None:
            self.lvols.at(handle).set_xattr(handle, OWNER_XATTR, owner.written())
        return self.get(handle)

    def clear_remnant(self, handle: str, store: Lvstore, name: str) -> None:
        """Deletes the image that a node has left which died while it made a volume in a pool.

        It is nobody's: its owner, noted last, was not; either its UUID is this volume's, or nothing
        was noted, and it is empty. One that a node makes at this moment is open there, and stays.

        Raises:
            RpcError: BUSY, a node makes it at this moment.
        """
        if not store.is_pool:
            return
        found = self.lvols.in_lvstore_of(handle, f"{store.name}/{name}")
        if found is None:
            return
        volumes = self.lvols.at(handle)
        noted = volumes.xattrs(found.uuid)
        if found.uuid == handle:
            is_left = OWNER_XATTR not in noted
        else:
            is_left = not noted and _is_empty(volumes, found)
        if is_left:
            volumes.delete(found.uuid, missing_ok=True)

    def _make(self, path: str, size: int, owner: Owner, *, thin: bool, uuid: str) -> Volume:
        """Makes an lvol with its owner.

        A target older than the driver knows of no xattrs there: the caller adds the owner then.
        """
        volumes = self.lvols.at(uuid)
        try:
            return volumes.create(
                path,
                size,
                thin=thin,
                uuid=uuid,
                xattrs={OWNER_XATTR: owner.written()},
                key=owner.read().encryption_key,
            )
        except RpcError as error:
            if error.code != BAD_PARAMETERS or owner.read().encryption_key:
                raise
            return volumes.create(path, size, thin=thin, uuid=uuid)

    def delete(self, handle: str, *, absent: bool = False) -> None:
        """Deletes a volume. Idempotent, also for a handle that never was one of ours.

        `absent` says that it was not there when it was decided that it may go.

        Raises:
            Failure: FAILED_PRECONDITION, it is in use, or an lvol of another owner; UNAVAILABLE,
                its lvstore is not loaded, so that it may be there, or it was `absent`.
        """
        volume = self.lvols.find(handle)
        if volume is None:
            self.lvols.check_gone(handle)
            if handles.is_uuid(handle) and any(
                store.is_pool for store in self.lvols.stores_of(handle)
            ):
                self._delete_in_pool(handle)
            return
        if absent:
            raise Failure(
                Code.UNAVAILABLE,
                f"volume {handle} has just come: whether it may go is asked when it is to be "
                "deleted the next time",
            )
        if self._owner(handle) is None:
            raise precondition(
                f"lvol {volume.path} is not of {DRIVER_NAME}: delete it with `virtlun volume`"
            )
        if volume.pool:
            self._delete_in_pool(handle)
        else:
            self.lvols.at(handle).delete(handle, missing_ok=True)
        self._owners.pop(handle, None)

    def _delete_in_pool(self, handle: str) -> None:
        """Deletes a volume, also one that a node has left in the trash which died meanwhile."""
        with suppress(VolumeNotFoundError):
            self.lvols.at(handle).delete(handle)

    def grow_as_asked(
        self, owned: OwnedVolume, wanted: pb.CapacityRange, asked: int | None
    ) -> Volume:
        """Grows a volume into a range, but to no more bytes than its claim asks for, if it has one.

        Raises:
            Failure: as `grow`; OUT_OF_RANGE also where the caller wants more than that.
        """
        handle = owned.volume.uuid
        if asked is None or wanted.required_bytes <= asked:
            return self.grow(handle, wanted)
        # what was asked for may have been rounded up
        volume = self.grow(handle, pb.CapacityRange(required_bytes=asked))
        if volume.size < wanted.required_bytes:
            raise Failure(
                Code.OUT_OF_RANGE,
                f"volume {handle} does not grow to the {wanted.required_bytes} bytes of its "
                f"PersistentVolume: its claim asks for {asked}; ask for more there",
            )
        return volume

    def grow(self, handle: str, wanted: pb.CapacityRange) -> Volume:
        """Grows a volume into a range; one that is as large already is left as it is.

        Raises:
            Failure: NOT_FOUND; OUT_OF_RANGE, no volume has such a size or the lvstore has no room.
                The orchestrator shows why with the claim, tries again later, and takes a smaller
                size instead if it is asked to; on RESOURCE_EXHAUSTED it would do neither.
        """
        owned = self.get(handle)
        volume = owned.volume
        store = self.lvols.at(handle).lvstore(volume.lvstore)
        try:
            size = size_within(wanted, store, volume.size)
            if size <= volume.size:
                return volume
            with self.room.promise(owned.parameters, store, size - volume.size):
                return self.lvols.at(handle).resize(handle, size)
        except (Failure, RpcError) as error:
            code, message = describe(error)
            if code is not Code.RESOURCE_EXHAUSTED:
                raise
            raise Failure(
                Code.OUT_OF_RANGE,
                f"volume {handle} cannot grow from {volume.size} to "
                f"{wanted_bytes(wanted)} bytes: lvstore {store.name} of node {self.lvols.node} has "
                f"{store.free} bytes free ({message}); ask for less, delete volumes there or add "
                "to the lvstore",
            ) from error

    def has_kernel_face(self, handle: str) -> bool:
        """Whether a device of a host stands on the volume, which has to be told of its growth."""
        return exports.find(self.targets.of(handle), handle) is not None

    def formatting(self, handle: str) -> bool:
        """Whether mkfs was begun on a volume and not finished."""
        return FORMATTING_XATTR in self.lvols.at(handle).xattrs(handle)

    def set_formatting(self, handle: str, *, begun: bool) -> None:
        """Notes that mkfs begins on a volume, or that it has finished."""
        if begun:
            self.lvols.at(handle).set_xattr(handle, FORMATTING_XATTR, "1")
        else:
            self.lvols.at(handle).remove_xattr(handle, FORMATTING_XATTR)

    def noted(self, volume: Volume) -> tuple[Owner | None, dict[str, str]]:
        """Returns the owner of a volume, and all that is noted at it, as it is at this moment.

        Others change it, too: `virtlun volume receive`.
        """
        found = self.lvols.at(volume.uuid).xattrs(volume.uuid)
        owner = read_owner(found.get(OWNER_XATTR))
        if owner is None:
            self._owners.pop(volume.uuid, None)
        else:
            self._owners[volume.uuid] = owner
        return owner, found

    def own(self, volume: Volume, owner: Owner) -> None:
        """Makes a volume that is nobody's the driver's."""
        self.lvols.at(volume.uuid).set_xattr(volume.uuid, OWNER_XATTR, owner.written())

    def disown(self, volume: Volume) -> None:
        """Takes that back."""
        self._owners.pop(volume.uuid, None)
        self.lvols.at(volume.uuid).remove_xattr(volume.uuid, OWNER_XATTR)

    def _owner(self, handle: str, volumes: Volumes | None = None) -> Owner | None:
        """Returns what a volume keeps of its owner; `volumes` are its target's, if known."""
        owner = self._owners.get(handle)
        if owner is not None:
            return owner
        owner = owner_of(volumes or self.lvols.at(handle), handle)
        if owner is not None:
            self._owners[handle] = owner
        return owner


def lvol_name(name: str, handle: str) -> str:
    """Returns what the lvol is called of something that the orchestrator calls `name`."""
    return name if NAME.fullmatch(name) else f"csi-{handle}"


def may_be_ours(lvol: Volume) -> bool:
    """Whether a volume can be the driver's, without a look at its xattrs.

    In a pool of Ceph, which may have thousands of others, all of ours have handles that tell it.
    """
    return lvol.pool is None or (
        handles.tells_lvstore(lvol.uuid) and handles.may_be_in(lvol.uuid, lvol.pool)
    )


def owner_of(volumes: Volumes, handle: str) -> Owner | None:
    """Returns what a volume keeps of its owner, or None where it is not the driver's, or gone."""
    try:
        return read_owner(volumes.xattrs(handle).get(OWNER_XATTR))
    except RpcError as error:
        if error.code != NO_DEVICE:
            raise
        return None


def read_owner(text: str | None) -> Owner | None:
    """Returns what stands in OWNER_XATTR, or None where that is nothing, or another driver's."""
    owner = Owner.parse(text) if text is not None else None
    return owner if owner is not None and owner.driver == DRIVER_NAME else None


def _is_empty(volumes: Volumes, volume: Volume) -> bool:
    """Whether an image has nothing; each object is looked for where its pool does not know."""
    return not volume.allocated or not any(volumes.ranges(volume.uuid))


def _is(volume: Volume, size: int, store: Lvstore, *, thin: bool) -> bool:
    return (volume.size, volume.lvstore, volume.thin) == (size, store.name, thin)
