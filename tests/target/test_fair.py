"""Neighbours that want everything: whoever shares their reactor goes on, and reads what it wrote.

How fast is not asserted: `python -m tests.bench.noisy` measures it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.initiator import Initiator
from tests.support.target import Target, binary
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_stuck import Disks

MIB = 1 << 20
DEADLINE_S = 60.0
FLUSH = bytes([0x35, *bytes(9)])
BIG_READS = ("run", "--bs", "4m", "--iodepth", "64")


def requests_of(target: Target, controller: str) -> int:
    """How many requests a controller has taken so far."""
    (stats,) = target.rpc("virtlun_vhost_get_stats", name=controller)
    return int(stats["requests"])


@contextmanager
def neighbour(socket: Path, command: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """An initiator that goes on until the end of the block."""
    process = subprocess.Popen(
        [str(binary("virtlun-bench")), command, str(socket), *options, "--time", "3600"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_requests(target: Target, controller: str, more_than: int) -> None:
    """Waits until a controller has taken more requests than that."""
    sends = f"{controller} sends"
    until(lambda: requests_of(target, controller) > more_than, sends, every_s=0.01)


def verified_io(guest: Initiator, count: int) -> None:
    """Writes stamped blocks and reads each back."""
    for n in range(count):
        stamp = n.to_bytes(4, "big") * 1024
        guest.write(n % 64 * 8, stamp)
        assert guest.read(n % 64 * 8, 8) == stamp


@pytest.mark.parametrize(
    "load",
    [
        BIG_READS,
        *(
            ("flood", "--kind", kind)
            for kind in ("unmap", "write-same", "verify", "allocate", "tmf", "mem-table", "garbage")
        ),
    ],
    ids=lambda load: load[-1] if load[0] == "flood" else "reads",
)
def test_a_guest_goes_on_beside(load: tuple[str, ...], make_target: MakeTarget) -> None:
    target = make_target("--cpumask", "0x1").start()
    for name in ("quiet", "loud"):
        target.rpc("bdev_malloc_create", name=name, num_blocks=256 * 2048, block_size=512)
    target.rpc("bdev_lvol_create_lvstore", bdev_name="loud", lvs_name="lvs")
    target.rpc(
        "bdev_lvol_create", lvs_name="lvs", lvol_name="v", size_in_mib=128, thin_provision=True
    )
    quiet, loud = target.attach("quiet", "quiet"), target.attach("loud", "lvs/v")
    with Initiator(quiet) as guest, neighbour(loud, *load) as process:
        guest.send("connect")
        guest.ready()
        for _ in range(3):
            wait_for_requests(target, "loud", requests_of(target, "loud"))
            verified_io(guest, 40)
        assert process.poll() is None, "the neighbour gave up"
    # And its disk is there for the next guest.
    with Initiator(loud) as next_guest:
        next_guest.send("connect")
        next_guest.ready()
        verified_io(next_guest, 4)


def test_a_disk_that_does_not_answer_leaves_the_kernels_workers_to_others(
    make_target: MakeTarget, tmp_path: Path
) -> None:
    """A flush needs one of them, and a ring has 256: as many as a guest may have requests."""
    disks, target = Disks(make_target().start()), make_target("--cpumask", "0x1").start()
    target.rpc("bdev_aio_create", name="slow", filename=disks.path(), block_size=512)
    image = tmp_path / "disk.img"
    image.write_bytes(bytes(4 * MIB))
    target.rpc("bdev_aio_create", name="file", filename=str(image), block_size=512)
    stuck, well = target.attach("stuck", "slow"), target.attach("well", "file")
    with Initiator(well) as guest, Initiator(stuck) as other:
        for one in (guest, other):
            one.send("connect", queue_size=1024)
            one.ready()
            one.write(0, bytes(4096))
        with disks.without_answers():
            heads = [other.send("submit", cdb=FLUSH, target=0)["head"] for _ in range(256)]
            for _ in range(5):
                verified_io(guest, 4)
                answer = guest.cdb(FLUSH)
                assert (answer["response"], answer["status"]) == (0, 0)
        for head in heads:
            answer = other.send("wait", head=head)
            assert (answer["response"], answer["status"]) == (0, 0)


def test_a_peer_with_many_deep_queues_costs_little_memory(make_target: MakeTarget) -> None:
    """64 queues of 1024 descriptors cost the peer nothing; a slot for each took 158 MiB of ours."""
    target = make_target("--cpumask", "0x1").start()
    target.rpc("bdev_null_create", name="n0", num_blocks=2048, block_size=512)
    socket = target.attach("deep", "n0")

    def mapped_mib() -> float:
        status = Path(f"/proc/{target.pid}/status").read_text().splitlines()
        (line,) = [line for line in status if line.startswith("VmData:")]
        return int(line.split()[1]) / 1024

    before = mapped_mib()
    with Initiator(socket) as guest:
        guest.send("connect", queues=64, queue_size=1024, memory=256 * MIB)
        guest.ready()
        assert mapped_mib() - before < 32


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_what_works_for_one_guest_does_not_run_where_a_reactor_is_bound(
    make_target: MakeTarget,
) -> None:
    cpu = min(os.sched_getaffinity(0))
    target = make_target("--cpumask", hex(1 << cpu)).start()
    file = target.make_file("disk", 1 << 20)
    target.rpc("bdev_aio_create", filename=str(file), name="f0", block_size=512)
    with Initiator(target.attach("vm", "f0")) as guest:
        guest.send("connect")
        guest.ready()
        assert guest.cdb(FLUSH)["status"] == 0
        cpus = {}
        for task in Path(f"/proc/{target.pid}/task").iterdir():
            with suppress(OSError):
                name = (task / "comm").read_text().strip()
                cpus[name] = os.sched_getaffinity(int(task.name))
    others = os.sched_getaffinity(0) - {cpu}
    assert cpus["reactor_0"] == {cpu}
    assert cpus["vhost vm"] == others
    # The kernel's threads that carry out what takes long.
    workers = [each for name, each in cpus.items() if name.startswith("iou-wrk")]
    assert workers
    assert all(each == others for each in workers)
