"""The lvstores of one target: what there are, and how one is made on a file, grown and destroyed.

A thin reading of SPDK's lvol methods. The lvstore is the truth; nothing is kept here.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydataplane import methods, storefile
from pydataplane.client import Client
from pydataplane.errors import (
    BUSY,
    EXISTS,
    INTERNAL_ERROR,
    NO_DEVICE,
    NO_ENTRY,
    RpcError,
    VolumeError,
    VolumeNotFoundError,
)
from pydataplane.volumenames import NAME

#: Kinds of bdevs that lie on another one and show all that it has.
LAYERS = ("crypto", "integrity")

ARRAYS = ("iscsi", "nvme")
"""Kinds of pools whose volumes an array has, and makes."""
ISCSI_PORT, NVME_PORT = 3260, 4420
FILE_BLOCK_BYTES = 512
"""Blocks that SPDK's target makes of a regular file."""


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
    kind: str = "lvstore"
    """`rbd`: a pool of Ceph, whose images are the volumes; `base_bdev` is POOL[/NAMESPACE].
    `iscsi`: one of LUNs of an iSCSI target; `base_bdev` is HOST:PORT/TARGET.
    `nvme`: one of namespaces of an NVMe subsystem; `base_bdev` is ADDRESS:PORT[,...]/NQN.
    """

    @property
    def is_pool(self) -> bool:
        """Whether it is no lvstore: its volumes are elsewhere."""
        return self.kind != "lvstore"

    @property
    def makes_volumes(self) -> bool:
        """Whether volumes are made, grown and deleted by the target; else the array does."""
        return self.kind not in ARRAYS

    @property
    def tells_room(self) -> bool:
        """Whether `total` and `free` are known: of Ceph a manager of its cluster tells them."""
        return not self.is_pool or self.total > 0

    def is_called(self, name: str) -> bool:
        """Whether `name` is its name or its UUID."""
        return name in (self.name, self.uuid)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for `--json`."""
        return asdict(self)


class Lvstores:
    """Operations on the lvstores of one target."""

    def __init__(self, client: Client) -> None:
        """Uses `client` for every call; its errors (pydataplane.errors) pass through."""
        self.client = client

    def upgrade_lvstore(self, reference: str, *, share_clusters: bool = False) -> Lvstore:
        """Gives an lvstore, in use or not, the newest format, with snapshots (our target only).

        With `share_clusters` copies between its volumes share clusters from then on.
        """
        store = self.lvstore(reference)
        self.client.call(
            "virtlun_lvstore_upgrade", uuid=store.uuid, share_clusters=share_clusters or None
        )
        return self.lvstore(store.uuid)

    def check_lvstore(self, reference: str, *, repair: bool = False) -> methods.CheckedLvstore:
        """Compares an lvstore's metadata on the medium with the target's, in use (our target only).

        With `repair` what has gone bad is written anew.
        """
        store = self.lvstore(reference)
        return self.client.call("virtlun_lvstore_check", uuid=store.uuid, repair=repair)

    def check_bdev(self, bdev: str, *, repair: bool = False) -> methods.CheckedLvstore:
        """Looks at an lvstore that is not loaded (our target only).

        With `repair` a bad copy of the superblock is written anew, if nothing else is wrong.
        """
        return self.client.call("virtlun_lvstore_check", bdev_name=bdev, repair=repair)

    def dump(
        self, *, lvstore: str | None = None, bdev: str | None = None
    ) -> Iterator[methods.DumpEntry]:
        """Yields what an lvstore, or one on a bdev that is not loaded, has on its medium.

        Superblock, journal and metadata pages, in that order (our target only). Where checksums lie
        below, first what they found: then a place is one on the bdev with checksums.
        """
        store = self.lvstore(lvstore) if lvstore is not None else None
        uuid = store.uuid if store is not None else None
        checksums = self._checksums_below(store.base_bdev if store else str(bdev))
        if checksums is not None:
            facts = {name: str(value) for name, value in checksums.items()}
            yield {"offset": 0, "kind": "checksums", "facts": facts, "problem": None}
        page: int | None = 0
        while page is not None:
            found = self.client.call("virtlun_lvstore_dump", uuid=uuid, bdev_name=bdev, page=page)
            yield from found["entries"]
            page = found["next_page"]

    def scrub(self, reference: str) -> Iterator[methods.Scrubbed]:
        """Reads all data of an lvstore in use, and yields what of each part (our target only)."""
        uuid = self.lvstore(reference).uuid
        offset: int | None = 0
        while offset is not None:
            found = self.client.call("virtlun_lvstore_scrub", uuid=uuid, offset=offset)
            yield found
            offset = found["next_offset"]

    def lvstores(self) -> list[Lvstore]:
        """Returns all lvstores and pools, by name."""
        found = [
            Lvstore(
                name=item["name"],
                uuid=item["uuid"],
                base_bdev=item["base_bdev"],
                cluster_size=item["cluster_size"],
                total=item["total_data_clusters"] * item["cluster_size"],
                free=item["free_clusters"] * item["cluster_size"],
                max_device=item.get("max_bdev_size"),
                kind=item.get("kind") or "lvstore",
            )
            for item in self.client.call("bdev_lvol_get_lvstores")
        ]
        return sorted(found, key=lambda store: store.name)

    def lvstore(self, name: str) -> Lvstore:
        """Returns one lvstore or pool by name or UUID; VolumeNotFoundError if there is none."""
        for store in self.lvstores():
            if store.is_called(name):
                return store
        raise VolumeNotFoundError(f"there is no lvstore {name}: see `virtlun lvstore list`")

    def create_lvstore(
        self,
        name: str,
        file: Path,
        size: int | None = None,
        cluster_size: int | None = None,
        key: str | None = None,
        *,
        checksums: bool = False,
        share_clusters: bool = False,
    ) -> Lvstore:
        """Makes an lvstore on a file or block device, and the file of `size` bytes where asked.

        What is on a file or device that is there already is lost, unless it is an lvstore. Safe to
        repeat: an lvstore of that name on that file is returned as it is. With the name of a `key`
        that the target has, all of it lies encrypted (our target, and SPDK's). With `checksums`
        each block has one, which is verified when it is read (our target only). With
        `share_clusters` EXTENDED COPY and ODX between its volumes move no data (our target only).

        Raises:
            VolumeError: no such file and no size given, or one with another size, or the name is
                taken by another one, or the file or device holds an lvstore, or the one that is
                returned shares no clusters and is to.
        """
        if not NAME.fullmatch(name):
            raise VolumeError(f"'{name}' is not a name: use letters, digits and . _ - (63 at most)")
        path = file.absolute()
        present = self._lvstore_on(path, name)
        if present is not None:
            if share_clusters:
                self._refuse_unshared(present)
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
            below = self._checked(base) if checksums else base
            below = self._encrypted(below, key) if key else below
            self._refuse_lvstore_on(below, path)
            self.client.call(
                "bdev_lvol_create_lvstore",
                bdev_name=below,
                lvs_name=name,
                cluster_sz=cluster_size,
                share_clusters=share_clusters or None,
            )
        except Exception:
            if attached:
                self._detach(base, checksums=checksums)
            if made:
                path.unlink()
            raise
        return self.lvstore(name)

    def _detach(self, base: str, *, checksums: bool) -> None:
        """Takes away a bdev of ours, with the checksums that were made on it just now."""
        above = self._checked_on(base) if checksums else None
        if above is not None and not any(above == each.base_bdev for each in self.lvstores()):
            with contextlib.suppress(RpcError):  # one that is encrypted is on it still
                self.client.call("virtlun_integrity_delete", name=above)
        self.client.call("bdev_uring_delete", name=base)

    def _checked(self, base: str) -> str:
        """Makes the bdev with checksums on a bdev, unless it is there; returns its name."""
        present = self._checked_on(base)
        if present is not None:
            return present
        return self.client.call(
            "virtlun_integrity_create", base_bdev_name=base, name=f"{base}-sums"
        )

    def _checked_on(self, base: str) -> str | None:
        """Returns the bdev with checksums that lies on a bdev; None: there is none."""
        for each in self.client.call("virtlun_integrity_get"):
            if each["base_bdev_name"] == base:
                return each["name"]
        return None

    def checksums(self, store: Lvstore) -> dict[str, Any] | None:
        """Returns what the checksums of an lvstore found so far; None: it has none.

        The fields are those of `virtlun_integrity_get`.
        """
        if store.is_pool:
            return None
        return self._checksums_below(store.base_bdev)

    def _checksums_below(self, bdev: str) -> dict[str, Any] | None:
        for below in self._under(bdev):
            for item in self.client.call("bdev_get_bdevs", name=below):
                found = item.get("driver_specific", {}).get("integrity")
                if found is not None:
                    return dict(found)
        return None

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
        self._uring(path, base)
        return True

    def _uring(self, path: Path, name: str) -> None:
        """Makes the bdev of a file or block device."""
        try:
            self.client.call("bdev_uring_create", filename=str(path), name=name)
        except RpcError as error:
            # SPDK's does not look for the blocks of a file.
            if error.code != INTERNAL_ERROR or not path.is_file():
                raise
            self.client.call(
                "bdev_uring_create", filename=str(path), name=name, block_size=FILE_BLOCK_BYTES
            )
        self.client.call("bdev_wait_for_examine")  # SPDK's loads an lvstore in the background

    def _encrypted(self, base: str, key: str) -> str:
        """Makes the encrypted bdev on a bdev, unless it is there; returns its name."""
        name = f"{base.removesuffix('-sums')}-crypt"
        try:
            self.client.call("bdev_get_bdevs", name=name)
        except RpcError as error:
            if error.code != NO_DEVICE:
                raise
            self.client.call("bdev_crypto_create", base_bdev_name=base, name=name, key_name=key)
        return name

    def _refuse_unshared(self, store: Lvstore) -> None:
        """Refuses one that was made without sharing clusters, and not upgraded so."""
        (present,) = self.client.call("bdev_lvol_get_lvstores", uuid=store.uuid)
        if not present.get("share_clusters"):
            raise VolumeError(
                f"lvstore {store.name} is there already, and shares no clusters: have it do so "
                f"with 'virtlun lvstore upgrade {store.name} --share-clusters'"
            )

    def _refuse_lvstore_on(self, base: str, path: Path) -> None:
        """Raises VolumeError if there was an lvstore on a bdev, which loaded it just now."""
        store = self._loaded_on(base)
        if store is not None:
            raise VolumeError(
                f"{path} holds the lvstore {store.name} already: load it with "
                f"`virtlun lvstore import {path}`; to destroy it, delete it then"
            )

    def _loaded_on(self, base: str) -> Lvstore | None:
        """Returns the lvstore that lies on a bdev, or on one on that; None: there is none."""
        for store in self.lvstores():
            if not store.is_pool and base in self._under(store.base_bdev):
                return store
        return None

    def import_lvstore(self, file: Path, key: str | None = None) -> Lvstore:
        """Loads the lvstore that a file or block device holds, with all its volumes.

        For one that another target has made. Safe to repeat: one that is loaded is returned. One
        that lies encrypted needs the name of its `key`, which the target has.

        Raises:
            VolumeError: there is no lvstore on it, or it cannot be loaded; nothing changed.
        """
        path = file.absolute()
        for store in self.lvstores():
            if self.file_of(store) == str(path):
                return store
        base = f"lvs-{uuid.uuid4()}"
        self._uring(path, base)
        try:
            if key:
                # What has checksums came with its base.
                self._encrypted(self._top(base), key)
            elif self._loaded_on(base) is None:
                self.client.call("bdev_examine", name=base)  # which says why not
            loaded = self._loaded_on(base)
            if loaded is not None:
                return loaded
            raise VolumeError(
                f"there is no lvstore on {path}: make one, or name the right device"
                + (" and key" if key else ", or the key if it is encrypted")
            )
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
        store = self._on_bdev(name)
        driver, file, bdev = self._backing(store.base_bdev)
        if driver is None:
            raise VolumeError(
                f"lvstore {store.name} lies on bdev {store.base_bdev}, which is neither a file nor "
                "a block device: grow that bdev, then call bdev_lvol_grow_lvstore"
            )
        with storefile.grown(store.name, Path(file), size, store.max_device) as length:
            if driver == "aio":
                self.client.call("bdev_aio_rescan", name=bdev)
            else:
                self.client.call("bdev_uring_rescan", name=bdev)
            (base,) = self.client.call("bdev_get_bdevs", name=bdev)
            if base["num_blocks"] != length // base["block_size"]:
                raise VolumeError(
                    f"lvstore {store.name} is not grown: {file} is not the file that the target "
                    "has open as its device; put that one back"
                )
            self.client.call("bdev_lvol_grow_lvstore", uuid=store.uuid)
        return self.lvstore(store.uuid)

    def delete_lvstore(self, name: str) -> None:
        """Destroys an lvstore with all its volumes and lets go of its device (the file stays)."""
        store = self._on_bdev(name)
        under = self._under(store.base_bdev)
        driver, _, bdev = self._backing(store.base_bdev)
        self.client.call("bdev_lvol_delete_lvstore", uuid=store.uuid)
        if driver is None:
            return
        for each in under:
            # Checksums would come back with the file.
            (found,) = self.client.call("bdev_get_bdevs", name=each)
            if "crypto" in found.get("driver_specific", {}) and len(under) > 2:
                self.client.call("bdev_crypto_delete", name=each)
            elif "integrity" in found.get("driver_specific", {}):
                self.client.call("virtlun_integrity_delete", name=each)
        self.client.call("bdev_uring_delete", name=bdev)

    def _on_bdev(self, name: str) -> Lvstore:
        """Returns an lvstore; VolumeError if it is a pool."""
        store = self.lvstore(name)
        if store.is_pool:
            raise VolumeError(
                f"{store.name} is a pool, no lvstore: `virtlun pool remove` lets go of it"
            )
        return store

    def add_pool(
        self,
        name: str,
        pool: str,
        *,
        conf: Path | None = None,
        user: str | None = None,
        keyring: Path | None = None,
        block_size: int | None = None,
    ) -> Lvstore:
        """Has the images of POOL or POOL/NAMESPACE of a Ceph cluster as volumes.

        The cluster is registered under the pool's name, as its configuration says (Ceph's own by
        default). Safe to repeat: a pool that is there is returned as it is.

        Raises:
            VolumeError: there is another store of that name.
        """
        present = self._pool_called(name, pool)
        if present is not None:
            return present
        made = False
        try:
            self.client.call(
                "bdev_rbd_register_cluster",
                name=name,
                user_id=user,
                config_file=str(conf) if conf else None,
                key_file=str(keyring) if keyring else None,
            )
            made = True
        except RpcError as error:
            if error.code != EXISTS:  # of a call that was cut off
                raise
        try:
            self.client.call(
                "virtlun_rbd_pool_create",
                name=name,
                cluster_name=name,
                pool_name=pool,
                block_size=block_size,
            )
        except RpcError:
            if made:
                self.client.call("bdev_rbd_unregister_cluster", name=name)
            raise
        return self.lvstore(name)

    def add_luns(
        self, name: str, portal: str, target: str, initiator: str, login: tuple[str, str] | None
    ) -> Lvstore:
        """Has the LUNs of the iSCSI target `target` at `portal`, HOST[:PORT], as volumes.

        The target logs in as `initiator`, with a user and password of CHAP where `login` has them.
        Safe to repeat: a pool that is there is returned as it is.

        Raises:
            VolumeError: there is another store of that name.
        """
        port = "" if re.search(r":[0-9]+$", portal) else f":{ISCSI_PORT}"
        present = self._pool_called(name, f"{portal}{port}/{target}")
        if present is not None:
            return present
        user, password = login or (None, None)
        self.client.call(
            "virtlun_iscsi_pool_create",
            name=name,
            portal=portal,
            target_iqn=target,
            initiator_iqn=initiator,
            user=user,
            password=password,
        )
        return self.lvstore(name)

    def add_namespaces(
        self, name: str, paths: Sequence[tuple[str, int]], subnqn: str, hostnqn: str | None = None
    ) -> Lvstore:
        """Has the namespaces of the NVMe subsystem `subnqn` as volumes.

        `paths` are IP addresses and ports of TCP; the target calls itself `hostnqn`, by default as
        the machine's ID has it. Safe to repeat: a pool that is there is returned as it is.

        Raises:
            VolumeError: there is another store of that name.
        """
        places = ",".join(f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip, port in paths)
        present = self._pool_called(name, f"{places}/{subnqn}")
        if present is not None:
            return present
        self.client.call(
            "virtlun_nvme_pool_create",
            name=name,
            paths=[{"traddr": address, "trsvcid": str(port)} for address, port in paths],
            subnqn=subnqn,
            hostnqn=hostnqn,
        )
        return self.lvstore(name)

    def _pool_called(self, name: str, place: str) -> Lvstore | None:
        """Returns the pool of that name at that place, if it is there.

        Raises:
            VolumeError: it is no name, or there is another store of that name.
        """
        if not NAME.fullmatch(name):
            raise VolumeError(f"'{name}' is not a name: use letters, digits and . _ - (63 at most)")
        for store in self.lvstores():
            if store.name == name:
                if store.is_pool and store.base_bdev == place:
                    return store
                what = f"the pool {store.base_bdev}" if store.is_pool else "an lvstore"
                raise VolumeError(f"{name} is there already, {what}: choose another name")
        return None

    def remove_pool(self, name: str) -> None:
        """Lets go of a pool, whose volumes stay; of a cluster if nothing else is on that."""
        store = self.lvstore(name)
        if not store.is_pool:
            raise VolumeError(
                f"{store.name} is an lvstore: `virtlun lvstore delete` destroys it with all in it"
            )
        if store.kind == "iscsi":
            self.client.call("virtlun_iscsi_pool_delete", name=store.name)
            return
        if store.kind == "nvme":
            self.client.call("virtlun_nvme_pool_delete", name=store.name)
            return
        self.client.call("virtlun_rbd_pool_delete", name=store.name)
        try:
            self.client.call("bdev_rbd_unregister_cluster", name=store.name)
        except RpcError as error:
            if error.code not in (NO_ENTRY, BUSY):
                raise

    def file_of(self, store: Lvstore) -> str | None:
        """Returns the file or block device that an lvstore lies on; None: another kind of bdev."""
        if store.is_pool:
            return None
        driver, file, _ = self._backing(store.base_bdev)
        return file if driver else None

    def _top(self, base: str) -> str:
        """Returns the bdev with checksums on a bdev, or that bdev itself."""
        for item in self.client.call("bdev_get_bdevs"):
            specific = item.get("driver_specific", {}).get("integrity", {})
            if specific.get("base_bdev_name") == base:
                return str(item["name"])
        return base

    def _under(self, bdev: str) -> list[str]:
        """Returns a bdev and those that it lies on, from above."""
        found = [bdev]
        for item in self.client.call("bdev_get_bdevs", name=bdev):
            specific = item.get("driver_specific", {})
            for layer in LAYERS:
                if layer in specific:
                    found += self._under(str(specific[layer]["base_bdev_name"]))
        return found

    def _backing(self, bdev: str) -> tuple[str | None, str, str]:
        """Returns driver (`uring` or `aio`), file and bdev that a bdev lies on, else None first.

        An encrypted bdev, or one with checksums, lies on what its base does.
        """
        for item in self.client.call("bdev_get_bdevs", name=bdev):
            specific = item.get("driver_specific", {})
            for layer in LAYERS:
                if layer in specific:
                    return self._backing(str(specific[layer]["base_bdev_name"]))
            for driver in ("uring", "aio"):
                if driver in specific:
                    return driver, str(specific[driver]["filename"]), bdev
        return None, "", bdev
