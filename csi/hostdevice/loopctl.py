"""Loop devices by the kernel's own calls (linux/loop.h): set up in one step, found by a name.

The name is `lo_file_name`, 63 bytes that the kernel keeps with the device. It says whose a device
is even when its file is gone; nothing has to be written down elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from csi.hosterrors import HostError

LOOP_CONTROL = Path("/dev/loop-control")
SYS_BLOCK = Path("/sys/block")
LOOP_CTL_GET_FREE = 0x4C82
BLKFLSBUF = 0x1261
LOOP_CLR_FD = 0x4C01
LOOP_GET_STATUS64 = 0x4C05
LOOP_SET_CAPACITY = 0x4C07
LOOP_CONFIGURE = 0x4C0A
FLAG_READ_ONLY = 1
FLAG_AUTOCLEAR = 4
FLAG_DIRECT_IO = 16
INFO = struct.Struct("<5Q4I64s64s32s2Q")  # struct loop_info64
CONFIG = struct.Struct(f"<2I{INFO.size}s8Q")  # struct loop_config
NAME_BYTES_MAX = 63
DEAD = "dead:"
ATTEMPTS = 64
GONE_DEADLINE_S = 10.0
OURS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EBUSY}
"""Errors that say nothing of a loop device's file: one that works is not to be taken for dead."""


@dataclass(frozen=True)
class Loop:
    """A loop device in use."""

    device: Path
    name: str
    """`lo_file_name`; where the file is dead, DEAD and the last part of the file's path."""
    backing: tuple[int, int]
    """Device and inode number of its file."""
    read_only: bool
    direct_io: bool
    leaving: bool
    """Taken off its file already, and gone as soon as nobody has it open."""


def loops(file: str | None = None) -> Iterator[Loop]:
    """Yields the loop devices in use; with `file`, those over a file of that name alone.

    Others are then not even opened: their owners may be about to free them.
    """
    for entry in sorted(SYS_BLOCK.glob("loop*")):
        if file in (None, file_name(entry.name)) and (entry / "loop").exists():
            found = status(Path("/dev") / entry.name)
            if found:
                yield found


def file_names() -> Iterator[str]:
    """Yields the last part of the path of each loop device's file. No file is asked for that."""
    for entry in SYS_BLOCK.glob("loop*"):
        if (name := file_name(entry.name)) is not None:
            yield name


def status(device: Path) -> Loop | None:
    """Returns what a loop device is, or None if it is not in use.

    Raises:
        HostError: that cannot be known now, as this process lacks something (descriptors, memory).
    """
    data = bytearray(INFO.size)
    try:
        with device.open("rb") as node:
            fcntl.ioctl(node, LOOP_GET_STATUS64, data)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENOENT, errno.ENODEV):
            return None
        if error.errno in OURS:
            raise HostError(f"{device} cannot be looked at: {error.strerror}") from error
        return _dead(device)  # the kernel asks the file, which is dead
    fields = INFO.unpack(data)
    return Loop(
        device=device,
        name=fields[9].rstrip(b"\0").decode(errors="replace"),
        backing=(fields[0], fields[1]),
        read_only=bool(fields[8] & FLAG_READ_ONLY),
        direct_io=bool(fields[8] & FLAG_DIRECT_IO),
        leaving=bool(fields[8] & FLAG_AUTOCLEAR),
    )


def _dead(device: Path) -> Loop | None:
    """Returns what sysfs tells of a loop device whose file does not answer.

    Its name is not there; the file's own name, the last part of what may be no path any more, is.
    """
    folder = SYS_BLOCK / device.name
    file = file_name(device.name)
    try:
        flags = [
            (folder / entry).read_text().strip() == "1"
            for entry in ("ro", "loop/dio", "loop/autoclear")
        ]
    except OSError:
        return None
    if file is None:
        return None
    read_only, direct_io, leaving = flags
    return Loop(
        device=device,
        name=f"{DEAD}{file}",
        backing=(0, 0),
        read_only=read_only,
        direct_io=direct_io,
        leaving=leaving,
    )


def file_name(loop: str) -> str | None:
    """Returns the last part of the path of a loop device's file, or None if it has none."""
    path = file_path(loop)
    return None if path is None else path.name


def file_path(loop: str) -> Path | None:
    """Returns the path of a loop device's file, or None if it has none.

    Where the file's mount is none of this process's, or gone, it is what is left: `/NAME` perhaps.
    """
    try:
        path = os.fsdecode((SYS_BLOCK / loop / "loop/backing_file").read_bytes())
    except OSError:
        return None
    return Path(path.removesuffix("\n").removesuffix(" (deleted)"))


def encoded(device: int) -> int:
    """Returns st_dev as the kernel's huge_encode_dev() writes it into loop_info64."""
    major, minor = os.major(device), os.minor(device)
    return (minor & 0xFF) | major << 8 | (minor & ~0xFF) << 12


def attach(file: Path, name: str, *, read_only: bool, block_size: int) -> Path:
    """Puts a loop device with direct I/O over a file and returns it.

    Raises:
        HostError: the kernel refuses.
    """
    assert len(name.encode()) <= NAME_BYTES_MAX
    flags = FLAG_DIRECT_IO | (FLAG_READ_ONLY if read_only else 0)
    info = INFO.pack(*[0] * 8, flags, name.encode(), b"", b"", 0, 0)
    try:
        with contextlib.ExitStack() as files:
            backing = os.open(file, os.O_RDONLY if read_only else os.O_RDWR)
            files.callback(os.close, backing)
            config = CONFIG.pack(backing, block_size, info, *[0] * 8)
            for _ in range(ATTEMPTS):
                with LOOP_CONTROL.open("rb") as control:
                    number = fcntl.ioctl(control, LOOP_CTL_GET_FREE)
                device = Path(f"/dev/loop{number}")
                try:
                    with device.open("rb" if read_only else "rb+", buffering=0) as node:
                        fcntl.ioctl(node, LOOP_CONFIGURE, config)
                except OSError as error:
                    if error.errno != errno.EBUSY:  # else: someone was quicker
                        raise
                    continue
                return device
    except OSError as error:
        raise HostError(f"no loop device over {file}: {error}") from error
    raise HostError(f"no loop device over {file}: none was free {ATTEMPTS} times")


def grow(device: Path) -> None:
    """Lets a loop device take its file's size."""
    try:
        with device.open("rb") as node:
            fcntl.ioctl(node, LOOP_SET_CAPACITY)
    except OSError as error:
        raise HostError(f"{device} does not take its new size: {error}") from error


def flush_device(device: Path) -> None:
    """Writes out what is in a block device's page cache, and drops the cache; OSError if not."""
    with device.open("rb") as node:
        os.fsync(node)
        fcntl.ioctl(node, BLKFLSBUF)


def flush(loop: Loop) -> None:
    """Writes out what is in a loop device's page cache, and drops the cache.

    A device that has lost its file meanwhile is left as it is: nothing can be written any more.

    Raises:
        HostError: the file refuses the data.
    """
    try:
        flush_device(loop.device)
    except OSError as error:
        now = status(loop.device)
        if now is not None and now.name == loop.name and now.backing == loop.backing:
            raise HostError(f"{loop.device} cannot be flushed: {error}") from error


def release(loop: Loop) -> None:
    """Takes a loop device off its file, now or when the last one that has it open closes it."""
    try:
        with loop.device.open("rb") as node:
            fcntl.ioctl(node, LOOP_CLR_FD)
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.ENOENT):
            raise HostError(f"{loop.device} cannot be freed: {error}") from error


def detach(loop: Loop) -> None:
    """Takes a loop device off its file and waits until it is off.

    Raises:
        HostError: someone has it open for longer than GONE_DEADLINE_S seconds.
    """
    release(loop)
    wait_gone(loop)


def wait_gone(loop: Loop) -> None:
    """Waits until a loop device is off its file, which it was taken off.

    Raises:
        HostError: someone has it open for longer than GONE_DEADLINE_S seconds.
    """
    end = time.monotonic() + GONE_DEADLINE_S
    while status(loop.device) == replace(loop, leaving=True):
        if time.monotonic() > end:
            raise HostError(f"{loop.device} is still open elsewhere: close what uses it")
        time.sleep(0.01)
