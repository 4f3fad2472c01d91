"""A process that is kept from doing anything, as by SIGSTOP."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.wait import until


def freeze(pid: int) -> None:
    """Stops process `pid`, and returns when no thread of it runs any more.

    The signal alone leaves threads running for a moment. One that sleeps in the kernel, in a disk's
    I/O for instance, stops on its way out.
    """
    os.kill(pid, signal.SIGSTOP)

    def stopped() -> bool:
        threads = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status"))
        return all("\nState:\tT" in thread or "\nState:\tD" in thread for thread in threads)

    until(stopped, f"process {pid} to stop", every_s=0.001)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Process `pid` does nothing meanwhile."""
    freeze(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
