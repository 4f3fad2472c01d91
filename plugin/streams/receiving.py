"""A stream becomes a volume, or what a volume has changed: `virtlun volume receive`.

While it is written to, and also if the command is killed, the volume is exported, so that no VM
begins to use it. Until all is there it has another name, so that nobody takes a part for the whole,
and a xattr says what is being received. What an interrupted command left, the next one of the same
volume takes back: the volume is its last snapshot again, or is not there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from plugin import volumefile
from plugin.images.pieces import Progress
from plugin.signals import uninterrupted
from plugin.streams.form import Header, Reader
from plugin.volumelocks import locked
from pydataplane.errors import NO_DEVICE, RpcError, TargetError, VolumeError, VolumeNotFoundError
from pydataplane.lvols import Volume
from pydataplane.volumenames import NAME_MAX, VOLUME_NAME, split_path, with_suffix
from pydataplane.volumes import Volumes

XATTR = "virtlun.receive"
CLAIM_XATTR = "csi.volume"
"""By which Kubernetes' driver knows the volumes of claims."""
BEFORE_XATTR = "csi.volume.before"
"""Where that stands from then on: by it the driver knows its volume outside of Kubernetes."""
FORMATTING_XATTR = "csi.formatting"
"""By which it knows that its mkfs was cut off: it makes a file system over what is there then."""
SUFFIX = ".receive"
"""Of its name until all is there."""


@dataclass(frozen=True)
class New:
    """How a volume is made that is not there yet."""

    thin: bool = False
    key: str | None = None
    """The name of what it is encrypted with."""
    uuid: str | None = None
    """None: a random one."""
    xattrs: Mapping[str, str] = field(default_factory=dict)
    """That it has from the beginning."""


@dataclass(frozen=True)
class _Work:
    """What a volume's xattr says: of which stream it is being made."""

    since: str | None
    to: str | None
    was: int
    """Bytes that it had before; 0: it was not there."""
    whole: bool = False
    """Whether all is there, durably: only the snapshot and the name are missing."""
    back: bool = False
    """Whether it is as it was: only the name is missing."""


class Receiver:
    """Makes one volume of a stream, or changes it as one says."""

    def __init__(self, volumes: Volumes, patient: Volumes, reference: str) -> None:
        """`patient` waits for what writes a whole volume.

        Raises:
            VolumeError: `reference` is no name of a volume that can be received.
        """
        lvstore, self._name = split_path(reference)
        store = volumes.lvstore(lvstore)
        self._path = f"{store.name}/{self._name}"
        self._partial = f"{store.name}/{with_suffix(self._name, SUFFIX)}"
        self._volumes, self._patient, self._store = volumes, patient, store
        self.is_done = False
        """Whether the volume is there, whole."""
        if store.is_pool:
            raise VolumeError(f"{self._path} is of a pool: have `rbd import-diff` read the stream")
        if "@" in self._name:
            raise VolumeError(f"{self._path} is a snapshot: name the volume that is to have it")
        if self._name.endswith(SUFFIX):
            raise VolumeError(
                f"{self._path} is what a volume is called until it is whole: choose another name"
            )

    def receive(
        self,
        stream: Reader,
        new: New,
        progress: Progress,
        noted: Mapping[str, str] = MappingProxyType({}),
    ) -> Volume:
        """Returns the volume, with the snapshot that the stream is of; `new` is of a new one.

        `noted` are the xattrs of the snapshot, from its beginning.
        If anything fails, the volume is as it was before, or is not there.

        Raises:
            VolumeError: the stream is damaged, or does not begin with what the volume has.
        """
        header = stream.header
        self._check_names(header)
        with self._alone():
            self._end_left()
            if header.to is not None and (there := self._find(f"{self._path}@{header.to}")):
                raise VolumeError(
                    f"snapshot {there.path} is there already: the stream was received before, or"
                    " is of another one of that name; delete it to receive that"
                )
            if header.since is None:
                volume = self._make(header, new)
            elif new != New():
                raise VolumeError(
                    f"the stream is of what changed in {self._path}: --thin, --key and --uuid are "
                    "of new volumes"
                )
            else:
                volume = self._volume_of(header)
            return self._fill(volume, stream, progress, noted)

    def _check_names(self, header: Header) -> None:
        for name in (header.since, header.to):
            if name is None:
                continue
            snapshot = f"{self._name}@{name}"
            if not VOLUME_NAME.fullmatch(snapshot):
                raise VolumeError(
                    f"the stream calls a snapshot {name!r}, which no snapshot of a volume is "
                    "called: name it with letters, digits, '.', '_' and '-' where it comes from"
                )
            if len(snapshot) > NAME_MAX:
                raise VolumeError(
                    f"{snapshot} would be longer than {NAME_MAX} characters: name the volume or "
                    "the snapshot shorter"
                )
        if header.since is not None and header.since == header.to:
            raise VolumeError(
                f"the stream is of what changed since {header.since} to {header.since}, which no "
                "sender sends"
            )

    def _find(self, reference: str) -> Volume | None:
        with suppress(VolumeNotFoundError):
            return self._volumes.volume(reference)
        return None

    def take_back(self) -> None:
        """Takes back what an interrupted command left, or completes it; nothing where none did.

        Raises:
            VolumeError: somebody has changed it since, or has made a volume that is in the way.
        """
        with self._alone():
            self._end_left()

    def _alone(self) -> AbstractContextManager[None]:
        work = (self._path, f"{self._path} is being received, or moved")
        return locked(self._volumes.client.path.parent, work)

    # What an interrupted command left

    def _end_left(self) -> None:
        """Completes what only lacked its name, and takes back what is not whole.

        Raises:
            VolumeError: a volume is in the way that no such command has made, or that somebody has
                changed since.
        """
        with uninterrupted():
            if (named := self._find(self._path)) is not None:
                self._clear(named)
            if (partial := self._find(self._partial)) is not None:
                self._complete_or_undo(partial.uuid)

    def _clear(self, named: Volume) -> None:
        """Clears a volume that has its name of the note of a command that was killed.

        Raises:
            VolumeError: it is not whole, and has its name by somebody's hand.
        """
        text = self._volumes.xattrs(named.uuid).get(XATTR)
        if text is None:
            return
        work = _read(text)
        is_named = work is not None and (work.whole or work.back)
        if not is_named:
            base = None if work is None or work.since is None else f"{named.path}@{work.since}"
            if base is None or not self._is_as(named, base, work.was if work else 0):
                raise VolumeError(
                    f"volume {named.path} is not whole, and has this name by hand: rename it to "
                    f"{self._partial.split('/')[1]}, and it is taken back"
                )
        self._volumes.remove_xattr(named.uuid, XATTR)
        if not is_named:
            self._volumes.end_export(named.uuid)  # which it has made, and not written to

    def _is_as(self, volume: Volume, base: str, size: int) -> bool:
        """Whether a volume has that size, and nothing was written to it since a snapshot."""
        snapshot = self._find(base)
        return (
            snapshot is not None
            and (volume.parent, volume.size) == (snapshot.name, size)
            and not any(self._volumes.ranges(volume.uuid, snapshot.uuid))
        )

    def _complete_or_undo(self, uuid: str) -> Volume | None:
        """Completes what only lacks its name, and returns it; takes back what is not whole.

        Raises:
            VolumeError: it is of no stream, somebody has changed it since, or another volume has
                its name by now.
        """
        volume = self._volumes.volume(uuid)
        work = _read(self._volumes.xattrs(uuid).get(XATTR, ""))
        if work is None:
            raise VolumeError(
                f"volume {volume.path} exists already, and is of no stream: rename or delete it"
            )
        if work.whole and (work.to is None or volume.parent == f"{self._name}@{work.to}"):
            return self._name_whole(volume)
        self._take_back(volume, work)
        return None

    def _take_back(self, volume: Volume, work: _Work) -> None:
        """Has a volume be as it was: its last snapshot, or nothing."""
        base = None if work.since is None else f"{self._name}@{work.since}"
        if volume.parent != base:
            raise VolumeError(
                f"volume {volume.path} is not whole, and its last snapshot is "
                f"{volume.parent or 'none'}, not {base or 'none'}, as it was when an interrupted "
                "command began to receive it: delete it, or give it another name"
            )
        if base is None:
            self._volumes.end_export(volume.uuid)
            self._volumes.delete(volume.uuid)
            return
        self._check_free(volume)
        if not work.back:
            self._volumes.end_export(volume.uuid)
            snapshot = self._volumes.volume(f"{volume.lvstore}/{base}")
            back = self._patient.roll_back(volume.uuid, snapshot.uuid)
            if back.size != work.was:
                self._volumes.resize(back.uuid, work.was)
            self._volumes.set_xattr(back.uuid, XATTR, _text(replace(work, back=True)))
        self._give_name(volume)

    def _check_free(self, volume: Volume) -> None:
        other = self._find(self._path)
        if other is not None and other.uuid != volume.uuid:
            raise VolumeError(
                f"volume {volume.path} is to be called {other.path}, which was made meanwhile: "
                f"rename that one, then `virtlun volume receive --take-back {other.path}`"
            )

    def _name_whole(self, volume: Volume) -> Volume:
        """Gives a volume its name, to which only that is missing."""
        self._check_free(volume)
        self._volumes.end_export(volume.uuid)
        # Of what it was, which is older than what it has received. Kubernetes' driver is to take it
        # over anew, and makes no file system over what came.
        self._volumes.remove_xattr(volume.uuid, FORMATTING_XATTR)
        if (owner := self._volumes.xattrs(volume.uuid).get(CLAIM_XATTR)) is not None:
            self._volumes.set_xattr(volume.uuid, BEFORE_XATTR, owner)
            self._volumes.remove_xattr(volume.uuid, CLAIM_XATTR)
        self._give_name(volume)
        self.is_done = True
        return self._volumes.volume(volume.uuid)

    def _give_name(self, volume: Volume) -> None:
        if volume.name != self._name:
            self._volumes.rename(volume.uuid, self._name)
        self._volumes.remove_xattr(volume.uuid, XATTR)

    # The volume that it is written to

    def _make(self, header: Header, new: New) -> Volume:
        """Makes the volume that a whole stream is written to."""
        if (present := self._find(self._path)) is not None:
            raise VolumeError(
                f"volume {present.path} exists already, and the stream is of a whole one: choose "
                "another name, or send what changed since a snapshot that both have (--since)"
            )
        if new.uuid is not None and (present := self._find(new.uuid)) is not None:
            raise VolumeError(f"the UUID {new.uuid} is that of volume {present.path} already")
        work = _Work(None, header.to, 0)
        try:
            made = self._patient.create(
                self._partial,
                header.size,
                thin=new.thin,
                uuid=new.uuid,
                xattrs={**new.xattrs, XATTR: _text(work)},
                key=new.key,
            )
        except KeyboardInterrupt:
            with uninterrupted():
                self._cancel()
            raise
        if self._volumes.xattrs(made.uuid).get(XATTR) != _text(work):
            raise VolumeError(f"volume {made.path} was made meanwhile, by another command")
        return made

    def _cancel(self) -> None:
        """Ends the making of a thick volume, which takes as long as to zero it."""
        try:
            self._volumes.client.call("virtlun_lvol_cancel", name=self._partial)
        except RpcError as error:
            if error.code != NO_DEVICE:
                raise
        if (made := self._find(self._partial)) is not None:
            self._volumes.delete(made.uuid)

    def _volume_of(self, header: Header) -> Volume:
        """Returns the volume that has the snapshot which a stream begins with, as its last one."""
        base = f"{self._path}@{header.since}"
        volume, snapshot = self._find(self._path), self._find(base)
        if volume is None or snapshot is None:
            raise VolumeError(
                f"the stream is of what changed since {base}, which is not there: receive that "
                "first"
            )
        if volume.parent != snapshot.name:
            last = f"that is {volume.lvstore}/{volume.parent}" if volume.parent else "it has none"
            raise VolumeError(
                f"the stream is of what changed since {base}, which is not the last snapshot of "
                f"{self._path}: {last}"
            )
        return volume

    # The data

    def _fill(
        self, volume: Volume, stream: Reader, progress: Progress, noted: Mapping[str, str]
    ) -> Volume:
        """Writes a stream to a volume and gives it its snapshot and its name."""
        header = stream.header
        change = header.since is not None
        work = _Work(header.since, header.to, volume.size if change else 0)
        begun = not change
        try:
            with self._exported(volume) as path:
                if change:
                    # From now on the export is known as this command's.
                    self._volumes.set_xattr(volume.uuid, XATTR, _text(work))
                    self._check_unchanged(volume, header)
                    begun = True
                    with uninterrupted():
                        volume = self._volumes.rename(volume.uuid, self._partial.split("/")[1])
                    volume = self._resized(volume, header.size)
                self._write(volume, path, stream, progress)
                with uninterrupted():
                    self._volumes.set_xattr(volume.uuid, XATTR, _text(replace(work, whole=True)))
                    if header.to is not None:
                        self._volumes.client.call(
                            "bdev_lvol_snapshot",
                            lvol_name=volume.uuid,
                            snapshot_name=f"{self._name}@{header.to}",
                            xattrs=dict(noted),
                        )
                    return self._name_whole(volume)
        except BaseException as error:
            if not begun or self.is_done:
                raise
            return self._undone(volume, error)

    def _undone(self, volume: Volume, why: BaseException) -> Volume:
        """Takes back what is not whole, and raises `why`; or returns what is whole in spite of it.

        Raises:
            VolumeError: that fails, too; both are told.
        """
        with uninterrupted():
            try:
                if XATTR not in self._volumes.xattrs(volume.uuid):
                    raise why  # nothing has begun
                done = self._complete_or_undo(volume.uuid)
            except (TargetError, VolumeError) as error:
                raise VolumeError(
                    f"{str(why) or 'interrupted'}. What there is of it stays as {self._partial}: "
                    f"{error}"
                ) from why
        if done is None or isinstance(why, KeyboardInterrupt):
            raise why
        return done

    @contextmanager
    def _exported(self, volume: Volume) -> Iterator[Path]:
        """Shows a volume as a file, which no VM begins to use then.

        Raises:
            VolumeError: it is a file already.
        """
        if (export := self._volumes.export_of(volume.uuid)) is not None:
            raise VolumeError(
                f"volume {volume.path} is in use as {export['path']}: end that first "
                "(virtlun_export_delete)"
            )
        try:
            yield self._volumes.export(volume.uuid)
        except BaseException:
            # A begun one is known by its note: `_complete_or_undo` ends its export.
            if self._find(self._partial) is None:
                with uninterrupted(), suppress(TargetError):
                    self._volumes.remove_xattr(volume.uuid, XATTR)
                    self._volumes.end_export(volume.uuid)
            raise

    def _check_unchanged(self, volume: Volume, header: Header) -> None:
        base = self._volumes.snapshot_of(volume.path, f"@{header.since}")
        # What is beyond a smaller size than the snapshot's is no range, and would read as zeros.
        shrunk = volume.size < base.size
        if shrunk or any(self._volumes.ranges(volume.uuid, base.uuid)):
            raise VolumeError(
                f"{volume.path} was written to, or made smaller, since {base.path}, which the "
                "stream is of what changed since: give that up by `virtlun volume rollback "
                f"{volume.path} @{header.since}`"
            )

    def _resized(self, volume: Volume, size: int) -> Volume:
        """Gives a volume the size of the stream's, in whole clusters."""
        cluster = self._store.cluster_size
        if -(-size // cluster) * cluster == volume.size:
            return volume
        return self._volumes.resize(volume.uuid, size)

    def _write(self, volume: Volume, path: Path, stream: Reader, progress: Progress) -> None:
        """Writes what a stream has, durably."""
        size, block = stream.header.size, volume.block_size
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # The volume was larger once, or its cluster is.
            if size < volume.size:
                with self._told():
                    volumefile.clear(file, size, volume.size - size, block)
            for part in stream.parts():
                progress(part.offset, size)
                with self._told():
                    if part.data is None:
                        volumefile.clear(file, part.offset, part.length, block)
                    else:
                        volumefile.write(file, part.offset, part.data, block)
            with self._told():
                os.fsync(file)
        finally:
            os.close(file)
        progress(size, size)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Tells of which lvstore it is what fails."""
        try:
            yield
        except OSError as error:
            raise VolumeError(f"lvstore {self._store.name}: {error.strerror or error}") from error


def _text(work: _Work) -> str:
    return json.dumps(asdict(work))


def _read(text: str) -> _Work | None:
    try:
        return _Work(**json.loads(text))
    except (TypeError, ValueError):
        return None
