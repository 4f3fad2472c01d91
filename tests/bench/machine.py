"""What figures were measured on: machine, memory, hypervisor, and which builds."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

NODES = Path("/sys/devices/system/node")


def machine() -> dict[str, Any]:
    """Returns what the numbers were measured on; sizes are in MiB."""
    info = Path("/proc/cpuinfo").read_text(errors="replace")
    models = [line.split(":", 1)[1].strip() for line in info.splitlines() if "model name" in line]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cpus": os.cpu_count(),
        "nodes": len(list(NODES.glob("node[0-9]*"))) or 1,
        "memory_mib": _memory("MemTotal") >> 10,
        "huge_pages_mib": _memory("HugePages_Total") * _memory("Hugepagesize") >> 10,
        "hypervisor": _said("systemd-detect-virt") or "unknown",
        "kernel": platform.release(),
        "load": os.getloadavg(),
    }


def revision(path: Path) -> str:
    """Returns the commit of the checkout that a program or folder is in; "unknown" of none.

    What was changed there since is told by "-dirty", and that a program was built of an earlier
    commit by nothing.
    """
    folder = path if path.is_dir() else path.parent
    return _said("git", "-C", str(folder), "describe", "--always", "--dirty") or "unknown"


def _memory(name: str) -> int:
    """Returns a figure of proc_meminfo(5), in KiB or pages."""
    found = re.search(rf"^{name}: +(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def _said(*command: str) -> str | None:
    """Returns the first line of what a command says, whatever its status; None: it is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip().partition("\n")[0] or None
