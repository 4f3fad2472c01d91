"""`python -m tests.bench.page FILE...`: the documentation's page of the benchmark's tables.

Each FILE is what `python -m tests.bench --save FILE` kept; points of several are put together
where the machine is the same; its builds are all named. Rounds stay apart, so that a ratio is
still of two points of one round. Near and far, where the hypervisor had the two CPUs, have tables
of their own; points during which it moved one are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench.__main__ import HUGE_PAIRS, PAIRS
from tests.bench.measure import NEAR_NS, Point
from tests.bench.report import grouped, median, paired, spread, us, whole

PAGE = Path(__file__).parents[2] / "docs/pages/reference/bench.md"
MODES = {
    "near": "Two CPUs near each other",
    "far": "Two CPUs far from each other",
}
PATTERNS = {"randread": "reads", "randwrite": "writes"}
SAME = ("cpu", "cpus", "memory_mib", "hypervisor", "kernel")
"""What must be the same of all files."""
HEAD = """\
<!-- Made by `python -m tests.bench.page FILE...` of what `--save` kept; do not edit. -->

# The benchmark's tables

4 KiB at random, on one queue, by the same initiator (`virtlun-bench`, a guest that looks for what
has ended and never sleeps) on one CPU; the target is on the other, in turn, round after round,
while the others are frozen. Medians of `n` points. *CPU* is what the target's threads take for an
I/O, spinning included; *busy* the time in which its reactor did something (ours only); *guest*
what the initiator's own loop takes for one: where it takes longer than the target, more than is
shown cannot be seen. *poll* are targets that never sleep; QEMU's daemon spins for up to 1 ms
there. Its disks are virtio-blk's; ours are LUNs of virtio-scsi, but those with *blk*. *file* is
one in memory (tmpfs), *slow* a disk in memory that answers after 300 µs.
"""
BESIDE = """\
Ours divided by the peer's, pairs of the same round: median, least and greatest. More is better of
IOPS, less of the others.
"""


class DifferentError(Exception):
    """Why files cannot be put together, in one sentence."""


def together(files: list[tuple[str, dict[str, Any]]]) -> tuple[dict[str, Any], list[Point]]:
    """Returns the machine and the points of all files, given by name and content.

    Rounds have other numbers in each of them.
    """
    (_, first), *_ = files
    points: list[Point] = []
    after = 0
    for name, told in files:
        for what in SAME:
            if told["machine"].get(what) != first["machine"].get(what):
                raise DifferentError(f"{name}: {what} is not that of {files[0][0]}")
        found = [Point.of_json(each) for each in told["points"]]
        points += [replace(point, round=point.round + after) for point in found]
        after += 1 + max((point.round for point in found), default=-1)
    dates = sorted({told["machine"]["date"] for _, told in files})
    load = max(told["machine"]["load"][0] for _, told in files)
    builds: dict[str, list[str]] = {}
    for _, told in files:
        for program, commit in told["machine"]["builds"].items():
            builds.setdefault(program, []).append(commit)
    named = [f"{program} {', '.join(sorted(set(of)))}" for program, of in builds.items()]
    return {**first["machine"], "builds": named, "dates": dates, "most_load": load}, points


def _table(head: tuple[str, ...], left: int, rows: list[tuple[str, ...]]) -> str:
    """Returns a table; so many columns are aligned to the left."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, tuple(rule), *rows))


def figures(points: list[Point], rw: str, mode: str) -> str:
    """Returns the table of one pattern and mode; empty where nothing was measured."""
    cells = {key: cell for key, cell in grouped(points).items() if key[1] == rw and key[3] == mode}
    order = list(dict.fromkeys(point.subject for point in points))
    rows = []
    for (subject, _, depth, _), cell in sorted(
        cells.items(), key=lambda item: (item[0][2], order.index(item[0][0]))
    ):
        times: list[Callable[[Point], float]] = [
            lambda p: p.mean_ns,
            lambda p: p.p99_ns,
            lambda p: p.p999_ns,
        ]
        costs: list[Callable[[Point], float | None]] = [
            lambda p: p.cpu_ns_per_io,
            lambda p: p.busy_ns_per_io,
            lambda p: p.guest_ns_per_io,
        ]
        rows.append(
            (
                *(str(depth), subject),
                f"{(median(cell, lambda p: p.iops) or 0) / 1000:,.1f}",
                *(us(median(cell, value)) for value in times),
                *(whole(median(cell, value)) for value in costs),
                str(len(cell)),
            )
        )
    if not rows:
        return ""
    head = ("QD", "target", "kIOPS", "mean µs", "p99 µs", "p99.9 µs")
    return _table((*head, "CPU ns", "busy ns", "guest ns", "n"), 2, rows)


def ratios(points: list[Point], pairs: list[tuple[str, str]], rw: str, mode: str) -> str:
    """Returns ours divided by the other's, of one pattern and mode; empty where there are no pairs.

    Each is the median of the ratios of pairs of the same round, with the least and the greatest.
    """
    rows = []
    for ours, peer in pairs:
        for (_, pattern, depth, where), cell in sorted(paired(points, ours, peer).items()):
            if (pattern, where) == (rw, mode):
                of: list[Callable[[Point], float | None]] = [
                    lambda p: p.iops,
                    lambda p: p.mean_ns,
                    lambda p: p.p99_ns,
                    lambda p: p.p999_ns,
                    lambda p: p.cpu_ns_per_io,
                ]
                rates = (spread(cell, value).replace("x", "") for value in of)
                rows.append((ours, peer, str(depth), *rates, str(len(cell))))
    head = ("ours", "peer", "QD", "IOPS", "mean", "p99", "p99.9", "CPU", "n")
    return _table(head, 2, rows) if rows else ""


def page(machine: dict[str, Any], points: list[Point]) -> str:
    """Returns the page."""
    described = (
        f"{machine['cpu']}, {machine['cpus']} CPUs, {machine['memory_mib']:,} MiB, hypervisor "
        f"{machine['hypervisor']}, Linux {machine['kernel']}; "
        f"{', '.join(machine['builds'])}; "
        f"{', '.join(machine['dates'])}; "
        f"a load average of {machine['most_load']:.1f} at most when a run began, which is of the "
        "minute before."
    )
    out = [HEAD, f"Measured on: {described}\n"]
    for mode, title in MODES.items():
        way = f"{'less than' if mode == 'near' else 'at least'} {NEAR_NS:.0f} ns"
        out.append(f"## {title}\n\nA cache line's way there and back is {way}.\n")
        if not any(point.mode == mode for point in points):
            out.append("The hypervisor had them nowhere so in these runs.\n")
        for rw, what in PATTERNS.items():
            if not (table := figures(points, rw, mode)):
                continue
            out.append(f"### {what.capitalize()}, {mode}\n\n{table}\n")
            if beside := ratios(points, PAIRS, rw, mode):
                out.append(f"{BESIDE}\n{beside}\n")
            if huge := ratios(points, HUGE_PAIRS, rw, mode):
                out.append(f"Without huge pages, divided by with them.\n\n{huge}\n")
    moved = sum(point.mode not in MODES for point in points)
    out.append(f"{moved} of {len(points)} points are left out: a CPU was moved meanwhile.")
    return "\n".join(out) + "\n"


def main() -> int:
    """Writes the page."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.page", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("file", type=Path, nargs="+", help="what --save has kept")
    arguments = parser.parse_args()
    try:
        told = together([(str(file), json.loads(file.read_text())) for file in arguments.file])
    except DifferentError as error:
        print(error, file=sys.stderr)
        return 1
    PAGE.write_text(page(*told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
