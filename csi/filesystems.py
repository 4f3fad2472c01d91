"""File systems on a volume's device: look, make, mount, grow.

Only a device that holds nothing at all is formatted. That mkfs was begun is noted with the volume
before, so that one interrupted half-way is done again, and nothing else ever is. What makes, checks
or grows a file system takes as long as it takes: node service calls wait for it (`underway`).
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from csi import mounts
from csi.commands import run
from csi.errors import Failure, HostError, precondition

XFS_BYTES_MIN = 300 << 20  # mkfs.xfs of xfsprogs 5.19 and newer
BLKID_NOTHING = 2
EXT4_SUPERBLOCK_AT = 1024

MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0", "-E", "nodiscard"],
    "xfs": ["mkfs.xfs", "-q", "-f", "-K"],
}  # a new volume has nothing to discard
MOUNT_OPTIONS = {"ext4": [], "xfs": ["nouuid"]}  # a clone has its origin's UUID


def holds(device: Path) -> str:
    """Returns what a device holds: a file system's type, another signature, or '' for nothing."""
    found = run(
        "blkid", "-p", "-o", "export", "--", str(device), ok=(0, BLKID_NOTHING)
    ).stdout.splitlines()
    values = dict(line.split("=", 1) for line in found if "=" in line)
    return values.get("TYPE") or values.get("PTTYPE") or ""


def check_size(fs_type: str, size: int) -> None:
    """Raises FAILED_PRECONDITION if a file system cannot be made on so few bytes."""
    if fs_type == "xfs" and size < XFS_BYTES_MIN:
        raise precondition(
            f"xfs needs {XFS_BYTES_MIN >> 20} MiB, the volume has {size >> 20}: "
            "ask for more, or use ext4"
        )


def make(device: Path, fs_type: str) -> None:
    """Formats a device, whatever it holds."""
    run(*MAKE[fs_type], "--", str(device), deadline_s=None)


def mount(device: Path, target: Path, fs_type: str, options: list[str]) -> None:
    """Mounts a file system, and grows it to its device.

    Mounted, since the kernel's growth survives a crash; before that only where it refuses.
    """
    every = [*MOUNT_OPTIONS[fs_type], *options]
    mounts.mount(device, target, fs_type, every)
    if "ro" in options or (fs_type == "ext4" and _ext4_bytes(device) >= size_of(device)):
        return
    try:
        grow(device, target, fs_type)
    except Failure:
        mounts.unmount(target)
        run("e2fsck", "-f", "-p", "--", str(device), ok=(0, 1), deadline_s=None)
        run("resize2fs", str(device), deadline_s=None)
        mounts.mount(device, target, fs_type, every)


def grow(device: Path, target: Path, fs_type: str) -> None:
    """Grows a mounted file system to its device.

    Raises:
        Failure: FAILED_PRECONDITION, the kernel grows ext4 only offline here.
    """
    if fs_type == "xfs":
        run("xfs_growfs", "-d", str(target), deadline_s=None)
        return
    try:
        run("resize2fs", str(device), deadline_s=None)
    except HostError as error:
        if "Permission denied" not in str(error):
            raise
        raise precondition(
            "the kernel does not let this process grow a mounted ext4 (CAP_SYS_RESOURCE is "
            "missing): it grows when the volume is staged next; xfs grows at once"
        ) from error


def size_of(device: Path) -> int:
    """Returns the bytes of a block device."""
    with device.open("rb") as file:
        return file.seek(0, os.SEEK_END)


def _ext4_bytes(device: Path) -> int:
    """Returns the bytes of the ext4 on a device, from its superblock."""
    with device.open("rb") as file:
        file.seek(EXT4_SUPERBLOCK_AT)
        block = file.read(1024)
    (low,) = struct.unpack_from("<I", block, 0x4)
    (shift,) = struct.unpack_from("<I", block, 0x18)
    (incompatible,) = struct.unpack_from("<I", block, 0x60)
    (high,) = struct.unpack_from("<I", block, 0x150) if incompatible & 0x80 else (0,)
    return int((high << 32 | low) << (10 + shift))
