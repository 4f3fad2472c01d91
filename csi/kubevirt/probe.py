"""Which QEMU a launcher's pod would start, told from its program file, which is never run.

The pod's image is the cluster's, not ours: every part of a path is opened without following links,
inside of the root that a process of the pod has, and what is read is only searched.
"""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from csi.errors import Code, Failure
from pydataplane import emulator
from pydataplane.emulator import Qemu

PROC = Path("/proc")
PROGRAMS = (
    "usr/libexec/qemu-kvm",
    "usr/bin/qemu-kvm",
    f"usr/bin/qemu-system-{platform.machine()}",
)
KUBELET_FILES = (b"/etc/hosts", b"/dev/termination-log")
"""Of a pod's folder on the node, mounted into every container."""
ROOT, MOUNT_POINT = 3, 4
"""Fields of mountinfo (proc_pid_mountinfo(5))."""


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
            return emulator.search(number, f"/{path}")
        except OSError:
            return None
