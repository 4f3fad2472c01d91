"""VMs of QEMU 7.2, which does not connect again, on a target that keeps their connections."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest

from tests.libvirt.test_restarted_target import (
    DEADLINE_S,
    DEPTH,
    SIZE_MIB,
    STOCK,
    VCPUS,
    doctor,
    inside,
    restarts,
)
from tests.support.agent import Agent
from tests.support.host import Host
from tests.support.verified_io import VerifiedIo
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "kept"
READ = "dd if=/dev/{} of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null && echo read"


@pytest.fixture(autouse=True, scope="module")
def holding(host: Host) -> Iterator[None]:
    """The target holds sessions, for the tests of this file."""
    host.stop_target()
    host.target_options = ["--hold-sessions"]
    host.start_target()
    yield
    host.stop_target()
    host.target_options = []
    host.start_target()


@pytest.fixture
def guest(host: Host) -> Iterator[Agent]:
    """A running guest with one LUN, and root ports for virtio-blk disks."""
    host.volumes.create("lvs0/kept", SIZE_MIB << 20, thin=True)
    disk = (
        "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/kept'/>"
        "<target dev='sda' bus='scsi'/></disk>"
    )
    ports = (
        "<controller type='pci' model='pcie-root'/>"
        + "<controller type='pci' model='pcie-root-port'/>" * 6
    )
    host.define(NAME, devices=ports + disk, vcpus=VCPUS, emulator=STOCK)
    host.virsh("start", NAME)
    assert "<reconnect" not in inside(host, NAME)
    guest = host.agent(NAME)
    guest.wait_for("[ -b /dev/sda ]", DEADLINE_S)
    yield guest
    guest.close()
    host.virsh("destroy", NAME, check=False)
    host.virsh("undefine", NAME)
    host.volumes.delete("lvs0/kept")


def kept(host: Host, count: int = 1) -> None:
    """Waits until so many sessions are kept, and all that there are."""

    def sessions() -> list[bool]:
        found = host.client.call("vhost_get_controllers")
        return [session["kept"] for each in found for session in each["sessions"]]

    until(lambda: sessions() == [True] * count, lambda: str(sessions()))


def again(host: Host) -> None:
    """Kills the target, and starts it."""
    host.kill_target()
    host.start_target()


@pytest.mark.nightly
def test_a_guest_goes_on_when_the_target_is_killed_or_stopped(host: Host, guest: Agent) -> None:
    seed = int(os.environ.get("VIRTLUN_SEED") or secrets.randbits(32))
    print(f"VIRTLUN_SEED={seed}")
    kept(host)
    assert [item["state"] for item in doctor(host)] == ["ok"]
    io = VerifiedIo(guest, "sda", seed=seed, threads=VCPUS, depth=DEPTH)
    restarts(host, io, guest, NAME)


@pytest.mark.nightly
def test_disks_come_grow_and_go_afterwards(host: Host, guest: Agent) -> None:
    """The guest hears of it as before: in its event queue."""
    host.volumes.create("lvs0/more", 16 << 20, thin=True)
    kept(host)
    again(host)
    host.virsh("attach-disk", NAME, "/dev/virtlun/lvs0/more", "sdb", "--live")
    guest.wait_for("[ -b /dev/sdb ]", DEADLINE_S)
    kept(host)
    again(host)
    host.virsh("blockresize", NAME, "sdb", f"{32 << 20}B")
    guest.wait_for(f"grep -x {(32 << 20) // 512} /sys/block/sdb/size", DEADLINE_S)
    again(host)
    host.virsh("detach-disk", NAME, "sdb", "--live")
    guest.wait_for("[ ! -e /sys/block/sdb ]", DEADLINE_S)
    host.volumes.delete("lvs0/more")


@pytest.mark.nightly
def test_a_virtio_blk_disk_that_came_live(host: Host, guest: Agent) -> None:
    """libvirt 9.0 has QEMU connect once for it."""
    host.volumes.create("lvs0/blk", 16 << 20, thin=True)
    attach = ("attach-disk", NAME, "/dev/virtlun/lvs0/blk", "vda", "--targetbus", "virtio")
    host.virsh(*attach, "--live")
    guest.wait_for(READ.format("vda"), DEADLINE_S)
    for end in (host.kill_target, host.stop_target):
        kept(host, 2)
        end()
        host.start_target()
        for name in ("vda", "sda"):
            guest.wait_for(READ.format(name), DEADLINE_S)
    host.virsh("detach-disk", NAME, "vda", "--live")
    guest.wait_for("[ ! -e /sys/block/vda ]", DEADLINE_S)
    until(lambda: len(host.client.call("vhost_get_controllers")) == 1, "its controller is gone")
    host.volumes.delete("lvs0/blk")


@pytest.mark.nightly
def test_a_vm_that_is_paused_meanwhile(host: Host, guest: Agent) -> None:
    kept(host)
    host.virsh("suspend", NAME)
    kept(host)
    again(host)
    host.virsh("resume", NAME)
    guest.wait_for(READ.format("sda"), DEADLINE_S)


@pytest.mark.nightly
def test_a_vm_that_ends_while_no_target_is_there(host: Host, guest: Agent) -> None:
    """It starts again on the next one, and nothing of the old one is in its way."""
    kept(host)
    guest.close()
    host.kill_target()
    host.virsh("destroy", NAME)
    host.start_target()
    host.virsh("start", NAME)
    agent = host.agent(NAME)
    agent.wait_for(READ.format("sda"), DEADLINE_S)
    agent.close()
