"""Two hosts, each with a libvirtd, a target and a gateway, over one pool of a real Ceph."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.agent import Agent, GuestError
from tests.support.cable import Cable
from tests.support.ceph import POOL, WATCH_TIMEOUT_S, Ceph, cluster
from tests.support.domain import domain_xml
from tests.support.host import Host
from tests.support.libvirtd import NEWER_QEMU
from tests.support.ports import free_port

IDS = [f"c0ffee00-0000-4000-8000-00000000000{n}" for n in (5, 6)]
AGENTS = Path("/var/lib/libvirt/agents")
"""Where a guest's agent listens, of whichever host it runs on: each libvirtd sees a folder of its
own there."""
DISK = (
    "<disk type='block' device='disk'><source dev='/dev/virtlun/ceph0/{image}'/>"
    "<target dev='sda' bus='{bus}'/></disk>"
)
HERE = ("127.0.0.1", "127.0.0.1")
"""Where each host's QEMU is reached, as they have one network."""
MOVED_S = 240.0
"""How long a migration may take."""


@dataclass
class Lock:
    """Who has an image."""

    owner: str
    """The client, such as client.4123."""
    address: str


class Pair:
    """The hosts; both have the pool as `ceph0`."""

    def __init__(
        self, ceph: Ceph, first: Host, second: Host, addresses: tuple[str, str] = HERE
    ) -> None:
        """Adds the pool on both; QEMU of each is reached at its address."""
        self.ceph, self.first, self.second = ceph, first, second
        self._addresses = addresses
        for host in (first, second):
            self.add_pool(host)
            folder = self._agents(host)
            folder.mkdir()
            folder.chmod(0o777)

    def define(
        self,
        name: str,
        image: str | None,
        *,
        disk: str = "",
        accel: str = "tcg",
        vcpus: int = 1,
    ) -> None:
        """Defines a domain on the first host, with an image of the pool as its disk, or `disk`."""
        xml = domain_xml(
            name,
            self.first.image,
            self.first.scratch,
            accel=accel,
            vcpus=vcpus,
            devices=DISK.format(image=image, bus="scsi") if image else disk,
            emulator=NEWER_QEMU,
        )
        xml = xml.replace(f"{self.first.scratch}/{name}-agent", f"{AGENTS}/{name}")
        path = self.first.scratch / f"{name}.xml"
        path.write_text(xml)
        self.first.virsh("define", str(path))

    def define_on(self, host: Host, name: str) -> None:
        """Defines on another host the domain that is defined on the first."""
        path = host.scratch / f"{name}.xml"
        path.write_text(self.first.virsh("dumpxml", "--inactive", name))
        host.virsh("define", str(path))

    def add_pool(self, host: Host) -> None:
        """Adds the pool on a host, as `ceph0`."""
        host.volumes.add_pool("ceph0", POOL, conf=self.ceph.conf)

    def forget_fence(self, host: Host) -> None:
        """A host that was fenced, and uses nothing of the pool any more, has it again."""
        host.volumes.remove_pool("ceph0")
        self.add_pool(host)

    def agent(self, host: Host, name: str) -> Agent:
        """The command channel into a guest that runs on a host."""
        agent = Agent(self._agents(host) / name)
        try:
            agent.wait_ready()
        except GuestError as error:
            words = self.first.console(name)[-2000:]
            log = host.paths.log.read_text(errors="replace")[-2000:]
            raise GuestError(f"{error}\nIts console:\n{words}\nThe target's log:\n{log}") from error
        return agent

    def other(self, host: Host) -> Host:
        """The host that this one is not."""
        return self.second if host is self.first else self.first

    def command(self, source: Host, name: str, *words: str) -> list[str]:
        """The words of virsh for a live migration from `source` to the other host."""
        port = free_port()
        address = self._addresses[self.other(source) is self.second]
        to = ("migrate", name, self.other(source).uri, "--live", "--migrateuri")
        return [*to, f"tcp://{address}:{port}", *words]

    def migrate(self, source: Host, name: str, *words: str) -> None:
        """Migrates with plain virsh through both gateways."""
        source.virsh(*self.command(source, name, *words), deadline_s=MOVED_S)

    @staticmethod
    def downtime_ms(destination: Host, name: str) -> int:
        """For how long no host ran the guest that has just come to `destination`."""
        said = destination.virsh("domjobinfo", name, "--completed")
        found = re.search(r"Total downtime:\s+(\d+)", said)
        assert found, said
        return int(found[1])

    def lock(self, image: str) -> Lock | None:
        """Who has an image; None: nobody."""
        locks = json.loads(self.ceph.rbd("lock", "ls", "--format", "json", f"{POOL}/{image}"))
        assert len(locks) <= 1, locks
        return Lock(locks[0]["locker"], locks[0]["address"]) if locks else None

    def watchers(self, image: str) -> set[str]:
        """The clients that have an image open to write to it, such as client.4123."""
        said = self.ceph.rbd("status", "--format", "json", f"{POOL}/{image}")
        return {f"client.{item['client']}" for item in json.loads(said)["watchers"]}

    @staticmethod
    def disks(host: Host) -> list[str]:
        """The controllers of a host's target."""
        return [item["ctrlr"] for item in host.client.call("vhost_get_controllers")]

    @staticmethod
    def qemu(host: Host) -> int:
        """The process of the only guest of a host."""
        folder = host.libvirtd.scratch / "run-libvirt/qemu"
        (file,) = (path for path in folder.glob("*.pid") if path.name != "driver.pid")
        return int(file.read_text())

    def kill(self, host: Host) -> None:
        """A host with its only guest dies."""
        os.kill(self.qemu(host), signal.SIGKILL)
        host.kill_target()
        host.stop_gateway(signal.SIGKILL)
        host.libvirtd.kill(signal.SIGKILL)

    @staticmethod
    def _agents(host: Host) -> Path:
        return host.libvirtd.scratch / "lib" / AGENTS.name


def image_of(host: Host, image: str) -> tuple[str, dict[str, Any]]:
    """The bdev on an image that a host's target has open, and what that says of it."""
    found = {
        each["name"]: each["driver_specific"].get("rbd", {})
        for each in host.client.call("bdev_get_bdevs")
    }
    # Its pool lists it, too, without a word of locks.
    open_ones = {n: rbd for n, rbd in found.items() if "locked" in rbd}
    (one,) = (each for each in open_ones.items() if each[1]["rbd_name"] == image)
    return one


@contextlib.contextmanager
def hosts_over(ceph: Ceph, *, more_config: str = "", cable: Cable | None = None) -> Iterator[Pair]:
    """Two hosts over the pool of a cluster, for the duration of a block; see `Host`.

    With a `cable` libvirtd and QEMU of each are at one end of it; the targets have this network.
    """
    networks = cable.networks if cable is not None else ("", "")
    addresses = cable.addresses if cable is not None else HERE
    options: dict[str, Any] = {"target_options": ["--rbd"], "more_config": more_config}
    with (
        Host(keep=True, host_uuid=IDS[0], network=networks[0], **options) as first,
        Host(keep=True, host_uuid=IDS[1], network=networks[1], **options) as second,
    ):
        yield Pair(ceph, first, second, addresses)


@contextlib.contextmanager
def pair(
    *,
    watch_timeout_s: int = WATCH_TIMEOUT_S,
    key: bool = False,
    more_config: str = "",
    cable: Cable | None = None,
) -> Iterator[Pair]:
    """A cluster, which gives a client up after `watch_timeout_s`, and two hosts over its pool.

    `key`: its clients need one; `more_config`: see `Host`; `cable`: see `hosts_over`.
    """
    with (
        cluster(watch_timeout_s=watch_timeout_s, key=key) as ceph,
        hosts_over(ceph, more_config=more_config, cable=cable) as made,
    ):
        yield made
