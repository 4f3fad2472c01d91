"""A volume of the CSI driver's vhost face: published, and driven by a real guest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from csi.proto import csi_pb2 as pb
from tests.guest.conftest import MIB, disk
from tests.guest.image import Image
from tests.support.csi import NOTHING, Driver, mount
from tests.support.qemu import Guest
from tests.support.target import Target

pytestmark = [pytest.mark.nightly, pytest.mark.vm, pytest.mark.root]
Code = grpc.StatusCode


@pytest.fixture
def driver(scratch: Path) -> Iterator[Driver]:
    """A running driver with an lvstore of 256 MiB, and its target."""
    target = Target(scratch).start()
    target.make_lvstore(size=256 * MIB)
    made = Driver(target, scratch).start()
    yield made
    statuses = made.stop(), target.stop()
    made.clear()
    assert statuses == (0, 0), made.words() + target.words()


def test_a_guest_drives_a_published_volume(driver: Driver, scratch: Path, image: Image) -> None:
    """It boots with the socket, writes, sees growth by itself, and is in the way of unstaging."""
    use = mount("ext4")
    handle = driver.create("vm-1", 64 * MIB, use, face="vhost")
    folder = driver.publish(handle, use)
    unstage = pb.NodeUnstageVolumeRequest(
        volume_id=handle, staging_target_path=str(driver.staging / handle)
    )
    with Guest(image, scratch / "guest", controllers=(folder / "vhost.sock",)) as guest:
        name = disk(guest, 0)
        assert guest.run(f"cat /sys/block/{name}/size").strip() == str(64 * MIB // 512)
        guest.run(f"dd if=/dev/urandom of=/dev/{name} bs=1M count=64 oflag=direct")
        read = f"dd if=/dev/{name} bs=1M count=64 iflag=direct 2>/dev/null | md5sum"
        written = guest.run(read)

        answer = driver.call(
            pb.ControllerExpandVolumeRequest(
                volume_id=handle, capacity_range=pb.CapacityRange(required_bytes=128 * MIB)
            )
        )
        assert (answer.capacity_bytes, answer.node_expansion_required) == (128 * MIB, False)
        guest.agent.wait_for(f"grep -x {128 * MIB // 512} /sys/block/{name}/size")
        assert "Capacity data has changed" in guest.run("dmesg")
        guest.run(f"dd if=/dev/zero of=/dev/{name} bs=1M seek=127 count=1 oflag=direct")
        assert guest.run(read) == written

        # What another node's ControllerExpandVolume leaves to this one.
        grow = pb.NodeExpandVolumeRequest(
            volume_id=handle,
            volume_path=str(folder),
            capacity_range=pb.CapacityRange(required_bytes=192 * MIB),
        )
        assert driver.call(grow).capacity_bytes == 192 * MIB
        guest.agent.wait_for(f"grep -x {192 * MIB // 512} /sys/block/{name}/size")

        code, message = driver.refuses(unstage)
        assert (code, str(folder) in message) == (Code.FAILED_PRECONDITION, True)
        driver.unpublish(handle)  # the path goes; who has the socket open keeps the volume
        assert not folder.exists()
        assert guest.run(read) == written
        for request in (unstage, pb.DeleteVolumeRequest(volume_id=handle)):
            code, message = driver.refuses(request)
            assert code is Code.FAILED_PRECONDITION, message
        assert guest.run(read) == written
        driver.publish(handle, use)  # once more, as for the next pod
        driver.unpublish(handle)
    driver.unstage(handle)
    driver.delete(handle)
    assert driver.left() == NOTHING
    assert driver.target.rpc("vhost_get_controllers") == []
