"""The kernel's ublk driver under our own queue: a device survives the end of who serves it.

`ublk_file` (an example of the crate `ublk`) serves a file of the guest's memory. `VIRTLUN_SEED`
repeats the moments of a run.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guest.image import Kernel
from tests.support import program_disk
from tests.support.program_disk import run
from tests.support.qemu import Guest
from tests.support.restarts import choose_seed
from tests.support.verified_io import VerifiedIo

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
DISK_MIB = 32
THREADS = 1
DEPTH = 16


@pytest.fixture(scope="session")
def example() -> Path:
    """The example, as `cargo test` has built it: the fuzz targets' build holds that of releases."""
    workspace = ROOT / "pydataplane"
    subprocess.run(
        ["cargo", "build", "--locked", "--example", "ublk_file"],
        cwd=workspace,
        check=True,
        capture_output=True,
    )
    return workspace / "target/debug/examples/ublk_file"


class Server:
    """`ublk_file` in a guest: its device, and the process that serves it."""

    def __init__(self, guest: Guest) -> None:
        """Makes the file and its device."""
        self.guest = guest
        guest.run(f"mkdir -p /ram; mount -t tmpfs -o size={2 * DISK_MIB}m tmpfs /ram")
        guest.run(f"truncate -s {DISK_MIB}M /ram/disk")
        self.number = self._start("serve /ram/disk", "ready").split()[1]
        self.disk = f"ublkb{self.number}"

    def _start(self, words: str, awaited: str) -> str:
        self.guest.run(
            "rm -f /tmp/said; : >/tmp/said; "  # what is behind `&` may come to it later
            f"{run('ublk_file')} {words} >/tmp/said 2>&1 & echo $! >/tmp/pid"
        )
        return self.says(awaited)

    def says(self, awaited: str, deadline_s: float = 300.0) -> str:
        """Returns the line that begins so, as soon as the process says it."""
        end = time.monotonic() + deadline_s
        while True:
            said = self.guest.run("cat /tmp/said")
            for line in said.splitlines():
                if line.startswith(awaited):
                    return line
            lives = self.guest.run("kill -0 $(cat /tmp/pid) && echo lives", check=False)
            if time.monotonic() > end or "lives\n" not in lives:
                raise AssertionError(f"{said}\n{self.guest.run('dmesg | tail -n 40')}")
            time.sleep(0.1)

    def kill(self) -> None:
        """Ends the process as a crash does."""
        self.guest.run("kill -9 $(cat /tmp/pid)")

    def recover(self, how: str = "recover") -> str:
        """Has another process go on; returns what it says of itself."""
        return self._start(f"{how} {self.number} /ram/disk", "ready")

    def delete(self) -> None:
        """Removes the device; the process that serves it ends by itself."""
        self.guest.run(f"{run('ublk_file')} delete {self.number}")
        self.guest.run("for i in $(seq 100); do kill -0 $(cat /tmp/pid) || exit 0; sleep .1; done")
        assert self.guest.run("ls /dev | grep ublk[bc] || true") == ""


@pytest.fixture
def guest(example: Path, tmp_path: Path) -> Iterator[Guest]:
    """A guest for each test: whose server was killed has a driver that may have suffered."""
    programs = {"ublk_file": example, "e2fsck": Path(shutil.which("e2fsck") or "/sbin/e2fsck")}
    with program_disk.guest(tmp_path, programs, Kernel.BACKPORTS) as guest:
        yield guest


@pytest.fixture
def server(guest: Guest) -> Iterator[Server]:
    """A device in it, which a test deletes."""
    yield Server(guest)
    log = guest.run("umount /ram; dmesg")
    assert "I/O error" not in log, log
    program_disk.unsurprised(guest)


@pytest.mark.nightly
def test_a_device_is_a_disk(server: Server) -> None:
    """Its limits, each kind of request, a file system."""
    guest, disk = server.guest, server.disk
    limits = guest.run(
        f"cd /sys/block/{disk}; cat size queue/logical_block_size queue/physical_block_size "
        "queue/max_hw_sectors_kb queue/discard_max_bytes queue/write_cache queue/fua"
    ).split("\n")
    assert limits[:7] == [
        *(str(DISK_MIB * 2048), "512", "4096", "512", str(1 << 30), "write back", "1"),
    ]
    guest.run("dd if=/dev/zero bs=1M count=4 | tr '\\0' x >/tmp/x")
    guest.run(f"dd if=/tmp/x of=/dev/{disk} bs=1M oflag=direct conv=fsync")
    guest.run(f"/tools/blkdiscard -o 1048576 -l 1048576 /dev/{disk}")
    guest.run(f"/tools/blkdiscard -z -o 3145728 -l 4096 /dev/{disk}")
    counts = guest.run(
        f"dd if=/dev/{disk} bs=4M count=1 iflag=direct 2>/dev/null | tr -d '\\0' | wc -c"
    )
    assert int(counts) == (3 << 20) - 4096
    guest.run(f"mkfs.ext4 -q -F /dev/{disk}; mkdir -p /fs; mount -t ext4 /dev/{disk} /fs")
    guest.run("cp /bin/busybox /fs/; sync; umount /fs")
    assert "clean" in guest.run(f"{run('e2fsck')} -f -n /dev/{disk}; echo clean")
    guest.run(f"mount -t ext4 /dev/{disk} /fs; cmp /bin/busybox /fs/busybox; umount /fs")
    server.delete()


@pytest.mark.nightly
def test_io_goes_on_after_each_kill(server: Server) -> None:
    """Blocks of which each is known, FUA, flushes, discards; what was in flight is asked again."""
    seed = choose_seed()
    moments = random.Random(seed)
    io = VerifiedIo(server.guest, server.disk, seed=seed, threads=THREADS, depth=DEPTH)
    with program_disk.explained(server.guest):
        for _ in range(5):
            done = io.status().requests
            server.kill()
            time.sleep(moments.uniform(0, 0.5))
            server.recover()
            io.goes_on(done)
        io.finish()
        server.delete()


@pytest.mark.nightly
def test_a_server_that_had_every_request_is_missed(server: Server) -> None:
    """Without a tag of its own the driver looks after its time-out whether the server lives."""
    guest, disk = server.guest, server.disk
    with program_disk.explained(guest):
        server.kill()
        server.recover("keep")
        guest.run(
            "for i in $(seq 0 79); do dd if=/dev/urandom "
            f"of=/dev/{disk} bs=4k count=1 seek=$((8 * i)) oflag=direct 2>/dev/null & done; "
            "echo begun"
        )
        server.says("all")
        server.kill()
        server.recover()
        guest.run("for i in $(seq 600); do pidof dd || exit 0; sleep .1; done; exit 1", 90.0)
        found = guest.run(
            f"for i in $(seq 0 79); do dd if=/dev/{disk} bs=4k count=1 skip=$((8 * i)) "
            "iflag=direct 2>/dev/null | md5sum; done | sort -u | wc -l"
        )
        assert int(found) == 80
        server.delete()
