"""Which QEMU a pod has, told from what a process of it sees; never followed out of its root."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from csi.errors import Code, Failure
from csi.kubevirt import probe
from pydataplane import emulator

POD = "6f7c4f1e-33a5-4c5e-9a5c-0d1f2e3a4b5c"
OTHER = "11111111-2222-4333-8444-555555555555"
SCSI = b"vhost-user-scsi-pci\0"
BLK = b"vhost-user-blk-pci\0"
VERSION = b"QEMU emulator version 9.1.50 (rc)\n"


def process(proc: Path, number: int, pod: str = POD, *, systemd: bool = False) -> Path:
    """Makes a process of a pod, and returns its root."""
    group = f"pod{pod.replace('-', '_')}.slice" if systemd else f"burstable/pod{pod}"
    folder = proc / str(number)
    (folder / "root/usr/libexec").mkdir(parents=True)
    (folder / "cgroup").write_text(f"0::/kubepods/{group}/abc\n")
    return folder / "root"


def program(root: Path, content: bytes, path: str = "usr/libexec/qemu-kvm") -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("systemd", [False, True])
def test_the_program_of_the_pod_is_found_beside_other_processes(
    tmp_path: Path, systemd: bool
) -> None:
    (tmp_path / "self").mkdir()
    program(process(tmp_path, 10, OTHER), SCSI)
    process(tmp_path, 11)  # the pause container
    program(process(tmp_path, 12, systemd=systemd), b"\x7fELF" + VERSION + SCSI)
    found = probe.find(POD, tmp_path)
    assert found == emulator.Qemu("/usr/libexec/qemu-kvm", (9, 1), True, vhost_user_blk=False)
    assert found.reconnects


@pytest.mark.parametrize(
    ("content", "version", "device", "reconnects"),
    [
        (SCSI, None, True, False),
        (b"QEMU emulator version 8.1.99\n" + SCSI, (8, 1), True, False),
        (b"QEMU emulator version 8.2.0\n", (8, 2), False, True),
        (b"QEMU emulator version 10.0\nvhost-user-scsi-pci-base\0", (10, 0), False, True),
        (b"../hw/virtio/vhost-user-scsi-pci.c\0", None, False, False),
        (b"", None, False, False),
        (b"QEMU emulator version 9.1.0\n" + BLK, (9, 1), False, True),
        (b"QEMU emulator version 9.1.0\n" + BLK + SCSI, (9, 1), True, True),
    ],
)
def test_device_and_version_are_told_apart_from_what_looks_like_them(
    tmp_path: Path,
    content: bytes,
    version: tuple[int, int] | None,
    device: bool,
    reconnects: bool,
) -> None:
    program(process(tmp_path, 1), content)
    found = probe.find(POD, tmp_path)
    assert (found.version, found.vhost_user_scsi, found.reconnects) == (version, device, reconnects)
    assert found.vhost_user_blk == (BLK in content)


@pytest.mark.parametrize("offset", range(-30, 10, 3))
def test_what_lies_across_two_reads_is_found(tmp_path: Path, offset: int) -> None:
    padding = b"\xff" * (emulator.CHUNK_BYTES + offset)
    program(process(tmp_path, 1), padding + SCSI + b"\xff" * (emulator.CHUNK_BYTES - 25) + VERSION)
    found = probe.find(POD, tmp_path)
    assert (found.vhost_user_scsi, found.version) == (True, (9, 1))


def test_the_program_of_this_architecture_is_taken(tmp_path: Path) -> None:
    root = process(tmp_path, 1)
    program(root, b"", "usr/bin/qemu-system-other")
    path = f"usr/bin/qemu-system-{platform.machine()}"
    program(root, SCSI, path)
    assert probe.find(POD, tmp_path).path == f"/{path}"


@pytest.mark.parametrize("kind", ["link", "folder link", "fifo", "folder", "nothing"])
def test_what_is_no_file_below_the_root_is_not_opened(tmp_path: Path, kind: str) -> None:
    root = process(tmp_path, 1)
    outside = program(tmp_path / "host", SCSI)
    place = root / "usr/libexec/qemu-kvm"
    if kind == "link":
        place.symlink_to(outside)
    elif kind == "folder link":
        place.parent.rmdir()
        place.parent.symlink_to(outside.parent)
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    with pytest.raises(Failure, match="1 processes of it were looked at") as error:
        probe.find(POD, tmp_path)
    assert error.value.code is Code.UNAVAILABLE


def test_a_pod_is_told_by_kubelet_s_files_where_control_groups_have_no_names(
    tmp_path: Path,
) -> None:
    for number, pod in ((1, OTHER), (2, POD)):
        root = process(tmp_path, number, pod)
        program(root, SCSI + pod.encode())
        (tmp_path / str(number) / "cgroup").write_text("0::/\n")
        hosts = f"/kubelet/pods/{pod}/etc-hosts /etc/hosts"
        fields = f"36 35 98:0 {hosts} rw,noatime - ext4 /dev/root rw\n1 2\n"
        (tmp_path / str(number) / "mountinfo").write_text(fields)
    assert probe.find(POD, tmp_path).vhost_user_scsi
    (tmp_path / "2/root/usr/libexec/qemu-kvm").unlink()
    with pytest.raises(Failure, match="1 processes"):
        probe.find(POD, tmp_path)


def test_a_folder_s_name_makes_no_process_another_pod_s(tmp_path: Path) -> None:
    """The kernel escapes few bytes in the table of mounts, and who makes a pod names a subPath."""
    for ends, parts in (("\r", "\x0c"), ("\r", "\x0b"), ("", "\x0c")):
        forged = parts.join(
            ["/sub", ends + "1", "2", "0:9", f"/pods/{POD}/etc-hosts", "/etc/hosts"]
        )
        root = process(tmp_path / f"{ends!r}{parts!r}", 1, OTHER)
        program(root, SCSI)
        (root.parent / "cgroup").write_text("0::/\n")
        fields = f"36 35 98:0 {forged} /data rw - ext4 /dev/root rw\n"
        (root.parent / "mountinfo").write_bytes(fields.encode())
        with pytest.raises(Failure, match="hostPID: true"):
            probe.find(POD, root.parent.parent)


def test_a_pod_without_processes_is_tried_again_and_the_cause_named(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()  # it has just ended
    with pytest.raises(Failure, match="hostPID: true"):
        probe.find(POD, tmp_path)
