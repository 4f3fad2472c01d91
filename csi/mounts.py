"""Mounts of this host: asked of the kernel each time, never remembered."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from csi.commands import run
from csi.errors import HostError

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
    """Returns all mounts of this process's namespace, in the order of mounting."""
    return [_parse(line) for line in MOUNTINFO.read_text().splitlines()]


def at(target: Path) -> Mount | None:
    """Returns the uppermost mount at this path, or None."""
    path = real(target)
    found = [mount for mount in table() if mount.target == path]
    return found[-1] if found else None


def of_device(device: Path) -> list[Mount]:
    """Returns the mounts of the file system on a block device, and of its node itself."""
    number = numbers(device)
    return [
        mount
        for mount in table()
        if mount.device == number
        or (mount.fs_type == "devtmpfs" and mount.root == f"/{device.name}")
    ]


def real(path: Path) -> str:
    """Returns the path without symbolic links above its last part, which is the mount's own."""
    return str(Path(os.path.realpath(path.parent)) / path.name)


def numbers(device: Path) -> tuple[int, int]:
    """Returns the major and minor number of a device node."""
    number = device.stat().st_rdev
    return os.major(number), os.minor(number)


def mount(source: Path, target: Path, fs_type: str, options: list[str]) -> None:
    """Mounts a device; HostError if the kernel refuses."""
    flags = ["-o", ",".join(options)] if options else []
    run("mount", "-t", fs_type, *flags, "--", str(source), str(target))


def bind(source: Path, target: Path, *, read_only: bool) -> None:
    """Makes a file or directory appear at another path; HostError if the kernel refuses.

    A read-only one is writable for a moment: who finds one, after a crash perhaps, seals it.
    """
    run("mount", "--bind", "--", str(source), str(target))
    if read_only:
        try:
            seal(target)
        except HostError:
            unmount(target)
            raise


def seal(target: Path) -> None:
    """Makes what is mounted at a path read-only there, if it is not."""
    present = at(target)
    if present is not None and not present.read_only:
        run("mount", "-o", "remount,bind,ro", "--", str(target))


def unmount(target: Path) -> None:
    """Unmounts every mount at this path, idempotent; one in use is an error."""
    while at(target) is not None:
        run("umount", "--", str(target))


def remove(target: Path) -> None:
    """Unmounts a path and removes its mount point; idempotent."""
    unmount(target)
    with contextlib.suppress(FileNotFoundError):
        if target.is_dir() and not target.is_symlink():
            target.rmdir()
        else:
            target.unlink()


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
