"""A volume becomes an image: `virtlun volume export`.

What is copied is a snapshot that nobody else uses: of a volume one that is taken for it, of a
snapshot a clone of it. The image is FILE.part until all is copied, and beside it stands how far the
copy has come: the same command goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from itertools import chain
from pathlib import Path

from plugin.images import pieces, qemuimg, sums
from plugin.images.qemuimg import Image
from pydataplane.errors import METHOD_NOT_FOUND, RpcError, VolumeError, VolumeNotFoundError
from pydataplane.lvols import Volume
from pydataplane.volumenames import with_suffix
from pydataplane.volumes import Volumes

PART, STATE = ".part", ".part.json"


def export_image(
    volumes: Volumes,
    reference: str,
    file: Path,
    form: str,
    *,
    verify: pieces.Progress | None,
    progress: pieces.Progress,
) -> tuple[Image, str | None]:
    """Writes a volume, as it is now, or a snapshot to `file`, in use or not.

    With `verify`, which is told how far that has come, both are read in the end and compared, and
    the SHA-256 of what the image holds is returned beside it. Safe to repeat after any
    interruption: it goes on where it was, with what the volume had then.

    Raises:
        VolumeError: there is such a file, or the two differ.
    """
    if file.exists():
        raise VolumeError(f"{file} exists already: choose another name, or delete it")
    of = volumes.volume(reference)
    name = with_suffix(of.name.split("@")[0], f"@export-{_digest(file)}")
    frozen, begin = _begun(volumes, of, name, file, form)
    part = file.with_name(file.name + PART)
    try:
        path = volumes.export(frozen.uuid, read_only=True)
    except RpcError as error:
        if error.code == METHOD_NOT_FOUND:  # nor will it be possible later
            volumes.delete(frozen.uuid)
        raise
    try:
        if begin is None:
            qemuimg.make(part, form, frozen.size)
            begin = 0
        source = Image(path, "raw", frozen.size)
        target = Image(part.absolute(), form, frozen.size)

        def note(done: int) -> None:
            _note(file, {"volume": of.uuid, "copied": frozen.uuid, "format": form, "done": done})

        note(begin)
        data = chain.from_iterable(volumes.ranges(frozen.uuid))
        pieces.copy(source, target, data, begin, note, progress)
        ours, theirs = sums.contents(source, target, verify) if verify else (None, None)
    finally:
        volumes.end_export(frozen.uuid)
    if ours != theirs:
        raise VolumeError(
            f"{part} is not as volume {of.path} was: it has the SHA-256 {theirs}, the volume "
            f"{ours}; delete it and export the volume again"
        )
    volumes.delete(frozen.uuid)
    file.with_name(file.name + STATE).unlink()
    part.rename(file)
    return Image(file.absolute(), form, frozen.size), theirs


def _begun(
    volumes: Volumes, of: Volume, name: str, file: Path, form: str
) -> tuple[Volume, int | None]:
    """Returns what is to be copied, and the bytes of it that are done; None: nothing is there yet.

    What an earlier call of another volume or format left is deleted.
    """
    state: dict[str, object] = {}
    with suppress(FileNotFoundError, ValueError):
        state = json.loads(file.with_name(file.name + STATE).read_text())
    with suppress(VolumeNotFoundError):
        present = volumes.volume(f"{of.lvstore}/{name}")
        same = (state.get("volume"), state.get("format")) == (of.uuid, form)
        done = state.get("done")
        there = file.with_name(file.name + PART).exists()
        if same and there and state.get("copied") == present.uuid and isinstance(done, int):
            return present, done
        volumes.end_export(present.uuid)
        volumes.delete(present.uuid)
    if of.snapshot:
        return volumes.clone(of.uuid, name), None
    volumes.client.call("bdev_lvol_snapshot", lvol_name=of.uuid, snapshot_name=name)
    return volumes.volume(f"{of.lvstore}/{name}"), None


def _digest(file: Path) -> str:
    return hashlib.sha256(os.fsencode(file.absolute())).hexdigest()[:8]


def _note(file: Path, state: dict[str, object]) -> None:
    """Writes how far the copy has come, durably and all at once."""
    path = file.with_name(file.name + STATE)
    new = path.with_suffix(".new")
    with new.open("w") as written:
        json.dump(state, written)
        written.flush()
        os.fsync(written.fileno())
    new.rename(path)
