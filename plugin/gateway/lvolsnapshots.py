"""What a domain's snapshots need of a target: lvol snapshots taken, looked at, merged.

All of it blocks, and may take as long as there is data to copy.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from pydataplane.domain.translate.snapshotxml import DiskSnapshot
from pydataplane.errors import EXISTS, RpcError, VolumeError, VolumeNotFoundError
from pydataplane.volumes import Volumes

XATTR = "virtlun.snapshot"
"""Of an lvol snapshot: which snapshot of which domain it is of."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A snapshot of a domain, as the lvol snapshots that are of it are marked."""

    domain: str
    """The domain's UUID."""
    name: str

    @property
    def uuid(self) -> bytes:
        """Returns the domain's UUID as libvirtd's calls have it."""
        return UUID(self.domain).bytes

    @property
    def text(self) -> str:
        """Returns the value of the xattr."""
        return json.dumps({"domain": self.domain, "name": self.name})

    @staticmethod
    def read(text: str | None) -> Moment | None:
        """Reads a xattr; None for one that is missing, or that somebody damaged."""
        try:
            values = json.loads(text or "")
            return Moment(str(UUID(values["domain"])), str(values["name"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def take(
    volumes: Volumes,
    wanted: Sequence[DiskSnapshot],
    xattrs: Mapping[str, dict[str, str]] | None = None,
) -> None:
    """Takes lvol snapshots under the names and UUIDs of `wanted`.

    Those of one lvstore are of one instant. All or none: where one lvstore refuses, those of the
    others are deleted again. `xattrs` are what they have from the beginning, by UUID.

    Raises:
        VolumeError: a name is taken.
        TargetError: the target refuses.
    """
    done: list[DiskSnapshot] = []
    stores = {each.lvstore: [h for h in wanted if h.lvstore == each.lvstore] for each in wanted}
    try:
        for together in stores.values():
            done += together  # before: what a call that is cut off did is not known
            volumes.client.call(
                "virtlun_lvol_snapshot_together",
                snapshots=[
                    {
                        "lvol_name": h.volume,
                        "snapshot_name": h.snapshot,
                        "lvol_uuid": h.uuid,
                        "xattrs": (xattrs or {}).get(h.uuid),
                    }
                    for h in together
                ],
            )
    except RpcError as error:
        delete(volumes, done)
        if error.code == EXISTS:
            paths = ", ".join(each.path for each in wanted)
            raise VolumeError(
                f"{paths}: there is such a snapshot already; choose another name, or delete it"
                " (`virtlun volume delete`)"
            ) from error
        raise


def delete(volumes: Volumes, held: Sequence[DiskSnapshot]) -> None:
    """Deletes lvol snapshots, those that are there; what their one clone needs of them it gets.

    Where a volume and one other lvol need a snapshot, the volume gets a copy of what it needs.

    Raises:
        TargetError: the target refuses.
    """
    for each in reversed(held):
        try:
            snapshot = volumes.volume(each.uuid)
        except VolumeNotFoundError:
            continue
        clones = volumes.clones(each.uuid)
        if len(clones) == 2:
            name = _name_of(volumes, each.volume)
            if name in clones:
                volumes.client.call("bdev_lvol_decouple_parent", name=each.volume)
        volumes.client.call("bdev_lvol_delete", name=snapshot.uuid)


def roll_back(volumes: Volumes, held: Sequence[DiskSnapshot]) -> None:
    """Has volumes that nobody uses read as snapshots of them; safe to repeat.

    Those of one lvstore do at one instant, all or none, whatever ends meanwhile.

    Raises:
        TargetError: the target refuses.
    """
    for lvstore in dict.fromkeys(each.lvstore for each in held):
        volumes.client.call(
            "virtlun_lvol_roll_back_together",
            rollbacks=[
                {"lvol_name": each.volume, "snapshot_name": each.uuid}
                for each in held
                if each.lvstore == lvstore
            ],
        )


@dataclass(frozen=True, slots=True)
class Owner:
    """What the target says of an lvol snapshot that a domain's snapshot names."""

    moment: Moment | None
    """What it is marked with."""
    fits: bool
    """Whether name and volume are as if it was taken for that snapshot."""


def owners(
    volumes: Volumes, held: Sequence[DiskSnapshot], name: str, disks: Collection[str]
) -> dict[str, Owner]:
    """Returns whose lvol snapshots are, by UUID: those that are there, of a snapshot `name`.

    `disks` are the UUIDs of the domain's volumes.

    Raises:
        VolumeError: an lvol is no snapshot.
        TargetError: the target refuses.
    """
    found = {}
    for each in held:
        try:
            lvol = volumes.volume(each.uuid)
        except VolumeNotFoundError:
            continue
        if not lvol.snapshot or lvol.uuid != each.uuid:
            raise VolumeError(
                f"snapshot {name} names {lvol.path} for disk {each.dev}, which is no snapshot:"
                f" forget {name} (`virsh snapshot-delete --metadata`)"
            )
        fits = each.volume in disks and lvol.name == f"{_name_of(volumes, each.volume)}@{name}"
        found[lvol.uuid] = Owner(Moment.read(volumes.xattrs(lvol.uuid).get(XATTR)), fits)
    return found


def mark(volumes: Volumes, snapshots: Sequence[str], moment: Moment) -> None:
    """Has lvol snapshots (UUIDs) be of a domain's snapshot; safe to repeat."""
    for uuid in snapshots:
        volumes.set_xattr(uuid, XATTR, moment.text)


def check_deletable(
    volumes: Volumes, snapshots: Sequence[tuple[str, Sequence[DiskSnapshot]]]
) -> None:
    """Refuses to delete domain snapshots (name and what they hold) that something else needs.

    Raises:
        VolumeError: names what needs it, and says what to do.
    """
    going = {each.uuid for _, held in snapshots for each in held}
    for name, held in snapshots:
        for each in held:
            try:
                clones = [volumes.volume(f"{each.lvstore}/{c}") for c in volumes.clones(each.uuid)]
            except VolumeNotFoundError:
                continue
            others = [c.path for c in clones if not c.snapshot and c.uuid != each.volume]
            if others:
                raise VolumeError(
                    f"snapshot {name}: {', '.join(others)} is a clone of {each.path}: delete it, or"
                    f" give it all that it lacks (`virtlun volume inflate {others[0]}`)"
                )
            later = [c.path for c in clones if c.snapshot and c.uuid not in going]
            if len(later) > 1:
                raise VolumeError(
                    f"snapshot {name}: {' and '.join(later)} were taken after {each.path} and need"
                    " it: delete the snapshots that they are of first"
                )


def missing(volumes: Volumes, held: Sequence[DiskSnapshot]) -> list[DiskSnapshot]:
    """Returns those whose lvol snapshot, or volume, is not there."""
    there = volumes.some([uuid for each in held for uuid in (each.uuid, each.volume)])
    return [each for each in held if not {each.uuid, each.volume} <= there.keys()]


def _name_of(volumes: Volumes, uuid: str) -> str | None:
    try:
        return volumes.volume(uuid).name
    except VolumeNotFoundError:
        return None
