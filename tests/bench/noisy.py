"""`python -m tests.bench.noisy`: what a guest notices of its neighbours.

A victim reads 4 KiB at a time, one after the other, and checks every byte; a neighbour on the same
reactor does its worst. What is fair to ask for is in each table, with the ratios to it (the goal,
which `--goal` insists on: IOPS above 0.5, p99 under 2):

* A victim in RAM is compared with itself beside a neighbour that behaves (4 KiB, 32 in flight).
* A victim on a disk shares that with the neighbour, whatever the target does. So a program outside
  of the target reads a file on the same disk in the same way (4 KiB, O_DIRECT, one at a time),
  beside the same neighbour: the two take turns, several times, so that a disk whose speed changes
  does so for both, and the medians of their turns are compared.

  That is no fair race where the neighbour is bound by the CPU that it shares with the reader:
  beside the victim, which sleeps, the neighbour with 32 READs of 4 KiB in flight has made 51,000 a
  second, beside the reader 25,000. A disk that serves what it has in order then gives the victim
  one of 33.

The machine's own noise is in every row.

What is measured is the target, not how the kernel shares a CPU between two guests. On a machine
of two CPUs victim and neighbour have one between them, so the victim sleeps until it is called, as
a guest does, and then has the CPU at once: neighbours run under SCHED_IDLE. What a neighbour does
within its own process then costs the victim nothing, in any row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.support.frozen import frozen
from tests.support.target import Target, binary

MIB = 1 << 20
LEAD_S = 1.0
"""Seconds that a neighbour is at work before the victim is measured."""
SLACK_S = 120.0
LUNS = 64
"""Of the neighbour with many."""
BIG_MIB = 512
"""Size of the disks that neighbours read, unless told otherwise."""
MEASURED_S = 1.0
"""A row that is shorter is a trial, which leaves the CPU to others as they leave it."""
STORE_MIB = 65536
"""Size of the lvstore's file, which is sparse."""
THIN_MIB = 32768
"""Size of the volumes that are allocated and unmapped, a page of each cluster."""
VICTIM_MIB = {"ram": 16, "disk": 4}
"""What a victim reads. Every block is written first, one after the other: not many of them on a
slow disk."""
READ_BYTES, STRIDE = 4096, 389
"""What the reader outside reads at a time, and how many of them further on."""
TURNS = 3
"""How often a victim on a disk and the reader outside have their turn beside one neighbour."""
NOBODY, BEHAVED = "none", "4 KiB, 32 in flight"
GOAL_IOPS, GOAL_P99 = 0.5, 2.0
"""Of what is fair to ask for: more IOPS than that, a p99 under that."""


@dataclass(frozen=True)
class Row:
    """What the victim noticed. Times are in microseconds."""

    victim: str
    neighbour: str
    iops: float
    p50_us: float
    p99_us: float
    wrong: int
    """Blocks that were not what had been written."""
    outside_iops: float | None = None
    """Of the reader outside of the target, for a victim on a disk."""
    outside_p99_us: float | None = None


@dataclass
class Host:
    """One target with a reactor on one CPU, and the disks of all guests."""

    target: Target
    backing: Target
    """The process behind the disk that will not answer."""
    disk: Path
    """A directory on the disk in question."""
    big_mib: int = BIG_MIB
    """Size of the disks that neighbours read."""

    def rpc(self, method: str, **parameters: Any) -> Any:
        """Calls a method of the target."""
        return self.target.rpc(method, **parameters)

    def attach(self, controller: str, bdev: str, *, luns: int = 1) -> None:
        """Makes a controller with one disk, which it may show many times over."""
        self.rpc("vhost_create_scsi_controller", ctrlr=controller)
        for number in range(luns):
            self.target.add_lun(controller, bdev, number, shareable=True)

    def start(
        self, command: str, controller: str, *options: str, yields_to_all: bool = False
    ) -> subprocess.Popen[bytes]:
        """Starts the initiator on a controller; ``yields_to_all``: it runs under SCHED_IDLE."""
        socket = str(self.target.vhost_dir / controller)
        idle = ["chrt", "--idle", "0"] if yields_to_all else []
        return subprocess.Popen(
            [*idle, str(binary("virtlun-bench")), command, socket, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def fill(self, controller: str) -> None:
        """Writes a whole disk, so that reads are of data that is there."""
        # Whether anything is read within that time beside others' load is nobody's concern.
        options = ("--fill", "--bs", "1m", "--iodepth", "8", "--time", "0.01", "--json")
        process = self.start("run", controller, *options)
        out, err = process.communicate(timeout=SLACK_S)
        if not out or json.loads(out)["errors"]:
            raise RuntimeError(f"{controller} cannot be filled: {(out or err).decode()}")

    def prepare(self) -> None:
        """Makes the disks and the controllers."""
        image = self.disk / "store.img"
        with image.open("wb") as file:
            file.truncate(STORE_MIB * MIB)
        self.rpc("bdev_uring_create", filename=str(image), name="file", block_size=512)
        self.rpc("bdev_lvol_create_lvstore", bdev_name="file", lvs_name="lvs")
        for name, size, thin in (
            ("victim", 64, False),
            ("big", self.big_mib, False),
            ("empty", self.big_mib, True),
            ("thin", THIN_MIB, True),
            ("unmapped", THIN_MIB, True),
        ):
            self.rpc(
                "bdev_lvol_create",
                lvs_name="lvs",
                lvol_name=name,
                size_in_mib=size,
                thin_provision=thin,
            )
        for name in ("quiet", "loud", "reset"):
            blocks = self.big_mib * 2048
            self.rpc("bdev_malloc_create", name=name, num_blocks=blocks, block_size=512)
        hung = self.backing.rpc("bdev_malloc_create", num_blocks=64 * 2048, block_size=512)
        path = self.backing.rpc("virtlun_export_create", bdev_name=hung)["path"]
        self.rpc("bdev_aio_create", name="hung", filename=path, block_size=512)
        for controller, bdev in (
            *(("victim-ram", "quiet"), ("victim-disk", "lvs/victim")),
            *(("loud", "loud"), ("big", "lvs/big"), ("empty", "lvs/empty")),
            *(("thin", "lvs/thin"), ("unmapped", "lvs/unmapped")),
            *(("reset", "reset"), ("hung", "hung")),
        ):
            self.attach(controller, bdev)
        self.attach("many", "lvs/big", luns=LUNS)
        for controller in ("loud", "big", "reset"):
            self.fill(controller)

    def victim(self, name: str, neighbour: str, seconds: float) -> Row:
        """Measures the victim."""
        size = f"{VICTIM_MIB[name]}m"
        options = ("--bs", "4k", "--iodepth", "1", "--verify", "--size", size, "--sleep", "--json")
        process = self.start("run", f"victim-{name}", *options, "--time", str(seconds))
        out, err = process.communicate(timeout=SLACK_S)
        if not out:
            raise RuntimeError(f"the victim failed beside {neighbour}: {err.decode()}")
        report = json.loads(out)
        return Row(
            victim=name,
            neighbour=neighbour,
            iops=report["iops"],
            p50_us=report["p50_ns"] / 1000,
            p99_us=report["p99_ns"] / 1000,
            wrong=report["miscompares"] + report["errors"],
        )


Neighbour = Callable[[Host], contextlib.AbstractContextManager[None]]


def initiator(command: str, controller: str, *options: str) -> Neighbour:
    """A guest that goes on until it is killed."""

    @contextlib.contextmanager
    def beside(host: Host) -> Iterator[None]:
        process = host.start(command, controller, *options, "--time", "3600", yields_to_all=True)
        try:
            time.sleep(LEAD_S)
            if process.poll() is not None:
                _, err = process.communicate()
                raise RuntimeError(f"the neighbour on {controller} ended: {err.decode()}")
            yield
        finally:
            process.kill()
            process.communicate()

    return beside


def reads(controller: str, size: str, depth: int, *, luns: int = 1) -> Neighbour:
    """A guest with so many READs in flight, of so many LUNs."""
    options = ["--bs", size, "--iodepth", str(depth), "--targets", str(luns)]
    if depth > 128:
        options += ["--queue-size", "1024"]
    return initiator("run", controller, "--yield", *options)


def flood(controller: str, kind: str) -> Neighbour:
    """A guest of `virtlun-bench flood`."""
    return initiator("flood", controller, "--kind", kind)


@contextlib.contextmanager
def without_answers(host: Host) -> Iterator[None]:
    """A guest with 128 READs of a disk that does not answer."""
    assert host.backing.process is not None
    with frozen(host.backing.process.pid), reads("hung", "64k", 128)(host):
        yield


def read_outside(disk: Path, seconds: float) -> tuple[float, float]:
    """Reads a file on the disk as its victim does, without the target: IOPS, and p99 in us."""
    path, size = disk / "other.img", VICTIM_MIB["disk"] * MIB
    if not path.exists():
        path.write_bytes(os.urandom(size))
        with path.open("rb") as file:
            os.fsync(file.fileno())
    at, took = 0, []
    # A mapping is aligned as direct I/O wants it.
    with mmap.mmap(-1, READ_BYTES) as memory:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            begun = now = time.perf_counter_ns()
            while now < begun + seconds * 1e9:
                at = (at + STRIDE * READ_BYTES) % size
                if os.preadv(fd, [memory], at) != READ_BYTES:
                    raise RuntimeError(f"{path} ends before byte {at + READ_BYTES}")
                since, now = now, time.perf_counter_ns()
                took.append(now - since)
        finally:
            os.close(fd)
    took.sort()
    return len(took) / (now - begun) * 1e9, took[len(took) * 99 // 100] / 1000


def in_turn(host: Host, neighbour: str, seconds: float) -> Row:
    """The victim on the disk and the reader outside, beside the same neighbour."""
    victims, outside = [], []
    for _ in range(TURNS):
        victims.append(host.victim("disk", neighbour, seconds / 2))
        outside.append(read_outside(host.disk, seconds / 2))
    return Row(
        victim="disk",
        neighbour=neighbour,
        iops=median(row.iops for row in victims),
        p50_us=median(row.p50_us for row in victims),
        p99_us=median(row.p99_us for row in victims),
        wrong=sum(row.wrong for row in victims),
        outside_iops=median(iops for iops, _ in outside),
        outside_p99_us=median(p99 for _, p99 in outside),
    )


def alone(_: Host) -> contextlib.AbstractContextManager[None]:
    """Nobody."""
    return contextlib.nullcontext()


def neighbours(victim: str) -> dict[str, Neighbour]:
    """All neighbours of a victim by name, what is fair to ask for first."""
    behaved = "loud" if victim == "ram" else "big"
    return {
        NOBODY: alone,
        BEHAVED: reads(behaved, "4k", 32),
        "256 x 4 MiB READ, memory": reads("loud", "4m", 256),
        "256 x 4 MiB READ, volume on the disk": reads("big", "4m", 256),
        f"256 x 4 MiB READ, {LUNS} LUNs on the disk": reads("many", "4m", 256, luns=LUNS),
        "256 x 4 MiB READ, unallocated": reads("empty", "4m", 256),
        "UNMAP": flood("unmapped", "unmap"),
        "WRITE SAME of zeros": flood("loud", "write-same"),
        "VERIFY with data": flood("reset", "verify"),
        "allocation of clusters": flood("thin", "allocate"),
        "task management": flood("reset", "tmf"),
        "task management alone": flood("reset", "query"),
        "SET_MEM_TABLE": flood("reset", "mem-table"),
        "nonsense": flood("reset", "garbage"),
        "a disk that does not answer": without_answers,
    }


@contextlib.contextmanager
def host_on(disk: Path, big_mib: int) -> Iterator[Host]:
    """A target, and one behind its disk that will not answer, on scratch directories."""
    scratch = Path(tempfile.mkdtemp(prefix="vn-", dir="/tmp"))
    on_disk = Path(tempfile.mkdtemp(prefix="vn-", dir=disk))
    on_disk.chmod(0o777)
    allowed = sorted(os.sched_getaffinity(0))
    mask = ["--cpumask", hex(1 << allowed[1])] if len(allowed) > 1 else []
    for name in ("target", "backing"):
        (scratch / name).mkdir()
    host = Host(Target(scratch / "target", *mask), Target(scratch / "backing"), on_disk, big_mib)
    try:
        host.target.start()
        host.backing.start()
        if len(allowed) > 1:
            # The reactor has bound itself to its CPU: leave that to it alone.
            os.sched_setaffinity(0, set(allowed) - {allowed[1]})
        host.prepare()
        yield host
    finally:
        host.target.stop()
        host.backing.stop()
        shutil.rmtree(scratch)
        shutil.rmtree(on_disk)


def ratios(row: Row, rows: list[Row]) -> tuple[float, float] | None:
    """IOPS and p99 of a row to what is fair to ask for; None if nothing of that was measured."""
    iops, p99_us = row.outside_iops, row.outside_p99_us
    if row.victim == "ram" and row.neighbour != NOBODY:
        behaved = [r for r in rows if (r.victim, r.neighbour) == (row.victim, BEHAVED)]
        iops, p99_us = (behaved[0].iops, behaved[0].p99_us) if behaved else (None, None)
    return (row.iops / iops, row.p99_us / p99_us) if iops and p99_us else None


def missed(rows: list[Row]) -> list[str]:
    """A sentence for each row that has a neighbour and misses the goal, or cannot be judged."""
    said = []
    for row in rows:
        if row.neighbour == NOBODY:
            continue
        name, found = f"{row.victim} beside “{row.neighbour}”", ratios(row, rows)
        if found is None:
            said.append(f"{name}: nothing was measured to compare it with")
        elif not (found[0] > GOAL_IOPS and found[1] < GOAL_P99):
            said.append(
                f"{name}: of what is fair it has {found[0]:.2f} of the IOPS (the goal: more than "
                f"{GOAL_IOPS}) and {found[1]:.2f} times the p99 (the goal: less than {GOAL_P99})"
            )
    return said


def table(rows: list[Row], victim: str) -> Table:
    """The rows of one victim, with what is fair to ask for."""
    on_disk = victim == "disk"
    fair = "a reader outside of the target beside the same" if on_disk else f"“{BEHAVED}”"
    out = Table(title=f"4 KiB reads of {victim}, one at a time; against {fair}")
    out.add_column("beside")
    outside = ("IOPS outside", "p99 us outside") if on_disk else ()
    for column in ("IOPS", "p50 us", "p99 us", *outside, "IOPS ratio", "p99 ratio", "wrong"):
        out.add_column(column, justify="right")
    for row in rows:
        if row.victim != victim:
            continue
        iops, p99_us, found = row.outside_iops, row.outside_p99_us, ratios(row, rows)
        out.add_row(
            row.neighbour,
            f"{row.iops:,.0f}",
            f"{row.p50_us:,.1f}",
            f"{row.p99_us:,.1f}",
            *((f"{iops:,.0f}", f"{p99_us:,.1f}") if iops and p99_us else ()),
            *((f"{found[0]:.2f}", f"{found[1]:.2f}") if found else ("", "")),
            str(row.wrong),
        )
    return out


def in_a_session_of_its_own() -> None:
    """Gives all that is measured the CPU before everybody else, and to all of it alike.

    The kernel shares the CPUs out between sessions first (autogroup), and only those of one
    session give way to each other.
    """
    if os.getsid(0) != os.getpid():
        command = [sys.executable, "-m", "tests.bench.noisy", *sys.argv[1:]]
        sys.exit(subprocess.run(command, start_new_session=True, check=False).returncode)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-20")


def main() -> int:
    """Measures all rows; 1 if a victim read something wrong, or with ``--goal`` a row misses it."""
    parser = argparse.ArgumentParser(prog="tests.bench.noisy", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a second and a half of each row")
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of tables")
    parser.add_argument("--time", type=float, help="seconds of one row (4)")
    parser.add_argument(
        "--size-mib", type=int, default=BIG_MIB, help=f"what neighbours read ({BIG_MIB})"
    )
    parser.add_argument("--goal", action="store_true", help="fail if a row misses the goal")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="where volumes lie")
    parser.add_argument("--victim", choices=("ram", "disk"), help="only this one")
    parser.add_argument("--only", action="append", help="only this neighbour, by name")
    arguments = parser.parse_args()
    seconds = arguments.time or (1.5 if arguments.quick else 4.0)
    if seconds >= MEASURED_S:
        in_a_session_of_its_own()
    out = Console(stderr=arguments.json, width=None if sys.stdout.isatty() else 120)
    rows: list[Row] = []
    with host_on(arguments.disk, arguments.size_mib) as host:
        for victim in ("ram", "disk"):
            if arguments.victim not in (None, victim):
                continue
            for name, neighbour in neighbours(victim).items():
                if arguments.only and name not in arguments.only:
                    continue
                with neighbour(host):
                    if victim == "disk":
                        rows.append(in_turn(host, name, seconds))
                    else:
                        rows.append(host.victim(victim, name, seconds))
            if not arguments.json:
                out.print(table(rows, victim))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    complaints = missed(rows) if arguments.goal else []
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return int(bool(complaints) or any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
