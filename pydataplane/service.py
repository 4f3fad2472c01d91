"""The systemd service that a target is, if it is one."""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from pathlib import Path

ASK_DEADLINE_S = 10.0


def unit_in(groups: str) -> str | None:
    """Returns the service in whose control group a process is, by its /proc/PID/cgroup.

    That is the group of version 2, or systemd's own of version 1 (`name=systemd`).
    """
    found = re.findall(r"^(?:0:|\d+:name=systemd):.*/([^/]+\.service)$", groups, re.MULTILINE)
    return str(found[0]) if found else None


def main_of(pid: int) -> str | None:
    """Returns the service whose main process `pid` is.

    None if it is in none, if this process is in the same one, or if systemd cannot be asked.
    """
    with suppress(OSError, subprocess.SubprocessError):
        unit = unit_in(Path(f"/proc/{pid}/cgroup").read_text())
        if unit is None or unit == unit_in(Path("/proc/self/cgroup").read_text()):
            return None
        command = ["systemctl", "show", "--property=MainPID", "--value", "--", unit]
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_DEADLINE_S, check=True
        )
        return unit if said.stdout.strip() == str(pid) else None
    return None
