"""An export whose storage does not answer delays nobody: no other export, no guest, no RPC.

The storage that does not answer is a real file: another target's export, while that target is
stopped. What waits for it goes on when it runs again.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.frozen import frozen
from tests.support.initiator import connected
from tests.target.conftest import MakeTarget

pytestmark = pytest.mark.root
MIB = 1 << 20
DEADLINE_S = 60.0


def test_an_export_whose_storage_does_not_answer_delays_nobody(make_target: MakeTarget) -> None:
    below = make_target().start()
    below.make_lvstore(size=256 * MIB)
    lvol = below.rpc("bdev_lvol_create", lvol_name="disk", size_in_mib=128, lvs_name="lvs0")
    disk = below.rpc("virtlun_export_create", bdev_name=lvol)["path"]
    target = make_target().start()
    target.rpc("bdev_uring_create", filename=disk, name="base", block_size=512)
    target.rpc("bdev_lvol_create_lvstore", bdev_name="base", lvs_name="stalls")
    target.make_lvstore()
    volumes = {
        name: target.rpc("bdev_lvol_create", lvol_name=name, size_in_mib=16, lvs_name=lvs)
        for name, lvs in (("stuck", "stalls"), ("free", "lvs0"), ("lun", "lvs0"))
    }
    stuck, free = (
        Path(target.rpc("virtlun_export_create", bdev_name=volumes[name])["path"])
        for name in ("stuck", "free")
    )
    target.rpc("vhost_create_scsi_controller", ctrlr="vm")
    lun = {"ctrlr": "vm", "scsi_target_num": 0, "bdev_name": volumes["lun"]}
    target.rpc("vhost_scsi_controller_add_target", **lun)
    with frozen(below.pid):
        words = ["dd", "if=/dev/zero", f"of={stuck}", "bs=1M", "count=8", "conv=notrunc,fsync"]
        writing = subprocess.Popen(words, stderr=subprocess.PIPE)
        with connected(target, "vm") as guest:
            for number in range(100):
                data = bytes([number]) * 4096
                guest.write(8 * number, data)
                assert guest.read(8 * number, 8) == data
                with free.open("rb+", buffering=0) as file:
                    os.pwrite(file.fileno(), data, 4096 * number)
                    assert os.pread(file.fileno(), 4096, 4096 * number) == data
                assert len(target.rpc("virtlun_export_list")) == 2
        with pytest.raises(subprocess.TimeoutExpired):  # it waits all the while
            writing.wait(0.2)
    assert writing.communicate(timeout=DEADLINE_S)[1] is not None
    assert writing.returncode == 0
    for volume in (volumes["stuck"], volumes["free"]):
        target.rpc("virtlun_export_delete", bdev_name=volume)
    target.rpc("vhost_delete_controller", ctrlr="vm", force=True)
    assert target.stop() == 0
