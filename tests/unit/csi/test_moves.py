"""Volumes that were sent to another node: which node's counts, and what is taken over there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from csi import LUN_FINALIZER, LVSTORE_KEY, POOL_KEY, RECEIVED_KEY, TOPOLOGY_KEY, handles
from csi.cluster import Change
from csi.clustererrors import UnreachableError
from csi.errors import Code
from csi.kinds import CLAIM, POD, STORAGE_CLASS, VM_VOLUME, VOLUME, Kind
from csi.lvols import Lvols
from csi.objects import PersistentVolume
from csi.proto import csi_pb2 as pb
from csi.volumeindex import VolumeIndex
from csi.volumenodes import VolumeNodes
from csi.volumes import BEFORE_XATTR, OWNER_XATTR, Owner
from pydataplane.errors import RpcError
from tests.support.fake_target import LVSTORE, LVSTORE_UUID, MIB, Volume
from tests.unit.csi.conftest import NODE, World, refused
from tests.unit.csi.fake_cluster import FakeCluster

OTHER_NODE = "node2"
OTHER_LVSTORE = "77aa0000-0000-4000-8000-000000000000"
HANDLE = handles.make(OTHER_LVSTORE, OTHER_NODE, "pvc-1")
"""Of a volume that was made on the other node."""
ALIAS = f"{LVSTORE}/pvc-1"
CONTEXT = {"fsType": "xfs", "blockSize": "4096", "face": "kernel"}


@pytest.fixture
def moved(world: World) -> World:
    """A driver of a node that was sent a volume, of which it has all."""
    world.cluster = FakeCluster()
    world.cluster.put(
        STORAGE_CLASS, {"metadata": {"name": "thin"}, "parameters": {"overcommit": "2"}}
    )
    world.target.volumes[ALIAS] = Volume(HANDLE, parent="pvc-1@two")
    world.restart()
    return world


def say(
    world: World,
    node: str,
    lvstore: str = "",
    *,
    of: str = HANDLE,
    name: str = "pvc-1",
    received: str | None = None,
    phase: str = "Bound",
    **spec: Any,
) -> None:
    """Has the API server say on which node a volume is, and in which lvstore it was used last.

    Of what came from the other node it has the last snapshot, too, where none is given.
    """
    received = ("two" if of == HANDLE else "") if received is None else received
    expression = {"key": TOPOLOGY_KEY, "operator": "In", "values": [node]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    context = {f"csi.virtlun.dev/{key}": value for key, value in CONTEXT.items()}
    source = {"driver": "csi.virtlun.dev", "volumeHandle": of, "volumeAttributes": context}
    notes = {LVSTORE_KEY: lvstore, RECEIVED_KEY: received}
    notes = {key: value for key, value in notes.items() if value}
    meta: dict[str, Any] = {"name": name, "annotations": notes}
    told = {
        "csi": source,
        "nodeAffinity": {"required": terms},
        "claimRef": {"namespace": "default", "name": "data"},
        "storageClassName": "thin",
    }
    assert world.cluster is not None
    found = {"metadata": meta, "spec": told | spec, "status": {"phase": phase}}
    world.cluster.put(VOLUME, found)
    world.cluster.forget_names()


def deleting(world: World) -> Callable[[str], None]:
    """Returns what deletes a volume as csi-provisioner does: once the claim of pvc-1 is gone."""

    def delete(handle: str) -> None:
        assert world.cluster is not None
        found = world.cluster.objects["PersistentVolume", "pvc-1"]
        before, found["status"] = found["status"], {"phase": "Released"}
        try:
            world.delete(handle)
        finally:
            found["status"] = before

    return delete


def said(world: World, key: str = LVSTORE_KEY) -> str:
    """Returns what an annotation of the PersistentVolume says."""
    assert world.cluster is not None
    meta = world.cluster.objects["PersistentVolume", "pvc-1"]["metadata"]
    return str((meta.get("annotations") or {}).get(key, ""))


def xattrs(world: World) -> dict[str, str]:
    return world.target.volumes[ALIAS].xattrs


def expand(world: World, handle: str, size: int) -> pb.ControllerExpandVolumeResponse:
    capacity = pb.CapacityRange(required_bytes=size)
    request = pb.ControllerExpandVolumeRequest(volume_id=handle, capacity_range=capacity)
    return world.controller.controller_expand_volume(request)


def snapshot(world: World, handle: str) -> pb.Snapshot:
    request = pb.CreateSnapshotRequest(name="snap-1", source_volume_id=handle)
    return world.controller.create_snapshot(request).snapshot


def clone(world: World, handle: str) -> pb.Volume:
    source = pb.VolumeContentSource.VolumeSource(volume_id=handle)
    content = pb.VolumeContentSource(volume=source)
    return world.create("pvc-2", volume_content_source=content)


def test_what_was_received_is_taken_over_when_it_is_staged(moved: World) -> None:
    say(moved, NODE)
    moved.stage(HANDLE)
    moved.publish(HANDLE)
    assert (said(moved), said(moved, RECEIVED_KEY)) == (LVSTORE_UUID, "")
    owner = json.loads(xattrs(moved)[OWNER_XATTR])
    assert (owner["driver"], owner["name"], owner["claim"]) == (
        *("csi.virtlun.dev", "pvc-1"),
        "default/data",
    )
    assert json.loads(owner["parameters"]) == {
        **{"lvstore": LVSTORE, "thin": "true", "overcommit": "2"},
        **CONTEXT,
    }
    moved.restart()
    assert expand(moved, HANDLE, 128 * MIB).capacity_bytes == 128 * MIB


def test_growth_before_the_first_pod_is_of_what_was_received(moved: World) -> None:
    say(moved, NODE)
    grown = expand(moved, HANDLE, 128 * MIB)
    assert (grown.capacity_bytes, grown.node_expansion_required) == (128 * MIB, False)
    assert (said(moved), moved.target.volumes[ALIAS].mib) == (LVSTORE_UUID, 128)


def test_a_claim_that_is_deleted_at_once_takes_its_volume_with_it(moved: World) -> None:
    say(moved, NODE)
    for _ in range(2):
        deleting(moved)(HANDLE)
    assert ALIAS not in moved.target.volumes
    moved.target.loaded = False
    refused(lambda: deleting(moved)(HANDLE), Code.UNAVAILABLE)


NOT_WHOLE = {"virtlun.receive": json.dumps({"since": None, "to": "one", "was": 0})}
OTHER_OWNER = {OWNER_XATTR: Owner("csi.example.org", "x", "", "").written()}


@pytest.mark.parametrize(
    ("noted", "words"),
    [
        pytest.param(NOT_WHOLE, "(virtlun.receive) say that it is not whole", id="half"),
        pytest.param({"virtlun.move": "{}"}, "(virtlun.move) say", id="moving"),
        pytest.param({"csi.formatting": "1"}, "(csi.formatting) say", id="mkfs-cut-off"),
        pytest.param({"cinder.deleted": "1"}, "(cinder.deleted) say", id="cinder"),
        pytest.param(OTHER_OWNER, "(csi.volume) say", id="another-driver"),
    ],
)
def test_what_is_not_whole_or_somebody_else_s_is_not_taken_over(
    moved: World, noted: dict[str, str], words: str
) -> None:
    say(moved, NODE)
    xattrs(moved).update(noted)
    for call in (moved.stage, deleting(moved)):
        assert words in refused(lambda call=call: call(HANDLE), Code.FAILED_PRECONDITION)  # type: ignore[misc]
    assert (said(moved), xattrs(moved)) == ("", noted)
    assert ALIAS in moved.target.volumes


def test_what_no_object_says_is_here_is_not_taken_over(moved: World) -> None:
    for call in (moved.stage, snapshot):
        refused(
            lambda call=call: call(HANDLE) if call != snapshot else call(moved, HANDLE),  # type: ignore[misc]
            Code.UNAVAILABLE,
        )
    say(moved, OTHER_NODE)
    for act in (moved.stage, deleting(moved)):
        assert f"is of node {OTHER_NODE}" in refused(
            lambda act=act: act(HANDLE),  # type: ignore[misc]
            Code.FAILED_PRECONDITION,
        )
    assert xattrs(moved) == {}


def test_an_lvol_whose_uuid_no_driver_made_is_nobody_s_claim(moved: World) -> None:
    """An object that an administrator makes for a machine's disk would have it deleted."""
    disk = "4b1d6e9e-94f4-4a5c-8a2b-1f2f3a4b5c6d"
    moved.target.volumes[ALIAS] = Volume(disk)
    say(moved, NODE, of=disk)
    refused(lambda: moved.stage(disk), Code.NOT_FOUND)
    assert "is not of csi.virtlun.dev" in refused(
        lambda: deleting(moved)(disk), Code.FAILED_PRECONDITION
    )


def test_of_two_objects_none_has_it_taken_over(moved: World) -> None:
    say(moved, NODE)
    say(moved, NODE, name="second")
    why = refused(lambda: moved.stage(HANDLE), Code.FAILED_PRECONDITION)
    assert "PersistentVolumes pvc-1, second all name" in why


def test_what_its_class_encrypts_is_not_taken_over_in_the_clear(moved: World) -> None:
    assert moved.cluster is not None
    parameters = {"encryptionKey": "k1"}
    moved.cluster.put(STORAGE_CLASS, {"metadata": {"name": "thin"}, "parameters": parameters})
    say(moved, NODE)
    why = refused(lambda: moved.stage(HANDLE), Code.FAILED_PRECONDITION)
    assert "receive it anew with `--key k1`" in why
    assert said(moved) == ""


def put_user(world: World, kind: Kind, name: str, spec: Any, **more: Any) -> None:
    assert world.cluster is not None
    meta = {"name": name, "namespace": "default"} | more.pop("meta", {})
    world.cluster.put(kind, {"metadata": meta, "spec": spec, **more})


BY_NAME = [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]


def test_what_others_of_another_node_write_to_is_not_taken_over(moved: World) -> None:
    say(moved, NODE, claimRef={"namespace": "default", "name": "data", "uid": "one"})
    assert moved.cluster is not None
    for name, spec, phase in (
        ("old", {"nodeName": OTHER_NODE, "volumes": BY_NAME}, "Running"),
        ("da", {"nodeName": OTHER_NODE, "volumes": [{"name": "ta", "ephemeral": {}}]}, "Running"),
        ("ended", {"nodeName": OTHER_NODE, "volumes": BY_NAME}, "Succeeded"),
        ("new", {"nodeName": NODE, "volumes": BY_NAME}, "Pending"),
        ("later", {"volumes": BY_NAME}, "Pending"),
    ):
        put_user(moved, POD, name, spec, status={"phase": phase})
    say(moved, NODE, claimRef={"namespace": "default", "name": "da-ta"})
    why = refused(lambda: moved.stage(HANDLE), Code.FAILED_PRECONDITION)
    assert f"while the old one is used (da on {OTHER_NODE})" in why
    say(moved, NODE, claimRef={"namespace": "default", "name": "data", "uid": "one"})
    disk, held = {"claimName": "data"}, {"finalizers": [LUN_FINALIZER]}
    put_user(moved, VM_VOLUME, "disk", disk, status={"node": OTHER_NODE}, meta=held)
    put_user(moved, VM_VOLUME, "waits", disk, status={"node": OTHER_NODE})
    put_user(moved, VM_VOLUME, "here", disk, status={"node": NODE}, meta=held)
    why = refused(lambda: moved.stage(HANDLE), Code.FAILED_PRECONDITION)
    assert f"(VmVolume disk on {OTHER_NODE}, old on {OTHER_NODE})" in why
    assert (said(moved), xattrs(moved)) == ("", {})
    del moved.cluster.objects["Pod", "old"]
    del moved.cluster.objects["VmVolume", "disk"]
    moved.stage(HANDLE)


def test_pods_of_a_claim_that_was_made_anew_do_not_keep_the_old_volume(moved: World) -> None:
    say(moved, NODE, claimRef={"namespace": "default", "name": "data", "uid": "one"})
    put_user(moved, CLAIM, "data", {}, meta={"uid": "two"})
    put_user(moved, POD, "other", {"nodeName": OTHER_NODE, "volumes": BY_NAME})
    deleting(moved)(HANDLE)
    assert ALIAS not in moved.target.volumes


def test_only_what_has_the_last_snapshot_is_taken_over(moved: World) -> None:
    say(moved, NODE, received="")
    for call in (moved.stage, deleting(moved)):
        why = refused(lambda call=call: call(HANDLE), Code.FAILED_PRECONDITION)  # type: ignore[misc]
        assert f"`kubectl annotate pv pvc-1 {RECEIVED_KEY}=SNAPSHOT`" in why
    say(moved, NODE, received="three")
    for call in (moved.stage, deleting(moved)):
        why = refused(lambda call=call: call(HANDLE), Code.FAILED_PRECONDITION)  # type: ignore[misc]
        assert "its last snapshot is pvc-1@two, and @three is to be" in why
    assert (said(moved), xattrs(moved)) == ("", {})
    moved.target.volumes[ALIAS].parent = "x@three"
    moved.stage(HANDLE)


def test_the_name_of_the_snapshot_is_taken_away_when_it_could_not_be_before(moved: World) -> None:
    """Else it would let an older copy in, the next time that the volume goes to another node."""
    say(moved, NODE)
    moved.stage(HANDLE)
    say(moved, NODE, LVSTORE_UUID)  # as if the driver had died before
    moved.publish(HANDLE)
    assert said(moved, RECEIVED_KEY) == ""


def test_what_is_received_anew_while_it_is_taken_over_is_not(
    moved: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(moved, NODE)
    note = moved.target.virtlun_lvol_set_xattr

    def begins(name: str, xattr_name: str, xattr_value: str) -> bool:
        xattrs(moved)["virtlun.receive"] = "{}"
        return note(name, xattr_name, xattr_value)

    monkeypatch.setattr(moved.target, "virtlun_lvol_set_xattr", begins)
    why = refused(lambda: moved.stage(HANDLE), Code.FAILED_PRECONDITION)
    assert "(virtlun.receive) say that it is not whole" in why
    assert xattrs(moved) == {"virtlun.receive": "{}"}


def test_an_affinity_that_was_set_before_the_data_came_is_one_sentence(moved: World) -> None:
    del moved.target.volumes[ALIAS]
    say(moved, NODE)
    for call in (moved.stage, deleting(moved)):
        why = refused(lambda call=call: call(HANDLE), Code.UNAVAILABLE)  # type: ignore[misc]
        assert f"receive it there (`virtlun volume receive --uuid {HANDLE}`)" in why
    moved.target.volumes[ALIAS] = Volume(HANDLE, parent="pvc-1@two")
    moved.stage(HANDLE)
    assert said(moved) == LVSTORE_UUID


def test_a_driver_that_dies_as_it_takes_over_does_so_when_it_is_back(moved: World) -> None:
    say(moved, NODE)
    moved.target.fail["virtlun_lvol_set_xattr"] = RpcError(-5, "the disk failed")
    refused(lambda: moved.stage(HANDLE), Code.INTERNAL)
    assert (said(moved), xattrs(moved)) == (LVSTORE_UUID, {})
    moved.restart()
    moved.stage(HANDLE)
    assert OWNER_XATTR in xattrs(moved)


def test_an_object_that_is_given_away_meanwhile_is_not_noted_at(moved: World) -> None:
    say(moved, NODE)
    assert moved.cluster is not None
    moved.cluster.conflicts = 1
    refused(lambda: moved.stage(HANDLE), Code.UNAVAILABLE)
    assert (said(moved), xattrs(moved)) == ("", {})
    moved.stage(HANDLE)


def noting(world: World, monkeypatch: pytest.MonkeyPatch, also: Callable[[], None]) -> None:
    """Has something happen just after the driver has noted its lvstore."""
    note = VolumeNodes.note_lvstore

    def notes(nodes: VolumeNodes, volume: PersistentVolume, lvstore: str) -> None:
        note(nodes, volume, lvstore)
        also()

    monkeypatch.setattr(VolumeNodes, "note_lvstore", notes)


def test_of_two_nodes_that_take_over_at_once_none_goes_on(
    moved: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them was the only one when it looked first."""
    say(moved, NODE)
    with monkeypatch.context() as patch:
        noting(moved, patch, lambda: say(moved, OTHER_NODE, OTHER_LVSTORE, name="restored"))
        for _ in range(2):
            why = refused(lambda: moved.stage(HANDLE), Code.FAILED_PRECONDITION)
            assert f"pvc-1 of node {NODE}, restored of node {OTHER_NODE}, and which of them" in why
            assert xattrs(moved) == {}
    assert said(moved) == LVSTORE_UUID
    assert moved.cluster is not None
    del moved.cluster.objects["PersistentVolume", "restored"]
    moved.cluster.forget_names()
    moved.stage(HANDLE)
    assert OWNER_XATTR in xattrs(moved)


@pytest.mark.parametrize("gone", [False, True], ids=["given away", "gone"])
def test_an_object_that_goes_once_it_is_noted_at_has_nothing_taken_over(
    moved: World, gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(moved, NODE)

    def goes() -> None:
        assert moved.cluster is not None
        if gone:
            del moved.cluster.objects["PersistentVolume", "pvc-1"]
        else:
            say(moved, OTHER_NODE, LVSTORE_UUID)

    noting(moved, monkeypatch, goes)
    refused(lambda: moved.stage(HANDLE), Code.ABORTED if gone else Code.FAILED_PRECONDITION)
    assert xattrs(moved) == {}


# On the node that it was sent from


@pytest.fixture
def made(world: World) -> tuple[World, str]:
    """A driver of a node that has made a volume, which was sent to another one, and its handle."""
    world.cluster = FakeCluster()
    world.restart()
    return world, world.create().volume_id


def test_what_was_sent_away_is_left_alone(made: tuple[World, str]) -> None:
    world, handle = made
    say(world, OTHER_NODE, of=handle)
    world.nodes[handle] = OTHER_NODE
    for call in (world.stage, deleting(world)):
        why = refused(lambda call=call: call(handle), Code.FAILED_PRECONDITION)  # type: ignore[misc]
        assert f"is of node {OTHER_NODE}, says the nodeAffinity of PersistentVolume pvc-1" in why
    refused(lambda: snapshot(world, handle), Code.FAILED_PRECONDITION)
    why = refused(lambda: clone(world, handle), Code.RESOURCE_EXHAUSTED)
    assert "on the node that does" in why
    grown = expand(world, handle, 128 * MIB)
    assert (grown.capacity_bytes, grown.node_expansion_required) == (128 * MIB, True)
    assert list(world.target.volumes) == [ALIAS]
    assert world.target.volumes[ALIAS].mib == 64
    del world.target.volumes[ALIAS]  # by hand
    refused(lambda: world.delete(handle), Code.FAILED_PRECONDITION)


def test_an_old_copy_does_not_count_when_the_affinity_is_set_back(made: tuple[World, str]) -> None:
    world, handle = made
    say(world, NODE, OTHER_LVSTORE, of=handle, received="two")
    for call in (world.stage, deleting(world)):
        why = refused(lambda call=call: call(handle), Code.FAILED_PRECONDITION)  # type: ignore[misc]
        assert "is older than the one" in why
        assert f"kubectl annotate pv pvc-1 {LVSTORE_KEY}-" in why
    refused(lambda: snapshot(world, handle), Code.FAILED_PRECONDITION)
    refused(lambda: expand(world, handle, 128 * MIB), Code.FAILED_PRECONDITION)
    assert world.target.volumes[ALIAS].mib == 64
    xattrs(world)[BEFORE_XATTR] = xattrs(world).pop(OWNER_XATTR)  # as `virtlun volume receive` does
    world.target.volumes[ALIAS].parent = "pvc-1@two"
    world.stage(handle)
    assert said(world) == LVSTORE_UUID
    world.publish(handle)


def test_what_changes_at_the_volume_is_seen_at_once(made: tuple[World, str]) -> None:
    world, handle = made
    say(world, NODE, of=handle)
    world.stage(handle)
    world.unstage(handle)
    xattrs(world)["virtlun.receive"] = "{}"
    for call in (world.stage, deleting(world)):
        why = refused(lambda call=call: call(handle), Code.FAILED_PRECONDITION)  # type: ignore[misc]
        assert "is being received, and not whole" in why
    del xattrs(world)["virtlun.receive"]
    xattrs(world)[BEFORE_XATTR] = xattrs(world).pop(OWNER_XATTR)
    say(world, NODE, of=handle, received="two")
    why = refused(lambda: world.stage(handle), Code.FAILED_PRECONDITION)
    assert "its last snapshot is none" in why


HOSTNAME = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}
BOTH = {"key": TOPOLOGY_KEY, "operator": "In", "values": [NODE, OTHER_NODE]}


@pytest.mark.parametrize(
    "affinity",
    [
        pytest.param(
            {"required": {"nodeSelectorTerms": [{"matchExpressions": [each]}]}} if each else {},
            id=name,
        )
        for name, each in (("another key", HOSTNAME), ("two nodes", BOTH), ("none", None))
    ],
)
def test_an_affinity_that_does_not_name_one_node_lets_nobody_have_the_volume(
    made: tuple[World, str], affinity: dict[str, Any]
) -> None:
    world, handle = made
    say(world, OTHER_NODE, OTHER_LVSTORE, of=handle, nodeAffinity=affinity)
    for call in (world.stage, deleting(world)):
        why = refused(lambda call=call: call(handle), Code.FAILED_PRECONDITION)  # type: ignore[misc]
        assert "PersistentVolume pvc-1 does not name one node" in why
    assert ALIAS in world.target.volumes
    world.target.volumes.clear()
    refused(lambda: deleting(world)(handle), Code.FAILED_PRECONDITION)


@pytest.mark.parametrize("expression", [HOSTNAME, BOTH, None], ids=["other key", "both", "none"])
def test_a_volume_that_was_never_moved_needs_no_affinity_of_the_drivers(
    made: tuple[World, str], expression: dict[str, Any] | None
) -> None:
    """As of objects that somebody has made by hand."""
    world, handle = made
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    say(world, NODE, of=handle, nodeAffinity={"required": terms} if expression else {})
    world.stage(handle)
    world.unstage(handle)
    deleting(world)(handle)
    assert ALIAS not in world.target.volumes


def test_an_owned_copy_that_lacks_the_last_snapshot_does_not_count(moved: World) -> None:
    say(moved, NODE)
    moved.stage(HANDLE)
    moved.unstage(HANDLE)
    # It goes on at the other node, is to come here again, and nothing has come yet.
    say(moved, NODE, LVSTORE_UUID, received="three")
    for call in (moved.stage, deleting(moved)):
        why = refused(lambda call=call: call(HANDLE), Code.FAILED_PRECONDITION)  # type: ignore[misc]
        assert "is to have snapshot @three" in why and "its last one is pvc-1@two" in why
    assert said(moved, RECEIVED_KEY) == "three"
    moved.target.volumes[ALIAS].parent = "pvc-1@three"
    moved.stage(HANDLE)
    assert said(moved, RECEIVED_KEY) == ""


def test_an_owned_copy_in_another_lvstore_counts_only_where_the_object_says_so(
    moved: World,
) -> None:
    say(moved, NODE)
    moved.stage(HANDLE)
    moved.unstage(HANDLE)
    # Somebody has given this one up, and let that count which the handle tells.
    say(moved, NODE, received="")
    why = refused(lambda: moved.stage(HANDLE), Code.FAILED_PRECONDITION)
    assert f"kubectl annotate pv pvc-1 {LVSTORE_KEY}={LVSTORE_UUID}" in why
    say(moved, NODE, LVSTORE_UUID, received="")
    moved.stage(HANDLE)


def test_a_handle_of_an_earlier_driver_is_gone_only_where_it_was_made(world: World) -> None:
    """Such a handle tells no lvstore."""
    world.cluster = FakeCluster()
    world.restart()
    own, other = (handles.without_lvstore(node, "pvc-1") for node in (NODE, OTHER_NODE))
    say(world, NODE, of=other)
    assert "receive it there" in refused(lambda: deleting(world)(other), Code.UNAVAILABLE)
    say(world, NODE, of=own)
    deleting(world)(own)


def test_where_no_api_server_is_asked_what_came_back_is_what_it_was(world: World) -> None:
    handle = world.create().volume_id
    xattrs(world)[BEFORE_XATTR] = xattrs(world).pop(OWNER_XATTR)
    xattrs(world)["virtlun.receive"] = "{}"
    world.restart()
    refused(lambda: world.stage(handle), Code.NOT_FOUND)
    del xattrs(world)["virtlun.receive"]
    world.target.volumes[ALIAS].mib = 128
    refused(world.create, Code.ALREADY_EXISTS)
    assert ALIAS in world.target.volumes
    world.stage(handle)
    world.publish(handle)
    assert OWNER_XATTR in xattrs(world)


def test_an_old_copy_counts_again_when_somebody_says_so(made: tuple[World, str]) -> None:
    world, handle = made
    say(world, NODE, OTHER_LVSTORE, of=handle)
    refused(lambda: world.stage(handle), Code.FAILED_PRECONDITION)
    say(world, NODE, of=handle)
    world.stage(handle)


def test_without_an_answer_of_the_api_server_nothing_is_used(made: tuple[World, str]) -> None:
    world, handle = made
    assert world.cluster is not None
    world.cluster.failure = UnreachableError("cannot read it: the API server does not answer")
    for call in (world.stage, world.delete):
        why = refused(lambda call=call: call(handle), Code.UNAVAILABLE)  # type: ignore[misc]
        assert "on which node volume" in why
    world.cluster.failure = None
    world.stage(handle)


# Two objects of one volume, made by hand or of a backup


def calls_of(world: World, handle: str) -> dict[str, Callable[[], object]]:
    """Returns all that a driver is called for of a volume."""
    return {
        "stage": lambda: world.stage(handle),
        "delete": lambda: world.delete(handle),
        "snapshot": lambda: snapshot(world, handle),
        "expand": lambda: expand(world, handle, 128 * MIB),
        "clone": lambda: clone(world, handle),
    }


def test_the_object_that_a_handle_was_made_for_counts_and_the_other_node_leaves_its_own(
    moved: World,
) -> None:
    """What was received, and is told to be taken over, is not: the maker's node still has it."""
    say(moved, NODE, name="restored")
    say(moved, OTHER_NODE, received="")
    moved.nodes[HANDLE] = OTHER_NODE
    calls = calls_of(moved, HANDLE)
    for name in ("stage", "snapshot"):
        why = refused(calls[name], Code.FAILED_PRECONDITION)
        assert f"is of node {OTHER_NODE}, says the nodeAffinity of PersistentVolume pvc-1" in why
    refused(calls["delete"], Code.FAILED_PRECONDITION)
    # Growth is left to the other node, and a clone's pod is placed there.
    assert expand(moved, HANDLE, 128 * MIB).node_expansion_required
    refused(calls["clone"], Code.RESOURCE_EXHAUSTED)
    assert (xattrs(moved), moved.target.volumes[ALIAS].mib) == ({}, 64)


@pytest.mark.parametrize("earlier", [False, True], ids=["handle", "handle of version 5"])
def test_what_another_node_has_made_of_a_handle_takes_no_volume_away(
    made: tuple[World, str], earlier: bool
) -> None:
    world, handle = made
    if earlier:
        handle = handles.without_lvstore(NODE, "pvc-1")
        world.target.volumes[ALIAS].uuid = handle
    say(world, NODE, of=handle)
    # With its credentials alone, even before the object of the node; or with a claim of its own.
    forged = {"Available": OTHER_LVSTORE, "Bound": ""}
    for phase, lvstore in forged.items():
        say(world, OTHER_NODE, lvstore, of=handle, name="forged", phase=phase)
        world.stage(handle)
        world.unstage(handle)
    assert list(world.target.volumes) == [ALIAS]


def test_what_another_node_has_made_of_the_handle_of_what_was_moved_takes_nothing_away(
    moved: World,
) -> None:
    say(moved, NODE)
    say(moved, OTHER_NODE, OTHER_LVSTORE, name="forged", phase="Available")
    moved.stage(HANDLE)
    moved.unstage(HANDLE)
    say(moved, OTHER_NODE, name="forged")
    moved.stage(HANDLE)


def test_where_the_newer_one_was_used_last_none_counts_before_somebody_has_decided(
    made: tuple[World, str],
) -> None:
    """The object that was retained is used anew while the other node's pods write."""
    world, handle = made
    say(world, OTHER_NODE, OTHER_LVSTORE, of=handle, name="restored")
    for phase in ("Released", "Available"):
        say(world, NODE, of=handle, phase=phase)
        why = refused(lambda: world.stage(handle), Code.FAILED_PRECONDITION)
        assert f"is of node {OTHER_NODE}" in why
    say(world, NODE, of=handle)
    for name, call in calls_of(world, handle).items():
        why = refused(call, Code.FAILED_PRECONDITION)
        if name != "delete":
            assert f"pvc-1 of node {NODE}, restored of node {OTHER_NODE}, and which of them" in why
            assert "set the reclaimPolicy of all but the one" in why
    assert (world.target.volumes[ALIAS].mib, list(world.target.volumes)) == (64, [ALIAS])
    assert world.cluster is not None
    del world.cluster.objects["PersistentVolume", "restored"]
    world.stage(handle)


def test_what_was_used_last_stops_too_while_it_is_not_decided(moved: World) -> None:
    say(moved, NODE, name="restored")
    moved.stage(HANDLE)
    moved.unstage(HANDLE)
    say(moved, NODE, LVSTORE_UUID, name="restored", received="")
    say(moved, OTHER_NODE, received="", phase="Available")
    moved.stage(HANDLE)
    moved.unstage(HANDLE)
    say(moved, OTHER_NODE, received="")
    why = refused(lambda: moved.stage(HANDLE), Code.FAILED_PRECONDITION)
    assert f"pvc-1 of node {OTHER_NODE}, restored of node {NODE}, and which" in why


def test_a_node_that_has_none_of_those_that_are_not_decided_has_its_pod_placed_elsewhere(
    moved: World,
) -> None:
    moved.target.volumes.clear()
    for node in ("node3", OTHER_NODE):
        say(moved, node, name=f"of-{node}")
    refused(lambda: clone(moved, HANDLE), Code.RESOURCE_EXHAUSTED)


@pytest.mark.parametrize("used", [False, True])
def test_two_nodes_never_both_count(made: tuple[World, str], used: bool) -> None:
    """Nor where the one that the handle was made for is of the past, and each has another."""
    world, handle = made
    say(world, NODE, of=handle, phase="Released")
    say(world, OTHER_NODE, OTHER_LVSTORE if used else "", of=handle, name="restored")
    say(world, NODE, of=handle, name="second")
    watched(world)
    why = refused(lambda: world.stage(handle), Code.FAILED_PRECONDITION)
    assert (f"is of node {OTHER_NODE}" if used else "is of several PersistentVolumes") in why


def test_an_object_whose_claim_is_gone_takes_nothing_from_the_other(moved: World) -> None:
    """As it is left by a move without the feature gate, with Retain."""
    say(moved, NODE, name="restored")
    say(moved, OTHER_NODE, received="", phase="Released")
    moved.stage(HANDLE)


def test_a_volume_that_a_second_object_of_the_node_has_is_not_deleted(
    made: tuple[World, str],
) -> None:
    world, handle = made
    say(world, NODE, of=handle, phase="Released")
    retain: dict[str, Any] = {"persistentVolumeReclaimPolicy": "Retain"}
    kept: list[tuple[str, dict[str, Any]]] = [
        ("Bound", {}),
        ("Available", {}),
        ("Released", retain),
    ]
    for phase, spec in kept:
        say(world, NODE, of=handle, name="second", phase=phase, **spec)
        why = refused(lambda: world.delete(handle), Code.FAILED_PRECONDITION)
        assert "is not deleted: PersistentVolume second has it, too" in why
        assert ALIAS in world.target.volumes
    say(world, NODE, of=handle, name="second", phase="Released")
    world.delete(handle)
    assert world.target.volumes == {}


def test_a_deletion_that_was_on_its_way_when_its_object_went_takes_nothing_from_the_second(
    made: tuple[World, str],
) -> None:
    """An administrator has set the first to Retain, and deleted it: the second is the only one."""
    world, handle = made
    retain: dict[str, Any] = {"persistentVolumeReclaimPolicy": "Retain"}
    kept: list[tuple[str, dict[str, Any]]] = [
        ("Bound", {}),
        ("Available", {}),
        ("Released", retain),
        ("Failed", retain),
    ]
    for phase, spec in kept:
        say(world, NODE, of=handle, name="second", phase=phase, **spec)
        why = refused(lambda: world.delete(handle), Code.FAILED_PRECONDITION)
        assert "is not deleted: PersistentVolume second has it, too" in why
        assert ALIAS in world.target.volumes


@pytest.mark.parametrize("phase", ["Released", "Failed"])
def test_the_only_object_does_not_keep_its_volume_once_its_claim_is_gone(
    made: tuple[World, str], phase: str
) -> None:
    """Also where it is being deleted, or could not be deleted before."""
    world, handle = made
    say(world, NODE, of=handle, phase=phase)
    assert world.cluster is not None
    meta = world.cluster.objects["PersistentVolume", "pvc-1"]["metadata"]
    meta |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["csi.example.org/keep"]}
    world.delete(handle)
    assert world.target.volumes == {}


def test_what_nobody_has_an_object_of_is_deleted(made: tuple[World, str]) -> None:
    """As csi-provisioner does where it could not make the object."""
    world, handle = made
    world.delete(handle)
    assert world.target.volumes == {}


def test_what_names_no_node_keeps_a_volume_too(made: tuple[World, str]) -> None:
    """Made by hand for the same lvol, its pods at rest: its affinity says nothing to the driver."""
    world, handle = made
    terms = {"required": {"nodeSelectorTerms": [{"matchExpressions": [HOSTNAME]}]}}
    say(world, NODE, of=handle, phase="Released")
    say(world, NODE, of=handle, name="static", nodeAffinity=terms)
    why = refused(lambda: world.delete(handle), Code.FAILED_PRECONDITION)
    assert "PersistentVolume static has it, too" in why
    # Nor is it deleted for one that names none.
    say(world, NODE, of=handle)
    say(world, NODE, of=handle, name="static", phase="Released", nodeAffinity=terms)
    say(world, NODE, of=handle, name="third", phase="Released", nodeAffinity=terms)
    refused(lambda: world.delete(handle), Code.FAILED_PRECONDITION)
    say(world, NODE, of=handle, phase="Released")
    world.delete(handle)
    assert world.target.volumes == {}


def test_an_image_that_a_second_object_has_is_not_deleted(world: World) -> None:
    world.cluster = FakeCluster()
    world.target.pools.add(LVSTORE)
    world.restart()
    handle = world.create().volume_id
    place = {"key": f"{POOL_KEY}0", "operator": "In", "values": ["true"]}
    affinity = {"required": {"nodeSelectorTerms": [{"matchExpressions": [place]}]}}
    say(world, NODE, of=handle, nodeAffinity=affinity, phase="Released")
    say(world, NODE, of=handle, nodeAffinity=affinity, name="second")
    refused(lambda: world.delete(handle), Code.FAILED_PRECONDITION)
    assert ALIAS in world.target.volumes
    # Nor where that was made by hand, for one node, and is to be retained: it is the same image.
    retain: dict[str, Any] = {"persistentVolumeReclaimPolicy": "Retain"}
    say(world, OTHER_NODE, of=handle, name="second", phase="Released", **retain)
    why = refused(lambda: world.delete(handle), Code.FAILED_PRECONDITION)
    assert "PersistentVolume second has it, too" in why
    assert ALIAS in world.target.volumes
    say(world, NODE, of=handle, nodeAffinity=affinity, name="second", phase="Released")
    world.delete(handle)
    assert world.target.volumes == {}


@pytest.mark.parametrize("absent", [1, 2, 3])
@pytest.mark.parametrize("pool", [False, True], ids=["lvstore", "pool"])
def test_what_comes_while_it_is_deleted_is_looked_at_anew(
    world: World, pool: bool, absent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a pool that is added at this moment: the second object of it was not asked for."""
    world.cluster = FakeCluster()
    if pool:
        world.target.pools.add(LVSTORE)
    world.restart()
    handle = world.create().volume_id
    place = {"key": f"{POOL_KEY}0", "operator": "In", "values": ["true"]}
    terms = {"required": {"nodeSelectorTerms": [{"matchExpressions": [place]}]}}
    spec: dict[str, Any] = {"nodeAffinity": terms} if pool else {}
    for name, phase in (("pvc-1", "Released"), ("second", "Bound")):
        say(world, NODE, of=handle, name=name, phase=phase, **spec)
    find, looks = Lvols.find, []

    def comes(lvols: Lvols, of: str) -> object:
        looks.append(of)
        return find(lvols, of) if len(looks) > absent else None

    monkeypatch.setattr(Lvols, "find", comes)
    refused(lambda: world.delete(handle), Code.UNAVAILABLE)
    refused(lambda: world.delete(handle), Code.FAILED_PRECONDITION)
    assert ALIAS in world.target.volumes


def test_a_deletion_asks_for_what_no_watch_has_told_yet(made: tuple[World, str]) -> None:
    world, handle = made
    say(world, NODE, of=handle, phase="Released")
    cluster = watched(world)
    cluster.volumes_of(handle)  # lists the names, which are good for some seconds
    second = cluster.objects["PersistentVolume", "pvc-1"] | {"status": {"phase": "Bound"}}
    cluster.put(VOLUME, second | {"metadata": {"name": "second"}})
    for _ in range(2):
        why = refused(lambda: world.delete(handle), Code.FAILED_PRECONDITION)
        assert "PersistentVolume second has it, too" in why
        world.persistent.index = VolumeIndex()
    assert ALIAS in world.target.volumes


@pytest.mark.parametrize(
    ("other", "phase", "kept"),
    [
        pytest.param("", "Bound", True, id="waits for the data"),
        pytest.param("", "Available", True, id="has no claim yet"),
        pytest.param(OTHER_LVSTORE, "Bound", True, id="used"),
        pytest.param(OTHER_LVSTORE, "Released", True, id="used last"),
        pytest.param("", "Released", False, id="past"),
    ],
)
def test_a_volume_that_another_node_s_object_may_still_need_is_not_deleted(
    made: tuple[World, str], other: str, phase: str, kept: bool
) -> None:
    world, handle = made
    say(world, NODE, of=handle, phase="Released")
    say(world, OTHER_NODE, other, of=handle, name="restored", phase=phase)
    if kept:
        why = refused(lambda: world.delete(handle), Code.FAILED_PRECONDITION)
        assert "is not deleted: PersistentVolume restored has it, too" in why
    else:
        world.delete(handle)
    assert (ALIAS in world.target.volumes) == kept


def test_what_was_used_last_is_deleted_beside_what_is_past(moved: World) -> None:
    say(moved, OTHER_NODE, received="", phase="Released", persistentVolumeReclaimPolicy="Retain")
    say(moved, NODE, name="restored")
    moved.stage(HANDLE)
    moved.unstage(HANDLE)
    say(moved, NODE, LVSTORE_UUID, name="restored", received="", phase="Released")
    moved.delete(HANDLE)
    assert ALIAS not in moved.target.volumes


# What is asked


MANY = 2000


def watched(world: World) -> FakeCluster:
    """Has the watch of PersistentVolumes tell all that there are; returns who is asked."""
    assert world.cluster is not None
    for (kind, _), each in world.cluster.objects.items():
        if kind == VOLUME.name:
            world.persistent.index.note(Change("present", each))
    world.persistent.index.note(Change("complete", {}))
    world.cluster.calls.clear()
    return world.cluster


def test_what_is_not_here_lists_no_persistent_volumes(made: tuple[World, str]) -> None:
    """Of as many claims of another node each is asked for, and asked for again."""
    world, _ = made
    elsewhere = [handles.make(OTHER_LVSTORE, OTHER_NODE, f"pvc-{at}") for at in range(MANY)]
    for at, handle in enumerate(elsewhere):
        say(world, OTHER_NODE, of=handle, name=f"pvc-{at}", received="")
    cluster = watched(world)
    for handle in (*elsewhere[:50], *elsewhere[:50]):
        refused(lambda handle=handle: clone(world, handle), Code.RESOURCE_EXHAUSTED)  # type: ignore[misc]
    assert cluster.calls == []
    for handle in elsewhere[:50]:
        refused(lambda handle=handle: world.stage(handle), Code.FAILED_PRECONDITION)  # type: ignore[misc]
    assert cluster.calls == ["get PersistentVolume"] * 50
    cluster.calls.clear()
    nobodys = handles.make(OTHER_LVSTORE, OTHER_NODE, "nobody's")
    for _ in range(50):
        refused(lambda: world.stage(nobodys), Code.UNAVAILABLE)
    assert cluster.calls == []


def test_what_is_gone_is_deleted_again_without_a_list(made: tuple[World, str]) -> None:
    world, handle = made
    say(world, NODE, of=handle, phase="Released")
    cluster = watched(world)
    world.delete(handle)
    assert cluster.calls.count("list PersistentVolume") == 1
    cluster.calls.clear()
    for _ in range(50):
        world.delete(handle)
    assert "list PersistentVolume" not in cluster.calls


def test_a_volume_here_is_one_question_and_that_nobody_knows_it_is_made_certain(
    made: tuple[World, str],
) -> None:
    world, handle = made
    say(world, NODE, of=handle)
    cluster = watched(world)
    world.moves.get(handle)
    assert cluster.calls == ["get PersistentVolume"]
    # An object of another name, which the watch has not told of.
    del cluster.objects["PersistentVolume", "pvc-1"]
    world.persistent.index.note(Change("gone", {"metadata": {"name": "pvc-1"}}))
    say(world, OTHER_NODE, of=handle, name="restored")
    cluster.calls.clear()
    refused(lambda: world.moves.get(handle), Code.FAILED_PRECONDITION)
    assert cluster.calls[-1] == "list PersistentVolume"


def test_the_lvstore_is_asked_for_only_where_the_handle_or_the_object_tells_one(
    made: tuple[World, str],
) -> None:
    world, handle = made
    before = handles.without_lvstore(NODE, "pvc-2")
    owner = {OWNER_XATTR: Owner("csi.virtlun.dev", "pvc-2", "", "{}").written()}
    world.target.volumes[f"{LVSTORE}/pvc-2"] = Volume(before, xattrs=owner)
    say(world, NODE, of=before, name="pvc-2")
    say(world, NODE, of=handle)

    def stores_asked(of: str) -> int:
        world.target.calls.clear()
        world.moves.get(of)
        return world.target.calls.count("bdev_lvol_get_lvstores")

    assert stores_asked(before) == stores_asked(handle) - 1
    say(world, NODE, LVSTORE_UUID, of=before, name="pvc-2")
    assert stores_asked(before) == stores_asked(handle)


def test_what_has_a_pool_s_affinity_does_not_keep_the_others_from_being_asked_for(
    made: tuple[World, str],
) -> None:
    world, handle = made
    place = {"key": f"{POOL_KEY}0", "operator": "In", "values": ["true"]}
    affinity = {"required": {"nodeSelectorTerms": [{"matchExpressions": [place]}]}}
    say(world, NODE, of=handle, name="forged", nodeAffinity=affinity)
    watched(world)
    say(world, OTHER_NODE, of=handle, name="restored")  # which the watch has not told of
    why = refused(lambda: world.stage(handle), Code.FAILED_PRECONDITION)
    assert f"is of node {OTHER_NODE}" in why


def test_the_node_is_asked_for_where_the_watch_has_told_nothing_yet(world: World) -> None:
    world.cluster = FakeCluster()
    world.restart()
    assert watched(world).calls == []
    assert world.persistent.node_of(HANDLE) is None
    say(world, NODE, name="restored", phase="Available")
    say(world, OTHER_NODE, received="")
    assert world.persistent.node_of(HANDLE) == OTHER_NODE
    watched(world)
    assert world.persistent.node_of(HANDLE) == OTHER_NODE
