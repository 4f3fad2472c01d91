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


def _us(ns: float | None) -> str:
    return "-" if ns is None else f"{ns / 1000:.2f}"


def _whole(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}"


def table(points: list[Point], rw: str) -> Table:
    """All cells of one pattern."""
    out = Table(title=f"4 KiB {rw}, medians", title_justify="left")
    out.add_column("target")
    for name in ("QD", "kIOPS", "mean us", "p50", "p99", "p99.9"):
        out.add_column(name, justify="right")
    for name in ("CPU ns/IO", "busy ns/IO", "RSS MiB", "c2c ns", "cores", "n"):
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
            _us(median(cell, lambda p: p.mean_ns)),
            _us(median(cell, lambda p: p.p50_ns)),
            _us(median(cell, lambda p: p.p99_ns)),
            _us(median(cell, lambda p: p.p999_ns)),
            _whole(median(cell, lambda p: p.cpu_ns_per_io)),
            _whole(median(cell, lambda p: p.busy_ns_per_io)),
            f"{median(cell, lambda p: p.rss_mib) or 0:.1f}",
            _whole(trip),
            mode,
            str(len(cell)),
        )
    return out


def ratios(points: list[Point], pairs: list[tuple[str, str]]) -> Table:
    """Ours divided by the other's: IOPS (more is better), mean latency and CPU (less is better).

    Only cells that were measured with the cores equally far apart are compared.
    """
    out = Table(title="ours / peer, where the cores were equally far apart", title_justify="left")
    for name in ("ours", "peer", "pattern"):
        out.add_column(name)
    for name in ("QD", "cores", "IOPS", "mean latency", "p99", "CPU ns/IO"):
        out.add_column(name, justify="right")
    cells = grouped(points)
    for ours, peer in pairs:
        for (subject, rw, depth, mode), cell in cells.items():
            other = cells.get((peer, rw, depth, mode))
            if subject != ours or other is None or mode == "mixed":
                continue

            def ratio(
                value: Callable[[Point], float | None],
                a: list[Point] = cell,
                b: list[Point] = other,
            ) -> str:
                ours_is, peer_is = median(a, value), median(b, value)
                return f"{ours_is / peer_is:.2f}x" if ours_is and peer_is else "-"

            out.add_row(
                ours,
                peer,
                rw,
                str(depth),
                mode,
                ratio(lambda p: p.iops),
                ratio(lambda p: p.mean_ns),
                ratio(lambda p: p.p99_ns),
                ratio(lambda p: p.cpu_ns_per_io),
            )
    return out
