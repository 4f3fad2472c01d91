"""System calls that Python has no function for: mount(2), umount2(2), openat2(2), prctl(2), capset.

Each raises OSError with the kernel's number. Who calls them says what was wrong with what.
"""

from __future__ import annotations

import ctypes
import os
import struct

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_SYNCHRONOUS = 16
MS_REMOUNT = 32
MS_DIRSYNC = 128
MS_NOATIME = 1024
MS_NODIRATIME = 2048
MS_BIND = 4096
MS_RELATIME = 1 << 21
MS_STRICTATIME = 1 << 24
MS_LAZYTIME = 1 << 25
UMOUNT_NOFOLLOW = 8

SYS_OPENAT2 = 437
"""The same on all architectures."""
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
OPEN_HOW = struct.Struct("<3Q")

PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAP_DAC_OVERRIDE = 1
CAP_SYS_ADMIN = 21
CAP_SYS_RESOURCE = 24
CAP_LAST = 63
"""More than any kernel has."""
CAPABILITY_HEADER = struct.Struct("<Ii")
CAPABILITY_DATA = struct.Struct("<6I")
CAPABILITY_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(answer: int) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return answer


def mount(source: str, target: str, fs_type: str, flags: int, data: str = "") -> None:
    """Mounts something at `target`, which is followed where it is a link."""
    words = (os.fsencode(source), os.fsencode(target), fs_type.encode() or None)
    _checked(_libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None))


def umount(target: str) -> None:
    """Unmounts what is uppermost at a path whose last part is no link (umount2(2))."""
    _checked(_libc.umount2(os.fsencode(target), UMOUNT_NOFOLLOW))


def openat2(folder: int, path: str, flags: int, resolve: int) -> int:
    """Opens a path from an open folder and returns its descriptor (Linux 5.6)."""
    how = OPEN_HOW.pack(flags | os.O_CLOEXEC, 0, resolve)
    number = ctypes.c_long(SYS_OPENAT2)
    words = (ctypes.c_int(folder), os.fsencode(path), how, ctypes.c_size_t(len(how)))
    return _checked(int(_libc.syscall(number, *words)))


def keep_capabilities(keep: frozenset[int]) -> None:
    """Leaves this process, and all that it runs, of its capabilities those of `keep`.

    Also no_new_privs. Before the process has a second thread, as each has its own.
    """
    for number in range(CAP_LAST + 1):
        there = _libc.prctl(PR_CAPBSET_READ, ctypes.c_ulong(number), 0, 0, 0)
        if number not in keep and there == 1:
            _checked(_libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0))
    _checked(_libc.prctl(PR_CAP_AMBIENT, ctypes.c_ulong(PR_CAP_AMBIENT_CLEAR_ALL), 0, 0, 0))
    header = ctypes.create_string_buffer(CAPABILITY_HEADER.pack(CAPABILITY_VERSION, 0))
    data = ctypes.create_string_buffer(CAPABILITY_DATA.size)
    _checked(_libc.capget(header, data))
    _, permitted, _, _, permitted_high, _ = CAPABILITY_DATA.unpack(data.raw[: CAPABILITY_DATA.size])
    wanted = sum(1 << number for number in keep) & (permitted | permitted_high << 32)
    low, high = wanted & 0xFFFFFFFF, wanted >> 32
    _checked(_libc.capset(header, CAPABILITY_DATA.pack(low, low, 0, high, high, 0)))
    _checked(_libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0))
