"""`python -m tests.bench.rbd`: images of Ceph, by our target and by Debian's qemu-storage-daemon.

A cluster of one monitor and one OSD that keeps all in memory, on this machine. Nothing is bound to
a CPU, and the guest, virtlun-bench's, sleeps until it is called, as guests do: its CPUs are the
cluster's and the target's, too. Both go to the cluster by the same librbd, without its cache.

One image: reads and writes of 4 KiB at random, each round over all targets in turn. "CPU" is what
the target's process takes for an I/O, and "own" the part of it that is not of Ceph's threads: the
reactor's, or the iothread's. A reactor spins for up to 50 us before it sleeps, or, in a row of its
own, not at all.

64 images, each of one guest: all in one target with one client of the cluster, in one target with
more clients, and in a process of QEMU's each. A kind is started, measured and ended before the next
one is. "RSS" is the processes' memory (Pss, proc_pid_smaps(5), without what is shared with guests),
"IOPS" the sum of all guests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pydataplane.client import Client
from tests.bench.machine import machine
from tests.bench.measure import Point, measure
from tests.bench.subjects import BLOCK_BYTES, Bench, rbd_node, running, spawn, wait_for
from tests.support.ceph import POOL, Ceph, cluster, lacks
from tests.support.target import binary

OURS, SCSI, NO_SPIN, PEER = NAMES = (
    "virtlun blk",
    "virtlun scsi",
    "virtlun blk, --spin-us 0",
    "qsd",
)
DEPTHS = (1, 8, 32)
GUESTS = 64
GUEST_DEPTHS = (1,)
CLIENTS = (1, 4, GUESTS)
"""Clients of the cluster that a target has for its images."""
IMAGE_MIB = 256
GUEST_MIB = 4
"""Of each of many images."""
WARMUP_S = 2.0
SLACK_S = 120.0
OWN_THREADS = ("reactor", "qemu-storage", "IO ")
"""What the threads that serve guests are called, at its beginning; QEMU names none of its own."""


@dataclass(frozen=True)
class One:
    """What was measured of one image."""

    point: Point
    own: float
    """The part of the process's CPU time that is of threads that serve guests, from 0 to 1."""


@dataclass(frozen=True)
class Many:
    """What was measured of all guests at a time."""

    kind: str
    rw: str
    depth: int
    iops: float
    mean_ns: float
    """Of the median guest, as p99."""
    p99_ns: float
    cpu_ns_per_io: float
    threads: int
    rss_mib: float


def cpu_ns_of(pid: int) -> dict[str, int]:
    """Returns the CPU time of a process's threads so far, nanoseconds, by their names."""
    spent: dict[str, int] = defaultdict(int)
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            name = (task / "comm").read_text().strip()
            spent[name] += int((task / "schedstat").read_text().split()[0])
    return spent


def own_part(before: dict[str, int], after: dict[str, int]) -> float:
    """Returns which part of the CPU time between two looks is of threads that serve guests."""
    taken = {name: ns - before.get(name, 0) for name, ns in after.items()}
    own = sum(ns for name, ns in taken.items() if name.startswith(OWN_THREADS))
    return own / max(sum(taken.values()), 1)


def one_image(ceph: Ceph, scratch: Path, arguments: argparse.Namespace) -> list[One]:
    """Measures all targets on an image each."""
    bench = Bench(scratch, scratch, IMAGE_MIB, None)
    image = {name: f"{POOL}/{ceph.image(f'i{n}', IMAGE_MIB)}" for n, name in enumerate(NAMES)}
    made = [
        lambda: bench.ours_rbd("blk", ceph.conf, image[OURS], blk=True),
        lambda: bench.ours_rbd("scsi", ceph.conf, image[SCSI], blk=False),
        lambda: bench.ours_rbd(
            "blk, --spin-us 0", ceph.conf, image[NO_SPIN], "--spin-us", "0", blk=True
        ),
        lambda: bench.qsd_rbd(ceph.conf, image[PEER]),
    ]
    found = []
    with running(made) as subjects:
        for _ in range(arguments.rounds):
            for rw in arguments.rw:
                for depth in DEPTHS:
                    for subject in subjects:
                        before = cpu_ns_of(subject.pid)
                        point = measure(subject, rw, depth, arguments.time, None, "--sleep")
                        found.append(One(point, own_part(before, cpu_ns_of(subject.pid))))
    return found


@dataclass(frozen=True)
class Serving:
    """Processes that serve many guests."""

    processes: list[subprocess.Popen[bytes]]
    sockets: list[Path]

    def cpu_ns(self) -> int:
        """Returns the CPU time of all so far."""
        return sum(sum(cpu_ns_of(process.pid).values()) for process in self.processes)

    def threads(self) -> int:
        """Returns how many threads they have."""
        return sum(len(list(Path(f"/proc/{p.pid}/task").iterdir())) for p in self.processes)

    def rss_mib(self) -> float:
        """Returns their memory, without what is shared with guests."""
        return sum(_pss_kib(process.pid) for process in self.processes) / 1024


def _pss_kib(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines()[1:])
    return sum(int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_File"))


@contextlib.contextmanager
def ended_after(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Ends processes in order at the end of a block."""
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(timeout=SLACK_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def one_target(ceph: Ceph, images: list[str], clients: int, scratch: Path) -> Iterator[Serving]:
    """Our target with all images, which share so many clients of the cluster."""
    directory = scratch / "one"
    (directory / "vhost").mkdir(parents=True)
    socket, log = directory / "rpc.sock", directory / "log"
    command = [
        *(str(binary()), "--rbd", "--rpc-socket", str(socket)),
        *("--vhost-dir", str(directory / "vhost"), "--state-dir", str(directory / "state")),
    ]
    process = spawn(command, log, None)
    with ended_after([process]):
        wait_for(socket, process, log)
        client = Client(socket)
        for number in range(clients):
            name = f"ceph{number}"
            client.call("bdev_rbd_register_cluster", name=name, config_file=str(ceph.conf))
        for number, image in enumerate(images):
            client.call(
                "bdev_rbd_create",
                name=image,
                cluster_name=f"ceph{number % clients}",
                pool_name=POOL,
                rbd_name=image,
                block_size=BLOCK_BYTES,
            )
            client.call("vhost_create_blk_controller", ctrlr=image, dev_name=image)
        yield Serving([process], [directory / "vhost" / image for image in images])
    shutil.rmtree(directory)


@contextlib.contextmanager
def many_daemons(ceph: Ceph, images: list[str], scratch: Path) -> Iterator[Serving]:
    """A qemu-storage-daemon for each image, as each VM's own QEMU would have it."""
    directory = scratch / "many"
    directory.mkdir()
    processes: list[subprocess.Popen[bytes]] = []
    sockets = [directory / image for image in images]
    with ended_after(processes):
        for image, socket in zip(images, sockets, strict=True):
            node = f"{rbd_node(ceph.conf, f'{POOL}/{image}')},node-name=disk"
            export = (
                f"id=e,node-name=disk,writable=on,iothread=io,addr.type=unix,addr.path={socket}"
            )
            command = ["qemu-storage-daemon", "--blockdev", node, "--object", "iothread,id=io"]
            log = directory / f"{image}.log"
            processes.append(spawn([*command, "--export", f"vhost-user-blk,{export}"], log, None))
        for image, socket, process in zip(images, sockets, processes, strict=True):
            wait_for(socket, process, directory / f"{image}.log")
        yield Serving(processes, sockets)
    shutil.rmtree(directory)


def _guest(socket: Path, *words: str) -> subprocess.Popen[bytes]:
    size = ("--size", f"{GUEST_MIB}m")
    how = ("--blk", "--json")
    command = [str(binary("virtlun-bench")), "run", str(socket), *how, *size, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _reports(guests: Iterable[subprocess.Popen[bytes]]) -> list[dict[str, Any]]:
    found = []
    for guest in guests:
        out, err = guest.communicate(timeout=SLACK_S)
        if guest.returncode != 0:
            raise SystemExit(f"{guest.args!r}: {err.decode()}{out.decode()}")
        found.append(json.loads(out))
    return found


def fill(serving: Serving) -> None:
    """Has each guest write what it will read."""
    words = ("--fill", "--bs", "1m", "--iodepth", "1", "--time", "0.5")
    for socket in serving.sockets:
        _reports([_guest(socket, *words)])


def all_at_a_time(kind: str, serving: Serving, rw: str, depth: int, seconds: float) -> Many:
    """Has all guests work at a time, and returns what came of it."""
    words = ("--sleep", "--rw", rw, "--iodepth", str(depth))
    # The last one begins while the first warms up.
    times = ("--warmup", str(WARMUP_S), "--time", str(seconds))
    guests = [_guest(socket, *words, *times) for socket in serving.sockets]
    time.sleep(WARMUP_S)
    before, begun = serving.cpu_ns(), time.monotonic()
    time.sleep(seconds / 2)
    spent, took = serving.cpu_ns() - before, time.monotonic() - begun
    threads, rss_mib = serving.threads(), serving.rss_mib()
    reports = _reports(guests)
    iops = sum(each["iops"] for each in reports)
    return Many(
        kind=kind,
        rw=rw,
        depth=depth,
        iops=iops,
        mean_ns=statistics.median(each["mean_ns"] for each in reports),
        p99_ns=statistics.median(each["p99_ns"] for each in reports),
        cpu_ns_per_io=spent / (iops * took),
        threads=threads,
        rss_mib=rss_mib,
    )


def many_images(ceph: Ceph, scratch: Path, arguments: argparse.Namespace) -> list[Many]:
    """Measures all kinds on the same images."""
    images = [ceph.image(f"vm-{n}", GUEST_MIB) for n in range(GUESTS)]
    kinds: dict[str, Callable[[], contextlib.AbstractContextManager[Serving]]] = {
        _with(clients): lambda clients=clients: one_target(ceph, images, clients, scratch)  # type: ignore[misc]
        for clients in CLIENTS
    }
    kinds[f"{GUESTS} qsd"] = lambda: many_daemons(ceph, images, scratch)
    found: list[Many] = []
    for number in range(arguments.rounds):
        for kind, start in kinds.items():
            with start() as serving:
                if number == 0 and not found:
                    fill(serving)
                for rw in arguments.rw:
                    for depth in GUEST_DEPTHS:
                        found.append(all_at_a_time(kind, serving, rw, depth, arguments.time * 2))
    return found


def _with(clients: int) -> str:
    return f"virtlun, {clients} client{'s' * (clients > 1)}"


def median(values: Iterable[float | None]) -> float:
    """The median of what is known."""
    return statistics.median(value for value in values if value is not None)


def cells(found: list[One]) -> dict[tuple[str, int, str], list[One]]:
    """Returns what was measured of each pattern, depth and target."""
    by: dict[tuple[str, int, str], list[One]] = defaultdict(list)
    for each in found:
        by[each.point.rw, each.point.depth, each.point.subject].append(each)
    return by


def missed(found: list[One]) -> list[str]:
    """A sentence for each pattern and depth at which ours is behind.

    It is to have no fewer I/Os a second than the peer with one in flight, and more with eight.
    """
    by, said = cells(found), []
    for (rw, depth, name), cell in by.items():
        if name != OURS:
            continue
        ours = median(each.point.iops for each in cell)
        peer = median(each.point.iops for each in by[rw, depth, PEER])
        if ours < peer or (depth > 1 and ours == peer):
            said.append(f"{rw} at QD{depth}: {ours:,.0f} I/Os a second, and the peer {peer:,.0f}")
    return said


def table_of_one(found: list[One]) -> Table:
    """Returns the table of one image."""
    out = Table(title=f"one image, 4 KiB, medians of {len(found)} points", title_justify="left")
    for name in ("pattern", "QD", "target"):
        out.add_column(name)
    for name in ("IOPS", "of the peer's", "mean us", "p99 us", "CPU us", "own us", "RSS MiB"):
        out.add_column(name, justify="right")
    by = cells(found)
    for (rw, depth, name), cell in sorted(by.items(), key=lambda item: item[0][:2]):
        peer = median(each.point.iops for each in by[rw, depth, PEER])
        iops = median(each.point.iops for each in cell)
        out.add_row(
            *(rw, str(depth), name, f"{iops:,.0f}", f"{iops / peer:.2f}"),
            f"{median(each.point.mean_ns for each in cell) / 1e3:,.0f}",
            f"{median(each.point.p99_ns for each in cell) / 1e3:,.0f}",
            f"{median(each.point.cpu_ns_per_io for each in cell) / 1e3:,.0f}",
            f"{median((each.point.cpu_ns_per_io or 0) * each.own for each in cell) / 1e3:,.0f}",
            f"{median(each.point.rss_mib for each in cell):,.0f}",
        )
    return out


def table_of_many(found: list[Many]) -> Table:
    """Returns the table of many images."""
    out = Table(title=f"{GUESTS} images, a guest each, 4 KiB, medians", title_justify="left")
    for name in ("pattern", "QD each", "by"):
        out.add_column(name)
    for name in ("IOPS in sum", "mean us", "p99 us", "CPU us", "threads", "RSS MiB"):
        out.add_column(name, justify="right")
    by: dict[tuple[str, int, str], list[Many]] = defaultdict(list)
    for each in found:
        by[each.rw, each.depth, each.kind].append(each)
    for (rw, depth, kind), cell in sorted(by.items(), key=lambda item: item[0][:2]):
        out.add_row(
            *(rw, str(depth), kind, f"{median(each.iops for each in cell):,.0f}"),
            f"{median(each.mean_ns for each in cell) / 1e3:,.0f}",
            f"{median(each.p99_ns for each in cell) / 1e3:,.0f}",
            f"{median(each.cpu_ns_per_io for each in cell) / 1e3:,.0f}",
            f"{median(each.threads for each in cell):,.0f}",
            f"{median(each.rss_mib for each in cell):,.0f}",
        )
    return out


def main() -> int:
    """Measures and prints the tables; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.rbd", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="one short round of random reads")
    parser.add_argument("--rounds", type=int, help="rounds over all points (5)")
    parser.add_argument("--time", type=float, help="seconds of one point (2)")
    parser.add_argument("--rw", action="append", help="pattern (randread and randwrite)")
    parser.add_argument("--only", choices=("one", "many"), help="one of both tables")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the points as JSON, too")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 5)
    arguments.time = arguments.time or (1.0 if arguments.quick else 2.0)
    arguments.rw = arguments.rw or (["randread"] if arguments.quick else ["randread", "randwrite"])
    if missing := lacks():
        raise SystemExit(f"not installed: {', '.join(missing)}")
    console, where = Console(width=None if sys.stdout.isatty() else 160), machine()
    scratch = Path(tempfile.mkdtemp(prefix="vbench-", dir="/tmp"))
    one: list[One] = []
    many: list[Many] = []
    try:
        with cluster(in_memory=True) as ceph:
            for daemon in ("mon.a", "osd.0"):
                # As targets and guests, so that who else uses the machine takes nothing from it.
                with contextlib.suppress(OSError):
                    Path(f"/proc/{ceph.pid(daemon)}/autogroup").write_text("-20")
            if arguments.only != "many":
                one = one_image(ceph, scratch, arguments)
            if arguments.only != "one":
                many = many_images(ceph, scratch, arguments)
    finally:
        shutil.rmtree(scratch)
    if arguments.save:
        points = [{**each.point.as_json(), "own": each.own} for each in one]
        told = {"machine": where, "one": points, "many": [asdict(each) for each in many]}
        arguments.save.write_text(json.dumps(told, indent=1) + "\n")
    load = f"load {where['load'][0]:.1f} before and {os.getloadavg()[0]:.1f} after"
    console.print(f"{where['cpu']}, {where['cpus']} CPUs, Linux {where['kernel']}, {load}")
    if one:
        console.print(table_of_one(one))
        console.print("\n".join(missed(one)) or "nowhere behind the peer")
    if many:
        console.print(table_of_many(many))
    return 0


if __name__ == "__main__":
    sys.exit(main())
