"""Two VMs on two hosts with one image of a pool as their disk, which both say is shareable.

Real libvirtds, virsh, QEMU, guests and Ceph. The guests read and write past their page caches, as
software for a shared disk does.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.support.agent import Agent
from tests.support.ceph import POOL, lacks
from tests.support.ceph_pair import Pair, pair
from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.wait import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.vm,
    pytest.mark.nightly(reason="by day test_rbd_kinds.py has two targets that share an image"),
    pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}"),
    pytest.mark.timeout(600),
]

NAMES = ("one", "two")
IMAGE_MIB = 16
ROUNDS = 4


@pytest.fixture(scope="module")
def hosts() -> Iterator[Pair]:
    """Two hosts over one pool."""
    with pair() as made:
        yield made


@contextmanager
def defined(hosts: Pair, image: str, *shareable: bool) -> Iterator[None]:
    """A new image, and on each host a domain with it, shareable or not, for a block."""
    hosts.ceph.image(image, IMAGE_MIB)
    places = (hosts.first, hosts.second)
    for host, name, shares in zip(places, NAMES, shareable, strict=True):
        hosts.define(name, None, disk=disk(image, shareable=shares))
        if host is hosts.second:
            hosts.define_on(host, name)
            hosts.first.virsh("undefine", name)
    try:
        yield
    finally:
        for host, name in zip(places, NAMES, strict=True):
            host.virsh("destroy", name, check=False)
            host.virsh("undefine", name)
    until(lambda: not hosts.watchers(image), "both hosts to let go of the image")
    hosts.ceph.rbd("rm", "--no-progress", f"{POOL}/{image}")


def disk(image: str, *, shareable: bool) -> str:
    """Returns the <disk> of an image of the pool."""
    return (
        f"<disk type='block' device='disk'><source dev='/dev/virtlun/ceph0/{image}'/>"
        f"<target dev='sda' bus='scsi'/>{'<shareable/>' if shareable else ''}</disk>"
    )


def booted(hosts: Pair, host: Host, name: str) -> Agent:
    """Starts a domain of a host, and returns the command channel into its guest with its disk."""
    host.virsh("start", name)
    agent = hosts.agent(host, name)
    agent.wait_for("[ -b /dev/sda ]")
    return agent


def write(agent: Agent, at: int) -> str:
    """Writes 1 MiB of random bytes at a MiB of the disk; returns their checksum."""
    agent.run("dd if=/dev/urandom of=/tmp/data bs=1M count=1 2>/dev/null")
    agent.run(f"dd if=/tmp/data of=/dev/sda bs=1M seek={at} oflag=direct conv=notrunc")
    return agent.run("md5sum < /tmp/data").split()[0]


def read(agent: Agent, at: int) -> str:
    """Returns the checksum of a MiB of the disk."""
    command = f"dd if=/dev/sda bs=1M skip={at} count=1 iflag=direct 2>/dev/null | md5sum"
    return agent.run(command).split()[0]


def test_guests_of_two_hosts_write_to_one_image_and_read_what_the_other_wrote(hosts: Pair) -> None:
    image = "shared"
    with defined(hosts, image, True, True):
        one, two = booted(hosts, hosts.first, "one"), booted(hosts, hosts.second, "two")
        assert len(hosts.watchers(image)) == 2
        for number in range(ROUNDS):  # of the same blocks, in turn
            for writer, reader in ((one, two), (two, one)):
                written = write(writer, number)
                assert read(reader, number) == written
        with ThreadPoolExecutor(2) as pool:  # and of blocks of one's own, both at a time
            for number in range(ROUNDS):
                places = (2 * number, 2 * number + 1)
                both = list(pool.map(write, (one, two), places))
                assert list(pool.map(read, (two, one), places)) == both
        # Who ends takes nothing from the other one.
        one.close()
        hosts.first.virsh("destroy", "one")
        until(lambda: len(hosts.watchers(image)) == 1, "the first host to let go")
        written = write(two, IMAGE_MIB - 1)
        assert read(two, IMAGE_MIB - 1) == written
        two.close()


def test_where_neither_says_so_the_second_is_refused_and_the_first_goes_on(hosts: Pair) -> None:
    image = "alone"
    with defined(hosts, image, False, False):
        one = booted(hosts, hosts.first, "one")
        before = write(one, 0)
        with pytest.raises(VirshError) as refused:
            hosts.second.virsh("start", "two")
        assert "is locked by the client at 127.0.0.1" in str(refused.value)
        assert str(refused.value).count("\n") == 1, "after libvirt's own line"
        assert hosts.second.virsh("domstate", "two") == "shut off"
        assert not hosts.disks(hosts.second)
        assert read(one, 0) == before
        written = write(one, 1)
        assert read(one, 1) == written
        one.close()
        hosts.first.virsh("destroy", "one")
        # It was nothing but the other one that kept it from the image.
        until(lambda: not hosts.watchers(image), "the first host to let go")
        two = booted(hosts, hosts.second, "two")
        assert read(two, 0) == before
        two.close()


@pytest.mark.parametrize(
    ("shareable", "words"),
    [
        ((False, True), "alone, so it cannot be shared"),
        ((True, False), "is shared with other hosts by the client at 127.0.0.1"),
    ],
)
def test_where_one_alone_says_so_the_second_is_refused_and_the_first_goes_on(
    hosts: Pair, shareable: tuple[bool, bool], words: str
) -> None:
    image = "mixed"
    with defined(hosts, image, *shareable):
        one = booted(hosts, hosts.first, "one")
        before = write(one, 0)
        for at in range(1, 3):
            with pytest.raises(VirshError) as refused:
                hosts.second.virsh("start", "two")
            assert words in str(refused.value)
            assert str(refused.value).count("\n") == 1, "after libvirt's own line"
            assert not hosts.disks(hosts.second)
            written = write(one, at)
            assert (read(one, 0), read(one, at)) == (before, written)
        one.close()
        # Who is gone is in nobody's way once the cluster has given him up.
        hosts.first.kill_target()
        until(lambda: not hosts.watchers(image), "the cluster to give the first host up")
        two = booted(hosts, hosts.second, "two")
        assert read(two, 0) == before
        write(two, 0)
        two.close()
        hosts.first.start_target()
