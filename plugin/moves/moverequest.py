"""Which volume is to go where, and what an earlier call left of that."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from plugin.gateway.lvolcopies import Disk
from plugin.images import importing
from plugin.moves import notes, targetcopy
from plugin.moves.notes import Note
from plugin.streams import receiving
from pydataplane.domain import limiting
from pydataplane.domain.limits import NONE, Limits
from pydataplane.domain.observed import observe
from pydataplane.errors import NO_DEVICE, RpcError, VolumeError, VolumeNotFoundError
from pydataplane.lvols import Volume
from pydataplane.volumenames import split_path
from pydataplane.volumes import Volumes

CLAIM = "csi."
"""What the names of xattrs begin with that the driver of Kubernetes gives its volumes."""

OWN = (limiting.XATTR, "virtlun.encryption", notes.HOST, notes.MOVED)
"""Xattrs that do not go along: a disk's, which brings its limits, the target's own of a key, and
what a move notes at the old volume."""

HOST_SNAPSHOT = "virtlun.move_snapshot"
"""Xattr of a snapshot that a move to another host has taken: the UUID of its volume."""


@dataclass(frozen=True)
class MoveRequest:
    """A move, and how far it is."""

    path: str
    """LVSTORE/NAME that the volume has, or had."""
    to: str
    """LVSTORE/NAME that it is to have."""
    source: Volume | None
    """None: it is gone, as after the last steps of a move."""
    made: str | None
    """UUID of the new volume; None: there is none yet."""
    note: Note | None
    """What is noted at that."""

    @property
    def of(self) -> str:
        """UUID of the volume that moves."""
        if self.source is not None:
            return self.source.uuid
        assert self.note is not None
        return self.note.of


def find(volumes: Volumes, reference: str, to: str) -> MoveRequest:
    """Returns what is to be done; `to` is an lvstore or pool, or LVSTORE/NAME there.

    Raises:
        VolumeError: there is no such volume, or what is there is in the way.
    """
    lvstore, given = split_path(to) if "/" in to else (to, None)
    store = volumes.lvstore(lvstore).name
    source, path, name = None, None, given
    try:
        source = volumes.volume(reference)
        path, name = source.path, name or source.name
    except VolumeNotFoundError:
        if "/" in reference:
            path = "/".join(split_path(reference))
            name = name or path.split("/")[1]
    if path is not None and store == path.split("/", 1)[0]:
        raise VolumeError(
            f"volume {path} is in {store} already: `virtlun volume rename` gives it another name"
        )
    made, note = _made(volumes, store, name, source, path or reference)
    if source is None and made is not None and note is not None:
        source, path = _left(volumes, made.path, note), note.path
    if path is None or (source is None and note is None):
        raise VolumeNotFoundError(
            f"there is no volume {reference}, and no move of it to {to} to be completed: see"
            " `virtlun volume list`"
        )
    there = made.path if made is not None else f"{store}/{name}"
    if "@" in there or "@" in path:
        raise VolumeError(f"{path} cannot move to {there}: a snapshot stays with its volume")
    return MoveRequest(path, there, source, made.uuid if made is not None else None, note)


def _made(
    volumes: Volumes, store: str, name: str | None, source: Volume | None, asked: str
) -> tuple[Volume | None, Note | None]:
    """Returns the new volume of this move, and its note.

    `asked` is LVSTORE/NAME or the UUID of what moves. Where that is gone and no name of the new one
    is known (None), all of `store` are looked at.

    Raises:
        VolumeError: another volume has the name.
    """
    if name is None:
        for each in volumes.volumes(store):
            if notes.XATTR in volumes.xattrs(each.uuid):
                note = notes.read(volumes, each.uuid)
                if note is not None and note.of == asked:
                    return each, note
        return None, None
    with suppress(VolumeNotFoundError):
        present = volumes.volume(f"{store}/{name}")
        note = notes.read(volumes, present.uuid)
        if source is None and (note is None or asked not in (note.of, note.path)):
            return None, None  # of nothing that is asked for
        if note is None or (source is not None and note.of != source.uuid):
            raise VolumeError(
                f"volume {present.path} exists already, and is of no move of {asked}: choose"
                " another name, or rename or delete it"
            )
        return present, note
    return None, None


def _left(volumes: Volumes, made: str, note: Note) -> Volume | None:
    """Returns the old volume of a move, that has another name by now; None: it is gone.

    `made` is LVSTORE/NAME of the new one.

    Raises:
        VolumeError: nobody knows, as its lvstore or pool is not there.
        TargetError: as that.
    """
    try:
        volumes.lvstore(note.path.split("/")[0])
    except VolumeNotFoundError as error:
        lost = (
            f"; or if it is lost for good, and its VM had gone on with {made}, or {made} has all of"
            f" it, remove the xattr {notes.XATTR} of {made} (virtlun_lvol_remove_xattr)"
        )
        raise VolumeError(
            f"nobody knows whether volume {note.path}, which was to move, is there still: {error};"
            " load it, or attach it, and move the volume again"
            + (lost if note.state in ("pivoted", "whole") else "")
        ) from error
    if not is_there(volumes, note.of):
        return None
    return volumes.volume(note.of)


def is_there(volumes: Volumes, uuid: str) -> bool:
    """Whether a volume is there; its lvstore or pool is asked now.

    Raises:
        TargetError: nobody knows.
    """
    try:
        volumes.xattrs(uuid)
    except RpcError as error:
        if error.code != NO_DEVICE:
            raise
        return False
    return True


def check_movable(volumes: Volumes, source: Volume, *, to_host: bool = False) -> None:
    """Refuses a volume that others need where it is.

    With `to_host` it goes to another host, which `plugin.hostmoves` notes at it, with snapshots of
    its own.

    Raises:
        VolumeError: it is a snapshot, has snapshots, is a claim's or not whole yet, or is shown to
            this host.
    """
    if source.snapshot:
        raise VolumeError(f"{source.path} is a snapshot, which stays with its volume: clone it")
    xattrs = volumes.xattrs(source.uuid)
    if notes.HOST in xattrs and not to_host:
        raise VolumeError(
            f"volume {source.path} is on its way to another host ({xattrs[notes.HOST]}): complete"
            " that, by the same command, or give it up (--abort)"
        )
    snapshots = [
        each.name
        for each in volumes.volumes(source.lvstore)
        if each.snapshot
        and each.name.split("@")[0] == source.name
        and not (to_host and is_of_host_move(volumes, each, source))
    ]
    if snapshots:
        raise VolumeError(
            f"volume {source.path} has {len(snapshots)} snapshots, which would stay behind"
            f" ({', '.join(snapshots)}): delete them first, or `virtlun volume clone` the last of"
            " them and move the clone"
        )
    if any(name.startswith(CLAIM) for name in xattrs):
        raise VolumeError(
            f"volume {source.path} is a claim's of Kubernetes, which knows where it is: clone the"
            " claim, or copy in a pod that has both"
        )
    if notes.MOVED in xattrs and not (to_host and notes.HOST in xattrs):
        raise VolumeError(
            f"volume {source.path} does not count any more: its VM has gone on with another one"
            f" ({xattrs[notes.MOVED]}); complete that move, by the same command"
        )
    for name, what in (
        (importing.XATTR, "imported"),
        (notes.XATTR, "moved there"),
        (receiving.XATTR, "received"),
    ):
        if name in xattrs:
            raise VolumeError(
                f"volume {source.path} is not whole yet: it is being {what}; complete that first,"
                " by the same command"
            )
    if (export := volumes.export_of(source.uuid)) is not None:
        raise VolumeError(
            f"volume {source.path} is exported, and in use by what has {export['path']} open:"
            " end that first"
        )


def is_of_host_move(volumes: Volumes, snapshot: Volume, of: Volume) -> bool:
    """Whether a snapshot was taken by a move of the volume `of` to another host."""
    return volumes.xattrs(snapshot.uuid).get(HOST_SNAPSHOT) == of.uuid


def disks_on(volumes: Volumes, uuid: str) -> list[Disk]:
    """Returns the disks, of VMs and others, that are on a volume (its UUID)."""
    return [
        Disk(name, number)
        for name, disks in sorted(observe(volumes.client).controllers.items())
        for number, shown in disks.items()
        if shown.bdev == uuid and not name.startswith(targetcopy.PREFIX)
    ]


def limits_by_hand(volumes: Volumes, uuid: str) -> Limits:
    """Returns the I/O limits that somebody has given a volume (its UUID) by hand, which go along.

    Those of a disk do not: it brings them along.
    """
    if limiting.XATTR in volumes.xattrs(uuid):
        return NONE
    return limiting.found(volumes.client, uuid)


def carried(volumes: Volumes, source: Volume) -> dict[str, str]:
    """Returns the xattrs that go along, and by which guests know the new volume as the old one."""
    noted = {notes.IDENTITY: source.uuid} | volumes.xattrs(source.uuid)
    return {name: text for name, text in noted.items() if name not in OWN}


def make(volumes: Volumes, wanted: MoveRequest, source: Volume) -> str:
    """Makes the new volume and returns its UUID; there is never one without its note.

    What is noted at the old one is noted at it, and as which disk guests know that.

    Raises:
        VolumeError: there is no room for it, or it cannot be as the old one is.
    """
    lvstore, _ = wanted.to.split("/")
    store = volumes.lvstore(lvstore)
    if store.tells_room and store.free < source.allocated:
        raise VolumeError(
            f"{wanted.to} needs {source.allocated} bytes, and {lvstore} has {store.free} left:"
            " free some, or choose another one"
        )
    made = volumes.create(
        wanted.to,
        source.size,
        thin=source.thin,
        xattrs=carried(volumes, source) | {notes.XATTR: Note(source.uuid, source.path).text},
        key=source.key,
        dif_type=source.dif_type,
    )
    return made.uuid


def check_blocks(volumes: Volumes, made: str, source: Volume) -> None:
    """Refuses a new volume (its UUID) on which what is on the old one cannot be read.

    Raises:
        VolumeError: its blocks have another size.
    """
    new = volumes.lvol(made)
    if new.block_size != source.block_size:
        raise VolumeError(
            f"volumes of {new.lvstore} have blocks of {new.block_size} bytes, and {source.path} has"
            f" those of {source.block_size}, which what is on it counts in: choose another one"
        )
