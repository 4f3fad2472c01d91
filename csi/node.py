"""The Node service: volumes of this node's targets, in the pods of this node.

Staging makes the block device and mounts its file system once; publishing binds it to each pod.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog
from google.protobuf.message import Message

from csi import POD, POOL_KEY, POOL_VALUE, TOPOLOGY_KEY, capabilities, mounts, sysblock
from csi.capabilities import FILE_SYSTEMS, SHARED_BLOCK, Mode, check
from csi.errors import Code, Failure, invalid, not_found, precondition
from csi.host import Host
from csi.host.local import LocalHost
from csi.hostdevice import HostDevice
from csi.kubevirt.inline import EPHEMERAL, InlineVolumes, is_inline
from csi.locks import VolumeLocks
from csi.longcalls import LongCalls
from csi.moves import Moves
from csi.proto import csi_pb2 as pb
from csi.vhostface import VhostFace
from csi.volumehealth import VolumeHealth
from csi.volumelimits import VolumeLimits
from csi.volumes import OwnedVolume, OwnedVolumes
from pydataplane.errors import NO_DEVICE, RpcError
from pydataplane.volumes import Volumes

Rpc = pb.NodeServiceCapability.RPC
CAPABILITIES = [
    Rpc.STAGE_UNSTAGE_VOLUME,
    Rpc.GET_VOLUME_STATS,
    Rpc.EXPAND_VOLUME,
    Rpc.GET_VOLUME_HEALTH,
    Rpc.SINGLE_NODE_MULTI_WRITER,
]
READ_ONLY = {Mode.SINGLE_NODE_READER_ONLY, Mode.MULTI_NODE_READER_ONLY}
Answer = TypeVar("Answer")
log = structlog.get_logger()
Stats = pb.NodeGetVolumeStatsResponse
Usage = pb.VolumeUsage


class Node:
    """csi.v1.Node."""

    def __init__(
        self,
        volumes: OwnedVolumes,
        devices: HostDevice,
        vhost: VhostFace,
        locks: VolumeLocks,
        node: str,
        max_volumes: int,
        inline: InlineVolumes,
        capacity_of: Callable[[OwnedVolume], int] | None = None,
        asked_of: Callable[[OwnedVolume], int | None] | None = None,
        host: Host | None = None,
        pools_file: Path | None = None,
        limits: VolumeLimits | None = None,
        moves: Moves | None = None,
    ) -> None:
        """Serves the pods of `node`, `max_volumes` at most (0: as many as there are).

        `host` mounts, by default in this process.
        `capacity_of` tells the bytes that a volume is to have, 0 where nobody knows; `asked_of`
        those that its claim asks for, None where it has none. `pools_file` keeps which pools of
        Ceph the node has; `moves` knows which volumes are other nodes' by now.
        """
        self._moves = moves or Moves(volumes)
        self._pools_file = pools_file
        self._limits = limits or VolumeLimits(volumes.lvols)
        self._volumes = volumes
        self._devices = devices
        self._vhost = vhost
        self._locks = locks
        self._node = node
        self._max_volumes = max_volumes
        self._inline = inline
        self._host = host or LocalHost()
        self._capacity_of = capacity_of or (lambda _: 0)
        self._asked_of = asked_of or (lambda _: None)
        self._health = VolumeHealth(volumes.targets, devices, vhost)
        self._jobs = LongCalls()

    def node_stage_volume(self, request: pb.NodeStageVolumeRequest) -> pb.NodeStageVolumeResponse:
        """Makes the volume's block device, and mounts its file system unless it is a block one.

        On the vhost face it makes the volume's controller instead.
        """
        _check(request, "volume_id", "staging_target_path", "volume_capability")
        return self._underway("staging", request, lambda: self._stage_locked(request))

    def _stage_locked(self, request: pb.NodeStageVolumeRequest) -> pb.NodeStageVolumeResponse:
        with self._locks.hold(request.volume_id):
            owned = self._grown(self._moves.get(request.volume_id))
            check(request.volume_capability, face=owned.parameters.face)
            with self._limits.in_use(owned):
                if owned.parameters.face == "vhost":
                    size = int(owned.parameters.block_size)
                    self._vhost.attach(request.volume_id, block_size=size)
                else:
                    staging = Path(request.staging_target_path)
                    self._stage(owned, staging, request.volume_capability)
        return pb.NodeStageVolumeResponse()

    def node_unstage_volume(
        self, request: pb.NodeUnstageVolumeRequest
    ) -> pb.NodeUnstageVolumeResponse:
        """Unmounts the volume and takes its block device or its controller away."""
        _check(request, "volume_id", "staging_target_path")
        return self._underway("unstaging", request, lambda: self._unstage_locked(request))

    def _unstage_locked(self, request: pb.NodeUnstageVolumeRequest) -> pb.NodeUnstageVolumeResponse:
        staging = Path(request.staging_target_path)
        with self._locks.hold(request.volume_id):
            if users := self._mounted(request.volume_id) - {mounts.real(staging)}:
                raise precondition(
                    f"volume {request.volume_id} is still published at {', '.join(users)}: "
                    "unpublish it first"
                )
            self._host.unmount(request.volume_id, staging)
            owned = self._volumes.find(request.volume_id)
            if owned is not None or not self._is_of_others(request.volume_id):
                self._devices.detach(request.volume_id)
                self._vhost.detach(request.volume_id)
            if owned is not None:
                self._limits.after_use(owned.volume)
        return pb.NodeUnstageVolumeResponse()

    def node_publish_volume(
        self, request: pb.NodePublishVolumeRequest
    ) -> pb.NodePublishVolumeResponse:
        """Binds the staged volume to a pod's path, or makes the pod's inline volume there."""
        _check(request, "volume_id", "target_path", "volume_capability")
        if request.volume_context.get(EPHEMERAL) == "true":
            with self._locks.hold(request.volume_id):
                self._inline.publish(request)
            return pb.NodePublishVolumeResponse()
        if not request.staging_target_path:
            raise precondition("staging_target_path is missing: stage the volume first")
        return self._underway("publishing", request, lambda: self._publish_locked(request))

    def _publish_locked(self, request: pb.NodePublishVolumeRequest) -> pb.NodePublishVolumeResponse:
        staging, target = Path(request.staging_target_path), Path(request.target_path)
        with self._locks.hold(request.volume_id):
            owned = self._moves.get(request.volume_id)
            check(request.volume_capability, face=owned.parameters.face)
            self._check_staged(owned, staging, request.volume_capability)
            self._check_sole(request)
            if owned.parameters.face == "vhost":
                self._publish_folder(owned, target)
                return pb.NodePublishVolumeResponse()
            # Again: a device that died with its target comes back here.
            device = self._stage(owned, staging, request.volume_capability)
            read_only = _read_only(request)
            if request.volume_capability.HasField("block"):
                shared = _shared(request.volume_capability)
                self._publish_block(owned, target, read_only=read_only, shared=shared)
            else:
                self._publish_mount(owned, device, staging, target, read_only=read_only)
        return pb.NodePublishVolumeResponse()

    def node_unpublish_volume(
        self, request: pb.NodeUnpublishVolumeRequest
    ) -> pb.NodeUnpublishVolumeResponse:
        """Takes the volume away from a pod's path; only an inline one needs a target for it."""
        _check(request, "volume_id", "target_path")
        target = Path(request.target_path)
        self._inline.released(request.volume_id, target)
        with self._locks.hold(request.volume_id):
            if not self._inline.unpublish(request.volume_id, target):
                self._host.remove(request.volume_id, target)
        return pb.NodeUnpublishVolumeResponse()

    def node_get_volume_stats(
        self, request: pb.NodeGetVolumeStatsRequest
    ) -> pb.NodeGetVolumeStatsResponse:
        """Tells the size of a published volume, and what its file system has used."""
        _check(request, "volume_id", "volume_path")
        path = Path(request.volume_path)
        if is_inline(request.volume_id) and mounts.at(path) is not None:  # it holds nothing
            return Stats(usage=[Usage(unit=Usage.BYTES)])
        owned = self._volumes.get(request.volume_id)
        if mounts.at(path) is None:
            raise not_found(f"volume {request.volume_id} is not at {path}")
        if path.is_block_device() or owned.parameters.face == "vhost":
            return Stats(usage=[Usage(unit=Usage.BYTES, total=owned.volume.size)])
        found = os.statvfs(path)
        space = Usage(
            unit=Usage.BYTES,
            total=found.f_blocks * found.f_frsize,
            available=found.f_bavail * found.f_frsize,
            used=(found.f_blocks - found.f_bfree) * found.f_frsize,
        )
        files = Usage(
            unit=Usage.INODES,
            total=found.f_files,
            available=found.f_favail,
            used=found.f_files - found.f_ffree,
        )
        return Stats(usage=[space, files])

    def node_get_volume_health(
        self, request: pb.NodeGetVolumeHealthRequest
    ) -> pb.NodeGetVolumeHealthResponse:
        """Tells what is wrong with a volume here, without waiting for it."""
        _check(request, "volume_id")
        handle = request.volume_id
        found = self._health.entries(handle)
        away = [each for each in found if each.reason == "TargetAway"]
        if not away and not is_inline(handle):
            self._volumes.get(handle)  # NOT_FOUND
        health = pb.VolumeHealth(volume_id=handle, health_statuses=found)
        return pb.NodeGetVolumeHealthResponse(volume_health=health)

    def node_expand_volume(
        self, request: pb.NodeExpandVolumeRequest
    ) -> pb.NodeExpandVolumeResponse:
        """Lets device and file system of a volume take its new size, while in use.

        The volume itself grows first where ControllerExpandVolume was another node's.
        """
        _check(request, "volume_id", "volume_path")
        return self._underway("growing", request, lambda: self._expand_locked(request))

    def _expand_locked(self, request: pb.NodeExpandVolumeRequest) -> pb.NodeExpandVolumeResponse:
        path = Path(request.volume_path)
        with self._locks.hold(request.volume_id):
            owned = self._volumes.get(request.volume_id)
            device = self._devices.device(request.volume_id)
            vhost = owned.parameters.face == "vhost"
            if not path.exists() or (device is None and not vhost):
                raise not_found(f"volume {request.volume_id} is not at {path}")
            volume = owned.volume
            if request.HasField("capacity_range"):
                asked = self._asked_of(owned)
                volume = self._volumes.grow_as_asked(owned, request.capacity_range, asked)
            if device is None:  # a guest has it, and the target told it
                return pb.NodeExpandVolumeResponse(capacity_bytes=volume.size)
            self._devices.grow(request.volume_id)
            writable = [found for found in mounts.of_device(device) if not found.read_only]
            mounted = next((each for each in writable if each.fs_type in FILE_SYSTEMS), None)
            if mounted is not None:
                where = Path(mounted.target)
                self._host.grow(request.volume_id, device, where, mounted.fs_type)
            size = sysblock.size_of(device)
            if size < volume.size - volume.size % sysblock.PAGE_BYTES:
                raise Failure(
                    Code.UNAVAILABLE,
                    f"{device} of volume {request.volume_id} has {size} bytes still, not the "
                    f"{volume.size} that another node has given it: it takes them soon; try again",
                )
        return pb.NodeExpandVolumeResponse(capacity_bytes=size)

    def node_get_capabilities(
        self, _: pb.NodeGetCapabilitiesRequest
    ) -> pb.NodeGetCapabilitiesResponse:
        """Tells which methods there are."""
        kind = pb.NodeServiceCapability
        return pb.NodeGetCapabilitiesResponse(
            capabilities=[kind(rpc=Rpc(type=each)) for each in CAPABILITIES]
        )

    def node_get_info(self, _: pb.NodeGetInfoRequest) -> pb.NodeGetInfoResponse:
        """Tells which node this is, and which pools of Ceph it has.

        A pool that its target gets later no pods are sent here for before the driver begins anew.
        Where a target does not answer, those are told that were known last: kubelet registers the
        driver in any case, for volumes of other targets, too.
        """
        pools = self._pools()
        segments = {TOPOLOGY_KEY: self._node}
        segments |= {f"{POOL_KEY}{uuid}": POOL_VALUE for uuid in sorted(pools)}
        return pb.NodeGetInfoResponse(
            node_id=self._node,
            max_volumes_per_node=self._max_volumes,
            accessible_topology=pb.Topology(segments=segments),
        )

    def _pools(self) -> set[str]:
        """Returns the UUIDs of this node's pools, and keeps them."""
        answers = self._volumes.targets.ask(lambda client: Volumes(client).lvstores())
        stores = [store for each in answers for store in each.value or ()]
        found = {store.uuid for store in stores if store.is_pool and store.makes_volumes}
        if any(each.error is not None for each in answers):
            return found | self._known_pools()
        if self._pools_file is not None:
            try:
                new = self._pools_file.with_suffix(".new")
                new.write_text(json.dumps(sorted(found)))
                new.replace(self._pools_file)
            except OSError as error:
                log.warning("the pools of this node are not kept", reason=str(error))
        return found

    def _known_pools(self) -> set[str]:
        try:
            return set(json.loads(self._pools_file.read_text())) if self._pools_file else set()
        except FileNotFoundError:
            return set()
        except (OSError, ValueError, TypeError) as error:
            log.warning("the pools of this node are not known", reason=str(error))
            return set()

    def _underway(self, what: str, request: Message, work: Callable[[], Answer]) -> Answer:
        """Does a call's work, which goes on when the call can wait no longer.

        The lock of the volume is held as long as that.
        """
        volume: str = request.volume_id  # type: ignore[attr-defined]
        key = what, request.SerializeToString(deterministic=True)
        return self._jobs.run(key, f"{what} volume {volume}", work)

    def _grown(self, owned: OwnedVolume) -> OwnedVolume:
        """Returns a volume, grown if another node's driver was asked to while nobody used it.

        Now its file system can grow in any case; the kernel may refuse to grow a mounted one.
        Where the volume cannot grow it is used as it is, and NodeExpandVolume says why.
        """
        handle, wanted = owned.volume.uuid, self._capacity_of(owned)
        if wanted <= owned.volume.size:
            return owned
        try:
            self._volumes.grow(handle, pb.CapacityRange(required_bytes=wanted))
        except Failure as error:
            log.warning("not grown before it is staged", volume_id=handle, reason=str(error))
        return self._volumes.get(handle)

    def _stage(self, owned: OwnedVolume, staging: Path, capability: pb.VolumeCapability) -> Path:
        """Makes sure that the volume has a working device, mounted at `staging` if it is to be."""
        handle, parameters = owned.volume.uuid, owned.parameters
        present = self._devices.device(handle)
        device = self._devices.attach(
            handle, block_size=int(parameters.block_size), shared=_shared(capability)
        )
        if capability.HasField("block"):
            return device
        try:
            self._mount(owned, device, staging, capability)
        except Exception:
            if present is None:  # kubelet does not unstage what was refused
                self._devices.detach(handle)
            raise
        return device

    def _mount(
        self, owned: OwnedVolume, device: Path, staging: Path, capability: pb.VolumeCapability
    ) -> None:
        """Makes sure that the file system of a device is mounted at `staging`."""
        fs_type = capability.mount.fs_type or owned.parameters.fs_type
        present = mounts.at(staging)
        if present is not None and sysblock.numbers(device) == present.device:
            if present.fs_type != fs_type:
                raise Failure(
                    Code.ALREADY_EXISTS,
                    f"volume {owned.volume.uuid} is staged as {present.fs_type}, not {fs_type}: "
                    "ask for the file system that it has",
                )
            return
        handle, options = owned.volume.uuid, list(capability.mount.mount_flags)
        self._host.unmount(handle, staging)  # of a device that is dead
        self._format(owned, device, fs_type)
        self._host.mount(handle, device, staging, fs_type, options)

    def _format(self, owned: OwnedVolume, device: Path, fs_type: str) -> None:
        """Makes the file system on an empty volume, or anew where an earlier mkfs was cut off."""
        handle = owned.volume.uuid
        begun = self._volumes.formatting(handle)
        present = "" if begun else self._host.holds(handle, device)
        if present == fs_type:
            return
        if present:
            raise precondition(
                f"volume {handle} holds {present} and is to be mounted as {fs_type}: "
                "ask for the file system that it has"
            )
        capabilities.check_size(fs_type, owned.volume.size)
        self._volumes.set_formatting(handle, begun=True)
        self._host.make(handle, device, fs_type)
        self._volumes.set_formatting(handle, begun=False)

    def _publish_block(
        self, owned: OwnedVolume, target: Path, *, read_only: bool, shared: bool
    ) -> None:
        """Makes the device appear at a path, in place of a dead one if need be."""
        handle, block_size = owned.volume.uuid, int(owned.parameters.block_size)
        device = self._devices.attach(
            handle, read_only=read_only, block_size=block_size, shared=shared
        )
        present = mounts.at(target)
        if present is not None and present.root == f"/{device.name}":
            return
        other = self._devices.device(handle, read_only=not read_only)
        if present is not None and other is not None and present.root == f"/{other.name}":
            raise Failure(Code.ALREADY_EXISTS, f"{target} is published with other options")
        self._host.unmount(handle, target)
        self._host.bind_device(handle, device, target)

    def _publish_folder(self, owned: OwnedVolume, target: Path) -> None:
        """Makes the folder of the volume's socket appear at a path."""
        handle, size = owned.volume.uuid, int(owned.parameters.block_size)
        folder = self._vhost.attach(handle, block_size=size)
        if mounts.real(target) in self._vhost.mounted(handle):
            self._host.seal(handle, target)
            return
        self._host.unmount(handle, target)
        self._host.bind_folder(handle, folder, target)

    def _publish_mount(
        self, owned: OwnedVolume, device: Path, staging: Path, target: Path, *, read_only: bool
    ) -> None:
        """Binds a mounted file system to a path, in place of a dead one if need be."""
        handle, present = owned.volume.uuid, mounts.at(target)
        if present is not None and present.device == sysblock.numbers(device):
            if present.read_only and not read_only:
                raise Failure(Code.ALREADY_EXISTS, f"{target} is published with other options")
            if read_only:
                self._host.seal(handle, target)
            return
        self._host.unmount(handle, target)
        self._host.bind_mount(handle, device, staging, target, read_only=read_only)

    def _check_staged(
        self, owned: OwnedVolume, staging: Path, capability: pb.VolumeCapability
    ) -> None:
        handle = owned.volume.uuid
        if owned.parameters.face == "vhost":
            staged = self._vhost.attached(handle)
        else:
            staged = self._devices.device(handle) is not None
            staged &= capability.HasField("block") or mounts.at(staging) is not None
        if not staged:
            raise precondition(f"volume {handle} is not staged at {staging}: stage it first")

    def _check_sole(self, request: pb.NodePublishVolumeRequest) -> None:
        """Raises FAILED_PRECONDITION if a volume for one pod is published to another.

        What kubelet itself has mounted of it for this pod (a block device once more, a subPath) is
        at paths with the pod's UID.
        """
        if request.volume_capability.access_mode.mode != Mode.SINGLE_NODE_SINGLE_WRITER:
            return
        own = {mounts.real(Path(request.staging_target_path))}
        own.add(mounts.real(Path(request.target_path)))
        pod = request.volume_context.get(f"{POD}uid")
        others = self._mounted(request.volume_id) - own
        if others := {path for path in others if pod not in Path(path).parts}:
            raise precondition(
                f"volume {request.volume_id} is for one pod (ReadWriteOncePod) and is published "
                f"at {', '.join(sorted(others))}: delete that pod first"
            )

    def _is_of_others(self, handle: str) -> bool:
        """Whether a handle that is none of ours names something of the target."""
        try:
            return bool(self._volumes.targets.of(handle).call("bdev_get_bdevs", name=handle))
        except RpcError as error:
            if error.code != NO_DEVICE:
                raise
            return False

    def _mounted(self, handle: str) -> set[str]:
        """Returns where the volume's devices are mounted or bound, or its folder."""
        found = (self._devices.device(handle, read_only=flag) for flag in (False, True))
        devices = [device for device in found if device is not None]
        users = {mount.target for device in devices for mount in mounts.of_device(device)}
        return users | self._vhost.mounted(handle)


def _shared(capability: pb.VolumeCapability) -> bool:
    """Whether other nodes may have the volume, too, where it is an image of a pool of Ceph."""
    return capability.access_mode.mode in SHARED_BLOCK


def _read_only(request: pb.NodePublishVolumeRequest) -> bool:
    return request.readonly or request.volume_capability.access_mode.mode in READ_ONLY


def _check(request: object, *fields: str) -> None:
    """Raises INVALID_ARGUMENT if one of a request's fields is empty."""
    for field in fields:
        value = getattr(request, field)
        if not value if isinstance(value, str) else not value.ByteSize():
            raise invalid(f"{field} is missing")
