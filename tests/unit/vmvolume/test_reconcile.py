"""One VmVolume brought to rest, over doubles of the API server and the target.

They are for what the real ones do not do on demand: to be away, to be faster, to refuse. The rest
is tested on the real ones in tests/kubernetes/test_vmvolume.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from csi.clustererrors import ForbiddenError, NotFoundError
from csi.errors import Code, Failure
from csi.kinds import CLAIM, VM_VOLUME, Kind
from csi.kubevirt.controllers import VmControllers
from csi.kubevirt.lun import InUse, Lun
from csi.kubevirt.vmvolume.cache import Cache
from csi.kubevirt.vmvolume.decide import Decision
from csi.kubevirt.vmvolume.metrics import VmVolumeMetrics
from csi.kubevirt.vmvolume.model import FINALIZER, VmVolume
from csi.kubevirt.vmvolume.reconcile import Reconciler
from csi.locks import VolumeLocks
from csi.moves import Moves
from csi.objects import Claim, Object, PersistentVolume, StorageClass, Vmi
from csi.proto import csi_pb2 as pb
from csi.volumes import OwnedVolumes
from pydataplane.errors import RpcError, TargetUnavailable
from tests.unit.csi import fake_cluster
from tests.unit.vmvolume.world import (
    HANDLE,
    LATE,
    MIB,
    NODE,
    OTHER,
    POD,
    claim,
    lun,
    machine,
    pv,
    vm_volume,
)

PLACES = {CLAIM.name: ("ns", "data")}


class FakeCluster(fake_cluster.FakeCluster):
    """One with a claim, its volume and class, machines and pods."""

    def __init__(self, volume: PersistentVolume | None = None) -> None:
        super().__init__()
        self.bound = volume or pv()
        self.classes = {"fast": LATE}
        self.machines: dict[str, Vmi] = {}
        self.pods: list[str] = []
        self.nodes = {NODE}
        self.refuses_events = False
        #: What the claim's versions were.
        self.versions: list[str] = []
        self.put(CLAIM, dict(claim(self.bound).object))

    @property
    def events(self) -> list[str]:
        """What was said, and why."""
        return [f"{each.reason}: {each.message}" for each in self.said]

    def put(self, kind: Kind, found: dict[str, Any]) -> Object:
        made = super().put(kind, found)
        if kind is CLAIM:
            self.versions.append(made["metadata"]["resourceVersion"])
        return made

    def claim(self, namespace: str, name: str) -> Claim:
        found = self.get(CLAIM, name, namespace)
        bound = found["status"]["phase"] == "Bound"
        return Claim.of(found, self.bound if bound else None)

    def storage_class(self, name: str) -> StorageClass:
        return self.classes[name]

    def pods_of_claim(self, namespace: str, name: str) -> list[str]:
        return self.pods

    def has_node(self, name: str) -> bool:
        self.calls.append(f"get Node {name}")
        return name in self.nodes

    def vmi(self, namespace: str, name: str) -> Vmi:
        self.calls.append("get VirtualMachineInstance")
        if name not in self.machines:
            raise NotFoundError(f"cannot read {name}")
        return self.machines[name]

    def event(self, about: Object, reason: str, message: str, **options: Any) -> None:
        if self.refuses_events:
            raise ForbiddenError("the namespace is being terminated")
        super().event(about, reason, message, **options)


class FakeControllers(VmControllers):
    """A target's controllers of pods; `fail` names what raises, and what."""

    def __init__(self) -> None:
        self.found: dict[str, list[Lun]] = {POD: []}
        self.fail: dict[str, Exception] = {}
        self.given: dict[str, Any] = {}
        self.mounts_at_once = False
        """The guest begins to use a disk just before it goes."""

    def luns(self, pod: str) -> list[Lun]:
        self._check("luns")
        if pod not in self.found:
            raise Failure(Code.NOT_FOUND, "no controller")
        return list(self.found[pod])

    def shown(self, volume: str) -> list[tuple[str, Lun]]:
        return [(pod, lun) for pod in self.found for lun in self.luns(pod) if lun.volume == volume]

    def absent(self, pod: str) -> str | None:
        return None

    def attach(self, pod: str, volume: str, **given: Any) -> int:
        self._check("attach")
        given.pop("check")()
        self.given = given
        made = lun(target=4, event_at=time.time(), guest_seen_at=None)
        self.found[pod].append(made)
        return made.target

    def detach(self, pod: str, volume: str, *, unless_used: bool = False) -> None:
        self._check("detach")
        if self.mounts_at_once:
            self.found[pod] = [replace(each, removal_prevented=True) for each in self.found[pod]]
        if unless_used and any(each.removal_prevented for each in self.found[pod]):
            raise InUse("the guest has it in use")
        self.found[pod] = [each for each in self.found[pod] if each.volume != volume]

    def _check(self, name: str) -> None:
        if name in self.fail:
            raise self.fail[name]


class FakeVolumes(OwnedVolumes):
    """The target's one volume."""

    def __init__(self) -> None:
        self.size = 64 * MIB
        self.exported = False
        self.fail: Exception | None = None

    def find(self, handle: str) -> Any:
        return SimpleNamespace(volume=SimpleNamespace(size=self.size)) if handle == HANDLE else None

    def has_kernel_face(self, handle: str) -> bool:
        return self.exported

    def grow(self, handle: str, wanted: pb.CapacityRange) -> Any:
        if self.fail:
            raise self.fail
        self.size = wanted.required_bytes


class FakeMoves(Moves):
    """What a node says of a volume; `older`: it was sent away meanwhile."""

    older = False

    def get(self, handle: str) -> Any:
        if self.older:
            raise Failure(Code.FAILED_PRECONDITION, "volume x is of node node2")
        return self._volumes.find(handle)


class World:
    """All of them, with a machine that runs and a VmVolume."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.controllers = FakeControllers()
        self.volumes = FakeVolumes()
        self.cache = Cache()
        self.cache.put_machine(machine())
        self.registry = CollectorRegistry()
        self.looked_at: list[tuple[str, str]] = []
        self.others_wait = False
        self.moves = FakeMoves(self.volumes)
        self.restart()

    def restart(self) -> None:
        """Begins anew with what the watches would tell."""
        self.reconciler = Reconciler(
            *(self.cluster, self.controllers, self.volumes, VolumeLocks(), NODE, self.cache),
            VmVolumeMetrics(CollectorRegistry() if self.looked_at else self.registry),
            self.looked_at.append,
            lambda: self.others_wait,
            self.moves,
        )

    def make(self, volume: VmVolume | None = None) -> None:
        """Makes a VmVolume, of which the watch tells."""
        found = dict((volume or vm_volume()).object)
        self.cache.put_volume(VmVolume.of(self.cluster.put(VM_VOLUME, found)))

    def reconcile(self, name: str = "extra") -> Decision:
        """Looks at a VmVolume once."""
        volume = self.cache.volume(("ns", name))
        assert volume is not None
        return self.reconciler.volume(volume, time.time())

    def delete(self, at: float | None = None, name: str = "extra") -> None:
        """Deletes a VmVolume as a user does."""
        found = dict(self.cluster.objects[VM_VOLUME.name, name])
        text = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at or time.time()))
        found["metadata"]["deletionTimestamp"] = text
        self.cache.put_volume(VmVolume.of(self.cluster.put(VM_VOLUME, found)))

    def status(self, name: str = "extra") -> dict[str, Any]:
        """Returns what the server has as status."""
        return dict(self.cluster.objects[VM_VOLUME.name, name]["status"])

    def finalizers(self) -> tuple[bool, bool]:
        """Returns whether VmVolume and claim have ours."""
        held = (self.cluster.objects.get(key) for key in self._keys())
        found = [
            FINALIZER in (each or {"metadata": {}})["metadata"].get("finalizers", [])
            for each in held
        ]
        return found[0], found[1]

    def _keys(self) -> Sequence[tuple[str, str]]:
        return (VM_VOLUME.name, "extra"), (CLAIM.name, "data")

    @contextmanager
    def failing(self, method: str, error: Exception) -> Iterator[None]:
        """Lets a method of the target fail."""
        self.controllers.fail[method] = error
        yield
        del self.controllers.fail[method]

    def metric(self, name: str) -> float:
        """Returns a metric's value."""
        return self.registry.get_sample_value(f"virtlun_csi_vmvolume_{name}") or 0.0


@pytest.fixture
def world() -> World:
    """A world with one VmVolume that can be attached."""
    made = World()
    made.make()
    made.cluster.calls.clear()
    return made


def test_the_way_in_holds_claim_and_vmvolume_first(world: World) -> None:
    decision = world.reconcile()
    assert world.cluster.calls[:3] == [
        "get PersistentVolumeClaim",
        "patch PersistentVolumeClaim data",
        "patch VmVolume extra",
    ]
    assert world.cluster.calls[3:] == ["patch VmVolume/status extra"]
    assert world.finalizers() == (True, True)
    assert world.controllers.given == {"serial": None, "read_only": False, "removable": True}
    status = world.status()
    assert (status["phase"], status["target"], status["pod"]) == ("Attached", 4, POD)
    assert world.cluster.events == ["Attached: target 4, LUN 0 of the machine's controller"]
    assert world.metric("event_seconds_count") == 1
    assert decision.again_s is not None


def test_others_that_wait_get_their_luns_before_the_status_is_written(world: World) -> None:
    world.others_wait = True
    assert world.reconcile() == Decision(again_s=0.0)
    assert len(world.controllers.found[POD]) == 1
    assert world.status() == {}
    world.reconcile()
    assert world.status()["phase"] == "Attached"
    assert world.metric("event_seconds_count") == 1


def test_waiting_for_the_guest_asks_nothing_of_the_server(world: World) -> None:
    world.reconcile()
    world.cluster.calls.clear()
    assert world.reconcile().again_s is not None
    assert world.cluster.calls == []
    seen = lun(target=4, guest_seen_at=time.time())
    world.controllers.found[POD] = [seen]
    assert world.reconcile().again_s is None
    assert world.cluster.calls == ["patch VmVolume/status extra"]
    assert world.metric("guest_seen_seconds_count") == 1
    assert world.reconcile().again_s is None
    assert world.metric("guest_seen_seconds_count") == 1
    assert len(world.cluster.events) == 1


def test_a_claim_is_read_again_after_it_changed(world: World) -> None:
    world.reconcile()
    world.cluster.bound = replace(world.cluster.bound, capacity=128 * MIB)
    world.reconcile()
    assert world.volumes.size == 64 * MIB, "nobody said so yet"
    world.cache.drop_claim(("ns", "data"))
    world.reconcile()
    assert world.volumes.size == 128 * MIB


def test_a_change_of_somebody_else_is_taken_in(world: World) -> None:
    world.cluster.conflicts = 3
    world.reconcile()
    assert world.status()["phase"] == "Attached"
    assert len(world.controllers.found[POD]) == 1


def test_a_refusal_of_the_target_is_told_and_leaves_no_finalizers(world: World) -> None:
    with world.failing("attach", Failure(Code.FAILED_PRECONDITION, "volume x is elsewhere")):
        assert world.reconcile().retry
    assert world.finalizers() == (False, False)
    assert (world.status()["phase"], world.status()["message"]) == (
        "Pending",
        "volume x is elsewhere",
    )
    with world.failing("attach", RpcError(-28, "no target is free", "add_target")):
        assert world.reconcile().retry
    assert "no target is free" in world.status()["message"]
    world.reconcile()
    assert world.status()["phase"] == "Attached"


def test_what_the_watch_tells_of_its_own_doing_is_no_reason_to_try_again(world: World) -> None:
    before = len(world.cluster.versions)
    with world.failing("attach", Failure(Code.FAILED_PRECONDITION, "volume x is elsewhere")):
        assert world.reconcile().retry
    own = world.cluster.versions[before:]
    assert len(own) == 2  # the finalizer, on and off
    assert not any(world.cache.drop_claim(("ns", "data"), version) for version in own)
    assert world.cache.drop_claim(("ns", "data"), str(world.cluster.version + 1))


def test_another_call_on_the_volume_is_no_news(world: World) -> None:
    busy = Failure(Code.ABORTED, "another operation is in progress")
    with world.failing("attach", busy), pytest.raises(Failure, match="another operation"):
        world.reconcile()
    assert world.status() == {}
    world.reconcile()
    assert world.status()["phase"] == "Attached"


def test_a_target_that_is_away_is_said_of_what_waits_for_it(world: World) -> None:
    with world.failing("luns", TargetUnavailable("no target answers")):
        with pytest.raises(TargetUnavailable):
            world.reconcile()
        assert world.status()["phase"] == "Pending"
        assert world.status()["message"] == "no target answers"
    world.reconcile()
    before = world.status()
    with (
        world.failing("luns", TargetUnavailable("no target answers")),
        pytest.raises(TargetUnavailable),
    ):
        world.reconcile()
    assert world.status() == before, "the guest keeps the disk meanwhile"


def test_a_volume_that_was_sent_away_is_no_disk_whatever_the_claim_said_before(
    world: World,
) -> None:
    """Nothing tells of a changed PersistentVolume, by which a claim is known for minutes."""
    world.cluster.pods = ["pod"]
    world.volumes.exported = True
    world.reconcile()  # the claim is known from now on
    world.volumes.exported = False
    world.moves.older = True
    assert world.reconcile().retry
    assert world.status()["phase"] == "Pending"
    assert world.status()["message"] == "volume x is of node node2"
    assert (world.controllers.found[POD], world.finalizers()) == ([], (False, False))
    world.cluster.bound = replace(world.cluster.bound, node=OTHER)
    world.reconcile()
    assert world.status()["message"].startswith("the volume of claim data is on node node2")


def test_a_disk_of_a_volume_that_was_sent_away_can_be_taken_away(world: World) -> None:
    world.reconcile()
    assert world.status()["phase"] == "Attached"
    world.moves.older = True
    world.delete()
    world.reconcile()
    assert world.controllers.found[POD] == []


def test_a_claim_in_use_is_not_touched(world: World) -> None:
    world.volumes.exported = True
    world.cluster.pods = ["left", "right"]
    assert world.reconcile().retry
    assert "in use by pod left, right" in world.status()["message"]
    assert not any("patch PersistentVolumeClaim" in call for call in world.cluster.calls)
    world.cluster.pods = []
    world.reconcile()
    assert "its pod has not ended yet" in world.status()["message"]


def test_growth_that_fails_is_told_and_tried_again(world: World) -> None:
    world.reconcile()
    world.cluster.bound = replace(world.cluster.bound, capacity=128 * MIB)
    world.cache.drop_claim(("ns", "data"))
    world.volumes.fail = Failure(Code.OUT_OF_RANGE, "lvstore lvs0 is full")
    assert world.reconcile().retry
    assert "it does not grow: lvstore lvs0 is full" in world.status()["message"]
    assert world.status()["phase"] == "Attached"
    world.volumes.fail = None
    world.moves.older = True
    assert world.reconcile().retry
    assert "it does not grow: volume x is of node node2" in world.status()["message"]
    assert world.volumes.size == 64 * MIB
    world.moves.older = False
    assert not world.reconcile().retry
    assert world.volumes.size == 128 * MIB


def test_the_way_out(world: World) -> None:
    world.reconcile()
    world.delete()
    world.reconcile()
    assert world.controllers.found[POD] == []
    assert world.finalizers() == (False, False)
    assert (VM_VOLUME.name, "extra") not in world.cluster.objects
    assert world.metric("forced_releases_total") == 0


def test_a_disk_that_is_mounted_at_the_last_moment_is_waited_for(world: World) -> None:
    world.reconcile()
    world.delete()
    world.controllers.mounts_at_once = True
    assert world.reconcile().again_s is not None
    assert world.controllers.found[POD] != []
    assert (world.status()["phase"], world.finalizers()) == ("Releasing", (True, True))
    assert world.cluster.events[-1].startswith("InUse: ")
    assert world.metric("forced_releases_total") == 0
    late = dict(world.cluster.objects[VM_VOLUME.name, "extra"])
    late["spec"]["releaseTimeoutSeconds"] = 0
    world.cache.put_volume(VmVolume.of(world.cluster.put(VM_VOLUME, late)))
    world.reconcile()
    assert world.controllers.found[POD] == []
    assert world.metric("forced_releases_total") == 1
    assert world.finalizers() == (False, False)


def test_a_release_by_force_is_an_event_a_status_and_a_number(world: World) -> None:
    world.reconcile()
    world.controllers.found[POD] = [lun(target=4, removal_prevented=True)]
    world.delete()
    assert world.reconcile().again_s is not None
    assert world.status()["phase"] == "Releasing"
    late = dict(world.cluster.objects[VM_VOLUME.name, "extra"])
    late["metadata"]["finalizers"].append("example.org/keep")  # to see the last status
    late["spec"]["releaseTimeoutSeconds"] = 0
    world.cache.put_volume(VmVolume.of(world.cluster.put(VM_VOLUME, late)))
    world.reconcile()
    assert world.controllers.found[POD] == []
    assert "taken away by force" in world.status()["message"]
    assert world.cluster.events[-1].startswith("ForcedRelease: ")
    assert world.metric("forced_releases_total") == 1
    assert world.finalizers() == (False, False)


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_the_server_s_clock_neither_hastens_nor_delays_a_release_by_force(ahead: float) -> None:
    """This node saw the deletion come, so its own clock counts."""
    world = World()
    world.make()
    world.reconcile()
    world.controllers.found[POD] = [lun(target=4, removal_prevented=True)]
    world.delete(at=time.time() + ahead)
    assert world.reconcile().again_s == pytest.approx(0.05)
    assert world.status()["phase"] == "Releasing"
    assert world.controllers.found[POD] != []


def test_after_a_restart_the_server_s_time_of_the_deletion_counts(world: World) -> None:
    world.reconcile()
    world.controllers.found[POD] = [lun(target=4, removal_prevented=True)]
    world.cache.drop_volume(("ns", "extra"))
    world.delete(at=time.time() - 60)
    world.reconcile()
    assert world.controllers.found[POD] == []


def test_an_event_that_the_server_refuses_stops_nothing(world: World) -> None:
    world.cluster.refuses_events = True
    world.reconcile()
    assert world.status()["phase"] == "Attached"
    assert world.metric("event_seconds_count") == 1
    world.delete()
    world.reconcile()
    assert world.finalizers() == (False, False)


def test_a_deletion_says_that_the_target_is_away(world: World) -> None:
    world.reconcile()
    before = world.status()
    world.delete()
    away = TargetUnavailable("no target answers")
    with world.failing("luns", away), pytest.raises(TargetUnavailable):
        world.reconcile()
    after = world.status()
    assert (after["phase"], after["message"]) == ("Releasing", "no target answers")
    assert {key: after[key] for key in ("node", "pod", "target", "volume")} == {
        key: before[key] for key in ("node", "pod", "target", "volume")
    }
    (attached,) = (each for each in after["conditions"] if each["type"] == "Attached")
    assert (attached["status"], attached["reason"]) == ("Unknown", "TargetFailed")
    assert world.cluster.events[-1] == "TargetFailed: no target answers"
    world.reconcile()
    assert world.finalizers() == (False, False)


def test_a_node_without_a_target_says_nothing_of_another_s_vmvolume() -> None:
    world = World()
    world.cluster.bound = pv("node2")
    world.cluster.nodes.add("node2")
    world.make(vm_volume({"phase": "Pending"}, finalizer=True))
    before = world.status()
    with world.failing("luns", TargetUnavailable("no target answers")):
        assert world.reconcile().again_s is not None
    assert world.status() == before


def test_a_lun_that_the_status_does_not_tell_of_is_found(world: World) -> None:
    """Its maker died at once, and its machine is gone."""
    world.make(vm_volume({"phase": "Pending"}, finalizer=True, name="unsaid"))
    world.cache.drop_volume(("ns", "extra"))
    world.cache.drop_machine(("ns", "vm"))
    world.controllers.found["another"] = [lun()]
    world.reconcile("unsaid")
    assert world.controllers.found["another"] == []
    assert FINALIZER not in world.cluster.objects[VM_VOLUME.name, "unsaid"]["metadata"].get(
        "finalizers", []
    )


def test_a_lun_of_which_nobody_told_stays_with_a_machine_that_the_server_knows(
    world: World,
) -> None:
    world.make(vm_volume({"phase": "Pending"}, finalizer=True, name="unsaid"))
    world.cache.drop_volume(("ns", "extra"))
    world.cache.drop_machine(("ns", "vm"))
    world.cluster.machines["vm"] = machine()
    world.controllers.found[POD] = [lun()]
    world.reconcile("unsaid")
    assert world.controllers.found[POD] == [lun()]
    assert world.status("unsaid")["phase"] == "Attached"


def test_a_node_that_let_go_is_not_waited_for() -> None:
    """It may be away for long: what it said last is of no use to anyone."""
    world = World()
    world.cluster.nodes.add("node2")
    world.make(vm_volume({"phase": "Pending", "node": "node2"}))
    world.reconcile()
    assert (world.status()["phase"], world.status()["node"]) == ("Attached", NODE)


@pytest.mark.parametrize("step", range(1, 9))
def test_a_crash_after_any_call_of_the_server_is_made_good(step: int) -> None:
    """Both on the way in and out: what was begun is finished by the next one."""
    world = World()
    world.make()

    class Killed(Exception):
        pass

    left = [step]
    patch = world.cluster.patch

    def dying(*args: Any, **given: Any) -> Object:
        found = patch(*args, **given)
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return found

    world.cluster.patch = dying  # type: ignore[method-assign]
    for deleted in (False, True):
        if deleted:
            world.delete()
        try:
            world.reconcile()
        except Killed:
            told = world.cluster.objects.get((VM_VOLUME.name, "extra"))
            world.cache = Cache()
            world.cache.put_machine(machine())
            world.looked_at.append(("ns", "restarted"))
            world.restart()
            if told is not None:
                world.cache.put_volume(VmVolume.of(told))
                world.reconcile()
            world.reconciler.orphan(("ns", "data"))
    assert world.controllers.found[POD] == []
    assert (VM_VOLUME.name, "extra") not in world.cluster.objects
    assert world.finalizers() == (False, False)


def test_a_machine_that_the_watch_does_not_know_is_asked_for_first(world: World) -> None:
    """Before a LUN is taken away for the want of its machine."""
    world.reconcile()
    world.cache.drop_machine(("ns", "vm"))
    world.cluster.machines["vm"] = machine()
    world.reconcile()
    assert len(world.controllers.found[POD]) == 1
    del world.cluster.machines["vm"]
    world.reconcile()
    assert world.controllers.found[POD] == []
    assert world.status()["phase"] == "Pending"
    assert "node" not in world.status()


@pytest.mark.parametrize("gone", [False, True])
def test_only_a_node_that_is_gone_is_stood_in_for(gone: bool) -> None:
    world = World()
    world.cluster.nodes |= set() if gone else {"node2"}
    world.make(vm_volume({"phase": "Attached", "node": "node2"}, finalizer=True))
    world.cache.drop_machine(("ns", "vm"))
    world.cluster.calls.clear()
    world.reconcile()
    assert world.cluster.calls == [], "it is not being deleted, and its machine is not here"
    world.delete()
    world.reconcile()
    assert world.cluster.calls[:1] == ["get Node node2"]
    assert ((VM_VOLUME.name, "extra") in world.cluster.objects) == (not gone)


def test_a_node_is_not_selected_again_at_once(world: World) -> None:
    found = dict(world.cluster.objects[CLAIM.name, "data"])
    found["status"] = {"phase": "Pending"}
    world.cluster.put(CLAIM, found)
    world.reconcile()
    chosen = world.cluster.objects[CLAIM.name, "data"]["metadata"]
    assert chosen["annotations"] == {"volume.kubernetes.io/selected-node": NODE}
    again = dict(world.cluster.objects[CLAIM.name, "data"])
    again["metadata"]["annotations"] = {}  # the provisioner could not
    world.cluster.put(CLAIM, again)
    world.cache.drop_claim(("ns", "data"))
    wait = world.reconcile().again_s
    assert wait is not None and 1.0 < wait <= 2.0
    assert "could not be made on node" in world.status()["message"]
    assert len(world.reconciler._selected) == 1
    volume = world.cache.volume(("ns", "extra"))
    assert volume is not None
    world.reconciler.forget(volume)
    assert world.reconciler._selected == {}


def test_letting_go_lets_the_next_one_look(world: World) -> None:
    world.reconcile()
    world.make(vm_volume(name="second"))
    world.reconcile("second")
    assert "VmVolume extra has claim data" in world.status("second")["message"]
    world.delete()
    world.reconcile()
    assert world.looked_at == [("ns", "second")]


@pytest.mark.parametrize("named", [False, True])
def test_only_a_claim_that_nobody_names_is_freed(world: World, named: bool) -> None:
    world.reconcile()
    if not named:
        del world.cluster.objects[VM_VOLUME.name, "extra"]
    world.cache.drop_volume(("ns", "extra"))
    world.reconciler.orphan(("ns", "data"))
    assert (world.controllers.found[POD] == []) == (not named)
    assert world.finalizers()[1] == named


@pytest.mark.parametrize("gone", [False, True])
def test_only_a_claim_of_a_node_that_is_gone_is_freed_by_another(world: World, gone: bool) -> None:
    world.reconcile()
    del world.cluster.objects[VM_VOLUME.name, "extra"]
    world.cache.drop_volume(("ns", "extra"))
    world.cluster.bound = pv("node2")
    world.cluster.nodes |= set() if gone else {"node2"}
    world.reconciler.orphan(("ns", "data"))
    assert world.finalizers()[1] == (not gone)
