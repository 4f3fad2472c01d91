"""Live migration between two QEMUs of this machine, without libvirt."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.support.qemu import Guest

#: Bytes a second and milliseconds that let any migration finish.
UNLIMITED = {"max-bandwidth": 1 << 40, "downtime-limit": 30000}


def wait_for(what: str, condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    """Returns when `condition` is true; AssertionError with `what` at the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {deadline_s:.0f} s"
        time.sleep(0.02)


def is_over(guest: Guest) -> bool:
    """Whether the migration of `guest` completed."""
    status = guest.qmp("query-migrate")
    assert status["status"] != "failed", status
    return bool(status["status"] == "completed")


def passes(guest: Guest) -> int:
    """Returns how often the migration of `guest` began to go over its memory."""
    return int(guest.qmp("query-migrate").get("ram", {}).get("dirty-sync-count", 0))


def move(source: Guest, arriving: Guest, socket: Path, at_least_passes: int = 2) -> None:
    """Moves a running guest to `arriving`, whose -incoming is `unix:` and `socket`.

    Goes over the guest's memory `at_least_passes` times while the guest runs, then lets it finish.
    `source` is stopped.
    """
    wait_for("QEMU waits for a guest", socket.exists)
    source.qmp("migrate-set-parameters", **{"max-bandwidth": 400 << 20, "downtime-limit": 1})
    source.qmp("migrate", uri=f"unix:{socket}")
    wait_for(
        "the passes over memory",
        lambda: passes(source) >= at_least_passes or is_over(source),
    )
    source.qmp("migrate-set-parameters", **UNLIMITED)
    wait_for("migrated", lambda: is_over(source))
    source.stop()
    arriving.arrived(120.0)
