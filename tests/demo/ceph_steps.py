"""The steps of the demo of Ceph, in order, as those of the main job."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.agent import Agent
from tests.support.ceph import POOL
from tests.support.ceph_pair import Pair
from tests.support.host import Host
from tests.support.verified_io import VerifiedIo
from tests.support.wait import until

GUEST = "demo"
IMAGE = "data"
SIZE_MIB, LARGER_MIB = 64, 96
SEED = 0x64656D6F
WATCH_TIMEOUT_S = 5
"""After how long the demo's cluster gives up a client; Ceph itself takes 30 s."""

Step = Callable[["Story"], str]


@dataclass
class Story:
    """What the steps share."""

    hosts: Pair
    accel: str = "tcg"
    agent: Agent | None = None
    io: VerifiedIo | None = None
    content: str = ""
    """Checksum of the disk."""

    @property
    def first(self) -> Host:
        """Where the VM begins."""
        return self.hosts.first

    @property
    def second(self) -> Host:
        """Where it goes."""
        return self.hosts.second

    def guest(self, command: str, deadline_s: float = 120.0) -> str:
        """Runs a command in the guest."""
        assert self.agent is not None, "the guest has not booted yet"
        return self.agent.run(command, deadline_s).strip()

    def meet(self, host: Host) -> None:
        """The guest runs on this host."""
        if self.agent is not None:
            self.agent.close()
        self.agent = self.hosts.agent(host, GUEST)


def pools(story: Story) -> str:
    """virtlun pool list, on both hosts   (virtlun pool add ceph0 --rbd rbd)"""
    shown = [_virtlun(host, "pool", "list") for host in (story.first, story.second)]
    assert all("ceph0" in text for text in shown), shown
    return "\n".join(shown)


def create_volume(story: Story) -> str:
    """virtlun volume create ceph0/data 64M   (an image: rbd info shows it)"""
    shown = _virtlun(story.first, "volume", "create", f"ceph0/{IMAGE}", f"{SIZE_MIB}M")
    return f"{shown}\n{story.hosts.ceph.rbd('info', f'{POOL}/{IMAGE}').strip()}"


def start(story: Story) -> str:
    """virsh start demo   (its disk is /dev/virtlun/ceph0/data)"""
    story.hosts.define(GUEST, IMAGE, accel=story.accel)
    begun = time.monotonic()
    story.first.virsh("start", GUEST)
    started = time.monotonic() - begun
    story.meet(story.first)
    booted = time.monotonic() - begun
    return (
        f"virsh returned after {started:.1f} s, the guest was up after {booted:.1f} s\n"
        f"{story.guest('lsblk -o NAME,SIZE,VENDOR,MODEL')}\n{_lock(story)}"
    )


def write(story: Story) -> str:
    """in the guest: I/O of which every block is known, from here on"""
    assert story.agent is not None
    story.io = VerifiedIo(story.agent, "sda", seed=SEED, threads=1, depth=8)
    status = story.io.goes_on(200)
    return ", ".join(f"{count} {kind}" for kind, count in status.kinds.items())


def migrate(story: Story) -> str:
    """virsh migrate demo SECOND --live"""
    assert story.io is not None
    before = story.hosts.lock(IMAGE)
    done, begun = story.io.status().requests, time.monotonic()
    story.hosts.migrate(story.first, GUEST)
    took = time.monotonic() - begun
    story.meet(story.second)
    assert story.agent is not None
    story.io.guest = story.agent
    status = story.io.goes_on(done)
    after = story.hosts.lock(IMAGE)
    assert before is not None and after is not None and before.owner != after.owner
    until(lambda: not story.hosts.disks(story.first), "the first host to let go")
    downtime = story.hosts.downtime_ms(story.second, GUEST)
    said = re.findall(r"image \S+ is (?:locked for its guest, after \d+ ms|let go).*", _logs(story))
    return (
        f"virsh returned after {took:.1f} s; the guest stood still for {downtime} ms, and its I/O"
        f" goes on: {status.requests - done} requests since, none wrong\n"
        f"{_lock(story)}\n" + "\n".join(f"target: {line}" for line in said)
    )


def resize(story: Story) -> str:
    """rbd resize --size 96M rbd/data   (the guest is not told to rescan)"""
    begun = time.monotonic()
    story.hosts.ceph.rbd("resize", "--no-progress", "--size", f"{LARGER_MIB}M", f"{POOL}/{IMAGE}")
    resized = time.monotonic() - begun
    assert story.agent is not None
    story.agent.wait_for(f"[ $(cat /sys/block/sda/size) = {LARGER_MIB * 2048} ]")
    seen = time.monotonic() - begun
    return f"rbd returned after {resized:.1f} s; the guest had the size after {seen:.1f} s"


def verify(story: Story) -> str:
    """in the guest: the I/O ends, and the whole disk is read and compared"""
    assert story.io is not None
    ledger = story.io.finish()
    story.content = story.guest("sync; md5sum /dev/sda").split()[0]
    return f"{len(ledger)} blocks of 4 KiB hold what was written last; md5 {story.content}"


def kill(story: Story) -> str:
    """the second host dies: kill -9 of QEMU, target, gateway and libvirtd"""
    story.hosts.kill(story.second)
    return f"{_lock(story)}: it is dead, and the lock is left"


def start_elsewhere(story: Story) -> str:
    """virsh start demo, on the first host   (Ceph gives up the dead one: here after 5 s)"""
    before, begun = story.hosts.lock(IMAGE), time.monotonic()
    story.first.virsh("start", GUEST, deadline_s=120)
    started = time.monotonic() - begun
    story.meet(story.first)
    booted = time.monotonic() - begun
    assert story.agent is not None
    story.agent.wait_for("[ -b /dev/sda ]")
    assert story.guest("md5sum /dev/sda").split()[0] == story.content
    after = story.hosts.lock(IMAGE)
    assert before is not None and after is not None and before.owner != after.owner
    fenced = story.hosts.ceph.run("ceph", "osd", "blocklist", "ls")
    assert before.address in fenced, fenced
    return (
        f"virsh returned after {started:.1f} s, the guest was up after {booted:.1f} s; its disk is"
        f" as it was\n{_lock(story)}\nfenced: {before.address} ({before.owner})"
    )


STEPS: tuple[Step, ...] = (
    pools,
    create_volume,
    start,
    write,
    migrate,
    resize,
    verify,
    kill,
    start_elsewhere,
)


def _lock(story: Story) -> str:
    lock = story.hosts.lock(IMAGE)
    return "nobody has the image" if lock is None else f"{lock.owner} has the image locked"


def _logs(story: Story) -> str:
    hosts = (story.first, story.second)
    return "\n".join(host.paths.log.read_text(errors="replace") for host in hosts)


def _virtlun(host: Host, *words: str) -> str:
    program = str(Path(sys.executable).parent / "virtlun")
    done = subprocess.run(
        [program, "--socket", str(host.paths.rpc_socket), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
