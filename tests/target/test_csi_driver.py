"""The real driver over the real target: data, growth, crashes, what is left behind."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from csi.hostdevice import loopctl
from csi.mounts import at
from csi.proto import csi_pb2 as pb
from csi.proto import pluginregistration_pb2 as registration
from pydataplane.errors import RpcError
from tests.support.csi import MIB, NOTHING, Driver, Mode, block, mount
from tests.target.conftest import MakeTarget

pytestmark = pytest.mark.root
Code = grpc.StatusCode


@pytest.fixture
def driver(make_target: MakeTarget) -> Iterator[Driver]:
    """A running driver with an lvstore of 2 GiB."""
    target = make_target().start()
    target.make_lvstore(size=2048 * MIB)
    made = Driver(target, target.directory).start()
    yield made
    status = made.stop()
    made.clear()
    assert status == 0, made.words()


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


def test_ext4_that_may_not_grow_online_grows_at_the_next_staging(driver: Driver) -> None:
    handle = driver.create("pvc-1", 64 * MIB, mount("ext4"))
    path = driver.publish(handle, mount("ext4"))
    (path / "file").write_text("kept")
    try:
        driver.expand(handle, 128 * MIB)
    except grpc.RpcError as error:  # a host without CAP_SYS_RESOURCE
        assert (error.code(), "CAP_SYS_RESOURCE" in str(error.details())) == (
            Code.FAILED_PRECONDITION,
            True,
        )
    driver.unpublish(handle)
    driver.unstage(handle)
    path = driver.publish(handle, mount("ext4"))
    assert os.statvfs(path).f_blocks * os.statvfs(path).f_frsize > 100 * MIB
    assert (path / "file").read_text() == "kept"
    driver.unpublish(handle)
    driver.unstage(handle)


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
    target.rpc("vhost_create_scsi_controller", ctrlr="vm")
    target.rpc("vhost_scsi_controller_add_target", ctrlr="vm", scsi_target_num=0, bdev_name=handle)
    code, message = driver.refuses(driver.stage_request(handle, block()))
    assert (code, "virtlun_export_create" in message) == (Code.FAILED_PRECONDITION, True)
    code, _ = driver.refuses(pb.DeleteVolumeRequest(volume_id=handle))
    assert code is Code.FAILED_PRECONDITION
    target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm", scsi_target_num=0)
    driver.call(driver.stage_request(handle, block()))
    with pytest.raises(RpcError) as refused:
        target.rpc(
            "vhost_scsi_controller_add_target", ctrlr="vm", scsi_target_num=0, bdev_name=handle
        )
    assert refused.value.code == -16
    driver.unstage(handle)
    target.rpc("vhost_delete_controller", ctrlr="vm")


def test_a_virtual_machine_gets_a_socket_that_outlives_a_restart_of_the_target(
    driver: Driver,
) -> None:
    handle = driver.create("vm-1", 64 * MIB, mount("ext4"), face="vhost")
    folder = driver.publish(handle, mount("ext4"))
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
    assert driver.target.rpc("vhost_get_controllers") == []
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


KILLS = 12


@pytest.mark.timeout(180)
def test_a_driver_killed_anywhere_leaves_what_the_same_calls_complete(driver: Driver) -> None:
    """Kills at growing delays from the start of a volume's life, which is then lived to its end."""
    handles = []
    for number in range(KILLS):
        name = f"pvc-{number}"
        timer = threading.Timer(0.02 * number, _kill, [driver])
        timer.start()
        try:
            for _ in range(3):
                _live(driver, name)
        except grpc.RpcError as error:
            assert error.code() in (Code.UNAVAILABLE, Code.UNKNOWN, Code.CANCELLED), error
        timer.join()
        driver.stop()
        driver.start()
        handles.append(_live(driver, name))
    assert len(set(handles)) == KILLS
    assert driver.left() == NOTHING


def _kill(driver: Driver) -> None:
    assert driver.process is not None
    driver.process.send_signal(signal.SIGKILL)


def _live(driver: Driver, name: str) -> str:
    handle = driver.create(name, 64 * MIB, mount("ext4"))
    path = driver.publish(handle, mount("ext4"))
    (path / "file").write_text(name)
    driver.unpublish(handle)
    driver.unstage(handle)
    driver.delete(handle)
    return handle


def test_the_devices_of_a_target_that_died_fail_and_come_back(driver: Driver) -> None:
    handle = driver.create("pvc-1", 64 * MIB, mount("ext4"))
    path = driver.publish(handle, mount("ext4"))
    (path / "file").write_text("kept")
    os.sync()
    driver.target.kill9()
    begin = time.monotonic()
    with pytest.raises(OSError, match="error"):
        _write_through(path / "other")
    assert time.monotonic() - begin < 10, "an error is to come at once, not a hang"
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
    assert at(path) is None


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
    assert 'virtlun_csi_volumes_bytes{lvstore="lvs0"} 6.7108864e+07' in words
    assert "virtlun_csi_target_up 1.0" in words
    assert _get(port, "readyz")[0] == 200
    driver.target.stop()
    assert _get(port, "healthz")[0] == 200
    assert _get(port, "readyz")[0] == 503
    assert "virtlun_csi_target_up 0.0" in _get(port, "metrics")[1]
    assert not driver.call(pb.ProbeRequest()).ready.value
    driver.target.start()
    driver.delete(handle)


def test_each_call_is_a_line_in_the_log_with_its_volume(driver: Driver) -> None:
    handle = driver.create("pvc-1", 64 * MIB, block())
    driver.delete(handle)
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
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()
