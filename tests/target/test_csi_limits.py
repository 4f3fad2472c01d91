"""Limits by VolumeAttributesClasses: the real driver over the real target."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from mmap import mmap

import pytest

from csi.proto import csi_pb2 as pb
from pydataplane.domain.limiting import found
from pydataplane.domain.limits import NONE, Limits
from tests.support.csi import MIB, NOTHING, Driver, block, running, snapshot_of, volume_of
from tests.support.wait import until
from tests.target.conftest import MakeTarget

pytestmark = pytest.mark.root
SIZE = 64 * MIB
SLOW = {"iops": "50", "iopsBurst": "60", "burstSeconds": "2", "writeThroughput": "4"}
LIMITS = Limits(
    total_iops_sec=50,
    total_iops_sec_max=60,
    total_iops_sec_max_length=2,
    write_bytes_sec=4 * MIB,
)


@pytest.fixture
def driver(make_target: MakeTarget) -> Iterator[Driver]:
    """A running driver with an lvstore of 1 GiB."""
    with running(make_target().start(), 1024) as driver:
        yield driver


def limits(driver: Driver, handle: str) -> Limits:
    """Returns what the target limits a volume to."""
    return found(driver.target.client, handle)


def written(driver: Driver, handle: str) -> int:
    """Returns the bytes that have been written to a volume."""
    [counted] = driver.target.rpc("bdev_get_iostat", names=[handle])["bdevs"]
    return int(counted["bytes_written"])


def modify(driver: Driver, handle: str, **parameters: str) -> None:
    """Gives a volume another class."""
    driver.call(pb.ControllerModifyVolumeRequest(volume_id=handle, mutable_parameters=parameters))


def test_limits_of_a_class_are_there_until_the_volume_goes(driver: Driver) -> None:
    request = driver.create_request("data", SIZE, block())
    request.mutable_parameters.update(SLOW)
    handle: str = driver.call(request).volume.volume_id
    driver.handles.add(handle)
    assert limits(driver, handle) == LIMITS
    snapshot = driver.snapshot(handle, "snap")
    others = [
        driver.create("restored", SIZE, block(), snapshot_of(snapshot)),
        driver.create("cloned", SIZE, block(), volume_of(handle)),
    ]
    assert [limits(driver, each) for each in others] == [NONE, NONE]
    driver.publish(handle, block())
    driver.target.kill9()
    driver.target.start()
    driver.stop()
    driver.start()
    assert limits(driver, handle) == LIMITS
    modify(driver, handle, iops="0", readIops="70")
    assert limits(driver, handle) == Limits(read_iops_sec=70, write_bytes_sec=4 * MIB)
    driver.unpublish(handle)
    driver.unstage(handle)
    for each in (*others, handle):
        driver.delete(each)
    driver.delete_snapshot(snapshot)
    assert driver.left() == NOTHING
    kept = driver.target.rpc("framework_get_config", name="bdev")
    assert not [call for call in kept if call["method"] == "virtlun_bdev_set_limits"]


def test_a_pod_that_writes_feels_another_class_at_once(driver: Driver) -> None:
    """At the first class its second write would wait for longer than any test takes."""
    handle = driver.create("data", SIZE, block())
    path = driver.publish(handle, block())
    modify(driver, handle, iops="1", ioSizeKiB="1")
    ended: list[int] = []

    def write() -> None:
        device = os.open(path, os.O_WRONLY | os.O_DIRECT)
        try:
            for at in range(2):
                ended.append(os.pwritev(device, [mmap(-1, MIB)], at * MIB))
        finally:
            os.close(device)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        until(lambda: written(driver, handle), "a write to begin")
        assert len(ended) < 2
    finally:
        modify(driver, handle, iops="0")
        thread.join()
    assert ended == [MIB, MIB]
    driver.unpublish(handle)
    driver.unstage(handle)
    driver.delete(handle)
