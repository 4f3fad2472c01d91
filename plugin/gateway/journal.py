"""Journal of the changes under way, on disk, so that an interrupted one can be recovered.

Attach and detach change three things one after the other: the persistent definition, the running
domain, the target. Each changes whole or not at all; an entry, a file that says what was
before, is there from before the first step until after the last. If the gateway dies in between, or
libvirtd, so that nothing can be rolled back at once, plugin.gateway.recovery does it later. So it
is with a domain's snapshots: plugin.gateway.snapshotsteps.

The folder is for root alone and is lost with the host's memory, as the running domains are: an
entry may hold a domain's definition with its passwords.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal
from uuid import UUID

from plugin.gateway.errors import noting
from plugin.gateway.peer import start_time
from pydataplane.domain.model import DiskAddress, FrontEnd, disk_address
from pydataplane.domain.names import JOURNAL_VERSION
from pydataplane.domain.translate import controller_name
from pydataplane.domain.translate.snapshotxml import DiskSnapshot

Operation = Literal["attach", "detach", "update", "tune", "remove"]
"""`tune`: other limits. `remove`: libvirtd's part of an attach or detach is done or undone, and the
LUN is still to go."""

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Entry:
    """A change of a running domain under way, and what was before it."""

    operation: Operation
    uuid: str
    """The domain's."""
    name: str
    """Of the domain, for messages."""
    dev: str
    """Target dev of the disk."""
    target: int
    """SCSI target number on the running side."""
    bdev: str
    """The volume's bdev: its UUID."""
    to_config: bool
    """Whether the persistent definition changes, too."""
    live: str | None
    """Our metadata in the running domain before; None if it had none."""
    config: str | None
    """The same of the persistent definition."""
    config_xml: str | None
    """The whole persistent definition before, where more than metadata changes."""
    front: FrontEnd = "scsi"
    """What the disk is on the running side."""
    limits: dict[str, int] | None = None
    """What of its I/O was limited in the target, where that changes."""

    @property
    def address(self) -> DiskAddress:
        """The address of the disk in the target."""
        return disk_address(self.controller, self.target, self.front)

    @property
    def controller(self) -> str:
        """The name of the domain's controller."""
        return controller_name(self.uuid)

    @property
    def dom_uuid(self) -> bytes:
        """The domain's UUID as the protocol has it."""
        return UUID(self.uuid).bytes


@dataclass(frozen=True)
class SnapshotEntry:
    """A snapshot of a domain that is taken, reverted to or deleted, a checkpoint or a backup.

    Or the domain is undefined (`undefine`), and its checkpoints are to be none any more; or all but
    its file systems is as it is to be (`thaw`).
    """

    operation: Literal["snapshot", "revert", "delete", "checkpoint", "backup", "undefine", "thaw"]
    uuid: str
    """The domain's."""
    name: str
    """Of the domain, for messages."""
    snapshot: str
    """The snapshot's name, or the checkpoint's; empty where there is none, or more than one."""
    held: tuple[DiskSnapshot, ...]
    """Its lvol snapshots; of a backup those that go with it."""
    metadata: bool = True
    """Whether libvirtd is to know of a snapshot that is taken."""
    resume: bool = False
    """Whether the domain is paused for it, and is to go on then."""
    thaw: bool = False
    """The same of its frozen file systems."""
    run: int | None = None
    """libvirtd's id of the domain that is paused or frozen: started anew it has another."""
    start: int | None = None
    """virDomainCreateFlags with which the domain is to run after a revert; None: it is not."""
    memory_file: str | None = None
    """Of a revert: what the guest's memory is restored from."""
    exported: tuple[str, ...] = ()
    """Of a backup: UUIDs of the lvol snapshots that are exported for it."""
    files: tuple[str, ...] = ()
    """Of a backup: what is made for it, and is worth nothing before it is whole."""

    @property
    def dom_uuid(self) -> bytes:
        """The domain's UUID as the protocol has it."""
        return UUID(self.uuid).bytes

    @property
    def dev(self) -> str:
        """The target devs of its disks, for messages."""
        return ", ".join(each.dev for each in self.held)


@dataclass(frozen=True)
class CopyEntry:
    """A disk of a running domain is copied to another volume, which may take its place."""

    operation: Literal["copy"]
    uuid: str
    """The domain's."""
    name: str
    """Of the domain, for messages."""
    dev: str
    """Target dev of the disk."""
    target: int
    """Number of the disk on the running side, as LunPlan has it."""
    source: str
    """UUID of the disk's volume."""
    source_path: str
    """As the disk's source names it."""
    destination: str
    """UUID of the volume that it is copied to."""
    destination_path: str
    """As clients name it."""
    disk_xml: str
    """A <disk> with the destination as its source."""
    front: FrontEnd = "scsi"
    asked: bool = False
    """Whether a pivot was asked for: then a disk that the target has no more may be on either."""

    @property
    def address(self) -> DiskAddress:
        """The address of the disk in the target."""
        return disk_address(controller_name(self.uuid), self.target, self.front)

    @property
    def dom_uuid(self) -> bytes:
        """The domain's UUID as the protocol has it."""
        return UUID(self.uuid).bytes


AnyEntry = Entry | SnapshotEntry | CopyEntry


@dataclass(frozen=True)
class StoredEntry:
    """An entry and its file."""

    entry: AnyEntry
    path: Path


class Journal:
    """The entries of one folder. The folder is made with the first of them."""

    def __init__(self, folder: Path) -> None:
        """Uses `folder`, which other gateways may use, too."""
        self._folder = folder
        self.pending: list[StoredEntry] = []
        """Our own changes that failed and could not be rolled back yet."""

    def append(self, entry: AnyEntry) -> StoredEntry:
        """Writes an entry; nothing may be changed before this has returned.

        Raises:
            Refused: it cannot be written.
        """
        pid = os.getpid()
        return self._write(entry, self._folder / f"{pid}-{start_time(pid)}-{next(_numbers)}.json")

    def to_remove(self, stored: StoredEntry) -> StoredEntry:
        """Says in an entry's place that only its LUN is still to go; what was before is forgotten.

        Raises:
            Refused: it cannot be written.
        """
        assert isinstance(stored.entry, Entry)
        entry = replace(stored.entry, operation="remove", live=None, config=None, config_xml=None)
        return self._write(entry, stored.path)

    def replace(self, stored: StoredEntry, entry: SnapshotEntry | CopyEntry) -> StoredEntry:
        """Puts another entry in the place of one.

        Raises:
            Refused: it cannot be written.
        """
        return self._write(entry, stored.path)

    def _write(self, entry: AnyEntry, path: Path) -> StoredEntry:
        new = path.with_suffix(".new")
        with noting(path, f"{entry.operation} of disk {entry.dev}: "):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            new.touch(mode=0o600)
            new.write_text(json.dumps({"version": JOURNAL_VERSION, **asdict(entry)}))
            new.rename(path)
        return StoredEntry(entry, path)

    def remove(self, stored: StoredEntry) -> None:
        """Removes an entry: the change is complete, or rolled back."""
        stored.path.unlink(missing_ok=True)

    def orphans(self) -> Iterator[StoredEntry]:
        """Yields the entries whose gateway has ended, oldest first."""
        found = []
        for path, number in self._of_ended("*.json"):
            with suppress(OSError):
                found.append((path.stat().st_mtime_ns, number, path))
        for _, _, path in sorted(found):
            entry = _read(path)
            if entry is not None:
                yield StoredEntry(entry, path)

    def remove_unfinished(self) -> None:
        """Removes what gateways were writing when they ended, and which is no entry for that."""
        for path, _ in self._of_ended("*.new"):
            # Where there is an entry, another gateway may be putting another in its place.
            if not path.with_suffix(".json").exists():
                with suppress(OSError):
                    path.unlink()

    def _of_ended(self, pattern: str) -> Iterator[tuple[Path, int]]:
        """Yields the files whose gateway has ended, and the number of each among its own."""
        for path in self._folder.glob(pattern):
            with suppress(OSError, ValueError):
                pid, since, number = (int(part) for part in path.stem.split("-"))
                if start_time(pid) != since:
                    yield path, number


def _read(path: Path) -> AnyEntry | None:
    """Returns the entry in a file; None for one that is of another version or damaged."""
    try:
        values = json.loads(path.read_text())
        if values.pop("version") != JOURNAL_VERSION:
            return None
        entry: AnyEntry
        if "disk_xml" in values:
            entry = CopyEntry(**values)
        elif "snapshot" in values:
            values["held"] = tuple(DiskSnapshot(**each) for each in values["held"])
            values["exported"] = tuple(values.get("exported", ()))
            values["files"] = tuple(values.get("files", ()))
            entry = SnapshotEntry(**values)
        else:
            entry = Entry(**values)
        UUID(entry.uuid)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return entry
