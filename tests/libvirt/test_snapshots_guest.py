"""Snapshots of a domain with a real guest: what it had is back, on each disk of one instant."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.support.agent import Agent
from tests.support.host import Host

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "kept"
MIB = 1 << 20
OURS = (
    "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/kept'/>"
    "<target dev='sda' bus='scsi'/></disk>"
)
STAMPS = (
    "i=0; while :; do i=$((i+1)); for d in {disks}; do"
    " printf %010d $i | dd of=/dev/$d bs=512 conv=sync,fsync 2>/dev/null; done;"
    " echo $i >/tmp/next; mv /tmp/next /tmp/stamped; done"
)
"""Writes a number that grows to the beginning of these disks in turn, and flushes each."""


def one_more(agent: Agent) -> None:
    """Waits until the next number stands on all of the disks."""
    before = int(agent.run("cat /tmp/stamped || echo 0", check=False).split()[-1])
    agent.wait_for(f'[ "$(cat /tmp/stamped)" -gt {before} ]', 90.0)


@pytest.fixture(scope="module")
def domain(host: Host) -> Iterator[Host]:
    """A running guest with the volume sda, a file system and a file on it."""
    host.scratch.chmod(0o777)  # QEMU's user makes the files of snapshots
    host.volumes.create("lvs0/kept", 64 * MIB, thin=True)
    host.define(NAME, devices=OURS)
    host.virsh("start", NAME)
    agent = host.agent(NAME)
    agent.wait_for("[ -b /dev/sda ]")
    agent.run("mkfs.ext4 -q /dev/sda && mount /dev/sda /mnt", 120)
    agent.run("dd if=/dev/urandom of=/mnt/file bs=1M count=8; sync", 120)
    agent.close()
    yield host
    host.virsh("destroy", NAME, check=False)


@pytest.mark.nightly
def test_files_are_back(domain: Host) -> None:
    agent = domain.agent(NAME)
    sums = agent.run("md5sum /mnt/file")
    domain.virsh("snapshot-create-as", NAME, "files", "--disk-only")
    agent.run("dd if=/dev/zero of=/mnt/file bs=1M count=8; rm -rf /mnt/lost+found; sync", 120)
    assert agent.run("md5sum /mnt/file") != sums
    agent.close()
    domain.virsh("snapshot-revert", NAME, "files", "--running")
    agent = domain.agent(NAME)
    agent.wait_for("[ -b /dev/sda ]")
    agent.run("mount /dev/sda /mnt", 120)
    assert agent.run("md5sum /mnt/file") == sums
    assert "lost+found" in agent.run("ls /mnt")
    assert "I/O error" not in agent.run("dmesg")
    agent.close()


@pytest.mark.nightly
def test_a_guests_memory_goes_on_with_its_disk(domain: Host) -> None:
    agent = domain.agent(NAME)
    agent.run("grep -q /dev/sda /proc/mounts || mount /dev/sda /mnt", 120)
    # A file that is written over has nothing in it for a moment; one that is moved there never has.
    agent.run(
        "(i=0; while :; do i=$((i+1)); echo $i >/tmp/next; mv /tmp/next /tmp/n; echo $i >/mnt/n; "
        "done) >/dev/null &"
    )
    agent.wait_for("[ $(cat /tmp/n) -gt 20 ]", 60)
    before = int(agent.run("cat /tmp/n"))
    domain.virsh("snapshot-create-as", NAME, "memory")
    assert domain.virsh("domstate", NAME) == "running"
    agent.wait_for(f"[ $(cat /tmp/n) -gt {before + 500} ]", 120)
    agent.run("rm -rf /mnt/*; sync", 120)
    after = int(agent.run("cat /tmp/n"))
    agent.close()
    domain.virsh("snapshot-revert", NAME, "memory")
    assert domain.virsh("domstate", NAME) == "running"
    agent = domain.agent(NAME)
    now = int(agent.run("cat /tmp/n"))
    assert before <= now
    assert "file" in agent.run("ls /mnt"), "the disk is of the memory's instant"
    agent.wait_for(f"[ $(cat /tmp/n) -gt {now} ]", 60)
    assert int(agent.run("cat /proc/uptime").split(".")[0]) < 600
    agent.run("sync; echo 3 >/proc/sys/vm/drop_caches; md5sum /mnt/file; cat /mnt/n", 60)
    assert "EXT4-fs error" not in agent.run("dmesg"), after
    agent.close()
    domain.virsh("snapshot-delete", NAME, "memory")


@pytest.mark.nightly
def test_disks_of_both_kinds_are_of_one_instant(domain: Host) -> None:
    domain.virsh("destroy", NAME)
    base = domain.scratch / "mixed.img"
    base.write_bytes(bytes(MIB))
    base.chmod(0o666)
    domain.volumes.create("lvs0/mixed", 8 * MIB, thin=True)
    theirs = (
        f"<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{base}'/>"
        "<target dev='vda' bus='virtio'/></disk>"
    )
    domain.define("mixed", devices=theirs + OURS.replace("kept", "mixed"))
    domain.virsh("start", "mixed")
    agent = domain.agent("mixed")
    agent.wait_for("[ -b /dev/sda ] && [ -b /dev/vda ]")
    agent.run(f"({STAMPS.format(disks='vda sda')}) >/dev/null 2>&1 &")
    try:
        for name in ("one", "two"):
            one_more(agent)
            domain.virsh("snapshot-create-as", "mixed", name, "--disk-only")
            file = base if name == "one" else domain.scratch / "mixed.one"
            ours = stamp_of_volume(domain, f"lvs0/mixed@{name}")
            pair = (stamp_of_file(domain, str(file)), ours)
            assert pair[0] > 0 and pair[0] - pair[1] in (0, 1), pair
        agent.run("true")
    finally:
        agent.close()
        domain.virsh("destroy", "mixed")


@pytest.mark.nightly
def test_disks_of_two_lvstores_are_of_one_instant(host: Host) -> None:
    host.volumes.create_lvstore("lvs1", host.scratch / "lvs1.img", 256 * MIB)
    stores = ("lvs0", "lvs1")
    for store in stores:
        host.volumes.create(f"{store}/stores", 8 * MIB, thin=True)
    second = OURS.replace("lvs0/kept", "lvs1/kept").replace("sda", "sdb")
    host.define("stores", devices=(OURS + second).replace("kept", "stores"))
    host.virsh("start", "stores")
    agent = host.agent("stores")
    # Linux looks at several disks at a time: which is its sda is not said.
    found = "basename /sys/class/scsi_device/*:0:{}:0/device/block/sd?"
    disks = " ".join(agent.wait_for(found.format(target)).strip() for target in (0, 1))
    agent.run(f"({STAMPS.format(disks=disks)}) >/dev/null 2>&1 &")
    try:
        for name in ("one", "two", "three"):
            one_more(agent)
            host.virsh("snapshot-create-as", "stores", name, "--disk-only")
            pair = [stamp_of_volume(host, f"{store}/stores@{name}") for store in stores]
            assert pair[0] > 0 and pair[0] - pair[1] in (0, 1), (disks, pair)
            assert host.virsh("domstate", "stores") == "running"
        assert "I/O error" not in agent.run("dmesg")
    finally:
        agent.close()
        host.virsh("destroy", "stores")


def stamp_of_file(host: Host, path: str) -> int:
    """Returns what stands at the beginning of a disk's file."""
    out = host.scratch / "stamp"
    out.unlink(missing_ok=True)
    subprocess.run(
        ["qemu-img", "convert", "-U", "-O", "raw", path, str(out)], check=True, timeout=60
    )
    return int(out.read_bytes()[:10])


def stamp_of_volume(host: Host, volume: str) -> int:
    """Returns what stands at the beginning of a volume."""
    out = host.scratch / "volume.raw"
    out.unlink(missing_ok=True)
    words = ["--config", str(host.config), "volume", "export", volume, str(out), "--format", "raw"]
    # Exports are mounted where the gateway sees them.
    command = host.libvirtd.command(host.program("virtlun"), *words)
    subprocess.run(command, check=True, timeout=120)
    return int(out.read_bytes()[:10])
