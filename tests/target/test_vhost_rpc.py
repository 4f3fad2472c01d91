"""Controllers as their peers see them: when they answer, and when they cannot be deleted."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest

from pydataplane.errors import RpcError
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
    peer.settimeout(30)
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
