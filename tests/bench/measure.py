"""One point: the initiator against one target for a second or so."""

from __future__ import annotations

import contextlib
import json
import subprocess
from dataclasses import asdict, dataclass
from typing import Any

from pydataplane.errors import TargetError
from tests.bench.subjects import Subject
from tests.support.target import binary

WARMUP_S = 0.2
SLACK_S = 60.0
NEAR_NS = 150.0
"""Below this cache-line round trip two CPUs count as near (SMT siblings of one host core)."""


@dataclass(frozen=True)
class Point:
    """What one run measured. Times are in nanoseconds."""

    subject: str
    rw: str
    depth: int
    iops: float
    mean_ns: float
    p50_ns: float
    p99_ns: float
    p999_ns: float
    cpu_ns_per_io: float | None
    """CPU time of the target's threads, spinning included."""
    busy_ns_per_io: float | None
    """Ours only: the time in which its reactors did work."""
    rss_mib: float
    """Resident memory without shared memory: a malloc disk counts, guest memory does not."""
    c2c_ns: tuple[float, float] | None
    """Cache-line round trip between the two CPUs before and after."""
    round: int = 0
    """In which round over all targets it was measured."""
    guest_ns_per_io: float | None = None
    """What the guest's own loop takes; where that is more than the target's, it is what limits."""

    @property
    def mode(self) -> str:
        """Where the hypervisor had the two CPUs: near, far, mixed, or ? if it is unknown."""
        if self.c2c_ns is None:
            return "?"
        near = [trip < NEAR_NS for trip in self.c2c_ns]
        return "near" if all(near) else "mixed" if any(near) else "far"

    def as_json(self) -> dict[str, Any]:
        """The point as JSON."""
        return {**asdict(self), "mode": self.mode}

    @staticmethod
    def of_json(told: dict[str, Any]) -> Point:
        """Returns the point that `as_json` told."""
        known = {name: value for name, value in told.items() if name in Point.__annotations__}
        trip = known["c2c_ns"]
        return Point(**{**known, "c2c_ns": trip and (trip[0], trip[1])})


class BenchFailed(RuntimeError):
    """The initiator failed, or an I/O did; the text says which and how."""


def _command(subject: Subject, *options: str) -> list[str]:
    command = [str(binary("virtlun-bench")), "run", str(subject.socket), "--heavy", "--json"]
    kind = ["--blk"] if subject.blk else []
    memory = ["--hugepages"] if subject.huge else []
    return [*command, *kind, *memory, *options]


def fill(subject: Subject) -> None:
    """Writes the whole disk once, so that reads are of memory that is there."""
    if not subject.filled:
        _run(_command(subject, "--fill", "--bs", "1m", "--iodepth", "4", "--time", "0.5"))
        subject.filled = True


def measure(
    subject: Subject,
    rw: str,
    depth: int,
    seconds: float,
    cpus: tuple[int, int] | None,
    *more: str,
) -> Point:
    """Measures one point; the subject runs only meanwhile. `more` are options of the guest."""
    subject.thaw()
    try:
        fill(subject)
        options = ["--rw", rw, "--iodepth", str(depth), "--time", str(seconds), *more]
        options += ["--warmup", str(WARMUP_S), "--target-pid", str(subject.pid)]
        if cpus is not None:
            options += ["--cpus", f"{cpus[0]},{cpus[1]}"]
        before = _busy(subject)
        report = _run(_command(subject, *options), WARMUP_S + seconds + SLACK_S)
        after = _busy(subject)
    finally:
        subject.freeze()
    trips = report["c2c_before_ns"], report["c2c_after_ns"]
    return Point(
        subject=subject.name,
        rw=rw,
        depth=depth,
        iops=report["iops"],
        mean_ns=report["mean_ns"],
        p50_ns=report["p50_ns"],
        p99_ns=report["p99_ns"],
        p999_ns=report["p999_ns"],
        cpu_ns_per_io=report["target_cpu_ns_per_io"],
        busy_ns_per_io=_per_io(before, after),
        rss_mib=(report["target_rss_kib"] or 0) / 1024,
        c2c_ns=(trips[0]["median"], trips[1]["median"]) if all(trips) else None,
        guest_ns_per_io=report["guest_busy_ns_per_io"],
    )


@contextlib.contextmanager
def _started(command: list[str]) -> Any:
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _run(command: list[str], timeout_s: float = SLACK_S) -> dict[str, Any]:
    with _started(command) as process:
        return _report(process, timeout_s)


def _report(process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any]:
    out, err = process.communicate(timeout=timeout_s)
    if process.returncode != 0:
        raise BenchFailed(f"{process.args!r}: {err.decode()}{out.decode()}")
    report: dict[str, Any] = json.loads(out)
    return report


def _busy(subject: Subject) -> tuple[float, int] | None:
    """Busy time of all reactors, ns, and requests so far; None where the target does not tell.

    Asked before and after a run, warm-up included: amid it the answer would wait for a CPU.
    """
    if subject.rpc is None:
        return None
    try:
        (stats,) = subject.rpc.call("virtlun_vhost_get_stats", name=subject.socket.name)
        answer = subject.rpc.call("framework_get_reactors")
    except TargetError:
        return None
    busy = sum(reactor["busy"] for reactor in answer["reactors"])
    return busy * 1e9 / answer["tick_rate"], stats["requests"]


def _per_io(before: tuple[float, int] | None, after: tuple[float, int] | None) -> float | None:
    """Returns the busy time for a request, between two answers of `_busy`."""
    if before is None or after is None or after[1] == before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])
