"""Servers of a whole Nova go from one host to another, and their volumes with them.

As tests/openstack/test_nova_compute.py, but that Nova has two hosts, and volumes are Cinder's own
of Ceph, which both hosts reach: they are served by the target of the host that the server is on.
Both hosts are this machine, and share Nova's folder of servers, as over NFS.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.openstack.ceph_hosts import FIRST, SECOND, Hosts, hosts
from tests.openstack.nova_cloud import Server, disk_of
from tests.support.ceph import POOL, lacks
from tests.support.host import Host, is_root
from tests.support.libvirtd import VirshError

pytestmark = [
    pytest.mark.root,
    pytest.mark.vm,
    pytest.mark.nightly,
    pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}"),
    pytest.mark.timeout(900),
]

LOCKED = "is locked by the client at 127.0.0.1"


@pytest.fixture(scope="module")
def both() -> Iterator[Hosts]:
    if not is_root():
        pytest.fail("tests/openstack need root: they run a libvirtd in a mount namespace")
    with hosts() as made:
        yield made


@pytest.fixture
def server(both: Hosts) -> Iterator[Server]:
    """One on the first host, with two volumes; its second one has a line."""
    cloud = both.cloud
    made = cloud.boot(cloud.boot_volume(), on=FIRST)
    made.attach(cloud.cinder.volume())
    write(made, "before")
    yield made
    volumes = made.volumes()
    made.delete()
    for each in volumes:
        cloud.cinder.wait(f"volumes/{each}")
        cloud.cinder.delete(f"volumes/{each}")
    assert both.user.ceph.rbd("ls", POOL) == ""


def write(server: Server, text: str) -> None:
    """The guest writes a line to its second volume, and it is durable."""
    guest = server.guest()
    guest.run(f"echo '{text}' | dd of={disk_of(guest, server.volumes()[1])} conv=sync,fsync")
    guest.close()


def check(both: Hosts, server: Server, name: str, text: str) -> None:
    """It runs on a host with its volumes, which that alone has; it reads its line, and no other."""
    cloud, volumes = both.cloud, server.volumes()
    assert server.get()["OS-EXT-SRV-ATTR:host"] == name
    images = {each: f"{POOL}/volume-{each}" for each in volumes}
    assert server.disks() == server.disks("--inactive") == images
    assert set(both.user.ceph.rbd("ls", POOL).split()) == {f"volume-{each}" for each in volumes}
    for host in cloud.hosts.values():
        assert opened(host) == (sorted(images.values()) if host is cloud.hosts[name] else [])
    for each in volumes:
        assert cloud.cinder.get(f"volumes/{each}")["volume"]["status"] == "in-use"
        assert both.user.locks(f"volume-{each}") == 1
    guest = server.guest()
    disk = disk_of(guest, server.volumes()[1])
    read = guest.run(f"dd if={disk} bs=512 count=1 iflag=direct 2>/dev/null | head -n 1")
    assert read == f"{text}\n"
    assert len(guest.run("ls -d /sys/block/[sv]d*").split()) == 2
    guest.close()


def opened(host: Host) -> list[str]:
    """The images that a host's target has open."""
    found = (each["driver_specific"].get("rbd") for each in host.client.call("bdev_get_bdevs"))
    return sorted(f"{each['pool_name']}/{each['rbd_name']}" for each in found if each)


def refusal(host: Host, domain: str) -> str:
    """Why a host's operator cannot start a server there."""
    with pytest.raises(VirshError) as refused:
        host.virsh("start", domain)
    return str(refused.value)


def test_a_cold_migration_is_taken_back_and_then_kept(both: Hosts, server: Server) -> None:
    domain, (first, second) = server.domain, both.cloud.hosts.values()
    server.act("migrate", "VERIFY_RESIZE")
    check(both, server, SECOND, "before")
    # The first host has it defined still.
    assert LOCKED in refusal(first, domain)
    write(server, "there")
    server.act("revertResize", "ACTIVE")
    # Only then it has serial ports again, as the first host had it defined with some.
    server.act("reboot", "ACTIVE", {"type": "HARD"})
    check(both, server, FIRST, "there")
    assert second.virsh("list", "--all", "--name") == ""
    server.act("migrate", "VERIFY_RESIZE")
    server.act("confirmResize", "ACTIVE")
    check(both, server, SECOND, "there")
    assert first.virsh("list", "--all", "--name") == ""
