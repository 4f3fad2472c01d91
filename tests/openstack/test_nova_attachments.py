"""A whole Nova attaches volumes in numbers, and where something is away: as test_nova_compute.py.

Each is tried with a server whose disks are LUNs, and with one whose disks are virtio-blk.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pydataplane import supervise
from pydataplane.domain.observed import observe
from tests.openstack.cinder_process import HOST
from tests.openstack.nova_checks import check_definitions, read, write
from tests.openstack.nova_cloud import (
    CHANGE_S,
    Cloud,
    Server,
    disk_of,
    each_bus,
    with_lvstore,
)
from tests.support.agent import Agent
from tests.support.host import Host, is_root
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm, pytest.mark.nightly, pytest.mark.timeout(900)]

BOTH = pytest.mark.parametrize("server", ["scsi", "virtio"], indirect=True)
CYCLES = 50
DETACH_S = 10.0
"""Half of what Nova waits for the event of a detach, `device_detach_timeout`, before it looks."""
KEPT = 5
"""Files that a process may have opened meanwhile and keeps, such as a connection of a poller."""
OTHERS = {"rabbitmq", "postgresql"}
"""What servers have written here meanwhile that are not asked."""


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    if not is_root():
        pytest.fail("tests/openstack need root: they run a libvirtd in a mount namespace")
    with Host(keep=True) as host:
        running = Cloud({HOST: host}, with_lvstore(host))
        yield running
        running.close()


@pytest.fixture(scope="module")
def servers(cloud: Cloud) -> Iterator[dict[str, Server]]:
    with each_bus(cloud) as made:
        yield made


@pytest.fixture
def server(servers: dict[str, Server], request: pytest.FixtureRequest) -> Server:
    """The one of a bus."""
    return servers[request.param]


def wait_gone(guest: Agent, disk: str) -> None:
    """Waits until a guest no longer has a disk."""
    guest.wait_for(f"[ ! -e /sys/block/{disk.rpartition('/')[2]} ]")


@BOTH
def test_a_volume_is_attached_while_the_guest_is_paused(cloud: Cloud, server: Server) -> None:
    """The guest has it once it goes on."""
    volume = cloud.cinder.volume()
    server.act("pause", "PAUSED")
    server.attach(volume)
    check_definitions(server, volume)
    server.act("unpause", "ACTIVE")
    guest = server.guest()
    write(guest, volume, "after the pause")
    assert read(guest, volume) == "after the pause"
    disk = disk_of(guest, volume)
    server.detach(volume)
    wait_gone(guest, disk)
    check_definitions(server)
    guest.close()
    cloud.cinder.delete(f"volumes/{volume}")


@pytest.mark.parametrize("server", ["scsi"], indirect=True)
def test_a_lun_is_detached_while_the_guest_is_paused(cloud: Cloud, server: Server) -> None:
    """It is no device that the guest has to give back, as a virtio-blk disk is."""
    volume = cloud.cinder.volume()
    server.attach(volume)
    guest = server.guest()
    disk = disk_of(guest, volume)
    server.act("pause", "PAUSED")
    server.detach(volume)
    check_definitions(server)
    server.act("unpause", "ACTIVE")
    wait_gone(guest, disk)
    guest.close()
    cloud.cinder.delete(f"volumes/{volume}")


def test_four_volumes_at_a_time(cloud: Cloud, servers: dict[str, Server]) -> None:
    """Of each of two servers: Nova attaches those of one in turn, and those of two at once."""
    asked = {server: [cloud.cinder.volume() for _ in range(4)] for server in servers.values()}

    def all_at_once(change: Callable[[Server, str], None]) -> None:
        with ThreadPoolExecutor(8) as threads:
            begun = [
                threads.submit(change, server, volume)
                for turn in range(4)
                for server, volumes in asked.items()
                for volume in volumes[turn : turn + 1]
            ]
        for each in begun:
            each.result()

    all_at_once(Server.attach)
    for server, volumes in asked.items():
        check_definitions(server, *volumes)
        guest = server.guest()
        for volume in volumes:
            write(guest, volume, f"volume {volume}")
        for volume in volumes:
            assert read(guest, volume) == f"volume {volume}"
        guest.close()
    all_at_once(Server.detach)
    for server, volumes in asked.items():
        check_definitions(server)
        guest = server.guest()
        guest.wait_for("[ $(ls -d /sys/block/[sv]d* | wc -l) = 1 ]")
        guest.close()
        for volume in volumes:
            cloud.cinder.delete(f"volumes/{volume}")


def compute(cloud: Cloud) -> dict[str, Any]:
    """Returns what Nova has of the host's nova-compute."""
    (found,) = cloud.api.get(f"os-services?host={HOST}&binary=nova-compute")["services"]
    return dict(found)


@BOTH
def test_the_gateway_is_killed_and_started_again(cloud: Cloud, server: Server) -> None:
    """Meanwhile Nova has no server put on the host; then it has libvirt's events as before."""
    volume, other = (cloud.cinder.volume() for _ in range(2))
    server.attach(volume)
    qemu = cloud.host.libvirtd.qemu_pid(server.domain)
    guest = server.guest()
    cloud.host.stop_gateway(signal.SIGKILL)
    until(lambda: compute(cloud)["status"] == "disabled", "the host to be disabled", CHANGE_S)
    assert "Connection to libvirt lost" in compute(cloud)["disabled_reason"]
    write(guest, volume, "without a gateway")
    server.ask_attach(other)
    until(lambda: server.last_action() == ("attach_volume", "Error"), "Nova to fail", CHANGE_S)
    cloud.cinder.wait(f"volumes/{other}")
    cloud.host.start_gateway()
    until(lambda: compute(cloud)["status"] == "enabled", "the host to be enabled", CHANGE_S)
    check_definitions(server, volume)
    begun = time.monotonic()
    server.detach(volume)
    assert time.monotonic() - begun < DETACH_S
    check_definitions(server)
    for each in (volume, other):
        server.attach(each)
    check_definitions(server, volume, other)
    assert read(guest, volume) == "without a gateway"
    write(guest, other, "with one")
    guest.close()
    assert cloud.host.libvirtd.qemu_pid(server.domain) == qemu
    for each in (volume, other):
        server.detach(each)
        cloud.cinder.delete(f"volumes/{each}")


@BOTH
def test_many_attachments_leave_nothing(cloud: Cloud, server: Server) -> None:
    volume = cloud.cinder.volume()
    guest = server.guest()

    def cycle() -> None:
        server.attach(volume)
        disk = disk_of(guest, volume)
        server.detach(volume)
        wait_gone(guest, disk)

    cycle()  # opens what is kept
    before, opened = left(cloud, server), open_files(cloud, server)
    for _ in range(CYCLES):
        cycle()
    until(lambda: left(cloud, server) == before, lambda: (before, left(cloud, server)))
    until(
        lambda: all(now <= opened[of] + KEPT for of, now in open_files(cloud, server).items()),
        lambda: (opened, open_files(cloud, server)),
    )
    guest.close()
    cloud.cinder.delete(f"volumes/{volume}")


def left(cloud: Cloud, server: Server) -> dict[str, object]:
    """Returns what there is of a host's volumes, and of a server's."""
    client = cloud.host.client
    return {
        "volumes": cloud.lvols(),
        "bdevs": sorted(each["name"] for each in client.call("bdev_get_bdevs")),
        "LUNs": observe(client).controllers,
        "Cinder's attachments": sorted(
            (each["volume_id"], each["instance"])
            for each in cloud.cinder.get("attachments")["attachments"]
        ),
        "Nova's volumes": server.volumes(),
        "definitions": [
            cloud.host.virsh_direct("dumpxml", server.domain, *words)
            for words in ((), ("--inactive",))
        ],
        "files": files(cloud.host.scratch),
    }


def files(folder: Path) -> set[Path]:
    """Returns all that is in a host's folder."""
    return {path for path in folder.rglob("*") if not OTHERS & set(path.relative_to(folder).parts)}


def open_files(cloud: Cloud, server: Server) -> dict[str, int]:
    """Returns how many files each process has open that a disk passes."""
    processes = {
        "gateway": cloud.host.gateway_pid,
        "libvirtd": cloud.host.libvirtd.pid,
        "target": supervise.status(cloud.host.paths.rpc_socket)["pid"],
        "QEMU": cloud.host.libvirtd.qemu_pid(server.domain),
    }
    return {
        name: len(list(Path(f"/proc/{process}/fd").iterdir()))
        for name, process in processes.items()
    }
