"""Volumes that are made of something: of a snapshot, or of another volume as it is at the moment.

Such a volume is a clone, which takes nothing until it is written; one of a class without `thin` is
given all of its own. What is left to do after the clone is there stands in its xattr
`csi.unfinished`: a repeated call goes on with it.
"""

from __future__ import annotations

from csi import handles
from csi.errors import Code, Failure, invalid, not_found
from csi.locks import VolumeLocks
from csi.moves import Moves
from csi.parameters import Parameters
from csi.proto import csi_pb2 as pb
from csi.sizes import size_within
from csi.snapshots import OwnedSnapshots, missing
from csi.volumes import FORMATTING_XATTR, OWNER_XATTR, OwnedVolume, OwnedVolumes, Owner, lvol_name
from pydataplane.errors import BUSY, EXISTS, NO_DEVICE, NO_SPACE, RpcError
from pydataplane.lvols import Volume
from pydataplane.lvstores import Lvstore

UNFINISHED_XATTR = "csi.unfinished"
"""The bytes that the volume is to have."""
LOCK_WAIT_S = 5.0
"""How long other calls of a source are waited for, seconds: a snapshot takes milliseconds."""


def written(source: pb.VolumeContentSource) -> str:
    """Returns a content source as Owner.content has it: KIND/ID; nothing for none.

    Raises:
        Failure: INVALID_ARGUMENT, it names nothing.
    """
    kind = source.WhichOneof("type")
    identifier = source.snapshot.snapshot_id or source.volume.volume_id
    if kind is None or not identifier:
        raise invalid("volume_content_source names neither a snapshot nor a volume")
    return f"{kind}/{identifier}"


def read(content: str) -> pb.VolumeContentSource | None:
    """Returns the content source that Owner.content has; None for none."""
    kind, _, identifier = content.partition("/")
    of = pb.VolumeContentSource
    match kind:
        case "snapshot":
            return of(snapshot=of.SnapshotSource(snapshot_id=identifier))
        case "volume":
            return of(volume=of.VolumeSource(volume_id=identifier))
        case _:
            return None


class Contents:
    """Makes the volumes of one node that are made of something."""

    def __init__(
        self, volumes: OwnedVolumes, snapshots: OwnedSnapshots, locks: VolumeLocks, moves: Moves
    ) -> None:
        """Makes them of `snapshots`, and of `volumes` that count (`moves`).

        The Node service shares their `locks`.
        """
        self._moves = moves
        self._volumes = volumes
        self._lvols = volumes.lvols
        self._snapshots = snapshots
        self._locks = locks

    def create(self, owner: Owner, wanted: pb.CapacityRange, store: Lvstore) -> OwnedVolume:
        """Makes the volume of `owner`, or completes one begun before; its lock is held.

        Raises:
            Failure: NOT_FOUND, there is no such source; RESOURCE_EXHAUSTED, it is on another node,
                or there is no room; INVALID_ARGUMENT, the class does not go with it; OUT_OF_RANGE,
                it is larger than what is wanted.
        """
        handle = self._volumes.handle(owner.name, store)
        found = self._volumes.find(handle)
        if found is not None and UNFINISHED_XATTR not in self._lvols.at(handle).xattrs(handle):
            return found
        kind, _, identifier = owner.content.partition("/")
        try:
            if found is None and kind == "volume":
                self._clone_volume(identifier, owner, wanted, store)
            elif found is None:
                self._clone_snapshot(identifier, owner, wanted, store)
            self._finish(handle)
        finally:
            if kind == "volume":
                self._snapshots.sweep(handle)
        return self._volumes.get(handle)

    def _clone_snapshot(
        self, identifier: str, owner: Owner, wanted: pb.CapacityRange, store: Lvstore
    ) -> None:
        source = self._snapshots.find(identifier)
        if source is None:
            raise self._missing("snapshot", identifier)
        size = self._size(source.volume, source.taken.read(), owner, wanted, store)
        with self._volumes.room.promise(owner.read(), store, size):
            self._clone(source.volume, owner, size, store, formatting=source.formatting)

    def _clone_volume(
        self, identifier: str, owner: Owner, wanted: pb.CapacityRange, store: Lvstore
    ) -> None:
        """Clones a volume: by a snapshot of it, which is deleted from the beginning."""
        with self._locks.hold(identifier, wait_s=LOCK_WAIT_S):
            source = self._moves.find(identifier)
            if source is None:
                raise self._missing("volume", identifier)
            size = self._size(source.volume, source.parameters, owner, wanted, store)
            hidden = self._snapshots.hidden_handle(source)
            with self._locks.hold(hidden):
                snapshot = self._snapshots.take_hidden(hidden, source)
                formatting = self._volumes.formatting(identifier)
                try:
                    with self._volumes.room.promise(owner.read(), store, size):
                        self._clone(snapshot, owner, size, store, formatting=formatting)
                finally:
                    if store.is_pool:
                        self._snapshots.delete_hidden(hidden)

    def _missing(self, kind: str, identifier: str) -> Failure:
        """Returns why a source is not here."""
        away = handles.is_uuid(identifier) and not self._lvols.stores_of(identifier)
        # The API server last: each node is asked for it, again and again.
        if away or (kind == "volume" and self._moves.elsewhere(identifier) is not None):
            return Failure(
                Code.RESOURCE_EXHAUSTED,
                f"{kind} {identifier} is of an lvstore that node {self._lvols.node} does not have: "
                "a volume is made of it on the node that does; have the pod run there",
            )
        if kind == "snapshot":
            return missing(identifier)
        return not_found(f"there is no volume {identifier}: nothing is made of it")

    def _size(
        self,
        source: Volume,
        parameters: Parameters,
        owner: Owner,
        wanted: pb.CapacityRange,
        store: Lvstore,
    ) -> int:
        """Returns the bytes that the volume is to have, if it can be made of `source`."""
        asked = owner.read()
        if source.lvstore != store.name:
            raise invalid(
                f"volume {owner.name} cannot be made in lvstore {store.name} of what is in lvstore "
                f"{source.lvstore}: name a class with that one"
            )
        if asked.block_size != parameters.block_size:
            raise invalid(
                f"volume {owner.name} cannot have blocks of {asked.block_size} bytes: what it is "
                f"made of has {parameters.block_size}; name a class with that blockSize"
            )
        if asked.encryption_key != source.key:
            key = source.key and f"key {source.key}"
            raise invalid(
                f"volume {owner.name} cannot be encrypted otherwise than what it is made of, with "
                f"{key or 'no key'}: name a class with "
                + (f"encryptionKey: {source.key}" if source.key else "no encryptionKey")
            )
        size = size_within(wanted, store, source.size)
        if size < source.size:
            raise Failure(
                Code.OUT_OF_RANGE,
                f"volume {owner.name} cannot have {size} bytes: what it is made of has "
                f"{source.size}; ask for as many at least",
            )
        if asked.thin != "true" and size > store.free and store.tells_room:
            raise _no_room(owner, size, store, self._lvols.node)
        return size

    def _clone(
        self, of: Volume, owner: Owner, size: int, store: Lvstore, *, formatting: bool
    ) -> None:
        """Has the target make the clone, with all that the driver keeps of it."""
        handle = self._volumes.handle(owner.name, store)
        xattrs = {OWNER_XATTR: owner.written()}
        if formatting:
            xattrs[FORMATTING_XATTR] = "1"
        if size > of.size or owner.read().thin != "true":
            xattrs[UNFINISHED_XATTR] = str(size)
        name = lvol_name(owner.name, handle)
        self._volumes.clear_remnant(handle, store, name)
        client = self._lvols.at(handle).client
        try:
            client.call(
                "bdev_lvol_clone",
                snapshot_name=of.uuid,
                clone_name=name,
                lvol_uuid=handle,
                xattrs=xattrs,
            )
        except RpcError as error:
            if error.code == EXISTS:
                raise Failure(
                    Code.ALREADY_EXISTS,
                    f"lvol {store.name}/{name} exists already and is not this volume: rename or "
                    "delete it",
                ) from error
            if error.code == NO_SPACE:
                raise _no_room(owner, size, store, self._lvols.node) from error
            if error.code == NO_DEVICE:
                raise not_found(f"{owner.content} was deleted: nothing is made of it") from error
            raise

    def _finish(self, handle: str) -> None:
        """Does what is left to do; a volume for which there is no room after all is deleted."""
        volumes = self._lvols.at(handle)
        size = volumes.xattrs(handle).get(UNFINISHED_XATTR)
        if size is None:
            return
        owned = self._volumes.get(handle)
        try:
            if owned.volume.size < int(size):
                volumes.resize(handle, int(size))
            if owned.parameters.thin != "true":
                volumes.inflate(handle)
        except RpcError as error:
            if error.code == BUSY:
                raise Failure(
                    Code.ABORTED, f"volume {handle} is being made: {error.message}"
                ) from error
            if error.code == NO_SPACE:
                self._volumes.delete(handle)
                store = volumes.lvstore(owned.volume.lvstore)
                raise _no_room(owned.owner, int(size), store, self._lvols.node) from error
            raise
        volumes.remove_xattr(handle, UNFINISHED_XATTR)


def _no_room(owner: Owner, size: int, store: Lvstore, node: str) -> Failure:
    return Failure(
        Code.RESOURCE_EXHAUSTED,
        f"lvstore {store.name} of node {node} has {store.free} bytes free, and volume {owner.name} "
        f"needs {size}: name a class with thin, delete volumes there or add to the lvstore",
    )
