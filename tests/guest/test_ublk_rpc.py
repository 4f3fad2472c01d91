"""SPDK's methods of ublk devices: the unmodified `spdk-rpc` of PyPI drives a target in a guest.

The guest's kernel has the driver; `spdk-rpc` runs here, and each of its calls is made inside.
`VIRTLUN_SEED` repeats the moments of a run.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.guest.test_ublk_export import DEPTH, booted, guest, target
from tests.support.restarts import choose_seed
from tests.support.target_inside import SOCKET, VOLUME, VOLUME_MIB, TargetInside
from tests.support.verified_io import VerifiedIo

__all__ = ["booted", "guest", "target"]

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

#: What is driven here, and cannot be on a host without the driver.
VERBS = {
    "ublk_create_target",
    "ublk_destroy_target",
    "ublk_get_disks",
    "ublk_recover_disk",
    "ublk_start_disk",
    "ublk_stop_disk",
}
NODEV, BUSY, EXIST, INVAL, NOENT = -19, -16, -17, -22, -2


class SpdkRpc:
    """`spdk-rpc` against the target inside."""

    def __init__(self, target: TargetInside, path: Path) -> None:
        """Listens at `path` and has the guest make each call that comes."""
        self.target, self.path = target, path
        self.driven: set[str] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._relay)
        self._thread.start()

    def close(self) -> None:
        """Ends it."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(60)
        self._listener.close()

    def _relay(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer:
                text = b""
                while piece := peer.recv(65536):
                    text += piece
                    with contextlib.suppress(json.JSONDecodeError):
                        request = json.dumps(json.loads(text))
                        call = f"unix_call {SOCKET} {shlex.quote(request)}"
                        peer.sendall(self.target.guest.run(call, 120.0).encode())
                        text = b""

    def __call__(self, *words: str) -> Any:
        """Runs a verb that has to succeed, and returns what it printed as JSON, or None."""
        done = self._run(*words)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}{self.target.words()}"
        self.driven.add(words[0])
        return json.loads(done.stdout) if done.stdout.strip() else None

    def refused(self, *words: str) -> int:
        """Runs a verb that has to fail, and returns the error's code."""
        done = self._run(*words)
        found = re.search(r'"code": (-\d+)', done.stdout + done.stderr)
        assert done.returncode == 1 and found, f"{words}: {done.stdout}{done.stderr}"
        return int(found[1])

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        program = Path(sys.executable).with_name("spdk-rpc")
        return subprocess.run(
            [str(program), "-s", str(self.path), "-t", "240", *words],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


@pytest.fixture
def spdk_rpc(target: TargetInside, tmp_path: Path) -> Iterator[SpdkRpc]:
    """Drives the target."""
    relay = SpdkRpc(target, tmp_path / "s")
    yield relay
    relay.close()


def devices(target: TargetInside) -> str:
    """Returns the names of all ublk devices in the guest."""
    return target.guest.run("ls /dev | grep ublk[bc] || true")


@pytest.mark.nightly
def test_a_disk_is_started_survives_its_target_and_is_stopped(
    target: TargetInside, spdk_rpc: SpdkRpc
) -> None:
    """Verified I/O goes on while the target is killed, restarted and exchanged."""
    guest = target.guest
    target.rpc("bdev_null_create", name="n0", num_blocks=2048, block_size=512)
    assert spdk_rpc.refused("ublk_start_disk", VOLUME, "5") == NODEV
    assert spdk_rpc.refused("ublk_create_target", "-m", "0x0") == INVAL
    spdk_rpc("ublk_create_target", "-m", "0x1", "--disable-user-copy")
    assert spdk_rpc.refused("ublk_create_target") == BUSY
    assert spdk_rpc.refused("ublk_start_disk", "none", "5") == NODEV
    assert spdk_rpc.refused("ublk_start_disk", VOLUME, "1048576") == INVAL
    assert spdk_rpc.refused("ublk_start_disk", VOLUME, "5", "-d", "0") == INVAL
    assert spdk_rpc("ublk_get_disks") == []
    assert spdk_rpc("ublk_start_disk", VOLUME, "5", "-d", "32", "-q", "2") == 5
    (uuid,) = (b["name"] for b in target.rpc("bdev_get_bdevs") if VOLUME in b["aliases"])
    disk = {
        "ublk_device": "/dev/ublkb5",
        "id": 5,
        "queue_depth": 32,
        "num_queues": 1,
        "bdev_name": uuid,
    }
    assert spdk_rpc("ublk_get_disks", "-n", "5") == [disk]
    assert spdk_rpc.refused("ublk_get_disks", "-n", "6") == NODEV
    assert spdk_rpc.refused("ublk_start_disk", "n0", "5") == BUSY
    assert spdk_rpc.refused("ublk_start_disk", VOLUME, "6") == BUSY
    assert int(guest.run("cat /sys/block/ublkb5/size")) == VOLUME_MIB * 2048
    bound = (
        "cd /proc/$(cat /tmp/target.pid)/task; for task in *; do grep -q export- $task/comm && "
        "awk '/^Cpus_allowed:/ { print $2 }' $task/status; done; true"
    )
    assert int(guest.run(bound), 16) == 1

    seed = choose_seed()
    moments = random.Random(seed)
    io = VerifiedIo(guest, "ublkb5", seed=seed, threads=1, depth=DEPTH)
    for way in (target.kill, target.terminate, target.upgrade):
        io.goes_on_after(way)
        assert spdk_rpc("ublk_get_disks") == [disk]
        time.sleep(moments.uniform(0, 0.4))
    io.finish()
    recorded = spdk_rpc("save_subsystem_config", "-n", "ublk")
    create = {"cpumask": "0x1", "disable_user_copy": True}
    start = {"bdev_name": uuid, "ublk_id": 5, "queue_depth": 32, "num_queues": 1}
    assert recorded["config"] == [
        {"method": "ublk_create_target", "params": create},
        {"method": "ublk_start_disk", "params": start},
    ]

    spdk_rpc("ublk_stop_disk", "5")
    assert spdk_rpc.refused("ublk_stop_disk", "5") == NODEV
    assert devices(target) == ""
    # At once again, with the same number.
    assert spdk_rpc("ublk_start_disk", VOLUME, "5") == 5
    spdk_rpc("ublk_destroy_target")
    assert spdk_rpc.refused("ublk_destroy_target") == NOENT
    assert target.rpc("virtlun_export_list") == []
    assert spdk_rpc.driven - {"save_subsystem_config"} == VERBS - {"ublk_recover_disk"}


@pytest.mark.nightly
def test_what_is_not_of_the_ublk_target_stays_without_it(
    target: TargetInside, spdk_rpc: SpdkRpc
) -> None:
    """Devices of virtlun_export_create, which need none, go by their numbers all the same."""
    guest = target.guest
    target.rpc("bdev_null_create", name="n0", num_blocks=2048, block_size=512)
    spdk_rpc("ublk_create_target")
    assert spdk_rpc("ublk_start_disk", VOLUME, "5") == 5
    made = target.rpc("virtlun_export_create", bdev_name="n0", device=True)["path"]
    guest.run("mkfs.ext4 -q -F /dev/ublkb5; mkdir -p /fs; mount -t ext4 /dev/ublkb5 /fs")
    guest.run("cp /bin/busybox /fs/; umount /fs")
    spdk_rpc("ublk_destroy_target")
    (left,) = spdk_rpc("ublk_get_disks")
    assert (left["ublk_device"], left["bdev_name"]) == (made, "n0")
    target.kill()
    assert spdk_rpc("ublk_get_disks") == [left]
    assert spdk_rpc.refused("ublk_start_disk", VOLUME, "5") == NODEV
    spdk_rpc("ublk_stop_disk", str(left["id"]))
    # The volume, as any other export.
    target.rpc("virtlun_export_create", bdev_name=VOLUME, device=True)
    (left,) = spdk_rpc("ublk_get_disks")
    guest.run(f"mount -t ext4 {left['ublk_device']} /fs; cmp /bin/busybox /fs/busybox; umount /fs")
    spdk_rpc("ublk_stop_disk", str(left["id"]))
    assert target.rpc("virtlun_export_list") == []
    assert devices(target) == ""


@pytest.mark.nightly
def test_a_disk_of_a_target_that_forgot_it_is_recovered(
    target: TargetInside, spdk_rpc: SpdkRpc
) -> None:
    """Whoever has it open waits until then."""
    guest = target.guest
    spdk_rpc("ublk_create_target")
    assert spdk_rpc("ublk_start_disk", VOLUME, "3") == 3
    (before,) = spdk_rpc("ublk_get_disks")
    guest.run("dd if=/bin/busybox of=/dev/ublkb3 bs=64k count=1 oflag=direct")
    guest.run(f"kill -9 $(cat /tmp/target.pid); rm -rf {SOCKET} /ram/state")
    guest.run("dd if=/dev/ublkb3 of=/tmp/read bs=64k count=1 iflag=direct 2>/tmp/dd & echo begun")
    target.start()
    target.rpc("bdev_uring_create", filename="/ram/disk", name="base", block_size=512)
    target.rpc("bdev_null_create", name="n0", num_blocks=2048, block_size=512)
    assert spdk_rpc.refused("ublk_recover_disk", VOLUME, "3") == NODEV
    spdk_rpc("ublk_create_target")
    assert spdk_rpc.refused("ublk_recover_disk", VOLUME, "4") == EXIST
    assert spdk_rpc.refused("ublk_recover_disk", "n0", "4") == NODEV
    assert spdk_rpc.refused("ublk_start_disk", "n0", "3") == EXIST
    assert spdk_rpc("ublk_recover_disk", VOLUME, "3") == 3
    assert spdk_rpc.refused("ublk_recover_disk", VOLUME, "3") == BUSY
    assert spdk_rpc("ublk_get_disks") == [before]
    guest.run("for i in $(seq 300); do pidof dd || exit 0; sleep .1; done; exit 1", 90.0)
    guest.run("head -c 65536 /bin/busybox | cmp - /tmp/read")
    target.kill()
    assert spdk_rpc("ublk_get_disks") == [before]
    spdk_rpc("ublk_destroy_target")
    assert devices(target) == ""
    assert "ublk_recover_disk" in spdk_rpc.driven
