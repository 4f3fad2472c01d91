"""Controllers as their peers see them: when they answer, and when they cannot be deleted."""

from __future__ import annotations

import shutil
import socket
import stat
import struct
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pydataplane.errors import RpcError
from tests.support.initiator import Initiator, connected
from tests.support.target import Target

# vhost-user: request, flags (version 1), size of the payload.
HEADER = struct.Struct("<III")
GET_FEATURES = 1
VERSION, REPLY = 0x1, 0x4


def connect(path: Path) -> socket.socket:
    """Returns a connection to a controller."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.connect(str(path))
    return peer


def ask_features(peer: socket.socket) -> None:
    """Sends GET_FEATURES."""
    peer.sendall(HEADER.pack(GET_FEATURES, VERSION, 0))


def features(peer: socket.socket) -> int:
    """Returns the answer to GET_FEATURES."""
    peer.settimeout(90)
    answer = peer.recv(HEADER.size + 8, socket.MSG_WAITALL)
    request, flags, size = HEADER.unpack_from(answer)
    assert (request, flags & 0x7, size) == (GET_FEATURES, VERSION | REPLY, 8)
    (bits,) = struct.unpack_from("<Q", answer, HEADER.size)
    return int(bits)


def test_a_delayed_controller_lets_its_peer_wait_until_it_is_started(target: Target) -> None:
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1", delay=True)
    with connect(target.vhost_dir / "vm-1") as peer:
        ask_features(peer)
        peer.settimeout(0.2)
        with pytest.raises(TimeoutError):
            peer.recv(1)
        assert target.rpc("vhost_get_controllers")[0]["sessions"] == []
        target.rpc("vhost_start_scsi_controller", ctrlr="vm-1")
        assert features(peer) & (1 << 30)  # VHOST_USER_F_PROTOCOL_FEATURES


def test_a_controller_with_a_peer_is_deleted_only_by_force(target: Target) -> None:
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    with connect(target.vhost_dir / "vm-1") as peer:
        ask_features(peer)
        features(peer)
        assert len(target.rpc("vhost_get_controllers")[0]["sessions"]) == 1
        error = target.fails("vhost_delete_controller", ctrlr="vm-1")
        assert isinstance(error, RpcError)
        assert (error.code, "a VM is connected" in error.message) == (-16, True)
        target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
        assert peer.recv(1) == b""
    assert target.rpc("vhost_get_controllers") == []
    assert not (target.vhost_dir / "vm-1").exists()


def test_a_peer_finds_its_controller_again_after_a_restart(target: Target) -> None:
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    with connect(target.vhost_dir / "vm-1") as peer:
        ask_features(peer)
        before = features(peer)
        target.restart()
        assert peer.recv(1) == b""
    with connect(target.vhost_dir / "vm-1") as peer:
        ask_features(peer)
        assert features(peer) == before


def test_a_volume_is_shared_only_if_both_ask_for_it(target: Target) -> None:
    target.rpc("bdev_null_create", name="n0", num_blocks=8, block_size=512)
    for ctrlr in ("vm-1", "vm-2"):
        target.rpc("vhost_create_scsi_controller", ctrlr=ctrlr)
    place = {"scsi_target_num": -1, "bdev_name": "n0"}
    target.rpc("vhost_scsi_controller_add_target", ctrlr="vm-1", shareable=True, **place)
    error = target.fails("vhost_scsi_controller_add_target", ctrlr="vm-2", **place)
    assert isinstance(error, RpcError)
    assert error.code == -16
    target.rpc("vhost_scsi_controller_add_target", ctrlr="vm-2", shareable=True, **place)
    (bdev,) = target.rpc("bdev_get_bdevs")
    assert bdev["claim_type"] == "read_many_write_shared"
    assert bdev["claimed_by"] == ["target 0 of controller vm-1", "target 0 of controller vm-2"]
    target.restart()
    assert target.rpc("bdev_get_bdevs") == [bdev]


def test_a_lun_is_shown_as_it_was_asked_for_and_as_the_guest_knows_it(target: Target) -> None:
    for name in ("n0", "n1"):
        target.rpc("bdev_null_create", name=name, num_blocks=8, block_size=512)
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")

    def luns() -> list[dict[str, Any]]:
        (controller,) = target.rpc("vhost_get_controllers")
        return [each["luns"][0] for each in controller["backend_specific"]["scsi"]]

    began = time.time()
    with Initiator(target.vhost_dir / "vm-1") as guest:
        guest.send("connect")
        add = {"ctrlr": "vm-1", "scsi_target_num": -1}
        target.rpc("vhost_scsi_controller_add_target", **add, bdev_name="n0", serial="s0")
        target.rpc(
            "vhost_scsi_controller_add_target",
            **add,
            bdev_name="n1",
            read_only=True,
            removable=True,
        )
        guest.ready(0)
        first, second = luns()
        (n1,) = target.rpc("bdev_get_bdevs", name="n1")
        assert (first["serial"], first["read_only"], first["removable"]) == ("s0", False, False)
        assert second["serial"] == n1["uuid"]
        assert (second["read_only"], second["removable"]) == (True, True)
        assert began <= first["attached_at"] <= second["attached_at"] <= time.time()
        assert first["guest_seen_at"] is first["resize_event_at"] is None
        inquiry = guest.cdb(bytes([0x12, 0, 0, 0, 36, 0]), target=1, data_in_len=36)
        assert inquiry["data_in"][1] == 0x80
        for prevent in (1, 0):
            guest.cdb(bytes([0x1E, 0, 0, 0, prevent, 0]), target=1)
            assert [lun["removal_prevented"] for lun in luns()] == [False, bool(prevent)]
        guest.cdb(bytes([0x1E, 0, 0, 0, 1, 0]), target=1)
        guest.cdb(bytes([0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0]), target=1, data_in_len=8)
        assert second["attached_at"] <= luns()[1]["guest_seen_at"] <= time.time()
    target.restart()
    again = luns()
    for lun in again:
        assert lun["attached_at"] > first["attached_at"]
        del lun["attached_at"]
    same = {"removal_prevented": False, "event_at": None, "guest_seen_at": None}
    expected = [{**lun, **same} for lun in (first, second)]
    for lun in expected:
        del lun["attached_at"]
    assert again == expected


def test_a_disk_in_use_is_not_removed_unless_by_force(target: Target) -> None:
    target.rpc("bdev_null_create", name="n0", num_blocks=8, block_size=512)
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    place = {"ctrlr": "vm-1", "scsi_target_num": 7}
    add = partial(target.rpc, "vhost_scsi_controller_add_target", bdev_name="n0", removable=True)
    remove = "vhost_scsi_controller_remove_target"
    add(**place)
    with Initiator(target.vhost_dir / "vm-1") as guest:
        guest.send("connect")

        def prevent(value: int) -> None:
            assert guest.cdb(bytes([0x1E, 0, 0, 0, value, 0]), target=7)["status"] == 0

        prevent(1)
        error = target.fails(remove, **place, unless_prevented=True)
        assert isinstance(error, RpcError)
        assert error.code == -16
        assert error.message == (
            "Device or resource busy: the guest of controller vm-1 has target 7 in use and prevents"
            " its removal; unmount the disk in the guest, or remove it without unless_prevented"
        )
        guest.read(0, 1, target=7)
    target.restart()  # it is still in the journal
    with Initiator(target.vhost_dir / "vm-1") as guest:
        guest.send("connect")
        guest.ready(7)
        prevent(1)
        target.fails(remove, **place, unless_prevented=True)
        prevent(0)
        assert target.rpc(remove, **place, unless_prevented=True) is True
        for given in ({}, {"unless_prevented": False}):
            add(**place)
            guest.ready(7)
            prevent(1)
            assert target.rpc(remove, **place, **given) is True
    error = target.fails(remove, **place, unless_prevented=True)
    assert isinstance(error, RpcError)
    assert error.code == -19


def test_a_lun_has_the_blocks_that_were_asked_for(target: Target) -> None:
    target.rpc("bdev_malloc_create", name="small", num_blocks=2047, block_size=512)
    target.rpc("bdev_null_create", name="large", num_blocks=8, block_size=4096)
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    add = {"ctrlr": "vm-1", "scsi_target_num": -1}
    for bdev, own, asked in (("small", 512, 1024), ("small", 512, 0), ("large", 4096, 512)):
        error = target.fails(
            "vhost_scsi_controller_add_target", **add, bdev_name=bdev, block_size=asked
        )
        assert isinstance(error, RpcError)
        assert error.code == -22
        assert error.message == (
            f"Invalid argument: bdev {bdev} with blocks of {own} bytes cannot be a SCSI disk with"
            f" blocks of {asked}: ask for 512 or 4096, and for no less than the bdev has"
        )
    for wrong in (-1, "4096", 4096.5, True):
        error = target.fails(
            "vhost_scsi_controller_add_target", **add, bdev_name="small", block_size=wrong
        )
        assert isinstance(error, RpcError)
        assert error.code == -32602
    for options in ({"bdev_name": "small", "block_size": 4096}, {"bdev_name": "large"}):
        target.rpc("vhost_scsi_controller_add_target", **add, **options)

    def sizes() -> list[int]:
        (controller,) = target.rpc("vhost_get_controllers")
        return [each["luns"][0]["block_size"] for each in controller["backend_specific"]["scsi"]]

    data = bytes(range(256)) * 32
    for stop in (target.stop, target.kill9):
        assert sizes() == [4096, 4096]
        with connected(target, "vm-1") as guest:
            # 255 blocks; of the 256th there is only a part.
            capacity = guest.cdb(bytes([0x25, *bytes(9)]), data_in_len=8)["data_in"]
            assert capacity == struct.pack(">II", 254, 4096)
            guest.write(253, data, block_size=4096)
            assert guest.read(253, 2, block_size=4096) == data
            beyond = guest.cdb(bytes([0x28, 0, 0, 0, 0, 255, 0, 0, 1, 0]), data_in_len=4096)
            assert (beyond["status"], beyond["sense"][12]) == (2, 0x21)
        stop()
        target.start()
    assert sizes() == [4096, 4096]
    # The same bytes are there for who counts them otherwise.
    with connected(target, "vm-1") as guest:
        guest.write(253, data, block_size=4096)
    target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-1", scsi_target_num=0)
    target.rpc("vhost_scsi_controller_add_target", **add, bdev_name="small")
    assert sizes() == [512, 4096]
    with connected(target, "vm-1") as guest:
        assert guest.read(253 * 8, 16) == data


def test_the_group_of_a_socket_is_kept(target: Target) -> None:
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1", socket_gid=4242, own_folder=True)
    socket_path = target.vhost_dir / "vm-1" / "vhost.sock"
    for _ in range(2):
        made = socket_path.stat()
        assert (made.st_gid, stat.S_IMODE(made.st_mode)) == (4242, 0o660)
        assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o755
        target.crash()


def test_the_socket_of_a_disk_can_be_in_the_folder_of_a_controller(target: Target) -> None:
    target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=512)
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1", own_folder=True)
    disk = {"ctrlr": "vm-1.0", "dev_name": "m0", "socket_gid": 4242}
    for below in ("/tmp/x", "../x", "a/b/c", "vm-1/", "vm-1/../x", "./x", "", "a//b"):
        error = target.fails("vhost_create_blk_controller", **disk, socket=below)
        assert isinstance(error, RpcError)
        assert (error.code, "is not NAME or FOLDER/NAME" in error.message) == (-22, True), below
    target.fails("vhost_create_blk_controller", **disk, socket="vm-1/s", own_folder=True)
    # One that is taken.
    target.fails("vhost_create_blk_controller", **disk, socket="vm-1/vhost.sock")
    target.rpc("vhost_create_blk_controller", **disk, socket="vm-1/vhost.sock.0")
    path = target.vhost_dir / "vm-1/vhost.sock.0"
    for restart in (target.kill9, target.upgrade, target.stop):
        (shown,) = target.rpc("vhost_get_controllers", name="vm-1.0")
        assert shown["socket"] == str(path)
        assert (path.stat().st_gid, stat.S_IMODE(path.stat().st_mode)) == (4242, 0o660)
        with Initiator(path) as guest:
            guest.send("connect", kind="blk")
            assert guest.send("capacity")["blocks"] == 2048
        restart()
        if restart != target.upgrade:
            target.start()
    target.rpc("vhost_delete_controller", ctrlr="vm-1.0")
    assert [each.name for each in path.parent.iterdir()] == ["vhost.sock"]
    # As after a boot of the host, when the folder of sockets is empty.
    target.rpc("vhost_create_blk_controller", **disk, socket="elsewhere/s")
    target.stop()
    shutil.rmtree(target.vhost_dir)
    target.start()
    assert (target.vhost_dir / "elsewhere/s").is_socket()


def test_a_controller_that_is_refused_leaves_no_folder(target: Target) -> None:
    folder = target.vhost_dir / "vm-1"
    refused = {"ctrlr": "vm-1", "own_folder": True, "cpumask": "0x8000000000000000"}
    with pytest.raises(RpcError):
        target.rpc("vhost_create_scsi_controller", **refused)
    assert not folder.exists()
    # Not one that is mounted elsewhere, perhaps.
    folder.mkdir()
    with pytest.raises(RpcError):
        target.rpc("vhost_create_scsi_controller", **refused)
    assert folder.is_dir()
    folder.rmdir()
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    assert folder.is_socket()
