"""The VmVolume controller's watches and worker, over doubles of the API server and the target.

What it does with a real API server is in tests/kubernetes/test_vmvolume.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from csi.cluster import Change
from csi.kinds import CLAIM, VM_VOLUME, VMI, Kind
from csi.kubevirt.vmvolume.controller import LEFT_S, STRANGER_S, VmVolumeController
from csi.kubevirt.vmvolume.model import FINALIZER, VmVolume
from csi.locks import VolumeLocks
from tests.support.wait import until
from tests.unit.vmvolume.test_reconcile import (
    FakeCluster,
    FakeControllers,
    FakeMoves,
    FakeVolumes,
)
from tests.unit.vmvolume.world import NODE, OTHER, POD, lun, machine, vm_volume

WAIT_S = 90.0
COMPLETE = Change("complete", {})


class WatchedCluster(FakeCluster):
    """One whose watches tell what a test lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, SimpleQueue[Change]] = {
            kind.plural: SimpleQueue() for kind in (VM_VOLUME, VMI, CLAIM)
        }
        self.taken = dict.fromkeys(self.told, 0)
        self.selected: dict[str, Mapping[str, str] | None] = {}
        """The labels that each watch asks for."""

    def watch(
        self,
        kind: Kind,
        stop: threading.Event,
        *,
        labels: Mapping[str, str] | None = None,
        known: set[tuple[str, str]] | None = None,
    ) -> Iterator[Change]:
        self.selected[kind.plural] = labels
        while not stop.is_set():
            try:
                change = self.told[kind.plural].get(timeout=0.02)
            except Empty:
                continue
            yield change
            self.taken[kind.plural] += 1

    def tell(self, kind: Kind, *changes: Change) -> None:
        """Tells changes and waits until they were taken."""
        count = self.taken[kind.plural] + len(changes)
        for change in changes:
            self.told[kind.plural].put(change)
        until(lambda: self.taken[kind.plural] == count)

    def present(self, volume: VmVolume) -> Change:
        """Keeps a VmVolume and returns what the watch tells of it."""
        return Change("present", self.put(VM_VOLUME, dict(volume.object)))


class World:
    """A controller that runs."""

    def __init__(self) -> None:
        self.cluster = WatchedCluster()
        self.controllers = FakeControllers()
        self.registry = CollectorRegistry()
        volumes = FakeVolumes()
        self.controller = VmVolumeController(
            *(self.cluster, self.controllers, volumes, VolumeLocks(), NODE, self.registry),
            FakeMoves(volumes),
        )
        self.controller.start()

    def status(self, name: str = "extra") -> dict[str, Any]:
        """Returns what the server has as status."""
        return dict(self.cluster.objects[VM_VOLUME.name, name]["status"])

    def know(self) -> None:
        """Tells all that there is: a machine."""
        self.cluster.tell(VM_VOLUME, COMPLETE)
        self.cluster.tell(VMI, Change("present", machine().object), COMPLETE)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr("csi.kubevirt.vmvolume.controller.ORPHAN_S", 0.0)
    made = World()
    yield made
    made.controller.stop()


def test_nothing_is_done_before_the_machines_are_known(world: World) -> None:
    """Else a LUN would be taken away whose machine the watch is about to tell of."""
    world.controllers.found[POD] = [lun()]
    held = {"phase": "Attached", "node": NODE, "pod": POD, "target": 1}
    before = world.cluster.present(vm_volume(held, finalizer=True))
    world.cluster.tell(VM_VOLUME, before, COMPLETE)
    world.cluster.tell(VMI, Change("present", machine().object))
    assert world.cluster.calls == []
    world.cluster.tell(VMI, COMPLETE)
    until(lambda: "volume" in world.status())
    assert len(world.controllers.found[POD]) == 1


def test_a_node_watches_its_own_machines(world: World) -> None:
    """Why it watches all VmVolumes and claims, these by their metadata, the controller says."""
    world.know()
    until(lambda: len(world.cluster.selected) == 3)
    assert world.cluster.selected == {
        VM_VOLUME.plural: None,
        VMI.plural: {"kubevirt.io/nodeName": NODE},
        CLAIM.plural: None,
    }


def test_a_change_of_the_machine_is_taken_up(world: World) -> None:
    world.know()
    world.cluster.tell(VM_VOLUME, world.cluster.present(vm_volume()))
    until(lambda: world.status().get("phase") == "Attached")
    meta = dict(machine().object["metadata"])
    world.cluster.tell(VMI, Change("gone", {"metadata": meta}))
    until(lambda: world.status().get("phase") == "Pending")
    assert world.controllers.found[POD] == []


def test_an_object_that_cannot_be_read_does_not_stop_the_others(world: World) -> None:
    world.know()
    wrong = dict(vm_volume(name="wrong").object)
    wrong["spec"] = {"vmName": "../others/vm"}
    world.cluster.tell(VM_VOLUME, Change("present", wrong))
    world.cluster.tell(VM_VOLUME, world.cluster.present(vm_volume()))
    until(lambda: world.status().get("phase") == "Attached")


def test_a_failure_is_tried_again(world: World) -> None:
    world.know()
    world.controllers.fail["attach"] = OSError("the machine room is on fire")
    world.cluster.tell(VM_VOLUME, world.cluster.present(vm_volume()))
    name, labels = "virtlun_csi_vmvolume_reconciles_total", {"result": "error"}
    until(lambda: (world.registry.get_sample_value(name, labels) or 0.0) >= 2.0)
    del world.controllers.fail["attach"]
    until(lambda: world.status().get("phase") == "Attached")


def test_a_vmvolume_whose_finalizer_was_taken_off_leaves_no_lun(world: World) -> None:
    world.know()
    world.cluster.tell(VM_VOLUME, world.cluster.present(vm_volume()))
    until(lambda: world.status().get("phase") == "Attached")
    gone = world.cluster.objects.pop((VM_VOLUME.name, "extra"))
    world.cluster.tell(VM_VOLUME, Change("gone", gone))
    claim = (CLAIM.name, "data")
    until(lambda: FINALIZER not in world.cluster.objects[claim]["metadata"]["finalizers"])
    assert world.controllers.found[POD] == []


@pytest.mark.parametrize(
    ("volume", "wait"),
    [
        (vm_volume(), STRANGER_S),
        (vm_volume({"phase": "Pending"}), (0.0, 0.0)),
        (vm_volume({"phase": "Pending"}, finalizer=True), STRANGER_S),
        (vm_volume({"phase": "Attached", "node": NODE}, finalizer=True), (0.0, 0.0)),
        (vm_volume({"phase": "Attached", "node": OTHER}, finalizer=True), (0.0, 0.0)),
        (
            vm_volume(
                {"phase": "Attached", "node": OTHER},
                finalizer=True,
                deleted_at="2027-01-15T07:00:00Z",
            ),
            LEFT_S,
        ),
    ],
)
def test_what_is_most_likely_another_node_s_is_left_to_it_for_a_while(
    world: World, volume: VmVolume, wait: tuple[float, float]
) -> None:
    assert wait[0] <= world.controller._delay(volume) <= wait[1]
