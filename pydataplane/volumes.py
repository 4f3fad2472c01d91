"""The volume model that plugin and CSI share: lvstores, and volumes by name or UUID.

A thin reading of SPDK's lvol methods. The lvstore is the truth; nothing is kept here.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydataplane import methods, storefile
from pydataplane.client import Client
from pydataplane.errors import (
    EXISTS,
    METHOD_NOT_FOUND,
    NO_DATA,
    NO_DEVICE,
    RpcError,
    VolumeError,
    VolumeNotFoundError,
)

MIB = 1 << 20
SIZES_MAX = 4096
"""Volumes whose sizes are asked for in one call, for the answer to be read in milliseconds."""

BYTES_MAX = (1 << 63) - (1 << 40)
"""Of a file (off_t), in whole TiB."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Lvstore:
    """A store of logical volumes on one bdev; sizes in bytes."""

    name: str
    uuid: str
    base_bdev: str
    cluster_size: int
    total: int
    free: int
    max_device: int | None = None
    """The largest file or device that it can grow to; None where the target does not say."""

    def is_called(self, name: str) -> bool:
        """Whether `name` is its name or its UUID."""
        return name in (self.name, self.uuid)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for `--json`."""
        return asdict(self)


@dataclass(frozen=True)
class Lvol:
    """What one call says of a volume; sizes in bytes. Its name for RPC calls is its UUID."""

    lvstore: str
    name: str
    uuid: str
    size: int
    thin: bool
    block_size: int

    @property
    def path(self) -> str:
        """`LVSTORE/NAME`, as people write it."""
        return f"{self.lvstore}/{self.name}"


@dataclass(frozen=True)
class Volume(Lvol):
    """A logical volume with what it takes of its lvstore, bytes."""

    allocated: int

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for `--json`."""
        return asdict(self)


class Sizes(NamedTuple):
    """What a volume takes, bytes."""

    size: int
    allocated: int


def parse_size(text: str) -> int:
    """Returns the bytes that `text` means: a whole number with an optional K, M, G or T (1024^n).

    Raises:
        VolumeError: it is not a size; the text says what one looks like.
    """
    found = re.fullmatch(r"([0-9]{1,40})\s*([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not found or int(found[1]) == 0:
        raise VolumeError(f"'{text}' is not a size: give a whole number such as 512M, 10G or 2T")
    size = int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[found[2].upper()]
    if size > BYTES_MAX:
        raise VolumeError(f"'{text}' is more than any device has: give {BYTES_MAX >> 40}T at most")
    return size


def split_path(path: str) -> tuple[str, str]:
    """Splits `LVSTORE/VOLUME` (also with /dev/virtlun/ before it) and checks both names.

    Raises:
        VolumeError: it is not of that form.
    """
    parts = path.removeprefix("/dev/virtlun/").split("/")
    if len(parts) != 2 or not all(NAME.fullmatch(part) for part in parts):
        raise VolumeError(f"'{path}' does not name a volume: write LVSTORE/VOLUME")
    return parts[0], parts[1]


class Volumes:
    """Operations on the lvstores and volumes of one target."""

    def __init__(self, client: Client) -> None:
        """Uses `client` for every call; its errors (pydataplane.errors) pass through."""
        self.client = client

    def lvstores(self) -> list[Lvstore]:
        """Returns all lvstores, by name."""
        found = [
            Lvstore(
                name=item["name"],
                uuid=item["uuid"],
                base_bdev=item["base_bdev"],
                cluster_size=item["cluster_size"],
                total=item["total_data_clusters"] * item["cluster_size"],
                free=item["free_clusters"] * item["cluster_size"],
                max_device=item.get("max_bdev_size"),
            )
            for item in self.client.call("bdev_lvol_get_lvstores")
        ]
        return sorted(found, key=lambda store: store.name)

    def lvstore(self, name: str) -> Lvstore:
        """Returns one lvstore by name or UUID; VolumeNotFoundError if there is none."""
        for store in self.lvstores():
            if store.is_called(name):
                return store
        raise VolumeNotFoundError(f"there is no lvstore {name}: see `virtlun lvstore list`")

    def create_lvstore(
        self, name: str, file: Path, size: int | None = None, cluster_size: int | None = None
    ) -> Lvstore:
        """Makes an lvstore on a file or block device, and the file of `size` bytes where asked.

        What is on a file or device that is there already is lost, unless it is an lvstore. Safe to
        repeat: an lvstore of that name on that file is returned as it is.

        Raises:
            VolumeError: no such file and no size given, or one with another size, or the name is
                taken by another one, or the file or device holds an lvstore.
        """
        if not NAME.fullmatch(name):
            raise VolumeError(f"'{name}' is not a name: use letters, digits and . _ - (63 at most)")
        path = file.absolute()
        present = self._lvstore_on(path, name)
        if present is not None:
            return present
        made = False
        if size is not None and (not path.exists() or storefile.is_empty(path)):
            path.touch(0o600)
            made = True
            self._give(path)
        elif not path.exists():
            raise VolumeError(f"{path} does not exist: name a block device, or give --size")
        elif size is not None and (length := storefile.length(path)) != size:
            raise VolumeError(
                f"{path} is there already, with {length} bytes, not {size}: "
                "leave the size out to use it as it is, or give another file"
            )
        base = f"lvs-{name}"
        attached = False
        try:
            if made and size is not None:
                os.truncate(path, size)
            attached = self._open(path, base)
            if attached:
                self._refuse_lvstore_on(base, path)
            self.client.call(
                "bdev_lvol_create_lvstore", bdev_name=base, lvs_name=name, cluster_sz=cluster_size
            )
        except Exception:
            if attached:
                self.client.call("bdev_uring_delete", name=base)
            if made:
                path.unlink()
            raise
        return self.lvstore(name)

    def _give(self, path: Path) -> None:
        """Gives a file that root makes to the user that the target runs as; SPDK's own is root."""
        if os.geteuid() != 0:
            return
        try:
            user = self.client.call("virtlun_get_status")["user"]
        except (RpcError, KeyError):
            return
        os.chown(path, user["uid"], user["gid"])

    def _lvstore_on(self, path: Path, name: str) -> Lvstore | None:
        """Returns the loaded lvstore of this name on this file; VolumeError if one of both is."""
        for store in self.lvstores():
            file_of_it = self.file_of(store)
            if store.name == name:
                if file_of_it == str(path):
                    return store
                raise VolumeError(
                    f"lvstore {name} exists already, on {file_of_it or store.base_bdev}: "
                    "choose another name"
                )
            if file_of_it == str(path):
                raise VolumeError(
                    f"{path} holds the lvstore {store.name} already: use that one, or delete it "
                    "with all its volumes first"
                )
        return None

    def _open(self, path: Path, base: str) -> bool:
        """Makes the bdev `base` of a file; False: it is there, of a call that was cut off."""
        try:
            if self._backing(base)[1] == str(path):
                return False
        except RpcError as error:
            if error.code != NO_DEVICE:
                raise
        self.client.call("bdev_uring_create", filename=str(path), name=base)
        return True

    def _refuse_lvstore_on(self, base: str, path: Path) -> None:
        """Raises VolumeError if there was an lvstore on a bdev, which loaded it just now."""
        for store in self.lvstores():
            if store.base_bdev == base:
                raise VolumeError(
                    f"{path} holds the lvstore {store.name} already: load it with "
                    f"`virtlun lvstore import {path}`; to destroy it, delete it then"
                )

    def import_lvstore(self, file: Path) -> Lvstore:
        """Loads the lvstore that a file or block device holds, with all its volumes.

        For one that another target has made. Safe to repeat: one that is loaded is returned.

        Raises:
            VolumeError: there is no lvstore on it, or it cannot be loaded; nothing changed.
        """
        path = file.absolute()
        for store in self.lvstores():
            if self.file_of(store) == str(path):
                return store
        base = f"lvs-{uuid.uuid4()}"
        self.client.call("bdev_uring_create", filename=str(path), name=base)
        try:
            self.client.call("bdev_examine", name=base)
            for store in self.lvstores():
                if store.base_bdev == base:
                    return store
            raise VolumeError(f"there is no lvstore on {path}: make one, or name the right device")
        except Exception as error:
            self.client.call("bdev_uring_delete", name=base)
            if isinstance(error, RpcError):
                raise VolumeError(
                    f"the lvstore on {path} is not loaded: {error.message}"
                ) from error
            raise

    def resize_lvstore(self, name: str, size: int | None = None) -> Lvstore:
        """Grows an lvstore, in use or not, with the file or block device that it lies on.

        A regular file is made `size` bytes long first (sparse); without `size` the lvstore takes
        what the file or device has now. Safe to repeat after a crash at any point: a file that
        has the size already stays as it is.

        Raises:
            VolumeError: a smaller size, one that the lvstore's metadata is not good for, one that
                a block device does not have, or no file or block device at all; nothing changed.
        """
        store = self.lvstore(name)
        driver, file = self._backing(store.base_bdev)
        if driver is None:
            raise VolumeError(
                f"lvstore {store.name} lies on bdev {store.base_bdev}, which is neither a file nor "
                "a block device: grow that bdev, then call bdev_lvol_grow_lvstore"
            )
        with storefile.grown(store.name, Path(file), size, store.max_device) as length:
            if driver == "aio":
                self.client.call("bdev_aio_rescan", name=store.base_bdev)
            else:
                self.client.call("bdev_uring_rescan", name=store.base_bdev)
            (base,) = self.client.call("bdev_get_bdevs", name=store.base_bdev)
            if base["num_blocks"] != length // base["block_size"]:
                raise VolumeError(
                    f"lvstore {store.name} is not grown: {file} is not the file that the target "
                    "has open as its device; put that one back"
                )
            self.client.call("bdev_lvol_grow_lvstore", uuid=store.uuid)
        return self.lvstore(store.uuid)

    def delete_lvstore(self, name: str) -> None:
        """Destroys an lvstore with all its volumes and lets go of its device (the file stays)."""
        store = self.lvstore(name)
        self.client.call("bdev_lvol_delete_lvstore", uuid=store.uuid)
        if self.file_of(store) is not None:
            self.client.call("bdev_uring_delete", name=store.base_bdev)

    def volumes(self, lvstore: str | None = None) -> list[Volume]:
        """Returns all volumes, or those of one lvstore, by path."""
        stores = {store.uuid: store for store in self.lvstores()}
        found = []
        for item in self.client.call("bdev_get_bdevs"):
            lvol = item.get("driver_specific", {}).get("lvol")
            if lvol is None or lvol["lvol_store_uuid"] not in stores:
                continue
            store = stores[lvol["lvol_store_uuid"]]
            volume = _volume(item, store)
            if lvstore in (None, store.name, store.uuid):
                found.append(volume)
        return sorted(found, key=lambda volume: volume.path)

    def volume(self, reference: str) -> Volume:
        """Returns one volume by `LVSTORE/NAME` or UUID; VolumeNotFoundError if there is none."""
        item = self._bdev_of(reference)
        return _volume(item, self.lvstore(item["driver_specific"]["lvol"]["lvol_store_uuid"]))

    def lvol(self, reference: str) -> Lvol:
        """Returns one volume as `volume`, in one call where it is there."""
        return _lvol(self._bdev_of(reference))

    def _bdev_of(self, reference: str) -> methods.Bdev:
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
        if not _is_uuid(reference):
            self.lvstore(name.split("/")[0])
        raise VolumeNotFoundError(
            f"there is no volume {reference}: see `virtlun volume list`, or create it"
        )

    def some(self, references: Iterable[str]) -> dict[str, Lvol]:
        """Returns those of these volumes (`LVSTORE/NAME` or UUID) that are there, by reference."""
        return {name: _lvol(item) for name, item in self._bdevs_of(references).items()}

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
            name: _sizes(items[name], stores[store][0]["cluster_size"])
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
        return found

    def create(
        self,
        reference: str,
        size: int,
        *,
        thin: bool = False,
        uuid: str | None = None,
        xattrs: Mapping[str, str] | None = None,
    ) -> Volume:
        """Makes a volume of at least `size` bytes (rounded up to clusters).

        It gets a random UUID unless one is given, and has `xattrs` from the beginning (both are
        our target's only).

        Safe to repeat: one of that name, size and kind is returned as it is.

        Raises:
            VolumeError: one of that name exists with another size.
        """
        lvstore, name = split_path(reference)
        store = self.lvstore(lvstore)
        try:
            self.client.call(
                "bdev_lvol_create",
                lvol_name=name,
                size_in_mib=_mib(size),
                thin_provision=thin,
                lvs_name=store.name,
                lvol_uuid=uuid,
                xattrs=dict(xattrs) if xattrs else None,
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
            return present
        return self.volume(reference)

    def resize(self, reference: str, size: int) -> Volume:
        """Grows or shrinks a volume to at least `size` bytes, also while it is in use."""
        volume = self.volume(reference)
        self.client.call("bdev_lvol_resize", name=volume.uuid, size_in_mib=_mib(size))
        return self.volume(volume.uuid)

    def rename(self, reference: str, name: str) -> Volume:
        """Gives a volume another name in the same lvstore."""
        volume = self.volume(reference)
        self.client.call("bdev_lvol_rename", old_name=volume.uuid, new_name=name)
        return self.volume(volume.uuid)

    def delete(self, reference: str, *, missing_ok: bool = False) -> None:
        """Deletes a volume and its data; one that is in use is refused by the target."""
        try:
            volume = self.volume(reference)
        except VolumeNotFoundError:
            if missing_ok:
                return
            raise
        self.client.call("bdev_lvol_delete", name=volume.uuid)

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

    def file_of(self, store: Lvstore) -> str | None:
        """Returns the file or block device that an lvstore lies on; None: another kind of bdev."""
        driver, file = self._backing(store.base_bdev)
        return file if driver else None

    def _backing(self, bdev: str) -> tuple[str | None, str]:
        """Returns a file-backed bdev's driver (`uring` or `aio`) and file, else None."""
        for item in self.client.call("bdev_get_bdevs", name=bdev):
            specific = item.get("driver_specific", {})
            for driver in ("uring", "aio"):
                if driver in specific:
                    return driver, str(specific[driver]["filename"])
        return None, ""


def _lvol(item: methods.Bdev) -> Lvol:
    """Reads one entry of bdev_get_bdevs that is of a volume."""
    lvstore, name = item["aliases"][0].split("/", 1)
    return Lvol(
        lvstore=lvstore,
        name=name,
        uuid=item["uuid"],
        size=item["num_blocks"] * item["block_size"],
        thin=item["driver_specific"]["lvol"]["thin_provision"],
        block_size=item["block_size"],
    )


def _volume(item: methods.Bdev, store: Lvstore) -> Volume:
    """Adds what the volume takes of its lvstore; all of a thick one is allocated."""
    return Volume(**asdict(_lvol(item)), allocated=_sizes(item, store.cluster_size).allocated)


def _sizes(item: methods.Bdev, cluster_size: int) -> Sizes:
    """Returns what a volume takes in an lvstore with clusters of so many bytes."""
    size = item["num_blocks"] * item["block_size"]
    clusters = item["driver_specific"]["lvol"].get("num_allocated_clusters")
    return Sizes(size, size if clusters is None else clusters * cluster_size)


def _mib(size: int) -> int:
    """Returns `size` bytes in whole MiB, rounded up, as SPDK's methods take it."""
    return -(-size // MIB)


def _is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False
