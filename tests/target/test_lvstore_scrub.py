"""`virtlun lvstore scrub`: data that the disk below cannot return any more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.failing_disk import GOOD_MIB, failing_disk
from tests.support.initiator import connected
from tests.support.target import Target
from tests.target.test_cli import done, run

pytestmark = pytest.mark.root

MIB = 1 << 20


@pytest.mark.nightly
def test_what_cannot_be_read_is_told_with_the_volume_that_has_it(
    target: Target, scratch: Path
) -> None:
    with failing_disk(scratch) as disk:
        target.rpc("bdev_aio_create", name="d0", filename=disk.device, block_size=512)
        target.rpc("bdev_lvol_create_lvstore", bdev_name="d0", lvs_name="lvs0")
        for name in ("a", "b"):
            target.make_thin(name, 32)
        target.rpc("vhost_create_scsi_controller", ctrlr="vm")
        for number, name in enumerate("ab"):
            add = {"ctrlr": "vm", "scsi_target_num": number, "bdev_name": f"lvs0/{name}"}
            target.rpc("vhost_scsi_controller_add_target", **add)
        with connected(target, "vm") as guest:
            for mib in range(20):
                guest.write(mib * MIB // 512, bytes([mib + 1]) * MIB)
            guest.cdb(bytes([0x35, *bytes(9)]))
        used = sum(each["num_allocated_clusters"] for each in target.rpc("bdev_lvol_get_lvols")) * (
            64 << 10
        )
        assert used == 20 * MIB
        said = run(target, "lvstore", "scrub", "lvs0").output
        assert "all 20 MiB of lvstore lvs0 can be read" in said
        target.rpc("bdev_lvol_snapshot", lvol_name="lvs0/a", snapshot_name="s")
        disk.fail()
        found = run(target, "lvstore", "scrub", "lvs0", "--json", "--rate", "1000")
        assert found.exit_code == 1
        rows = json.loads(found.stdout)
        assert rows and {row["volume"] for row in rows} == {"lvs0/s"}, "who has the clusters"
        for row in rows:
            assert row["offset"] + row["length"] > GOOD_MIB * MIB - 512
            assert "bdev d0" in row["cause"]
        # Of each MiB the first bytes are where the guest wrote them.
        beyond = 20 * MIB - sum(row["length"] for row in rows)
        assert 0 < beyond < GOOD_MIB * MIB
        assert "lvs0/s" in run(target, "lvstore", "scrub", "lvs0").output
        disk.mend()
        done(target, "lvstore", "scrub", "lvs0")
