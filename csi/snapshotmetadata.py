"""The SnapshotMetadata service: which parts of a snapshot hold data, or changed since another one.

Parts are whole clusters, told by the lvstore's metadata: no data is read. What was written with
zeros, or with what was there before, counts as data and as changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from csi.errors import Code, Failure, invalid
from csi.proto import csi_pb2 as pb
from csi.snapshots import OwnedSnapshot, OwnedSnapshots, missing
from csi.volumes import OwnedVolumes

PAGE = 10_000
"""Parts in one message at most."""
Answer = TypeVar("Answer", pb.GetMetadataAllocatedResponse, pb.GetMetadataDeltaResponse)


class SnapshotMetadata:
    """csi.v1.SnapshotMetadata."""

    def __init__(self, volumes: OwnedVolumes, snapshots: OwnedSnapshots) -> None:
        """Tells of `snapshots`, which are of `volumes`."""
        self._lvols = volumes.lvols
        self._snapshots = snapshots

    def get_metadata_allocated(
        self, request: pb.GetMetadataAllocatedRequest
    ) -> Iterator[pb.GetMetadataAllocatedResponse]:
        """Yields the parts of a snapshot that hold data, by their offsets."""
        found = self._get(request.snapshot_id, "snapshot_id")
        yield from self._pages(pb.GetMetadataAllocatedResponse, found, request)

    def get_metadata_delta(
        self, request: pb.GetMetadataDeltaRequest
    ) -> Iterator[pb.GetMetadataDeltaResponse]:
        """Yields the parts in which a snapshot may differ from an earlier one of its volume."""
        base = self._get(request.base_snapshot_id, "base_snapshot_id")
        found = self._get(request.target_snapshot_id, "target_snapshot_id")
        if base.taken.source != found.taken.source:
            raise invalid(
                f"snapshots {base.volume.uuid} and {found.volume.uuid} are of the volumes "
                f"{base.taken.source} and {found.taken.source}: name two of one volume"
            )
        if base.taken.created_ns > found.taken.created_ns:
            raise invalid(
                f"snapshot {base.volume.uuid} was taken after {found.volume.uuid}: name the "
                "earlier one as base_snapshot_id"
            )
        yield from self._pages(pb.GetMetadataDeltaResponse, found, request, base.volume.uuid)

    def _get(self, handle: str, field: str) -> OwnedSnapshot:
        if not handle:
            raise invalid(f"{field} is missing")
        found = self._snapshots.find(handle)
        if found is None:
            raise missing(handle)
        return found

    def _pages(
        self,
        kind: type[Answer],
        found: OwnedSnapshot,
        request: pb.GetMetadataAllocatedRequest | pb.GetMetadataDeltaRequest,
        since: str | None = None,
    ) -> Iterator[Answer]:
        """Yields messages with what the target says, page by page; one at least, with the size."""
        uuid, size = found.volume.uuid, found.volume.size
        if request.max_results < 0:
            raise invalid(f"max_results is {request.max_results}: give 0 or more")
        if not 0 <= request.starting_offset < size:
            raise Failure(
                Code.OUT_OF_RANGE,
                f"starting_offset {request.starting_offset} is not in snapshot {uuid}, "
                f"which has {size} bytes",
            )
        most = min(request.max_results or PAGE, PAGE)
        volumes = self._lvols.at(uuid)
        pages = volumes.ranges(uuid, since, offset=request.starting_offset, most=most)
        for number, page in enumerate(pages):
            if number and not page:
                continue
            yield kind(
                block_metadata_type=pb.VARIABLE_LENGTH,
                volume_capacity_bytes=size,
                block_metadata=[
                    pb.BlockMetadata(byte_offset=offset, size_bytes=length)
                    for offset, length in page
                ],
            )
