"""A running guest whose disk is of an NVMe/TCP subsystem goes to another host that has it, too.

Real libvirtds, virsh, QEMU and guest; the subsystem is a model, which each host has by a port of
its own, so that it knows who writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.libvirt.test_migration import Pair
from tests.libvirt.test_nvme_disks import ONE, disk
from tests.support.host import Host
from tests.support.libvirtd import NEWER_QEMU
from tests.support.nvme_target import NQN, WRITE, Namespace, NvmeTarget
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm, pytest.mark.timeout(600)]

NAME = "moving"
BLOCK, BLOCKS = 512, 8192
#: Writes its count to one block after the other, and reads it again.
WRITES = """\
(n=0; while n=$((n + 1)); do
    echo $n | dd of=/dev/sda bs=512 seek=$((n % 64)) conv=sync oflag=direct 2>/dev/null &&
    dd if=/dev/sda of=/tmp/read bs=512 skip=$((n % 64)) count=1 iflag=direct 2>/dev/null &&
    [ "$(head -n 1 /tmp/read)" = $n ] || echo "wrong at $n" > /dev/ttyS0
done) > /dev/null 2>&1 &
"""


@pytest.fixture
def model() -> Iterator[NvmeTarget]:
    """The subsystem."""
    with NvmeTarget({1: Namespace(BLOCKS, uuid=ONE)}, ports=2) as made:
        yield made


@pytest.fixture
def pair(model: NvmeTarget) -> Iterator[Pair]:
    """Both hosts, with the subsystem as pool `nv0`; the guest runs on the first."""
    ids = [f"c0ffee00-0000-4000-8000-00000000000{n}" for n in (7, 8)]
    options = ["--network"]
    with (
        Host(keep=True, host_uuid=ids[0], target_options=options) as first,
        Host(keep=True, host_uuid=ids[1], target_options=options) as second,
    ):
        for port, host in enumerate((first, second)):
            host.client.call(
                "virtlun_nvme_pool_create",
                name="nv0",
                paths=[{"traddr": "127.0.0.1", "trsvcid": model.port(port)}],
                subnqn=NQN,
            )
        first.define(NAME, devices=disk(ONE, "sda"), emulator=NEWER_QEMU)
        first.virsh("start", NAME)
        yield Pair(first, second, first)


def counts(model: NvmeTarget) -> list[tuple[int, int]]:
    """What the guest has written: by which port, and its count."""
    all_ = [(each.port, each.data.split(b"\n")[0]) for each in list(model.seen(WRITE))]
    return [(port, int(count)) for port, count in all_]


def writes(model: NvmeTarget, port: int) -> None:
    """Waits until the guest writes by a port."""

    def has_written() -> bool:
        return [by for by, _ in counts(model)[-20:]] == [port] * 20

    until(has_written, lambda: f"it writes: {counts(model)[-20:]}", 90.0)


def test_it_writes_by_one_host_and_then_by_the_other(pair: Pair, model: NvmeTarget) -> None:
    agent = pair.source.agent(NAME)
    agent.wait_for("[ -b /dev/sda ]")
    agent.run(WRITES)
    agent.close()
    writes(model, 0)
    for port in (1, 0):
        pair.migrate()
        writes(model, port)
    written = counts(model)
    # None is lost or comes twice, and the host before writes nothing more.
    assert [count for _, count in written] == list(range(1, len(written) + 1))
    assert sum(1 for a, b in pairwise(written) if a[0] != b[0]) == 2
    console = (pair.home.scratch / f"{NAME}-console.log").read_text(errors="replace")
    assert "wrong at" not in console
    until(lambda: not pair.destination.client.call("vhost_get_controllers"), "it has left", 90.0)
    until(lambda: not pair.destination.client.call("bdev_nvme_get_controllers"), "it is closed")
