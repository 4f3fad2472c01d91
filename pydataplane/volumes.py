"""The volume model that plugin and CSI share: volumes of a target's lvstores, by name or UUID.

A thin reading of SPDK's lvol methods. The lvstore is the truth; nothing is kept here.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pydataplane import methods
from pydataplane.errors import (
    EXISTS,
    METHOD_NOT_FOUND,
    NO_DATA,
    NO_DEVICE,
    NO_KEY,
    RpcError,
    VolumeError,
    VolumeNotFoundError,
)
from pydataplane.lvols import Lvol, Sizes, Space, Volume, image_of, lvol_of, sizes_of, volume_of
from pydataplane.lvstores import Lvstore, Lvstores
from pydataplane.volumenames import split_path

MIB = 1 << 20
SIZES_MAX = 4096
"""Volumes whose sizes are asked for in one call, for the answer to be read in milliseconds."""

RESIZED_BY = {
    "nbd": "its server, which the target asks for the size when it connects",
    "iscsi": "its array: the target sees the new size within seconds, and tells the guest",
}

MOVE_XATTR = "virtlun.move"
"""Of a volume that is made as the new place of another one: `virtlun volume move`."""

RANGES_MAX = 4096
"""Ranges that are asked for in one call, unless the caller says."""


class Volumes(Lvstores):
    """Operations on the lvstores and volumes of one target."""

    def volumes(self, lvstore: str | None = None) -> list[Volume]:
        """Returns all volumes, or those of one lvstore, by path."""
        stores = {store.uuid: store for store in self.lvstores()}
        found = []
        for item in self.client.call("bdev_get_bdevs"):
            lvol = item.get("driver_specific", {}).get("lvol")
            if lvol is None or lvol["lvol_store_uuid"] not in stores:
                continue
            store = stores[lvol["lvol_store_uuid"]]
            volume = volume_of(item, store)
            if lvstore in (None, store.name, store.uuid):
                found.append(volume)
        return sorted(found, key=lambda volume: volume.path)

    def degraded(self, lvstore: str | None = None) -> list[Volume]:
        """Returns the volumes that are no disks, by path: what they are made of is not there.

        That is what they are clones of, or their key. Of all lvstores or of one (our target only).
        """
        stores = {s.uuid: s for s in self.lvstores() if lvstore in (None, s.name, s.uuid)}
        found = []
        for item in self.client.call("bdev_lvol_get_lvols"):
            store = stores.get(item["lvs"]["uuid"])
            lacks = item["is_degraded"] or item.get("waits_for_key", False)
            if store is None or not lacks or "size" not in item:
                continue
            volume = Volume(
                lvstore=store.name,
                name=item["name"],
                uuid=item["uuid"],
                size=item["size"],
                thin=item["is_thin_provisioned"],
                block_size=0,  # not known before it is a disk
                allocated=item["num_allocated_clusters"] * store.cluster_size,
                snapshot=item["is_snapshot"],
                external=item.get("external_snapshot_name"),
                degraded=True,
                key=item.get("key_name"),
                dif_type=item.get("dif_type"),
            )
            found.append(volume)
        return sorted(found, key=lambda volume: volume.path)

    def all(self) -> list[Volume]:
        """Returns all volumes, also those that are no disks (our target only)."""
        # First those that are none: one that becomes a disk meanwhile is in the later list.
        waiting = {volume.uuid: volume for volume in self.degraded()}
        return list((waiting | {volume.uuid: volume for volume in self.volumes()}).values())

    def bdev_names(self, uuids: Iterable[str]) -> dict[str, str]:
        """Returns the names of those of these bdevs that are there, by UUID."""
        answers = self.client.call_for_each(
            "bdev_get_bdevs", sorted(set(uuids)), lambda uuid: {"name": uuid}
        )
        return {uuid: item["name"] for uuid, (item,) in answers.items()}

    def volume(self, reference: str) -> Volume:
        """Returns one volume by `LVSTORE/NAME` or UUID; VolumeNotFoundError if there is none."""
        item = self._bdev_of(reference)
        return volume_of(item, self.lvstore(item["driver_specific"]["lvol"]["lvol_store_uuid"]))

    def lvol(self, reference: str) -> Lvol:
        """Returns one volume as `volume`, in one call where it is there.

        By its UUID also an image of another host that is a disk's.
        """
        return lvol_of(self._bdev_of(reference, images=True))

    def _bdev_of(self, reference: str, *, images: bool = False) -> methods.Bdev:
        """Returns the bdev of one volume; VolumeNotFoundError if there is none."""
        name = reference
        if not _is_uuid(reference):
            name = "/".join(split_path(reference))
        try:
            items = self.client.call("bdev_get_bdevs", name=name)
        except RpcError as error:
            if error.code != NO_DEVICE:
                raise
            items = []
        for item in items:
            if item.get("driver_specific", {}).get("lvol") is not None:
                return item
            if images and name == item["name"] and image_of(item) is not None:
                return item
        if not _is_uuid(reference):
            self.lvstore(name.split("/")[0])
        raise VolumeNotFoundError(
            f"there is no volume {reference}: see `virtlun volume list`, or create it"
        )

    def some(self, references: Iterable[str]) -> dict[str, Lvol]:
        """Returns those of these volumes (`LVSTORE/NAME` or UUID) that are there, by reference."""
        return {name: lvol_of(item) for name, item in self._bdevs_of(references).items()}

    def _bdevs_of(self, references: Iterable[str]) -> dict[str, methods.Bdev]:
        """Returns the bdevs of those of these volumes that are there, by reference."""
        answers = self.client.call_for_each(
            "bdev_get_bdevs", list(references), lambda name: {"name": name}
        )
        found = {}
        for reference, (item,) in answers.items():
            if item.get("driver_specific", {}).get("lvol") is not None:
                found[reference] = item
        return found

    def _sizes_by_bdev(self, references: list[str]) -> dict[str, Sizes]:
        """Returns the sizes of those of these volumes that are there, of a target like SPDK's.

        It says of a thin one how many clusters are allocated, and its lvstore how long they are.
        """
        items = self._bdevs_of(references)
        store_of = {
            name: item["driver_specific"]["lvol"]["lvol_store_uuid"] for name, item in items.items()
        }
        stores = self.client.call_for_each(
            "bdev_lvol_get_lvstores", sorted(set(store_of.values())), lambda each: {"uuid": each}
        )
        return {
            name: sizes_of(items[name], stores[store][0]["cluster_size"])
            for name, store in store_of.items()
            if store in stores
        }

    def sizes(self, references: Iterable[str]) -> dict[str, Sizes]:
        """Returns the sizes of those of these volumes that are there, by reference; few calls."""
        names = list(dict.fromkeys(references))
        found = {}
        for start in range(0, len(names), SIZES_MAX):
            asked = names[start : start + SIZES_MAX]
            try:
                answer = self.client.call("virtlun_lvol_get_sizes", names=asked)
            except RpcError as error:
                if error.code != METHOD_NOT_FOUND:
                    raise
                return self._sizes_by_bdev(names)
            for name, item in answer.items():
                found[name] = Sizes(item["size"], item["allocated"])
        # An image is known by its UUID alone.
        rest = [name for name in names if name not in found and _is_uuid(name)]
        return found | self._sizes_of_images(rest) if rest else found

    def _sizes_of_images(self, uuids: list[str]) -> dict[str, Sizes]:
        """Returns the sizes of those of these bdevs that are images of other hosts.

        What they take there is not known here: all of it.
        """
        answers = self.client.call_for_each("bdev_get_bdevs", uuids, lambda name: {"name": name})
        images = {name: lvol_of(item) for name, (item,) in answers.items() if image_of(item)}
        return {name: Sizes(image.size, image.size) for name, image in images.items()}

    def ranges(
        self, uuid: str, since: str | None = None, *, offset: int = 0, most: int = RANGES_MAX
    ) -> Iterator[list[tuple[int, int]]]:
        """Yields where a volume may hold anything but zeros, page by page (our target only).

        With `since`, the UUID of a snapshot, where it may differ from that. A page has (offset,
        length) in bytes, in order, at most `most` of them, and may have none.
        """
        next_offset: int | None = offset
        while next_offset is not None:
            page: methods.AllocatedRanges | methods.ChangedRanges
            if since is None:
                page = self.client.call(
                    "virtlun_lvol_get_allocated_ranges",
                    name=uuid,
                    offset=next_offset,
                    max_ranges=most,
                )
            else:
                page = self.client.call(
                    "virtlun_lvol_get_changed_ranges",
                    name=uuid,
                    since=since,
                    offset=next_offset,
                    max_ranges=most,
                )
            yield [(each["offset"], each["length"]) for each in page["ranges"]]
            next_offset = page["next_offset"]

    def spaces(self, volumes: Iterable[Volume]) -> dict[str, Space]:
        """Returns what volumes share, by UUID; nothing where the target does not tell (SPDK)."""
        names = [volume.uuid for volume in volumes]
        try:
            answer = self.client.call("virtlun_lvol_get_space", names=names)
        except RpcError as error:
            if error.code != METHOD_NOT_FOUND:
                raise
            return {}
        return {name: Space(item["shared"], item["exclusive"]) for name, item in answer.items()}

    def zeroed(self, path: str) -> tuple[int, int] | None:
        """Returns the bytes that are zeroed of a thick volume LVSTORE/NAME, and all that are to be.

        None: it is neither made nor grown at present, or the target does not tell (SPDK).
        """
        for store in self.client.call("bdev_lvol_get_lvstores"):
            for each in store.get("zeroing", ()):
                if each["alias"] == path:
                    return each["done"], each["total"]
        return None

    def create(
        self,
        reference: str,
        size: int,
        *,
        thin: bool = False,
        uuid: str | None = None,
        xattrs: Mapping[str, str] | None = None,
        key: str | None = None,
        dif_type: int | None = None,
    ) -> Volume:
        """Makes a volume of at least `size` bytes (rounded up to clusters).

        It gets a random UUID unless one is given, has `xattrs` from the beginning, its data is
        encrypted with the `key` of that name, which the target has, and it keeps protection
        information of `dif_type` 1 or 3 itself (all are our target's only). One of a pool of Ceph
        is thin in any case.

        Safe to repeat: one of that name, size, key and kind is returned as it is.

        Raises:
            VolumeError: one of that name exists with another size, key or type, or another volume
                is being moved there.
        """
        lvstore, name = split_path(reference)
        store = self.lvstore(lvstore)
        try:
            self.client.call(
                "bdev_lvol_create",
                lvol_name=name,
                size_in_mib=_mib(size),
                thin_provision=thin or store.is_pool,
                lvs_name=store.name,
                lvol_uuid=uuid,
                xattrs=dict(xattrs) if xattrs else None,
                key_name=key,
                dif_type=dif_type,
            )
        except RpcError as error:
            if error.code != EXISTS:
                raise
            present = self.volume(reference)
            if present.size != -(-size // store.cluster_size) * store.cluster_size:
                raise VolumeError(
                    f"volume {reference} exists already, with {present.size} bytes: "
                    "resize it, or choose another name"
                ) from error
            if present.key != key:
                how = f"with key {present.key}" if present.key else "not encrypted"
                raise VolumeError(
                    f"volume {reference} exists already, {how}: choose another name"
                ) from error
            if present.dif_type != dif_type:
                kept = "no protection information"
                if present.dif_type is not None:
                    kept = f"protection information of type {present.dif_type}"
                raise VolumeError(
                    f"volume {reference} exists already, and keeps {kept}: choose another name"
                ) from error
            self._check_not_moving(present, (xattrs or {}).get(MOVE_XATTR))
            return present
        return self.volume(reference)

    def _check_not_moving(self, present: Volume, note: str | None) -> None:
        """Refuses a volume that another one than the caller's (its `note`) is being moved to.

        Raises:
            VolumeError: it is one.
        """
        try:
            noted = self.xattrs(present.uuid).get(MOVE_XATTR)
        except RpcError as error:
            if error.code != METHOD_NOT_FOUND:
                raise
            return
        if noted != note:
            raise VolumeError(
                f"volume {present.path} exists already, and another volume is being moved to it:"
                " choose another name"
            )

    def snapshot(
        self, references: Iterable[str], name: str, xattrs: Mapping[str, str] | None = None
    ) -> list[Volume]:
        """Takes snapshots of volumes of one lvstore, in use or not: of `a` that is `a@NAME`.

        Of several they are of one instant, all or none (our target only). `xattrs` are what is
        noted at one from its beginning (as that). Safe to repeat.

        Raises:
            VolumeError: there is something else of such a name.
        """
        of = [self.volume(reference) for reference in references]
        wanted: list[methods.SnapshotOf] = [
            {"lvol_name": each.uuid, "snapshot_name": f"{each.name}@{name}"} for each in of
        ]
        names = [f"{each.lvstore}/{each.name}@{name}" for each in of]
        try:
            if len(of) == 1:
                noted = {} if xattrs is None else {"xattrs": dict(xattrs)}
                self.client.call("bdev_lvol_snapshot", **wanted[0], **noted)
            else:
                self.client.call("virtlun_lvol_snapshot_together", snapshots=wanted)
        except RpcError as error:
            if error.code != EXISTS:
                raise
            for each, path in zip(of, names, strict=True):
                if f"{each.lvstore}/{each.parent}" != path:
                    raise VolumeError(
                        f"{path} exists already, and is not the last snapshot of {each.path}: "
                        "choose another name, or delete it"
                    ) from error
        return [self.volume(path) for path in names]

    def snapshots(self, volume: Volume) -> list[Volume]:
        """Returns the snapshots `VOLUME@NAME` of a volume, the last one first."""
        found = [
            each
            for each in self.volumes(volume.lvstore)
            if each.snapshot and each.name.startswith(f"{volume.name}@")
        ]
        older: list[Volume] = []
        parent = volume.parent
        while (last := next((each for each in found if each.name == parent), None)) is not None:
            older.append(last)
            parent = last.parent
        return [*older, *(each for each in found if each not in older)]

    def clone(self, snapshot: str, name: str) -> Volume:
        """Makes a volume NAME that reads as a snapshot of its lvstore, and takes nothing yet.

        Safe to repeat.

        Raises:
            VolumeError: there is something else of that name.
        """
        of = self.volume(snapshot)
        try:
            self.client.call("bdev_lvol_clone", snapshot_name=of.uuid, clone_name=name)
        except RpcError as error:
            if error.code != EXISTS:
                raise
            present = self.volume(f"{of.lvstore}/{name}")
            if present.parent != of.name or present.snapshot:
                raise VolumeError(
                    f"{present.path} exists already, and is not a clone of {of.path}: "
                    "choose another name, or delete it"
                ) from error
            return present
        return self.volume(f"{of.lvstore}/{name}")

    def clone_bdev(self, bdev: str, path: str) -> Volume:
        """Makes a volume LVSTORE/NAME that reads as any bdev (name, alias or UUID).

        It takes nothing yet; nobody may write to the bdev meanwhile. Safe to repeat.

        Raises:
            VolumeError: there is something else of that name.
        """
        lvstore, name = split_path(path)
        try:
            self.client.call("bdev_lvol_clone_bdev", bdev=bdev, lvs_name=lvstore, clone_name=name)
        except RpcError as error:
            if error.code != EXISTS:
                raise
            of = self.client.call("bdev_get_bdevs", name=bdev)[0]["uuid"]
            if self.volume(path).external != of:
                raise VolumeError(
                    f"{path} exists already, and is not a clone of bdev {bdev}: "
                    "choose another name, or delete it"
                ) from error
        return self.volume(path)

    def roll_back(self, reference: str, snapshot: str) -> Volume:
        """Has a volume that nobody uses read as one of its snapshots (our target only).

        `snapshot` is `LVSTORE/NAME`, a UUID, or what follows the `@`.
        """
        volume = self.volume(reference)
        to = self.snapshot_of(volume.path, snapshot)
        self.client.call("virtlun_lvol_roll_back", lvol_name=volume.uuid, snapshot_name=to.uuid)
        return self.volume(volume.uuid)

    def snapshot_of(self, path: str, snapshot: str) -> Volume:
        """Returns a snapshot of the volume LVSTORE/NAME.

        `snapshot` is `LVSTORE/NAME`, a UUID, or what follows the `@`.
        """
        if "/" not in snapshot and not _is_uuid(snapshot):
            snapshot = f"{path}@{snapshot.removeprefix('@')}"
        return self.volume(snapshot)

    def clones(self, snapshot: str) -> list[str]:
        """Returns the names of the lvols, of its lvstore, that are clones of a snapshot."""
        lvol = self._bdev_of(snapshot)["driver_specific"]["lvol"]
        return list(lvol.get("clones", []))

    def inflate(self, reference: str) -> Volume:
        """Gives a volume, in use or not, all that it lacks: it needs no snapshot then."""
        volume = self.volume(reference)
        self.client.call("bdev_lvol_inflate", name=volume.uuid)
        return self.volume(volume.uuid)

    def export(self, uuid: str, *, read_only: bool = False) -> Path:
        """Shows a volume (its UUID) as a file of the kernel's; safe to repeat (our target only)."""
        made = self.client.call(
            "virtlun_export_create", bdev_name=uuid, read_only=True if read_only else None
        )
        return Path(made["path"])

    def export_of(self, uuid: str) -> methods.Export | None:
        """Returns the export of a volume (its UUID); None: there is none (our target only)."""
        exports = self.client.call("virtlun_export_list")
        return next((each for each in exports if uuid in (each["uuid"], each["bdev_name"])), None)

    def users(self, reference: str) -> list[str]:
        """Returns who uses a volume: its controllers, exports and the like (our target only)."""
        return list(self._bdev_of(reference).get("claimed_by", []))

    def end_export(self, uuid: str) -> None:
        """Ends the export of a volume, if there is one."""
        try:
            self.client.call("virtlun_export_delete", bdev_name=uuid)
        except RpcError as error:
            if error.code != NO_DEVICE:
                raise

    def resize(self, reference: str, size: int) -> Volume:
        """Grows or shrinks a volume to at least `size` bytes, also while it is in use."""
        volume = self.volume(reference)
        self.client.call("bdev_lvol_resize", name=volume.uuid, size_in_mib=_mib(size))
        return self.volume(volume.uuid)

    def resize_image(self, image: Lvol, size: int) -> None:
        """Grows an image of another host to at least `size` bytes, also while it is in use.

        Raises:
            VolumeError: its protocol has no way to.
        """
        if image.image != "rbd":
            by = RESIZED_BY.get(image.image or "", "its host")
            raise VolumeError(f"image {image.path} is resized by {by}")
        self.client.call("bdev_rbd_resize", name=image.uuid, new_size=_mib(size))

    def rename(self, reference: str, name: str) -> Volume:
        """Gives a volume another name in the same lvstore."""
        volume = self.volume(reference)
        self.client.call("bdev_lvol_rename", old_name=volume.uuid, new_name=name)
        return self.volume(volume.uuid)

    def delete(self, reference: str, *, missing_ok: bool = False) -> None:
        """Deletes a volume and its data; one that is in use is refused by the target.

        Of a pool of Ceph, it completes a deletion that was cut off; with `missing_ok` it does not
        look for one.
        """
        try:
            name = self.deletable(reference).uuid
        except VolumeNotFoundError as missing:
            if missing_ok:
                return
            try:
                self.client.call("bdev_lvol_delete", name=reference)
            except RpcError as error:
                if error.code == NO_DEVICE:
                    raise missing from error
                raise
            return
        self.client.call("bdev_lvol_delete", name=name)

    def deletable(self, reference: str) -> Volume:
        """Returns one volume as `volume`, also one whose key is not there, or lost."""
        try:
            return self.volume(reference)
        except RpcError as error:
            if error.code != NO_KEY:
                raise
            for volume in self.degraded():
                if reference in (volume.path, volume.uuid):
                    return volume
        return self.volume(reference)  # its key came meanwhile

    def uuids(self, store: Lvstore) -> set[str]:
        """Returns the UUIDs of the lvols that an lvstore holds, also while it is being loaded."""
        return {
            item["uuid"] for item in self.client.call("bdev_lvol_get_lvols", lvs_uuid=store.uuid)
        }

    def xattrs(self, reference: str) -> dict[str, str]:
        """Returns what is noted at a volume, name to text (our target only)."""
        return self.client.call("virtlun_lvol_get_xattrs", name=reference)

    def set_xattr(self, reference: str, name: str, value: str) -> None:
        """Notes something at a volume, lasting and at once (our target only)."""
        self.client.call(
            "virtlun_lvol_set_xattr", name=reference, xattr_name=name, xattr_value=value
        )

    def remove_xattr(self, reference: str, name: str) -> None:
        """Removes a note from a volume, if it is there (our target only)."""
        try:
            self.client.call("virtlun_lvol_remove_xattr", name=reference, xattr_name=name)
        except RpcError as error:
            if error.code != NO_DATA:
                raise


def _mib(size: int) -> int:
    """Returns `size` bytes in whole MiB, rounded up, as SPDK's methods take it."""
    return -(-size // MIB)


def _is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False
