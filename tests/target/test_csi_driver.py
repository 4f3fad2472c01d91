"""The real driver over the real target: data, growth, crashes, what is left behind."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message

from csi import handles, mounts
from csi.hostdevice import loopctl
from csi.proto import csi_pb2 as pb
from csi.proto import pluginregistration_pb2 as registration
from pydataplane.errors import RpcError
from pydataplane.volumes import Volumes
from tests.support.csi import (
    CALL_DEADLINE_S,
    MIB,
    NODE,
    NOTHING,
    STOP_DEADLINE_S,
    Driver,
    Mode,
    block,
    may_grow_ext4,
    mount,
    running,
)
from tests.support.frozen import freeze
from tests.support.relay import Relay, Step
from tests.support.target import Target
from tests.target.conftest import MakeTarget

pytestmark = pytest.mark.root
Code = grpc.StatusCode


@pytest.fixture
def driver(make_target: MakeTarget) -> Iterator[Driver]:
    """A running driver with an lvstore of 2 GiB."""
    with running(make_target().start(), 2048) as driver:
        yield driver


def test_a_file_lives_through_pods_and_grows_with_its_volume(driver: Driver) -> None:
    handle = driver.create("pvc-1", 320 * MIB, mount("xfs"))
    path = driver.publish(handle, mount("xfs"))
    (path / "file").write_bytes(b"x" * MIB)
    os.sync()
    before = os.statvfs(path)
    driver.expand(handle, 640 * MIB)
    after = os.statvfs(path)
    assert after.f_blocks * after.f_frsize > before.f_blocks * before.f_frsize + 256 * MIB
    driver.unpublish(handle)
    driver.unstage(handle)
    path = driver.publish(handle, mount("xfs"), "next")
    assert (path / "file").read_bytes() == b"x" * MIB
    answer = driver.call(pb.NodeGetVolumeStatsRequest(volume_id=handle, volume_path=str(path)))
    space = answer.usage[0]
    assert space.total > 500 * MIB
    assert space.used > MIB
    driver.unpublish(handle, "next")
    driver.unstage(handle)
    driver.delete(handle)
    assert driver.left() == NOTHING


def test_a_volume_is_deleted_only_where_its_lvstore_is_loaded(driver: Driver) -> None:
    handle = driver.create("pvc-1", 64 * MIB, mount("xfs"))
    (store,) = driver.target.rpc("bdev_lvol_get_lvstores")
    (base,) = driver.target.rpc("bdev_get_bdevs", name=store["base_bdev"])
    file = Path(base["driver_specific"]["uring"]["filename"])
    driver.target.rpc("bdev_uring_delete", name=store["base_bdev"])
    request = pb.DeleteVolumeRequest(volume_id=handle)
    code, message = driver.refuses(request)
    assert code is Code.UNAVAILABLE
    assert "is not loaded" in message
    driver.target.make_lvstore("lvs1", size=64 * MIB)
    assert driver.refuses(request)[0] is Code.UNAVAILABLE
    Volumes(driver.target.client).import_lvstore(file)
    assert driver.left()["lvols"] == ["pvc-1"]
    for _ in range(2):
        driver.delete(handle)
    assert driver.left() == NOTHING


def test_a_volume_of_an_earlier_driver_is_deleted_only_where_all_lvstores_are_loaded(
    driver: Driver,
) -> None:
    """Its handle does not tell the lvstore, and another one is there."""
    target = driver.target
    handle = handles.without_lvstore(NODE, "pvc-1")
    target.rpc(
        "bdev_lvol_create", lvs_name="lvs0", lvol_name="pvc-1", size_in_mib=64, lvol_uuid=handle
    )
    assert driver.create("pvc-1", 64 * MIB, mount("xfs")) == handle
    target.make_lvstore("lvs1", size=64 * MIB)
    assert target.stop() == 0
    file, away = target.directory / "lvs0.img", target.directory / "away"
    file.rename(away)
    target.start()
    request = pb.DeleteVolumeRequest(volume_id=handle)
    code, message = driver.refuses(request)
    assert code is Code.UNAVAILABLE
    assert "is not loaded" in message
    assert target.stop() == 0
    away.rename(file)
    target.start()
    assert driver.left()["lvols"] == ["pvc-1"]
    for _ in range(2):
        driver.delete(handle)
    assert driver.left() == NOTHING


def test_ext4_grows_online_or_where_the_kernel_refuses_that_at_the_next_staging(
    driver: Driver,
) -> None:
    """Linux lets only CAP_SYS_RESOURCE grow a mounted ext4, which a container's root may lack."""
    handle = driver.create("pvc-1", 64 * MIB, mount("ext4"))
    path = driver.publish(handle, mount("ext4"))
    (path / "file").write_text("kept")
    if may_grow_ext4():
        driver.expand(handle, 128 * MIB)
    else:
        with pytest.raises(grpc.RpcError) as refused:
            driver.expand(handle, 128 * MIB)
        assert refused.value.code() is Code.FAILED_PRECONDITION
        assert refused.value.details() == (
            "the kernel does not let this process grow a mounted ext4 (CAP_SYS_RESOURCE is "
            "missing): it grows when the volume is staged next; xfs grows at once"
        )
        assert _bytes(path) < 64 * MIB
        driver.unpublish(handle)
        driver.unstage(handle)
        driver.publish(handle, mount("ext4"))
    assert _bytes(path) > 100 * MIB
    assert (path / "file").read_text() == "kept"
    driver.unpublish(handle)
    driver.unstage(handle)


def _bytes(path: Path) -> int:
    """Returns the size of a file system."""
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize


def test_a_block_volume_is_the_same_device_for_two_pods_and_grows(driver: Driver) -> None:
    shared = block(Mode.MULTI_NODE_MULTI_WRITER)
    handle = driver.create("pvc-1", 64 * MIB, shared, blockSize="4096")
    first, second = (driver.publish(handle, shared, pod) for pod in ("a", "b"))
    assert stat.S_ISBLK(first.stat().st_mode)
    assert first.stat().st_rdev == second.stat().st_rdev
    assert _output("blockdev", "--getss", str(first)) == "4096"
    first.write_bytes(b"shared" + bytes(4090))
    with second.open("rb") as device:
        assert device.read(6) == b"shared"
    assert all(loop.direct_io for loop in loopctl.loops() if handle in loop.name)
    driver.call(
        pb.ControllerExpandVolumeRequest(
            volume_id=handle, capacity_range=pb.CapacityRange(required_bytes=128 * MIB)
        )
    )
    driver.call(pb.NodeExpandVolumeRequest(volume_id=handle, volume_path=str(first)))
    assert _output("blockdev", "--getsize64", str(second)) == str(128 * MIB)
    for pod in ("a", "b"):
        driver.unpublish(handle, pod)
    driver.unstage(handle)
    driver.delete(handle)
    assert driver.left() == NOTHING


def test_read_only_is_read_only(driver: Driver) -> None:
    handle = driver.create("pvc-1", 64 * MIB, block())
    writable = driver.publish(handle, block(), "a")
    sealed = driver.publish(handle, block(), "b", readonly=True)
    writable.write_bytes(b"data" + bytes(508))
    with sealed.open("rb") as device:
        assert device.read(4) == b"data"
    with (
        pytest.raises(OSError, match="Operation not permitted"),
        sealed.open("rb+", buffering=0) as device,
    ):
        device.write(bytes(512))
    for pod in ("a", "b"):
        driver.unpublish(handle, pod)
    driver.unstage(handle)
    assert driver.left() == NOTHING | {"lvols": ["pvc-1"]}


def test_a_volume_that_a_virtual_machine_has_is_not_for_a_pod_and_the_other_way(
    driver: Driver,
) -> None:
    target = driver.target
    handle = driver.create("pvc-1", 64 * MIB, block())
    target.attach("vm", handle)
    code, message = driver.refuses(driver.stage_request(handle, block()))
    assert (code, "virtlun_export_create" in message) == (Code.FAILED_PRECONDITION, True)
    code, _ = driver.refuses(pb.DeleteVolumeRequest(volume_id=handle))
    assert code is Code.FAILED_PRECONDITION
    target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm", scsi_target_num=0)
    driver.call(driver.stage_request(handle, block()))
    with pytest.raises(RpcError) as refused:
        target.add_lun("vm", handle)
    assert refused.value.code == -16
    driver.unstage(handle)
    target.rpc("vhost_delete_controller", ctrlr="vm")


def test_a_virtual_machine_gets_a_socket_that_outlives_a_restart_of_the_target(
    driver: Driver,
) -> None:
    handle = driver.create("vm-1", 64 * MIB, mount("ext4"), face="vhost")
    folder = driver.publish(handle, mount("ext4"))
    second = driver.publish(handle, mount("ext4"), "second")
    driver.unpublish(handle, "second")
    assert not second.exists()
    assert [each.name for each in folder.iterdir()] == ["vhost.sock"]
    _connect(folder / "vhost.sock")
    driver.target.restart()
    _connect(folder / "vhost.sock")
    (controller,) = driver.target.rpc("vhost_get_controllers")
    (target,) = controller["backend_specific"]["scsi"]
    assert [(lun["id"], lun["bdev_name"]) for lun in target["luns"]] == [(0, handle)]
    code, message = driver.refuses(
        pb.NodeUnstageVolumeRequest(volume_id=handle, staging_target_path="/nowhere")
    )
    assert (code, str(folder) in message) == (Code.FAILED_PRECONDITION, True)
    driver.unpublish(handle)
    driver.unstage(handle)
    assert list(driver.target.vhost_dir.iterdir()) == []
    driver.delete(handle)
    assert driver.left() == NOTHING


def _connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_bad_input_leaves_nothing_behind(driver: Driver) -> None:
    handle = driver.create("pvc-1", 64 * MIB, mount("ext4"))
    refusals = {
        driver.refuses(driver.publish_request(handle, mount("ext4")))[0]: "not staged",
        driver.refuses(driver.stage_request(handle, mount("zfs")))[0]: "file system",
        driver.refuses(driver.stage_request("lvs0/pvc-1", mount()))[0]: "not ours",
    }
    assert set(refusals) == {Code.FAILED_PRECONDITION, Code.INVALID_ARGUMENT, Code.NOT_FOUND}
    small, message = driver.refuses(driver.stage_request(handle, mount("xfs")))
    assert (small, "xfs needs 300 MiB" in message) == (Code.FAILED_PRECONDITION, True)
    driver.unstage(handle)
    driver.delete(handle)
    assert driver.left() == NOTHING


def _kill(driver: Driver) -> None:
    assert driver.process is not None
    driver.process.send_signal(signal.SIGKILL)


def test_the_devices_of_a_target_that_died_wait_for_the_next(driver: Driver) -> None:
    handle = driver.create("pvc-1", 64 * MIB, mount("ext4"))
    path = driver.publish(handle, mount("ext4"))
    driver.target.kill9()
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(_write_through, path / "file")
        driver.target.start()
        writing.result()
    driver.call(driver.publish_request(handle, mount("ext4")))
    _write_through(path / "other")
    driver.unpublish(handle)
    driver.unstage(handle)
    driver.delete(handle)
    assert driver.left() == NOTHING


def test_the_devices_of_a_target_that_died_with_its_holder_fail_and_come_back(
    driver: Driver,
) -> None:
    handle = driver.create("pvc-1", 64 * MIB, mount("ext4"))
    path = driver.publish(handle, mount("ext4"))
    (path / "file").write_text("kept")
    os.sync()
    driver.target.kill9()
    driver.target.kill_holder()
    with pytest.raises(OSError, match="error"):  # and not a hang: the test has a deadline
        _write_through(path / "other")
    code, message = driver.refuses(driver.stage_request(handle, mount("ext4")))
    assert (code, "virtlun target start" in message) == (Code.UNAVAILABLE, True)
    driver.target.start()
    driver.call(driver.publish_request(handle, mount("ext4")))
    assert (path / "file").read_text() == "kept"
    _write_through(path / "other")
    driver.unpublish(handle)
    driver.unstage(handle)
    driver.delete(handle)
    assert driver.left() == NOTHING


def _write_through(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"x" * MIB)
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.nightly
def test_twenty_volumes_at_once(driver: Driver) -> None:
    def live(number: int) -> str:
        handle = driver.create(f"pvc-{number}", 16 * MIB, block())
        driver.publish(handle, block())
        driver.unpublish(handle)
        driver.unstage(handle)
        driver.delete(handle)
        return handle

    with ThreadPoolExecutor(20) as threads:
        assert len(set(threads.map(live, range(20)))) == 20
    assert driver.left() == NOTHING


@pytest.mark.nightly
def test_a_running_pod_does_not_notice_that_the_driver_stops(driver: Driver) -> None:
    handle = driver.create("pvc-1", 64 * MIB, mount("ext4"))
    path = driver.publish(handle, mount("ext4"))
    assert driver.stop() == 0
    assert not driver.socket.exists()
    _write_through(path / "file")
    driver.start()
    driver.publish(handle, mount("ext4"))
    driver.unpublish(handle)
    driver.unstage(handle)
    driver.delete(handle)
    assert mounts.at(path) is None


def test_a_call_that_was_begun_is_answered_before_the_driver_ends(driver: Driver) -> None:
    with ThreadPoolExecutor(1) as threads, _frozen(driver.target) as wake:
        creating = threads.submit(driver.create, "pvc-1", 64 * MIB, block())
        driver.wait_entry("begun", "CreateVolume")
        assert driver.process is not None
        driver.process.send_signal(signal.SIGTERM)
        driver.wait_entry("stopping")
        code, _ = driver.refuses(pb.GetPluginInfoRequest())
        # CANCELLED if it crosses with the end of the connection, of which gRPC tells the client
        # meanwhile. Kubernetes' sidecars and kubelet repeat a call after either.
        assert code in {Code.UNAVAILABLE, Code.CANCELLED}, "it takes no new ones"
        wake()
        handle = creating.result()
    assert driver.process.wait(STOP_DEADLINE_S) == 0
    assert not driver.socket.exists()
    assert driver.entries()[-1]["code"] == "OK"
    driver.stop()
    driver.start()
    driver.delete(handle)


def test_a_volume_has_one_call_at_a_time_and_others_are_told_to_come_again(driver: Driver) -> None:
    handle = driver.create("pvc-1", 64 * MIB, block())
    path = str(driver.publish(handle, block()))
    more = pb.CapacityRange(required_bytes=128 * MIB)
    growing = pb.ControllerExpandVolumeRequest(volume_id=handle, capacity_range=more)
    others = [
        pb.CreateVolumeRequest(
            name="pvc-1", volume_capabilities=[block()], parameters={"lvstore": "lvs0"}
        ),
        growing,
        driver.stage_request(handle, block()),
        driver.publish_request(handle, block()),
        pb.NodeExpandVolumeRequest(volume_id=handle, volume_path=path),
        pb.NodeUnpublishVolumeRequest(volume_id=handle, target_path=path),
        pb.NodeUnstageVolumeRequest(volume_id=handle, staging_target_path=path),
        pb.DeleteVolumeRequest(volume_id=handle),
    ]
    reached, wake = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert wake.wait(CALL_DEADLINE_S)

    between = driver.directory / "between.sock"
    with Relay(between, driver.target.rpc_socket, hold) as relay, ThreadPoolExecutor(1) as threads:
        driver.stop()
        driver.start("--target-socket", str(between))
        relay.end_at(Step("before", "bdev_lvol_resize"), hold)
        try:
            first = threads.submit(driver.call, growing)
            assert reached.wait(CALL_DEADLINE_S), "the target is not told to grow the volume"
            for request in others:
                found = driver.refuses(request)
                said = f"another operation on volume {handle} is in progress: try again later"
                assert found == (Code.ABORTED, said), type(request).__name__
        finally:
            wake.set()
        assert first.result().capacity_bytes == 128 * MIB
        driver.stop()
    driver.start()
    driver.unpublish(handle)
    driver.unstage(handle)
    driver.delete(handle)
    assert driver.left() == NOTHING


@contextmanager
def _frozen(target: Target) -> Iterator[Callable[[], None]]:
    """The target neither answers nor ends, until it is woken."""
    pid = target.pid
    freeze(pid)
    try:
        yield lambda: os.kill(pid, signal.SIGCONT)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("role", ["controller", "node"])
def test_each_role_can_be_served_alone(driver: Driver, role: str) -> None:
    driver.stop()
    driver.start("--mode", role)
    asked: dict[str, Message] = {
        "controller": pb.ControllerGetCapabilitiesRequest(),
        "node": pb.NodeGetInfoRequest(),
    }
    driver.call(asked.pop(role))
    (other,) = asked.values()
    assert driver.refuses(other)[0] is Code.UNIMPLEMENTED
    told = driver.call(pb.GetPluginCapabilitiesRequest()).capabilities
    services = {each.service.type for each in told if each.HasField("service")}
    controller = pb.PluginCapability.Service.CONTROLLER_SERVICE
    assert (controller in services) == (role == "controller")


def test_a_node_tells_its_name_topology_and_how_many_volumes_it_takes(driver: Driver) -> None:
    info = driver.call(pb.NodeGetInfoRequest())
    assert (info.node_id, info.max_volumes_per_node) == (NODE, 250)
    assert dict(info.accessible_topology.segments) == {"csi.virtlun.dev/node": NODE}
    driver.stop()
    driver.start("--max-volumes", "7")
    assert driver.call(pb.NodeGetInfoRequest()).max_volumes_per_node == 7


def test_a_volume_for_one_pod_is_published_again_for_that_pod_and_for_no_other(
    driver: Driver,
) -> None:
    """Also where kubelet itself has mounted it once more for its pod, as it does with devices."""
    sole = block(Mode.SINGLE_NODE_SINGLE_WRITER)
    handle = driver.create("pvc-1", 64 * MIB, sole)
    context = {"csi.storage.k8s.io/pod.uid": "uid-1"}
    driver.publish(handle, sole, "uid-1", volume_context=context)
    mapped = driver.directory / "dev" / "uid-1"
    mapped.parent.mkdir()
    mapped.touch()
    subprocess.run(["mount", "--bind", driver.path(handle, "uid-1"), mapped], check=True)
    driver.publish(handle, sole, "uid-1", volume_context=context)
    other = {"csi.storage.k8s.io/pod.uid": "uid-2"}
    code, message = driver.refuses(
        driver.publish_request(handle, sole, "uid-2", volume_context=other)
    )
    assert code is Code.FAILED_PRECONDITION
    assert f"is for one pod (ReadWriteOncePod) and is published at {mapped}" in message
    subprocess.run(["umount", mapped], check=True)
    driver.unpublish(handle, "uid-1")
    driver.publish(handle, sole, "uid-2", volume_context=other)
    driver.unpublish(handle, "uid-2")
    driver.unstage(handle)


def test_it_registers_with_the_kubelet(driver: Driver) -> None:
    driver.stop()
    path_of_it = driver.registry / "csi.virtlun.dev-reg.sock"
    path = "/where/kubelet/sees/it.sock"
    driver.start("--kubelet-registration-path", path, "--plugin-registry", str(driver.registry))
    with grpc.insecure_channel(f"unix://{path_of_it}") as channel:
        ask: Callable[..., registration.PluginInfo] = channel.unary_unary(
            "/pluginregistration.Registration/GetInfo",
            request_serializer=lambda given: given.SerializeToString(),
            response_deserializer=registration.PluginInfo.FromString,
        )
        found = ask(registration.InfoRequest())
    assert (found.type, found.name, found.endpoint) == ("CSIPlugin", "csi.virtlun.dev", path)
    assert "1.0.0" in found.supported_versions
    driver.stop()
    assert not path_of_it.exists()


def test_health_and_metrics(driver: Driver) -> None:
    driver.stop()
    driver.start("--http", "127.0.0.1:0")
    (port,) = [entry["http"] for entry in driver.entries() if entry.get("http")]
    handle = driver.create("pvc-1", 64 * MIB, block())
    driver.refuses(pb.DeleteVolumeRequest())
    status, words = _get(port, "metrics")
    assert status == 200
    assert 'virtlun_csi_operations_total{code="OK",method="CreateVolume"} 1.0' in words
    assert 'virtlun_csi_operations_total{code="INVALID_ARGUMENT",method="DeleteVolume"}' in words
    assert 'virtlun_csi_operation_seconds_count{method="CreateVolume"} 1.0' in words
    assert 'virtlun_csi_operation_seconds_bucket{le="+Inf",method="CreateVolume"} 1.0' in words
    assert 'virtlun_csi_volumes{lvstore="lvs0"} 1.0' in words
    assert 'virtlun_csi_volumes_bytes{lvstore="lvs0"} 6.7108864e+07' in words
    (store,) = driver.target.rpc("bdev_lvol_get_lvstores")
    for name, clusters in (("", "total_data_clusters"), ("_free", "free_clusters")):
        told = f'virtlun_csi_lvstore{name}_bytes{{lvstore="lvs0"}} '
        (line,) = [each for each in words.splitlines() if each.startswith(told)]
        assert float(line.removeprefix(told)) == store[clusters] * store["cluster_size"]
    up = f'virtlun_csi_target_up{{socket="{driver.target.rpc_socket}"}}'
    assert f"{up} 1.0" in words
    assert _get(port, "readyz")[0] == 200
    driver.target.stop()
    assert _get(port, "healthz")[0] == 200
    assert _get(port, "readyz")[0] == 503
    assert (
        f'virtlun_csi_target_up{{socket="{driver.target.rpc_socket}"}} 0.0'
        in _get(port, "metrics")[1]
    )
    assert not driver.call(pb.ProbeRequest()).ready.value
    driver.target.start()
    driver.delete(handle)
    driver.socket.rename(driver.directory / "elsewhere")
    status, words = _get(port, "healthz")
    assert (status, words) == (
        503,
        f"the driver's socket {driver.socket} is gone: restart the driver, which makes it anew\n",
    )
    (driver.directory / "elsewhere").rename(driver.socket)
    assert _get(port, "healthz") == (200, "ok\n")


def test_each_call_is_a_line_in_the_log_with_its_volume_and_pod(driver: Driver) -> None:
    handle = driver.create("pvc-1", 64 * MIB, block())
    pod = {f"csi.storage.k8s.io/pod.{key}": key for key in ("namespace", "name", "uid")}
    driver.publish(handle, block(), volume_context=pod)
    driver.unpublish(handle)
    driver.unstage(handle)
    driver.delete(handle)
    done = {each["method"]: each for each in driver.entries() if each["event"] == "done"}
    assert (done["CreateVolume"]["name"], done["CreateVolume"]["volume_id"]) == ("pvc-1", handle)
    assert done["NodePublishVolume"]["pod"] == "namespace/name"
    assert done["NodePublishVolume"]["milliseconds"] > 0
    begun, entry = [each for each in driver.entries() if each.get("method") == "DeleteVolume"]
    assert (begun["event"], begun["request"]) == ("begun", entry["request"])
    assert (entry["volume_id"], entry["code"], entry["level"]) == (handle, "OK", "info")
    assert entry["request"] > 0


def test_a_second_driver_on_the_socket_is_refused_and_one_left_behind_is_not_in_the_way(
    driver: Driver,
) -> None:
    rival = Driver(driver.target, driver.directory)
    with pytest.raises(AssertionError, match="another program listens there already"):
        rival.start()
    _kill(driver)
    driver.stop()
    assert driver.socket.exists()
    driver.start()
    assert stat.S_IMODE(driver.socket.stat().st_mode) == 0o600


def _get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=90) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()
