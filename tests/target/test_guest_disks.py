"""Bdevs that are a guest's disk alone: not looked at, and gone with the last who uses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pydataplane.errors import BUSY, RpcError
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
        target.attach("vm-0", NAME)
        target.restart()
        assert is_there(target)
        assert target.rpc("bdev_lvol_get_lvstores") == []


def test_one_that_cannot_be_restored_is_forgotten_with_its_user(
    target: Target, server: Nbdkit
) -> None:
    with server:
        create(target, server)
        target.attach("vm-0", NAME)
        target.stop()
    target.start()
    until(lambda: recorded(target), "the record")
    assert not is_there(target)
    target.rpc("vhost_delete_controller", ctrlr="vm-0", force=False)
    until(lambda: not recorded(target), "the record to go")


def test_one_guest_writes_to_an_export(target: Target, server: Nbdkit) -> None:
    """An NBD server locks nothing."""
    other = NAME.replace("1", "2")

    def made(name: str, **more: object) -> str:
        given = {"name": name, "uuid": name, "uri": server.uri, "guest_disk": True, **more}
        return str(target.rpc("virtlun_nbd_create", **given))

    with server:
        made(NAME)
        with pytest.raises(RpcError, match=f"is written to as bdev {NAME} by another guest") as got:
            made(other)
        assert got.value.code == BUSY
        with pytest.raises(RpcError, match="by another guest"):
            made(other, shared=True)
        made(other, readonly=True)
        for name in (NAME, other):
            target.rpc("virtlun_guest_disk_close", name=name)
        made(NAME, shared=True)
        made(other, shared=True)
        target.rpc("virtlun_nbd_create", name="administrators", uri=server.uri)


def test_one_that_is_asked_for_again_stays_for_whoever_asks(target: Target, server: Nbdkit) -> None:
    with server:
        create(target, server)
        target.attach("vm-0", NAME)
        with pytest.raises(RpcError, match="already"):
            create(target, server)
        target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-0", scsi_target_num=0)
        assert is_there(target)
        target.add_lun("vm-0", NAME, 0)
        target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-0", scsi_target_num=0)
        assert not is_there(target)


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_one_that_nobody_uses_goes_without_a_call(target: Target, server: Nbdkit) -> None:
    with server:
        create(target, server)
        until(lambda: not is_there(target), "the disk to go", 130)
        assert not recorded(target)
