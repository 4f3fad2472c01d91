"""A target that is killed as it enters a system call on a file of its state, by strace.

Needs root.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.target import STOP_DEADLINE_S, Target


@contextmanager
def killed_at(target: Target, call: str, file: str) -> Iterator[None]:
    """Has the target be killed when it enters that call on that file of its state, in the block."""
    strace = subprocess.Popen(
        [
            *("strace", "-f", "-o", target.directory / "strace", "-p", str(target.pid)),
            *("-P", (target.state_dir / file).resolve(), "-e", f"trace={call}"),
            *("-e", f"inject={call}:signal=KILL"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert strace.stderr is not None
    assert "attached" in strace.stderr.readline()
    yield
    assert target.process is not None
    target.process.wait(STOP_DEADLINE_S)
    strace.wait(STOP_DEADLINE_S)
    assert call in (target.directory / "strace").read_text()
    target.kill9()
