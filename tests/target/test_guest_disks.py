"""Bdevs that are a guest's disk alone: not looked at, and gone with the last who uses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.nbdkit import Nbdkit
from tests.support.target import Target
from tests.support.wait import until

NAME = "0b0a3c55-1f5e-5c7e-9a52-6b7f0d0e0001"
MIB = 1 << 20


@pytest.fixture
def server(scratch: Path) -> Nbdkit:
    """A server of one file."""
    path = scratch / "disk.img"
    with path.open("xb") as file:
        file.truncate(64 * MIB)
    return Nbdkit(scratch, "file", str(path))


def create(target: Target, server: Nbdkit) -> None:
    made = target.rpc("virtlun_nbd_create", name=NAME, uuid=NAME, uri=server.uri, guest_disk=True)
    assert made == NAME


def is_there(target: Target) -> bool:
    return NAME in {bdev["name"] for bdev in target.rpc("bdev_get_bdevs")}


def recorded(target: Target) -> bool:
    return NAME in (target.state_dir / "config.json").read_text()


def test_it_goes_with_the_last_who_uses_it(target: Target, server: Nbdkit) -> None:
    with server:
        create(target, server)
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-0")
        assert is_there(target)  # new, it waits for whoever made it
        target.add_lun("vm-0", NAME, 0)
        assert target.rpc("virtlun_guest_disk_close", name=NAME)
        target.restart()
        assert is_there(target)
        target.upgrade()
        assert is_there(target)
        target.rpc("virtlun_bdev_set_limits", name=NAME, total_iops_sec=100)
        target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-0", scsi_target_num=0)
        assert not is_there(target)
        assert not recorded(target)  # nor its limits
        create(target, server)
        limits = target.rpc("virtlun_bdev_get_limits", name=NAME)
        assert limits["total_iops_sec"] == 0
        assert target.rpc("virtlun_guest_disk_close", name=NAME)
        assert not is_there(target)
        assert not target.rpc("virtlun_guest_disk_close", name=NAME)


def test_what_it_holds_is_not_looked_at(target: Target, server: Nbdkit) -> None:
    with server:
        target.rpc("virtlun_nbd_create", name="n0", uri=server.uri)
        target.rpc("bdev_lvol_create_lvstore", bdev_name="n0", lvs_name="lvs0")
        target.rpc("virtlun_nbd_delete", name="n0")
        create(target, server)
        assert target.rpc("bdev_lvol_get_lvstores") == []
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-0")
        target.add_lun("vm-0", NAME, 0)
        target.restart()
        assert is_there(target)
        assert target.rpc("bdev_lvol_get_lvstores") == []


def test_one_that_cannot_be_restored_is_forgotten_with_its_user(
    target: Target, server: Nbdkit
) -> None:
    with server:
        create(target, server)
        target.rpc("vhost_create_scsi_controller", ctrlr="vm-0")
        target.add_lun("vm-0", NAME, 0)
        target.stop()
    target.start()
    until(lambda: recorded(target), "the record")
    assert not is_there(target)
    target.rpc("vhost_delete_controller", ctrlr="vm-0", force=False)
    until(lambda: not recorded(target), "the record to go")
