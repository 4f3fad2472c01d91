"""What begins our programs for tests and demos."""

from __future__ import annotations

import os
import signal

from tests.support.warm import Program, begin


def test_a_signal_to_who_began_a_program_leaves_it_to_him() -> None:
    """^C on a terminal is for all of the foreground: whoever runs ends what it has begun itself."""
    process = begin(Program((), module="http.server"), ["--bind", "127.0.0.1", "0"])
    assert os.getsid(process.pid) != os.getsid(0)
    assert os.getpgid(process.pid) != os.getpgid(0)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
