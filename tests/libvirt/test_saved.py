"""Guests saved to a file and back, with disks of ours; what the image says is the client's."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tests.support.agent import Agent
from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "saved"
MIB = 1 << 20
DISK = (
    "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/saved'/>"
    "<target dev='sda' bus='scsi'/><serial>S4V3D</serial></disk>"
)


@pytest.fixture(scope="module", autouse=True)
def guest(host: Host) -> None:
    """A running guest that has written to its disk."""
    host.volumes.create("lvs0/saved", 32 * MIB)
    host.volumes.create("lvs0/other", 32 * MIB)
    host.define(NAME, devices=DISK)
    host.virsh("start", NAME)
    agent = host.agent(NAME)
    agent.wait_for("[ -b /dev/sda ]")
    agent.run("mkfs.ext4 -q /dev/sda && mount /dev/sda /mnt", 120)
    agent.run("dd if=/dev/urandom of=/mnt/file bs=1M count=8 conv=fsync", 120)
    agent.close()


def sums_of(host: Host) -> str:
    """Returns the checksum of the guest's file."""
    agent = Agent(host.scratch / f"{NAME}-agent")
    agent.wait_ready()
    sums = agent.run("md5sum /mnt/file")
    agent.close()
    return sums


def controllers(host: Host) -> list[str]:
    return [item["ctrlr"] for item in host.client.call("vhost_get_controllers")]


def ours(xml: str) -> list[str]:
    """Returns the target devs in XML that a client got; it must show nothing of what is ours."""
    assert not re.search("vhostuser|vhost-user|virtlun.dev|ua-virtlun", xml), xml
    disks = ElementTree.fromstring(xml).findall(".//devices/disk")
    return [target.get("dev", "") for disk in disks for target in disk.findall("target")]


def check_again(host: Host, sums: str) -> Agent:
    """Checks that the guest goes on with the disk that it had mounted; returns its agent."""
    assert host.virsh("domstate", NAME) == "running"
    agent = Agent(host.scratch / f"{NAME}-agent")
    agent.wait_ready()
    agent.run("echo 3 > /proc/sys/vm/drop_caches")
    assert agent.run("md5sum /mnt/file") == sums
    agent.run("dd if=/dev/zero of=/mnt/more bs=1M count=4 conv=fsync", 120)
    assert "I/O error" not in agent.run("dmesg")
    return agent


@pytest.mark.nightly
def test_managed_save_and_start_go_on_where_the_guest_was(host: Host) -> None:
    sums = sums_of(host)
    host.virsh("managedsave", NAME)
    assert host.virsh("domstate", NAME) == "shut off"
    until(lambda: controllers(host) == [])
    shown = host.virsh("managedsave-dumpxml", NAME)
    assert ours(shown) == ["sda"] and "S4V3D" in shown
    path = host.scratch / "managed.xml"
    path.write_text(
        shown.replace("<on_reboot>restart</on_reboot>", "<on_reboot>destroy</on_reboot>")
    )
    host.virsh("managedsave-define", NAME, str(path))
    assert "<on_reboot>destroy" in host.virsh("managedsave-dumpxml", NAME)
    host.virsh("start", NAME)
    check_again(host, sums).close()
    assert "<on_reboot>destroy" in host.virsh("dumpxml", NAME)


@pytest.mark.nightly
def test_a_save_image_is_the_clients_to_read_edit_and_define(host: Host) -> None:
    image = host.scratch / "image.save"
    sums = sums_of(host)
    host.virsh("save", NAME, str(image))
    shown = host.virsh("save-image-dumpxml", str(image))
    assert ours(shown) == ["sda"]
    path = host.scratch / "image.xml"
    path.write_text(shown)
    host.virsh("save-image-define", str(image), str(path))
    assert host.virsh("save-image-dumpxml", str(image)) == shown
    host.virsh("define", str(path))
    assert ours(host.virsh("dumpxml", "--inactive", NAME)) == ["sda"]
    host.virsh("restore", str(image), "--xml", str(path))
    check_again(host, sums).close()


@pytest.mark.nightly
def test_without_the_hook_the_gateway_makes_and_removes_the_controller(host: Host) -> None:
    (host.libvirtd.hooks / "qemu.d/virtlun").unlink()
    host.libvirtd.restart()
    sums = sums_of(host)
    image = host.scratch / "second.save"
    host.virsh("save", NAME, str(image))
    until(lambda: controllers(host) == [])
    with pytest.raises(VirshError, match=r"[Ff]ailed to connect|No such file"):
        host.virsh_direct("restore", str(image))
    host.virsh("restore", str(image))
    check_again(host, sums).close()


@pytest.mark.nightly
def test_a_saved_guest_whose_volume_another_one_took_does_not_come_back(host: Host) -> None:
    image = host.scratch / "third.save"
    host.virsh("save", NAME, str(image))
    path = host.scratch / "thief.xml"
    path.write_text(
        "<domain type='qemu'><name>thief</name><memory unit='MiB'>64</memory>"
        "<os><type arch='x86_64' machine='q35'>hvm</type></os>"
        f"<devices>{DISK}</devices></domain>"
    )
    host.virsh("create", str(path))
    try:
        with pytest.raises(VirshError, match="in use by domain thief"):
            host.virsh("restore", str(image))
        assert host.virsh("domstate", NAME) == "shut off"
    finally:
        host.virsh("destroy", "thief")
    host.virsh("restore", str(image))
    assert host.virsh("domstate", NAME) == "running"


@pytest.mark.nightly
def test_save_with_other_xml_is_translated(host: Host) -> None:
    image = host.scratch / "fourth.save"
    path = host.scratch / "fourth.xml"
    xml = host.virsh("dumpxml", "--migratable", NAME)
    path.write_text(xml.replace("<on_crash>destroy", "<on_crash>restart"))
    host.virsh("save", NAME, str(image), "--xml", str(path))
    assert "<on_crash>restart" in host.virsh("save-image-dumpxml", str(image))
    host.virsh("restore", str(image))
    assert host.virsh("domstate", NAME) == "running"
    host.virsh("destroy", NAME)
    until(lambda: controllers(host) == [])


@pytest.mark.nightly
def test_a_saved_guest_that_lost_its_volume_does_not_come_back(host: Host) -> None:
    host.virsh("start", NAME)
    host.virsh("managedsave", NAME)
    until(lambda: controllers(host) == [])
    host.volumes.delete("lvs0/saved")
    with pytest.raises(VirshError, match="lost"):
        host.virsh("start", NAME)
    assert host.virsh("domstate", NAME) == "shut off"
    host.virsh("managedsave-remove", NAME)
