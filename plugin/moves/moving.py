"""A volume moves to another lvstore or pool of its target, one step after the other.

Before the new volume counts, whatever ends the move leaves the old one as it was; from then on it
is only completed. That is when the old one is deleted, or when its VM goes on with the new one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from plugin.gateway.lvolcopies import Disk
from plugin.moves import moverequest, notes, targetcopy
from plugin.moves.blockcopy import Running
from plugin.moves.moverequest import MoveRequest
from plugin.moves.naming import Domains
from plugin.moves.notes import Counts, Note
from plugin.signals import uninterrupted
from plugin.volumelocks import locked
from pydataplane.domain import limiting
from pydataplane.domain.limits import NONE
from pydataplane.domain.names import CONTROLLER_PREFIX
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
    pause_us: int | None = None
    """How long its VM's requests waited, at most, when it went on with it; None: none used it."""


class Undecided(VolumeError):
    """Nobody can tell which volume of a move counts."""


class Mover:
    """Moves volumes of one target."""

    def __init__(self, volumes: Volumes, copying: Volumes, domains: Domains | None) -> None:
        """`copying` waits for calls that take their time; no `domains`: no libvirt answers."""
        self._volumes, self._copying, self._domains = volumes, copying, domains

    def move(self, reference: str, to: str, progress: Progress) -> Moved:
        """Moves a volume to an lvstore or pool, or to LVSTORE/NAME there; a VM may use it.

        Safe to repeat after any interruption: it goes on where it was.

        Raises:
            VolumeError, TargetError: it cannot; the sentence says what there is.
            KeyboardInterrupt: the volume is as it was, and there is nothing else.
        """
        move = moverequest.find(self._volumes, reference, to)
        moves = (move.of, f"volume {move.path} is being moved")
        makes = (move.to, f"{move.to} is being made")
        with locked(self._volumes.client.path.parent, moves, makes):
            return self._move(moverequest.find(self._volumes, reference, to), progress)

    def _move(self, move: MoveRequest, progress: Progress) -> Moved:
        source, note = move.source, move.note
        made = move.made
        if note is not None and made is not None and self._has_pivoted(made, note, source):
            return self._followed(made, note, move.to)
        if source is None:
            assert move.made is not None
            assert note is not None
            self._check_undecided(made, note, source)
            if note.state != "whole":
                raise VolumeNotFoundError(
                    f"there is no volume {move.path} any more, and {move.to} has not all of it:"
                    " delete that"
                )
            return self._completed(move.made, note, move.to)
        note = note or Note(source.uuid, source.path)
        self._check_undecided(made, note, source)  # what else is said supposes that one counts
        disk = self._check(source, move.to)
        if disk is not None:
            return self._move_used(move, source, disk, note, progress)
        note = replace(note, pause_us=None)  # that of a pivot was taken back by hand
        begun = note.state  # of "whole" somebody may have deleted the old one in this moment
        made, deleting = move.made, False
        try:
            made = made or moverequest.make(self._copying, move, source)
            self._copy(source, made, note, progress)
            with uninterrupted():
                moverequest.check_movable(self._volumes, source)  # a snapshot may be new
                notes.write(self._volumes, made, note, "whole")
                deleting = True
                self._delete(source, move.to, made, note)
        except BaseException as error:
            if not deleting and begun != "whole":
                self._undo(move, source, made, error)
            raise
        return self._completed(made, note, move.to)

    def _move_used(
        self, move: MoveRequest, source: Volume, disk: Disk, note: Note, progress: Progress
    ) -> Moved:
        """Moves a volume that a VM has as a disk, and goes on with it."""
        assert self._domains is not None
        running = Running(self._domains, self._volumes.client, disk)
        made = move.made
        try:
            made = made or moverequest.make(self._copying, move, source)
            moverequest.check_blocks(self._volumes, made, source)
            if note.state != "mirrored" or move.note is None:
                note = notes.write(self._volumes, made, note, "mirrored")
            dev = running.mirror(source.path, made, move.to, progress)
            moverequest.check_movable(self._volumes, source)  # a snapshot may be new
            with uninterrupted():
                self._carry_limits(source.uuid, made)
                running.pivot(dev)
        except BaseException as error:
            if not self._undo(move, source, made, error, running):
                raise
        assert made is not None
        return self._followed(made, note, move.to)

    def _has_pivoted(self, made: str, note: Note, source: Volume | None) -> bool:
        """Whether a VM has gone on with the new volume (its UUID), which the target decides.

        `source` is the old one; None: it is gone.

        Raises:
            TargetError: nobody knows.
        """
        if source is None and note.state in ("copying", "whole"):
            return False  # nothing is left of it but the note
        return self._counting(made, source) == "new"

    def _counting(self, made: str, source: Volume | None) -> Counts:
        """Returns which volume of a move counts, whatever is noted at the new one (its UUID).

        `source` is the old one; None: it is gone.

        Raises:
            TargetError: nobody knows.
        """
        stores = [self._volumes.lvol(made).lvstore]
        if source is not None:
            stores.append(source.lvstore)
        if source is not None and any(self._volumes.lvstore(store).is_pool for store in stores):
            return "old"  # no VM goes on from or to a pool: the old one counts until it is gone
        return notes.counting(self._copying.client, made)

    def _check_undecided(self, made: str | None, note: Note, source: Volume | None) -> None:
        """Refuses to copy where the old volume may not count, though it is there.

        Raises:
            VolumeError: nobody knows which does.
            TargetError: as that.
        """
        if made is None or (source is None and note.state in ("copying", "whole")):
            return
        # Of two that are there it is no answer that one of them is gone.
        harmless = ("old",) if source is not None else ("old", "neither")
        if self._counting(made, source) not in harmless:
            raise Undecided(
                f"nobody can tell whether volume {note.path} counts or the one that it was moved"
                " to: delete none of them. Where a pivot failed, mend what the target's log says,"
                " and move it again; else see which has what was written last, remove the xattrs"
                f" {notes.MOVED} of the one and {notes.XATTR} of the other, and delete what does"
                " not count"
            )

    def _check(self, source: Volume, to: str) -> Disk | None:
        """Returns the disk of a VM that a volume is, which is to be `to`; None: nobody uses it.

        Raises:
            VolumeError: it cannot move.
        """
        disks = moverequest.disks_on(self._volumes, source.uuid)
        moverequest.check_movable(self._volumes, source)
        names = ", ".join(disk.controller for disk in disks)
        in_use = f"volume {source.path} is in use by"
        if any(not disk.controller.startswith(CONTROLLER_PREFIX) for disk in disks):
            raise VolumeError(f"{in_use} controller {names}: delete that first")
        if len(disks) > 1:
            raise VolumeError(f"{in_use} several VMs ({names}): shut all of them down")
        if disks and self._domains is None:
            raise VolumeError(
                f"{in_use} a VM ({names}), and no gateway answers, by which it would go on: start"
                " virtlun-gateway, or shut the VM down"
            )
        stores = (source.lvstore, to.split("/", maxsplit=1)[0])
        if disks and any(self._volumes.lvstore(store).is_pool for store in stores):
            raise VolumeError(
                f"{in_use} a VM ({names}), and moves from or to a pool: shut that down; or have"
                f" `virsh blockcopy DOMAIN DISK --dest /dev/virtlun/{to} --transient-job --wait"
                " --pivot` move its disk, and delete the old volume then"
            )
        if disks:
            notes.check_target(self._copying.client, source.uuid)
        if self._domains is not None:
            self._domains.check_none_saved(source.path)
        return disks[0] if disks else None

    def _copy(self, source: Volume, made: str, note: Note, progress: Progress) -> None:
        """Copies all of a volume, which nobody else has from then on."""
        moverequest.check_blocks(self._volumes, made, source)
        targetcopy.hold(self._volumes.client, self._copying.client, source.uuid)
        self._volumes.xattrs(source.uuid)  # it is there still
        try:
            self._check_undecided(made, note, source)  # from here on nobody changes that
        except (TargetError, VolumeError):
            with suppress(TargetError):
                targetcopy.end(self._copying.client, source.uuid)
            raise
        notes.write(self._volumes, made, note, "copying")
        targetcopy.copy(self._volumes.client, self._copying.client, source.uuid, made, progress)
        with uninterrupted():
            self._carry_limits(source.uuid, made)

    def _carry_limits(self, source: str, made: str) -> None:
        """Gives the new volume the I/O limits that somebody has given the old one by hand."""
        limits = moverequest.limits_by_hand(self._volumes, source)
        if limits != NONE:
            limiting.put(self._volumes.client, made, limits)

    def _delete(self, source: Volume, to: str, made: str, note: Note) -> None:
        """Deletes the old volume, of which the new one has all.

        Raises:
            VolumeError: it is there still, or nobody knows. The new one is, too.
        """
        targetcopy.end(self._copying.client, source.uuid)
        try:
            self._copying.delete(source.uuid)
        except (TargetError, VolumeError) as error:
            both = f"volume {source.path} has been copied to {to}, and is not deleted: {error}."
            try:
                there = moverequest.is_there(self._copying, source.uuid)
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

    def _undo(
        self,
        move: MoveRequest,
        source: Volume,
        made: str | None,
        why: BaseException,
        running: Running | None = None,
    ) -> bool:
        """Deletes the new volume of a move that has not come to its end.

        Returns whether it has, as a VM (`running`) has gone on with the new one.

        Raises:
            VolumeError: it is there still; what that says, `why` too, is what the user is told.
        """
        if isinstance(why, Undecided):
            return False
        known = running is None
        try:
            with uninterrupted():
                if made is None:
                    made = self._begun(move, source, why)
                if made is None:
                    return False
                note = notes.read(self._volumes, made)
                if note is None or note.of != source.uuid:
                    return False  # somebody else's
                if running is not None:
                    running.end(source.path, made)
                    note = notes.read(self._volumes, made) or note
                    if self._has_pivoted(made, note, source):
                        return True
                self._check_undecided(made, note, source)
                known = True
                targetcopy.end(self._copying.client, source.uuid)
                # The one without the other is deleted only when that is seen to be there.
                self._volumes.xattrs(source.uuid)
                self._copying.delete(made, missing_ok=True)
        except (TargetError, VolumeError) as rest:
            cancelled = isinstance(why, KeyboardInterrupt)
            said = "cancelled" if cancelled else str(why)
            if not known or isinstance(rest, Undecided):
                raise VolumeError(
                    f"{said}. Whether volume {source.path} or {move.to} counts is not known:"
                    f" {rest}; delete none of them, and move it again"
                ) from why
            raise VolumeError(
                f"{said}. Volume {source.path} counts, and is not as it was in all: {rest}; what"
                f" there is of {move.to} is not whole: move it again, or delete that"
            ) from why
        return False

    def _begun(self, move: MoveRequest, source: Volume, why: BaseException) -> str | None:
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
            targetcopy.end(self._copying.client, note.of)
            names = self._domains.redefine(note.path, to) if self._domains is not None else []
            self._volumes.remove_xattr(made, notes.XATTR)
        return Moved(self._volumes.volume(made), names, note.pause_us)

    def _followed(self, made: str, note: Note, to: str) -> Moved:
        """Does what is left of a move whose VM has gone on with the new volume (its UUID).

        Raises:
            VolumeError: something does not name it yet; the old one is there, and counts no more.
        """
        if self._domains is None:
            raise VolumeError(
                f"a VM has gone on with volume {to}, and no gateway answers, which has domains name"
                f" it: start virtlun-gateway, and move {note.path} again"
            )
        with uninterrupted():
            running = [
                Running(self._domains, self._volumes.client, disk)
                for disk in moverequest.disks_on(self._volumes, made)
                if disk.controller.startswith(CONTROLLER_PREFIX)
            ]
            for each in running:
                each.followed(to)
            self._domains.check_none_saved(note.path)
            # The target has the last word, now that nothing goes on any more.
            if (
                moverequest.disks_on(self._volumes, note.of)
                or notes.counting(self._copying.client, made) != "new"
            ):
                raise VolumeError(
                    f"volume {note.path} is in use, or counts: it is not deleted; see which VM has"
                    " it, and move it again"
                )
            self._domains.redefine(note.path, to)
            names = {*self._domains.naming(to), *(each.domain for each in running)}
            # Without the old one nothing else says that the new one counts.
            note = notes.read(self._volumes, made) or note
            note = notes.write(self._volumes, made, note, "whole")
            try:
                self._copying.delete(note.of, missing_ok=True)
            except (TargetError, VolumeError) as error:
                raise VolumeError(
                    f"volume {note.path} is {to} now, and is not deleted: {error}; move it again"
                ) from error
            self._volumes.remove_xattr(made, notes.XATTR)
        return Moved(
            self._volumes.volume(made),
            sorted(name for name in names if name is not None),
            note.pause_us,
        )
