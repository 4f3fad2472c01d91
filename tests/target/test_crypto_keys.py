"""Keys of encrypted bdevs: who has them, when, and what happens without them."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.encryption import (
    KEY,
    KEY2,
    OTHER,
    assert_no_key,
    code,
    encrypt,
    give_key,
    in_memory,
    make_encrypted,
    marked,
    waiting_guest,
)
from tests.support.initiator import connected
from tests.support.target import Target
from tests.target.conftest import MakeTarget

MIB = 1 << 20


def test_after_a_restart_the_guest_waits_for_the_key(target: Target) -> None:
    make_encrypted(target)
    target.attach("vm-1", "c0")
    target.rpc("bdev_malloc_create", name="m0", num_blocks=2048, block_size=512)
    target.attach("vm-2", "m0")
    with connected(target, "vm-1") as vm:
        vm.write(8, marked(8192))
        vm.cdb(bytes([0x35, *bytes(9)]))
    for end in (target.stop, target.kill9):
        end()
        target.start()
        assert target.rpc("accel_crypto_keys_get") == []
        problems = target.rpc("virtlun_get_status")["restore_problems"]
        assert [each for each in problems if "bdev c0 needs its key k0" in each], problems
        # Others are served.
        with connected(target, "vm-2"):
            pass
        with waiting_guest(target) as (vm, connection):
            number, sentence = code(
                target,
                "accel_crypto_key_create",
                cipher="AES_XTS",
                key=OTHER,
                key2=KEY2,
                name="k0",
            )
            assert number == errno.EINVAL
            assert sentence.endswith(
                "this key k0 is not the one that bdev c0 was made with: give that one"
            )
            # Nobody takes what lies there for data, or writes over it.
            for method, params in (
                ("virtlun_export_create", {"bdev_name": "lvs0/v0"}),
                ("bdev_lvol_delete", {"name": "lvs0/v0"}),
                (
                    "vhost_scsi_controller_add_target",
                    {"ctrlr": "vm-2", "scsi_target_num": 1, "bdev_name": "lvs0/v0"},
                ),
            ):
                number, sentence = code(target, method, **params)
                assert number == errno.EBUSY, sentence
                assert "crypto bdev c0, which waits for its key k0" in sentence
            give_key(target, "unrelated", key=OTHER)
            target.rpc("accel_crypto_key_destroy", key_name="unrelated")
            assert not connection.done()
            give_key(target)
            assert target.rpc("virtlun_get_status")["restore_problems"] == []
            connection.result()
            vm.ready()
            assert vm.read(8, 16) == marked(8192)


def test_a_guest_that_waits_goes_on_without_a_disk_that_is_taken_away(target: Target) -> None:
    target.rpc("bdev_malloc_create", name="m0", num_blocks=8192, block_size=512)
    make_encrypted(target)
    target.attach("vm-1", "m0")
    target.add_lun("vm-1", "c0", 1)
    target.restart()
    with waiting_guest(target) as (vm, connection):
        target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-1", scsi_target_num=1)
        connection.result()
        vm.ready()
        assert vm.read(0, 1) == bytes(512)
    # The bdev that waits can be deleted, too; then any key of that name is welcome.
    target.rpc("bdev_crypto_delete", name="c0")
    give_key(target, key=OTHER)
    # But not for this volume, which notes what its data is encrypted with.
    number, sentence = code(
        target, "bdev_crypto_create", base_bdev_name="lvs0/v0", name="c0", key_name="k0"
    )
    assert number == errno.EINVAL
    assert "this key k0 is not the one that lvol lvs0/v0 is encrypted with" in sentence
    target.rpc("virtlun_lvol_remove_xattr", name="lvs0/v0", xattr_name="virtlun.key_check")
    encrypt(target, "lvs0/v0")


def test_a_new_program_has_the_keys(target: Target) -> None:
    make_encrypted(target)
    target.attach("vm-1", "c0")
    with connected(target, "vm-1") as vm:
        vm.write(8, marked(8192))
        target.upgrade()
        assert vm.read(8, 16) == marked(8192)
        vm.write(8, marked(8192, 2))
        target.upgrade()
        assert vm.read(8, 16) == marked(8192, 2)
    (key,) = target.rpc("accel_crypto_keys_get")
    assert key["used_by"] == ["c0"]
    assert_no_key(target.words())


def test_a_new_program_waits_for_a_key_as_the_old_one_did(target: Target) -> None:
    make_encrypted(target)
    target.attach("vm-1", "c0")
    target.restart()
    target.upgrade()
    with waiting_guest(target) as (vm, connection):
        give_key(target)
        connection.result()
        vm.ready()
        assert vm.read(8, 16) == bytes(8192)


def test_no_key_is_kept_told_or_logged(make_target: MakeTarget) -> None:
    target = make_target("--log-level", "debug").start()
    target.rpc("bdev_malloc_create", name="m0", num_blocks=8192, block_size=512)
    give_key(target)
    encrypt(target, "m0")
    wrong: list[dict[str, Any]] = [
        {"name": "k0"},
        {"name": "k1", "key": KEY[:-1]},
        {"name": "k1", "key": KEY[:-1] + "x"},
        {"name": "k1", "key": KEY2.upper()},
        {"name": "k1", "key": [KEY]},
        {"name": "k1", "key": 7, "cipher": "AES_XTS"},
        {"name": "k1", "cipher": "AES_CBC"},
        {"name": "k1", "tweak_mode": "INCR_512_FULL_LBA"},
        {"name": "k/1"},
        {"name": "k1", "Key": KEY},
    ]
    for each in wrong:
        params = {"cipher": "AES_XTS", "key": KEY, "key2": KEY2, **each}
        number, _ = code(target, "accel_crypto_key_create", **params)
        assert number in (errno.EINVAL, errno.EEXIST, errno.EOPNOTSUPP, 32602), each
    params = {"base_bdev_name": "m7", "name": "c1", "key": KEY, "key2": KEY2, "cipher": "AES_XTS"}
    assert code(target, "bdev_crypto_create", **params)[0] == errno.ENODEV
    assert [each["name"] for each in target.rpc("accel_crypto_keys_get")] == ["k0"]
    for method, of in (
        ("accel_crypto_keys_get", {}),
        ("bdev_get_bdevs", {}),
        ("framework_get_config", {"name": "bdev"}),
        ("virtlun_get_status", {}),
        ("notify_get_notifications", {}),
    ):
        assert_no_key(str(target.rpc(method, **of)))
    saved = target.spdk_rpc("save_config")
    assert saved.returncode == 0
    assert_no_key(saved.stdout)
    target.restart()
    assert_no_key(target.words())
    assert '"(not shown)"' in target.words().replace("\\", "")
    for path in target.directory.rglob("*"):
        if path.is_file():
            assert_no_key(path.read_bytes().decode("latin-1"))


def dumps_core(target: Target) -> bool:
    """Ends the target as a defect does; whether the kernel wrote a core of it."""
    process, target.process = target.process, None
    assert process is not None
    hard = resource.prlimit(process.pid, resource.RLIMIT_CORE)[1]
    resource.prlimit(process.pid, resource.RLIMIT_CORE, (hard, hard))
    process.send_signal(signal.SIGABRT)
    _, status = os.waitpid(process.pid, 0)
    process.returncode = -os.WTERMSIG(status)
    return os.WCOREDUMP(status)


def test_no_core_dump_has_a_key(
    target: Target, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.stop()
    monkeypatch.chdir(scratch)
    if not dumps_core(target.start()):
        pytest.skip("this machine writes no cores: see ulimit -c and core_pattern in core(5)")
    give_key(target.start())
    assert not dumps_core(target)
    # Neither has a key that was refused, one of bdev_crypto_create, nor one of an upgrade.
    assert code(target.start(), "accel_crypto_key_create", cipher="AES_CBC", key=KEY, name="k0")
    assert not dumps_core(target)
    target.start().rpc("bdev_malloc_create", name="m0", num_blocks=8192, block_size=512)
    params = {"base_bdev_name": "m0", "name": "c0", "cipher": "AES_XTS", "key": KEY, "key2": KEY2}
    target.rpc("bdev_crypto_create", **params)
    assert not dumps_core(target)
    give_key(target.start())
    assert not dumps_core(target.upgrade())


def test_what_is_used_stays(target: Target) -> None:
    make_encrypted(target)
    busy: list[tuple[str, dict[str, Any], str]] = [
        ("accel_crypto_key_destroy", {"key_name": "k0"}, "in use by bdev c0"),
        ("bdev_lvol_delete", {"name": "lvs0/v0"}, "in use by crypto bdev c0"),
        ("bdev_lvol_delete_lvstore", {"lvs_name": "lvs0"}, "crypto bdev c0"),
        (
            "bdev_crypto_create",
            {"base_bdev_name": "lvs0/v0", "name": "c1", "key_name": "k0"},
            "in use by crypto bdev c0",
        ),
    ]
    for method, params, why in busy:
        number, sentence = code(target, method, **params)
        assert (number, why in sentence) == (errno.EBUSY, True), sentence
    for method, params in (
        ("bdev_crypto_create", {"base_bdev_name": "m7", "name": "c1", "key_name": "k0"}),
        ("bdev_crypto_delete", {"name": "c7"}),
    ):
        assert code(target, method, **params)[0] == errno.ENODEV
    assert code(target, "bdev_crypto_delete", name="lvs0-base")[0] == errno.ENODEV
    for method, params in (
        ("bdev_crypto_create", {"base_bdev_name": "lvs0-base", "name": "c1", "key_name": "k7"}),
        ("accel_crypto_key_destroy", {"key_name": "k7"}),
        ("accel_crypto_keys_get", {"key_name": "k7"}),
    ):
        assert code(target, method, **params)[0] == errno.ENOENT
    target.rpc("bdev_crypto_delete", name="c0")
    target.rpc("accel_crypto_key_destroy", key_name="k0")
    target.rpc("bdev_lvol_delete", name="lvs0/v0")


def test_a_key_of_one_bdev_goes_with_it(target: Target) -> None:
    target.make_lvstore()
    target.make_thin("v0", 16)
    target.make_thin("v1", 16)
    give_key(target, destroy_with_last=True)
    encrypt(target, "lvs0/v0")
    encrypt(target, "lvs0/v1", "c1")
    own = target.spdk_rpc(
        *("bdev_crypto_create", "-k", KEY, "-c", "AES_XTS", "-k2", KEY2, "lvs0-base", "c2")
    )
    assert own.returncode != 0, "its base is in use"
    target.rpc("bdev_malloc_create", name="m0", num_blocks=8192, block_size=512)
    own = target.spdk_rpc(
        *("bdev_crypto_create", "-k", KEY, "-c", "AES_XTS", "-k2", KEY2, "m0", "c2")
    )
    assert own.returncode == 0, own.stderr

    def keys() -> list[str]:
        return [key["name"] for key in target.rpc("accel_crypto_keys_get")]

    assert keys() == ["c2_AES_XTS", "k0"]
    target.attach("vm-1", "c2")
    with connected(target, "vm-1") as vm:
        vm.write(0, marked(4096))
        target.rpc("bdev_crypto_delete", name="c2")
    assert keys() == ["k0"]
    target.rpc("bdev_crypto_delete", name="c0")
    assert keys() == ["k0"]
    # With its base, too.
    target.rpc("bdev_uring_delete", name="lvs0-base")
    assert keys() == []


def test_the_process_has_no_key_after_it_was_destroyed(target: Target) -> None:
    """Its memory is searched for the bytes of the key, as a core dump of it could be."""
    key = random.Random(time.time_ns()).randbytes(32)
    target.rpc("bdev_malloc_create", name="m0", num_blocks=8192, block_size=512)
    give_key(target, key=key.hex())
    encrypt(target, "m0")
    target.attach("vm-1", "c0")
    with connected(target, "vm-1") as vm:
        vm.write(0, marked(8192))
    assert in_memory(target, key) > 0, "the search finds nothing that is there"
    target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-1", scsi_target_num=0)
    target.rpc("bdev_crypto_delete", name="c0")
    target.rpc("accel_crypto_key_destroy", key_name="k0")
    assert in_memory(target, key) == 0
    assert in_memory(target, key.hex().encode()) == 0


def test_with_its_base_a_bdev_that_waits_is_forgotten(target: Target) -> None:
    make_encrypted(target)
    target.attach("vm-1", "c0")
    target.restart()
    target.rpc("bdev_uring_delete", name="lvs0-base")
    assert target.rpc("virtlun_get_status")["restore_problems"] == []
    assert target.configuration()["bdev"] == []
    assert "add_target" not in str(target.configuration())
