"""Which QEMU a launcher's pod would start, told from its program file, which is never run.

The pod's image is the cluster's, not ours: every part of a path is opened without following links,
inside of the root that a process of the pod has, and what is read is only searched.
"""

from __future__ import annotations

import os
import platform
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from csi.errors import Code, Failure

PROC = Path("/proc")
DEVICE = b"vhost-user-scsi-pci\0"
VERSION = re.compile(rb"QEMU emulator version (\d{1,3})\.(\d{1,3})[^\d]")
RECONNECTS = (8, 2)
"""The first version whose vhost-user-scsi connects again; an earlier one refuses the option."""
PROGRAMS = (
    "usr/libexec/qemu-kvm",
    "usr/bin/qemu-kvm",
    f"usr/bin/qemu-system-{platform.machine()}",
)
CHUNK_BYTES = 1 << 20
OVERLAP_BYTES = 64
"""More than the longest of what is searched for."""
PROGRAM_BYTES_MAX = 256 << 20
KUBELET_FILES = (b"/etc/hosts", b"/dev/termination-log")
"""Of a pod's folder on the node, mounted into every container."""
ROOT, MOUNT_POINT = 3, 4
"""Fields of mountinfo (proc_pid_mountinfo(5))."""


@dataclass(frozen=True)
class Qemu:
    """A QEMU program."""

    path: str
    """In the pod."""
    version: tuple[int, int] | None
    """Major and minor number; None if the program does not say it."""
    vhost_user_scsi: bool
    """Whether it has the device vhost-user-scsi-pci."""

    @property
    def reconnects(self) -> bool:
        """Whether the device can be told to connect again."""
        return self.version is not None and self.version >= RECONNECTS


def find(pod: str, proc: Path = PROC) -> Qemu:
    """Returns the QEMU of a pod.

    Raises:
        Failure: UNAVAILABLE, no process of the pod has one in its root (yet).
    """
    seen = 0
    for process in _processes(pod, proc):
        seen += 1
        for path in PROGRAMS:
            found = _read(process / "root", path)
            if found is not None:
                return found
    why = (
        f"{seen} processes of it were looked at"
        if seen
        else "no process of it is seen, which needs hostPID: true for the driver"
    )
    raise Failure(
        Code.UNAVAILABLE,
        f"no QEMU program was found in pod {pod} ({why}): it is looked for again when the virtual "
        "machine is tried again",
    )


def _processes(pod: str, proc: Path) -> Iterator[Path]:
    """Yields the folders of the pod's processes.

    kubelet names their control groups after the pod's UID, unless its cgroupsPerQOS is off; then
    they are told by the files of the pod's folder that kubelet mounts into each container.
    """
    names = (pod.encode(), pod.replace("-", "_").encode())  # the latter: systemd's slices
    folders = [folder for folder in proc.iterdir() if folder.name.isdecimal()]
    found = [
        folder for folder in folders if any(name in _words(folder / "cgroup") for name in names)
    ]
    place = f"/pods/{pod}/".encode()
    yield from found or (
        folder
        for folder in folders
        if any(
            len(fields := line.split(b" ")) > MOUNT_POINT
            and fields[MOUNT_POINT] in KUBELET_FILES
            and place in fields[ROOT]
            for line in _words(folder / "mountinfo").split(b"\n")
        )
    )


def _words(file: Path) -> bytes:
    """Returns a file of a process; nothing if that has ended."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _read(root: Path, path: str) -> Qemu | None:
    """Returns the program at a path below `root`; None if there is no such file."""
    with ExitStack() as opened:
        try:
            number = os.open(root, os.O_PATH | os.O_DIRECTORY)
            opened.callback(os.close, number)
            *folders, name = path.split("/")
            for folder in folders:
                flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
                number = os.open(folder, flags, dir_fd=number)
                opened.callback(os.close, number)
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            number = os.open(name, flags, dir_fd=number)
            opened.callback(os.close, number)
            if not stat.S_ISREG(os.fstat(number).st_mode):
                return None
            return _search(number, path)
        except OSError:
            return None


def _search(number: int, path: str) -> Qemu:
    device, version, place, tail = False, None, 0, b""
    while place < PROGRAM_BYTES_MAX and not (device and version):
        chunk = os.pread(number, CHUNK_BYTES, place)
        if not chunk:
            break
        place += len(chunk)
        text = tail + chunk
        device = device or DEVICE in text
        if version is None and (found := VERSION.search(text)):
            version = int(found[1]), int(found[2])
        tail = text[-OVERLAP_BYTES:]
    return Qemu(f"/{path}", version, device)
