"""The snapshots that a volume is made of, one below the other, and their merging.

All of it blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plugin.gateway.lvolcheckpoints import MARK, XATTR
from pydataplane.errors import VolumeError, VolumeNotFoundError
from pydataplane.lvols import Volume
from pydataplane.volumes import Volumes


@dataclass(frozen=True)
class Range:
    """What of a chain is to be merged, as libvirt names it: from `base` up to what is below `top`.

    Each by its path, its name or its UUID.
    """

    top: str | None = None
    """None: the volume itself."""
    base: str | None = None
    """None: the lowest of the volume's own snapshots."""
    shallow: bool = False
    """The one below `top` alone."""


def merged_by(volumes: Volumes, volume: str, wanted: Range, prefix: str) -> list[str]:
    """Returns the UUIDs of the snapshots that go, the nearest to the volume first.

    Those of checkpoints stay. `prefix` is what the paths of disks begin with.

    Raises:
        VolumeError: there are none, or other volumes need one.
    """
    links = _chain(volumes, volume)
    own = links[0]
    top = _index(links, wanted.top, prefix) if wanted.top is not None else 0
    below = links[top + 1 :]
    kept = _checkpoints(volumes, below)
    if wanted.base is not None:
        last = _index(links, wanted.base, prefix)
        if last <= top:
            raise VolumeError(f"{links[last].path} is not below {links[top].path}: swap the two")
        going = links[top + 1 : last + 1]
    else:
        going = _own(volumes, own, below)
    going = [each for each in going if each.uuid not in kept]
    if wanted.shallow:
        going = going[:1]
    if not going:
        raise VolumeError(
            f"{links[top].path} has no snapshot of its own below it: take one first"
            " (`virsh snapshot-create-as --disk-only --no-metadata`)"
        )
    for each in going:
        _check_alone(volumes, each)
    return [each.uuid for each in going]


def merge(volumes: Volumes, snapshots: Sequence[str]) -> None:
    """Deletes snapshots (UUIDs) that are there; what lies above each gets what it had.

    Safe to repeat.

    Raises:
        VolumeError: another volume needs one.
        TargetError: the target refuses.
    """
    for uuid in snapshots:
        try:
            snapshot = volumes.volume(uuid)
        except VolumeNotFoundError:
            continue
        _check_alone(volumes, snapshot)
        volumes.client.call("bdev_lvol_delete", name=uuid)


def _chain(volumes: Volumes, volume: str) -> list[Volume]:
    links = [volumes.volume(volume)]
    while links[-1].parent is not None:
        links.append(volumes.volume(f"{links[-1].lvstore}/{links[-1].parent}"))
    return links


def _index(links: Sequence[Volume], name: str, prefix: str) -> int:
    for number, each in enumerate(links):
        if name.removeprefix(prefix) in (each.path, each.name, each.uuid):
            return number
    chain = ", ".join(f"{prefix}{each.path}" for each in links)
    raise VolumeError(f"{name} is not in the chain of {links[0].path}: that is {chain}")


def _own(volumes: Volumes, volume: Volume, below: Sequence[Volume]) -> list[Volume]:
    """Returns the volume's own snapshots, as far down as nothing else needs them."""
    found = []
    for each in below:
        if not each.name.startswith(f"{volume.name}@") or len(volumes.clones(each.uuid)) != 1:
            break
        found.append(each)
    return found


def _checkpoints(volumes: Volumes, snapshots: Sequence[Volume]) -> set[str]:
    uuids = [each.uuid for each in snapshots if MARK in each.name]
    xattrs = volumes.client.call_for_each(
        "virtlun_lvol_get_xattrs", uuids, lambda uuid: {"name": uuid}
    )
    return {uuid for uuid, noted in xattrs.items() if XATTR in noted}


def _check_alone(volumes: Volumes, snapshot: Volume) -> None:
    clones = volumes.clones(snapshot.uuid)
    if len(clones) > 1:
        names = " and ".join(f"{snapshot.lvstore}/{name}" for name in sorted(clones))
        raise VolumeError(
            f"{names} are clones of {snapshot.path}: give the others all that they lack"
            " (`virtlun volume inflate`), or name a base above it"
        )
