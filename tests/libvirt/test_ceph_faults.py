"""What a guest on a pool of Ceph sees of a cluster in trouble: nothing, or a pause."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.support.agent import Agent
from tests.support.ceph import POOL, Ceph, Link, cluster, lacks
from tests.support.host import Host
from tests.support.verified_io import VerifiedIo, block
from tests.support.wait import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.vm,
    pytest.mark.nightly,
    pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}"),
    pytest.mark.timeout(600),
]

NAME = "ceph-vm"
IMAGE = "data"
IMAGE_MIB = 16
SEED = 0x63757421
CUT_S = 20
"""How long the network is away: less than after what a guest's driver, or Ceph, gives up."""


@pytest.fixture
def link() -> Iterator[Link]:
    """The network between the host and the cluster."""
    with Link() as made:
        yield made


@pytest.fixture
def ceph(link: Link) -> Iterator[Ceph]:
    """A cluster behind it."""
    with cluster(link=link) as made:
        yield made


@pytest.fixture
def host(ceph: Ceph) -> Iterator[Host]:
    """A host whose target has the pool as `ceph0`."""
    with Host(keep=True, target_options=["--rbd"]) as made:
        made.volumes.add_pool("ceph0", POOL, conf=ceph.conf)
        yield made


@pytest.fixture
def guest(host: Host) -> Iterator[Agent]:
    """A running guest with an image as sda."""
    host.volumes.create(f"ceph0/{IMAGE}", IMAGE_MIB << 20)
    host.define(NAME)
    host.virsh("start", NAME)
    agent = host.agent(NAME)
    host.virsh("attach-disk", NAME, f"/dev/virtlun/ceph0/{IMAGE}", "sdb", "--live", "--config")
    agent.wait_for("[ -b /dev/sda ]")
    yield agent
    agent.close()


def audit(host: Host, ceph: Ceph, io: VerifiedIo) -> None:
    """Ends the I/O; what the image holds is what the guest says."""
    ledger = io.finish()
    host.virsh("destroy", NAME)
    held = ceph.content(IMAGE)
    for number, generation in enumerate(ledger):
        assert held[number * 4096 : (number + 1) * 4096] == block(SEED, number, generation), number


def test_a_network_that_is_away_for_a_while_is_a_pause(
    host: Host, guest: Agent, ceph: Ceph, link: Link
) -> None:
    io = VerifiedIo(guest, "sda", seed=SEED, threads=1, depth=8)
    io.goes_on(200)
    link.cut()
    begun = time.monotonic()
    counts = [0]

    def stands_still() -> bool:
        counts.append(io.status().requests)
        return counts[-1] == counts[-2]

    until(stands_still, "the I/O to stand still", every_s=1.0)
    # The rest of the host goes on.
    assert host.virsh("domstate", NAME) == "running"
    host.volumes.create("lvs0/other", 8 << 20)
    # Why the guest stands still is said meanwhile.
    until(lambda: f"I/O of image rbd/{IMAGE} has not been answered" in found(host), "doctor", 60)
    assert "its monitors have not answered" in found(host)
    log, words = host.paths.log, "images of cluster ceph0 wait: I/O of image"
    until(lambda: words in log.read_text(), "the log to say it, too")
    time.sleep(max(0.0, CUT_S - (time.monotonic() - begun)))
    link.mend()
    status = io.goes_on(counts[-1])
    print(f"the longest pause: {status.longest_s:.1f} s")
    assert "I/O error" not in guest.run("dmesg")
    audit(host, ceph, io)


def found(host: Host) -> str:
    """Returns what `virtlun doctor` says of the cluster."""
    words = ("--socket", str(host.paths.rpc_socket), "doctor", "--json")
    said = subprocess.run(
        [host.program("virtlun"), *words], capture_output=True, text=True, check=False
    )
    rows = json.loads(said.stdout)
    return str(next(row["found"] for row in rows if row["what"].startswith("cluster ")))


def test_a_cluster_that_is_full_pauses_the_domain_and_says_why(
    host: Host, guest: Agent, ceph: Ceph
) -> None:
    io = VerifiedIo(guest, "sda", seed=SEED, threads=1, depth=8)
    io.goes_on(200)
    full(ceph, 0.001)
    until(lambda: "paused" in host.virsh("domstate", NAME), "the domain to be paused", 120)
    assert host.virsh("domstate", NAME, "--reason") == "paused (I/O error)"
    (error,) = host.client.call("virtlun_vhost_get_suspended")
    assert error["error"] == "no_space"
    words = ("--socket", str(host.paths.rpc_socket), "domain", "errors")
    said = subprocess.run(
        [host.program("virtlun"), *words], capture_output=True, text=True, check=False
    )
    assert f"ceph0/{IMAGE}" in said.stdout and "no space left" in said.stdout, said
    # It is paused again as long as there is none.
    host.virsh("resume", NAME)
    until(lambda: "paused" in host.virsh("domstate", NAME), "the domain to be paused again", 120)
    full(ceph, 0.95)
    host.virsh("resume", NAME)
    io.goes_on(io.status().requests)
    assert "I/O error" not in guest.run("dmesg")
    audit(host, ceph, io)


def full(ceph: Ceph, ratio: float) -> None:
    """Has the cluster take itself for full when so much of it is in use."""
    names = ("nearfull", "backfillfull", "full")
    for name in names if ratio < 0.5 else reversed(names):
        ceph.run("ceph", "osd", f"set-{name}-ratio", str(ratio - 0.0001 * names[::-1].index(name)))
