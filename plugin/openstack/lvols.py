"""Cinder's volumes and snapshots in one lvstore: lvols that have their names.

The lvstore is the truth; nothing is kept here. Each step may be repeated after it was interrupted
at any point, and what is gone counts as deleted.

A clone of a volume is made of a snapshot of it that is deleted from the beginning. A snapshot that
several lvols show cannot be deleted yet: the xattr `cinder.deleted` says that it is to be, and it
is once one lvol or none shows it. What is left to do after a clone is there stands in its xattr
`cinder.unfinished`.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydataplane import methods
from pydataplane.errors import EXISTS, READ_ONLY, RpcError, VolumeError, VolumeNotFoundError
from pydataplane.lvols import Volume, deletable_snapshots
from pydataplane.lvstores import Lvstore
from pydataplane.volumes import Volumes

DELETED_XATTR = "cinder.deleted"
UNFINISHED_XATTR = "cinder.unfinished"
"""JSON: the bytes that a clone is to have, and whether it is to be thin."""
HIDDEN = "cinder-"
"""What the names of snapshots begin with that Cinder does not know."""


class Lvols:
    """Volumes and snapshots by the names that Cinder gives them; threads may share it."""

    def __init__(self, volumes: Volumes, lvstore: str, patient: Volumes | None = None) -> None:
        """Has them in the lvstore of this name on the target of `volumes`.

        `patient` is of the same target, and waits for one that zeroes a thick volume.
        """
        self._volumes = volumes
        self._patient = patient or volumes
        self.lvstore = lvstore
        # Between a snapshot that is deleted from the beginning and what is made of it.
        self._lock = threading.Lock()

    def store(self) -> Lvstore:
        """Returns the lvstore.

        Raises:
            VolumeNotFoundError: it is not loaded.
            VolumeError: it is a pool of another host, which Cinder has drivers for.
        """
        store = self._volumes.lvstore(self.lvstore)
        if store.is_pool:
            raise VolumeError(
                f"{self.lvstore} is a pool of {store.base_bdev}, no lvstore: have Cinder's own "
                "driver for it make volumes there"
            )
        return store

    def path(self, name: str) -> str:
        """Returns `LVSTORE/NAME`."""
        return f"{self.lvstore}/{name}"

    def get(self, name: str) -> Volume:
        """Returns a volume or snapshot; VolumeNotFoundError if there is none."""
        return self._volumes.deletable(self.path(name))

    def find(self, name: str) -> Volume | None:
        """Returns a volume or snapshot, or None."""
        try:
            return self.get(name)
        except VolumeNotFoundError:
            self.store()  # where that is not loaded, it may be there
            return None

    def all(self) -> list[tuple[Volume, bool]]:
        """Returns all lvols of the lvstore but deleted snapshots, with whether one is in use."""
        claimed = {
            item["uuid"]: item["claimed"] for item in self._volumes.client.call("bdev_get_bdevs")
        }
        found = self._volumes.volumes(self.lvstore)
        deleted = self._deleted([each for each in found if each.snapshot])
        return [(each, claimed.get(each.uuid, False)) for each in found if each.uuid not in deleted]

    def lines(self) -> dict[str, list[str]]:
        """Returns the snapshots that each volume is made of, the last one first, by names.

        Deleted ones are there, too.
        """
        found = self._volumes.volumes(self.lvstore)
        parent_of = {each.name: each.parent for each in found}
        lines: dict[str, list[str]] = {}
        for volume in (each for each in found if not each.snapshot):
            line = lines[volume.name] = []
            parent = volume.parent
            while parent is not None:
                line.append(parent)
                parent = parent_of.get(parent)
        return lines

    # Volumes

    def create(self, name: str, size: int, *, thin: bool, key: str | None) -> None:
        """Makes a volume of `size` bytes, encrypted with the target's `key` of that name, if any.

        Raises:
            VolumeError: there is another one of that name.
        """
        self._patient.create(self.path(name), size, thin=thin, key=key)

    def delete(self, name: str) -> None:
        """Deletes a volume, or does nothing where it is gone.

        Raises:
            RpcError: BUSY, it is in use.
        """
        found = self.find(name)
        if found is not None:
            self._volumes.end_export(found.uuid)
            self._volumes.delete(found.uuid, missing_ok=True)
        self.sweep()

    def grow(self, name: str, size: int) -> None:
        """Has a volume, in use or not, have `size` bytes at least."""
        volume = self.get(name)
        if volume.size < size:
            self._patient.resize(volume.uuid, size)

    def make_thick(self, name: str) -> None:
        """Gives a volume, in use or not, all the room that it may need."""
        volume = self.get(name)
        if volume.thin:
            self._patient.inflate(volume.uuid)

    def rename(self, name: str, to: str) -> None:
        """Gives a volume or snapshot another name; what has that already is taken for it.

        Raises:
            VolumeNotFoundError: there is neither.
            VolumeError: there are both.
        """
        found, done = self.find(name), self.find(to)
        if found is not None and done is not None:
            raise VolumeError(f"{done.path} exists already, and {found.path} cannot become it")
        if found is not None:
            self._volumes.rename(found.uuid, to)
        elif done is None:
            raise VolumeNotFoundError(f"there is no volume {self.path(name)}")

    # What is made of others

    def clone_volume(self, of: str, name: str, size: int, *, thin: bool) -> None:
        """Makes a volume of `size` bytes that begins as a volume is now, in use or not."""

        def begin() -> None:
            with self._hidden(of) as snapshot:
                self._clone(snapshot, name, size, thin=thin)

        self._make(name, begin)

    def clone_snapshot(self, of: str, name: str, size: int, *, thin: bool) -> None:
        """Makes a volume of `size` bytes that begins as a snapshot is."""
        self._make(name, lambda: self._clone(self.get(of), name, size, thin=thin))

    def _make(self, name: str, begin: Callable[[], None]) -> None:
        """Makes a clone, or completes one that was begun before."""
        try:
            if self.find(name) is None:
                begin()
            self._finish(self.get(name).uuid)
        finally:
            self.sweep()

    def _clone(self, snapshot: Volume, name: str, size: int, *, thin: bool) -> None:
        xattrs = {}
        if size > snapshot.size or not thin:
            xattrs[UNFINISHED_XATTR] = json.dumps({"size": size, "thin": thin})
        self._volumes.client.call(
            "bdev_lvol_clone",
            snapshot_name=snapshot.uuid,
            clone_name=name,
            xattrs=xattrs or None,
        )

    def _finish(self, uuid: str) -> None:
        noted = self._volumes.xattrs(uuid).get(UNFINISHED_XATTR)
        if noted is None:
            return
        wanted = json.loads(noted)
        if self._volumes.volume(uuid).size < wanted["size"]:
            self._patient.resize(uuid, wanted["size"])
        if not wanted["thin"]:
            self._patient.inflate(uuid)
        self._volumes.remove_xattr(uuid, UNFINISHED_XATTR)

    @contextmanager
    def _hidden(self, of: str) -> Iterator[Volume]:
        """Takes a snapshot of a volume, in use or not, that is deleted from the beginning.

        None that is needed by one lvol alone is deleted as long as the block lasts.
        """
        with self._lock:
            name = f"{HIDDEN}{uuid.uuid4()}"
            self._volumes.client.call(
                "bdev_lvol_snapshot",
                lvol_name=self.get(of).uuid,
                snapshot_name=name,
                xattrs={DELETED_XATTR: "1"},
            )
            yield self.get(name)

    # Snapshots

    def hidden(self) -> list[str]:
        """Returns the names of snapshots that were taken for a copy, and are there still."""
        found = [
            each
            for each in self._volumes.volumes(self.lvstore)
            if each.snapshot and each.name.startswith(HIDDEN)
        ]
        deleted = self._deleted(found)
        return [each.name for each in found if each.uuid in deleted]

    def snapshot(self, of: str, name: str) -> None:
        """Takes a snapshot of a volume, in use or not; one that is there already is it."""
        volume = self.get(of)
        try:
            self._volumes.client.call(
                "bdev_lvol_snapshot", lvol_name=volume.uuid, snapshot_name=name
            )
        except RpcError as error:
            if error.code != EXISTS or not self.get(name).snapshot:
                raise

    def delete_snapshot(self, name: str) -> None:
        """Deletes a snapshot, as soon as one lvol or none shows it.

        Raises:
            RpcError: BUSY, it is in use.
        """
        found = self.find(name)
        if found is not None:
            self._volumes.end_export(found.uuid)
            try:
                self._volumes.delete(found.uuid, missing_ok=True)
            except RpcError as error:
                if error.code != READ_ONLY:
                    raise
                self._volumes.set_xattr(found.uuid, DELETED_XATTR, "1")  # several show it
        self.sweep()

    def roll_back(self, name: str, snapshot: str) -> None:
        """Has a volume that nobody uses read as one of its snapshots, and have that one's size."""
        self._volumes.roll_back(self.path(name), self.get(snapshot).uuid)

    def sweep(self) -> None:
        """Really deletes what was deleted and is needed no more."""
        with self._lock:
            while True:  # what one of them alone needed is needed no more
                few = deletable_snapshots(self._volumes.volumes(self.lvstore))
                deleted = [each for each in few if each.uuid in self._deleted(few)]
                gone = [self._end(each) for each in deleted]
                if not any(gone):
                    return

    def _end(self, snapshot: Volume) -> bool:
        """Deletes a snapshot, if it is not in use; returns whether it is gone."""
        with suppress(RpcError):
            self._volumes.delete(snapshot.uuid, missing_ok=True)
            return True
        return False

    def _deleted(self, snapshots: list[Volume]) -> set[str]:
        """Returns the UUIDs of those of these snapshots that are to be deleted."""
        noted = self._volumes.client.call_for_each(
            "virtlun_lvol_get_xattrs",
            [each.uuid for each in snapshots],
            lambda name: {"name": name},
        )
        return {name for name, xattrs in noted.items() if DELETED_XATTR in xattrs}

    # Exports

    def export(self, name: str) -> Path:
        """Shows a volume or snapshot, which nobody uses, as a file of the kernel's.

        Raises:
            RpcError: BUSY, it is in use.
        """
        found = self.get(name)
        return self._volumes.export(found.uuid, read_only=found.snapshot)

    def exported(self, name: str) -> Path | None:
        """Returns that file, if it is there."""
        found = self.find(name)
        if found is None:
            return None
        exports: list[methods.Export] = self._volumes.client.call("virtlun_export_list")
        paths = [each["path"] for each in exports if each["bdev_name"] == found.uuid]
        return Path(paths[0]) if paths else None

    def end_export(self, name: str) -> None:
        """Ends that file, if it is there.

        Raises:
            RpcError: BUSY, it is in use.
        """
        found = self.find(name)
        if found is not None:
            self._volumes.end_export(found.uuid)

    @contextmanager
    def frozen(self, name: str) -> Iterator[str]:
        """Has a snapshot of a volume, in use or not, as long as the block lasts; its name."""
        with self._hidden(name) as hidden:
            self.export(hidden.name)  # as long as it is, nothing deletes it
        try:
            yield hidden.name
        finally:
            self.end_export(hidden.name)
            self.sweep()
