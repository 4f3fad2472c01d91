"""Servers of a whole Nova go from one host to another, and their volumes with them.

As tests/openstack/test_nova_compute.py, but that Nova has two hosts, and volumes are Cinder's own
of Ceph, which both hosts reach: they are served by the target of the host that the server is on.
Both hosts are this machine, and share Nova's folder of servers, as over NFS.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.openstack.ceph_hosts import FIRST, SECOND, Hosts, hosts
from tests.openstack.nova_cloud import CHANGE_S, Cloud, Server, disk_of
from tests.openstack.rest import Refused
from tests.support.agent import Agent
from tests.support.ceph import POOL, lacks
from tests.support.host import Host, is_root
from tests.support.libvirtd import VirshError
from tests.support.wait import until

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


def write(server: Server, text: str, guest: Agent | None = None) -> None:
    """The guest writes a line to its second volume, and it is durable."""
    told = guest or server.guest()
    told.run(f"echo '{text}' | dd of={disk_of(told, server.volumes()[1])} conv=sync,fsync")
    if guest is None:
        told.close()


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


def test_an_evacuation(both: Hosts, server: Server) -> None:
    """Refused while the host only seems to be dead; where it is, and comes back, it has nothing."""
    cloud, domain = both.cloud, server.domain
    first = cloud.hosts[FIRST]
    cloud.services.kill(FIRST)
    say_down(cloud, True)
    guest = server.guest()
    cloud.api.post(f"servers/{server.uuid}/action", {"evacuate": {"host": SECOND}})
    server.wait("ERROR")
    assert LOCKED in server.get()["fault"]["details"]
    write(server, "last", guest)
    guest.close()
    kill(first, domain)
    server.act("evacuate", "ACTIVE", {"host": SECOND})
    write(server, "after")
    # It comes back: what its operator may do before Nova is there, and what that does.
    first.libvirtd.start()
    first.start_target()
    first.start_gateway()
    assert LOCKED in refusal(first, domain)
    cloud.services.start(FIRST)
    until(lambda: forgotten(cloud), "the first host to forget it", CHANGE_S)
    assert first.virsh("list", "--all", "--name") == ""
    check(both, server, SECOND, "after")


def say_down(cloud: Cloud, down: bool) -> None:
    """An administrator tells Nova that the first host is dead, or is not."""
    found = cloud.api.get(f"os-services?host={FIRST}&binary=nova-compute")["services"]
    cloud.api.call("PUT", f"os-services/{found[0]['id']}", {"forced_down": down})


def forgotten(cloud: Cloud) -> bool:
    """Whether Nova lets the first host be up again: not before it has ended what was evacuated."""
    try:
        say_down(cloud, False)
    except Refused as refused:
        assert "evacuation migration records remain" in str(refused), refused
        return False
    return True


def kill(host: Host, domain: str) -> None:
    """All of a host ends."""
    qemu = host.libvirtd.qemu_pid(domain)
    assert qemu is not None
    os.kill(qemu, signal.SIGKILL)
    host.kill_target()
    host.stop_gateway(signal.SIGKILL)
    host.libvirtd.kill(signal.SIGKILL)
