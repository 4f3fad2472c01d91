"""What this process may do to its host, by the kernel's own word (proc_pid_status(5)).

For who cannot see the process, as from another container.
"""

from __future__ import annotations

from pathlib import Path

FILTERED = "2"


def facts(refused: list[str]) -> dict[str, object]:
    """Returns user, capabilities (a bit each), no_new_privs, filter, and the `refused` calls."""
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    found = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {
        "uid": int(found["Uid"].split()[1]),  # real, effective, saved and of files
        "capabilities": int(found["CapEff"], 16),
        "no_new_privs": found["NoNewPrivs"] == "1",
        "seccomp": found["Seccomp"] == FILTERED,
        "refused": refused,
    }
