"""Bad input is answered with one sentence, and nothing is changed."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pydataplane.errors import RpcError, TargetUnavailable
from tests.support.target import START_DEADLINE_S, Target, binary
from tests.support.wait import until
from tests.target.conftest import MakeTarget

MIB = 1 << 20


def everything(target: Target) -> dict[str, Any]:
    """Returns all that could have changed."""
    return {
        "bdevs": target.rpc("bdev_get_bdevs"),
        "lvstores": target.rpc("bdev_lvol_get_lvstores"),
        "controllers": target.rpc("vhost_get_controllers"),
        "record": (target.state_dir / "config.json").read_text(),
    }


@pytest.fixture
def busy(target: Target) -> Target:
    """A target with a volume of 8 MiB in a store of 64 MiB, shown to vm-1."""
    target.make_lvstore()
    target.rpc("bdev_lvol_create", lvol_name="v0", size_in_mib=8, lvs_name="lvs0")
    target.rpc("bdev_null_create", name="n0", num_blocks=8, block_size=512)
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-2")
    target.rpc(
        "vhost_scsi_controller_add_target", ctrlr="vm-1", scsi_target_num=0, bdev_name="lvs0/v0"
    )
    return target


@pytest.mark.parametrize(
    ("method", "params", "code", "words"),
    [
        ("no_such_method", {}, -32601, "does not have the method no_such_method"),
        ("bdev_get_bdevs", {"nmae": "n0"}, -32602, 'unknown parameter "nmae" of bdev_get_bdevs'),
        ("bdev_null_delete", {}, -32602, 'missing parameter "name" of bdev_null_delete'),
        ("bdev_null_delete", {"name": 7}, -32602, 'parameter "name" of bdev_null_delete must be'),
        ("bdev_get_bdevs", {"name": "none"}, -19, "No such device: there is no bdev none"),
        ("bdev_malloc_delete", {"name": "n0"}, -19, "bdev n0 is a Null disk, not a Malloc disk"),
        ("bdev_null_delete", {"name": "none"}, -19, "there is no bdev none"),
        (
            "bdev_null_create",
            {"name": "n0", "num_blocks": 8, "block_size": 512},
            -17,
            "File exists: the name n0 is taken",
        ),
        (
            "bdev_null_create",
            {"name": "a/b", "num_blocks": 8, "block_size": 512},
            -22,
            "cannot name a bdev",
        ),
        (
            "bdev_null_create",
            {"name": "n1", "num_blocks": 8, "block_size": 513},
            -22,
            "512 or 4096 bytes, not 513",
        ),
        (
            "bdev_malloc_create",
            {"name": "m1", "num_blocks": 8, "block_size": 512, "md_size": 8},
            -95,
            'has metadata only for protection information: "dif_type" 1 or 3',
        ),
        (
            "bdev_malloc_create",
            {"name": "m1", "num_blocks": 8, "block_size": 512, "md_size": 8, "dif_type": 2},
            -95,
            "takes commands of 32 bytes: 1 and 3 are there",
        ),
        (
            "bdev_aio_create",
            {"name": "m1", "filename": "/nowhere", "dif_type": 4},
            -22,
            'takes 0, 1 or 3 as "dif_type"',
        ),
        ("bdev_lvol_create", {"lvol_name": "v1", "size_in_mib": 1}, -22, "is not named"),
        (
            "bdev_lvol_create",
            {"lvol_name": "v1", "size_in_mib": 1, "lvs_name": "none"},
            -19,
            "lvstore none does not exist",
        ),
        (
            "bdev_lvol_create",
            {"lvol_name": "v0", "size_in_mib": 1, "lvs_name": "lvs0"},
            -17,
            "already exists",
        ),
        (
            "bdev_lvol_create",
            {"lvol_name": "big", "size_in_mib": 1000, "lvs_name": "lvs0"},
            -28,
            "No space left on device",
        ),
        ("bdev_lvol_resize", {"name": "lvs0/v0", "size_in_mib": 1000}, -28, "bytes are free"),
        ("bdev_lvol_resize", {"name": "lvs0/v0", "size_in_mib": 1 << 60}, -22, "too many"),
        ("bdev_lvol_resize", {"name": "lvs0/none", "size_in_mib": 1}, -19, "does not exist"),
        ("bdev_lvol_delete", {"name": "lvs0/v0"}, -16, "in use by target 0 of controller vm-1"),
        ("bdev_lvol_delete_lvstore", {"lvs_name": "lvs0"}, -16, "in use"),
        ("bdev_lvol_grow_lvstore", {}, -22, "is not named"),
        ("bdev_lvol_grow_lvstore", {"lvs_name": "none"}, -19, "does not exist"),
        (
            "bdev_lvol_create_lvstore",
            {"bdev_name": "none", "lvs_name": "l"},
            -19,
            "bdev none does not exist",
        ),
        ("vhost_create_scsi_controller", {"ctrlr": "vm-1"}, -17, "vm-1 exists already"),
        ("vhost_create_scsi_controller", {"ctrlr": "../vm"}, -22, "not a file name"),
        (
            "vhost_create_scsi_controller",
            {"ctrlr": "x", "cpumask": "0x800"},
            -22,
            "no reactor runs on CPU 11",
        ),
        ("vhost_delete_controller", {"ctrlr": "none"}, -19, "no controller none"),
        ("vhost_get_controllers", {"name": "none"}, -19, "no controller none"),
        (
            "vhost_scsi_controller_add_target",
            {"ctrlr": "vm-2", "scsi_target_num": 0, "bdev_name": "lvs0/v0"},
            -16,
            "in use by target 0 of controller vm-1",
        ),
        (
            "vhost_scsi_controller_add_target",
            {"ctrlr": "vm-1", "scsi_target_num": 0, "bdev_name": "n0"},
            -17,
            "target 0 of controller vm-1 is taken",
        ),
        (
            "vhost_scsi_controller_add_target",
            {"ctrlr": "vm-1", "scsi_target_num": 255, "bdev_name": "n0"},
            -22,
            "not 0 to 254",
        ),
        (
            "vhost_scsi_controller_add_target",
            {"ctrlr": "vm-1", "scsi_target_num": -1, "bdev_name": "none"},
            -19,
            "there is no bdev none",
        ),
        (
            "vhost_scsi_controller_remove_target",
            {"ctrlr": "vm-1", "scsi_target_num": 9},
            -19,
            "has no target 9",
        ),
        (
            "vhost_controller_set_coalescing",
            {"ctrlr": "vm-1", "delay_base_us": 10, "iops_threshold": 0},
            -22,
            "iops_threshold is 0; it must be more",
        ),
        ("bdev_uring_create", {"name": "f", "filename": "/no/such"}, -2, "/no/such"),
        ("bdev_aio_create", {"name": "f", "filename": "/"}, -22, "cannot open"),
        ("virtlun_lvol_remove_xattr", {"name": "lvs0/v0", "xattr_name": "x"}, -61, "no xattr x"),
    ],
)
def test_one_sentence_and_nothing_changed(
    busy: Target, method: str, params: dict[str, Any], code: int, words: str
) -> None:
    before = everything(busy)
    error = busy.fails(method, **params)
    assert isinstance(error, RpcError)
    assert (error.code, words in error.message) == (code, True), error.message
    assert "\n" not in error.message
    assert everything(busy) == before


def test_an_lvstore_in_a_truncated_file_is_a_problem_and_not_touched(target: Target) -> None:
    image = target.make_lvstore()
    assert target.stop() == 0
    os.truncate(image, 8 * MIB)
    start = image.read_bytes()
    target.start()
    (problem,) = target.rpc("virtlun_get_status")["restore_problems"]
    assert "the lvstore on bdev lvs0-base cannot be loaded" in problem
    assert target.rpc("bdev_lvol_get_lvstores") == []
    error = target.fails("bdev_examine", name="lvs0-base")
    assert isinstance(error, RpcError)
    assert (error.code, "cannot be loaded" in error.message) == (-84, True)
    assert image.read_bytes() == start
    os.truncate(image, 64 * MIB)
    target.restart()
    assert [s["name"] for s in target.rpc("bdev_lvol_get_lvstores")] == ["lvs0"]


@pytest.mark.parametrize(
    ("size", "code", "words"),
    [
        (48 * MIB, -84, "the store cannot become smaller: the device has 50331648 bytes"),
        (1 << 40, -28, "the metadata that the store was created with is good for"),
    ],
)
def test_an_lvstore_on_a_device_of_a_size_that_it_cannot_have_does_not_grow(
    target: Target, size: int, code: int, words: str
) -> None:
    image = target.make_lvstore()
    before = target.rpc("bdev_lvol_get_lvstores")
    os.truncate(image, size)
    target.rpc("bdev_uring_rescan", name="lvs0-base")
    error = target.fails("bdev_lvol_grow_lvstore", lvs_name="lvs0")
    assert isinstance(error, RpcError)
    assert (error.code, words in error.message) == (code, True), error.message
    assert target.rpc("bdev_lvol_get_lvstores") == before
    os.truncate(image, 96 * MIB)
    target.rpc("bdev_uring_rescan", name="lvs0-base")
    assert target.rpc("bdev_lvol_grow_lvstore", lvs_name="lvs0") is True
    (after,) = target.rpc("bdev_lvol_get_lvstores")
    assert after["total_data_clusters"] == before[0]["total_data_clusters"] + 32


def test_a_file_of_another_process_is_refused(make_target: MakeTarget) -> None:
    first, second = make_target().start(), make_target().start()
    image = first.make_lvstore()
    for kind in ("uring", "aio"):
        error = second.fails(f"bdev_{kind}_create", name="f", filename=str(image), block_size=512)
        assert isinstance(error, RpcError)
        assert (error.code, "in use" in error.message) == (-16, True), error.message
    assert second.rpc("bdev_get_bdevs") == []
    assert len(first.rpc("bdev_lvol_get_lvstores")) == 1


def ends_with(target: Target, words: str, *options: str) -> None:
    """Starting it fails with status 1 and one sentence that has these words."""
    done = target.run(*options)
    assert done.returncode == 1, done
    lines = [line for line in done.stderr.splitlines() if line.startswith("virtlun-target:")]
    assert len(lines) == 1, done.stderr
    assert words in lines[0]


def test_a_state_directory_in_use(make_target: MakeTarget) -> None:
    first, second = make_target().start(), make_target()
    second.state_dir = first.state_dir
    ends_with(second, f"is in use by another target (pid {first.pid})")
    assert first.rpc("bdev_get_bdevs") == []


def test_a_socket_in_use(make_target: MakeTarget) -> None:
    first, second = make_target().start(), make_target()
    second.rpc_socket = first.rpc_socket
    ends_with(second, "is in use by another process")
    assert first.rpc("bdev_get_bdevs") == []


def test_a_socket_path_that_is_too_long_or_taken(make_target: MakeTarget, scratch: Path) -> None:
    target = make_target()
    target.rpc_socket = scratch / ("x" * 120)
    ends_with(target, "is too long: ")
    target.rpc_socket = scratch / "file"
    target.rpc_socket.write_text("mine")
    ends_with(target, "is no socket")
    assert target.rpc_socket.read_text() == "mine"


def test_stale_sockets_are_replaced(target: Target) -> None:
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    target.kill9()
    assert target.rpc_socket.is_socket()
    assert (target.vhost_dir / "vm-1").is_socket()
    target.process = subprocess.Popen(target.command(), stderr=subprocess.DEVNULL)
    shown = until(
        lambda: target.rpc("vhost_get_controllers"),
        "an answer on the stale socket's path",
        START_DEADLINE_S,
        not_yet=TargetUnavailable,
    )
    assert [c["ctrlr"] for c in shown] == ["vm-1"]


def test_a_controller_whose_socket_path_is_too_long(make_target: MakeTarget) -> None:
    target = make_target()
    target.vhost_dir = target.directory / ("d" * 60)
    target.start()
    error = target.fails("vhost_create_scsi_controller", ctrlr="c" * 60)
    assert isinstance(error, RpcError)
    assert (error.code, "choose a shorter" in error.message) == (-36, True), error.message
    assert target.rpc("vhost_get_controllers") == []


def test_a_change_that_cannot_be_recorded_says_so(target: Target) -> None:
    in_the_way = target.state_dir / "config.json.new"
    in_the_way.mkdir()
    error = target.fails("bdev_null_create", name="n0", num_blocks=8, block_size=512)
    assert isinstance(error, RpcError)
    assert error.code == -5
    assert "the change was made but is not recorded" in error.message
    assert "config.json.new" in error.message
    assert len(target.rpc("bdev_get_bdevs")) == 1
    # The next change records both.
    in_the_way.rmdir()
    target.rpc("bdev_null_create", name="n1", num_blocks=8, block_size=512)
    target.restart()
    assert [bdev["name"] for bdev in target.rpc("bdev_get_bdevs")] == ["n0", "n1"]


def test_a_configuration_file_that_cannot_be_applied(make_target: MakeTarget) -> None:
    target = make_target()
    config = target.directory / "c.json"
    ends_with(target, f"cannot read {config}", "--config", str(config))
    config.write_text('{"subsystems": 1}')
    ends_with(target, f"{config} is no configuration", "--config", str(config))
    call = {"method": "bdev_null_delete", "params": {"name": "none"}}
    config.write_text(json.dumps({"subsystems": [{"subsystem": "bdev", "config": [call]}]}))
    ends_with(target, "bdev_null_delete failed: No such device", "--config", str(config))
    call["method"] = "no_such"
    config.write_text(json.dumps({"subsystems": [{"subsystem": "bdev", "config": [[call]]}]}))
    ends_with(target, 'there is no method "no_such"', "--config", str(config))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cpumask", "0xz"], "write it as 0x3 or [0,1]"),
        (["--socket-mode", "999"], "octal digits"),
        (["--socket-group", "no-such-group"], "no such group"),
        (["--log-level", "LOUD"], "NOTICE"),
        (["--no-such-option"], "--no-such-option"),
        (["--poll", "--spin-us", "5"], "cannot be used with"),
        (["--drain-timeout", "61"], "61 is not in 1..=60"),
    ],
)
def test_a_wrong_command_line_is_status_2(options: list[str], words: str) -> None:
    done = subprocess.run([binary(), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_cpu_that_is_not_there(make_target: MakeTarget) -> None:
    ends_with(make_target("--cpumask", "[1000]"), "cannot start a reactor")


def test_help_says_what_people_need() -> None:
    done = subprocess.run([binary(), "--help"], capture_output=True, text=True, check=True)
    for words in ("--rpc-socket", "--state-dir", "SIGTERM", "Exit status", "virtlun_get_status"):
        assert words in done.stdout


def connect(target: Target) -> socket.socket:
    """Returns a raw connection."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(90)
    connection.connect(str(target.rpc_socket))
    return connection


def until_closed(connection: socket.socket) -> bytes:
    """Returns all that comes."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    "garbage",
    [
        b"hello\n",
        b'{"jsonrpc": "2.0", "method": ',
        b'{"jsonrpc": "2.0", "method": oops',
        b'{"id": 1, "method": "bdev_get_bdevs",}',
        b"[" * 1000,
        b'{"id":1,"method":"' + b"x" * (2 * MIB),
        b"\xff\xfe\x00" * 100,
        struct.pack("<Q", 1 << 63) * 1000,
    ],
    ids=["word", "half", "bareword", "comma", "deep", "large", "binary", "numbers"],
)
def test_malformed_json_ends_its_connection_only(busy: Target, garbage: bytes) -> None:
    before = everything(busy)
    with connect(busy) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(garbage)
        if garbage.endswith(b'"method": '):
            connection.shutdown(socket.SHUT_WR)
            assert until_closed(connection) == b""
        else:
            answer = json.loads(until_closed(connection))
            assert answer["error"]["code"] == -32700
            assert answer["id"] is None
    assert everything(busy) == before


def test_a_client_that_never_reads_holds_up_nobody(target: Target) -> None:
    for number in range(50):
        target.rpc("bdev_null_create", name=f"n{number}", num_blocks=8, block_size=512)
    request = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "bdev_get_bdevs"}).encode()
    with connect(target) as connection:
        connection.setblocking(False)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while sent < 64 * MIB:
                sent += connection.send(request * 100)
        assert len(target.rpc("bdev_get_bdevs")) == 50
        target.rpc("bdev_null_delete", name="n0")


class TooSlow(Exception):
    """The test has held the device for longer than it wanted to."""


def is_waited_for(target: Target, pool: ThreadPoolExecutor, create: dict[str, Any]) -> bool:
    """Makes a bdev on a block device that is let go of a moment later.

    Raises:
        TooSlow: it took this process so long that nothing is known.
    """
    held = os.open(create["filename"], os.O_RDWR | os.O_EXCL)
    begun = time.monotonic()
    made = pool.submit(target.rpc, "bdev_aio_create", **create)
    with contextlib.suppress(TimeoutError):
        made.exception(0.2)
    was_early = made.done()
    os.close(held)
    is_late = time.monotonic() - begun > 0.7
    try:
        assert made.result(60) == create["name"]
        assert not was_early, "it was not waited for"
    except (RpcError, AssertionError):
        if not is_late:
            raise
        with contextlib.suppress(RpcError):
            target.rpc("bdev_aio_delete", name=create["name"])
        raise TooSlow from None
    return True


@pytest.mark.root
def test_a_block_device_that_somebody_holds_is_waited_for_a_moment(target: Target) -> None:
    """As of a program that ended just now, whose io_uring the kernel still takes apart."""
    file = target.make_file("disk", 16 << 20)
    loop = subprocess.check_output(["losetup", "-f", "--show", str(file)], text=True).strip()
    create = {"filename": loop, "name": "d", "block_size": 512}
    try:
        with ThreadPoolExecutor(1) as pool:
            # It is waited for a second, and this process may be too slow for that.
            until(lambda: is_waited_for(target, pool, create), "a moment", not_yet=TooSlow)
        target.rpc("bdev_aio_delete", name="d")
        held = os.open(loop, os.O_RDWR | os.O_EXCL)
        try:
            refused = target.fails("bdev_aio_create", **create)
        finally:
            os.close(held)
        assert f"{loop} is in use by the system (mounted, swap or RAID)" in str(refused)
    finally:
        target.stop()
        subprocess.run(["losetup", "-d", loop], check=True)
