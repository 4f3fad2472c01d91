"""The real driver over two real targets, as tenants have them that are parted by process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from csi.errors import Failure
from csi.hostdevice.loop import LoopDevices
from csi.kubevirt.controllers import VmControllers
from csi.kubevirt.lun import StaysOnKernelFace
from csi.locks import VolumeLocks
from csi.proto import csi_pb2 as pb
from csi.targets import Targets
from pydataplane.errors import TargetUnavailable
from pydataplane.watchedclient import WatchedClient
from tests.support.csi import MIB, NOTHING, Driver, block, mount
from tests.support.frozen import freeze
from tests.support.night import by_day
from tests.support.target import Target
from tests.support.wait import until
from tests.target.conftest import MakeTarget

pytestmark = pytest.mark.root
Code = grpc.StatusCode
STORES = ("lvs0", "lvs1")
POD = "11111111-2222-4333-8444-555555555555"


class Node:
    """Two targets with an lvstore of 1 GiB each, and a driver of both."""

    def __init__(self, targets: list[Target]) -> None:
        self.targets = targets
        self.driver = Driver(targets[0], targets[0].directory)
        self.start()

    def start(self, *options: str) -> None:
        sockets = [("--target-socket", str(each.rpc_socket)) for each in self.targets]
        self.driver.start(*(word for option in sockets for word in option), *options)

    def lvols(self) -> list[list[str]]:
        return [[each["name"] for each in t.rpc("bdev_lvol_get_lvols")] for t in self.targets]

    def exports(self) -> list[list[str]]:
        return [[each["bdev_name"] for each in t.rpc("virtlun_export_list")] for t in self.targets]

    def listed(self) -> list[str]:
        entries = self.driver.call(pb.ListVolumesRequest()).entries
        return [each.volume.volume_id for each in entries]

    def capacity(self, store: str) -> int:
        request = pb.GetCapacityRequest(parameters={"lvstore": store})
        return int(self.driver.call(request).available_capacity)

    def answers(self, handle: str) -> bool:
        """Whether the driver reaches the target of a volume."""
        try:
            self.driver.call(
                pb.ValidateVolumeCapabilitiesRequest(
                    volume_id=handle, volume_capabilities=[block()]
                )
            )
        except grpc.RpcError as error:
            assert error.code() is Code.UNAVAILABLE, error.details()
            return False
        return True

    def health(self, handle: str) -> list[str]:
        request = pb.NodeGetVolumeHealthRequest(volume_id=handle)
        health = self.driver.call(request).volume_health
        return [each.reason for each in health.health_statuses]


@pytest.fixture
def node(make_target: MakeTarget) -> Iterator[Node]:
    """A running driver of two running targets."""
    targets = [make_target().start() for _ in STORES]
    for target, store in zip(targets, STORES, strict=True):
        target.make_lvstore(store, size=1024 * MIB)
    made = Node(targets)
    yield made
    status = made.driver.stop()
    made.driver.clear()
    assert status == 0, made.driver.words()


@pytest.mark.nightly
def test_volumes_of_both_faces_live_on_the_target_of_their_lvstore(node: Node) -> None:
    driver = node.driver
    files = [driver.create("pvc-1", 320 * MIB, mount(), lvstore=each) for each in STORES]
    assert [driver.create("pvc-1", 320 * MIB, mount(), lvstore=each) for each in STORES] == files
    assert node.lvols() == [["pvc-1"], ["pvc-1"]]
    assert node.listed() == sorted(files)
    for target, store in zip(node.targets, STORES, strict=True):
        (found,) = target.rpc("bdev_lvol_get_lvstores")
        assert node.capacity(store) == found["free_clusters"] * found["cluster_size"]
    for number, handle in enumerate(files):
        for _ in range(2):
            path = driver.publish(handle, mount())
        (path / "file").write_bytes(bytes([number]) * MIB)
        assert node.exports()[number] == [handle]
    vhost = {"face": "vhost", "lvstore": STORES[1]}
    disk = driver.create("pvc-2", 64 * MIB, mount(""), **vhost)
    folder = driver.publish(disk, mount(""))
    assert (folder / "vhost.sock").is_socket()
    names = [[each["ctrlr"] for each in t.rpc("vhost_get_controllers")] for t in node.targets]
    assert names == [[], [f"csi-{disk}"]]
    driver.stop()
    node.start()
    for number, handle in enumerate(files):
        driver.expand(handle, 400 * MIB)
        assert (driver.path(handle) / "file").read_bytes() == bytes([number]) * MIB
    for handle in (*files, disk):
        for _ in range(2):
            driver.unpublish(handle)
        for _ in range(2):
            driver.unstage(handle)
        for _ in range(2):
            driver.delete(handle)
    assert (node.lvols(), node.exports()) == ([[], []], [[], []])
    assert driver.left() == NOTHING


@by_day("freeze-False")
@pytest.mark.parametrize(
    ("how", "restarted"),
    [
        ("kill", True),
        ("freeze", False),
        pytest.param("kill", False, marks=pytest.mark.nightly),
        pytest.param("freeze", True, marks=pytest.mark.nightly),
    ],
)
def test_one_target_that_says_nothing_costs_its_own_volumes_alone(
    node: Node, how: str, restarted: bool
) -> None:
    """`restarted`: the driver is new, and has seen no lvstore yet."""
    driver, gone = node.driver, node.targets[0]
    lost, kept = (driver.create(f"pvc-{each}", 64 * MIB, block(), lvstore=each) for each in STORES)
    driver.publish(kept, block())
    pid = gone.pid
    if how == "freeze":
        freeze(pid)
    else:
        gone.kill9()
    try:
        if restarted:
            driver.stop()
            node.start()
        for request in (
            pb.DeleteVolumeRequest(volume_id=lost),
            driver.stage_request(lost, block()),
            pb.GetCapacityRequest(parameters={"lvstore": STORES[0]}),
            pb.ListVolumesRequest(),
        ):
            code, said = driver.refuses(request)
            assert (code, str(gone.rpc_socket) in said) == (Code.UNAVAILABLE, True), said
        assert node.health(lost) == ["TargetAway"]
        assert "TargetAway" not in node.health(kept)
        assert driver.call(pb.ProbeRequest()).ready.value
        assert node.capacity(STORES[1]) > 0
        device = driver.path(kept)
        with device.open("r+b") as file:
            file.write(b"x" * 4096)
            os.fsync(file.fileno())
        driver.expand(kept, 128 * MIB)
        driver.unpublish(kept)
        driver.unstage(kept)
        assert driver.publish(kept, block()).read_bytes()[:4096] == b"x" * 4096
        driver.unpublish(kept)
        driver.unstage(kept)
        another = driver.create("pvc-3", 64 * MIB, block(), lvstore=STORES[1])
        for handle in (another, kept):
            driver.delete(handle)
    finally:
        if how == "freeze":
            os.kill(pid, signal.SIGCONT)
    if how == "kill":
        gone.start()
    # What it was asked meanwhile it answers first; kubelet repeats a call that was too early.
    until(lambda: node.answers(lost), "the target's volumes to be served again")
    driver.publish(lost, block())
    assert node.listed() == [lost]
    driver.unpublish(lost)
    driver.unstage(lost)
    driver.delete(lost)
    assert (node.lvols(), node.exports()) == ([[], []], [[], []])


def test_the_name_of_an_lvstore_on_both_targets_or_on_none_is_refused(node: Node) -> None:
    driver = node.driver
    node.targets[1].make_lvstore("lvs0", size=64 * MIB)

    def refused(store: str) -> tuple[grpc.StatusCode, str]:
        request = pb.CreateVolumeRequest(
            name="pvc-1", volume_capabilities=[block()], parameters={"lvstore": store}
        )
        return driver.refuses(request)

    code, said = refused("lvs0")
    assert code is Code.FAILED_PRECONDITION
    sockets = " and ".join(str(each.rpc_socket) for each in node.targets)
    assert said.startswith(f"the targets on {sockets} all have lvstore lvs0: ")
    code, said = refused("lvs9")
    assert code is Code.RESOURCE_EXHAUSTED
    assert "has no lvstore lvs9" in said
    (store,) = node.targets[0].rpc("bdev_lvol_get_lvstores")
    handle = driver.create("pvc-1", 64 * MIB, block(), lvstore=store["uuid"])
    assert node.lvols() == [["pvc-1"], []]
    driver.delete(handle)


def machines(node: Node, targets: Targets | None = None) -> VmControllers:
    """Returns the controllers of machines, as a driver has them that has just begun."""
    targets = targets or targets_of(node)
    return VmControllers(targets, LoopDevices(targets), VolumeLocks())


def targets_of(node: Node) -> Targets:
    return Targets([WatchedClient(each.rpc_socket) for each in node.targets])


def begin(node: Node, volume: str) -> Path:
    """Makes the pod's controller where a volume is, and returns its folder."""
    targets = targets_of(node)
    return machines(node, targets).publish(POD, targets.of(volume))


def test_a_machine_s_controller_is_on_one_target_and_takes_luns_of_that_one(node: Node) -> None:
    """A claim of another one stays a block device, and nothing of it was changed."""
    driver = node.driver
    first, second, third = (
        driver.create(f"pvc-{number}", 64 * MIB, block(), lvstore=STORES[store])
        for number, store in enumerate((0, 1, 1))
    )
    left, handed = driver.publish(first, block(), POD), driver.publish(second, block(), POD)
    folder = begin(node, second)
    assert folder == node.targets[1].vhost_dir / f"pod-{POD}"
    names = [[each["ctrlr"] for each in t.rpc("vhost_get_controllers")] for t in node.targets]
    assert names == [[], [f"pod-{POD}"]]
    controllers = machines(node)
    assert controllers.publish(POD) == folder, "it stays where it is"
    assert controllers.folder(POD) == folder
    assert controllers.hand_over(POD, second) == 0
    assert controllers.attach(POD, third) == 1
    assert [answer.value for answer in controllers.pods()] == [[], [POD]]
    ((pod, lun),) = controllers.shown(second)
    assert (pod, lun.handed_over) == (POD, True)
    assert controllers.shown(first) == []
    said = f"volume {first} is on the target of {node.targets[0].rpc_socket}, and "
    with pytest.raises(StaysOnKernelFace, match=f"^{said}"):
        controllers.hand_over(POD, first)
    with pytest.raises(Failure, match=f"^{said}") as refused:
        controllers.attach(POD, first)
    assert refused.value.code is Code.FAILED_PRECONDITION
    machines(node).give_back(POD, second)
    for device in (left, handed):
        device.write_bytes(b"x" * 4096)
    assert [lun.volume for lun in machines(node).luns(POD)] == [third]
    controllers = machines(node)
    for _ in range(2):
        controllers.unpublish(POD)
    assert not folder.exists()
    assert not controllers.exists(POD)
    for handle in (first, second):
        driver.unpublish(handle, POD)
        driver.unstage(handle)
    for handle in (first, second, third):
        driver.delete(handle)


def test_a_machine_does_without_a_target_that_is_away(node: Node) -> None:
    """Its controller is made, found and taken away on its own."""
    driver, gone = node.driver, node.targets[0]
    handle = driver.create("pvc-1", 64 * MIB, block(), lvstore=STORES[1])
    gone.kill9()
    begin(node, handle)
    controllers = machines(node)
    assert controllers.attach(POD, handle) == 0
    controllers = machines(node)
    assert [lun.volume for lun in controllers.luns(POD)] == [handle]
    controllers.unpublish(POD)
    with pytest.raises(TargetUnavailable, match=str(gone.rpc_socket)):
        controllers.exists(POD)
    gone.start()
    assert not controllers.exists(POD)
    driver.delete(handle)
