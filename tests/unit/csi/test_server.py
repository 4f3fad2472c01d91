"""How a program of ours ends when it is told to."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEFORE = "signal.raise_signal(signal.SIGTERM)"
BY_ANOTHER_THREAD = """
def tell():
    time.sleep(0.2)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=tell).start()
"""


@pytest.mark.parametrize("how", [BEFORE, BY_ANOTHER_THREAD], ids=["early", "another thread"])
def test_a_signal_is_seen_whenever_it_comes_and_whichever_thread_it_finds(how: str) -> None:
    program = (
        "import signal, threading, time\nfrom csi.server import Ending\n"
        f"ending = Ending()\n{how}\nprint(ending.wait().name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("SIGTERM\n", "", 0)


def test_who_had_the_signals_has_them_again() -> None:
    program = (
        "import signal\nfrom csi.server import Ending\n"
        "with Ending():\n    signal.raise_signal(signal.SIGINT)\n"
        "signal.raise_signal(signal.SIGINT)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
