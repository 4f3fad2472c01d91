"""Exported bdevs: files for the kernel, and loop devices and file systems on them.

Needs root, /dev/fuse and loop devices.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pydataplane.errors import RpcError
from tests.support.initiator import connected
from tests.support.target import Target, binary
from tests.support.wait import until
from tests.target.conftest import MakeTarget

MIB = 1 << 20
COMMAND_TIMEOUT_S = 60.0
DETACH_DEADLINE_S = 90.0
CAP_SYS_RESOURCE = 24
UID = 54321
"""Of an account by its number: nothing is made in /etc/passwd."""

Loops = Callable[..., str]


def run(*command: str | Path, check: bool = True) -> str:
    """Runs a command that must end in time, and returns its output."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    if check:
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def mounts_in(directory: Path) -> list[str]:
    """Returns the mount points below a directory, the last mounted one first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [p for p in (line.split()[4] for line in lines) if p.startswith(f"{directory}/")][::-1]


@pytest.fixture
def loops(target: Target) -> Iterator[Loops]:
    """Makes loop devices; at the end they and everything mounted on them are gone."""
    made: list[tuple[str, str]] = []

    def make(path: str, *options: str) -> str:
        loop = run("losetup", "--find", "--show", "--direct-io=on", *options, path).strip()
        made.append((loop, Path(path).name))
        return loop

    def left() -> list[str]:
        # Below a detached mount the kernel shows the file's name without the mount's path; and
        # a number that is somebody else's by now is left alone.
        return [loop for loop, name in made if name in backing(loop)]

    yield make
    for point in mounts_in(target.directory):
        if Path(point).parent != target.export_dir:
            run("umount", "-l", point)
    for loop in left():
        run("losetup", "-d", loop, check=False)
    until(lambda: not left(), lambda: f"the end of {left()}", DETACH_DEADLINE_S)


def backing(loop: str) -> str:
    """Returns the file under a loop device, empty if there is none."""
    path = Path("/sys/block") / Path(loop).name / "loop/backing_file"
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def detach(loop: str) -> None:
    """Detaches a loop device and waits until the kernel has done it."""
    run("losetup", "-d", loop)
    until(lambda: not backing(loop), f"{loop} is detached", DETACH_DEADLINE_S)


def volume(target: Target, size_in_mib: int = 32, **options: Any) -> tuple[str, str]:
    """Makes an lvstore with one exported volume; returns its UUID and the file."""
    target.make_lvstore(size=512 * MIB)
    uuid = target.rpc(
        "bdev_lvol_create",
        lvol_name="v0",
        size_in_mib=size_in_mib,
        lvs_name="lvs0",
        **options,
    )
    return uuid, target.rpc("virtlun_export_create", bdev_name=uuid)["path"]


def copy(source: str | Path, to: str | Path, *options: str) -> str:
    """Copies in pieces of 1 MiB, over what is there."""
    return run("dd", f"if={source}", f"of={to}", "bs=1M", "conv=notrunc", *options)


def noise(target: Target, mib: int) -> tuple[Path, str]:
    """Makes a file of random bytes; returns it and its MD5."""
    data = os.urandom(mib * MIB)
    path = target.directory / "noise"
    path.write_bytes(data)
    return path, hashlib.md5(data, usedforsecurity=False).hexdigest()


def md5(path: str | Path) -> str:
    """Returns the MD5 of a file as it is read now."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def clusters(target: Target, uuid: str) -> int:
    """Returns how many clusters a volume holds."""
    (bdev,) = target.rpc("bdev_get_bdevs", name=uuid)
    return int(bdev["driver_specific"]["lvol"]["num_allocated_clusters"])


def test_the_file_is_the_volume(target: Target) -> None:
    uuid, path = volume(target, 8)
    assert path == str(target.export_dir / uuid / uuid)
    assert [p.name for p in target.export_dir.iterdir()] == [uuid]
    assert [p.name for p in (target.export_dir / uuid).iterdir()] == [uuid]
    source, expected = noise(target, 8)
    copy(source, path, "oflag=direct", "conv=notrunc,fsync")
    back = target.directory / "back"
    copy(path, back, "iflag=direct")
    assert md5(back) == expected == md5(path)
    assert Path(path).stat().st_size == 8 * MIB
    with Path(path).open("r+b", buffering=0) as file:
        for call, number in (
            (lambda: os.pwrite(file.fileno(), b"x", 0), errno.EINVAL),
            (lambda: os.pwrite(file.fileno(), bytes(512), 8 * MIB), errno.ENOSPC),
            (lambda: os.ftruncate(file.fileno(), MIB), errno.EPERM),
        ):
            with pytest.raises(OSError) as caught:
                call()
            assert caught.value.errno == number
        assert os.pread(file.fileno(), 100, 8 * MIB) == b""
    words = run("fallocate", "--length", "16MiB", path, check=False)
    assert "not supported" in words
    assert md5(path) == expected
    with pytest.raises(FileNotFoundError):
        (target.export_dir / "other").read_bytes()


def test_a_loop_device_and_a_file_system_on_it(target: Target, loops: Loops) -> None:
    uuid, path = volume(target)
    loop = loops(path)
    (row,) = json.loads(run("losetup", "--json", "--list", loop))["loopdevices"]
    assert row["dio"] is True
    source, expected = noise(target, 16)
    copy(source, loop, "oflag=direct", "conv=fsync")
    copy(loop, target.directory / "back", "iflag=direct", "count=16")
    assert md5(target.directory / "back") == expected
    run("mkfs.ext4", "-q", "-F", loop)
    point = target.directory / "mnt"
    point.mkdir()
    run("mount", loop, point)
    (point / "data").write_bytes(source.read_bytes())
    run("umount", point)
    error = None
    try:
        target.rpc("virtlun_export_delete", bdev_name=uuid)
    except RpcError as e:
        error = e
    assert error is not None
    assert error.code == -errno.EBUSY
    assert "is open 1 times" in str(error)
    detach(loop)
    target.rpc("virtlun_export_delete", bdev_name=uuid)
    assert not Path(path).exists()
    assert target.rpc("virtlun_export_create", bdev_name="lvs0/v0") == {"path": path}
    loop = loops(path)
    run("e2fsck", "-f", "-n", loop)
    run("mount", loop, point)
    assert md5(point / "data") == expected
    run("umount", point)
    detach(loop)


@pytest.mark.parametrize("fs", ["ext4", "xfs"])
def test_growth_reaches_a_file_system(target: Target, loops: Loops, fs: str) -> None:
    """Online; but ext4's ioctl wants CAP_SYS_RESOURCE, and without it ext4 grows unmounted."""
    small, large = (320, 400) if fs == "xfs" else (64, 128)
    uuid, path = volume(target, small, thin_provision=True)
    loop = loops(path)
    run(f"mkfs.{fs}", "-q", loop)
    point = target.directory / "mnt"
    point.mkdir()
    run("mount", loop, point)
    source, expected = noise(target, 8)
    (point / "data").write_bytes(source.read_bytes())
    before = os.statvfs(point)
    with Path(path).open("rb") as file:
        target.rpc("bdev_lvol_resize", name=uuid, size_in_mib=large)
        assert os.fstat(file.fileno()).st_size == large * MIB
    assert Path(path).stat().st_size == large * MIB
    run("losetup", "-c", loop)
    assert int(run("blockdev", "--getsize64", loop)) == large * MIB
    effective = int(Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0], 16)
    if fs == "xfs":
        run("xfs_growfs", point)
    elif effective >> CAP_SYS_RESOURCE & 1:
        run("resize2fs", loop)
    else:
        run("umount", point)
        run("e2fsck", "-f", "-p", loop)
        run("resize2fs", loop)
        run("mount", loop, point)
    after = os.statvfs(point)
    assert after.f_blocks * after.f_frsize > before.f_blocks * before.f_frsize * 1.15
    assert md5(point / "data") == expected
    run("umount", point)
    detach(loop)


def test_holes_give_clusters_back_and_read_as_zeros(target: Target, loops: Loops) -> None:
    uuid, path = volume(target, 16, thin_provision=True)
    assert clusters(target, uuid) == 0
    source, _ = noise(target, 16)
    copy(source, path, "oflag=direct")
    assert clusters(target, uuid) == 16
    run("fallocate", "--punch-hole", "--offset", "1MiB", "--length", "2MiB", path)
    assert clusters(target, uuid) == 14
    run("fallocate", "--zero-range", "--keep-size", "--offset", "4MiB", "--length", "8KiB", path)
    data = bytearray(source.read_bytes())
    data[MIB : 3 * MIB] = bytes(2 * MIB)
    data[4 * MIB : 4 * MIB + 8192] = bytes(8192)
    assert Path(path).read_bytes() == data
    loop = loops(path)
    run("blkdiscard", "--offset", str(8 * MIB), "--length", str(4 * MIB), loop)
    assert clusters(target, uuid) == 10
    data[8 * MIB : 12 * MIB] = bytes(4 * MIB)
    assert Path(loop).read_bytes() == data
    run("blkdiscard", loop)
    assert clusters(target, uuid) == 0
    detach(loop)


def test_a_target_that_is_killed_with_its_holder_gives_errors_and_comes_back(
    target: Target, loops: Loops
) -> None:
    uuid, path = volume(target, 16)
    source, expected = noise(target, 16)
    loop = loops(path)
    copy(source, loop, "oflag=direct", "conv=fsync")
    held = os.open(path, os.O_RDONLY)
    try:
        assert os.pread(held, 512, 0) == source.read_bytes()[:512]
        reader = subprocess.Popen(
            ["sh", "-c", f"while dd if={loop} of=/dev/null bs=64k iflag=direct; do :; done"],
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(0.1)
        target.kill9()
        target.kill_holder()
        # What is in flight and what comes later ends in an error.
        _, words = reader.communicate(timeout=COMMAND_TIMEOUT_S)
        assert "Input/output error" in words
        with pytest.raises(OSError) as caught:
            os.pread(held, 512, 0)
        assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
        with pytest.raises(OSError):
            Path(path).stat()
        assert "Input/output error" in run(
            "dd", f"if={loop}", "of=/dev/null", "bs=4k", "count=1", "iflag=direct", check=False
        )
        target.start()
        # The file is back with its data; what was open stays dead, the loop device too.
        assert "detached the mount of a killed process" in target.words()
        assert mounts_in(target.directory) == [str(target.export_dir / uuid)]
        assert [e["path"] for e in target.rpc("virtlun_export_list")] == [path]
        assert md5(path) == expected
        with pytest.raises(OSError) as caught:
            os.pread(held, 512, 0)
        assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
        assert "Input/output error" in run(
            "dd", f"if={loop}", "of=/dev/null", "bs=4k", "count=1", "iflag=direct", check=False
        )
    finally:
        os.close(held)
    detach(loop)
    loop = loops(path)
    assert md5(loop) == expected
    detach(loop)
    target.rpc("virtlun_export_delete", bdev_name=uuid)


def test_a_volume_has_one_face_at_a_time(target: Target) -> None:
    uuid, path = volume(target)
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    lun = {"ctrlr": "vm-1", "scsi_target_num": 0, "bdev_name": "lvs0/v0"}
    for shareable in (False, True):
        refused = target.fails("vhost_scsi_controller_add_target", **lun, shareable=shareable)
        assert isinstance(refused, RpcError)
        assert refused.code == -errno.EBUSY
        assert f"bdev {uuid} is in use by the export {path}: release it there first" in str(refused)
    target.rpc("virtlun_export_delete", bdev_name="lvs0/v0")
    for shareable in (False, True):
        target.rpc("vhost_scsi_controller_add_target", **lun, shareable=shareable)
        for read_only in (False, True):
            refused = target.fails(
                "virtlun_export_create", bdev_name="lvs0/v0", read_only=read_only
            )
            assert isinstance(refused, RpcError)
            assert refused.code == -errno.EBUSY
            assert f"bdev {uuid} is in use by target 0 of controller vm-1" in str(refused)
        target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-1", scsi_target_num=0)
    assert target.rpc("virtlun_export_create", bdev_name="lvs0/v0") == {"path": path}


def parked(target: Target) -> bool:
    """Whether the only export is parked."""
    (shown,) = target.rpc("virtlun_export_list")
    return bool(shown["parked"])


def test_a_parked_volume_is_read_and_not_written(target: Target, loops: Loops) -> None:
    uuid, path = volume(target, 8)
    source, expected = noise(target, 8)
    loop = loops(path)
    copy(source, loop, "oflag=direct", "conv=fsync")
    for _ in range(2):
        assert target.rpc("virtlun_export_park", bdev_name="lvs0/v0") is True
        assert parked(target)
    assert md5(loop) == expected == md5(path)
    with Path(path).open("r+b", buffering=0) as file, pytest.raises(OSError) as caught:
        os.pwrite(file.fileno(), bytes(512), 0)
    assert caught.value.errno == errno.EROFS
    words = run("dd", "if=/dev/zero", f"of={loop}", "bs=4k", "count=1", "oflag=direct", check=False)
    assert "Input/output error" in words
    refused = target.fails("bdev_lvol_delete", name="lvs0/v0")
    assert isinstance(refused, RpcError)
    assert (refused.code, path in str(refused)) == (-errno.EBUSY, True)
    for _ in range(2):
        assert target.rpc("virtlun_export_unpark", bdev_name=uuid) is True
        assert not parked(target)
    run("dd", "if=/dev/zero", f"of={loop}", "bs=4k", "count=1", "oflag=direct")
    detach(loop)
    target.rpc("virtlun_export_delete", bdev_name=uuid)
    for method in ("virtlun_export_park", "virtlun_export_unpark"):
        refused = target.fails(method, bdev_name=uuid)
        assert isinstance(refused, RpcError)
        assert refused.code == -errno.ENODEV


def test_a_volume_is_handed_over_to_a_vm_and_back_with_crashes(target: Target) -> None:
    uuid, path = volume(target, 8)
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-1")
    lun = {"ctrlr": "vm-1", "scsi_target_num": 0, "bdev_name": "lvs0/v0"}
    target.rpc("virtlun_export_park", bdev_name=uuid)
    target.crash()
    assert parked(target)
    target.rpc("vhost_scsi_controller_add_target", **lun)
    with connected(target, "vm-1") as guest:
        guest.write(0, b"g" * 512)
    assert Path(path).read_bytes()[:512] == b"g" * 512
    target.crash()
    assert target.rpc("virtlun_get_status")["restore_problems"] == []
    assert parked(target)
    assert target.rpc("virtlun_export_create", bdev_name=uuid) == {"path": path}
    assert parked(target)
    refused = target.fails("virtlun_export_unpark", bdev_name=uuid)
    assert isinstance(refused, RpcError)
    assert refused.code == -errno.EBUSY
    assert f"bdev {uuid} is in use by target 0 of controller vm-1" in str(refused)
    assert parked(target)

    target.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-1", scsi_target_num=0)
    target.rpc("virtlun_export_unpark", bdev_name="lvs0/v0")
    refused = target.fails("vhost_scsi_controller_add_target", **lun)
    assert isinstance(refused, RpcError)
    assert refused.code == -errno.EBUSY
    target.crash()
    assert not parked(target)
    with Path(path).open("r+b", buffering=0) as file:
        assert os.pread(file.fileno(), 512, 0) == b"g" * 512
        assert os.pwrite(file.fileno(), b"k" * 512, 0) == 512


def test_what_is_exported_stays(target: Target) -> None:
    uuid, path = volume(target)
    target.rpc("bdev_malloc_create", name="m0", num_blocks=8, block_size=4096)
    target.rpc("virtlun_export_create", bdev_name="m0")
    for method, params in (
        ("bdev_lvol_delete", {"name": "lvs0/v0"}),
        ("bdev_lvol_delete_lvstore", {"lvs_name": "lvs0"}),
        ("bdev_uring_delete", {"name": "lvs0-base"}),
        ("bdev_malloc_delete", {"name": "m0"}),
    ):
        refused = target.fails(method, **params)
        assert isinstance(refused, RpcError), method
        assert refused.code == -errno.EBUSY, (method, str(refused))
        assert str(target.export_dir) in str(refused), (method, str(refused))
    assert Path(path).stat().st_size == 32 * MIB
    target.rpc("virtlun_export_delete", bdev_name="m0")
    target.rpc("bdev_malloc_delete", name="m0")
    target.rpc("virtlun_export_delete", bdev_name=uuid)
    target.rpc("bdev_lvol_delete", name="lvs0/v0")
    refused = target.fails("virtlun_export_delete", bdev_name=uuid)
    assert isinstance(refused, RpcError)
    assert refused.code == -errno.ENODEV
    assert list(target.export_dir.iterdir()) == []


def test_repeating_changes_nothing_and_read_only_is_kept(target: Target, loops: Loops) -> None:
    uuid, _ = volume(target)
    target.rpc("virtlun_export_delete", bdev_name=uuid)
    first = target.rpc("virtlun_export_create", bdev_name="lvs0/v0", read_only=True)
    target.rpc("bdev_lvol_rename", old_name="lvs0/v0", new_name="renamed")
    for _ in range(2):
        again = target.rpc("virtlun_export_create", bdev_name="lvs0/renamed", read_only=True)
        assert again == first
        refused = target.fails("virtlun_export_create", bdev_name=uuid)
        assert isinstance(refused, RpcError)
        assert refused.code == -errno.EEXIST
        with pytest.raises(OSError) as caught:
            Path(first["path"]).write_bytes(b"")
        assert caught.value.errno == errno.EROFS
        loop = loops(first["path"], "--read-only")
        assert run("blockdev", "--getro", loop).strip() == "1"
        detach(loop)
        # The kernel tells of a close a moment later.
        until(lambda: target.rpc("virtlun_export_list")[0]["opens"] == 0, "the file is closed")
        (shown,) = target.rpc("virtlun_export_list")
        assert shown == {
            "bdev_name": uuid,
            "uuid": uuid,
            "path": first["path"],
            "read_only": True,
            "parked": False,
            "opens": 0,
            "size": 32 * MIB,
            "survives": "crash",
        }
        target.restart()
    target.rpc("virtlun_export_delete", bdev_name=uuid)
    target.restart()
    assert target.rpc("virtlun_export_list") == []
    assert target.rpc("virtlun_get_status")["restore_problems"] == []


def test_an_orderly_stop_leaves_only_the_mounts_of_open_files(target: Target) -> None:
    uuid, path = volume(target)
    target.rpc("bdev_malloc_create", name="m0", num_blocks=8, block_size=4096)
    target.rpc("virtlun_export_create", bdev_name="m0")
    with Path(path).open("rb") as file:
        assert target.stop() == 0
        assert mounts_in(target.directory) == [str(target.export_dir / uuid)]
        target.start()
        assert os.pread(file.fileno(), 512, 0) == bytes(512)
    assert len(mounts_in(target.directory)) == 2


def test_an_export_whose_bdev_is_missing_is_a_problem_that_can_be_forgotten(
    target: Target,
) -> None:
    uuid, path = volume(target)
    assert target.stop() == 0
    (target.directory / "lvs0.img").rename(target.directory / "elsewhere")
    target.start()
    problems = target.rpc("virtlun_get_status")["restore_problems"]
    assert any(f"export of bdev {uuid} is not restored" in problem for problem in problems)
    (target.directory / "elsewhere").rename(target.directory / "lvs0.img")
    target.restart()
    assert Path(path).exists()
    assert target.stop() == 0
    (target.directory / "lvs0.img").unlink()
    target.start()
    target.rpc("virtlun_export_delete", bdev_name=uuid)
    target.rpc("bdev_uring_delete", name="lvs0-base")
    assert target.rpc("virtlun_get_status")["restore_problems"] == []


@pytest.fixture
def alone(make_target: MakeTarget, monkeypatch: pytest.MonkeyPatch) -> MakeTarget:
    """Makes targets that find no holder: there is no program of it beside theirs."""

    def make(*options: str) -> Target:
        target = make_target(*options)
        program = target.directory / "virtlun-target"
        shutil.copy(binary(), program)
        monkeypatch.setenv("VIRTLUN_TARGET", str(program))
        return target

    return make


def test_root_without_a_holder_mounts_by_itself(alone: MakeTarget) -> None:
    """And is no less confined: the end of the test finds calls that were refused."""
    target = alone("--user", "root").start()
    uuid, path = volume(target)
    (shown,) = target.rpc("virtlun_export_list")
    assert shown["survives"] == "nothing"
    with Path(path).open("r+b", buffering=0) as file:
        file.write(b"a" * 4096)
    # Behind our back; what exports it again puts it back.
    run("umount", "-l", Path(path).parent)
    assert not Path(path).exists()
    assert target.rpc("virtlun_export_create", bdev_name=uuid)["path"] == path
    assert Path(path).read_bytes()[:4096] == b"a" * 4096
    status = target.rpc("virtlun_get_status")
    assert (status["sandbox"], status["refused_calls"]) == ("enforce", [])
    target.restart()
    assert Path(path).read_bytes()[:4096] == b"a" * 4096
    target.rpc("virtlun_export_delete", bdev_name=uuid)
    assert mounts_in(target.directory) == []


def test_who_may_not_mount_and_has_no_holder_says_so(alone: MakeTarget) -> None:
    target = alone("--user", str(UID))
    target.directory.parent.chmod(0o711)
    os.chown(target.directory, UID, UID)
    target.start()
    target.rpc("bdev_malloc_create", name="m0", num_blocks=8, block_size=4096)
    refused = target.fails("virtlun_export_create", bdev_name="m0")
    assert isinstance(refused, RpcError)
    assert refused.code == -errno.EPERM
    assert "there is no virtlun-holder" in refused.message
    target.rpc("bdev_malloc_delete", name="m0")
    assert target.rpc("virtlun_get_status")["refused_calls"] == []


def test_two_targets_share_a_folder(target: Target, make_target: MakeTarget) -> None:
    uuid, path = volume(target)
    other = make_target()
    other.export_dir, other.holder_socket = target.export_dir, target.holder_socket
    other.start()
    other.rpc("bdev_malloc_create", name="m0", num_blocks=8, block_size=4096)
    theirs = other.rpc("virtlun_export_create", bdev_name="m0")["path"]
    assert other.stop() == 0
    assert (Path(path).exists(), Path(theirs).exists()) == (True, False)
    target.rpc("virtlun_export_delete", bdev_name=uuid)


def test_another_target_does_not_take_the_place_of_a_living_one(
    target: Target, make_target: MakeTarget
) -> None:
    uuid = "6f2b3a1e-7c38-4d1a-9b7e-1f0d6a5c4b32"
    make = {"name": "m0", "num_blocks": 8, "block_size": 4096, "uuid": uuid}
    target.rpc("bdev_malloc_create", **make)
    path = target.rpc("virtlun_export_create", bdev_name="m0")["path"]
    other = make_target()
    other.export_dir = target.export_dir
    with other.holder():
        other.start("--holder-socket", str(other.holder_socket))
        other.rpc("bdev_malloc_create", **make)
        refused = other.fails("virtlun_export_create", bdev_name="m0")
        assert isinstance(refused, RpcError)
        assert f"cannot mount {Path(path).parent}" in str(refused)
        # Its claim did not stay.
        other.rpc("bdev_malloc_delete", name="m0")
        assert other.stop() == 0
    assert Path(path).stat().st_size == 8 * 4096
