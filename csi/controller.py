"""The Controller service: volumes of this node's targets, and snapshots of them.

Every node runs its own (external-provisioner with --node-deployment), so a volume is always made
where the claim is used, and no central daemon takes part. Volumes of a pool of Ceph any node that
has the pool makes, grows and deletes, and several may at once: what a handle names is the same for
all, and Ceph makes an image of a name once.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from csi import DRIVER_NAME, POOL_KEY, POOL_VALUE, TOPOLOGY_KEY, attributes, contentsource, topology
from csi.attributes import Attributes
from csi.capabilities import SHARED_BLOCK, check_all, problem
from csi.contentsource import Contents
from csi.errors import Code, Failure, describe, invalid
from csi.handles import is_uuid
from csi.locks import VolumeLocks
from csi.moves import Moves
from csi.parameters import Parameters, claim, read, volume_name
from csi.proto import csi_pb2 as pb
from csi.sizes import size_within, wanted_bytes
from csi.snapshotcontroller import SnapshotController, check_name
from csi.snapshots import OwnedSnapshots
from csi.volumelimits import VolumeLimits
from csi.volumes import OwnedVolume, OwnedVolumes, Owner
from csi.waitingclaims import WaitingClaims
from pydataplane.errors import TargetError
from pydataplane.lvols import Volume
from pydataplane.lvstores import Lvstore

Rpc = pb.ControllerServiceCapability.RPC
CAPABILITIES = [
    Rpc.CREATE_DELETE_VOLUME,
    Rpc.LIST_VOLUMES,
    Rpc.GET_CAPACITY,
    Rpc.CREATE_DELETE_SNAPSHOT,
    Rpc.LIST_SNAPSHOTS,
    Rpc.GET_SNAPSHOT,
    Rpc.CLONE_VOLUME,
    Rpc.EXPAND_VOLUME,
    Rpc.MODIFY_VOLUME,
    Rpc.SINGLE_NODE_MULTI_WRITER,
]
PENDING = {Code.ABORTED, Code.CANCELLED, Code.DEADLINE_EXCEEDED, Code.UNAVAILABLE}
"""After these csi-provisioner calls again, also where the claim is gone. After others it may not,
and then no DeleteVolume comes."""

log = structlog.get_logger()


class Controller(SnapshotController):
    """csi.v1.Controller."""

    def __init__(
        self,
        volumes: OwnedVolumes,
        snapshots: OwnedSnapshots,
        locks: VolumeLocks,
        node: str,
        node_of: Callable[[str], str | None] | None = None,
        waiting: WaitingClaims | None = None,
        limits: VolumeLimits | None = None,
        check_counts: Callable[[str, OwnedVolume], None] | None = None,
        asked_of: Callable[[OwnedVolume], int | None] | None = None,
        moves: Moves | None = None,
    ) -> None:
        """Serves the volumes of `node`; the locks are shared with the Node service.

        `node_of` tells which node has the volume of a handle, None if nobody knows of it; `waiting`
        looks after claims for which there is no room; `check_counts` raises unless the
        PersistentVolume of a name is to decide over a volume; `asked_of` tells the bytes that a
        volume's claim asks for, None where it has none; `moves` knows which volumes are other
        nodes' by now.
        """
        moves = moves or Moves(volumes)
        super().__init__(volumes, snapshots, locks, moves)
        self._node = node
        self._contents = Contents(volumes, snapshots, locks, moves)
        self._node_of = node_of or (lambda _: None)
        self._waiting = waiting
        self._limits = limits or VolumeLimits(volumes.lvols)
        self._check_counts = check_counts or (lambda *_: None)
        self._asked_of = asked_of or (lambda _: None)

    def create_volume(self, request: pb.CreateVolumeRequest) -> pb.CreateVolumeResponse:
        """Makes a volume, or returns the one of this name if it is as asked for."""
        check_name(request.name, "volume")
        parameters = read(request.parameters)
        check_all(request.volume_capabilities, face=parameters.face)
        wanted = attributes.read(request.mutable_parameters)
        source = request.volume_content_source
        content = contentsource.written(source) if request.HasField("volume_content_source") else ""
        owner = Owner(
            DRIVER_NAME, request.name, claim(request.parameters), parameters.kept(), content
        )
        with self._locks.hold(request.name):
            for known in self._volumes.known(request.name):
                with self._locks.hold(known):
                    pass  # told at once where it is in use, also while the target does not answer
            store = self._store(parameters)
            topology.check(self._node, request.accessibility_requirements, store)
            handle = self._volumes.handle(request.name, store)
            with self._locks.hold(handle):
                limited = bool(request.mutable_parameters)
                made = limited and self._volumes.find(handle) is None
                if content:
                    found = self._contents.create(owner, request.capacity_range, store)
                else:
                    found = self._create_empty(handle, owner, request.capacity_range, store)
                _check_same(found, owner, request.capacity_range)
                if limited:
                    self._limit_new(handle, found.volume, wanted, made=made)
        shared = any(one.access_mode.mode in SHARED_BLOCK for one in request.volume_capabilities)
        on_one_node = shared and not store.is_pool
        if on_one_node and owner.claim and self._waiting:  # KubeVirt takes it for migratable
            self._waiting.tell(
                owner.claim,
                "OneNode",
                f"the volume is on node {self._node} alone: pods of that node can share it, no "
                "other node can have it, and a virtual machine with it cannot be migrated",
            )
        return pb.CreateVolumeResponse(volume=self._describe(found))

    def _limit_new(self, handle: str, volume: Volume, wanted: Attributes, *, made: bool) -> None:
        """Limits a volume for CreateVolume; one that the call has `made` goes if it cannot be.

        An image of a pool of Ceph never goes: no lock keeps the drivers of other nodes from it.

        Raises:
            Failure: UNAVAILABLE also for what is no matter of time, where the volume stays.
        """
        try:
            self._limits.begin(volume, wanted)
        except Exception as error:
            code, why = describe(error)
            # Of a pool another node may have made it, or have answered for it, meanwhile.
            mine = made and volume.pool is None
            if code in PENDING or (mine and self._taken_back(handle)):
                raise
            raise Failure(Code.UNAVAILABLE, why) from error

    def _taken_back(self, handle: str) -> bool:
        """Deletes a volume that nobody was told of; False where that cannot be."""
        try:
            self._volumes.delete(handle)
            self._snapshots.sweep(handle)
        except (Failure, TargetError) as error:
            log.warning("a volume that cannot be limited stays", volume_id=handle, why=str(error))
            return False
        return True

    def _store(self, parameters: Parameters) -> Lvstore:
        """Returns what a class's volumes come from.

        Raises:
            Failure: RESOURCE_EXHAUSTED, it is not on this node; INVALID_ARGUMENT, it has no such
                volumes.
        """
        store = self._volumes.lvols.lvstore(parameters.lvstore)
        if not store.makes_volumes:
            raise invalid(
                f"StorageClass parameter lvstore: the LUNs of pool {store.name} are made by their"
                " array; name an lvstore, or a pool of Ceph"
            )
        if store.is_pool and parameters.encryption_key:
            raise invalid(
                f"StorageClass parameter encryptionKey: volumes of the pool {store.name} of Ceph "
                "are not encrypted by the target; leave it out"
            )
        return store

    def _create_empty(
        self, handle: str, owner: Owner, wanted: pb.CapacityRange, store: Lvstore
    ) -> OwnedVolume:
        size = size_within(wanted, store)
        found = self._volumes.find(handle)
        if found is None:
            thin = owner.read().thin == "true"
            found = self._volumes.create(owner, size, store, thin=thin)
        return found

    def delete_volume(self, request: pb.DeleteVolumeRequest) -> pb.DeleteVolumeResponse:
        """Deletes a volume, idempotent; one in use is refused."""
        _check_id(request.volume_id)
        with self._locks.hold(request.volume_id):
            found = self._moves.delete(request.volume_id)
        self._snapshots.sweep(request.volume_id)
        if found is not None:
            self._freed(found.parameters)
        return pb.DeleteVolumeResponse()

    def _freed(self, parameters: Parameters) -> None:
        if self._waiting:
            self._room(parameters)

    def validate_volume_capabilities(
        self, request: pb.ValidateVolumeCapabilitiesRequest
    ) -> pb.ValidateVolumeCapabilitiesResponse:
        """Confirms that a volume can be used in all the ways asked for, or says why not."""
        _check_id(request.volume_id)
        if not request.volume_capabilities:
            raise invalid("volume capabilities are missing: say how the volume will be used")
        face = self._volumes.get(request.volume_id).parameters.face
        answer = pb.ValidateVolumeCapabilitiesResponse
        for capability in request.volume_capabilities:
            if why := problem(capability, face=face):
                return answer(message=why)
        try:
            attributes.read(request.mutable_parameters)
        except Failure as error:
            return answer(message=str(error))
        return answer(
            confirmed=answer.Confirmed(
                volume_context=request.volume_context,
                volume_capabilities=request.volume_capabilities,
                parameters=request.parameters,
                mutable_parameters=request.mutable_parameters,
            )
        )

    def list_volumes(self, request: pb.ListVolumesRequest) -> pb.ListVolumesResponse:
        """Lists the driver's volumes by handle; a token is the handle that the page begins with."""
        if request.max_entries < 0:
            raise invalid(f"max_entries is {request.max_entries}: give 0 or more")
        start = request.starting_token
        if start and not is_uuid(start):
            raise Failure(Code.ABORTED, f"starting_token '{start}' is not one of ours: begin anew")
        found = [owned for owned in self._volumes.all() if owned.volume.uuid >= start]
        page = found[: request.max_entries or None]
        more = found[len(page) :]
        entry = pb.ListVolumesResponse.Entry
        return pb.ListVolumesResponse(
            entries=[entry(volume=self._describe(owned)) for owned in page],
            next_token=more[0].volume.uuid if more else "",
        )

    def get_capacity(self, request: pb.GetCapacityRequest) -> pb.GetCapacityResponse:
        """Tells the free bytes of the class's lvstore; of the largest one if none is named."""
        parameters = read(request.parameters) if request.parameters else None
        face = parameters.face if parameters else "kernel"
        problems = [problem(found, face=face) for found in request.volume_capabilities]
        why = next((each for each in problems if each), None)
        asked = claim(request.parameters)
        node = request.accessible_topology.segments.get(TOPOLOGY_KEY, self._node)
        free = largest = 0
        if why is None and node == self._node:
            free, largest = self._room(parameters, asked)
        elif why is not None and asked and self._waiting:  # the provisioner does not tell
            self._waiting.tell(asked, "CannotProvision", f"no volume is made for this claim: {why}")
        answer = pb.GetCapacityResponse(available_capacity=free)
        answer.maximum_volume_size.value = largest
        return answer

    def _room(self, parameters: Parameters | None, asked: str = "") -> tuple[int, int]:
        """Returns the bytes that a class can have, together and as one volume.

        Looks after claims that wait for them; `asked` is the one that the question is for.
        """
        if parameters is None:
            stores = self._volumes.targets.lvstores()
            known = (store.free for store in stores if store.tells_room)
            free = max(known, default=0)
            return free, free
        try:
            store = self._store(parameters)
        except Failure as error:
            final = error.code in (Code.FAILED_PRECONDITION, Code.INVALID_ARGUMENT)
            if final and asked and self._waiting:
                self._waiting.tell(asked, "CannotProvision", f"no volume is made here: {error}")
            store = None
        room = self._volumes.room.left(parameters, store) if store else 0
        largest = min(room, store.total) if store and store.tells_room else room
        if self._waiting and asked:
            self._waiting.asked(asked, parameters.pool, largest)
        elif self._waiting:
            self._waiting.room(parameters.pool, largest)
        return room, largest

    def controller_get_capabilities(
        self, _: pb.ControllerGetCapabilitiesRequest
    ) -> pb.ControllerGetCapabilitiesResponse:
        """Tells which methods there are."""
        kind = pb.ControllerServiceCapability
        return pb.ControllerGetCapabilitiesResponse(
            capabilities=[kind(rpc=Rpc(type=each)) for each in CAPABILITIES]
        )

    def controller_expand_volume(
        self, request: pb.ControllerExpandVolumeRequest
    ) -> pb.ControllerExpandVolumeResponse:
        """Grows a volume, also one in use; a guest that has it sees it at once.

        csi-resizer is one for all nodes, and asks the driver beside it. Where the volume is another
        node's, that node grows it when its kubelet calls NodeExpandVolume. It says only how large,
        not for which PersistentVolume: what counts is what the volume's own claim asks for.
        """
        _check_id(request.volume_id)
        if not request.HasField("capacity_range"):
            raise invalid("capacity_range is missing: say how large the volume is to be")
        with self._locks.hold(request.volume_id):
            found = self._moves.find(request.volume_id)
            if found is None:
                return self._expand_elsewhere(request)
            asked = self._asked_of(found)
            grown = self._volumes.grow_as_asked(found, request.capacity_range, asked)
            # Of a pool's another node may have it.
            used = bool(grown.pool) or self._volumes.has_kernel_face(request.volume_id)
        return pb.ControllerExpandVolumeResponse(
            capacity_bytes=grown.size, node_expansion_required=used
        )

    def _check_elsewhere(self, handle: str) -> None:
        """Raises NOT_FOUND or UNAVAILABLE unless a volume that is not here can be elsewhere."""
        node = self._node_of(handle)
        in_pool_here = node == "" and self._volumes.lvols.stores_of(handle)
        if node in (None, self._node) or in_pool_here:
            raise self._volumes.missing(handle)

    def _expand_elsewhere(
        self, request: pb.ControllerExpandVolumeRequest
    ) -> pb.ControllerExpandVolumeResponse:
        """Leaves growth to the node that has the volume; NOT_FOUND if there is none."""
        self._check_elsewhere(request.volume_id)
        return pb.ControllerExpandVolumeResponse(
            capacity_bytes=wanted_bytes(request.capacity_range), node_expansion_required=True
        )

    def controller_modify_volume(
        self, request: pb.ControllerModifyVolumeRequest
    ) -> pb.ControllerModifyVolumeResponse:
        """Gives a volume the limits of another VolumeAttributesClass, at once, also one in use.

        csi-resizer is one for all nodes, and asks the driver beside it. Where the volume is another
        node's, that node does it when it sees the class at the PersistentVolume (csi.classwatch).
        """
        _check_id(request.volume_id)
        wanted = attributes.read(request.mutable_parameters)
        with self._locks.hold(request.volume_id):
            found = self._moves.find(request.volume_id)
            if found is not None:
                if name := volume_name(request.mutable_parameters):
                    self._check_counts(name, found)
                self._limits.give(found.volume, wanted)
            else:
                self._check_elsewhere(request.volume_id)
        return pb.ControllerModifyVolumeResponse()

    def _describe(self, owned: OwnedVolume) -> pb.Volume:
        place = {TOPOLOGY_KEY: self._node}
        if owned.volume.pool:
            place = {f"{POOL_KEY}{owned.volume.pool}": POOL_VALUE}
        return pb.Volume(
            volume_id=owned.volume.uuid,
            capacity_bytes=owned.volume.size,
            volume_context=owned.parameters.context(),
            content_source=contentsource.read(owned.owner.content),
            accessible_topology=[pb.Topology(segments=place)],
        )


def _check_id(handle: str) -> None:
    if not handle:
        raise invalid("volume_id is missing")


def _check_same(found: OwnedVolume, owner: Owner, wanted: pb.CapacityRange) -> None:
    """Raises ALREADY_EXISTS if a volume is not what a repeated call asks for."""
    size = found.volume.size
    wrong = ""
    if found.owner.parameters != owner.parameters:
        wrong = f"with parameters {found.owner.parameters}"
    elif found.owner.content != owner.content:
        wrong = f"made of {found.owner.content or 'nothing'}"
    elif size < wanted.required_bytes or (wanted.limit_bytes and size > wanted.limit_bytes):
        wrong = f"with {size} bytes"
    if wrong:
        raise Failure(
            Code.ALREADY_EXISTS,
            f"volume {owner.name} exists already, {wrong}: choose another name, or delete it",
        )
