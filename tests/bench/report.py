"""Tables of points, and ratios of ours to the others'."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable

from rich.table import Table

from tests.bench.measure import Point

Key = tuple[str, str, int, str]
"""Subject, pattern, queue depth, mode."""


def grouped(points: Iterable[Point]) -> dict[Key, list[Point]]:
    """Points of the same cell, in order of first appearance; modes are never mixed."""
    cells: dict[Key, list[Point]] = defaultdict(list)
    for point in points:
        cells[point.subject, point.rw, point.depth, point.mode].append(point)
    return dict(cells)


def median(points: list[Point], value: Callable[[Point], float | None]) -> float | None:
    """The median of what is known."""
    known = [v for v in map(value, points) if v is not None]
    return statistics.median(known) if known else None


def us(ns: float | None) -> str:
    """Returns nanoseconds as microseconds."""
    return "-" if ns is None else f"{ns / 1000:.2f}"


def whole(number: float | None) -> str:
    """Returns a number without what is behind its point."""
    return "-" if number is None else f"{number:,.0f}"


def table(points: list[Point], rw: str) -> Table:
    """All cells of one pattern."""
    out = Table(title=f"4 KiB {rw}, medians", title_justify="left")
    out.add_column("target")
    for name in ("QD", "kIOPS", "mean us", "p50", "p99", "p99.9"):
        out.add_column(name, justify="right")
    for name in ("CPU ns/IO", "busy ns/IO", "guest ns/IO", "RSS MiB", "c2c ns", "cores", "n"):
        out.add_column(name, justify="right")
    cells = grouped(p for p in points if p.rw == rw)
    order = list(dict.fromkeys(key[0] for key in cells))
    last = None
    for (subject, _, depth, mode), cell in sorted(
        cells.items(), key=lambda c: (c[0][2], order.index(c[0][0]), c[0][3])
    ):
        if last is not None and depth != last:
            out.add_section()
        last = depth
        iops = median(cell, lambda p: p.iops) or 0.0
        trip = median(cell, lambda p: statistics.mean(p.c2c_ns) if p.c2c_ns else None)
        out.add_row(
            subject,
            str(depth),
            f"{iops / 1000:,.1f}",
            us(median(cell, lambda p: p.mean_ns)),
            us(median(cell, lambda p: p.p50_ns)),
            us(median(cell, lambda p: p.p99_ns)),
            us(median(cell, lambda p: p.p999_ns)),
            whole(median(cell, lambda p: p.cpu_ns_per_io)),
            whole(median(cell, lambda p: p.busy_ns_per_io)),
            whole(median(cell, lambda p: p.guest_ns_per_io)),
            f"{median(cell, lambda p: p.rss_mib) or 0:.1f}",
            whole(trip),
            mode,
            str(len(cell)),
        )
    return out


def paired(points: list[Point], ours: str, peer: str) -> dict[Key, list[tuple[Point, Point]]]:
    """Points of both that were measured in the same round, with the cores equally far apart.

    A round measures them one after the other, so what else the machine does is in both. Where the
    hypervisor moved a CPU meanwhile, or during one of them, there is no pair.
    """
    others = {(p.rw, p.depth, p.round): p for p in points if p.subject == peer}
    pairs: dict[Key, list[tuple[Point, Point]]] = defaultdict(list)
    for point in points:
        other = others.get((point.rw, point.depth, point.round))
        if point.subject == ours and other and other.mode == point.mode != "mixed":
            pairs[ours, point.rw, point.depth, point.mode].append((point, other))
    return dict(pairs)


def spread(pairs: list[tuple[Point, Point]], value: Callable[[Point], float | None]) -> str:
    """The median of the pairs' ratios, and the least and the greatest where there are several."""
    both = [(value(ours), value(peer)) for ours, peer in pairs]
    found = sorted(a / b for a, b in both if a and b)
    if not found:
        return "-"
    middle = f"{statistics.median(found):.2f}x"
    return middle if len(found) == 1 else f"{middle} {found[0]:.2f}-{found[-1]:.2f}"


def ratios(points: list[Point], pairs: list[tuple[str, str]]) -> Table:
    """Ours divided by the other's: IOPS (more is better), latencies and CPU (less is better).

    Each is the median of the ratios of pairs of the same round, with the least and the greatest.
    """
    out = Table(title="ours / peer, pairs of the same round and mode", title_justify="left")
    for name in ("ours", "peer", "pattern"):
        out.add_column(name)
    for name in ("QD", "cores", "IOPS", "mean latency", "p99", "p99.9", "CPU ns/IO", "n"):
        out.add_column(name, justify="right")
    for ours, peer in pairs:
        for (_, rw, depth, mode), cell in paired(points, ours, peer).items():
            out.add_row(
                ours,
                peer,
                rw,
                str(depth),
                mode,
                spread(cell, lambda p: p.iops),
                spread(cell, lambda p: p.mean_ns),
                spread(cell, lambda p: p.p99_ns),
                spread(cell, lambda p: p.p999_ns),
                spread(cell, lambda p: p.cpu_ns_per_io),
                str(len(cell)),
            )
    return out
