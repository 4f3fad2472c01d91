"""`virtlun` on a terminal: what takes its time shows that it goes on. Needs root and /dev/fuse."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.night import by_day
from tests.support.slow_disk import SlowDisk
from tests.support.target import Target, binary
from tests.target.test_cli import done

pytestmark = pytest.mark.root

MIB = 1 << 20
DEADLINE_S = 60.0


@pytest.fixture
def disk(target: Target, scratch: Path) -> Iterator[SlowDisk]:
    """The disk below lvs0 with the volumes thin, which has a snapshot, and thick."""
    with SlowDisk(scratch / "disk", 64 * MIB) as disk:
        target.rpc("bdev_aio_create", filename=str(disk.path), name="d", block_size=512)
        target.rpc("bdev_lvol_create_lvstore", bdev_name="d", lvs_name="lvs0", cluster_sz=MIB)
        done(target, "volume", "create", "lvs0/thin", "8M", "--thin")
        done(target, "volume", "snapshot", "lvs0/thin", "s")
        done(target, "volume", "create", "lvs0/thick", "8M")
        yield disk
        target.stop()


@by_day("inflate-")
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["create", "lvs0/new", "16M"], "making lvs0/new"),
        (["inflate", "lvs0/thin"], "copying to lvs0/thin what it lacks"),
        (["rollback", "lvs0/thin", "@s", "--yes"], "rolling lvs0/thin back"),
        (["delete", "lvs0/thick", "--yes"], "deleting lvs0/thick"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_bar_is_shown_while_the_disk_does_not_answer(
    target: Target, disk: SlowDisk, words: list[str], what: str
) -> None:
    command = [str(binary("virtlun")), "--socket", str(target.rpc_socket), "volume", *words]
    ours, theirs = pty.openpty()
    disk.hang()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs) as run:
        os.close(theirs)
        shown, end = "", time.monotonic() + DEADLINE_S
        try:
            # Drawn more than once: it moves.
            while shown.count(what) < 3 or "━" not in shown:
                left = max(0, end - time.monotonic())
                assert select.select([ours], [], [], left)[0], shown
                shown += os.read(ours, 4096).decode(errors="replace")
            assert run.poll() is None
        finally:
            disk.go_on()
        # The end of a terminal that nobody has open any more is an error (pty(7)).
        with suppress(OSError):
            while os.read(ours, 4096):
                pass
    os.close(ours)
    assert run.returncode == 0
