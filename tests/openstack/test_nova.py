"""What unmodified Nova does with snapshots of disks of ours, through the gateway.

Nova's libvirt driver is the release of PyPI, in an environment of its own; libvirtd, gateway,
target and guest are real. Only Cinder, Glance, Neutron and Nova's database are mocks; see
tests/openstack/nova_driver.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from tests.guest.agent_image import build_with_agent
from tests.openstack.nova_process import Nova
from tests.support.agent import Agent
from tests.support.domain import publish
from tests.support.guest_agent import CHANNEL, freeze_status, start_agent
from tests.support.host import Host, is_root

pytestmark = [pytest.mark.root, pytest.mark.vm, pytest.mark.nightly, pytest.mark.timeout(900)]

NAME = "instance-00000001"
MIB = 1 << 20


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A host whose instance runs, without a volume."""
    if not is_root():
        pytest.fail("tests/openstack need root: they run a libvirtd in a mount namespace")
    with Host(keep=True) as running:
        running.image = publish(build_with_agent(), running.scratch)
        running.define(NAME, devices=CHANNEL)
        running.virsh("start", NAME)
        yield running


@pytest.fixture(scope="module")
def guest(host: Host) -> Iterator[Agent]:
    agent = host.agent(NAME)
    yield agent
    agent.close()


@pytest.fixture(scope="module")
def nova(host: Host) -> Iterator[Nova]:
    running = Nova(host, host.virsh("domuuid", NAME))
    yield running
    running.close()


class Attached:
    """A volume that Nova has attached as sda."""

    def __init__(self, host: Host, kind: str, qos: dict[str, str] | None = None) -> None:
        self.host, self.kind, self.id = host, kind, str(uuid4())
        self.qos = qos
        self.name = f"v-{self.id}"
        host.volumes.create(f"lvs0/{self.name}", 16 * MIB, thin=True)
        self.connection = self.connected(self.id, self.name)

    def connected(self, volume: str, name: str) -> dict[str, Any]:
        """Returns what Cinder says of a volume's connection."""
        data: dict[str, Any] = {"device_path": f"/dev/virtlun/lvs0/{name}"}
        if self.kind == "rbd":
            data = {"name": f"virtlun/lvs0/{name}", "auth_enabled": False, "discard": True}
            data |= {"hosts": [], "ports": []}
        if self.qos is not None:
            data["qos_specs"] = self.qos
        return {"driver_volume_type": self.kind, "serial": volume, "data": data}

    @property
    def parent(self) -> str | None:
        """The snapshot below the volume."""
        return self.host.volumes.volume(f"lvs0/{self.name}").parent

    def check_unharmed(self, guest: Agent) -> None:
        """It is in both definitions of the instance, which runs, and the guest can write it."""
        for side in ((), ("--inactive",)):
            dev, source = self.host.virsh("domblklist", NAME, *side).split()
            assert dev == "sda" and source.endswith(f"virtlun/lvs0/{self.name}")
        assert self.host.virsh("domstate", NAME) == "running"
        assert "<serial>" + self.id in self.host.virsh("dumpxml", NAME, "--inactive")
        guest.run("dd if=/dev/urandom of=/dev/sda bs=1M seek=8 count=1 oflag=direct", 60)


@pytest.fixture(params=["rbd", "local"])
def disk(
    host: Host, guest: Agent, nova: Nova, request: pytest.FixtureRequest
) -> Iterator[Attached]:
    """Attached, and detached, by Nova."""
    volume = Attached(host, request.param)
    nova.does("attach", volume.connection, "sda", "scsi")
    guest.wait_for("[ -b /dev/sda ]")
    yield volume
    nova.does("detach", volume.connection, "sda")
    guest.wait_for("[ ! -e /sys/block/sda ]")
    assert host.virsh("domblklist", NAME) == host.virsh("domblklist", NAME, "--inactive") == ""


@pytest.mark.parametrize("kind", ["rbd", "local"])
def test_the_limits_of_a_volumes_type_are_the_disks(
    host: Host, guest: Agent, nova: Nova, kind: str
) -> None:
    """Front-end qos_specs; the XML by which Nova detaches the disk lacks them."""
    volume = Attached(host, kind, {"total_iops_sec": "500", "read_bytes_sec": "10485760"})

    def limits() -> dict[str, int]:
        found = host.client.call("virtlun_bdev_get_limits", name=f"lvs0/{volume.name}")
        return {name: value for name, value in found.items() if isinstance(value, int) and value}

    nova.does("attach", volume.connection, "sda", "scsi")
    guest.wait_for("[ -b /dev/sda ]")
    assert limits() == {"total_iops_sec": 500, "read_bytes_sec": 10 * MIB}
    for side in ((), ("--inactive",)):
        assert "<total_iops_sec>500</total_iops_sec>" in host.virsh("dumpxml", NAME, *side)
    volume.check_unharmed(guest)
    nova.does("detach", volume.connection, "sda")
    guest.wait_for("[ ! -e /sys/block/sda ]")
    assert limits() == {}


def test_a_snapshot_for_cinder_into_a_file_is_refused(
    guest: Agent, nova: Nova, disk: Attached
) -> None:
    answer = nova("volume_snapshot_create", disk.id, "snapshot.qcow2")
    if disk.kind == "rbd":  # Nova itself takes none of what has no path
        raised, words = "InternalError", "Found no disk to snapshot"
    else:
        raised, words = "libvirtError", "disk sda: a virtlun volume holds its snapshots itself"
    assert answer["raised"] == raised and words in answer["said"]
    assert answer["cinder"] == ["error"]
    assert disk.parent is None
    disk.check_unharmed(guest)


@pytest.mark.parametrize("into", [None, "base.qcow2"])
def test_a_files_merge_for_cinder_is_refused(
    guest: Agent, nova: Nova, disk: Attached, into: str | None
) -> None:
    answer = nova("volume_snapshot_delete", disk.id, "snapshot.qcow2", into)
    if disk.kind == "rbd":
        raised, words = "InternalError", "no match found for"
    elif into is None:
        raised, words = "libvirtError", "leave the base out"
    else:
        raised, words = "libvirtError", "snapshot.qcow2 is not in the chain of"
    assert answer["raised"] == raised and words in answer["said"]
    assert answer["cinder"] == ["error_deleting"]
    disk.check_unharmed(guest)


def test_a_merge_of_all_into_the_disk_is_a_pull(
    host: Host, guest: Agent, nova: Nova, disk: Attached
) -> None:
    guest.run("echo kept | dd of=/dev/sda conv=sync,fsync")
    host.volumes.snapshot([f"lvs0/{disk.name}"], "s")
    assert disk.parent == f"{disk.name}@s"
    assert nova.does("volume_snapshot_delete", disk.id, None, None) == ["deleting"]
    assert disk.parent is None
    assert guest.run("echo 3 >/proc/sys/vm/drop_caches; head -c 4 /dev/sda") == "kept"
    disk.check_unharmed(guest)


def test_a_swap_moves_the_running_disk_to_another_volume(
    host: Host, guest: Agent, nova: Nova, disk: Attached
) -> None:
    """As a retype or a migration of a volume in use: Nova copies, pivots and defines again."""
    guest.run("echo moved | dd of=/dev/sda conv=sync,fsync")
    old, other = disk.name, f"other-{disk.kind}"
    host.volumes.create(f"lvs0/{other}", 16 * MIB, thin=True)
    new = disk.connected(disk.id, other)
    nova.does("swap", disk.connection, new, "sda")
    disk.connection, disk.name = new, other  # the fixture detaches this one
    host.volumes.delete(f"lvs0/{old}")  # nobody uses it any more
    assert guest.run("echo 3 >/proc/sys/vm/drop_caches; head -c 5 /dev/sda") == "moved"
    disk.check_unharmed(guest)


def test_what_nova_does_while_there_are_snapshots(
    host: Host, guest: Agent, nova: Nova, disk: Attached
) -> None:
    """The volume grows and its snapshot is merged; the fixture detaches it with another one."""
    take = ("snapshot-create-as", NAME, "--disk-only", "--no-metadata", "--name")
    host.virsh(*take, "first")
    answer = nova("extend", disk.connection, 32 * MIB)
    if disk.kind == "rbd":
        assert answer["raised"] is None, answer
        guest.wait_for(f"[ $(cat /sys/block/sda/size) -eq {32 * MIB // 512} ]")
    else:  # Nova's driver of local volumes
        assert answer["raised"] == "ExtendVolumeNotSupported"
    host.virsh("blockcommit", NAME, "sda", "--active", "--pivot")
    assert disk.parent is None
    host.virsh(*take, "second")
    disk.check_unharmed(guest)


@pytest.mark.parametrize("disk", ["rbd"], indirect=True)
def test_file_systems_are_frozen_for_cinders_snapshots(
    host: Host, guest: Agent, nova: Nova, disk: Attached
) -> None:
    """Without an agent it is what Nova goes on after, and with one it is done."""
    answer = nova("quiesce")
    assert answer["raised"] == "InstanceQuiesceFailed"
    assert "QEMU guest agent is not connected" in answer["said"]
    guest.run("mkfs.ext4 -q /dev/sda && mount /dev/sda /mnt && echo kept >/mnt/file", 120)
    start_agent(host, NAME, guest)
    nova.does("quiesce")
    assert freeze_status(host, NAME) == "frozen"
    host.volumes.snapshot([f"lvs0/{disk.name}"], "cinder")
    nova.does("unquiesce")
    assert freeze_status(host, NAME) == "thawed"
    guest.run("echo on >/mnt/file && sync && umount /mnt")
    disk.check_unharmed(guest)


@pytest.mark.parametrize("disk", ["rbd"], indirect=True)
def test_an_image_of_an_instance_that_boots_from_a_volume(
    host: Host, guest: Agent, nova: Nova, disk: Attached
) -> None:
    """By Nova's API: file systems are frozen around Cinder's snapshot, and the image names it."""
    start_agent(host, NAME, guest)
    guest.run("mkfs.ext4 -q /dev/sda && mount /dev/sda /mnt && echo kept >/mnt/file", 120)
    command = host.libvirtd.command(
        *(host.program("virtlun"), "--config", str(host.config)),
        *("volume", "snapshot", f"lvs0/{disk.name}", "cinder"),
    )
    answer = nova("image_of_volumes", disk.id, command)
    assert answer["raised"] is None, answer
    made = answer["made"]
    assert made["bdm_v2"] is True
    (root,) = made["block_device_mapping"]
    assert root["snapshot_id"] == f"snapshot-of-{disk.id}" and root["source_type"] == "snapshot"
    assert freeze_status(host, NAME) == "thawed"
    guest.run("echo on >/mnt/file && sync && umount /mnt")
    # What Cinder makes a volume of for an instance of that image.
    host.volumes.clone(f"lvs0/{disk.name}@cinder", f"{disk.name}-again")
    again = disk.connected(str(uuid4()), f"{disk.name}-again")
    nova.does("attach", again, "sdb", "scsi")
    guest.wait_for("[ -b /dev/sdb ]")
    assert "needs_recovery" not in guest.run("dumpe2fs -h /dev/sdb")
    assert guest.run("mount /dev/sdb /mnt && cat /mnt/file && umount /mnt", 120) == "kept\n"
    nova.does("detach", again, "sdb")
    guest.wait_for("[ ! -e /sys/block/sdb ]")
    disk.check_unharmed(guest)


def test_an_image_of_a_volume_itself_is_refused(
    host: Host, guest: Agent, nova: Nova, disk: Attached
) -> None:
    """Nova's API never asks for it; it is what its driver does with an instance's first disk."""
    guest.run("echo kept | dd of=/dev/sda conv=sync,fsync")
    answer = nova("snapshot")
    assert answer["raised"], answer
    if host.virsh("domstate", NAME) == "shut off":  # which Nova left there, with its memory saved
        assert disk.kind == "local"
        host.virsh("start", NAME)
    assert guest.run("echo 3 >/proc/sys/vm/drop_caches; head -c 4 /dev/sda", 120) == "kept"
    assert disk.parent is None
    disk.check_unharmed(guest)
