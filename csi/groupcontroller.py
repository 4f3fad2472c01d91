"""The GroupController service: snapshots of several volumes of one lvstore or pool, at one instant.

A group is no object of its own: it is its snapshots, which all name it. So it is there as soon as
the target has taken them, all or none, and gone with the last of them.
"""

from __future__ import annotations

from contextlib import ExitStack

from google.protobuf.timestamp_pb2 import Timestamp

from csi import handles
from csi.contentsource import LOCK_WAIT_S
from csi.errors import Code, Failure, invalid, not_found, precondition
from csi.locks import VolumeLocks
from csi.moves import Moves
from csi.proto import csi_pb2 as pb
from csi.snapshotcontroller import check_name, check_parameters, described
from csi.snapshots import OwnedSnapshot, OwnedSnapshots
from csi.volumes import OwnedVolume, OwnedVolumes
from pydataplane.lvstores import Lvstore

Rpc = pb.GroupControllerServiceCapability.RPC
VOLUMES_MAX = 256
"""Of a group."""


class GroupController:
    """csi.v1.GroupController."""

    def __init__(
        self,
        volumes: OwnedVolumes,
        snapshots: OwnedSnapshots,
        locks: VolumeLocks,
        moves: Moves | None = None,
    ) -> None:
        """Takes snapshots of `volumes` that count (`moves`).

        The Node service has the same `locks`.
        """
        self._moves = moves or Moves(volumes)
        self._lvols = volumes.lvols
        self._snapshots = snapshots
        self._locks = locks

    def group_controller_get_capabilities(
        self, _: pb.GroupControllerGetCapabilitiesRequest
    ) -> pb.GroupControllerGetCapabilitiesResponse:
        """Tells which methods there are."""
        rpc = Rpc(type=Rpc.CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT)
        return pb.GroupControllerGetCapabilitiesResponse(
            capabilities=[pb.GroupControllerServiceCapability(rpc=rpc)]
        )

    def create_volume_group_snapshot(
        self, request: pb.CreateVolumeGroupSnapshotRequest
    ) -> pb.CreateVolumeGroupSnapshotResponse:
        """Takes snapshots of volumes at one instant, or returns the group of this name."""
        check_name(request.name, "group snapshot")
        check_parameters(request.parameters, "VolumeGroupSnapshotClass")
        wanted = sorted(set(request.source_volume_ids))
        if not 0 < len(wanted) <= VOLUMES_MAX:
            raise invalid(f"source_volume_ids names {len(wanted)} volumes: 1 to {VOLUMES_MAX}")
        with self._locks.hold(f"group {request.name}"):
            found = self._named(request.name)
            if not found:
                found = self._take(request.name, wanted)
        if sorted(each.taken.source for each in found) != wanted:
            raise Failure(
                Code.ALREADY_EXISTS,
                f"group snapshot {request.name} exists already, of other volumes: choose another "
                "name, or delete it",
            )
        return pb.CreateVolumeGroupSnapshotResponse(group_snapshot=_group(found))

    def _named(self, name: str) -> list[OwnedSnapshot]:
        """Returns the snapshots of the group of this name, in whichever lvstore."""
        stores = self._lvols.targets.lvstores()
        groups = (self._id(store, name) for store in stores)
        return next((found for group in groups if (found := self._snapshots.of_group(group))), [])

    def _id(self, store: Lvstore, name: str) -> str:
        return handles.make(store.uuid, self._lvols.node_in(store), name, handles.GROUPS)

    def _take(self, name: str, wanted: list[str]) -> list[OwnedSnapshot]:
        with ExitStack() as held:
            for each in wanted:
                held.enter_context(self._locks.hold(each, wait_s=LOCK_WAIT_S))
            sources = [self._moves.get(each) for each in wanted]
            group = self._id(self._lvstore_of(sources), name)
            numbered = [(f"{name}-{number}", each) for number, each in enumerate(sources, 1)]
            return self._snapshots.take_together(numbered, group)

    def _lvstore_of(self, sources: list[OwnedVolume]) -> Lvstore:
        """Returns the lvstore that all volumes are in.

        Raises:
            Failure: FAILED_PRECONDITION, there is none, or no snapshots are taken together there.
        """
        names = sorted({each.volume.lvstore for each in sources})
        if len(names) > 1:
            raise precondition(
                f"the volumes are in the lvstores {', '.join(names)}: snapshots are taken together "
                "in one lvstore; take one group in each"
            )
        return self._lvols.at(sources[0].volume.uuid).lvstore(names[0])

    def delete_volume_group_snapshot(
        self, request: pb.DeleteVolumeGroupSnapshotRequest
    ) -> pb.DeleteVolumeGroupSnapshotResponse:
        """Deletes the snapshots of a group, idempotent; as DeleteSnapshot each."""
        group = _checked(request.group_snapshot_id)
        found = self._snapshots.of_group(group)
        if not found:
            self._lvols.check_gone(group, "snapshot")
        members = {each.volume.uuid for each in found}
        gone = {each for each in request.snapshot_ids if self._snapshots.find(each) is None}
        if request.snapshot_ids and set(request.snapshot_ids) - gone != members:
            raise _mismatch(group)
        for member in sorted(members):
            with self._locks.hold(member):
                self._snapshots.delete(member)
        self._snapshots.sweep(group)
        return pb.DeleteVolumeGroupSnapshotResponse()

    def get_volume_group_snapshot(
        self, request: pb.GetVolumeGroupSnapshotRequest
    ) -> pb.GetVolumeGroupSnapshotResponse:
        """Returns a group with its snapshots."""
        group = _checked(request.group_snapshot_id)
        found = self._snapshots.of_group(group)
        if not found:
            raise not_found(f"there is no group snapshot {group}")
        members = {each.volume.uuid for each in found}
        if request.snapshot_ids and set(request.snapshot_ids) != members:
            raise _mismatch(group)
        return pb.GetVolumeGroupSnapshotResponse(group_snapshot=_group(found))


def _group(found: list[OwnedSnapshot]) -> pb.VolumeGroupSnapshot:
    created = Timestamp()
    created.FromNanoseconds(found[0].taken.created_ns)
    return pb.VolumeGroupSnapshot(
        group_snapshot_id=found[0].taken.group,
        snapshots=[described(each) for each in sorted(found, key=lambda one: one.volume.uuid)],
        creation_time=created,
        ready_to_use=True,
    )


def _checked(group: str) -> str:
    if not group:
        raise invalid("group_snapshot_id is missing")
    return group


def _mismatch(group: str) -> Failure:
    return invalid(f"snapshot_ids are not those of the group {group}: see GetVolumeGroupSnapshot")
