"""Which target a disk of ours gets, and what a guest that goes on by other XML keeps of its disks.

A guest knows a disk by its number and by what it says of itself. One that migrates, or comes back
from a file, has both as they were, whatever its client writes: else it would write what it has of
one disk to another. Where that cannot be, the XML is refused, as libvirt refuses it for its own
disks (virDomainDefCheckABIStability).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.model import FrontEnd, LunPlan, VolumeRef
from pydataplane.domain.names import MAX_TARGETS
from pydataplane.domain.translate import fronts
from pydataplane.domain.xml.disk import QUEUES, Disk
from pydataplane.domain.xml.document import Node
from pydataplane.domain.xml.metadata import Metadata


@dataclass(frozen=True, slots=True)
class Ours:
    """A disk of ours in the client's domain."""

    node: Node
    disk: Disk
    volume: VolumeRef
    order: int
    front: FrontEnd


@dataclass(frozen=True, slots=True)
class Before:
    """A disk of ours that the domain has."""

    lun: LunPlan
    disk: Disk | None
    """What its client wrote; None if that cannot be read."""


def before(metadata: Metadata | None) -> tuple[Before, ...]:
    """Returns the disks of ours that a domain has."""
    entries = metadata.entries if metadata is not None else ()
    return tuple(Before(entry.lun, entry.disk) for entry in entries)


def numbered(
    ours: Sequence[Ours], had: Sequence[Before], uuids: Mapping[str, str], *, running: bool
) -> list[LunPlan]:
    """Gives each disk its target: the one it has, else the lowest free.

    Args:
        ours: the disks that the domain is to have.
        had: those it has.
        uuids: LVSTORE/LVOL to volume UUID, as far as known.
        running: its guest goes on, and `check_kept` refused nothing.
    """
    same = {_key(b.lun.dev, b.lun.volume, running): b.lun for b in had}
    known = {b.lun.volume: b.lun.uuid for b in had}
    kept = {_key(o.disk.dev or "", o.volume, running) for o in ours} & same.keys()
    used = {same[key].target for key in kept}
    free = (n for n in range(MAX_TARGETS) if n not in used)
    result = []
    for item in ours:
        was = same.get(_key(item.disk.dev or "", item.volume, running))
        uuid = uuids.get(item.volume.alias, known.get(item.volume))
        lun = fronts.planned(
            item.disk,
            item.volume,
            target=was.target if was is not None else next(free),
            uuid=was.uuid or uuid if running and was is not None else uuid,
            front=item.front,
            known_as=fronts.known_as(item.volume, was, running=running),
        )
        result.append(fronts.as_shown(lun, was) if running and was is not None else lun)
    return result


def _key(dev: str, ref: VolumeRef, running: bool) -> tuple[object, ...]:
    """Returns by what a disk is known to be the one that the domain has."""
    return (dev,) if running else (dev, ref.image)


def check_kept(ours: Sequence[Ours], had: Sequence[Before], uuids: Mapping[str, str]) -> None:
    """Refuses disks that are not those of the guest that is to go on with them.

    Arguments as of `numbered`; `uuids` has "" for a volume that nobody knows.

    Raises:
        TranslateError: UNSUPPORTED; names the disk, what it has and what it was to have.
    """
    given = {item.disk.dev or "": item for item in ours}
    known = {b.lun.volume.alias: b.lun.uuid for b in had if b.lun.uuid is not None} | dict(uuids)
    for each in had:
        lun = each.lun
        item = given.pop(lun.dev, None)
        if item is None:
            raise _refused(
                f"disk {lun.dev} ({lun.volume.alias}, target {lun.target}) of the guest is not in"
                " the XML: give it all disks that the guest has"
            )
        _check_same(each, item, known)
    for dev, item in given.items():
        raise _refused(
            f"disk {dev} ({item.volume.alias}) is none that the guest has: leave it out of the XML,"
            " and attach it when the guest runs"
        )


def _check_same(each: Before, item: Ours, uuids: Mapping[str, str]) -> None:
    """Refuses another disk than the guest has under this target dev; raises as `check_kept`."""
    lun, disk = each.lun, item.disk
    _check_volume(lun, item.volume, uuids)
    new = fronts.planned(disk, item.volume, target=lun.target, uuid=lun.uuid, front=item.front)
    was = each.disk
    rows: list[tuple[str, object, object]] = [
        ("target bus", was.bus if was is not None else disk.bus, disk.bus),
        ("front end", lun.front, new.front),
        ("serial", lun.serial, new.serial),
        ("wwn", lun.characteristics.wwn, new.characteristics.wwn),
        ("vendor", lun.characteristics.vendor, new.characteristics.vendor),
        ("product", lun.characteristics.product, new.characteristics.product),
        ("rotation_rate", lun.characteristics.rotation_rate, new.characteristics.rotation_rate),
        ("removable", _yes(lun.characteristics.removable), _yes(new.characteristics.removable)),
        ("readonly", _yes(lun.read_only), _yes(new.read_only)),
        ("blockio logical_block_size", lun.block_size or 512, new.block_size or 512),
        (
            "blockio physical_block_size",
            lun.characteristics.physical_block_size,
            fronts.as_asked(new, lun, was).characteristics.physical_block_size,
        ),
    ]
    if was is not None and lun.front == "blk":  # a LUN has none of its own
        asked, asks = dict(was.queues), dict(disk.queues)
        rows += [(f"driver {name}", asked.get(name), asks.get(name)) for name in QUEUES]
    if was is not None and _own_alias(was) is not None and _own_alias(disk) is not None:
        rows.append(("alias", was.alias, disk.alias))
    for name, old, wanted in rows:
        if old != wanted:
            raise _mismatch(lun, name, wanted, old)


def _check_volume(lun: LunPlan, wanted: VolumeRef, uuids: Mapping[str, str]) -> None:
    """Refuses another volume or image; a volume of the same UUID may have another name."""
    if wanted.image == lun.volume.image:
        return
    if wanted.source is None and lun.volume.source is None and lun.uuid is not None:
        uuid = uuids.get(wanted.alias, lun.uuid)
        if uuid == lun.uuid:
            return
        named = f"{wanted.alias} (UUID {uuid or 'not known'})"
        raise _mismatch(lun, "source", named, f"{lun.volume.alias} (UUID {lun.uuid})")
    raise _mismatch(lun, "source", wanted.alias, lun.volume.alias)


def _mismatch(lun: LunPlan, name: str, wanted: object, old: object) -> TranslateError:
    def text(value: object) -> str:
        return "(none)" if value is None else str(value)

    return _refused(
        f"{name} {text(wanted)} of disk {lun.dev} does not match {text(old)}, by which its guest"
        " knows it: give it in the XML as the guest has it"
    )


def _refused(text: str) -> TranslateError:
    return TranslateError(Refusal.UNSUPPORTED, text)


def _own_alias(disk: Disk) -> str | None:
    """Returns the alias that the client chose; libvirt's own are no disk's name for good."""
    return disk.alias if disk.alias is not None and disk.alias.startswith("ua-") else None


def _yes(value: bool) -> str:
    return "yes" if value else "no"
