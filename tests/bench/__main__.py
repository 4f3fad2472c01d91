"""`python -m tests.bench`: our target beside Debian's qemu-storage-daemon, with the same initiator.

Or, with `--spdk`, beside SPDK's vhost target, of which Debian has no package.

Each point is measured in turn over all targets, round after round, while the others are frozen,
and carries the cache-line round trip of the two cores: a hypervisor that moves virtual CPUs
changes results by up to three times, so only points of the same mode are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from tests.bench.machine import machine, revision
from tests.bench.measure import Point, measure
from tests.bench.report import ratios, table
from tests.bench.subjects import Bench, Subject, check_spdk, huge_pages, running
from tests.support.target import binary

DEPTHS = (1, 8, 32, 128)
PAIRS = [
    ("virtlun null", "qsd null"),
    ("virtlun null poll", "qsd null poll"),
    ("virtlun file", "qsd file threads"),
    ("virtlun file", "qsd file io_uring"),
    ("virtlun file poll", "qsd file io_uring poll"),
    ("virtlun blk null poll", "qsd null poll"),
    ("virtlun blk file poll", "qsd file io_uring poll"),
]
"""QEMU's daemon has virtio-blk alone, so ours is beside it both as LUN and as virtio-blk disk."""
SPDK_PAIRS = [
    ("virtlun null poll", "spdk null"),
    ("virtlun blk null poll", "spdk blk null"),
    ("virtlun malloc poll", "spdk malloc"),
    ("virtlun blk malloc poll", "spdk blk malloc"),
    ("virtlun lvol poll", "spdk lvol"),
    ("virtlun file poll", "spdk file aio"),
    ("virtlun file poll", "spdk file uring"),
]


OTHER = "other"
"""What another build of our target is called."""


OURS: dict[str, Callable[[Bench], Subject]] = {
    "null poll": lambda bench: bench.ours_null(poll=True),
    "null": lambda bench: bench.ours_null(poll=False),
    "blk null poll": lambda bench: bench.ours_null(poll=True, blk=True),
    "malloc poll": Bench.ours_malloc,
    "malloc": lambda bench: bench.ours_malloc(poll=False),
    "blk malloc poll": lambda bench: bench.ours_malloc(blk=True),
    "lvol poll": Bench.ours_lvol,
    "file poll": lambda bench: bench.ours_file(poll=True),
    "file": lambda bench: bench.ours_file(poll=False),
    "blk file poll": lambda bench: bench.ours_file(poll=True, blk=True),
    "slow": Bench.ours_slow,
}
"""What can be started of our target, by name without its label."""
HUGE: dict[str, Callable[[Bench], Subject]] = {
    "null poll huge": lambda bench: bench.ours_null(poll=True, huge=True),
    "malloc poll huge": lambda bench: bench.ours_malloc(huge=True),
    "file poll huge": lambda bench: bench.ours_file(poll=True, huge=True),
}
"""The same with guests whose memory is in huge pages, where the host has some."""
HUGE_PAIRS = [(f"virtlun {name.removesuffix(' huge')}", f"virtlun {name}") for name in HUGE]


def subjects_of(
    bench: Bench, against: Path | None, wanted: list[str]
) -> list[Callable[[], Subject]]:
    """What to start, by name; all that are possible here if `wanted` is empty.

    `against` is another build of our target, which is the only peer then.
    """
    makers: dict[str, Callable[[], Subject]] = {}
    builds = [bench, *([replace(bench, program=against, label=OTHER)] if against else [])]
    ours = OURS | (HUGE if huge_pages() and bench.spdk is None else {})
    for name, make in ours.items():
        makers |= {f"{build.label} {name}": partial(make, build) for build in builds}
    if bench.spdk is not None:
        check_spdk(bench.spdk)
        makers |= {
            "spdk null": bench.spdk_null,
            "spdk blk null": lambda: bench.spdk_null(blk=True),
            "spdk malloc": bench.spdk_malloc,
            "spdk blk malloc": lambda: bench.spdk_malloc(blk=True),
            "spdk lvol": bench.spdk_lvol,
            "spdk file aio": lambda: bench.spdk_file("bdev_aio_create"),
            "spdk file uring": lambda: bench.spdk_file("bdev_uring_create"),
        }
    elif against is None and shutil.which("qemu-storage-daemon"):
        makers |= {
            "qsd null poll": lambda: bench.qsd_null(poll=True),
            "qsd null": lambda: bench.qsd_null(poll=False),
            "qsd file threads": lambda: bench.qsd_file("threads", poll=False),
            "qsd file io_uring": lambda: bench.qsd_file("io_uring", poll=False),
            "qsd file io_uring poll": lambda: bench.qsd_file("io_uring", poll=True),
        }
    unknown = [name for name in wanted if name not in makers]
    if unknown:
        raise SystemExit(f"no target {', '.join(unknown)}; there are: {', '.join(makers)}")
    return [make for name, make in makers.items() if not wanted or name in wanted]


def run(arguments: argparse.Namespace, out: Console) -> list[Point]:
    """Measures all points, interleaved."""
    scratch = Path(tempfile.mkdtemp(prefix="vbench-", dir="/tmp"))
    memory = Path(tempfile.mkdtemp(prefix="vbench-", dir="/dev/shm"))
    allowed = sorted(os.sched_getaffinity(0))
    cpus = (allowed[0], allowed[1]) if len(allowed) > 1 else None
    cpu = cpus[1] if cpus else None
    bench = Bench(scratch, memory, arguments.size_mib, cpu, spdk=arguments.spdk)
    points: list[Point] = []
    try:
        with (
            running(subjects_of(bench, arguments.against, arguments.only)) as subjects,
            Progress(console=out, transient=True) as progress,
        ):
            total = arguments.rounds * len(arguments.rw) * len(arguments.depth) * len(subjects)
            task = progress.add_task("measuring", total=total)
            for number in range(arguments.rounds):
                for rw in arguments.rw:
                    for depth in arguments.depth:
                        for subject in subjects:
                            progress.update(task, description=f"{subject.name}, {rw}, QD{depth}")
                            point = measure(subject, rw, depth, arguments.time, cpus)
                            points.append(replace(point, round=number))
                            progress.advance(task)
    finally:
        shutil.rmtree(scratch)
        shutil.rmtree(memory)
    return points


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round of random reads")
    parser.add_argument("--json", action="store_true", help="points as JSON instead of tables")
    parser.add_argument("--rounds", type=int, help="rounds over all points (3)")
    parser.add_argument("--time", type=float, help="seconds of one point (1)")
    parser.add_argument("--size-mib", type=int, default=512, help="size of the disks in MiB (512)")
    parser.add_argument("--rw", action="append", help="pattern (randread and randwrite)")
    parser.add_argument("--depth", type=int, action="append", help="I/Os in flight (1, 8, 32, 128)")
    parser.add_argument("--only", action="append", default=[], help="one target by name")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="PROGRAM",
        help="the virtlun-target of another checkout instead of QEMU's daemon",
    )
    parser.add_argument(
        "--spdk",
        type=Path,
        metavar="DIRECTORY",
        help="SPDK, built there, instead of QEMU's daemon; needs huge pages (vm.nr_hugepages)",
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the points as JSON, too")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 3)
    arguments.time = arguments.time or (0.5 if arguments.quick else 1.0)
    arguments.rw = arguments.rw or (["randread"] if arguments.quick else ["randread", "randwrite"])
    arguments.depth = arguments.depth or list(DEPTHS)
    out = Console(stderr=arguments.json, width=None if sys.stdout.isatty() else 160)
    where = machine()
    where["command"] = " ".join(["python -m tests.bench", *(each for each in sys.argv[1:])])
    where["date"] = datetime.now(UTC).date().isoformat()
    builds = {"virtlun": binary(), OTHER: arguments.against, "spdk": arguments.spdk}
    where["builds"] = {name: revision(path) for name, path in builds.items() if path}
    points = run(arguments, out)
    told = json.dumps({"machine": where, "points": [p.as_json() for p in points]}, indent=1)
    if arguments.save:
        arguments.save.parent.mkdir(parents=True, exist_ok=True)
        arguments.save.write_text(told + "\n")
    if arguments.json:
        print(told)
        return 0
    load = where["load"][0]
    out.print(f"{where['cpu']}, {where['cpus']} CPUs, Linux {where['kernel']}, load {load:.1f}")
    for rw in arguments.rw:
        out.print(table(points, rw))
    pairs = SPDK_PAIRS if arguments.spdk else PAIRS
    if arguments.against:
        pairs = [(f"virtlun {name}", f"{OTHER} {name}") for name in OURS]
    out.print(ratios(points, pairs + HUGE_PAIRS))
    if not huge_pages():
        out.print("no huge pages (vm.nr_hugepages): what guests without them lose is not measured")
    if pairs is PAIRS and not shutil.which("qemu-storage-daemon"):
        out.print("qemu-storage-daemon is not installed (package qemu-system-common): no peer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
