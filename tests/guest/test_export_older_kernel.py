"""A volume as a file of a target on Linux 6.1, which cannot send again what a killed server had.

Its users notice a pause while it restarts in order, or is upgraded, and errors when it is killed.
Target and holder run in a guest with that kernel. `VIRTLUN_SEED` repeats the moments of a run.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.guest.image import Kernel
from tests.guest.test_ublk_export import DEPTH, booted, guest, target
from tests.support.restarts import choose_seed
from tests.support.target_inside import VOLUME, TargetInside
from tests.support.verified_io import VerifiedIo

__all__ = ["booted", "guest", "target"]

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(900),
    pytest.mark.parametrize("booted", [Kernel.RELEASE], indirect=True, ids=str),
]
LOOP = "/dev/loop0"


def export(target: TargetInside) -> str:
    """Exports the volume as a file, and says what that survives; returns its path."""
    path: str = target.rpc("virtlun_export_create", bdev_name=VOLUME)["path"]
    (listed,) = target.rpc("virtlun_export_list")
    assert (listed["path"], listed["survives"], listed["opens"]) == (path, "restart", 0)
    return path


@pytest.mark.nightly
def test_io_waits_for_orderly_restarts_and_upgrades(target: TargetInside) -> None:
    seed = choose_seed()
    moments = random.Random(seed)
    target.guest.run(f"losetup {LOOP} {export(target)}")
    try:
        io = VerifiedIo(target.guest, Path(LOOP).name, seed=seed, threads=1, depth=DEPTH)
        ways = [target.terminate, target.upgrade] * 2
        moments.shuffle(ways)
        for way in ways:
            io.goes_on_after(way)
            time.sleep(moments.uniform(0, 0.4))
        io.finish()
    finally:
        target.guest.run(f"losetup -d {LOOP}")
    target.rpc("virtlun_export_delete", bdev_name=VOLUME)


@pytest.mark.nightly
def test_what_has_the_file_open_gets_errors_after_a_kill(target: TargetInside) -> None:
    """What was synced is in the file that is made anew."""
    inside, path = target.guest, export(target)
    inside.run(f"dd if=/bin/busybox of={path} bs=64k count=4 conv=notrunc,fsync")
    reader = "until [ -e /tmp/go ]; do sleep .1; done; cat <&3 >/dev/null"
    inside.run(f"rm -f /tmp/go; ({reader}) 3<{path} >/dev/null 2>/tmp/said & echo $! >/tmp/cat.pid")
    target.kill()
    (listed,) = target.rpc("virtlun_export_list")
    assert (listed["path"], listed["survives"], listed["opens"]) == (path, "restart", 0)
    assert "only Linux 6.9 and newer send again" in target.words()
    said = inside.run(
        "touch /tmp/go; while [ -e /proc/$(cat /tmp/cat.pid) ]; do sleep .1; done; cat /tmp/said"
    )
    assert "not connected" in said or "aborted" in said, said
    inside.run(f"dd if=/bin/busybox bs=64k count=4 | cmp -n 262144 - {path}")
    target.rpc("virtlun_export_delete", bdev_name=VOLUME)
