"""The host that a volume leaves: one step after the other, with the destination's answers.

Before the volume is noted as "moved", whatever ends the command leaves it as the one that counts;
from then on the same command does what is left.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import BinaryIO, cast

from plugin.hostmoves import movesnapshots, sourcechecks, sourcenote, takenback
from plugin.hostmoves.completion import Completed, Completion
from plugin.hostmoves.handover import LeavingDomain
from plugin.hostmoves.remote import Remote
from plugin.hostmoves.sourcechecks import HostMove
from plugin.hostmoves.sourcenote import HostNote
from plugin.hostmoves.wire import PING_S, ChunkWriter, Message
from plugin.moves import moverequest, notes
from plugin.moves.naming import Domains
from plugin.signals import deferred, uninterrupted
from plugin.streams import sending
from plugin.volumelocks import locked
from pydataplane.errors import TargetError, VolumeError
from pydataplane.lvols import Volume
from pydataplane.volumenames import split_path
from pydataplane.volumes import Volumes

SMALL_BYTES = 32 << 20
"""Changes that are few enough to be sent while the VM stands still."""
LESS = 0.75
"""Of a step's changes the next one has to have less than so much, or no further one helps."""
STEPS_MAX = 12
UNUSED_S = 60.0
"""How long a VM that has ended may have its disks in the target, seconds."""
LOOK_S = 0.05

Progress = Callable[..., None]
"""Told bytes done and of all, and `now=` what is done."""


@dataclass(frozen=True)
class HostMoved:
    """What became of it."""

    volume: Volume
    """As it was here."""
    completed: Completed
    sent: int
    """Bytes on the way."""
    last: int
    """Those of the last step, while nobody could write."""
    begun: float | None
    """When the VM was told to shut down, in seconds of the monotonic clock."""

    @property
    def pause_s(self) -> float | None:
        """From then until the VM was started there, or could be, seconds; None: there was none."""
        return self.completed.at - self.begun if self.begun is not None else None


class HostMover:
    """Moves one volume of this host's target to another host; its text says what stands."""

    def __init__(
        self,
        volumes: Volumes,
        copying: Volumes,
        domains: Domains | None,
        remote: Remote,
        progress: Progress,
    ) -> None:
        """`copying` waits for calls that take their time; no `domains`: no libvirt answers."""
        self._volumes, self._copying, self._domains = volumes, copying, domains
        self._remote, self._progress = remote, progress
        self._sent = self._last = 0
        self._pinged = 0.0
        self._begun: float | None = None
        self._has_part: bool | None = None
        """Whether the other host has some of the volume; None: it has not been asked."""
        self._may_count_there = False
        self.stands = ""
        """What there is, as a clause, whatever has ended the command; empty: nothing is changed."""

    def move(self, reference: str, wanted: HostMove) -> HostMoved:
        """Moves a volume; safe to repeat after any interruption: it goes on where it was.

        Raises:
            VolumeError, TargetError, libvirt's, KeyboardInterrupt: it did not come to its end;
                `stands` says what there is.
        """
        source = self._volumes.volume(reference)
        with self._alone(source):
            source = self._volumes.volume(source.uuid)
            note = sourcenote.read(self._volumes, source)
            to = self._place(source, note, wanted)
            if note is not None and note.state == "sending":
                sourcenote.free(self._volumes, source)  # held by a command that was killed
            domain = None
            note = note or HostNote(self._remote.host, to, source.thin)
            self._may_count_there = note.state == "moved"
            try:
                if note.state == "sending":
                    domain = sourcechecks.check(self._volumes, self._domains, source, wanted)
                with self._remote.connected():
                    sourcechecks.check_another(self._volumes, self._remote)
                    if note.state == "sending":
                        note = self._send_all(source, note, wanted, domain)
                    return self._complete(source, note, wanted)
            except BaseException as error:
                self._stop(source, error)
                raise

    def give_up(self, reference: str, to: str | None) -> None:
        """Has the volume be as it was, and deletes what there is of it on the other host, as `to`.

        Raises:
            VolumeError, TargetError: it counts there, or what is there stays; `stands` tells.
        """
        source = self._volumes.volume(reference)
        with self._alone(source):
            note = sourcenote.read(self._volumes, source)
            to = self._place(source, note, HostMove(to))
            if note is not None and note.state == "moved":
                raise VolumeError(
                    f"volume {source.path} is {note.place} already, and counts there: complete the"
                    " move by the same command without --abort"
                )
            if note is not None:  # else what is here is of no move to a host
                self.stands = (
                    f"the move of volume {source.path} is not given up to its end: the same command"
                    " goes on with that"
                )
                note = takenback.let_go(self._volumes, self._domains, source, note)
                takenback.forget(self._volumes, self._copying, source, note)
            self.stands = f"volume {source.path} is as it was"
            with self._remote.connected():
                sourcechecks.check_another(self._volumes, self._remote)
                self._ask("cancel", source, to)

    def _stop(self, source: Volume, why: BaseException) -> None:
        """Has all be as before if the volume counts here, and says what stands.

        Raises:
            VolumeError: that fails; it and `why` are told.
        """
        if self._may_count_there:
            return
        try:
            with uninterrupted():
                note = sourcenote.read(self._volumes, source)
                if note is None or note.state != "sending":
                    return
                note = takenback.let_go(self._volumes, self._domains, source, note)
        except Exception as error:
            raise VolumeError(
                f"{str(why) or 'interrupted'}; and what was shut down for the move is not as it"
                f" was: {error}"
            ) from why
        if self._has_part is not None:
            self._tell(source, note, has_part=self._has_part or self._remote.may_have)

    def _alone(self, source: Volume) -> AbstractContextManager[None]:
        work = (source.uuid, f"volume {source.path} is being moved")
        return locked(self._volumes.client.path.parent, work)

    def _place(self, source: Volume, note: HostNote | None, wanted: HostMove) -> str:
        """Returns LVSTORE/NAME on the other host.

        Raises:
            VolumeError: the volume is on its way to another place, or has moved and was kept.
        """
        to = wanted.to or (note.to if note is not None else source.path)
        to = "/".join(split_path(to if "/" in to else f"{to}/{source.name}"))
        if note is None:
            return to
        if note.is_kept:
            raise VolumeError(
                f"volume {source.path} has moved to {note.place}, and was kept: delete it when"
                " nobody needs it any more"
            )
        if (note.host, note.to) != (self._remote.host, to):
            raise VolumeError(
                f"volume {source.path} is on its way to {note.place}: complete that, by the same"
                f" command, or give it up (--host {note.host} --abort)"
            )
        return to

    def _ask(self, do: str, source: Volume, to: str, **values: object) -> Message:
        return self._remote.ask(do, of=source.uuid, to=to, **values)

    # What is sent

    def _send_all(
        self, source: Volume, note: HostNote, wanted: HostMove, domain: LeavingDomain | None
    ) -> HostNote:
        """Sends all of the volume, until it counts on the other host."""
        part = self._prepare(source, note, wanted, domain)
        goes_along = domain.uuid if domain is not None and wanted.with_vm else None
        note = sourcenote.write(self._volumes, source, note, domain=goes_along)
        self._has_part = bool(part.get("there"))
        base = self._common(source, part)
        if self._has_part and base is None:
            self._ask("cancel", source, note.to)
            self._has_part = False
        movesnapshots.delete(self._copying, source, keep=base.name if base else None)
        if domain is not None and domain.is_running:
            base = self._send_while_used(source, note, wanted, base)
        note = self._send_last(source, note, wanted, base, domain)
        return self._moved(source, note)

    def _prepare(
        self, source: Volume, note: HostNote, wanted: HostMove, domain: LeavingDomain | None
    ) -> Message:
        """Asks the other host whether the volume may come; returns what is there of it."""
        earlier = movesnapshots.of(self._volumes, source)
        goes_along = domain if wanted.with_vm else None
        return self._ask(
            "prepare",
            source,
            note.to,
            size=source.size,
            allocated=source.allocated + sum(each.allocated for each in earlier),
            thin=note.thin,
            block_size=source.block_size,
            key=wanted.key or source.key,
            domain=goes_along and sourcechecks.needs(self._volumes, source, goes_along),
        )

    def _common(self, source: Volume, part: Message) -> Volume | None:
        """Returns the last snapshot that both hosts have of the volume; None: there is none."""
        last = part.get("last")
        parent = source.parent
        for each in movesnapshots.of(self._volumes, source):
            if each.name == parent and each.name == f"{source.name}@{last}":
                return each
            if each.name == parent:
                parent = each.parent
        return None

    def _send_while_used(
        self, source: Volume, note: HostNote, wanted: HostMove, base: Volume | None
    ) -> Volume:
        """Sends what there is, and what changed meanwhile, until that is little."""
        before: int | None = None
        for _ in range(STEPS_MAX):
            taken = movesnapshots.take(self._copying, source)
            pages = self._volumes.ranges(taken.uuid, base.uuid if base else None)
            changed = sum(length for page in pages for _, length in page)
            self._send(source, note, wanted, taken, base)
            base = taken
            movesnapshots.delete(self._copying, source, keep=base.name)
            if changed <= SMALL_BYTES or (before is not None and changed > before * LESS):
                break
            before = changed
        assert base is not None
        return base

    def _send(
        self, source: Volume, note: HostNote, wanted: HostMove, taken: Volume, base: Volume | None
    ) -> None:
        """Sends a snapshot, which the other host has, durably, then."""
        xattrs = moverequest.carried(self._volumes, source)
        if xattrs.get(notes.IDENTITY) == source.uuid:
            del xattrs[notes.IDENTITY]
        what = f"sending {source.path}" + (", what changed" if base is not None else "")

        def write(out: ChunkWriter) -> None:
            def told(done: int, total: int) -> None:
                out.still_there()
                self._progress(done, total, now=what)

            sending.send(
                self._volumes,
                taken.uuid,
                base.uuid if base else None,
                cast(BinaryIO, out),
                told,
            )

        answer, self._last = self._remote.stream(
            write,
            of=source.uuid,
            to=note.to,
            thin=note.thin,
            key=wanted.key or source.key,
            xattrs=xattrs,
            **{"from": f"{socket.gethostname()}:{source.path}"},
        )
        self._sent += self._last
        size = answer.get("size")
        found = (answer.get("uuid"), answer.get("snapshot"), size)
        expected = (source.uuid, sending.name_of(taken), taken.size)
        if found[:2] != expected[:2] or not isinstance(size, int) or size < taken.size:
            raise VolumeError(
                f"{note.place} is not what was sent: UUID, snapshot and size are"
                f" {ascii(found)[:200]}, and should be {expected}"
            )

    def _send_last(
        self,
        source: Volume,
        note: HostNote,
        wanted: HostMove,
        base: Volume | None,
        domain: LeavingDomain | None,
    ) -> HostNote:
        """Sends the rest, when nobody uses the volume any more, or begins to."""
        if domain is not None and domain.is_running:
            # Also for a command that goes on with it: then it is shut off by then.
            note = sourcenote.write(
                self._volumes, source, note, was_running=True, shut_down=domain.uuid
            )
            self._begun = time.monotonic()
            domain.shut_down(self._ping)
        sourcenote.hold(self._volumes, source, note)
        self._wait_unused(source)
        if self._domains is not None:  # one may have been saved in place of shut down
            self._domains.check_none_saved(source.path)
        taken = movesnapshots.take(self._copying, source)
        self._send(source, note, wanted, taken, base)
        self._check_unchanged(source, taken)
        return note

    def _ping(self) -> None:
        if time.monotonic() - self._pinged > PING_S:
            self._pinged = time.monotonic()
            self._remote.ask("ping")

    def _wait_unused(self, source: Volume) -> None:
        end = time.monotonic() + UNUSED_S
        while users := self._volumes.users(source.uuid):
            if time.monotonic() > end:
                raise VolumeError(f"volume {source.path} is in use ({', '.join(users)})")
            self._ping()
            time.sleep(LOOK_S)

    def _check_unchanged(self, source: Volume, taken: Volume) -> None:
        """Checks that the volume is what its last snapshot is, and that nobody uses it.

        Raises:
            VolumeError: it is not, or somebody does.
        """
        now = self._volumes.volume(source.uuid)
        moverequest.check_movable(self._volumes, now, to_host=True)
        if users := self._volumes.users(now.uuid):
            raise VolumeError(f"volume {now.path} is in use again ({', '.join(users)})")
        changed = any(self._volumes.ranges(now.uuid, taken.uuid))
        if changed or (now.parent, now.size) != (taken.name, taken.size):
            raise VolumeError(f"volume {now.path} was changed while the last of it was sent")
        if notes.MOVED not in self._volumes.xattrs(now.uuid):
            raise VolumeError(f"somebody has had volume {now.path} be a disk again ({notes.MOVED})")

    def _tell(self, source: Volume, note: HostNote, *, has_part: bool) -> None:
        """Says what stands; without a part on the other host nothing stays here of the move."""
        counts = f"volume {source.path} counts, as before"
        if not has_part:
            self.stands = f"{counts}; what the move has left at it goes by --abort"
            with suppress(TargetError, VolumeError):
                takenback.forget(self._volumes, self._copying, source, note)
                self.stands = counts
            return
        self.stands = (
            f"{counts}; {note.place} has what was sent, and is no disk: the same command goes on"
            " with that, and with --abort it goes"
        )

    # When the other host has all

    def _moved(self, source: Volume, note: HostNote) -> HostNote:
        """Notes that the volume counts on the other host."""
        with deferred():
            self._may_count_there = True
            self.stands = (
                f"which of volume {source.path} and {note.place} counts is not known, and none of"
                " them is a disk: the same command finds out, and goes on"
            )
            return sourcenote.write(self._volumes, source, note, state="moved")

    def _complete(self, source: Volume, note: HostNote, wanted: HostMove) -> HostMoved:
        """Does what is left, when the volume counts on the other host."""
        self.stands = (
            f"volume {source.path} is {note.place} now, which counts: the same command does what is"
            " left"
        )
        completion = Completion(self._volumes, self._copying, self._domains, self._remote)
        return HostMoved(
            volume=self._volumes.volume(source.uuid),
            completed=completion.complete(source, note, keep=wanted.keep),
            sent=self._sent,
            last=self._last,
            begun=self._begun,
        )
