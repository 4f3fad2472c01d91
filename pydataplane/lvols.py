"""What a target says of a volume (bdev_get_bdevs), read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from pydataplane import methods
from pydataplane.lvstores import Lvstore

Protocol = Literal["rbd", "nbd", "iscsi"]
"""By which a disk's image is on another host."""

NAMED_BY: Mapping[Protocol, str] = {"rbd": "rbd_name", "nbd": "uri", "iscsi": "url"}
"""What the target tells of where such an image is."""


@dataclass(frozen=True)
class Lvol:
    """What one call says of a volume; sizes in bytes. Its name for RPC calls is its UUID."""

    lvstore: str
    name: str
    uuid: str
    size: int
    thin: bool
    block_size: int
    limited: bool | None = field(default=None, kw_only=True)
    """Whether it has I/O limits; None where the target does not tell."""
    image: Protocol | None = field(default=None, kw_only=True)
    """By which protocol it is on another host, and no volume but a disk's image."""

    @property
    def path(self) -> str:
        """`LVSTORE/NAME`, as people write it."""
        return f"{self.lvstore}/{self.name}"


@dataclass(frozen=True)
class Volume(Lvol):
    """A logical volume with what it takes of its lvstore, bytes."""

    allocated: int
    snapshot: bool = False
    parent: str | None = None
    """Name of the snapshot that it is a clone of."""
    external: str | None = None
    """UUID of the bdev outside of the lvstore that it is a clone of."""
    degraded: bool = False
    """That bdev, or its snapshot's, or its key is not there: it is no disk until it is."""
    key: str | None = None
    """Name of the key that its data is encrypted with (our target's)."""
    dif_type: int | None = None
    """Type of the protection information that it keeps itself, 1 or 3 (our target's)."""
    pool: str | None = None
    """UUID of the pool that it is of; None: it is an lvstore's."""
    problem: str | None = None
    """Why it cannot be used, as its LUN or namespace does not say what it is."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for `--json`."""
        return asdict(self)


class Space(NamedTuple):
    """What a volume shares with its snapshots and clones, bytes."""

    shared: int
    """Of clusters that others show, too."""
    exclusive: int
    """Of those that are its alone: what its deletion frees."""


class Sizes(NamedTuple):
    """What a volume takes, bytes."""

    size: int
    allocated: int


def lvol_of(item: methods.Bdev) -> Lvol:
    """Reads one entry of bdev_get_bdevs that is of a volume."""
    image = image_of(item)
    if image is not None:
        return _image(item, image)
    lvstore, name = item["aliases"][0].split("/", 1)
    return Lvol(
        lvstore=lvstore,
        name=name,
        uuid=item["uuid"],
        size=item["num_blocks"] * item["block_size"],
        thin=item["driver_specific"]["lvol"]["thin_provision"],
        block_size=item["block_size"],
        limited=item.get("has_limits"),
    )


def image_of(item: methods.Bdev) -> Protocol | None:
    """Returns by which protocol a bdev is a disk's image on another host; None if it is none."""
    specific = item["driver_specific"]
    if specific.get("lvol") is not None or item["name"] != item["uuid"]:
        return None
    return next((kind for kind in NAMED_BY if kind in specific), None)


def _image(item: methods.Bdev, kind: Protocol) -> Lvol:
    specific = item["driver_specific"][kind]
    return Lvol(
        lvstore=f"rbd:{specific['pool_name']}" if kind == "rbd" else kind,
        name=specific[NAMED_BY[kind]],
        uuid=item["uuid"],
        size=item["num_blocks"] * item["block_size"],
        thin=True,
        block_size=item["block_size"],
        limited=item.get("has_limits"),
        image=kind,
    )


def volume_of(item: methods.Bdev, store: Lvstore) -> Volume:
    """Adds what the volume takes of its lvstore; all of a thick one is allocated."""
    lvol = item["driver_specific"]["lvol"]
    return Volume(
        **asdict(lvol_of(item)),
        allocated=sizes_of(item, store.cluster_size).allocated,
        snapshot=lvol.get("snapshot", False),
        parent=lvol.get("base_snapshot"),
        external=lvol.get("external_snapshot_name"),
        key=lvol.get("key_name"),
        dif_type=lvol.get("dif_type"),
        pool=store.uuid if store.is_pool else None,
        problem=problem_of(item),
    )


def problem_of(item: methods.Bdev) -> str | None:
    """Returns why a disk of an array cannot be used now, as a clause; None if it can, or is none.

    Of one with several paths that of the first, where none is connected.
    """
    specific = item["driver_specific"]
    paths = specific.get("nvme", [])
    if any(path.get("connected") for path in paths):
        return None
    told: dict[str, Any] = paths[0] if paths else specific.get("iscsi", {})
    return told.get("problem")


def sizes_of(item: methods.Bdev, cluster_size: int) -> Sizes:
    """Returns what a volume takes in an lvstore with clusters of so many bytes."""
    size = item["num_blocks"] * item["block_size"]
    clusters = item["driver_specific"]["lvol"].get("num_allocated_clusters")
    return Sizes(size, size if clusters is None else clusters * cluster_size)


def deletable_snapshots(volumes: Collection[Volume]) -> list[Volume]:
    """Returns the snapshots that can be deleted, of all volumes of their lvstores.

    Those are it that one volume or none shows; in a pool of Ceph all.
    """
    shown = Counter((each.lvstore, each.parent) for each in volumes)
    return [
        each
        for each in volumes
        if each.snapshot and (shown[each.lvstore, each.name] <= 1 or each.pool)
    ]
