"""Several targets on a node: which has what, and what one that says nothing costs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from csi import handles
from csi.controller import Controller
from csi.errors import Code
from csi.identity import Identity
from csi.kubevirt.controllers import VmControllers
from csi.locks import VolumeLocks
from csi.metrics import VolumeCollector
from csi.proto import csi_pb2 as pb
from csi.snapshots import OwnedSnapshots
from csi.targets import Targets
from csi.vhostface import VhostFace
from csi.volumehealth import VolumeHealth
from csi.volumes import OwnedVolumes
from pydataplane import watchedclient
from pydataplane.errors import INTERNAL_ERROR, RpcError, TargetTimeout, TargetUnavailable
from pydataplane.watchedclient import WatchedClient
from tests.support.fake_socket import SocketTarget
from tests.support.fake_target import LVSTORE, MIB, FakeTarget
from tests.support.wait import until
from tests.unit.csi.conftest import NODE, block, refused
from tests.unit.csi.fakes import FakeHost
from tests.unit.csi.test_controller import CLAIM, Told

STORE_B = "lvs-b"
UUID_B = "5a1f0000-0001-4000-8000-000000000000"
ASKED = "bdev_lvol_get_lvstores"
FOREVER_S = 3600.0


def driver_of(volumes: OwnedVolumes, waiting: Told | None = None) -> Controller:
    """Returns a Controller service of these volumes."""
    locks = VolumeLocks()
    return Controller(volumes, OwnedSnapshots(volumes, locks), locks, NODE, waiting=waiting)


class Pair:
    """A driver of two targets: `a` with the lvstore lvs0, `b` with lvs-b."""

    def __init__(self) -> None:
        self.a, self.b = FakeTarget(), FakeTarget()
        self.a.path, self.b.path = Path("/run/a.sock"), Path("/run/b.sock")
        self.b.lvstores = {STORE_B: UUID_B}
        self.begin()

    def begin(self) -> None:
        """Begins anew with nothing in memory."""
        # Long enough for a machine that is busy; the tests wait for none of them but where a
        # target says nothing.
        self.targets = Targets([self.a, self.b], answer_s=3, others_s=1)
        self.volumes = OwnedVolumes(self.targets, NODE)
        self.controller = driver_of(self.volumes)

    def create(self, store: str, name: str = "pvc-1") -> str:
        request = pb.CreateVolumeRequest(
            name=name,
            capacity_range=pb.CapacityRange(required_bytes=64 * MIB),
            volume_capabilities=[block()],
            parameters={"lvstore": store},
        )
        return self.controller.create_volume(request).volume.volume_id

    def capacity(self, store: str) -> int:
        request = pb.GetCapacityRequest(parameters={"lvstore": store})
        return self.controller.get_capacity(request).available_capacity

    def listed(self) -> list[str]:
        entries = self.controller.list_volumes(pb.ListVolumesRequest()).entries
        return [each.volume.volume_id for each in entries]

    def delete(self, handle: str) -> None:
        self.controller.delete_volume(pb.DeleteVolumeRequest(volume_id=handle))

    def away(self, target: FakeTarget) -> None:
        """Has each call of a target fail as without a process."""
        error = TargetUnavailable(f"no target answers on {target.path}: start it")
        for method in (ASKED, "bdev_get_bdevs", "virtlun_get_status", "virtlun_export_list"):
            target.refuse[method] = error

    def back(self, target: FakeTarget) -> None:
        target.refuse = {}


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.fixture
def hanging(pair: Pair) -> Iterator[threading.Event]:
    """The target `a` says nothing until this is set."""
    wake = threading.Event()
    for method in (ASKED, "bdev_get_bdevs", "virtlun_get_status"):
        pair.a.gate[method] = wake
    yield wake
    wake.set()


def test_a_volume_is_made_where_its_class_s_lvstore_is(pair: Pair) -> None:
    first, second = pair.create(LVSTORE), pair.create(STORE_B)
    assert (pair.a.uuids, pair.b.uuids) == ([first], [second])
    assert [pair.create(LVSTORE), pair.create(STORE_B)] == [first, second]
    assert pair.listed() == sorted([first, second])
    pair.delete(second)
    pair.delete(second)
    assert (pair.a.uuids, pair.b.uuids) == ([first], [])


def test_a_volume_grows_and_is_deleted_on_its_target_by_a_driver_that_knows_nothing(
    pair: Pair,
) -> None:
    handle = pair.create(STORE_B)
    pair.begin()
    request = pb.ControllerExpandVolumeRequest(
        volume_id=handle, capacity_range=pb.CapacityRange(required_bytes=128 * MIB)
    )
    assert pair.controller.controller_expand_volume(request).capacity_bytes == 128 * MIB
    assert pair.b.volume(handle).mib == 128
    pair.begin()
    pair.delete(handle)
    assert pair.b.uuids == []


def test_a_handle_of_an_earlier_driver_is_found_on_any_target(pair: Pair) -> None:
    old = handles.without_lvstore(NODE, "pvc-1")
    pair.b.add_volume(f"{STORE_B}/pvc-1", uuid=old, thin=False)
    assert pair.create(STORE_B) == old
    pair.begin()
    assert pair.volumes.get(old).volume.lvstore == STORE_B
    pair.delete(old)
    assert pair.b.uuids == []
    pair.delete(old)


def test_volumes_that_came_from_one_lvstore_are_found_each_on_its_target(pair: Pair) -> None:
    origin = "77aa0000-0000-4000-8000-000000000000"
    first, second = (handles.make(origin, "node2", name) for name in ("pvc-1", "pvc-2"))
    pair.a.add_volume(f"{LVSTORE}/pvc-1", uuid=first)
    pair.b.add_volume(f"{STORE_B}/pvc-2", uuid=second)
    for _ in range(2):
        assert pair.targets.of(first) is pair.a
        assert pair.targets.of(second) is pair.b
        groups = [
            (found, answer.get()) for found, answer in pair.targets.by_target([first, second])
        ]
        assert groups == [([first], pair.a), ([second], pair.b)]
    pair.begin()
    pair.away(pair.a)
    assert pair.targets.of(second) is pair.b
    with pytest.raises(TargetUnavailable):
        pair.targets.of(first)
    pair.back(pair.a)
    assert pair.targets.of(first) is pair.a


def test_an_lvstore_that_none_has_or_several_have_is_one_sentence(pair: Pair) -> None:
    said = refused(lambda: pair.create("lvs-c"), Code.RESOURCE_EXHAUSTED)
    assert "node node1 has no lvstore lvs-c" in said
    assert pair.capacity("lvs-c") == 0
    pair.b.lvstores[LVSTORE] = "5a1f0000-0002-4000-8000-000000000000"
    said = refused(lambda: pair.create(LVSTORE), Code.FAILED_PRECONDITION)
    assert said.startswith("the targets on /run/a.sock and /run/b.sock all have lvstore lvs0")
    assert pair.capacity(LVSTORE) == 0
    assert pair.create(pair.a.lvstores[LVSTORE]) in pair.a.uuids


def test_an_lvstore_that_moved_to_the_other_target_is_found_there(pair: Pair) -> None:
    handle = pair.create(LVSTORE)
    pair.b.lvstores[LVSTORE] = pair.a.lvstores.pop(LVSTORE)
    pair.b.volumes |= pair.a.volumes
    pair.a.volumes = {}
    assert pair.targets.of(handle) is pair.b
    pair.away(pair.a)
    pair.delete(handle)
    assert pair.b.uuids == []


def test_an_lvstore_that_moved_from_a_target_that_is_away_is_found_too(pair: Pair) -> None:
    handle = pair.create(LVSTORE)
    pair.b.lvstores[LVSTORE] = pair.a.lvstores[LVSTORE]
    pair.b.volumes |= pair.a.volumes
    pair.away(pair.a)
    assert pair.targets.of(handle) is pair.b


@pytest.mark.parametrize("knows", [True, False])
def test_a_target_that_is_away_costs_its_own_volumes_alone(pair: Pair, knows: bool) -> None:
    first, second = pair.create(LVSTORE), pair.create(STORE_B)
    if not knows:
        pair.begin()
    pair.away(pair.a)
    said = "no target answers on /run/a.sock"
    assert said in refused(lambda: pair.create(LVSTORE), Code.UNAVAILABLE)
    assert said in refused(lambda: pair.delete(first), Code.UNAVAILABLE)
    assert said in refused(lambda: pair.capacity(LVSTORE), Code.UNAVAILABLE)
    assert said in refused(lambda: pair.create("lvs-c"), Code.UNAVAILABLE)
    assert said in refused(pair.listed, Code.UNAVAILABLE)
    assert pair.create(STORE_B) == second
    assert pair.capacity(STORE_B) == 960 * MIB
    every = pb.GetCapacityRequest()
    assert pair.controller.get_capacity(every).available_capacity == 960 * MIB
    pair.delete(second)
    pair.back(pair.a)
    assert pair.listed() == [first]


@pytest.mark.parametrize("knows", [True, False])
def test_a_target_that_hangs_costs_its_own_volumes_alone(
    pair: Pair, knows: bool, request: pytest.FixtureRequest
) -> None:
    first, second = pair.create(LVSTORE), pair.create(STORE_B)
    if not knows:
        pair.begin()
    wake: threading.Event = request.getfixturevalue("hanging")
    said = "the target on /run/a.sock does not answer"
    assert said in refused(lambda: pair.delete(first), Code.UNAVAILABLE)
    assert pair.create(STORE_B) == second
    assert pair.capacity(STORE_B) == 960 * MIB
    assert said in refused(lambda: pair.capacity(LVSTORE), Code.UNAVAILABLE)
    asked = pair.a.calls.count(ASKED)
    for _ in range(20):
        assert pair.capacity(STORE_B) == 960 * MIB
        pair.create(STORE_B)
    assert pair.a.calls.count(ASKED) == asked, "it is not asked while it owes an answer"
    pair.delete(second)
    wake.set()
    pair.begin()
    assert pair.listed() == [first]


def test_the_driver_is_ready_while_a_target_answers(pair: Pair) -> None:
    identity = Identity(pair.targets, controller=True)
    for target in (pair.a, pair.b):
        assert identity.probe(pb.ProbeRequest()).ready.value
        pair.away(target)
    assert not identity.probe(pb.ProbeRequest()).ready.value
    problem = pair.targets.problem() or ""
    assert "/run/a.sock" in problem
    assert "/run/b.sock" in problem


def scraped(pair: Pair) -> dict[tuple[str, ...], float]:
    """Returns the metrics of the targets, by name and labels."""
    return {
        (metric.name, *sample.labels.values()): sample.value
        for metric in VolumeCollector(pair.volumes).collect()
        for sample in metric.samples
    }


def test_metrics_tell_of_each_target_and_of_what_answers(pair: Pair) -> None:
    pair.create(STORE_B)
    pair.away(pair.a)
    found = scraped(pair)
    assert found["virtlun_csi_target_up", "/run/a.sock"] == 0
    assert found["virtlun_csi_target_up", "/run/b.sock"] == 1
    assert found["virtlun_csi_volumes", STORE_B] == 1
    assert ("virtlun_csi_volumes", LVSTORE) not in found


def test_metrics_count_reads_that_met_other_data_than_was_written(pair: Pair) -> None:
    pair.b.checksums = {"base_bdev_name": "file", "mismatches": 3}
    found = scraped(pair)
    metric = "virtlun_csi_lvstore_checksum_mismatches"
    assert found[metric, STORE_B] == 3
    assert (metric, LVSTORE) not in found, "it has no checksums"
    pair.b.checksums["mismatches"] = 0
    assert scraped(pair)[metric, STORE_B] == 0


def test_health_of_a_volume_is_its_target_s(pair: Pair) -> None:
    first, second = pair.create(LVSTORE), pair.create(STORE_B)
    groups = {
        answer.client.path if answer.error is None else str(answer.error): volumes
        for volumes, answer in pair.targets.by_target([first, second])
    }
    assert groups == {pair.a.path: [first], pair.b.path: [second]}
    pair.away(pair.a)
    away, answers = pair.targets.by_target([first, second])
    assert (away[0], answers[0]) == ([first], [second])
    with pytest.raises(TargetUnavailable, match=r"/run/a\.sock"):
        away[1].get()
    assert answers[1].get() is pair.b


def test_one_target_is_asked_for_nothing_more_than_it_was() -> None:
    target = FakeTarget()
    assert Targets([target]).of("anything") is target
    assert target.calls == []


def test_a_long_list_of_a_target_that_answers_is_no_silence(pair: Pair) -> None:
    handle = pair.create(LVSTORE)
    pair.targets = Targets([pair.a, pair.b], answer_s=3, others_s=0)
    pair.volumes = OwnedVolumes(pair.targets, NODE)
    pair.controller = driver_of(pair.volumes)
    listing = pair.a.gate["virtlun_lvol_get_xattrs"] = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(pair.listed)
        until(lambda: "virtlun_lvol_get_xattrs" in pair.a.calls[-1:], "the list to be underway")
        try:
            assert pair.capacity(LVSTORE) == 960 * MIB
        finally:
            listing.set()
        assert found.result() == [handle]


def test_a_target_that_owes_one_answer_and_gives_others_is_asked(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchedclient, "SILENT_S", FOREVER_S)
    handle = pair.create(LVSTORE)
    pair.targets = Targets([pair.a, pair.b], answer_s=3, others_s=0)
    slow = pair.a.gate[ASKED] = threading.Event()
    try:
        assert pair.targets.store(STORE_B).client is pair.b
        until(lambda: pair.a.calls[-1] == ASKED, "the question to wait")
        del pair.a.gate[ASKED]
        assert pair.targets.of(handle) is pair.a
    finally:
        slow.set()


def test_a_target_that_says_nothing_is_not_asked_again_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On real sockets, and with a deadline of an hour: whoever waited for it would not end."""
    monkeypatch.setattr(watchedclient, "SILENT_S", 1.0)
    a, b = SocketTarget(tmp_path / "a"), SocketTarget(tmp_path / "b")
    b.lvstores = {STORE_B: UUID_B}
    first = a.lvstores[LVSTORE]
    clients = [WatchedClient(each.path, FOREVER_S) for each in (a, b)]
    targets = Targets(clients, answer_s=2, others_s=1)
    with b.serve():
        with a.serve(mute=True):
            for _ in range(2):
                with pytest.raises(TargetUnavailable, match=f"the target on {a.path} does not"):
                    targets.of_store(first)
            asked = len(a.connections)
            for _ in range(20):
                assert targets.of_store(UUID_B) is clients[1]
                with pytest.raises(TargetUnavailable, match=f"the target on {a.path} does not"):
                    targets.of_store(first)
            assert len(a.connections) == asked, "it is not asked while it owes an answer"
        with a.serve():
            until(lambda: not clients[0].silent_s, "the target to be heard")
            assert targets.of_store(first) is clients[0]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RpcError(INTERNAL_ERROR, "no"), None),
        (TargetTimeout("no answer"), "TargetAway"),
        (TargetUnavailable("it went away"), "TargetAway"),
    ],
)
def test_a_target_that_does_not_tell_of_its_exports_hides_no_others(
    pair: Pair, error: Exception, told: str | None
) -> None:
    first, second = pair.create(LVSTORE), pair.create(STORE_B)
    host = FakeHost(pair.b)
    health = VolumeHealth(pair.targets, host, VhostFace(pair.targets))
    host.attach(second)
    pair.b.flush_error = "a flush failed 3 s ago"
    pair.a.refuse["virtlun_export_list"] = error  # type: ignore[assignment]
    found = {volume: each[0].reason for volume, each in health.entries_of([first, second]).items()}
    assert found == {second: "FlushFailed"} | ({first: told} if told else {})
    if told is None:
        with pytest.raises(RpcError):
            health.entries(first)


def test_a_claim_is_told_of_an_lvstore_that_several_targets_have(pair: Pair) -> None:
    pair.b.lvstores[LVSTORE] = "5a1f0000-0002-4000-8000-000000000000"
    waiting = Told()
    pair.controller = driver_of(pair.volumes, waiting=waiting)
    request = pb.GetCapacityRequest(parameters={"lvstore": LVSTORE, **CLAIM})
    assert pair.controller.get_capacity(request).available_capacity == 0
    ((claim, reason, message),) = waiting.told
    assert (claim, reason) == ("shop/data", "CannotProvision")
    assert "the targets on /run/a.sock and /run/b.sock all have lvstore lvs0" in message


def test_a_claim_of_another_target_goes_without_a_look_at_machines(pair: Pair) -> None:
    """kubelet takes a block device from a pod while the target of the controllers hangs."""
    controllers = VmControllers(pair.targets, FakeHost(pair.b), VolumeLocks())
    first, second = pair.create(LVSTORE), pair.create(STORE_B)
    pod = "11111111-2222-4333-8444-555555555555"
    controllers.give_back(pod, second)
    assert "vhost_get_controllers" not in pair.a.calls
    controllers.give_back(pod, first)
    assert "vhost_get_controllers" in pair.a.calls
