"""Servers of a whole Nova whose disks are volumes of ours, by Nova's and Cinder's REST APIs.

nova-api, nova-conductor, nova-scheduler, nova-compute, placement, Glance and Cinder's services are
the releases of PyPI, with PostgreSQL and RabbitMQ; libvirtd, gateway, target and guests are real.
Keystone and Neutron are not there: see tests/openstack/nova_config.py and stand_ins.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.openstack.cinder_process import HOST
from tests.openstack.nova_checks import (
    MARK,
    check,
    check_disks,
    check_mark,
    read,
    seek,
    source,
    write,
)
from tests.openstack.nova_cloud import (
    CHANGE_S,
    GIB,
    LVSTORE,
    MARK_AT,
    MIB,
    Cloud,
    Server,
    disk_of,
    with_lvstore,
)
from tests.openstack.nova_process import PROPERTIES
from tests.openstack.rest import Refused
from tests.support.host import Host, is_root
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm, pytest.mark.nightly, pytest.mark.timeout(900)]

TOLD_AT = MARK_AT + MIB
RESCUE = f"""\
export PATH=/tools:/sbin:/bin:/usr/sbin:/usr/bin
while sleep 1; do
    [ "$(ls -d /sys/block/[sv]d* | wc -l)" = 3 ] || continue
    for disk in /dev/[sv]d?; do
        read="dd if=$disk bs=4096 skip={MARK_AT // 4096} count=1 iflag=direct"
        [ "$($read 2>/dev/null | head -n 1)" = "{MARK}" ] || continue
        cat /proc/cmdline /sys/block/sd*/device/vpd_pg80 >/tmp/told
        dd if=/tmp/told of=$disk bs=4096 seek={TOLD_AT // 4096} conv=sync oflag=direct
        exit
    done
done
"""
"""A rescue system: once it has three disks it reads the mark, and writes what it is and has."""


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    if not is_root():
        pytest.fail("tests/openstack need root: they run a libvirtd in a mount namespace")
    with Host(keep=True) as host:
        running = Cloud({HOST: host}, with_lvstore(host))
        yield running
        running.close()


@pytest.fixture(scope="module")
def server(cloud: Cloud) -> Iterator[Server]:
    """One that runs, and has `MARK` on its disk; each test is to leave it so."""
    made = cloud.boot(cloud.boot_volume())
    guest = made.guest()
    guest.run(f"echo '{MARK}' | dd of={disk_of(guest, made.volume)} {seek()} conv=sync,fsync")
    guest.close()
    yield made
    made.delete()
    cloud.cinder.delete(f"volumes/{made.volume}")
    assert cloud.lvols() == set()
    assert cloud.allocated(made.uuid) == {}
    assert cloud.host.virsh("list", "--all", "--name") == ""


@pytest.fixture
def second(cloud: Cloud, server: Server) -> Iterator[str]:
    """A further volume of the server's."""
    volume = cloud.cinder.volume()
    server.attach(volume)
    yield volume
    server.detach(volume)
    cloud.cinder.delete(f"volumes/{volume}")


def test_the_scheduler_knows_what_the_host_has(cloud: Cloud, server: Server) -> None:
    (provider,) = cloud.services.placement.get("resource_providers")["resource_providers"]
    path = f"resource_providers/{provider['uuid']}/inventories"
    inventories = cloud.services.placement.get(path)["inventories"]
    assert {"VCPU", "MEMORY_MB"} <= set(inventories)
    assert cloud.allocated(server.uuid) == {"VCPU": 1, "MEMORY_MB": 256}


def test_a_server_boots_from_a_volume(server: Server) -> None:
    guest = check(server)
    # The volume is all that it could have booted from.
    assert "virtlun.agent" in guest.run("cat /proc/cmdline")
    assert len(guest.run("ls -d /sys/block/[sv]d*").split()) == 1
    guest.close()


def test_a_volume_is_attached_grows_and_is_detached(cloud: Cloud, server: Server) -> None:
    volume = cloud.cinder.volume()
    server.attach(volume)
    guest = check(server, volume)
    disk = disk_of(guest, volume)
    guest.run(f"echo first | dd of={disk} conv=sync,fsync")
    cloud.cinder.post(f"volumes/{volume}/action", {"os-extend": {"new_size": 2}})
    name = disk.rpartition("/")[2]
    guest.wait_for(f"[ $(cat /sys/block/{name}/size) = {2 * GIB // 512} ]")
    cloud.cinder.wait(f"volumes/{volume}", "in-use")
    assert guest.run(f"head -n 1 {disk}") == "first\n"
    server.detach(volume)
    guest.wait_for(f"[ ! -e /sys/block/{name} ]")
    server.attach(volume)
    assert guest.run(f"head -n 1 {disk_of(guest, volume)}") == "first\n"
    server.detach(volume)
    guest.close()
    cloud.cinder.delete(f"volumes/{volume}")
    check(server).close()


def test_a_hard_reboot(server: Server, second: str) -> None:
    server.act("reboot", "ACTIVE", {"type": "HARD"})
    check(server, second).close()


def test_stop_and_start_and_a_volume_attached_between(cloud: Cloud, server: Server) -> None:
    server.act("os-stop", "SHUTOFF")
    volume = cloud.cinder.volume()
    server.attach(volume)
    assert server.disks("--inactive")[volume] == source(volume)
    server.act("os-start", "ACTIVE")
    check(server, volume).close()
    server.act("os-stop", "SHUTOFF")
    server.detach(volume)
    cloud.cinder.delete(f"volumes/{volume}")
    server.act("os-start", "ACTIVE")
    check(server).close()


def test_pause_and_unpause(server: Server, second: str) -> None:
    server.act("pause", "PAUSED")
    server.act("unpause", "ACTIVE")
    check(server, second).close()


def test_suspend_and_resume(server: Server, second: str) -> None:
    guest = server.guest()
    guest.run("echo kept >/tmp/kept")
    guest.close()
    server.act("suspend", "SUSPENDED")
    server.act("resume", "ACTIVE")
    guest = check(server, second)
    assert guest.run("cat /tmp/kept") == "kept\n"
    guest.close()


def test_shelve_and_unshelve(cloud: Cloud, server: Server, second: str) -> None:
    server.act("shelve", "SHELVED_OFFLOADED")
    assert cloud.host.virsh("list", "--all", "--name") == ""
    assert cloud.allocated(server.uuid) == {}
    server.act("unshelve", "ACTIVE")
    check(server, second).close()


def test_a_resize_is_taken_back_and_then_kept(cloud: Cloud, server: Server, second: str) -> None:
    """On the same host, by the steps of a cold migration.

    There Nova gives the server no serial ports, and so no command channel, until it reboots.
    """
    for ends in ("revertResize", "confirmResize"):
        server.act("resize", "VERIFY_RESIZE", {"flavorRef": cloud.larger})
        check_disks(server, second)
        server.act(ends, "ACTIVE")
        check_disks(server, second)
        server.act("reboot", "ACTIVE", {"type": "HARD"})
        check(server, second).close()
    assert cloud.allocated(server.uuid)["MEMORY_MB"] == 320


def test_nova_compute_is_killed(cloud: Cloud, server: Server, second: str) -> None:
    qemu = cloud.host.libvirtd.qemu_pid(server.domain)
    cloud.services.kill(HOST)
    cloud.services.start(HOST)
    server.detach(second)
    server.attach(second)
    assert cloud.host.libvirtd.qemu_pid(server.domain) == qemu
    check(server, second).close()


def test_the_limits_of_a_volumes_type(cloud: Cloud, server: Server) -> None:
    body = {"volume_type": {"name": "slow"}}
    of = cloud.cinder.post("types", body)["volume_type"]["id"]
    specs = {"name": "slow", "consumer": "front-end", "total_iops_sec": "500"}
    qos = cloud.cinder.post("qos-specs", {"qos_specs": specs})["qos_specs"]["id"]
    cloud.cinder.get(f"qos-specs/{qos}/associate?vol_type_id={of}")
    volume = cloud.cinder.volume(volume_type=of)

    def limit() -> int:
        words = {"name": f"cinder0/volume-{volume}"}
        return int(cloud.host.client.call("virtlun_bdev_get_limits", **words)["total_iops_sec"])

    server.attach(volume)
    check(server, volume).close()
    assert limit() == 500
    server.act("reboot", "ACTIVE", {"type": "HARD"})
    assert limit() == 500
    server.detach(volume)
    assert limit() == 0
    cloud.cinder.delete(f"volumes/{volume}")


def test_a_volume_that_is_read_only(cloud: Cloud, server: Server) -> None:
    volume = cloud.cinder.volume()
    body = {"os-update_readonly_flag": {"readonly": True}}
    cloud.cinder.post(f"volumes/{volume}/action", body)
    server.attach(volume)
    guest = check(server, volume)
    disk = disk_of(guest, volume)
    assert guest.run(f"cat /sys/block/{disk.rpartition('/')[2]}/ro") == "1\n"
    server.detach(volume)
    guest.close()
    cloud.cinder.delete(f"volumes/{volume}")


def test_a_volume_of_two_servers(cloud: Cloud, server: Server) -> None:
    """The other one's own volume ends with it."""
    other = cloud.boot(cloud.boot_volume(), ends=True)
    body = {"volume_type": {"name": "shared", "extra_specs": {"multiattach": "<is> True"}}}
    of = cloud.cinder.post("types", body)["volume_type"]["id"]
    volume = cloud.cinder.volume(volume_type=of)
    server.attach(volume)
    other.attach(volume)
    first, second = server.guest(), other.guest()
    first.run(f"echo shared | dd of={disk_of(first, volume)} conv=sync,fsync")
    assert second.run(f"head -n 1 {disk_of(second, volume)}") == "shared\n"
    first.close()
    second.close()
    other.delete()
    until(lambda: cloud.lvols() == {f"volume-{each}" for each in (server.volume, volume)})
    server.detach(volume)
    cloud.cinder.delete(f"volumes/{volume}")
    check(server).close()


@pytest.mark.parametrize("bus", ["virtio", "scsi"])
def test_a_rescue(cloud: Cloud, server: Server, second: str, bus: str) -> None:
    """What boots is a disk of an image, which is a file, beside the server's own disks.

    Nova gives it no serial ports, as the server has had some, and so no command channel.
    """
    properties = PROPERTIES | {"hw_rescue_device": "disk", "hw_rescue_bus": bus}
    image = cloud.add_image(f"rescue-{bus}", f"virtlun.rescue={bus}", RESCUE, properties)

    def writes() -> int:
        found = cloud.host.client.call("bdev_get_iostat", name=f"{LVSTORE}/volume-{server.volume}")
        return int(found["bdevs"][0]["num_write_ops"])

    before = writes()
    server.act("rescue", "RESCUE", {"rescue_image_ref": image})
    for words in ((), ("--inactive",)):
        disks = server.disks(*words)
        assert disks.pop("").endswith("/disk.rescue")
        assert disks == {volume: source(volume) for volume in (server.volume, second)}
    until(lambda: writes() > before, "the rescue system to write", CHANGE_S)
    server.act("unrescue", "ACTIVE")
    guest = check(server, second)
    assert "virtlun.rescue" not in guest.run("cat /proc/cmdline")
    told = f"dd if={disk_of(guest, server.volume)} bs=4096 skip={TOLD_AT // 4096} count=1"
    for word in (f"virtlun.rescue={bus}", server.volume, second):
        assert word in guest.run(f"{told} iflag=direct 2>/dev/null")
    guest.close()


def test_a_rescue_by_an_image_that_names_no_device(cloud: Cloud, server: Server) -> None:
    """Nova's own rule for servers that boot from a volume: their disks would not be there."""
    with pytest.raises(Refused, match=r"^400 .*: Cannot rescue a volume-backed instance"):
        server.act("rescue", "RESCUE", {"rescue_image_ref": cloud.image})
    check(server).close()


def test_volumes_on_virtio(cloud: Cloud) -> None:
    """Each is a virtio-blk disk, a PCI device of its own."""
    image = cloud.add_image("virtio", properties={"hw_disk_bus": "virtio"})
    server = cloud.boot(cloud.boot_volume(image), ends=True)
    guest, volume = server.guest(), cloud.cinder.volume()
    server.attach(volume)
    disk = disk_of(guest, volume)
    assert guest.run("ls /sys/block | grep -E '^[sv]d'").split() == ["vda", "vdb"]
    assert (disk_of(guest, server.volume), disk) == ("/dev/vda", "/dev/vdb")
    write(guest, volume, "by virtio-blk")
    cloud.cinder.post(f"volumes/{volume}/action", {"os-extend": {"new_size": 2}})
    guest.wait_for(f"[ $(cat /sys/block/vdb/size) = {2 * GIB // 512} ]")
    cloud.cinder.wait(f"volumes/{volume}", "in-use")
    server.detach(volume)
    guest.wait_for("[ ! -e /sys/block/vdb ]")
    server.attach(volume)
    assert read(guest, volume) == "by virtio-blk"
    guest.close()
    server.act("reboot", "ACTIVE", {"type": "HARD"})
    guest = server.guest()
    assert read(guest, volume) == "by virtio-blk"
    for words in ((), ("--inactive",)):
        assert server.disks(*words) == {each: source(each) for each in (server.volume, volume)}
    guest.close()
    server.detach(volume)
    cloud.cinder.delete(f"volumes/{volume}")
    server.delete()


def test_an_image_of_a_server_and_a_server_of_it(cloud: Cloud, server: Server, second: str) -> None:
    """The image is of Cinder's snapshots: the new server has volumes of them, which are its own."""
    guest = server.guest()
    write(guest, second, "before")
    answer = cloud.api.post(f"servers/{server.uuid}/action", {"createImage": {"name": "copy"}})
    image = answer["image_id"]
    path = f"v2/images/{image}"
    until(lambda: cloud.glance.get(path)["status"] == "active", "the image")
    server.wait("ACTIVE")
    snapshots = {
        each["volume_id"]: each["id"] for each in cloud.cinder.get("snapshots")["snapshots"]
    }
    assert set(snapshots) == {server.volume, second}
    for each in snapshots.values():
        cloud.cinder.wait(f"snapshots/{each}")
    write(guest, second, "after")
    copy = cloud.boot_image(image)
    volumes = copy.volumes()
    assert copy.disks() == copy.disks("--inactive") == {each: source(each) for each in volumes}
    of = [cloud.cinder.get(f"volumes/{each}")["volume"]["snapshot_id"] for each in volumes]
    assert of == [snapshots[server.volume], snapshots[second]]
    other = copy.guest()
    check_mark(copy, other)
    assert read(other, volumes[1]) == "before"
    write(other, volumes[1], "of the copy")
    assert read(guest, second) == "after"
    other.close()
    guest.close()
    copy.delete()
    for each in volumes:
        cloud.cinder.wait(f"volumes/{each}")
        cloud.cinder.delete(f"volumes/{each}")
    for each in snapshots.values():
        cloud.cinder.delete(f"snapshots/{each}")
    cloud.glance.call("DELETE", path)
    check(server, second).close()
