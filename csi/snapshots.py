"""The driver's snapshots: lvols whose xattr `csi.snapshot` says that they are ours and of what.

Nothing prevents a snapshot's deletion. One that several lvols still show can only be marked deleted
(the xattr `csi.deleted`): it is none of the driver's snapshots from then on, and is really deleted
once one lvol or none needs it, which `sweep` looks after. So are those that a volume's clones are
made of, marked from the beginning.

In a pool of Ceph a snapshot can be deleted while clones need it, which keep its volume from being
deleted then. There the node that makes a clone deletes its snapshot; one that it has left, as it
died, is swept by any node an hour later.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from csi import DRIVER_NAME, handles
from csi.errors import Code, Failure, not_found, precondition
from csi.locks import VolumeLocks
from csi.parameters import Parameters
from csi.volumes import FORMATTING_XATTR, OwnedVolume, OwnedVolumes, lvol_name, may_be_ours
from csi.xattrjson import XattrJson
from pydataplane import methods
from pydataplane.client import Client
from pydataplane.errors import (
    BUSY,
    NO_DEVICE,
    NO_SPACE,
    READ_ONLY,
    RpcError,
    TargetError,
)
from pydataplane.lvols import Volume, deletable_snapshots
from pydataplane.volumes import Volumes

SNAPSHOT_XATTR = "csi.snapshot"
DELETED_XATTR = "csi.deleted"
SWEEP_AGAIN_S = 5.0
LEFT_NS = 3600 * 10**9
"""The age from which a snapshot for a clone in a pool of Ceph is taken for left by a node."""

log = structlog.get_logger()


@dataclass(frozen=True)
class SnapshotRecord(XattrJson):
    """What stands in SNAPSHOT_XATTR."""

    driver: str
    name: str
    """What the orchestrator calls it; nothing where it is for a clone alone."""
    source: str
    """Handle of the volume that it was taken of."""
    parameters: str
    """That one's Parameters.kept()."""
    created_ns: int
    """When, since 1970."""
    group: str = ""
    """The group_snapshot_id of the group that it was taken in, or nothing."""

    def read(self) -> Parameters:
        """Returns the parameters of the source's class."""
        return Parameters.model_validate_json(self.parameters, by_alias=True)


@dataclass(frozen=True)
class OwnedSnapshot:
    """A snapshot and what the driver knows of it."""

    volume: Volume
    taken: SnapshotRecord
    formatting: bool
    """Whether mkfs was begun on its source then and not finished."""


@dataclass(frozen=True)
class _FixedXattrs:
    """What the xattrs of a snapshot say and never say otherwise."""

    taken: SnapshotRecord
    formatting: bool


class OwnedSnapshots:
    """The driver's snapshots on one node's targets."""

    def __init__(self, volumes: OwnedVolumes, locks: VolumeLocks) -> None:
        """Takes them of `volumes`; none whose handle is held in `locks` is swept."""
        self._volumes = volumes
        self._lvols = volumes.lvols
        self._locks = locks
        self._known: dict[str, _FixedXattrs | None] = {}  # of the size of the lvstores
        self._deleted: set[str] = set()

    def find(self, handle: str) -> OwnedSnapshot | None:
        """Returns the snapshot with this handle, or None; also None for one that was deleted."""
        lvol = self._lvols.find(handle)
        return self._owned(lvol, self._lvols.at(handle)) if lvol else None

    def all(self) -> list[OwnedSnapshot]:
        """Returns the snapshots in the order of their handles."""
        found = self._lvols.targets.gather(self._of_target)
        return sorted(found, key=lambda each: each.volume.uuid)

    def named(self, name: str) -> OwnedSnapshot | None:
        """Returns the snapshot that the orchestrator calls so, on a target that answers.

        Raises:
            TargetError: none does.
        """
        return next((each for each in self._answered() if each.taken.name == name), None)

    def of_group(self, group: str) -> list[OwnedSnapshot]:
        """Returns the snapshots of a group, which are all of one lvstore, by their handles."""
        if not handles.is_uuid(group):
            return []
        found = self._of_target(self._lvols.targets.of(group))
        of_it = [each for each in found if each.taken.group == group]
        return sorted(of_it, key=lambda each: each.volume.uuid)

    def _answered(self) -> list[OwnedSnapshot]:
        answers = self._lvols.targets.ask(self._of_target)
        if all(answer.error for answer in answers):
            answers[0].get()
        return [each for answer in answers for each in answer.value or ()]

    def _of_target(self, client: Client) -> list[OwnedSnapshot]:
        """Returns the driver's snapshots on one target, those that wait for their key, too."""
        volumes = Volumes(client)
        snapshots = (each for each in volumes.all() if each.snapshot and may_be_ours(each))
        found = (self._owned(each, volumes) for each in snapshots)
        return [each for each in found if each is not None]

    def _owned(self, lvol: Volume, volumes: Volumes) -> OwnedSnapshot | None:
        kept = self._kept(lvol.uuid, volumes) if lvol.snapshot else None
        if kept is None or lvol.uuid in self._deleted:
            return None
        return OwnedSnapshot(lvol, kept.taken, kept.formatting)

    def _kept(self, handle: str, volumes: Volumes) -> _FixedXattrs | None:
        """Returns what a snapshot's xattrs say, or None where it is not the driver's."""
        if handle in self._known:
            return self._known[handle]
        try:
            xattrs = volumes.xattrs(handle)
        except RpcError as error:
            if error.code != NO_DEVICE:
                raise
            return None
        taken = SnapshotRecord.parse(xattrs[SNAPSHOT_XATTR]) if SNAPSHOT_XATTR in xattrs else None
        kept = None
        if taken is not None and taken.driver == DRIVER_NAME:
            kept = _FixedXattrs(taken, FORMATTING_XATTR in xattrs)
        if DELETED_XATTR in xattrs:
            self._deleted.add(handle)
        self._known[handle] = kept
        return kept

    # Taken

    def take(self, name: str, source: OwnedVolume) -> OwnedSnapshot:
        """Takes a snapshot of a volume, in use or not.

        Nobody may begin to make a file system on it meanwhile: its lock is held.

        Raises:
            Failure: RESOURCE_EXHAUSTED, the class may not promise what it keeps, or the lvstore has
                no room; UNAVAILABLE, I/O of the volume takes too long.
        """
        (taken,) = self.take_together([(name, source)])
        return taken

    def take_together(
        self, wanted: Sequence[tuple[str, OwnedVolume]], group: str = ""
    ) -> list[OwnedSnapshot]:
        """Takes snapshots of volumes of one lvstore at one instant, all or none; as `take`."""
        handle_of = [self._free_handle(name, source) for name, source in wanted]
        now_ns = time.time_ns()
        taken = [
            self._wanted(handle, self._taken(name, source, now_ns, group))
            for handle, (name, source) in zip(handle_of, wanted, strict=True)
        ]
        self._take([source for _, source in wanted], taken)
        found = [self.find(handle) for handle in handle_of]
        return [each for each in found if each is not None]

    def take_hidden(self, handle: str, source: OwnedVolume) -> Volume:
        """Takes a snapshot that is deleted from the beginning: for a clone of a volume; as `take`.

        `handle` is what `hidden_handle` returned, and held.
        """
        taken = self._taken("", source, time.time_ns())
        self._take([source], [self._wanted(handle, taken, deleted=True)])
        return self._lvols.at(handle).volume(handle)

    def hidden_handle(self, source: OwnedVolume) -> str:
        """Returns a new handle of a snapshot beside a volume."""
        return self._handle(str(uuid.uuid4()), source)

    def _free_handle(self, name: str, source: OwnedVolume) -> str:
        """Returns the handle of a snapshot of this name, unless a deleted one still has that."""
        handle = self._handle(name, source)
        return handle if self._lvols.find(handle) is None else self.hidden_handle(source)

    def _handle(self, name: str, source: OwnedVolume) -> str:
        volume = source.volume
        store = self._lvols.at(volume.uuid).lvstore(volume.lvstore)
        return handles.make(store.uuid, self._lvols.node_in(store), name, handles.SNAPSHOTS)

    def _taken(
        self, name: str, source: OwnedVolume, now_ns: int, group: str = ""
    ) -> SnapshotRecord:
        of = source.volume.uuid
        return SnapshotRecord(DRIVER_NAME, name, of, source.owner.parameters, now_ns, group)

    def _wanted(
        self, handle: str, taken: SnapshotRecord, *, deleted: bool = False
    ) -> methods.SnapshotOf:
        """Returns what the target is asked for."""
        xattrs = {SNAPSHOT_XATTR: taken.written()}
        if self._volumes.formatting(taken.source):
            xattrs[FORMATTING_XATTR] = "1"
        if deleted:
            xattrs[DELETED_XATTR] = "1"
        return {
            "lvol_name": taken.source,
            "snapshot_name": self._free_name(handle, taken),
            "lvol_uuid": handle,
            "xattrs": xattrs,
        }

    def _free_name(self, handle: str, taken: SnapshotRecord) -> str:
        """Returns what the lvol can be called."""
        name = lvol_name(taken.name, handle)
        source = self._lvols.at(handle).volume(taken.source)
        # Those of an image have their names for themselves.
        path = f"{source.path}@{name}" if source.pool else f"{source.lvstore}/{name}"
        there = self._lvols.in_lvstore_of(handle, path)
        return name if there is None else f"csi-{handle}"

    def _take(self, sources: list[OwnedVolume], wanted: list[methods.SnapshotOf]) -> None:
        """Has the target take snapshots; those of a class that may not promise more are refused."""
        first = sources[0]
        volumes = self._lvols.at(first.volume.uuid)
        store = volumes.lvstore(first.volume.lvstore)
        more = sum(source.volume.allocated for source in sources)
        limited = [each.parameters for each in sources if each.parameters.overcommit is not None]
        strictest = min(limited, key=lambda each: each.promised_most(store) or 0, default=None)
        try:
            with self._volumes.room.promise(strictest or first.parameters, store, more):
                if len(wanted) == 1:
                    volumes.client.call("bdev_lvol_snapshot", **wanted[0])
                else:
                    volumes.client.call("virtlun_lvol_snapshot_together", snapshots=wanted)
        except RpcError as error:
            raise _explained(error, first, self._lvols.node) from error

    # Deleted

    def delete(self, handle: str) -> Parameters | None:
        """Deletes a snapshot, or marks it so. Idempotent, also for what never was one of ours.

        Returns the parameters of its source's class, or None where it was gone.

        Raises:
            Failure: FAILED_PRECONDITION, it is an lvol of another owner; UNAVAILABLE, its lvstore
                is not loaded, so that it may be there.
        """
        lvol = self._lvols.find(handle)
        if lvol is None:
            self._lvols.check_gone(handle, "snapshot")
            return None
        volumes = self._lvols.at(handle)
        kept = self._kept(handle, volumes) if lvol.snapshot else None
        if kept is None:
            raise precondition(
                f"lvol {lvol.path} is no snapshot of {DRIVER_NAME}: delete it with `virtlun volume`"
            )
        if handle not in self._deleted:
            try:
                volumes.delete(handle, missing_ok=True)
                self._known.pop(handle, None)
            except RpcError as error:
                if error.code != READ_ONLY:
                    raise
                volumes.set_xattr(handle, DELETED_XATTR, "1")  # several lvols show it
                self._deleted.add(handle)
        return kept.taken.read()

    def delete_hidden(self, handle: str) -> None:
        """Deletes a snapshot in a pool that was taken for a clone, which is made or not."""
        self._lvols.at(handle).delete(handle, missing_ok=True)
        self._known.pop(handle, None)
        self._deleted.discard(handle)

    def sweep(self, handle: str) -> None:
        """Really deletes what was deleted and is needed no more, on the target of this handle.

        In a pool of Ceph there is nothing to do.
        """
        if not handles.is_uuid(handle):
            return
        in_pool = handles.tells_lvstore(handle) and any(
            store.is_pool for store in self._lvols.stores_of(handle)
        )
        if not in_pool:
            self._sweep(self._lvols.at(handle))

    def _sweep(self, volumes: Volumes) -> None:
        while True:  # what one of them alone needed is needed no more
            few = deletable_snapshots(volumes.volumes())
            ended = [self._end(each, volumes) for each in few if may_be_ours(each)]
            if not any(ended):
                return

    def _end(self, lvol: Volume, volumes: Volumes) -> bool:
        """Deletes a snapshot if it is marked so; returns whether it is gone."""
        kept = self._kept(lvol.uuid, volumes)
        if kept is None or lvol.uuid not in self._deleted:
            return False
        if lvol.pool and time.time_ns() - kept.taken.created_ns < LEFT_NS:
            return False  # another node makes a clone of it
        try:
            with self._locks.hold(lvol.uuid):
                volumes.delete(lvol.uuid, missing_ok=True)
        except Failure:  # a clone is being made of it
            return False
        except RpcError as error:
            log.warning("a snapshot is not deleted yet", lvol=lvol.path, reason=error.message)
            return False
        self._known.pop(lvol.uuid, None)
        self._deleted.discard(lvol.uuid)
        return True

    def begin(self, stopped: threading.Event) -> None:
        """Sweeps all targets once, in a thread, each as soon as it answers; until `stopped`."""
        for client in self._lvols.targets.clients:
            name = f"sweeping {client.path}"
            words = (client, stopped)
            threading.Thread(target=self._first, args=words, name=name, daemon=True).start()

    def _first(self, client: Client, stopped: threading.Event) -> None:
        while not stopped.is_set():
            try:
                self._sweep(Volumes(client))
            except TargetError as error:
                log.info("cannot look for deleted snapshots yet", reason=str(error))
            else:
                return
            stopped.wait(SWEEP_AGAIN_S)


def missing(handle: str) -> Failure:
    """Returns NOT_FOUND of a snapshot."""
    return not_found(f"there is no snapshot {handle} of {DRIVER_NAME}")


def _explained(error: RpcError, source: OwnedVolume, node: str) -> Exception:
    """Returns what a caller is told of a snapshot that the target did not take."""
    volume = source.volume
    if error.code == NO_SPACE:
        return Failure(
            Code.RESOURCE_EXHAUSTED,
            f"lvstore {volume.lvstore} of node {node} has no room for a snapshot of volume "
            f"{volume.uuid} ({error.message}): delete volumes or snapshots there or add to the "
            "lvstore",
        )
    if error.code == BUSY:  # I/O that was begun before does not end
        return Failure(
            Code.UNAVAILABLE, f"no snapshot of volume {volume.uuid} yet: {error.message}"
        )
    return error
