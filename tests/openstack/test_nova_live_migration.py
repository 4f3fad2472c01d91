"""Unmodified Nova moves a running instance between two hosts over one pool of Ceph.

Each host has a libvirtd, a target, a gateway and Nova's own libvirt driver. What Nova's compute
managers ask of both drivers, the tests ask, in their order; flags and XML of the migration are
Nova's. The guest verifies what it reads all the time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from tests.openstack.nova_process import Nova
from tests.support.ceph import POOL, lacks
from tests.support.ceph_pair import Pair, image_of, pair
from tests.support.cloud import CONFIG, USER, Cloud
from tests.support.host import Host
from tests.support.verified_io import VerifiedIo, block
from tests.support.wait import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.vm,
    pytest.mark.nightly,
    pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}"),
    pytest.mark.timeout(900),
]

NAME = "instance-00000002"
IMAGE_MIB = 16
MIB = 1 << 20
SEED = 0x6E6F7661
WATCH_TIMEOUT_S = 5
DEST, ADDRESS = "other-host", "127.0.0.1"
SSH = "qemu+ssh://nova@%s/system?socket=/run/virtlun/libvirt-sock"
"""How a host's libvirtd reaches the other one's gateway, by the example."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Pair]:
    with pair(watch_timeout_s=WATCH_TIMEOUT_S, key=True, more_config=CONFIG) as made:
        yield made


@pytest.fixture(scope="module")
def cloud(hosts: Pair) -> Cloud:
    """The same as hosts of a cloud, both of which have the secret of Cinder's user."""
    secret = str(uuid4())
    Cloud(hosts.ceph, hosts.second, secret)
    return Cloud(hosts.ceph, hosts.first, secret)


class Instance:
    """An instance with a volume, and where it is."""

    def __init__(self, hosts: Pair, cinder: Cloud | None) -> None:
        """Starts it on the first host, and has Nova attach the volume.

        That is one of the pool `ceph0`, or one as Cinder's driver for Ceph has it.
        """
        self.hosts, self.volume = hosts, str(uuid4())
        self.image = hosts.ceph.image(f"volume-{self.volume}", IMAGE_MIB)
        hosts.define(NAME, None)
        self.here = hosts.first
        self.here.virsh("start", NAME)
        self.uuid = self.here.virsh("domuuid", NAME)
        self.novas = {host.scratch: self._nova(host) for host in (hosts.first, hosts.second)}
        self.connection: dict[str, Any] = {
            "driver_volume_type": "rbd",
            "serial": self.volume,
            "data": {
                "name": f"virtlun/ceph0/{self.image}",
                "hosts": [],
                "ports": [],
                "auth_enabled": False,
                "discard": True,
                "qos_specs": {"total_iops_sec": "5000"},
                **({} if cinder is None else self._of_cinder(cinder)),
            },
        }
        self.volumes = [{"connection": self.connection, "dev": "sda", "bus": "scsi"}]
        self.nova().does("attach", self.connection, "sda", "scsi")
        self.agent = hosts.agent(self.here, NAME)
        self.agent.wait_for("[ -b /dev/sda ]")
        self.io = VerifiedIo(self.agent, "sda", seed=SEED, threads=1, depth=8)

    def _of_cinder(self, cloud: Cloud) -> dict[str, Any]:
        """What cinder.volume.drivers.rbd.RBDDriver's initialize_connection says otherwise."""
        return {
            "name": f"{POOL}/{self.image}",
            "hosts": ["127.0.0.1"],
            "ports": [cloud.port],
            "cluster_name": "ceph",
            "auth_enabled": True,
            "auth_username": USER,
            "secret_type": "ceph",
            "secret_uuid": cloud.secret,
            "volume_id": self.volume,
        }

    def _nova(self, host: Host) -> Nova:
        """Nova on a host, whose libvirtd reaches the other one's gateway by its address."""
        other = self.hosts.other(host)
        link = host.scratch / ADDRESS
        link.unlink(missing_ok=True)
        link.symlink_to(other.gateway_socket)
        local = {
            SSH: f"qemu+unix:///system?socket={host.scratch}/%s",
            "192.0.2.1": f"{ADDRESS}\nlive_migration_bandwidth = 1",
        }
        return Nova(host, self.uuid, example="nova-ceph.conf", here=local)

    @property
    def there(self) -> Host:
        """The other host."""
        return self.hosts.other(self.here)

    def nova(self, host: Host | None = None) -> Nova:
        """Nova on a host, where the instance is if none is named."""
        return self.novas[(host or self.here).scratch]

    def checked(self) -> Any:
        """Has both hosts say that the instance can go there; returns what they know then."""
        source, there = self.nova(), self.nova(self.there)
        data = there.made("can_migrate_here")
        data = source.made("can_migrate_from_here", data, self.volumes)
        there.does("end_check", data)
        found = data["nova_object.data"]
        assert found["is_shared_block_storage"] and not found["block_migration"]
        return data

    def prepared(self) -> Any:
        """As `checked`, and has the destination prepare itself."""
        return self.nova(self.there).made("pre_live_migration", self.checked(), self.volumes)

    def begin(self, data: Any) -> None:
        """Begins the migration, which is too slow to end, and waits until memory is sent."""
        source = self.owner()
        self.nova().does("live_migration", DEST, data)

        def sends() -> bool:
            assert not self.nova().made("live_migration_is_over"), self.log(self.here)
            return "Memory processed" in self.here.virsh("domjobinfo", NAME)

        until(sends, "memory to be sent")
        assert len(self.hosts.watchers(self.image)) == 2
        assert self.owner() == source

    @staticmethod
    def log(host: Host) -> str:
        """What Nova has said on a host."""
        return (host.scratch / "nova.log").read_text()[-4000:]

    def let_end(self) -> dict[str, Any]:
        """Lets it go as fast as it can, and returns what Nova did at its end."""
        self.here.virsh("migrate-setspeed", NAME, "10000")
        self.here.virsh("migrate-setmaxdowntime", NAME, "5000")
        return dict(self.nova().made("live_migration_end"))

    def migrate(self) -> None:
        """All of it."""
        data = self.prepared()
        self.begin(data)
        done = self.io.status().requests
        self.io.goes_on(done)
        assert self.let_end() == {"called": ["post"], "raised": None}
        self.nova().does("post_live_migration", data, self.volumes)
        there = self.nova(self.there)
        there.does("post_live_migration_at_destination", data, self.volumes)
        self.here = self.there
        self.agent.close()
        self.agent = self.io.guest = self.hosts.agent(self.here, NAME)

    def roll_back(self, data: Any) -> None:
        """What Nova does where it failed."""
        self.nova().does("rollback_at_source", data)
        self.nova(self.there).does("rollback_at_destination", data, self.volumes)

    def owner(self) -> str:
        """The client that has the image locked."""
        lock = self.hosts.lock(self.image)
        assert lock is not None, "nobody has the image locked"
        return lock.owner

    def check(self) -> None:
        """Checks that the guest goes on here with its disk, and that nothing is left there."""
        until(lambda: not self.hosts.disks(self.there), "the other host to let go")
        assert self.there.virsh("list", "--all", "--name") == ""
        for _ in range(2):  # the first count may be of before
            self.io.goes_on(self.io.status().requests)
        until(lambda: self.hosts.watchers(self.image) == {self.owner()}, "one client to be left")
        assert self.here.virsh("domstate", NAME) == "running"
        for side in ((), ("--inactive",)):
            listed = self.here.virsh("domblklist", NAME, *side).split()
            assert listed == ["sda", self.connection["data"]["name"]]
            xml = self.here.virsh("dumpxml", NAME, *side).replace('"', "'")
            assert f"<serial>{self.volume}</serial>" in xml
            assert f"<alias name='ua-{self.volume}'/>" in xml
        bdev, said = image_of(self.here, self.image)
        assert said["locked"] is True
        limits = self.here.client.call("virtlun_bdev_get_limits", name=bdev)
        assert limits["total_iops_sec"] == 5000

    def audit(self) -> None:
        """Ends the I/O and detaches the volume; it holds what the guest says, by Ceph itself."""
        ledger = self.io.finish()
        self.nova().does("detach", self.connection, "sda")
        self.agent.wait_for("[ ! -e /sys/block/sda ]")
        until(lambda: self.hosts.lock(self.image) is None, "the image to be closed")
        held = self.hosts.ceph.content(self.image)
        wrong = [
            number
            for number, generation in enumerate(ledger)
            if held[number * 4096 : (number + 1) * 4096] != block(SEED, number, generation)
        ]
        assert not wrong, f"{len(wrong)} blocks are wrong, such as {wrong[:5]}"

    def close(self) -> None:
        """Ends it, wherever it is."""
        self.agent.close()
        for nova in self.novas.values():
            nova.close()
        for host in (self.hosts.first, self.hosts.second):
            host.virsh("destroy", NAME, check=False)
            host.virsh("undefine", NAME, check=False)


@pytest.fixture
def instance(hosts: Pair, cloud: Cloud, request: pytest.FixtureRequest) -> Iterator[Instance]:
    made = Instance(hosts, cloud if getattr(request, "param", "pool") == "cinder" else None)
    yield made
    made.close()


@pytest.mark.parametrize("instance", ["pool", "cinder"], indirect=True)
def test_nova_moves_a_running_instance_and_back_and_its_volume_with_it(instance: Instance) -> None:
    owners = [instance.owner()]
    for _ in range(2):
        instance.migrate()
        instance.check()
        owners.append(instance.owner())
    assert owners[0] != owners[1]
    instance.audit()


def test_what_nova_does_with_a_volume_after_the_instance_has_moved(instance: Instance) -> None:
    """It grows, the instance is rebooted hard as Nova does it, and the volume is detached."""
    instance.migrate()
    instance.check()
    path = f"rbd/{instance.image}"
    instance.hosts.ceph.rbd("resize", "--no-progress", "--size", "32M", path)
    instance.nova().does("extend", instance.connection, 32 * MIB)
    instance.agent.wait_for(f"[ $(cat /sys/block/sda/size) = {32 * MIB // 512} ]")
    instance.audit()
    instance.nova().does("attach", instance.connection, "sda", "scsi")
    instance.agent.wait_for("[ -b /dev/sda ]")
    assert instance.owner()


@pytest.mark.parametrize("instance", ["pool", "cinder"], indirect=True)
def test_a_migration_that_is_aborted_is_rolled_back_on_both_hosts(instance: Instance) -> None:
    source, data = instance.owner(), instance.prepared()
    instance.begin(data)
    instance.nova().does("live_migration_abort")
    assert instance.nova().made("live_migration_end")["called"] == ["recover"]
    instance.roll_back(data)
    instance.check()
    assert instance.owner() == source
    # And then it does go.
    instance.migrate()
    instance.check()
    instance.audit()


def test_so_is_one_whose_destination_dies(instance: Instance) -> None:
    source, data = instance.owner(), instance.prepared()
    instance.begin(data)
    os.kill(instance.hosts.qemu(instance.there), signal.SIGKILL)
    assert instance.nova().made("live_migration_end")["called"] == ["recover"]
    instance.roll_back(data)
    instance.check()
    assert instance.owner() == source
    instance.audit()


def test_a_host_without_the_pool_is_said_to_be_one_and_the_instance_stays(
    instance: Instance,
) -> None:
    """Nova itself asks nobody whether a volume can be had on the destination."""
    source, there = instance.owner(), instance.there
    data = instance.prepared()
    there.volumes.remove_pool("ceph0")
    try:
        instance.nova().does("live_migration", DEST, data)
        ended = instance.nova().made("live_migration_end")
        assert ended["called"] == ["recover"]
        assert "ceph0" in instance.log(instance.here)
        instance.roll_back(data)
    finally:
        instance.hosts.add_pool(there)
    instance.check()
    assert instance.owner() == source
    instance.audit()
