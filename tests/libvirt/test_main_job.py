"""The main job with plain virsh, real libvirtd, real QEMU and a real guest, step by step.

The steps stand in tests/demo/steps.py with their assertions; each needs the one before it.
"""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time

import pytest

from tests.demo.shell import LEAVE
from tests.demo.steps import STEPS, Step, Story
from tests.support.host import Host


@pytest.fixture(scope="module")
def story(host: Host) -> Story:
    return Story(host)


@pytest.mark.root
@pytest.mark.vm
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_step(story: Story, step: Step) -> None:
    assert step(story)


SHELL = """\
import sys
from pathlib import Path
from rich.console import Console
from tests.demo.shell import shell
shell(sys.argv[1], Path(sys.argv[2]), Console())
"""


@pytest.mark.root
@pytest.mark.vm
def test_the_shell_after_it_is_the_guests_console(story: Story) -> None:
    """`make demo SHELL_IN=1`: commands run in the guest, and ^] leaves it running."""
    before = story.guest("cat /proc/sys/kernel/random/boot_id")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SHELL, story.host.uri, str(story.host.paths.rpc_socket)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        _read_until(ours, b"ends the demo.")
        _type_until(ours, b"echo $((40 + 2)) is answered\n", b"42 is answered")
        os.write(ours, LEAVE)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert story.guest("cat /proc/sys/kernel/random/boot_id") == before, "it goes on running"


def _read_until(terminal: int, wanted: bytes, seconds: float = 60.0) -> bytes:
    """Returns what came on a terminal up to `wanted`; fails where that does not come."""
    seen, end = b"", time.monotonic() + seconds
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"{wanted!r} did not come: {seen!r}"
        seen += os.read(terminal, 4096)
    return seen


def _type_until(terminal: int, line: bytes, wanted: bytes) -> None:
    """Types a line until its answer comes: what is typed before virsh listens may be lost."""
    for _ in range(20):
        os.write(terminal, line)
        try:
            _read_until(terminal, wanted, 3.0)
        except AssertionError:
            continue
        return
    raise AssertionError(f"{wanted!r} never came")
