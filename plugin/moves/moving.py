"""A volume moves to another lvstore or pool of its target, one step after the other.

Before the new volume counts, whatever ends the move leaves the old one as it was; from then on it
is only completed. That is when the old one is deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from plugin.moves import idle, notes, wanted
from plugin.moves.alone import alone, uninterrupted
from plugin.moves.naming import Domains
from plugin.moves.notes import Note
from plugin.moves.wanted import Wanted
from pydataplane.domain import limiting
from pydataplane.domain.limits import NONE
from pydataplane.domain.names import CONTROLLER_PREFIX
from pydataplane.domain.observed import observe
from pydataplane.errors import (
    BUSY,
    NO_DEVICE,
    RpcError,
    TargetError,
    VolumeError,
    VolumeNotFoundError,
)
from pydataplane.lvols import Volume
from pydataplane.volumes import Volumes

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Moved:
    """What became of it."""

    volume: Volume
    domains: list[str]
    """Names of the domains whose definitions name it now."""


class Mover:
    """Moves volumes of one target."""

    def __init__(self, volumes: Volumes, copying: Volumes, domains: Domains | None) -> None:
        """`copying` waits for calls that take their time; no `domains`: no libvirt answers."""
        self._volumes, self._copying, self._domains = volumes, copying, domains

    def move(self, reference: str, to: str, progress: Progress) -> Moved:
        """Moves a volume that nobody uses to an lvstore or pool, or to LVSTORE/NAME there.

        Safe to repeat after any interruption: it goes on where it was.

        Raises:
            VolumeError, TargetError: it cannot; the sentence says what there is.
            KeyboardInterrupt: the volume is as it was, and there is nothing else.
        """
        move = wanted.find(self._volumes, reference, to)
        with alone(self._volumes.client.path.parent, move.of, move.path, move.to):
            return self._move(wanted.find(self._volumes, reference, to), progress)

    def _move(self, move: Wanted, progress: Progress) -> Moved:
        source, note = move.source, move.note
        if source is None:
            assert move.made is not None
            assert note is not None
            if note.state != "whole":
                raise VolumeNotFoundError(
                    f"there is no volume {move.path} any more, and {move.to} has not all of it:"
                    " delete that"
                )
            return self._completed(move.made, note, move.to)
        self._check(source)
        note = note or Note(source.uuid, source.path)
        begun = note.state  # of "whole" somebody may have deleted the old one in this moment
        made, deleting = move.made, False
        try:
            made = made or wanted.make(self._copying, move, source)
            self._copy(source, made, note, progress)
            with uninterrupted():
                wanted.check_movable(self._volumes, source)  # a snapshot may be new
                notes.write(self._volumes, made, note, "whole")
                deleting = True
                self._delete(source, move.to, made, note)
        except BaseException as error:
            if not deleting and begun != "whole":
                self._undo(move, source, made, error)
            raise
        return self._completed(made, note, move.to)

    def _check(self, source: Volume) -> None:
        wanted.check_movable(self._volumes, source)
        names = sorted(
            name
            for name, disks in observe(self._volumes.client).controllers.items()
            for shown in disks.values()
            if shown.bdev == source.uuid and not name.startswith(idle.PREFIX)
        )
        if any(name.startswith(CONTROLLER_PREFIX) for name in names):
            raise VolumeError(
                f"volume {source.path} is in use by a VM ({', '.join(names)}): shut that down, or"
                " have `virsh blockcopy` move its disk"
            )
        if names:
            raise VolumeError(
                f"volume {source.path} is in use by controller {', '.join(names)}: delete that"
                " first"
            )
        if self._domains is not None:
            self._domains.check_none_saved(source.path)

    def _copy(self, source: Volume, made: str, note: Note, progress: Progress) -> None:
        """Copies all of a volume, which nobody else has from then on."""
        wanted.check_blocks(self._volumes, made, source)
        idle.hold(self._volumes.client, self._copying.client, source.uuid)
        self._volumes.xattrs(source.uuid)  # it is there still
        notes.write(self._volumes, made, note, "copying")
        idle.copy(self._volumes.client, self._copying.client, source.uuid, made, progress)
        with uninterrupted():
            self._carry_limits(source.uuid, made)

    def _carry_limits(self, source: str, made: str) -> None:
        """Gives the new volume the I/O limits that somebody has given the old one by hand."""
        client = self._volumes.client
        if limiting.XATTR in self._volumes.xattrs(source):
            return  # a disk's, which brings them along
        limits = limiting.found(client, source)
        if limits != NONE:
            limiting.put(client, made, limits)

    def _delete(self, source: Volume, to: str, made: str, note: Note) -> None:
        """Deletes the old volume, of which the new one has all.

        Raises:
            VolumeError: it is there still, or nobody knows. The new one is, too.
        """
        idle.end(self._copying.client, source.uuid)
        try:
            self._copying.delete(source.uuid)
        except (TargetError, VolumeError) as error:
            both = f"volume {source.path} has been copied to {to}, and is not deleted: {error}."
            try:
                there = wanted.is_there(self._copying, source.uuid)
            except TargetError as unknown:
                raise VolumeError(
                    f"{both} Whether it is there nobody knows; move it again"
                ) from unknown
            if not there:
                return  # as a pool's, of which its trash has the rest
            if isinstance(error, RpcError) and error.code == BUSY:
                notes.write(self._volumes, made, note, "copying")
                raise VolumeError(
                    f"{both} Somebody uses it, so it counts, and {to} is not it any more: move it"
                    f" again when nobody does, or delete {to}"
                ) from error
            raise VolumeError(f"{both} Both are there; move it again") from error

    def _undo(self, move: Wanted, source: Volume, made: str | None, why: BaseException) -> None:
        """Deletes the new volume of a move that has not come to its end.

        Raises:
            VolumeError: it is there still; what that says, `why` too, is what the user is told.
        """
        try:
            with uninterrupted():
                if made is None:
                    made = self._begun(move, source, why)
                if made is None:
                    return
                note = notes.read(self._volumes, made)
                if note is None or note.of != source.uuid:
                    return  # somebody else's
                idle.end(self._copying.client, source.uuid)
                # The one without the other is deleted only when that is seen to be there.
                self._volumes.xattrs(source.uuid)
                self._copying.delete(made, missing_ok=True)
        except (TargetError, VolumeError) as rest:
            cancelled = isinstance(why, KeyboardInterrupt)
            said = "cancelled" if cancelled else str(why)
            raise VolumeError(
                f"{said}. Volume {source.path} counts, and is not as it was in all: {rest}; what"
                f" there is of {move.to} is not whole: move it again, or delete that"
            ) from why

    def _begun(self, move: Wanted, source: Volume, why: BaseException) -> str | None:
        """Returns the UUID of a new volume that was being made; None: there is none."""
        if isinstance(why, KeyboardInterrupt):
            try:
                self._volumes.client.call("virtlun_lvol_cancel", name=move.to)
            except RpcError as error:
                if error.code != NO_DEVICE:
                    raise
        with suppress(VolumeNotFoundError):
            return self._volumes.lvol(move.to).uuid
        return None

    def _completed(self, made: str, note: Note, to: str) -> Moved:
        """Does what is left of a move whose old volume is gone."""
        with uninterrupted():
            idle.end(self._copying.client, note.of)
            names = self._domains.redefine(note.path, to) if self._domains is not None else []
            self._volumes.remove_xattr(made, notes.XATTR)
        return Moved(self._volumes.volume(made), names)
