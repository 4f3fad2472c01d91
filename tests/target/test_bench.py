"""`make bench` works: that its numbers are good is not asserted, only that they are numbers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.bench.machine import machine, revision
from tests.bench.measure import Point
from tests.bench.page import DifferentError, page, together
from tests.bench.report import grouped, paired, ratios, spread, table
from tests.support.target import ROOT, binary


def point(
    subject: str, iops: float, c2c: tuple[float, float] | None, number: int = 0, tail: float = 3.0
) -> Point:
    return Point(
        subject=subject,
        rw="randread",
        depth=8,
        iops=iops,
        mean_ns=1e9 / iops,
        p50_ns=1.0,
        p99_ns=2.0,
        p999_ns=tail,
        cpu_ns_per_io=100.0,
        busy_ns_per_io=None,
        rss_mib=5.0,
        c2c_ns=c2c,
        round=number,
    )


def rendered(of: object) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(of)
    return capture.get()


def test_points_of_different_modes_are_never_compared() -> None:
    near, far, mixed = (60.0, 61.0), (300.0, 330.0), (60.0, 330.0)
    points = [
        point("ours", 200.0, near),
        point("ours", 400.0, near, 1),
        point("ours", 50.0, far, 2),
        point("ours", 70.0, mixed, 3),
        point("peer", 100.0, near),
        point("peer", 100.0, near, 2),
        point("peer", 70.0, mixed, 3),
        point("ours", 1.0, None),
    ]
    modes = ["near", "near", "far", "mixed", "near", "near", "mixed", "?"]
    assert [p.mode for p in points] == modes
    assert len(grouped(points)) == 6
    assert list(paired(points, "ours", "peer").values()) == [[(points[0], points[4])]]
    text = rendered(ratios(points, [("ours", "peer"), ("ours", "absent")]))
    assert text.count("│ ours") == 1, "the one pair that there is"
    assert "2.00x" in text
    assert rendered(table(points, "randread")).count("near") == 2


def test_a_ratio_is_of_pairs_of_the_same_round() -> None:
    """The machine became half as fast after the first round: medians of all would say 1.17."""
    near = (60.0, 61.0)
    both = [(200.0, 100.0), (60.0, 50.0), (70.0, 50.0)]
    points = [
        each
        for number, (ours, peer) in enumerate(both)
        for each in (
            point("ours", ours, near, number, tail=9.0),
            point("peer", peer, near, number, tail=3.0),
        )
    ]
    (cell,) = paired(points, "ours", "peer").values()
    assert spread(cell, lambda p: p.iops) == "1.40x 1.20-2.00"
    assert spread(cell, lambda p: p.busy_ns_per_io) == "-"
    assert spread(cell[:1], lambda p: p.iops) == "2.00x"
    assert "3.00x 3.00-3.00" in rendered(ratios(points, [("ours", "peer")])), "p99.9"


def kept(date: str, points: list[Point], **of: object) -> dict[str, Any]:
    """What --save keeps."""
    where = {
        **dict.fromkeys(("cpu", "hypervisor", "kernel"), "some"),
        **{"cpus": 2, "memory_mib": 1024, "builds": {"virtlun": "abc"}, "load": [0.5, 1, 1]},
        **{"date": date, **of},
    }
    told = {"machine": where, "points": [point.as_json() for point in points]}
    again: dict[str, Any] = json.loads(json.dumps(told))
    return again


def test_the_page_has_near_and_far_apart_and_pairs_of_one_round_of_one_file() -> None:
    near, far, mixed = (60.0, 61.0), (300.0, 330.0), (60.0, 330.0)
    ours, peer = "virtlun null poll", "qsd null poll"
    first = [point(ours, 3000.0, near), point(peer, 1000.0, near), point(ours, 1.0, mixed, 1)]
    # Without its peer; in the other file there is one of a round of the same number.
    first.append(point(ours, 8000.0, far, 1))
    second = [point(ours, 4000.0, near), point(peer, 2000.0, near), point(peer, 2000.0, far, 1)]
    both = [
        ("a", kept("2026-01-02", first)),
        ("b", kept("2026-01-01", second, builds={"virtlun": "def"})),
    ]
    where, points = together(both)
    assert [p.round for p in points] == [0, 0, 1, 1, 2, 2, 3]
    text = page(where, points)
    assert "virtlun abc, def; 2026-01-01, 2026-01-02; a load average of 0.5 at most" in text
    rows = [line for line in text.splitlines() if line.startswith(("| 8 ", f"| {ours}"))]
    assert [[cell.strip() for cell in row.split("|")[1:4]] for row in rows] == [
        ["8", ours, "3.5"],
        ["8", peer, "1.5"],
        [ours, peer, "8"],
        ["8", ours, "8.0"],
        ["8", peer, "2.0"],
    ]
    assert "2.50 2.00-3.00" in rows[2]
    assert "1 of 7 points are left out" in text
    other = ("c", kept("2026-01-01", second, kernel="another"))
    with pytest.raises(DifferentError, match="c: kernel is not that of a"):
        together([*both, other])


def run_bench(*options: str) -> subprocess.CompletedProcess[str]:
    """Runs the benchmark."""
    return subprocess.run(
        [sys.executable, "-m", "tests.bench", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


SHORT = ("--time", "0.05", "--rounds", "1", "--size-mib", "32", "--rw", "randrw")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "only", ["virtlun null", pytest.param("virtlun lvol poll", marks=pytest.mark.nightly)]
)
def test_a_short_run_measures_every_depth(only: str) -> None:
    done = run_bench("--json", "--only", only, *SHORT)
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout)["points"]
    assert [p["depth"] for p in points] == [1, 8, 32, 128]
    assert all(p["iops"] > 0 and p["rss_mib"] > 0 for p in points)
    assert all(p["subject"] == only for p in points)
    assert all(0 < p["guest_ns_per_io"] < 1.1e9 / p["iops"] for p in points)


@pytest.mark.nightly
def test_two_builds_are_measured_in_turn_and_the_points_are_kept(tmp_path: Path) -> None:
    saved = tmp_path / "kept" / "points.json"
    both = ("--only", "virtlun null", "--only", "other null")
    done = run_bench("--against", str(binary()), "--save", str(saved), *both, *SHORT)
    assert done.returncode == 0, done.stderr
    told = json.loads(saved.read_text())
    where = told["machine"]
    assert min(where["cpus"], where["nodes"], where["memory_mib"]) > 0
    assert list(where["builds"]) == ["virtlun", "other"]
    subjects = [point["subject"] for point in told["points"]]
    assert subjects == ["virtlun null", "other null"] * 4
    assert "ours / peer" in done.stdout


def test_the_machine_and_the_builds_are_told(tmp_path: Path) -> None:
    told = machine()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    assert abs(told["memory_mib"] - total) <= 1
    assert told["cpus"] == os.cpu_count()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    program = tmp_path / "bin" / "virtlun-target"
    program.parent.mkdir()
    program.touch()
    assert revision(program) == "unknown"
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message=a"], check=True)
    of = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert of.stdout.startswith(revision(program))


def test_an_unknown_target_is_named() -> None:
    done = run_bench("--only", "nobody")
    assert done.returncode == 1
    assert "no target nobody" in done.stderr


def test_an_spdk_that_was_not_built_is_named(tmp_path: Path) -> None:
    done = run_bench("--spdk", str(tmp_path))
    assert done.returncode == 1
    assert f"{tmp_path}/build/bin/vhost is not there: build SPDK" in done.stderr


@pytest.mark.nightly
def test_two_queues_are_measured_on_one_reactor_and_on_two() -> None:
    words = [sys.executable, "-m", "tests.bench.queues", "--rounds", "1", "--time", "0.1"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    sizes = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert sizes == ["4k", "64k", "1m"], done.stdout


@pytest.mark.nightly
def test_limits_are_measured_with_what_is_done_under_them() -> None:
    words = [sys.executable, "-m", "tests.bench.limits", "--quick"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    shares = re.findall(r"([0-9.]+) (%|times)", done.stdout)
    assert [unit for _, unit in shares] == ["%"] * 14 + ["times"], done.stdout
    assert all(float(share) > 0 for share, _ in shares)
    # Of reads beside limited writes, and the other way round, as a share of what they do unlimited:
    # less than 1 % where one holds back the other.
    assert all(float(shares[at][0]) > 10 for at in (8, 10)), done.stdout


def run_noisy(victim: str, names: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    """Runs the noisy neighbour's benchmark for short rows, as JSON."""
    only = [option for name in names for option in ("--only", name)]
    options = ["--victim", victim, "--time", "0.2", "--size-mib", "16", "--json", *only, *more]
    return subprocess.run(
        [sys.executable, "-m", "tests.bench.noisy", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def noisy(victim: str, names: list[str]) -> list[dict[str, Any]]:
    """Short rows of the noisy neighbour's benchmark."""
    run = run_noisy(victim, names)
    assert run.returncode == 0, run.stderr
    rows: list[dict[str, Any]] = json.loads(run.stdout)
    assert [row["neighbour"] for row in rows] == names
    assert all(row["iops"] > 0 and row["p99_us"] > 0 and row["wrong"] == 0 for row in rows), rows
    return rows


@pytest.mark.nightly
def test_a_victim_that_sleeps_is_measured_beside_its_neighbours() -> None:
    noisy("ram", ["none", "4 KiB, 32 in flight", "task management"])


@pytest.mark.nightly
def test_a_victim_on_a_disk_is_measured_in_turn_with_a_reader_outside() -> None:
    for row in noisy("disk", ["none", "256 x 4 MiB READ, 64 LUNs on the disk"]):
        assert row["outside_iops"] > 0
        assert row["outside_p99_us"] > 0


@pytest.mark.nightly
def test_a_goal_that_is_missed_is_an_exit_status_and_a_sentence() -> None:
    """Missed here because there is nothing to compare with: no figure is asserted."""
    run = run_noisy("ram", ["task management"], "--goal")
    assert run.returncode == 1
    assert "“task management”: nothing was measured to compare it with" in run.stderr
    assert len(json.loads(run.stdout)) == 1
