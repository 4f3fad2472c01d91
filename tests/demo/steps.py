"""The steps of the main job, in order. Each does one thing, checks it, and returns what to show.

A step that does not come out as it must raises AssertionError, VirshError or GuestError.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tests.support.agent import Agent
from tests.support.host import Host

GUEST = "demo"
SECOND = "demo2"
VOLUME = "lvs0/data"
CLONE = "lvs0/copy"
SOURCE = f"/dev/virtlun/{VOLUME}"
DEV = "sdb"
MIB = 1 << 20

Step = Callable[["Story"], str]


@dataclass
class Story:
    """What the steps share."""

    host: Host
    accel: str = "tcg"
    agent: Agent | None = None
    checksum: str = ""
    disk: str = ""
    """The guest's own name of the disk, such as sda."""
    timings_ms: dict[str, float] = field(default_factory=dict)

    def guest(self, command: str, deadline_s: float = 60.0) -> str:
        """Runs a command in the guest."""
        assert self.agent is not None, "the guest has not booted yet"
        return self.agent.run(command, deadline_s).strip()

    def virsh(self, *words: str) -> str:
        """Runs plain virsh against the gateway."""
        return self.host.virsh(*words)

    def timed(self, name: str, begun: float) -> float:
        """Notes and returns the milliseconds since `begun`."""
        self.timings_ms[name] = (time.monotonic() - begun) * 1000
        return self.timings_ms[name]


def virtlun(story: Story, *words: str) -> str:
    """Runs the `virtlun` command against the story's target; returns what it printed."""
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "virtlun"),
            *("--socket", str(story.host.paths.rpc_socket), *words),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def create_volume(story: Story) -> str:
    """virtlun volume create lvs0/data 64M"""
    shown = virtlun(story, "volume", "create", VOLUME, "64M")
    assert story.host.volumes.volume(VOLUME).size == 64 * MIB
    return shown


def define_domain(story: Story) -> str:
    """virsh define demo.xml   (an ordinary domain: nothing of ours in its XML)"""
    story.host.define(GUEST, accel=story.accel)
    inside = story.host.virsh_direct("dumpxml", "--inactive", GUEST)
    assert "vhost" not in inside, "no disk of ours, no controller in the definition"
    return "the definition is as it was written: it depends on nothing of ours"


def start_domain(story: Story) -> str:
    """virsh start demo"""
    begun = time.monotonic()
    story.virsh("start", GUEST)
    started = story.timed("start", begun)
    inside = story.host.virsh_direct("dumpxml", GUEST)
    assert "vhost-user-scsi-pci" in inside, "libvirtd's own XML must have the controller"
    assert "vhost" not in story.virsh("dumpxml", GUEST), "clients must not see the controller"
    story.agent = story.host.agent(GUEST)
    booted = story.timed("boot", begun)
    assert story.guest("ls /sys/block").split() == []
    return (
        f"virsh returned after {started:.0f} ms, the guest was up after {booted:.0f} ms, "
        "without any disk; the gateway gave it shared memory and one vhost-user-scsi controller"
    )


def attach_disk(story: Story) -> str:
    """virsh attach-disk demo /dev/virtlun/lvs0/data sdb --live --config"""
    begun = time.monotonic()
    story.virsh("attach-disk", GUEST, SOURCE, DEV, "--live", "--config")
    returned = story.timed("attach-disk", begun)
    story.disk = _wait_for_disk(story)
    seen = story.timed("attach-disk to guest", begun)
    size = int(story.guest(f"cat /sys/block/{story.disk}/size")) * 512
    assert size == 64 * MIB, f"the guest sees {size} bytes"
    return (
        f"virsh returned after {returned:.0f} ms; the guest had /dev/{story.disk} after "
        f"{seen:.0f} ms\n{story.guest('lsblk -o NAME,SIZE,VENDOR,MODEL,SERIAL')}\n"
        + story.guest("dmesg | grep -E 'scsi|sd ' | tail -n 5")
    )


def write_data(story: Story) -> str:
    """in the guest: mkfs.ext4, mount, write a file"""
    story.guest(f"mkfs.ext4 -q /dev/{story.disk} && mount /dev/{story.disk} /mnt", 120)
    story.guest("dd if=/dev/urandom of=/mnt/file bs=1M count=20 conv=fsync", 120)
    story.checksum = story.guest("md5sum /mnt/file").split()[0]
    return story.guest("df -h /mnt; md5sum /mnt/file")


def resize(story: Story) -> str:
    """virsh blockresize demo sdb 128M   (the guest is not told to rescan)"""
    begun = time.monotonic()
    story.virsh("blockresize", GUEST, DEV, "128M")
    returned = story.timed("blockresize", begun)
    _wait(
        story,
        f'[ "$(cat /sys/block/{story.disk}/size)" = {128 * MIB // 512} ]',
    )
    seen = story.timed("blockresize to guest", begun)
    story.guest(f"resize2fs /dev/{story.disk}", 120)
    assert story.guest("md5sum /mnt/file").split()[0] == story.checksum
    return (
        f"virsh returned after {returned:.0f} ms; the guest had the size after {seen:.0f} ms\n"
        + story.guest("dmesg | grep -i capacity | tail -n 2; df -h /mnt")
    )


def block_info(story: Story) -> str:
    """virsh domblkinfo, domblkstat, domblklist --details"""
    info = story.virsh("domblkinfo", GUEST, DEV)
    assert re.search(rf"Capacity:\s+{128 * MIB}\b", info), info
    stat = story.virsh("domblkstat", GUEST, DEV)
    written = re.search(r"wr_bytes (\d+)", stat)
    assert written and int(written[1]) >= 20 * MIB, stat
    for side in ((), ("--inactive",)):
        listed = story.virsh("domblklist", GUEST, "--details", *side)
        assert len(listed.splitlines()) == 1, f"the client has one disk:\n{listed}"
        assert listed.split() == ["file", "disk", DEV, SOURCE], listed
    return f"{info}\n{stat}\n{listed}"


def dump_xml(story: Story) -> str:
    """virsh dumpxml demo   (live and persistent)"""
    shown = ""
    for words in (("dumpxml", GUEST), ("dumpxml", "--inactive", GUEST)):
        xml = story.virsh(*words)
        disks = ElementTree.fromstring(xml).findall("devices/disk")
        assert len(disks) == 1, xml
        source, target = disks[0].find("source"), disks[0].find("target")
        assert source is not None and SOURCE in source.attrib.values(), xml
        assert target is not None and target.attrib == {"dev": DEV, "bus": "scsi"}, xml
        assert disks[0].get("device") == "disk", xml
        shown = ElementTree.tostring(disks[0], encoding="unicode").strip()
    return shown


def detach_disk(story: Story) -> str:
    """virsh detach-disk demo sdb --live --config"""
    story.guest("umount /mnt")
    begun = time.monotonic()
    story.virsh("detach-disk", GUEST, DEV, "--live", "--config")
    returned = story.timed("detach-disk", begun)
    _wait(story, f"[ ! -e /sys/block/{story.disk} ]")
    seen = story.timed("detach-disk to guest", begun)
    assert story.virsh("domblklist", GUEST) == ""
    assert story.virsh("domblklist", "--inactive", GUEST) == ""
    return f"virsh returned after {returned:.0f} ms; the disk was gone after {seen:.0f} ms"


def attach_again(story: Story) -> str:
    """virsh attach-disk demo /dev/virtlun/lvs0/data sdb --live --config   (the data is there)"""
    story.virsh("attach-disk", GUEST, SOURCE, DEV, "--live", "--config")
    return _found_again(story)


def snapshot(story: Story) -> str:
    """virtlun volume snapshot lvs0/data before   (while the guest writes)"""
    story.guest(f"mount /dev/{story.disk} /mnt && sync")
    story.guest("dd if=/dev/zero of=/mnt/more bs=4k count=2000 oflag=dsync 2>/dev/null &")
    begun = time.monotonic()
    shown = virtlun(story, "volume", "snapshot", VOLUME, "before")
    took = story.timed("snapshot", begun)
    story.guest("while pidof dd >/dev/null; do sleep 0.1; done; umount /mnt")
    return f"{shown}\nit took {took:.0f} ms, of which most is the command's start"


def break_file_system(story: Story) -> str:
    """in the guest: dd if=/dev/zero over the file system"""
    story.guest(f"dd if=/dev/zero of=/dev/{story.disk} bs=1M count=100 conv=fsync", 120)
    said = story.guest(f"mount /dev/{story.disk} /mnt 2>&1; true")
    assert said and not story.guest("ls /mnt"), said
    return said


def roll_back(story: Story) -> str:
    """virsh detach-disk, virtlun volume rollback lvs0/data before, virsh attach-disk"""
    story.virsh("detach-disk", GUEST, DEV, "--live", "--config")
    _wait(story, f"[ ! -e /sys/block/{story.disk} ]")
    begun = time.monotonic()
    shown = virtlun(story, "volume", "rollback", VOLUME, "before", "--yes")
    story.timed("rollback", begun)
    story.virsh("attach-disk", GUEST, SOURCE, DEV, "--live", "--config")
    return f"{shown}\n{_found_again(story)}"


def clone(story: Story) -> str:
    """virtlun volume clone lvs0/data@before copy, and a second VM with it"""
    shown = virtlun(story, "volume", "clone", f"{VOLUME}@before", CLONE.split("/")[1])
    story.host.define(SECOND, accel=story.accel)
    story.virsh("attach-disk", SECOND, f"/dev/virtlun/{CLONE}", DEV, "--config")
    story.virsh("start", SECOND)
    agent = story.host.agent(SECOND)
    try:
        disk = agent.wait_for("ls /sys/block | grep '^sd'").strip()
        found = agent.run(f"mount /dev/{disk} /mnt && md5sum /mnt/file && touch /mnt/own").strip()
        assert found.split()[0] == story.checksum
        agent.run("umount /mnt")
    finally:
        agent.close()
    story.virsh("destroy", SECOND)
    story.virsh("undefine", SECOND)
    taken = story.host.volumes.volume(CLONE).allocated
    assert 0 < taken < 64 * MIB, taken
    return f"{shown}\n{found}\nit has {taken >> 20} MiB of its own after that"


def reboot(story: Story) -> str:
    """reboot the VM, then stop and start it   (the persistent disk is back)"""
    assert story.agent is not None
    story.virsh("reset", GUEST)
    _after_boot(story)
    story.virsh("destroy", GUEST)
    story.virsh("start", GUEST)
    _after_boot(story)
    return story.guest("lsblk -o NAME,SIZE,MODEL,MOUNTPOINTS; md5sum /mnt/file")


STEPS: tuple[Step, ...] = (
    create_volume,
    define_domain,
    start_domain,
    attach_disk,
    write_data,
    resize,
    block_info,
    dump_xml,
    detach_disk,
    attach_again,
    snapshot,
    break_file_system,
    roll_back,
    clone,
    reboot,
)


def _after_boot(story: Story) -> None:
    """Waits for the guest and checks that the disk and its data are there."""
    if story.agent is not None:
        story.agent.close()
    time.sleep(0.2)
    story.agent = story.host.agent(GUEST)
    story.disk = _wait_for_disk(story)
    story.guest(f"mount /dev/{story.disk} /mnt")
    assert story.guest("md5sum /mnt/file").split()[0] == story.checksum


def _found_again(story: Story) -> str:
    """Waits for the disk, checks that its data is there, and returns what the guest says of it."""
    story.disk = _wait_for_disk(story)
    story.guest(f"mount /dev/{story.disk} /mnt")
    found = story.guest("md5sum /mnt/file")
    assert found.split()[0] == story.checksum
    story.guest("umount /mnt")
    return found


def _wait_for_disk(story: Story) -> str:
    """Returns the name of the guest's only disk, once its kernel has it."""
    return _wait(story, "ls /sys/block | grep '^sd' && [ -b /dev/$(ls /sys/block | grep '^sd') ]")


def _wait(story: Story, command: str) -> str:
    assert story.agent is not None
    return story.agent.wait_for(command).strip()
