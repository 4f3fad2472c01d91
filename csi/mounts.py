"""Mounts of this host: asked of the kernel each time, never remembered.

Who reads them needs no right; `csi.host` makes and takes them away.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from csi import sysblock

MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Mount:
    """One line of proc_pid_mountinfo(5)."""

    target: str
    device: tuple[int, int]
    """Major and minor number of the file system."""
    root: str
    """What of the file system is mounted; for a device node in /dev, its name."""
    read_only: bool
    fs_type: str


def table() -> list[Mount]:
    """Returns all mounts of this process's namespace, in the order of mounting.

    The kernel escapes blanks, tabs, line feeds and backslashes alone. Whoever names a folder of a
    volume (a subPath) may put any other byte there, other ends of lines and no UTF-8 among them.
    """
    text = os.fsdecode(MOUNTINFO.read_bytes())
    return [_parse(line) for line in text.split("\n") if line]


def at(target: Path) -> Mount | None:
    """Returns the uppermost mount at this path, or None."""
    path = real(target)
    found = [mount for mount in table() if mount.target == path]
    return found[-1] if found else None


def of_device(device: Path) -> list[Mount]:
    """Returns the mounts of the file system on a block device, and of its node itself."""
    number = sysblock.numbers(device)
    return [
        mount
        for mount in table()
        if mount.device == number
        or (mount.fs_type == "devtmpfs" and mount.root == f"/{device.name}")
    ]


def real(path: Path) -> str:
    """Returns the path without symbolic links above its last part, which is the mount's own."""
    return str(Path(os.path.realpath(path.parent)) / path.name)


def _parse(line: str) -> Mount:
    left, right = line.split(" - ", 1)
    _, _, device, root, target, options, *_ = left.split(" ")
    major, minor = device.split(":")
    return Mount(
        target=_unescape(target),
        device=(int(major), int(minor)),
        root=_unescape(root),
        read_only="ro" in options.split(","),
        fs_type=right.split(" ", 1)[0],
    )


def _unescape(text: str) -> str:
    """Undoes the kernel's octal escapes of blanks and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
