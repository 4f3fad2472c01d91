"""What the driver reads of a host, and how it tells failures."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner

from csi import filesystems, mounts
from csi.cli import main
from csi.commands import run
from csi.errors import Code, Failure, describe
from csi.hostdevice import loopctl
from csi.hostdevice.loopctl import CONFIG, INFO, encoded
from csi.hosterrors import HostError
from pydataplane.errors import RpcError, TargetTimeout, TargetUnavailable, VolumeNotFoundError

LINES = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda1 rw
90 22 7:3 / /var/lib/a\\040b/pod ro,relatime shared:5 - xfs /dev/loop3 rw,nouuid
91 22 0:5 /loop3 /var/lib/dev\\134x rw,nosuid - devtmpfs udev rw,size=1k
"""


def test_mounts_with_blanks_backslashes_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mountinfo"
    file.write_text(LINES)
    monkeypatch.setattr(mounts, "MOUNTINFO", file)
    root, pod, device = mounts.table()
    assert (root.target, root.device, root.read_only) == ("/", (254, 0), False)
    assert (pod.target, pod.device, pod.read_only) == ("/var/lib/a b/pod", (7, 3), True)
    assert (device.target, device.root, device.fs_type) == ("/var/lib/dev\\x", "/loop3", "devtmpfs")


@pytest.mark.parametrize(
    "byte", [b"\r", b"\x0b", b"\x0c", b"\x1c", b"\x85", b"\xff", b"\xe2\x80\xa8"]
)
def test_a_name_of_any_bytes_ends_no_line_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, byte: bytes
) -> None:
    """Whoever makes a pod names a folder of its volume, and the kernel shows it to all drivers."""
    file = tmp_path / "mountinfo"
    name = b"/a" + byte + b"b"
    file.write_bytes(LINES.encode() + b"92 22 0:9 %s /sub ro - tmpfs x rw\n" % name)
    monkeypatch.setattr(mounts, "MOUNTINFO", file)
    *others, found = mounts.table()
    assert len(others) == 3
    assert (os.fsencode(found.root), found.target, found.fs_type) == (name, "/sub", "tmpfs")


def test_a_loop_device_is_not_dead_for_want_of_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes one for dead that works makes a second one of the same file, and mounts both."""
    monkeypatch.setattr(loopctl, "SYS_BLOCK", tmp_path)
    folder = tmp_path / "loop7/loop"
    folder.mkdir(parents=True)
    (folder / "backing_file").write_bytes(b"/export/a\xffb (deleted)\n")
    for file in (tmp_path / "loop7/ro", folder / "dio", folder / "autoclear"):
        file.write_text("0\n")
    numbers: list[int] = []

    def fails(*_: object) -> None:
        raise OSError(numbers[-1], os.strerror(numbers[-1]))

    device = tmp_path / "node/loop7"
    device.parent.mkdir()
    device.touch()
    monkeypatch.setattr(fcntl, "ioctl", fails)
    for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES):
        numbers.append(number)
        with pytest.raises(HostError, match="cannot be looked at"):
            loopctl.status(device)
    for number in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.ESTALE):
        numbers.append(number)
        found = loopctl.status(device)
        assert found is not None and os.fsencode(found.name) == b"dead:a\xffb"


def test_the_kernel_s_structures_have_their_sizes() -> None:
    assert (INFO.size, CONFIG.size) == (232, 304)


@pytest.mark.parametrize(("major", "minor"), [(254, 0), (0, 45), (0, 300), (8, 70000)])
def test_a_device_number_is_written_as_the_kernel_does(major: int, minor: int) -> None:
    number = encoded(os.makedev(major, minor))
    assert number >> 8 & 0xFFF == major
    assert number & 0xFF | number >> 12 & 0xFFF00 == minor


def test_the_size_of_an_ext4_is_read_from_its_superblock(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(96 << 20)
    filesystems.make(image, "ext4")
    with image.open("ab") as file:
        file.truncate(128 << 20)
    assert filesystems._ext4_bytes(image) == 96 << 20
    assert filesystems.size_of(image) == 128 << 20


def test_what_a_device_holds(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    assert filesystems.holds(image) == ""
    filesystems.make(image, "ext4")
    assert filesystems.holds(image) == "ext4"
    table = tmp_path / "table"
    table.write_bytes(bytes(446) + struct.pack("<8B2I", 0, 0, 0, 0, 0x83, 0, 0, 0, 2048, 2048))
    with table.open("r+b") as file:
        file.truncate(64 << 20)
        file.seek(510)
        file.write(b"\x55\xaa")
    assert filesystems.holds(table) == "dos"


def test_a_failed_command_says_its_last_words() -> None:
    with pytest.raises(HostError, match=r"ls.*status 2.*/nonexistent"):
        run("ls", "/nonexistent")
    with pytest.raises(HostError, match=r"one two$"):
        run("sh", "-c", "printf 'one\n\ttwo\n' >&2; exit 1")
    with pytest.raises(HostError, match="nonsense"):
        run("nonsense")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Failure(Code.ABORTED, "x"), Code.ABORTED),
        (RpcError(-19, "x"), Code.NOT_FOUND),
        (RpcError(-84, "x"), Code.INTERNAL),
        (RpcError(-32601, "x"), Code.UNIMPLEMENTED),
        (TargetUnavailable("x"), Code.UNAVAILABLE),
        (TargetTimeout("x"), Code.DEADLINE_EXCEEDED),
        (VolumeNotFoundError("x"), Code.NOT_FOUND),
        (HostError("x"), Code.INTERNAL),
        (OSError(5, "x"), Code.INTERNAL),
        (KeyError("x"), Code.INTERNAL),
    ],
)
def test_every_error_has_a_code_and_a_sentence(error: Exception, code: grpc.StatusCode) -> None:
    found, message = describe(error)
    assert (found, "x" in message) == (code, True)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--http", "nowhere"], "ADDRESS:PORT"),
        (["--mode", "both"], "both"),
        ([], "--node-id"),
    ],
)
def test_wrong_options_are_named(
    options: list[str], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NODE_NAME", raising=False)
    node = ["--node-id", "n"] if options else []
    endpoint = f"unix://{tmp_path}/csi.sock"
    done = CliRunner().invoke(main, ["--endpoint", endpoint, *node, *options])
    assert done.exit_code != 0
    assert word in done.output
    assert not (tmp_path / "csi.sock").exists()
