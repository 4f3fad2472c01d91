"""Runs the host's own programs (mount, mkfs, ...) with readable failures.

Each has a deadline, apart from those that must not be cut off in the middle.
"""

from __future__ import annotations

import subprocess

from csi.hosterrors import HostError

DEADLINE_S = 100.0  # below the 2 minutes that the kubelet waits
WORDS_BYTES_MAX = 600


def run(
    *command: str, ok: tuple[int, ...] = (0,), deadline_s: float | None = DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end and returns how it did; it dies with this process.

    It is killed after `deadline_s` seconds; None: never, the caller's own callers do not wait.

    Raises:
        HostError: a status not in `ok`, no end within `deadline_s` seconds, or no such program; the
            text carries its last words, in one line.
    """
    try:
        done = subprocess.run(
            ["setpriv", "--pdeathsig", "KILL", *command],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise HostError(f"{command[0]} did not end within {deadline_s:.0f} s") from error
    except OSError as error:
        raise HostError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode not in ok:
        words = " ".join((done.stderr.strip() or done.stdout).split())[-WORDS_BYTES_MAX:]
        raise HostError(f"`{' '.join(command)}` ended with status {done.returncode}: {words}")
    return done
