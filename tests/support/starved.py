"""Whether an emulated guest was kept from the machine's processors, as the kernel has counted it.

A guest that does not answer may wait for us, and must then fail its test. One that another program
kept from a processor does not: Linux counts how long each thread ran, and how long it was ready to
and waited (Documentation/scheduler/sched-stats.rst, /proc/PID/task/TID/schedstat).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
NS = 1_000_000_000
#: A guest boots in 2.4 s of a processor: who had so many, and is not there yet, waits for something
#: else, or turns in circles.
ENOUGH_S = 10.0


@dataclass(frozen=True)
class Times:
    """What the threads of a process had of the processors, in seconds."""

    ran_s: float
    """All of them together."""
    waited_s: dict[str, float]
    """How long each was ready to run and did not, by its id."""


def times(qemu: int, proc: Path = PROC) -> Times | None:
    """Returns what process `qemu` had until now; None where it is gone or is no emulation."""
    try:
        words = (proc / f"{qemu}/cmdline").read_bytes().split(b"\0")
        accel = words[words.index(b"-accel") + 1] if b"-accel" in words else b""
        if not accel.startswith(b"tcg"):
            return None
        ran_s, waited_s = 0.0, {}
        for thread in (proc / f"{qemu}/task").iterdir():
            ran, waited, _ = (thread / "schedstat").read_text().split()
            ran_s += int(ran) / NS
            waited_s[thread.name] = int(waited) / NS
    except OSError:
        return None
    return Times(ran_s, waited_s)


def starved(qemu: int | None, seconds: float, since: Times | None = None, proc: Path = PROC) -> str:
    """Returns, in brackets after a space, that a guest was starved; "" where that is not known.

    `seconds` have passed since `since`, by default the start of its process `qemu`. Starved is who
    ran for less than ENOUGH_S of them while one of its threads waited for half of them or more.
    """
    now = times(qemu, proc) if qemu is not None else None
    if now is None:
        return ""
    before = since or Times(0.0, {})
    ran_s = now.ran_s - before.ran_s
    waited_s = max(
        waited - before.waited_s.get(thread, 0.0) for thread, waited in now.waited_s.items()
    )
    if ran_s >= ENOUGH_S or waited_s < seconds / 2:
        return ""
    return (
        f" (the emulated guest ran for {ran_s:.1f} s and waited {waited_s:.0f} s for a processor)"
    )


def ran(qemu: int | None, since: Times | None, proc: Path = PROC) -> str:
    """Returns in words for how long the guest of process `qemu` has run since `since`.

    One that turns in circles has run all the time; one that waits for a disk hardly at all.
    """
    now = times(qemu, proc) if qemu is not None else None
    if now is None or since is None:
        return "how long the guest ran is not known"
    return f"the guest ran for {now.ran_s - since.ran_s:.1f} s of a processor"
