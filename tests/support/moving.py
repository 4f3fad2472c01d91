"""A guest that moves between two hosts with its disk, an image of Ceph, and checks its data."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.agent import Agent
from tests.support.ceph_pair import Pair, image_of
from tests.support.host import Host
from tests.support.verified_io import VerifiedIo, block
from tests.support.wait import until

NAME = "moving"
IMAGE_MIB = 16
SEED = 0x6D6F7665


@dataclass
class Moving:
    """The guest, and where it is."""

    hosts: Pair
    image: str
    source: str
    """What its clients are shown of the disk."""
    here: Host
    agent: Agent
    io: VerifiedIo

    @property
    def there(self) -> Host:
        """The other host."""
        return self.hosts.other(self.here)

    def moved(self) -> None:
        """The guest is on the other host now."""
        self.here = self.there
        self.agent.close()
        self.agent = self.io.guest = self.hosts.agent(self.here, NAME)

    def owner(self) -> str:
        """The client that has the image locked."""
        lock = self.hosts.lock(self.image)
        assert lock is not None, "nobody has the image locked"
        return lock.owner

    def shown(self, host: Host) -> dict[str, Any]:
        """What a host's target says of the image, which it has open."""
        return image_of(host, self.image)[1]

    def check(self) -> None:
        """Checks that the guest's I/O goes on here, and that the other host has nothing of it."""
        until(lambda: not self.hosts.disks(self.there), "the other host to let go")
        for _ in range(2):  # the first count may be of before
            self.io.goes_on(self.io.status().requests)
        until(lambda: self.hosts.watchers(self.image) == {self.owner()}, "one client to be left")
        assert self.shown(self.here)["locked"] is True
        assert self.here.virsh("domblklist", NAME).split()[1] == self.source

    def audit(self) -> None:
        """Ends the I/O; what the image holds is what the guest says, by Ceph's own command."""
        ledger = self.io.finish()
        self.here.virsh("destroy", NAME)
        until(lambda: self.hosts.lock(self.image) is None, "the image to be closed")
        held = self.hosts.ceph.content(self.image)
        wrong = [
            number
            for number, generation in enumerate(ledger)
            if held[number * 4096 : (number + 1) * 4096] != block(SEED, number, generation)
        ]
        assert not wrong, f"{len(wrong)} blocks are wrong, such as {wrong[:5]}"

    def begin(self, *words: str) -> subprocess.Popen[str]:
        """Begins a migration that does not end by itself, and waits until both have the image."""
        source = self.owner()
        command = self.hosts.command(self.here, NAME, "--bandwidth", "1", *words)
        process = subprocess.Popen(
            ["virsh", "-q", "-c", self.here.uri, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

        def sends() -> bool:
            assert process.poll() is None, process.communicate()[0]
            return "Memory processed" in self.here.virsh("domjobinfo", NAME)

        until(sends, "memory to be sent")
        assert len(self.hosts.watchers(self.image)) == 2
        assert len(self.hosts.disks(self.there)) == 1
        assert self.owner() == source
        return process

    def fast(self) -> None:
        """Lets the migration end whatever its guest dirties."""
        self.here.virsh("migrate-setspeed", NAME, "10000")
        self.here.virsh("migrate-setmaxdowntime", NAME, "5000")

    def let_finish(self, process: subprocess.Popen[str]) -> None:
        """Lets a migration go as fast as it can, and waits for its end."""
        self.fast()
        said = process.communicate(timeout=240)[0]
        assert process.returncode == 0, said


@contextmanager
def running(
    hosts: Pair, image: str, *, disk: str, dev: str = "sda", first: str = ""
) -> Iterator[Moving]:
    """A guest on the first host that writes, for the duration of a block.

    `disk` is its <disk>, `dev` the name of that, `image` the new image that it is on; `first` is
    the <disk> of an sda that it has until `disk` is attached, if any.
    """
    hosts.ceph.image(image, IMAGE_MIB)
    hosts.define(NAME, None, disk=first or disk)
    here = hosts.first
    here.virsh("start", NAME)
    agent = hosts.agent(here, NAME)
    if first:
        agent.wait_for("[ -b /dev/sda ]")
        path = here.scratch / "disk.xml"
        path.write_text(disk)
        here.virsh("attach-device", NAME, str(path), "--live")
    agent.wait_for(f"[ -b /dev/{dev} ]")
    if first:
        here.virsh("detach-disk", NAME, "sda", "--live")
        agent.wait_for("[ ! -b /dev/sda ]")
    source = here.virsh("domblklist", NAME).split()[1]
    io = VerifiedIo(agent, dev, seed=SEED, threads=1, depth=8)
    made = Moving(hosts, image, source, here, agent, io)
    io.goes_on(0)
    yield made
    made.agent.close()
    for host in (hosts.first, hosts.second):
        host.virsh("destroy", NAME, check=False)
        host.virsh("undefine", NAME, check=False)
