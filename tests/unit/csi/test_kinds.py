"""Kinds of objects are read by many threads from the beginning."""

from __future__ import annotations

import subprocess
import sys

ROUNDS = 12
"""Without what csi.kinds does first, each round ends by SIGSEGV about every second time."""
READS = """
import sys
import threading
from csi import kinds
from lightkube.core import decoders

sys.setswitchinterval(1e-6)
every = [each.resource for each in vars(kinds).values() if isinstance(each, kinds.Kind)]
together = threading.Barrier(8)


def read(at):
    together.wait()
    for resource in every[at:] + every[:at]:
        decoders.decode_list(b'{"items": [{"a": 1}], "metadata": {"continue": "x"}}', resource)
        decoders.decode_watch_event(b'{"type": "ADDED", "object": {"a": 1}}')
        decoders.decode_status(b'{"status": "Failure", "details": {"causes": [{"field": "x"}]}}')


threads = [threading.Thread(target=read, args=(at,)) for at in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_that_read_the_first_objects_do_not_end_the_process() -> None:
    for _ in range(ROUNDS):
        words = [sys.executable, "-c", READS]
        done = subprocess.run(words, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr.decode()
