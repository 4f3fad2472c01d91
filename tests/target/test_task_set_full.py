"""What a disk cannot take now is TASK SET FULL, and is done when it is sent again (SAM-5 5.3.1)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.initiator import Initiator, connected
from tests.support.slow_disk import SlowDisk
from tests.support.target import Target
from tests.support.wait import DEADLINE_S

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="a slow disk needs root and FUSE"
)

BLOCK = 4096
BUFFERS = 16
"""Of a file's channel, for what is not aligned (pydataplane/crates/bdev/src/file/bounce.rs)."""
MORE = 8
GOOD, TASK_SET_FULL = 0, 0x28


def write(guest: Initiator, n: int) -> int:
    """Sends a write of block `n`, and returns its head; its data is not aligned to a block."""
    lba = (n * BLOCK // 512).to_bytes(4, "big")
    cdb = bytes([0x2A, 0, *lba, 0, *(BLOCK // 512).to_bytes(2, "big"), 0])
    head: int = guest.send("submit", cdb=cdb, data_out=bytes([n + 1]) * BLOCK)["head"]
    return head


def wait(guest: Initiator, head: int) -> int:
    """Waits for a write, and returns its status."""
    answer = guest.send("wait", head=head, timeout_ms=int(DEADLINE_S * 1000))
    assert answer["response"] == 0, answer
    status: int = answer["status"]
    return status


def test_more_unaligned_writes_than_there_are_buffers(target: Target, scratch: Path) -> None:
    with SlowDisk(scratch / "slow", 1 << 20) as disk:
        target.rpc("bdev_uring_create", filename=str(disk.path), name="s0", block_size=512)
        target.attach("vm-0", "s0")
        with connected(target) as guest:
            disk.hang()
            try:
                heads = [write(guest, n) for n in range(BUFFERS + MORE)]
                # No buffer comes back while the disk answers nothing: these are answered at once.
                assert [wait(guest, head) for head in heads[BUFFERS:]] == [TASK_SET_FULL] * MORE
            finally:
                disk.go_on()
            assert [wait(guest, head) for head in heads[:BUFFERS]] == [GOOD] * BUFFERS
            for n in range(BUFFERS, BUFFERS + MORE):
                assert wait(guest, write(guest, n)) == GOOD
            for n in range(BUFFERS + MORE):
                assert guest.read(n * BLOCK // 512, BLOCK // 512) == bytes([n + 1]) * BLOCK
        assert target.stop() == 0
