"""The Controller service's methods of snapshots; `controller` has the others."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.timestamp_pb2 import Timestamp

from csi.contentsource import LOCK_WAIT_S
from csi.errors import Code, Failure, invalid
from csi.handles import is_uuid
from csi.locks import VolumeLocks
from csi.moves import Moves
from csi.parameters import PROVISIONER_PREFIX, Parameters
from csi.proto import csi_pb2 as pb
from csi.snapshots import OwnedSnapshot, OwnedSnapshots, missing
from csi.volumes import OwnedVolumes

NAME_BYTES_MAX = 128
CLASS_FIELD = "deletionPolicy"
"""Of a class itself, which some have among its parameters, too."""


class SnapshotController:
    """Snapshots of one node's volumes."""

    def __init__(
        self, volumes: OwnedVolumes, snapshots: OwnedSnapshots, locks: VolumeLocks, moves: Moves
    ) -> None:
        """Takes them of `volumes` that count (`moves`); the Node service has the same `locks`."""
        self._volumes = volumes
        self._snapshots = snapshots
        self._locks = locks
        self._moves = moves

    def create_snapshot(self, request: pb.CreateSnapshotRequest) -> pb.CreateSnapshotResponse:
        """Takes a snapshot, which is ready at once, or returns the one of this name."""
        check_name(request.name, "snapshot")
        check_parameters(request.parameters, "VolumeSnapshotClass")
        source = request.source_volume_id
        if not source:
            raise invalid("source_volume_id is missing: name the volume")
        with self._locks.hold(f"snapshot {request.name}"):
            found = self._snapshots.named(request.name)
            if found is None:
                with self._locks.hold(source, wait_s=LOCK_WAIT_S):
                    found = self._snapshots.take(request.name, self._moves.get(source))
        if found.taken.source != source or found.taken.group:
            group = f", in group {found.taken.group}" if found.taken.group else ""
            raise Failure(
                Code.ALREADY_EXISTS,
                f"snapshot {request.name} exists already, of volume {found.taken.source}{group}: "
                "choose another name, or delete it",
            )
        return pb.CreateSnapshotResponse(snapshot=described(found))

    def delete_snapshot(self, request: pb.DeleteSnapshotRequest) -> pb.DeleteSnapshotResponse:
        """Deletes a snapshot, idempotent; what was made of it stays, and does not prevent it."""
        handle = request.snapshot_id
        _check_id(handle)
        with self._locks.hold(handle):
            found = self._snapshots.find(handle)
            if found is not None and found.taken.group:
                raise invalid(f"snapshot {handle} is of the group {found.taken.group}: delete that")
            parameters = self._snapshots.delete(handle)
        self._snapshots.sweep(handle)
        if parameters is not None:
            self._freed(parameters)
        return pb.DeleteSnapshotResponse()

    def get_snapshot(self, request: pb.GetSnapshotRequest) -> pb.GetSnapshotResponse:
        """Returns one snapshot."""
        _check_id(request.snapshot_id)
        found = self._snapshots.find(request.snapshot_id)
        if found is None:
            raise missing(request.snapshot_id)
        return pb.GetSnapshotResponse(snapshot=described(found))

    def list_snapshots(self, request: pb.ListSnapshotsRequest) -> pb.ListSnapshotsResponse:
        """Lists the driver's snapshots by handle; a token is the handle that the page begins with.

        Those of one volume, or the one of a handle, where the request names it; none may be there.
        """
        if request.max_entries < 0:
            raise invalid(f"max_entries is {request.max_entries}: give 0 or more")
        start = request.starting_token
        if start and not is_uuid(start):
            raise Failure(Code.ABORTED, f"starting_token '{start}' is not one of ours: begin anew")
        if request.snapshot_id:
            one = self._snapshots.find(request.snapshot_id)
            found = [] if one is None else [one]
        else:
            found = self._snapshots.all()
        source = request.source_volume_id
        found = [
            each
            for each in found
            if each.volume.uuid >= start and source in ("", each.taken.source)
        ]
        page = found[: request.max_entries or None]
        more = found[len(page) :]
        entry = pb.ListSnapshotsResponse.Entry
        return pb.ListSnapshotsResponse(
            entries=[entry(snapshot=described(each)) for each in page],
            next_token=more[0].volume.uuid if more else "",
        )

    def _freed(self, parameters: Parameters) -> None:
        """Is told that volumes of a class may have got room."""


def described(found: OwnedSnapshot) -> pb.Snapshot:
    """Returns what an orchestrator is told of a snapshot."""
    taken = found.taken
    created = Timestamp()
    created.FromNanoseconds(taken.created_ns)
    return pb.Snapshot(
        size_bytes=found.volume.size,
        snapshot_id=found.volume.uuid,
        source_volume_id=taken.source,
        creation_time=created,
        ready_to_use=True,
        group_snapshot_id=taken.group,
    )


def check_name(name: str, kind: str) -> None:
    """Raises INVALID_ARGUMENT if something cannot be called so."""
    if not name:
        raise invalid(f"the {kind}'s name is missing")
    if len(name.encode()) > NAME_BYTES_MAX:
        raise invalid(f"the {kind}'s name is longer than {NAME_BYTES_MAX} bytes")


def check_parameters(given: Mapping[str, str], kind: str) -> None:
    """Raises INVALID_ARGUMENT if a class has parameters, but for those of csi-snapshotter.

    A field of the class is passed by: Kubernetes' storage suite has it among the parameters, too.
    """
    for key in given:
        if not key.startswith(PROVISIONER_PREFIX) and key != CLASS_FIELD:
            raise invalid(f"{kind} parameter {key} is not known: there are none, leave it out")


def _check_id(handle: str) -> None:
    if not handle:
        raise invalid("snapshot_id is missing")
