"""Live migration between two QEMUs of this machine, without libvirt."""

from __future__ import annotations

from pathlib import Path

from tests.support.qemu import Guest
from tests.support.wait import until

#: Bytes a second and milliseconds that let any migration finish.
UNLIMITED = {"max-bandwidth": 1 << 40, "downtime-limit": 30000}


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
    until(socket.exists, "QEMU waits for a guest")
    source.qmp("migrate-set-parameters", **{"max-bandwidth": 400 << 20, "downtime-limit": 1})
    source.qmp("migrate", uri=f"unix:{socket}")
    until(lambda: passes(source) >= at_least_passes or is_over(source), "the passes over memory")
    source.qmp("migrate-set-parameters", **UNLIMITED)
    until(lambda: is_over(source), "migrated")
    source.stop()
    arriving.arrived()
