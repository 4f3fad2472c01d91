"""What is left of a move when the volume counts on the other host; all of it is safe to repeat."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from plugin.hostmoves import movesnapshots, sourcenote
from plugin.hostmoves.handover import LeavingDomain
from plugin.hostmoves.remote import Remote
from plugin.hostmoves.sourcenote import HostNote
from plugin.moves import moverequest, notes
from plugin.moves.naming import Domains
from pydataplane.errors import VolumeError
from pydataplane.lvols import Volume
from pydataplane.volumenames import split_path
from pydataplane.volumes import Volumes


@dataclass(frozen=True)
class Completed:
    """What became of a move."""

    path: str
    """LVSTORE/NAME on the other host."""
    at: float
    """When the VM was started there, or could be, in seconds of the monotonic clock."""
    domain: str | None
    """The domain that went along."""
    naming: list[str]
    """The domains here that name the volume still."""


class Completion:
    """Of moves from this host to one other."""

    def __init__(
        self, volumes: Volumes, copying: Volumes, domains: Domains | None, remote: Remote
    ) -> None:
        """As for `HostMover`; `remote` is connected."""
        self._volumes, self._copying, self._domains = volumes, copying, domains
        self._remote = remote

    def complete(self, source: Volume, note: HostNote, *, keep: bool) -> Completed:
        """Does it; what is here goes last, or is kept.

        Raises:
            VolumeError, TargetError, libvirt's: something is left to be done.
        """
        path = self._finish(source, note)
        domain = self._domain(note)
        if domain is not None:
            note = self._hand_over(source, note, domain, path)
        at = time.monotonic()
        self._remote.ask("clean", of=source.uuid, to=note.to, thin=note.thin)
        movesnapshots.delete(self._copying, source)
        if keep:
            sourcenote.write(self._volumes, source, note, is_kept=True)
        else:
            if domain is not None:
                domain.undefine()
            self._copying.delete(source.uuid)
        naming = self._domains.naming(source.path) if self._domains is not None else []
        return Completed(path, at, domain.name if domain is not None else None, naming)

    def _hand_over(
        self, source: Volume, note: HostNote, domain: LeavingDomain, path: str
    ) -> HostNote:
        """Has the domain be defined there, and run if the move shut it down: each of them once.

        What people there have done with it since stays. Returns what is noted then.
        """
        if note.handed_over == "started" or (note.handed_over and not note.was_running):
            return note
        self._remote.ask(
            "define",
            of=source.uuid,
            to=note.to,
            domain=domain.uuid,
            xml=domain.xml_on(source.path, path),
            autostart=domain.starts_with_host,
            again=note.handed_over == "defined",
        )
        note = sourcenote.write(self._volumes, source, note, handed_over="defined")
        if note.was_running:
            self._remote.ask("start", of=source.uuid, domain=domain.uuid)
            note = sourcenote.write(self._volumes, source, note, handed_over="started")
        return note

    def _finish(self, source: Volume, note: HostNote) -> str:
        """Has the volume be a disk there, and none here; returns what it is called there."""
        sourcenote.hold(self._volumes, source, note)
        if users := self._volumes.users(source.uuid):
            raise VolumeError(
                f"volume {source.path} is in use ({', '.join(users)}), though it is noted to have"
                " moved: shut that down if it is to count there"
            )
        limits = moverequest.limits_by_hand(self._volumes, source.uuid).given
        answer = self._remote.ask("finish", of=source.uuid, to=note.to, limits=limits)
        if answer.get("is_gone"):
            raise VolumeError(
                f"volume {source.path} has moved to {note.place}, and is not there any more: if it"
                " has gone on from there, delete the one here; if it was lost before anybody used"
                f" it there, have the one here count again: remove its xattrs {notes.HOST} and"
                f" {notes.MOVED} (virtlun_lvol_remove_xattr)"
            )
        return "/".join(split_path(str(answer.get("path"))))

    def _domain(self, note: HostNote) -> LeavingDomain | None:
        """Returns the domain that goes along; None: none does, or it has."""
        if note.domain is None:
            return None
        if self._domains is None:
            raise VolumeError(
                f"domain {note.domain} is to go along, and no gateway answers, which knows it:"
                " start virtlun-gateway"
            )
        handle: Any = self._domains.of_uuid(note.domain)
        return LeavingDomain(self._domains, handle) if handle is not None else None
