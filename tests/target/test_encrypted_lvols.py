"""Lvols with keys of their own: encrypted below, as any other lvol above."""

from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path

import grpc
import pytest

from csi.proto import csi_pb2 as pb
from pydataplane.client import Client
from pydataplane.errors import NO_KEY, RpcError
from pydataplane.volumes import Volumes
from tests.support.csi import Driver, block, running, snapshot_of
from tests.support.encryption import (
    KEY2,
    MARK,
    OTHER,
    code,
    give_key,
    in_memory,
    marked,
    waiting_guest,
)
from tests.support.initiator import connected
from tests.support.rpc_schemas import methods
from tests.support.target import Target
from tests.target.conftest import MakeTarget

MIB = 1 << 20
FLUSH = bytes([0x35, *bytes(9)])


@pytest.fixture
def file(target: Target) -> Path:
    """The file of an lvstore with the encrypted volume lvs0/v0; the target has its key."""
    file = target.make_lvstore()
    give_key(target)
    make(target, "v0")
    return file


def make(target: Target, name: str, mib: int = 16, **options: object) -> str:
    """Makes an encrypted thin lvol; returns its UUID."""
    params = {"lvol_name": name, "size_in_mib": mib, "lvs_name": "lvs0", "key_name": "k0"}
    uuid: str = target.rpc("bdev_lvol_create", **{"thin_provision": True, **params, **options})
    return uuid


def shown(target: Target, bdev: str, offset: int, length: int) -> bytes:
    """Returns what a volume shows to a guest, and takes it away again."""
    target.attach("vm-look", bdev)
    try:
        with connected(target, "vm-look") as vm:
            return vm.read(offset // 512, length // 512)
    finally:
        target.rpc("vhost_delete_controller", ctrlr="vm-look", force=True)


def lies(file: Path) -> bool:
    """Whether the marked data is on the disk in clear."""
    return MARK in file.read_bytes()


def test_what_a_guest_writes_lies_encrypted_and_is_read_back(target: Target, file: Path) -> None:
    data = marked(2 * MIB)
    target.attach("vm-1", "lvs0/v0")
    with connected(target, "vm-1") as vm:
        for at in range(0, len(data), 64 << 10):
            vm.write((MIB + at) // 512, data[at : at + (64 << 10)])
        vm.cdb(FLUSH)
        # The same in an lvol without a key, so that the look at the file would find it.
        assert vm.read(0, 8) == bytes(4096)
    target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
    assert not lies(file)
    assert shown(target, "lvs0/v0", MIB, 64 << 10) == data[: 64 << 10]
    target.make_thin("clear", 8)
    target.attach("vm-2", "lvs0/clear")
    with connected(target, "vm-2") as vm:
        vm.write(0, data[:4096])
        vm.cdb(FLUSH)
    assert lies(file)


def test_it_says_which_key_it_has(target: Target, file: Path) -> None:
    target.make_thin("clear", 8)
    told = {each["name"]: each for each in target.rpc("bdev_lvol_get_lvols")}
    assert (told["v0"]["key_name"], told["v0"]["waits_for_key"]) == ("k0", False)
    assert "key_name" not in told["clear"]
    (bdev,) = target.rpc("bdev_get_bdevs", name="lvs0/v0")
    assert bdev["driver_specific"]["lvol"]["key_name"] == "k0"
    assert target.rpc("accel_crypto_keys_get")[0]["used_by"] == ["lvs0/v0"]
    number, sentence = code(target, "accel_crypto_key_destroy", key_name="k0")
    assert number == errno.EBUSY and "lvs0/v0" in sentence


@pytest.mark.parametrize("thin", [True, False])
def test_snapshots_and_clones_have_its_key(target: Target, file: Path, thin: bool) -> None:
    make(target, "v1", 8, thin_provision=thin)
    first, second = marked(128 << 10, 1), marked(128 << 10, 2)
    target.attach("vm-1", "lvs0/v1")
    with connected(target, "vm-1") as vm:
        vm.write(0, first)
        target.rpc("bdev_lvol_snapshot", lvol_name="lvs0/v1", snapshot_name="s")
        vm.write(64, second[: 64 << 10])
        vm.write(8192, second)
        changed = first[: 32 << 10] + second[: 64 << 10] + first[96 << 10 :]
        assert vm.read(0, 256) == changed
    target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
    target.rpc("bdev_lvol_clone", snapshot_name="lvs0/s", clone_name="c")
    told = {each["name"]: each["key_name"] for each in target.rpc("bdev_lvol_get_lvols")}
    assert told == {"v0": "k0", "v1": "k0", "s": "k0", "c": "k0"}
    assert shown(target, "lvs0/c", 0, 128 << 10) == first
    target.attach("vm-1", "lvs0/c")
    with connected(target, "vm-1") as vm:
        vm.write(8, second[:4096])
        assert vm.read(0, 256) == first[:4096] + second[:4096] + first[8192:]
    target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
    target.rpc("bdev_lvol_inflate", name="lvs0/c")
    assert shown(target, "lvs0/c", 0, 128 << 10) == first[:4096] + second[:4096] + first[8192:]
    target.rpc("virtlun_lvol_roll_back", lvol_name="lvs0/v1", snapshot_name="lvs0/s")
    assert shown(target, "lvs0/v1", 0, 128 << 10) == first
    assert shown(target, "lvs0/v1", 4 * MIB, 128 << 10) == bytes(128 << 10)
    target.rpc("bdev_lvol_resize", name="lvs0/v1", size_in_mib=12)
    assert shown(target, "lvs0/v1", 10 * MIB, 4096) == bytes(4096)
    target.rpc("bdev_lvol_delete", name="lvs0/s")
    assert shown(target, "lvs0/v1", 0, 128 << 10) == first
    assert not lies(file)


def test_what_would_be_read_wrongly_is_refused(target: Target, file: Path) -> None:
    give_key(target, "k1", key=OTHER)
    for name, options in (("other", {"key_name": "k1"}), ("clear", {"key_name": None})):
        make(target, name, 16, **options)
        target.rpc("bdev_lvol_snapshot", lvol_name=f"lvs0/{name}", snapshot_name=f"{name}-s")
    target.rpc("bdev_malloc_create", name="m0", num_blocks=16 * MIB // 512, block_size=512)
    attempts = (
        ("bdev_lvol_set_parent", {"lvol_name": "lvs0/v0", "parent_name": "lvs0/other-s"}),
        ("bdev_lvol_set_parent", {"lvol_name": "lvs0/v0", "parent_name": "lvs0/clear-s"}),
        ("bdev_lvol_set_parent_bdev", {"lvol_name": "lvs0/v0", "parent_name": "m0"}),
        ("bdev_crypto_create", {"base_bdev_name": "lvs0/v0", "name": "c0", "key_name": "k1"}),
    )
    for method, params in attempts:
        number, sentence = code(target, method, **params)
        assert number == errno.EINVAL, (method, sentence)
        assert "encrypted" in sentence
    xattr = {"name": "lvs0/v0", "xattr_name": "virtlun.encryption"}
    assert code(target, "virtlun_lvol_set_xattr", **xattr, xattr_value="k1 0")[0] == errno.EINVAL
    assert code(target, "virtlun_lvol_remove_xattr", **xattr)[0] == errno.EINVAL
    new = {"lvol_name": "new", "size_in_mib": 1, "lvs_name": "lvs0"}
    forged = {"virtlun.encryption": "k1 0"}
    assert code(target, "bdev_lvol_create", **new, xattrs=forged)[0] == errno.EINVAL
    number, sentence = code(target, "bdev_lvol_create", **new, key_name="nobody")
    assert number == errno.ENOKEY
    assert "lvol lvs0/new needs its key nobody: give it with" in sentence


def test_after_a_restart_the_guest_waits_for_the_key(target: Target, file: Path) -> None:
    data = marked(8192)
    uuid = target.rpc("bdev_lvol_get_lvols")[0]["uuid"]
    target.attach("vm-1", "lvs0/v0")
    target.make_thin("clear", 8)
    target.attach("vm-2", "lvs0/clear")
    with connected(target, "vm-1") as vm:
        vm.write(8, data)
        vm.cdb(FLUSH)
    for end in (target.stop, target.kill9):
        end()
        target.start()
        assert target.rpc("accel_crypto_keys_get") == []
        problems = target.rpc("virtlun_get_status")["restore_problems"]
        assert [each for each in problems if f"lvol {uuid} waits for its key k0" in each], problems
        told = {each["name"]: each["waits_for_key"] for each in target.rpc("bdev_lvol_get_lvols")}
        assert told == {"v0": True, "clear": False}
        with connected(target, "vm-2"):
            pass
        with waiting_guest(target) as (vm, connection):
            wrong = {"cipher": "AES_XTS", "key": OTHER, "key2": KEY2, "name": "k0"}
            number, sentence = code(target, "accel_crypto_key_create", **wrong)
            assert number == errno.EINVAL
            assert "this key k0 is not the one that lvol lvs0/v0 was made with" in sentence
            for method, params in (
                ("bdev_lvol_delete", {"name": "lvs0/v0"}),
                ("bdev_lvol_delete", {"name": uuid}),
            ):
                number, sentence = code(target, method, **params)
                assert number == errno.EBUSY, sentence
                assert "waits for its key k0" in sentence
            for method, params in (
                ("virtlun_export_create", {"bdev_name": "lvs0/v0"}),
                (
                    "vhost_scsi_controller_add_target",
                    {"ctrlr": "vm-2", "scsi_target_num": 1, "bdev_name": "lvs0/v0"},
                ),
                ("bdev_get_bdevs", {"name": "lvs0/v0"}),
                ("bdev_get_iostat", {"name": "lvs0/v0"}),
                ("bdev_examine", {"name": "lvs0/v0"}),
                ("virtlun_bdev_clear_flush_error", {"name": "lvs0/v0"}),
            ):
                number, sentence = code(target, method, **params)
                assert number == errno.ENOKEY, (method, sentence)
                assert "waits for its key k0" in sentence
                assert any(each["code"] == -number for each in methods()[method]["errors"]), method
            assert not connection.done()
            give_key(target)
            assert target.rpc("virtlun_get_status")["restore_problems"] == []
            connection.result(60)
            vm.ready()
            assert vm.read(8, 16) == data


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("bdev_lvol_delete", {"name": "lvs0/v0"}),
        ("bdev_lvol_delete_lvstore", {"lvs_name": "lvs0"}),
        ("bdev_lvol_set_read_only", {"name": "lvs0/v0"}),
        ("virtlun_lvol_roll_back", {"lvol_name": "lvs0/v0", "snapshot_name": "lvs0/s"}),
        ("bdev_lvol_set_parent", {"lvol_name": "lvs0/v0", "parent_name": "lvs0/s"}),
    ],
)
def test_what_a_guest_waits_for_is_in_use(
    target: Target, file: Path, method: str, params: dict[str, str]
) -> None:
    """As it is with its key; none of these needs that to be done."""
    for name in ("s", "s2"):
        target.rpc("bdev_lvol_snapshot", lvol_name="lvs0/v0", snapshot_name=name)
    target.attach("vm-1", "lvs0/v0")
    number, _ = code(target, method, **params)
    assert number == errno.EBUSY
    target.restart()
    number, sentence = code(target, method, **params)
    assert number == errno.EBUSY
    assert "lvol lvs0/v0 waits for its key k0, and" in sentence
    target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
    target.rpc(method, **params)


def test_a_snapshot_made_without_the_key_has_it_too(target: Target, file: Path) -> None:
    """Nothing is read for a snapshot or a clone, so they need no key to be made."""
    data = marked(4096)
    target.attach("vm-1", "lvs0/v0")
    with connected(target, "vm-1") as vm:
        vm.write(0, data)
        vm.cdb(FLUSH)
    target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
    target.stop()
    target.start()
    target.rpc("bdev_lvol_snapshot", lvol_name="lvs0/v0", snapshot_name="s")
    target.rpc("bdev_lvol_clone", snapshot_name="lvs0/s", clone_name="c")
    assert [each["waits_for_key"] for each in target.rpc("bdev_lvol_get_lvols")] == [True] * 3
    assert target.rpc("bdev_get_bdevs") != []
    give_key(target)
    assert shown(target, "lvs0/c", 0, 4096) == data


def test_one_whose_key_is_lost_can_be_deleted(target: Target, file: Path) -> None:
    target.stop()
    target.start()
    target.rpc("bdev_lvol_delete", name="lvs0/v0")
    assert target.rpc("bdev_lvol_get_lvols") == []


def test_an_upgrade_hands_the_key_over(target: Target, file: Path) -> None:
    data = marked(4096)
    target.attach("vm-1", "lvs0/v0")
    with connected(target, "vm-1") as vm:
        vm.write(0, data)
        target.upgrade()
        assert vm.read(0, 8) == data
        vm.write(8, data)
        assert vm.read(8, 8) == data
    assert target.rpc("virtlun_get_status")["restore_problems"] == []


def test_its_key_goes_with_the_last_that_has_it(target: Target) -> None:
    """It is not in the target's memory any more."""
    target.make_lvstore()
    for delete_all in (False, True):
        key = random.Random(time.time_ns()).randbytes(32)
        give_key(target, key=key.hex(), destroy_with_last=True)
        make(target, "v0")
        target.attach("vm-1", "lvs0/v0")
        with connected(target, "vm-1") as vm:
            vm.write(0, marked(4096))
        assert in_memory(target, key) > 0, "the search finds nothing that is there"
        target.rpc("vhost_delete_controller", ctrlr="vm-1", force=True)
        target.rpc("bdev_lvol_snapshot", lvol_name="lvs0/v0", snapshot_name="s")
        if delete_all:
            target.rpc("bdev_lvol_delete_lvstore", lvs_name="lvs0")
        else:
            target.rpc("bdev_lvol_delete", name="lvs0/v0")
            assert [each["name"] for each in target.rpc("accel_crypto_keys_get")] == ["k0"]
            target.rpc("bdev_lvol_delete", name="lvs0/s")
        assert target.rpc("accel_crypto_keys_get") == []
        assert in_memory(target, key) == in_memory(target, key.hex().encode()) == 0


def test_a_degraded_or_waiting_volume_is_in_the_model(target: Target, file: Path) -> None:
    volumes = Volumes(Client(target.rpc_socket))
    made = volumes.create("lvs0/v1", 4 * MIB, thin=True, key="k0")
    assert (made.key, made.degraded) == ("k0", False)
    target.stop()
    target.start()
    assert volumes.volumes() == []
    waiting = volumes.degraded()
    assert [(each.path, each.key, each.degraded) for each in waiting] == [
        ("lvs0/v0", "k0", True),
        ("lvs0/v1", "k0", True),
    ]
    with pytest.raises(RpcError) as refused:
        volumes.volume("lvs0/v1")
    assert refused.value.code == NO_KEY
    assert "waits for its key k0: give it with `virtlun key create`" in str(refused.value)
    volumes.delete("lvs0/v1")
    assert [each.path for each in volumes.degraded()] == ["lvs0/v0"]


def listed(driver: Driver) -> tuple[list[str], list[str]]:
    """Returns the handles of all volumes, and of all snapshots."""
    volumes = driver.call(pb.ListVolumesRequest()).entries
    snapshots = driver.call(pb.ListSnapshotsRequest()).entries
    return [e.volume.volume_id for e in volumes], [e.snapshot.snapshot_id for e in snapshots]


@pytest.mark.nightly
@pytest.mark.root
def test_a_storage_class_names_the_key(make_target: MakeTarget) -> None:
    with running(make_target().start(), 1024) as driver:
        code, sentence = driver.refuses(
            driver.create_request("pvc-1", 64 * MIB, block(), encryptionKey="k0")
        )
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "needs its key k0: give it with" in sentence
        give_key(driver.target)
        handle = driver.create("pvc-1", 64 * MIB, block(), encryptionKey="k0", thin="true")
        path = driver.publish(handle, block())
        with path.open("r+b", buffering=0) as disk:
            disk.write(marked(64 << 10))
            os.fsync(disk.fileno())
        (store,) = Volumes(driver.target.client).lvstores()
        assert not lies(driver.target.directory / f"{store.name}.img")
        driver.unpublish(handle)
        driver.unstage(handle)
        snapshot = driver.snapshot(handle, "snap-1")
        clear = driver.create_request(
            "pvc-2", 64 * MIB, block(), snapshot_of(snapshot), thin="true"
        )
        code, sentence = driver.refuses(clear)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "name a class with encryptionKey: k0" in sentence
        # Until the key is given again it is neither gone nor deleted.
        driver.target.restart()
        for request in (
            pb.DeleteVolumeRequest(volume_id=handle),
            driver.stage_request(handle, block()),
        ):
            code, sentence = driver.refuses(request)
            assert code is grpc.StatusCode.UNAVAILABLE, sentence
            assert "waits for its key k0" in sentence
        driver.stop()
        driver.start()
        assert listed(driver) == ([handle], [snapshot])
        give_key(driver.target)
        assert listed(driver) == ([handle], [snapshot])
        path = driver.publish(handle, block())
        assert path.open("rb").read(64 << 10) == marked(64 << 10)
