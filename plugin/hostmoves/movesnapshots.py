"""The snapshots that a move takes to send them, `VOLUME@move-XXXXXXXX`, on both hosts.

They are known by an xattr: one that somebody has taken may be called so, too.
"""

from __future__ import annotations

import secrets

from plugin.moves.moverequest import HOST_SNAPSHOT, is_of_host_move
from plugin.streams import sending
from pydataplane.errors import VolumeError
from pydataplane.lvols import Volume
from pydataplane.volumenames import NAME_MAX
from pydataplane.volumes import Volumes

PREFIX = "move-"


def take(volumes: Volumes, source: Volume) -> Volume:
    """Takes a snapshot with a name that none had before: one of the same name is the same."""
    name = f"{PREFIX}{secrets.token_hex(4)}"
    (taken,) = volumes.snapshot([source.uuid], name, noted(source.uuid))
    return taken


def noted(uuid: str) -> dict[str, str]:
    """Returns what is noted at those of a volume (its UUID), from their beginning."""
    return {HOST_SNAPSHOT: uuid}


def check_name(name: str) -> None:
    """Refuses the name of a volume whose snapshots would have too long ones.

    Raises:
        VolumeError: it is one.
    """
    most = NAME_MAX - len(f"@{PREFIX}") - 8
    if len(name) > most:
        raise VolumeError(
            f"{name} is longer than {most} characters, and the snapshots of a move to another host"
            " have more: give the volume a shorter name"
        )


def of(volumes: Volumes, volume: Volume) -> list[Volume]:
    """Returns those of a volume, the last one first."""
    return [each for each in volumes.snapshots(volume) if is_of_host_move(volumes, each, volume)]


def delete(volumes: Volumes, volume: Volume, keep: str | None = None) -> None:
    """Deletes those of a volume but the one that is called `keep`, VOLUME@NAME; safe to repeat.

    `volumes` waits for calls that take their time.
    """
    snapshots = of(volumes, volume)
    if any(each.name != keep for each in snapshots):
        sending.sweep(volumes, volume.lvstore)  # a clone of a command that was killed
    for each in reversed(snapshots):
        if each.name != keep:
            volumes.delete(each.uuid, missing_ok=True)


def end(volumes: Volumes, volume: Volume, *, thin: bool) -> None:
    """Deletes all of a volume, which is thick then again if it was; safe to repeat."""
    delete(volumes, volume)
    if not thin:
        volumes.inflate(volume.uuid)
