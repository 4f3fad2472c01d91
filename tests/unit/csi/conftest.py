"""A driver over doubles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import csi.capabilities
import csi.kubevirt.inline
import csi.kubevirt.podcontrollers
import csi.node
import csi.vhostface
from csi.attributes import Attributes
from csi.controller import Controller
from csi.errors import Code, describe, precondition
from csi.host import Host
from csi.kubevirt.controllers import VmControllers
from csi.kubevirt.inline import InlineVolumes
from csi.locks import VolumeLocks
from csi.moves import Moves
from csi.node import Node
from csi.proto import csi_pb2 as pb
from csi.snapshots import OwnedSnapshots
from csi.targets import Targets
from csi.vhostface import VhostFace
from csi.volumelimits import VolumeLimits
from csi.volumenodes import VolumeNodes
from csi.volumes import OwnedVolume, OwnedVolumes
from tests.support.fake_target import LVSTORE, MIB, FakeTarget
from tests.unit.csi.fake_cluster import FakeCluster
from tests.unit.csi.fakes import FakeHost

NODE = "node1"
Mode = pb.VolumeCapability.AccessMode


class World:
    """A driver, what it drives, and short forms of its calls."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.staging = str(directory / "staging")
        self.target = FakeTarget()
        self.host = FakeHost(self.target)
        self.locks = VolumeLocks()
        #: What the API server knows: the node of each persistent volume, by handle.
        self.nodes: dict[str, str] = {}
        #: And the bytes that each is to have.
        self.capacities: dict[str, int] = {}
        #: And the bytes that its claim asks for.
        self.asked: dict[str, int] = {}
        #: And the VolumeAttributesClass that each has.
        self.classes: dict[str, Attributes] = {}
        #: Names of PersistentVolumes that others have made.
        self.forged: set[str] = set()
        #: An API server that tells where volumes are; None: nobody does.
        self.cluster: FakeCluster | None = None
        self.restart()

    def restart(self) -> None:
        """Begins anew with nothing in memory, as after a crash."""
        targets = Targets([self.target])
        volumes = OwnedVolumes(targets, NODE)
        snapshots = OwnedSnapshots(volumes, self.locks)
        limits = VolumeLimits(volumes.lvols, lambda owned: self.classes.get(owned.volume.uuid))
        self.persistent = VolumeNodes(NODE, self.cluster.connect if self.cluster else None)
        self.moves = moves = Moves(volumes, self.persistent)
        self.controller = Controller(
            *(volumes, snapshots, self.locks, NODE, self.nodes.get),
            limits=limits,
            check_counts=self._check_counts,
            asked_of=lambda owned: self.asked.get(owned.volume.uuid),
            moves=moves,
        )
        inline = InlineVolumes(
            VmControllers(targets, self.host, self.locks), None, host=cast(Host, self.host)
        )
        faces = self.host, VhostFace(targets)
        self.node = Node(
            *(volumes, *faces, self.locks, NODE, 0, inline),
            capacity_of=lambda owned: self.capacities.get(owned.volume.uuid, 0),
            asked_of=lambda owned: self.asked.get(owned.volume.uuid),
            host=cast(Host, self.host),
            pools_file=self.directory / "pools.json",
            limits=limits,
            moves=moves,
        )

    def _check_counts(self, name: str, _: OwnedVolume) -> None:
        if name in self.forged:
            raise precondition(f"{name} has no say")

    def create(self, name: str = "pvc-1", size: int = 64 * MIB, **changes: Any) -> pb.Volume:
        parameters = {"lvstore": LVSTORE} | changes.pop("parameters", {})
        request = pb.CreateVolumeRequest(
            name=name,
            capacity_range=changes.pop("capacity_range", pb.CapacityRange(required_bytes=size)),
            volume_capabilities=changes.pop("volume_capabilities", [mount()]),
            parameters=parameters,
            **changes,
        )
        return self.controller.create_volume(request).volume

    def stage(self, handle: str, capability: pb.VolumeCapability | None = None) -> None:
        self.node.node_stage_volume(
            pb.NodeStageVolumeRequest(
                volume_id=handle,
                staging_target_path=self.staging,
                volume_capability=capability or mount(),
            )
        )

    def publish(
        self, handle: str, where: str = "pod", capability: Any = None, **changes: Any
    ) -> str:
        target = str(self.directory / where)
        self.node.node_publish_volume(
            pb.NodePublishVolumeRequest(
                volume_id=handle,
                staging_target_path=self.staging,
                target_path=target,
                volume_capability=capability or mount(),
                **changes,
            )
        )
        return target

    def unpublish(self, handle: str, where: str = "pod") -> None:
        target = str(self.directory / where)
        self.node.node_unpublish_volume(
            pb.NodeUnpublishVolumeRequest(volume_id=handle, target_path=target)
        )

    def unstage(self, handle: str) -> None:
        self.node.node_unstage_volume(
            pb.NodeUnstageVolumeRequest(volume_id=handle, staging_target_path=self.staging)
        )

    def delete(self, handle: str) -> None:
        self.controller.delete_volume(pb.DeleteVolumeRequest(volume_id=handle))


def mount(fs_type: str = "", mode: int = Mode.SINGLE_NODE_WRITER) -> pb.VolumeCapability:
    """Returns a capability to mount."""
    return pb.VolumeCapability(
        mount=pb.VolumeCapability.MountVolume(fs_type=fs_type),
        access_mode=Mode(mode=Mode.Mode.Name(mode)),
    )


def block(mode: int = Mode.SINGLE_NODE_WRITER) -> pb.VolumeCapability:
    """Returns a capability for the block device."""
    return pb.VolumeCapability(
        block=pb.VolumeCapability.BlockVolume(), access_mode=Mode(mode=Mode.Mode.Name(mode))
    )


def refused(call: Callable[[], object], code: Code) -> str:
    """Makes a call that is to be refused with this code, and returns the sentence."""
    try:
        call()
    except Exception as error:
        found, message = describe(error)
        assert found is code, message
        return message
    raise AssertionError(f"the call should have failed with {code.name}")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A driver with an empty target of 1 GiB on a host without volumes."""
    made = World(tmp_path)
    monkeypatch.setattr(csi.node, "mounts", made.host)
    monkeypatch.setattr(csi.node, "sysblock", made.host)
    monkeypatch.setattr(csi.capabilities, "XFS_BYTES_MIN", MIB)
    for module in (csi.vhostface, csi.kubevirt.podcontrollers, csi.kubevirt.inline):
        monkeypatch.setattr(module, "mounts", made.host)
    return made
