"""File systems on a volume's device: look, make, mount, grow. Needs a right to open devices.

Only a device that holds nothing at all is formatted. That mkfs was begun is noted with the volume
before, so that one interrupted half-way is done again, and nothing else ever is. What makes, checks
or grows a file system takes as long as it takes: node service calls wait for it (`longcalls`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

from csi import kernel, mountoptions
from csi.commands import run
from csi.hosterrors import HostError, OfflineOnly

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


def make(device: Path, fs_type: str) -> None:
    """Formats a device, whatever it holds, but for what is mounted."""
    if fs_type not in MAKE:
        raise HostError(f"file system '{fs_type}' is not one of {', '.join(MAKE)}")
    run(*MAKE[fs_type], "--", str(device), deadline_s=None)


def mount(
    device: Path,
    target: Path,
    fs_type: str,
    options: list[str],
    place: str,
    unmount: Callable[[], None],
) -> None:
    """Mounts a file system at `place`, which is `target`, and grows it to its device.

    Mounted, since the kernel's growth survives a crash; where it refuses, after `unmount`.
    """
    flags, data = mountoptions.parse(fs_type, [*MOUNT_OPTIONS.get(fs_type, []), *options])

    def mounted() -> None:
        try:
            kernel.mount(str(device), place, fs_type, flags, data)
        except OSError as error:
            raise HostError(
                f"cannot mount {fs_type} of {device} at {target} with options '{data}': "
                f"{error.strerror}; the kernel's log may say more"
            ) from error

    mounted()
    read_only = flags & kernel.MS_RDONLY
    if read_only or (fs_type == "ext4" and _ext4_bytes(device) >= size_of(device)):
        return
    try:
        grow(device, target, fs_type)
    except (HostError, OSError):
        unmount()
        run("e2fsck", "-f", "-p", "--", str(device), ok=(0, 1), deadline_s=None)
        run("resize2fs", str(device), deadline_s=None)
        mounted()


def grow(device: Path, target: Path, fs_type: str) -> None:
    """Grows a mounted file system to its device.

    Raises:
        OfflineOnly: the kernel grows ext4 only offline here.
    """
    if fs_type == "xfs":
        run("xfs_growfs", "-d", str(target), deadline_s=None)
        return
    try:
        run("resize2fs", str(device), deadline_s=None)
    except HostError as error:
        if "Permission denied" not in str(error):
            raise
        raise OfflineOnly(
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
