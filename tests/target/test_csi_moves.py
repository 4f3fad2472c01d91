"""A claim's volume goes to another node and back: real targets and streams, and the driver of each.

The driver's services run in this process, as there is no API server: NOT one answers for it.
"""

from __future__ import annotations

from typing import Any

import pytest

from csi import RECEIVED_KEY, TOPOLOGY_KEY
from csi.controller import Controller
from csi.errors import Code
from csi.kinds import VOLUME
from csi.locks import VolumeLocks
from csi.moves import HARMLESS, Moves
from csi.objects import PersistentVolume
from csi.proto import csi_pb2 as pb
from csi.snapshots import OwnedSnapshots
from csi.targets import Targets
from csi.volumenodes import VolumeNodes
from csi.volumes import BEFORE_XATTR, FORMATTING_XATTR, OWNER_XATTR, OwnedVolumes
from plugin.streams import receiving
from pydataplane.volumes import Volumes
from pydataplane.watchedclient import WatchedClient
from tests.support.target import Target
from tests.target.conftest import MakeTarget
from tests.target.test_cli import done
from tests.target.test_cli import refused as refused_command
from tests.target.test_images import change, contents
from tests.target.test_streams import sent, taken
from tests.unit.csi.conftest import block, refused
from tests.unit.csi.fake_cluster import FakeCluster

pytestmark = pytest.mark.root
MIB = 1 << 20
SIZE = 8 * MIB
PV = "pvc-1"


class Node:
    """A node with an lvstore `lvs0`, and the controller part of its driver."""

    def __init__(self, name: str, target: Target, cluster: FakeCluster) -> None:
        self.name = name
        self.target = target
        self._cluster = cluster
        target.make_lvstore("lvs0", 64 * MIB)
        client = WatchedClient(target.rpc_socket)
        self.volumes = Volumes(client)
        self.lvstore = self.volumes.lvstore("lvs0").uuid
        nodes = VolumeNodes(name, cluster.connect)
        volumes, locks = OwnedVolumes(Targets([client]), name), VolumeLocks()
        self.moves = Moves(volumes, nodes)
        snapshots = OwnedSnapshots(volumes, locks)
        self.controller = Controller(
            *(volumes, snapshots, locks, name, nodes.node_of), moves=self.moves
        )

    def create(self, name: str, **changes: Any) -> str:
        request = pb.CreateVolumeRequest(
            name=name,
            capacity_range=pb.CapacityRange(required_bytes=SIZE),
            volume_capabilities=[block()],
            parameters={"lvstore": "lvs0", "thin": "true"},
            **changes,
        )
        return self.controller.create_volume(request).volume.volume_id

    def clone(self, of: str) -> str:
        source = pb.VolumeContentSource.VolumeSource(volume_id=of)
        return self.create("pvc-2", volume_content_source=pb.VolumeContentSource(volume=source))

    def snapshot(self, of: str) -> str:
        request = pb.CreateSnapshotRequest(name="snap-1", source_volume_id=of)
        return self.controller.create_snapshot(request).snapshot.snapshot_id

    def delete(self, handle: str) -> None:
        """Deletes a volume as csi-provisioner does: while the claim of PV is gone, if PV is there.

        It has its claim again afterwards, as no test deletes that for good.
        """
        found = self._cluster.objects.get(("PersistentVolume", PV))
        if found is not None:
            found["status"] = {"phase": "Released"}
        try:
            self.controller.delete_volume(pb.DeleteVolumeRequest(volume_id=handle))
        finally:
            if found is not None:
                found["status"] = {"phase": "Bound"}

    def names(self) -> list[str]:
        return sorted(volume.name for volume in self.volumes.volumes())


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def nodes(make_target: MakeTarget, cluster: FakeCluster) -> tuple[Node, Node]:
    """Two nodes."""
    first, second = (Node(name, make_target().start(), cluster) for name in ("node1", "node2"))
    return first, second


def give(cluster: FakeCluster, node: Node, handle: str, received: str = "") -> None:
    """Gives the volume's object the affinity of a node, as an administrator does.

    And the name of the last snapshot that is sent there.
    """
    expression = {"key": TOPOLOGY_KEY, "operator": "In", "values": [node.name]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    change = {"nodeAffinity": {"required": terms}}
    if ("PersistentVolume", PV) in cluster.objects:
        notes = {"annotations": {RECEIVED_KEY: received}} if received else {}
        cluster.patch(VOLUME, PV, None, {"metadata": notes, "spec": change})
    else:
        source = {"driver": "csi.virtlun.dev", "volumeHandle": handle}
        cluster.put(VOLUME, {"metadata": {"name": PV}, "spec": {"csi": source} | change})


def lvstore_of(cluster: FakeCluster) -> str:
    return PersistentVolume.of(cluster.get(VOLUME, PV)).lvstore


def test_a_volume_goes_to_another_node_and_comes_back(
    nodes: tuple[Node, Node], cluster: FakeCluster
) -> None:
    first, second = nodes
    handle = first.create(PV)
    give(cluster, first, handle)
    change(first.target, f"lvs0/{PV}", MIB)
    done(first.target, "volume", "snapshot", f"lvs0/{PV}", "one")
    # Under another name, which says nothing.
    taken(second.target, sent(first.target, f"lvs0/{PV}@one"), "lvs0/x", "--uuid", handle, "--thin")
    refused(lambda: second.delete(handle), Code.FAILED_PRECONDITION)
    give(cluster, second, handle, "two")  # the old node writes no more
    for node, words in ((first, "is of node node2"), (second, "is x@one, and @two is to be")):
        for act in (node.moves.get, node.delete):
            why = refused(lambda act=act: act(handle), Code.FAILED_PRECONDITION)  # type: ignore[misc]
            assert words in why
    change(first.target, f"lvs0/{PV}", 3 * MIB)
    last = ("volume", "snapshot", f"lvs0/{PV}", "two", "--unused")
    with first.target.exported(f"lvs0/{PV}"):
        assert "is in use (" in refused_command(first.target, *last)
    done(first.target, *last)
    assert "is there already" in refused_command(first.target, *last)
    stream = sent(first.target, f"lvs0/{PV}@two", "--since", "@one")
    taken(second.target, stream, "lvs0/x")

    assert second.moves.get(handle).owner.name == PV
    assert lvstore_of(cluster) == second.lvstore
    assert contents(second.target, "lvs0/x") == contents(first.target, f"lvs0/{PV}")
    for call in (first.moves.get, first.snapshot, first.delete):
        refused(lambda call=call: call(handle), Code.FAILED_PRECONDITION)  # type: ignore[misc]
    refused(lambda: first.clone(handle), Code.RESOURCE_EXHAUSTED)
    assert first.names() == [PV, f"{PV}@one", f"{PV}@two"]
    clone, taken_there = second.clone(handle), second.snapshot(handle)
    assert contents(second.target, clone) == contents(second.target, "lvs0/x")
    second.delete(clone)
    second.controller.delete_snapshot(pb.DeleteSnapshotRequest(snapshot_id=taken_there))

    # Back, by what has changed there.
    change(second.target, "lvs0/x", 5 * MIB)
    done(second.target, "volume", "snapshot", "lvs0/x", "three")
    give(cluster, first, handle, "three")
    for call in (first.moves.get, first.delete):
        why = refused(lambda call=call: call(handle), Code.FAILED_PRECONDITION)  # type: ignore[misc]
        assert "is older than the one" in why
    stream = sent(second.target, "lvs0/x@three", "--since", "@two")
    taken(first.target, stream, f"lvs0/{PV}")
    assert first.moves.get(handle).volume.path == f"lvs0/{PV}"
    assert lvstore_of(cluster) == first.lvstore
    assert contents(first.target, f"lvs0/{PV}") == contents(second.target, "lvs0/x")
    refused(lambda: second.delete(handle), Code.FAILED_PRECONDITION)
    for _ in range(2):
        first.delete(handle)
    assert PV not in first.names()
    done(second.target, "volume", "delete", "--yes", "--snapshots", "lvs0/x")
    assert second.names() == []


def test_deletion_on_the_new_node_is_repeated_and_waits_for_its_lvstore(
    nodes: tuple[Node, Node], cluster: FakeCluster
) -> None:
    first, second = nodes
    handle = first.create(PV)
    give(cluster, first, handle)
    done(first.target, "volume", "snapshot", f"lvs0/{PV}", "one")
    give(cluster, second, handle, "one")  # before the data is there
    why = refused(lambda: second.delete(handle), Code.UNAVAILABLE)
    assert f"virtlun volume receive --uuid {handle}" in why
    second.volumes.create(
        f"lvs0/{PV}.receive", SIZE, thin=True, uuid=handle, xattrs={receiving.XATTR: "{}"}
    )  # as a command leaves it that is killed
    for call in (second.moves.get, second.delete):
        why = refused(lambda call=call: call(handle), Code.FAILED_PRECONDITION)  # type: ignore[misc]
        assert f"({receiving.XATTR}) say that it is not whole" in why
    second.volumes.delete(handle)
    taken(second.target, sent(first.target, f"lvs0/{PV}@one"), f"lvs0/{PV}", "--uuid", handle)
    second.moves.get(handle)
    (base,) = second.target.rpc("bdev_lvol_get_lvstores")
    second.target.rpc("bdev_uring_delete", name=base["base_bdev"])
    refused(lambda: second.delete(handle), Code.UNAVAILABLE)
    second.volumes.import_lvstore(second.target.directory / "lvs0.img")
    for _ in range(2):
        second.delete(handle)
    assert second.names() == [f"{PV}@one"]
    assert first.names() == [PV, f"{PV}@one"]


def test_what_a_stream_leaves_at_a_volume_keeps_it_from_nothing_but_the_claim_before(
    nodes: tuple[Node, Node],
) -> None:
    first, second = nodes
    handle = first.create(PV)
    done(first.target, "volume", "snapshot", f"lvs0/{PV}", "one")
    taken(second.target, sent(first.target, f"lvs0/{PV}@one"), f"lvs0/{PV}", "--uuid", handle)
    assert set(second.volumes.xattrs(handle)) <= HARMLESS
    second.volumes.set_xattr(handle, OWNER_XATTR, first.volumes.xattrs(handle)[OWNER_XATTR])
    second.volumes.set_xattr(handle, FORMATTING_XATTR, "1")  # its mkfs was cut off there
    done(first.target, "volume", "snapshot", f"lvs0/{PV}", "two")
    stream = sent(first.target, f"lvs0/{PV}@two", "--since", "@one")
    taken(second.target, stream, f"lvs0/{PV}")
    assert set(second.volumes.xattrs(handle)) <= HARMLESS
    owner = first.volumes.xattrs(handle)[OWNER_XATTR]
    assert second.volumes.xattrs(handle)[BEFORE_XATTR] == owner
    client = WatchedClient(second.target.rpc_socket)
    assert Moves(OwnedVolumes(Targets([client]), "node2")).get(handle)
