"""Two VMs that share a volume, with a real libvirtd."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.host import Host
from tests.support.night import at_night
from tests.support.wait import until

pytestmark = [pytest.mark.root]

NAMES = ("first", "second")
DISK = (
    "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/shared'/>"
    "<target dev='sda' bus='scsi'/><shareable/></disk>"
)


@pytest.fixture
def controllers(host: Host) -> Iterator[set[str]]:
    """Both domains, defined; the names of their controllers."""
    volume = host.volumes.create("lvs0/shared", 8 << 20)
    for name in NAMES:
        path = host.scratch / f"{name}.xml"
        path.write_text(
            f"<domain type='qemu'><name>{name}</name><memory unit='MiB'>32</memory>"
            "<os><type arch='x86_64' machine='q35'>hvm</type></os>"
            f"<devices>{DISK}<controller type='usb' model='none'/>"
            "<memballoon model='none'/></devices></domain>"
        )
        host.virsh("define", str(path))
    yield {f"vm-{host.virsh('domuuid', name)}" for name in NAMES}
    for name in NAMES:
        host.virsh("destroy", name, check=False)
        host.virsh("undefine", name)
    host.volumes.delete(volume.uuid)


def with_the_volume(host: Host) -> set[str]:
    """Returns the names of the controllers that have the volume as a LUN."""
    uuid = host.volumes.volume("lvs0/shared").uuid
    return {
        item["ctrlr"]
        for item in host.client.call("vhost_get_controllers")
        for target in item["backend_specific"]["scsi"]
        for lun in target["luns"]
        if lun["bdev_name"] == uuid
    }


@pytest.mark.parametrize("times", [4, at_night(50)])
@pytest.mark.timeout(1200)
def test_they_start_together(host: Host, controllers: set[str], times: int) -> None:
    """Neither takes the other's controller for a leftover, or finds the volume in use."""
    with ThreadPoolExecutor(len(NAMES)) as pool:
        for _ in range(times):
            list(pool.map(lambda name: host.virsh("start", name, "--paused"), NAMES))
            assert with_the_volume(host) == controllers
            list(pool.map(lambda name: host.virsh("destroy", name), NAMES))
            until(lambda: not with_the_volume(host), "both controllers are gone")
