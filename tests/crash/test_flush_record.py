"""SIGKILL at each step of recording that a flush failed, and of recording that this is cleared.

Needs root and strace, which ends the target as it enters a system call on a file of its state.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from pydataplane.errors import TargetError
from tests.support.initiator import Initiator, Refused, connected
from tests.support.killed_target import killed_at
from tests.support.lossy_disk import (
    FLUSH,
    MIB,
    LossyDisk,
    fails_to_flush,
    lossy_disk,
    small_file_system,
)
from tests.support.target import Target

pytestmark = pytest.mark.root

RECORD = "config.json"
NEW = "config.json.new"
FOLDER = "."
STEPS = [
    # A system call, the file in the state folder that it is on, whether the record is new by then.
    ("openat", NEW, False),
    ("write", NEW, False),
    ("fsync", NEW, False),
    ("rename", NEW, None),
    ("openat", FOLDER, True),
    ("fsync", FOLDER, True),
]


@pytest.fixture
def disk(target: Target) -> Iterator[LossyDisk]:
    """A disk that loses what is written."""
    with small_file_system(target.directory / "small") as directory, lossy_disk(directory) as made:
        yield made


def is_recorded(target: Target) -> bool:
    """Whether the state folder has a failed flush; its record is whole in any case."""
    text = json.loads((target.state_dir / RECORD).read_text())
    return bool(text.get("flush_errors"))


def is_told(target: Target) -> bool:
    """Whether a guest is told, and everybody else."""
    shown = bool(target.rpc("virtlun_get_status")["flush_errors"])
    with connected(target, "vm") as guest:
        assert fails_to_flush(guest) is shown
    return shown


def set_up(target: Target, disk: LossyDisk) -> None:
    """Makes a disk with a guest, which flushes once."""
    target.rpc("bdev_aio_create", name="d0", filename=disk.device, block_size=512)
    target.attach("vm", "d0")
    assert not is_told(target)


def flush_until(killed: threading.Event, guest: Initiator) -> None:
    """Flushes until the guest ends, which is after `killed`."""
    try:
        while True:
            guest.cdb(FLUSH)
            time.sleep(0.01)
    except (Refused, json.JSONDecodeError, BrokenPipeError):
        # No answer, or the end of the process that would give it.
        assert killed.is_set(), "the target was not killed yet"


@pytest.mark.parametrize(("call", "file", "is_new"), STEPS)
def test_a_failure_is_known_as_soon_as_it_is_recorded(
    target: Target, disk: LossyDisk, call: str, file: str, is_new: bool | None
) -> None:
    set_up(target, disk)
    with connected(target, "vm") as guest:
        disk.lose()
        guest.write(0, bytes([7]) * MIB)
        # Whether the guest has its answer before the target is killed is not known.
        killed = threading.Event()
        flush = threading.Thread(target=flush_until, args=(killed, guest))
        with killed_at(target, call, file):
            flush.start()
        killed.set()
        os.kill(guest.pid, signal.SIGKILL)  # it would wait for the answer
        flush.join()
    recorded = is_recorded(target)
    assert is_new is None or recorded is is_new
    target.start()
    disk.mend()
    assert is_told(target) is recorded
    assert is_recorded(target) is recorded


@pytest.mark.parametrize(("call", "file", "is_new"), STEPS)
def test_what_was_being_cleared_is_cleared_or_known(
    target: Target, disk: LossyDisk, call: str, file: str, is_new: bool | None
) -> None:
    set_up(target, disk)
    with connected(target, "vm") as guest:
        disk.lose()
        guest.write(0, bytes([7]) * MIB)
        assert fails_to_flush(guest)
    # An orderly end waits for the record.
    target.restart()
    assert is_recorded(target)
    disk.mend()
    # What the start itself may record is on disk when a later change is.
    target.rpc("bdev_null_create", name="n0", num_blocks=8, block_size=512)
    with killed_at(target, call, file), pytest.raises(TargetError):
        target.rpc("virtlun_bdev_clear_flush_error", name="d0")
    recorded = is_recorded(target)
    assert is_new is None or recorded is not is_new
    target.start()
    assert is_told(target) is recorded
