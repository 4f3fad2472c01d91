"""What a whole Nova is told of volumes of ours, and what they are beneath: as test_nova_compute.py.

Each is tried with a server whose disks are LUNs, and with one whose disks are virtio-blk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.openstack.cinder_process import HOST
from tests.openstack.nova_checks import check_definitions, read, write
from tests.openstack.nova_cloud import (
    CHANGE_S,
    GIB,
    LVSTORE,
    MIB,
    Cloud,
    Server,
    disk_of,
    each_bus,
    with_lvstore,
)
from tests.support.host import Host, is_root
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm, pytest.mark.nightly, pytest.mark.timeout(900)]

BLOCKS = "blocks0"
"""An lvstore whose disk has blocks of 4096 bytes."""
CINDER = f"""
[DEFAULT]
enabled_backends = virtlun,blocks

[blocks]
volume_driver = plugin.openstack.driver.VirtlunDriver
volume_backend_name = blocks
virtlun_lvstore = {BLOCKS}
virtlun_rpc_socket = {{socket}}
"""
BOTH = pytest.mark.parametrize("server", ["scsi", "virtio"], indirect=True)
PCI = r"/([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])/"
"""An address in a path below /sys."""
COUNTED = ("read_requests", "read_bytes", "write_requests", "write_bytes")


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    """One whose Cinder has a second backend, for the volume type `blocks` alone."""
    if not is_root():
        pytest.fail("tests/openstack need root: they run a libvirtd in a mount namespace")
    with Host(keep=True) as host:
        file = host.scratch / "blocks0.img"
        file.touch()
        file.chmod(0o666)
        with file.open("r+b") as opened:
            opened.truncate(8 * GIB)
        host.client.call("bdev_aio_create", filename=str(file), name="blocks", block_size=4096)
        host.client.call("bdev_lvol_create_lvstore", bdev_name="blocks", lvs_name=BLOCKS)
        more = CINDER.format(socket=host.paths.rpc_socket)
        running = Cloud({HOST: host}, with_lvstore(host, more))
        types = running.cinder.get("types")["volume_types"]
        (usual,) = [each["id"] for each in types if each["name"] == "__DEFAULT__"]
        for type_id, backend in ((usual, "virtlun"), (_new_type(running), "blocks")):
            specs = {"extra_specs": {"volume_backend_name": backend}}
            running.cinder.post(f"types/{type_id}/extra_specs", specs)
        yield running
        running.close()


def _new_type(cloud: Cloud) -> str:
    """Makes the volume type `blocks` and returns its ID."""
    made = cloud.cinder.post("types", {"volume_type": {"name": "blocks"}})
    return str(made["volume_type"]["id"])


@pytest.fixture(scope="module")
def servers(cloud: Cloud) -> Iterator[dict[str, Server]]:
    with each_bus(cloud) as made:
        yield made


@pytest.fixture
def server(servers: dict[str, Server], request: pytest.FixtureRequest) -> Server:
    """The one of a bus."""
    return servers[request.param]


def counted(server: Server, volume: str) -> dict[str, int]:
    """Returns what Nova's diagnostics of a server tell of one of its volumes."""
    told = server.cloud.api.get(f"servers/{server.uuid}/diagnostics")["disk_details"]
    by_volume = dict(zip(server.disks(), told, strict=True))
    return {name: by_volume[volume][name] for name in COUNTED}


def usage(cloud: Cloud, volume: str) -> dict[str, int]:
    """Returns what Nova last told its billing of a volume; without any, nothing."""
    told = [each for each in cloud.services.told("volume.usage") if each["volume_id"] == volume]
    names = ("reads", "read_bytes", "writes", "write_bytes")
    return {name: told[-1][its] for name, its in zip(COUNTED, names, strict=True)} if told else {}


@BOTH
def test_what_a_guest_does_is_counted(cloud: Cloud, server: Server) -> None:
    """By the server's diagnostics, by the usage that is polled, and by the one at each detach.

    That one is the sum over all times that the volume was attached, which begin at 0 each.
    """
    volume = cloud.cinder.volume()
    guest = server.guest()
    total = dict.fromkeys(COUNTED, 0)
    for writes, reads in ((16, 9), (3, 5)):
        server.attach(volume)
        disk = disk_of(guest, volume)
        # The kernel has looked for partitions, too.
        guest.run(f"dd if={disk} of=/dev/null bs=4096 count=1 iflag=direct")
        before = counted(server, volume)
        assert before["write_requests"] == before["write_bytes"] == 0
        assert 0 < before["read_requests"] < 100
        guest.run(f"dd if=/dev/zero of={disk} bs=64k count={writes} oflag=direct")
        guest.run(f"dd if={disk} of=/dev/null bs=64k count={reads} iflag=direct")
        after = counted(server, volume)
        assert [after[name] - before[name] for name in COUNTED] == [
            *(reads, reads * 64 << 10, writes, writes * 64 << 10)
        ]
        total = {name: total[name] + after[name] for name in COUNTED}
        until(lambda: usage(cloud, volume) == total, "Nova to ask again", CHANGE_S)  # noqa: B023
        server.detach(volume)
        assert usage(cloud, volume) == total
    guest.close()
    cloud.cinder.delete(f"volumes/{volume}")


@BOTH
def test_a_volumes_tag_leads_to_the_guests_disk(cloud: Cloud, server: Server) -> None:
    """Nova keeps the bus of it for the guest, and the address of one that is a PCI device.

    Of a LUN's place on its controller Nova keeps nothing, whoever the disk is of.
    """
    volume = cloud.cinder.volume()
    server.attach(volume, tag="data")
    for hard_reboot in (False, True):
        if hard_reboot:
            server.act("reboot", "ACTIVE", {"type": "HARD"})
        guest = server.guest()
        name = disk_of(guest, volume).rpartition("/")[2]
        *_, pci, rest = re.split(PCI, guest.run(f"readlink -f /sys/block/{name}/device"))
        assert ("/host" in rest) == name.startswith("sd")
        of_its_own = name.startswith("vd")
        assert cloud.services.devices(server.uuid) == [
            {
                "tags": ["data"],
                "serial": volume,
                "bus": "PCIDeviceBus" if of_its_own else "SCSIDeviceBus",
                "address": pci if of_its_own else None,
            }
        ]
        guest.close()
    server.detach(volume)
    until(lambda: cloud.services.devices(server.uuid) == [], "Nova to forget it", CHANGE_S)
    cloud.cinder.delete(f"volumes/{volume}")


@BOTH
def test_a_volume_is_detached_whose_file_system_is_mounted(cloud: Cloud, server: Server) -> None:
    """Nobody asks the guest, as with any disk of these kinds: it is gone, and all agree on that."""
    volume = cloud.cinder.volume()
    server.attach(volume)
    guest = server.guest()
    disk = disk_of(guest, volume)
    guest.run(f"mkfs.ext4 -q {disk} && mount {disk} /mnt && echo kept >/mnt/file && sync", 240)
    guest.run("sleep 3600 </mnt/file >/dev/null 2>&1 & echo $! >/tmp/reader")
    server.detach(volume)
    check_definitions(server)
    assert server.volumes() == [server.volume]
    assert_not_used(cloud, volume)
    guest.wait_for(f"[ ! -e /sys/block/{disk.rpartition('/')[2]} ]")
    guest.run("grep -q ' /mnt ' /proc/mounts && ! (echo lost >/mnt/file && sync /mnt/file)")
    guest.run("kill $(cat /tmp/reader); umount /mnt")
    server.attach(volume)
    check_definitions(server, volume)
    disk = disk_of(guest, volume)
    assert guest.run(f"mount {disk} /mnt && cat /mnt/file && umount /mnt") == "kept\n"
    server.detach(volume)
    check_definitions(server)
    guest.close()
    cloud.cinder.delete(f"volumes/{volume}")


def assert_not_used(cloud: Cloud, volume: str) -> None:
    """No guest has a volume, as the target tells it."""
    (lvol,) = [
        each for each in cloud.host.volumes.volumes(LVSTORE) if each.name == f"volume-{volume}"
    ]
    (bdev,) = cloud.host.client.call("bdev_get_bdevs", name=lvol.uuid)
    assert bdev["claimed"] is False


@pytest.mark.parametrize("server", ["virtio"], indirect=True)
def test_a_guest_that_does_not_let_go_of_a_disk(cloud: Cloud, server: Server) -> None:
    """A PCI device is the guest's until it gives it back, and one that is paused does not.

    Nova has then removed it from the persistent definition, and tries no more; the guest gives it
    back as soon as it can, which Nova does not heed. Its next detach finds that.
    """
    volume = cloud.cinder.volume()
    server.attach(volume)
    guest = server.guest()
    write(guest, volume, "kept")
    name = disk_of(guest, volume).rpartition("/")[2]
    server.act("pause", "PAUSED")
    cloud.api.call("DELETE", f"servers/{server.uuid}/os-volume_attachments/{volume}")
    until(lambda: server.last_action() == ("detach_volume", "Error"), "Nova to give up", CHANGE_S)
    cloud.cinder.wait(f"volumes/{volume}", "in-use")
    assert "Device is still attached to the guest." in cloud.services.errors()
    assert server.volumes() == [server.volume, volume]
    assert set(server.disks()) == {server.volume, volume}
    assert set(server.disks("--inactive")) == {server.volume}
    server.act("unpause", "ACTIVE")
    guest.wait_for(f"[ ! -e /sys/block/{name} ]")
    until(lambda: set(server.disks()) == {server.volume}, "the disk to be gone", CHANGE_S)
    assert_not_used(cloud, volume)
    server.detach(volume)
    check_definitions(server)
    server.attach(volume)
    assert read(guest, volume) == "kept"
    guest.close()
    server.detach(volume)
    cloud.cinder.delete(f"volumes/{volume}")


@BOTH
def test_what_a_guest_discards_is_free_again(cloud: Cloud, server: Server) -> None:
    volume = cloud.cinder.volume()
    server.attach(volume)
    guest = server.guest()
    disk = disk_of(guest, volume)

    def allocated() -> int:
        return cloud.host.volumes.volume(f"{LVSTORE}/volume-{volume}").allocated

    assert allocated() == 0
    for xml in both(server):
        assert xml.find(f".//disk[serial='{volume}']/driver").get("discard") == "unmap"
    guest.run(f"dd if=/dev/urandom of={disk} bs=1M count=64 oflag=direct", 240)
    assert allocated() == 64 * MIB
    guest.run(f"blkdiscard {disk}")
    assert allocated() == 0
    guest.run(f"mkfs.ext4 -q {disk} && mount {disk} /mnt", 240)
    guest.run("dd if=/dev/urandom of=/mnt/file bs=1M count=64 && sync", 240)
    full = allocated()
    assert full >= 64 * MIB
    guest.run("rm /mnt/file && sync && fstrim /mnt", 240)
    assert allocated() <= full - 60 * MIB
    guest.run("umount /mnt")
    guest.close()
    server.detach(volume)
    cloud.cinder.delete(f"volumes/{volume}")


def both(server: Server) -> list[Any]:
    """Returns the roots of both definitions of a server's domain."""
    return [server.xml(), server.xml("--inactive")]


@BOTH
def test_a_volume_with_blocks_of_4096_bytes(cloud: Cloud, server: Server) -> None:
    """Cinder says so, and Nova has it in the disk's <blockio>."""
    volume = cloud.cinder.volume(volume_type="blocks")
    server.attach(volume)
    for xml in both(server):
        found = xml.find(f".//disk[serial='{volume}']/blockio")
        assert found.attrib == {"logical_block_size": "4096", "physical_block_size": "4096"}
        source = xml.find(f".//disk[serial='{volume}']/source").get("name")
        assert source == f"virtlun/{BLOCKS}/volume-{volume}"
    guest = server.guest()
    disk = disk_of(guest, volume)
    name = disk.rpartition("/")[2]
    queue = f"cat /sys/block/{name}/queue/logical_block_size"
    assert guest.run(queue) == "4096\n"
    guest.run(f"mkfs.ext4 -q {disk} && mount {disk} /mnt && echo kept >/mnt/file", 240)
    guest.run("umount /mnt")
    cloud.cinder.post(f"volumes/{volume}/action", {"os-extend": {"new_size": 2}})
    guest.wait_for(f"[ $(cat /sys/block/{name}/size) = {2 * GIB // 512} ]")
    cloud.cinder.wait(f"volumes/{volume}", "in-use")
    guest.run(f"dd if=/dev/zero of={disk} bs=4096 seek={2 * GIB // 4096 - 1} count=1 oflag=direct")
    guest.close()
    server.act("reboot", "ACTIVE", {"type": "HARD"})
    guest = server.guest()
    disk = disk_of(guest, volume)
    assert (
        guest.run(f"cat /sys/block/{disk.rpartition('/')[2]}/queue/logical_block_size") == "4096\n"
    )
    assert guest.run(f"mount {disk} /mnt && cat /mnt/file && umount /mnt") == "kept\n"
    guest.close()
    server.detach(volume)
    check_definitions(server)
    cloud.cinder.delete(f"volumes/{volume}")
