"""What the driver reads of a host, and how it tells failures."""

from __future__ import annotations

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
from csi.hostdevice.loop import _encoded
from csi.hostdevice.loopctl import CONFIG, INFO
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


def test_the_kernel_s_structures_have_their_sizes() -> None:
    assert (INFO.size, CONFIG.size) == (232, 304)


@pytest.mark.parametrize(("major", "minor"), [(254, 0), (0, 45), (0, 300), (8, 70000)])
def test_a_device_number_is_written_as_the_kernel_does(major: int, minor: int) -> None:
    encoded = _encoded(os.makedev(major, minor))
    assert encoded >> 8 & 0xFFF == major
    assert encoded & 0xFF | encoded >> 12 & 0xFFF00 == minor


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
