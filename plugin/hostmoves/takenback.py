"""What a move has done to the volume and the VM here, taken back: the volume still counts here."""

from __future__ import annotations

from plugin.hostmoves import movesnapshots, sourcenote
from plugin.hostmoves.handover import LeavingDomain
from plugin.hostmoves.sourcenote import HostNote
from plugin.moves.naming import Domains
from pydataplane.errors import VolumeError
from pydataplane.lvols import Volume
from pydataplane.volumes import Volumes


def let_go(volumes: Volumes, domains: Domains | None, source: Volume, note: HostNote) -> HostNote:
    """Has the volume be a disk again, and the VM run that the move, or one before, has shut down.

    Returns what is noted then. Safe to repeat.

    Raises:
        VolumeError: the VM is not there any more; libvirt's: it cannot be started.
    """
    sourcenote.free(volumes, source)
    if not note.was_running:
        return note
    _start(domains, source, note.shut_down)
    return sourcenote.write(volumes, source, note, was_running=False)


def _start(domains: Domains | None, source: Volume, uuid: str | None) -> None:
    handle = domains.of_uuid(uuid) if domains is not None and uuid is not None else None
    if domains is None or handle is None:
        who = "no gateway answers" if domains is None else "libvirt knows it no more"
        raise VolumeError(
            f"domain {uuid} was shut down for the move of {source.path}, and stays off, as {who}:"
            " start it"
        )
    try:
        LeavingDomain(domains, handle).start()
    except domains.libvirt.libvirtError as error:
        raise VolumeError(
            f"domain {handle.name()} was shut down for the move of {source.path}, and cannot be"
            f" started: {error}"
        ) from error


def forget(volumes: Volumes, copying: Volumes, source: Volume, note: HostNote) -> None:
    """Takes away what the move has left at the volume here; safe to repeat.

    `copying` waits for calls that take their time.
    """
    sourcenote.free(volumes, source)
    movesnapshots.end(copying, source, thin=note.thin)
    volumes.remove_xattr(source.uuid, sourcenote.XATTR)
