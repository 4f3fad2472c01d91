"""When a target has ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pydataplane.supervise import _alive
from tests.support.wait import until

FIRST_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).syscall(60, 0)
"""
"""exit(2) as such ends the calling thread alone."""


def test_a_process_runs_as_long_as_any_thread_of_it() -> None:
    """It has its files and their locks so long; a new target would find its folder in use."""
    with subprocess.Popen([sys.executable, "-c", FIRST_THREAD_ENDS]) as process:
        stat = Path(f"/proc/{process.pid}/stat")
        until(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "Z", "its first thread ends")
        assert _alive(process.pid)
        process.kill()
        until(lambda: not _alive(process.pid), "its end")
        process.wait()
    assert not _alive(process.pid)
