"""One disk of the network by the targets of two hosts, which nothing but people keeps apart."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.initiator import Initiator, connected
from tests.support.nbdkit import Nbdkit
from tests.support.nvme_target import Namespace, NvmeTarget
from tests.support.target import Target
from tests.support.tgt import Tgt, lacks
from tests.target.conftest import MakeTarget

MIB = 1 << 20
BLOCK = 512
SIZE = 16 * MIB
FLUSH = bytes([0x35, *bytes(9)])
#: Writes that are in flight when their host dies.
IN_FLIGHT = 8

Attach = Callable[[Target, str], None]
"""Makes the disk a bdev of that name, of a host whose name has a number."""


@contextlib.contextmanager
def of_iscsi(folder: Path) -> Iterator[Attach]:
    with Tgt(folder) as tgt:
        tgt.disk(size=SIZE)

        def attach(target: Target, host: str) -> None:
            iqn = f"iqn.2026-11.org.virtlun:{host}"
            target.rpc("bdev_iscsi_create", name=host, url=tgt.url(), initiator_iqn=iqn)

        yield attach


@contextlib.contextmanager
def of_nbd(folder: Path) -> Iterator[Attach]:
    exported = folder / "exported"
    with exported.open("xb") as file:
        file.truncate(SIZE)
    with Nbdkit(folder, "file", str(exported)) as server:
        yield lambda target, host: target.rpc("virtlun_nbd_create", name=host, uri=server.uri)


@contextlib.contextmanager
def of_nvme(_: Path) -> Iterator[Attach]:
    with NvmeTarget({1: Namespace(SIZE // BLOCK, BLOCK)}) as model:

        def attach(target: Target, host: str) -> None:
            given = {"hostnqn": f"nqn.2026-11.org.virtlun:{host}", **model.params()}
            made = target.rpc("bdev_nvme_attach_controller", name=host, **given)
            assert made == [f"{host}n1"]

        yield attach


DISKS = {"iscsi": of_iscsi, "nbd": of_nbd, "nvme": of_nvme}


@pytest.fixture(
    params=[
        pytest.param("iscsi", marks=pytest.mark.skipif(bool(lacks()), reason="tgt is not there")),
        "nbd",
        "nvme",
    ]
)
def hosts(
    request: pytest.FixtureRequest, make_target: MakeTarget, scratch: Path
) -> Iterator[tuple[Target, Target]]:
    """The targets of two hosts, each with the disk as that of its VM `vm-0`."""
    with DISKS[request.param](scratch) as attach:
        targets = []
        for host in ("a", "b"):
            target = make_target("--iscsi", "--network").start()
            attach(target, host)
            (bdev,) = target.rpc("bdev_get_bdevs")
            target.attach("vm-0", bdev["name"])
            targets.append(target)
        yield targets[0], targets[1]


def data(seed: object, blocks: int) -> bytes:
    return random.Random(str(seed)).randbytes(blocks * BLOCK)


def flush(guest: Initiator) -> None:
    assert guest.cdb(FLUSH)["status"] == 0


def test_both_write_and_each_reads_what_the_other_has_written(
    hosts: tuple[Target, Target],
) -> None:
    with connected(hosts[0]) as a, connected(hosts[1]) as b:
        for turn in range(4):
            written = {guest: data((turn, n), 64) for n, guest in enumerate((a, b))}
            for at, (guest, what) in enumerate(written.items()):
                guest.write(at * 64, what)
                flush(guest)
            for guest in (a, b):
                assert guest.read(0, 128) == b"".join(written.values())
            # What one has written over is gone for the other, too.
            b.write(32, data((turn, "over"), 64))
            flush(b)
            assert a.read(32, 64) == data((turn, "over"), 64)


def test_the_other_has_what_was_written_by_one_that_died_and_writes_on(
    hosts: tuple[Target, Target],
) -> None:
    first, second = hosts
    with connected(first) as guest:
        guest.write(0, data("kept", 1024))
        flush(guest)
        for n in range(IN_FLIGHT):
            lba = 2048 + n
            cdb = bytes([0x2A, 0, *lba.to_bytes(4, "big"), 0, 0, 1, 0])
            guest.send("submit", cdb=cdb, data_out=data(("late", n), 1))
        first.kill9()
    with connected(second) as guest:
        assert guest.read(0, 1024) == data("kept", 1024)
        for n in range(IN_FLIGHT):
            assert guest.read(2048 + n, 1) in {bytes(BLOCK), data(("late", n), 1)}, n
        guest.write(512, data("new", 1024))
        flush(guest)
        assert guest.read(0, 1536) == data("kept", 1024)[: 512 * BLOCK] + data("new", 1024)
    # The dead one begins again as any other, which keeps nobody from it.
    first.start().restored()
    with connected(first) as a, connected(second) as b:
        b.write(0, data("last", 8))
        flush(b)
        assert a.read(0, 8) == data("last", 8)
