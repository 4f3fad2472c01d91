"""An image becomes a volume: `virtlun volume import`.

It is made under another name and gets its own when all is copied, so that nobody takes a part for
the whole. A xattr of it says how far the copy has come, and of what: the same command goes on.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from plugin.images import pieces, qemuimg, sums
from plugin.images.qemuimg import Image
from pydataplane.errors import VolumeError, VolumeNotFoundError
from pydataplane.lvols import Volume
from pydataplane.volumenames import split_path, with_suffix
from pydataplane.volumes import Volumes

XATTR = "virtlun.import"
SUFFIX = ".import"
"""Of its name until all is copied."""


def import_image(
    volumes: Volumes,
    source: Image,
    reference: str,
    size: int | None,
    *,
    thin: bool,
    verify: pieces.Progress | None,
    progress: pieces.Progress,
) -> tuple[Volume, str | None]:
    """Makes the volume `reference` with the contents of an image, and zeros up to `size` bytes.

    With `verify`, which is told how far that has come, both are read in the end and compared, and
    the SHA-256 of all that the volume holds is returned beside it. Safe to repeat after any
    interruption: it goes on where it was, unless the image has changed.

    Raises:
        VolumeError: there is such a volume, the size is less than the image's, or the two differ.
    """
    lvstore, name = split_path(reference)
    if size is not None and size < source.size:
        raise VolumeError(
            f"{source.path} has {source.size} bytes, {size} are fewer: leave out --size"
        )
    of: dict[str, object] = {"path": str(source.path), "version": list(source.version or ())}
    with suppress(VolumeNotFoundError):
        present = volumes.volume(reference)
        if _noted(volumes, present.uuid) == of | {"done": source.size}:
            found = None
            if verify is not None:
                path = volumes.export(present.uuid, read_only=True)
                try:
                    found = _verified(source, present, path, verify)
                finally:
                    volumes.end_export(present.uuid)
            return _finished(volumes, present), found
        raise VolumeError(f"volume {present.path} exists already: choose another name")
    volume, begin = _begun(
        volumes, f"{lvstore}/{with_suffix(name, SUFFIX)}", of, size or source.size, thin=thin
    )

    def note(done: int) -> None:
        volumes.set_xattr(volume.uuid, XATTR, json.dumps(of | {"done": done}))

    path = volumes.export(volume.uuid)
    try:
        target = Image(path, "raw", volume.size)
        pieces.copy(source, target, qemuimg.data_of(source), begin, note, progress)
        found = _verified(source, volume, path, verify)
    finally:
        volumes.end_export(volume.uuid)
    note(source.size)
    return _finished(volumes, volumes.rename(volume.uuid, name)), found


def _verified(
    source: Image, volume: Volume, path: Path, verify: pieces.Progress | None
) -> str | None:
    """Returns the SHA-256 of a volume that `path` shows, with `verify`.

    Raises:
        VolumeError: its image has another, or has changed.
    """
    theirs = ours = None
    if verify is not None:
        theirs, ours = sums.contents(source, Image(path, "raw", volume.size), verify)
    begin = f"volume {volume.path} is not as {source.path} is"
    # It was looked at first whether it names other files of this host.
    if qemuimg.version_of(source.path) != source.version:
        raise VolumeError(f"{begin}: that was changed meanwhile; import it again")
    if theirs != ours:
        raise VolumeError(
            f"{begin}: it has the SHA-256 {ours}, the image {theirs}; delete it, unless somebody "
            "has written to it, and import it again"
        )
    return ours


def _noted(volumes: Volumes, uuid: str) -> dict[str, object]:
    """Returns what a volume is imported from, and how far; nothing where it is not imported."""
    noted: dict[str, object] = json.loads(volumes.xattrs(uuid).get(XATTR, "{}"))
    return noted


def _finished(volumes: Volumes, volume: Volume) -> Volume:
    volumes.remove_xattr(volume.uuid, XATTR)
    return volume


def _begun(
    volumes: Volumes, reference: str, of: dict[str, object], size: int, *, thin: bool
) -> tuple[Volume, int]:
    """Returns the volume to copy to, and the bytes of it that are done.

    One of another image, or of what this one was before, is made anew.
    """
    with suppress(VolumeNotFoundError):
        present = volumes.volume(reference)
        noted = _noted(volumes, present.uuid)
        done = noted.pop("done", None)
        if not isinstance(done, int):
            raise VolumeError(
                f"volume {present.path} exists already, and is of no import: rename or delete it"
            )
        wanted = -(-size // (1 << 20)) << 20
        if noted == of and present.thin == thin and present.size >= wanted:
            return present, done
        volumes.end_export(present.uuid)
        volumes.delete(present.uuid)
    xattrs = {XATTR: json.dumps(of | {"done": 0})}
    return volumes.create(reference, size, thin=thin, xattrs=xattrs), 0
