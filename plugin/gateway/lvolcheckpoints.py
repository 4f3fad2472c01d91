"""A domain's checkpoints as its target has them: an lvol snapshot of each disk, with a xattr.

The lvstore is the only truth, so a checkpoint lasts as long as the lvol snapshots do, whatever
becomes of libvirtd and the gateway. All of it blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from plugin.gateway import lvolsnapshots
from pydataplane import methods
from pydataplane.domain.translate.snapshotxml import DiskSnapshot
from pydataplane.errors import NO_DEVICE, RpcError
from pydataplane.volumes import Volumes

XATTR = "virtlun.checkpoint"
MARK = "@checkpoint-"
"""Between a volume's name and the checkpoint's, in the name of the lvol snapshot."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint of disks of ours."""

    name: str
    domain: str
    """The domain's UUID."""
    created_ns: int
    """Since the epoch; no two of a domain have the same."""
    description: str | None
    held: tuple[DiskSnapshot, ...]
    """What the disks had then."""

    @property
    def created_s(self) -> int:
        """When it was taken, seconds since the epoch."""
        return self.created_ns // 1_000_000_000

    def of(self, volume: str) -> DiskSnapshot | None:
        """Returns what a volume (its UUID) had then."""
        return next((each for each in self.held if each.volume == volume), None)


def snapshot_name(volume: str, checkpoint: str) -> str:
    """Returns the name of the lvol snapshot that a checkpoint has of a volume."""
    return f"{volume}{MARK}{checkpoint}"


def take(volumes: Volumes, checkpoint: Checkpoint, besides: Sequence[DiskSnapshot] = ()) -> None:
    """Takes the lvol snapshots of a checkpoint, and others at the same instant, all or none.

    Raises:
        VolumeError: a name is taken.
        TargetError: the target refuses.
    """
    noted = {each.uuid: {XATTR: _text(checkpoint, each)} for each in checkpoint.held}
    lvolsnapshots.take(volumes, (*checkpoint.held, *besides), noted)


def found(volumes: Volumes, lvstores: Iterable[str], domain: str) -> list[Checkpoint]:
    """Returns the checkpoints that a domain (its UUID) has in these lvstores, oldest first."""
    by_name: dict[str, Checkpoint] = {}
    marked = {item["uuid"]: item for item in _marked(volumes, lvstores)}
    xattrs = volumes.client.call_for_each(
        "virtlun_lvol_get_xattrs", list(marked), lambda uuid: {"name": uuid}
    )
    for uuid, noted in xattrs.items():
        checkpoint = _read(noted.get(XATTR), marked[uuid])
        if checkpoint is None or checkpoint.domain != domain:
            continue
        known = by_name.get(checkpoint.name)
        if known is not None:
            checkpoint = replace(known, held=known.held + checkpoint.held)
        by_name[checkpoint.name] = checkpoint
    return sorted(by_name.values(), key=lambda each: each.created_ns)


def forget(volumes: Volumes, held: Sequence[DiskSnapshot]) -> None:
    """Has lvol snapshots that are there be of no checkpoint any more; safe to repeat."""
    for each in held:
        try:
            volumes.remove_xattr(each.uuid, XATTR)
        except RpcError as error:
            if error.code != NO_DEVICE:
                raise


def define(volumes: Volumes, checkpoint: Checkpoint) -> None:
    """Has lvol snapshots that are there be a checkpoint; safe to repeat."""
    for each in checkpoint.held:
        volumes.set_xattr(each.uuid, XATTR, _text(checkpoint, each))


def domains(volumes: Volumes, held: Sequence[DiskSnapshot]) -> dict[str, str]:
    """Returns the domains (UUIDs) whose checkpoints lvol snapshots are of, by their UUID.

    Those that are of none are left out.
    """
    xattrs = volumes.client.call_for_each(
        "virtlun_lvol_get_xattrs", [each.uuid for each in held], lambda uuid: {"name": uuid}
    )
    found = {}
    for uuid, noted in xattrs.items():
        values = _values(noted.get(XATTR))
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            found[uuid] = str(UUID((values or {})["domain"]))
    return found


def changed(volumes: Volumes, held: DiskSnapshot) -> int:
    """Returns the bytes in which a volume may differ from what a checkpoint has of it."""
    pages = volumes.ranges(held.volume, held.uuid)
    return sum(length for page in pages for _, length in page)


def _marked(volumes: Volumes, lvstores: Iterable[str]) -> list[methods.Lvol]:
    items: list[methods.Lvol] = []
    for lvstore in sorted(set(lvstores)):
        try:
            items += volumes.client.call("bdev_lvol_get_lvols", lvs_name=lvstore)
        except RpcError as error:
            if error.code != NO_DEVICE:
                raise
    return [item for item in items if MARK in item["name"] and item["is_snapshot"]]


def _text(checkpoint: Checkpoint, held: DiskSnapshot) -> str:
    return json.dumps(
        {
            "domain": checkpoint.domain,
            "name": checkpoint.name,
            "created_ns": checkpoint.created_ns,
            "description": checkpoint.description,
            "dev": held.dev,
            "volume": held.volume,
        }
    )


def _read(text: str | None, item: methods.Lvol) -> Checkpoint | None:
    """Reads a xattr; None for one that is missing, or that somebody damaged."""
    values = _values(text)
    if values is None:
        return None
    try:
        held = DiskSnapshot(
            dev=str(values["dev"]),
            volume=str(values["volume"]),
            lvstore=item["lvs"]["name"],
            snapshot=item["name"],
            uuid=item["uuid"],
        )
        description = values["description"]
        return Checkpoint(
            name=str(values["name"]),
            domain=str(values["domain"]),
            created_ns=int(values["created_ns"]),
            description=None if description is None else str(description),
            held=(held,),
        )
    except (ValueError, KeyError, TypeError):
        return None


def _values(text: str | None) -> dict[str, Any] | None:
    """Reads the text of a xattr; None for one that is missing, or that somebody damaged."""
    try:
        values = json.loads(text or "")
    except ValueError:
        return None
    return values if isinstance(values, dict) else None
