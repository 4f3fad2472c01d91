"""Which QEMU a program is, told from its file, and what that can do for disks of ours.

For plugin and CSI. A program's file is searched and not run: who names it need not be trusted. Only
a wrapper, which does not say the version itself, is run, and as a user without rights: see `of`.
It blocks: not for an event loop. Standard library only, for libvirt's hook.
"""

from __future__ import annotations

import os
import platform
import re
import stat
from contextlib import suppress
from dataclasses import dataclass, replace

SCSI, BLK = b"vhost-user-scsi-pci\0", b"vhost-user-blk-pci\0"
"""The devices' names, as they stand in the program."""
PROTECTION = b"t10_pi\0"
"""That of the property by which a guest carries protection information."""
VERSION = re.compile(rb"QEMU emulator version (\d{1,3})\.(\d{1,3})[^\d]")
RECONNECTS = (8, 2)
"""The first version whose vhost-user-scsi connects again; an earlier one that is told to does not
start ("vhost_backend_init failed: Protocol error")."""
PROTECTS = (7, 2)
"""A version whose vhost-user-scsi has the property, as do all later ones; earlier ones may."""
CHUNK_BYTES = 1 << 20
OVERLAP_BYTES = 64
"""More than the longest of what is searched for."""
PROGRAM_BYTES_MAX = 256 << 20

FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""Where libvirtd looks for QEMU, as systemd starts it."""
OUTSIDE = "/usr/libexec/qemu-kvm"
"""Where it looks after that, for guests of the host's own architecture."""
ARCHITECTURES = {"i686": "i386", "armv6l": "arm", "armv7l": "arm", "ppcle": "ppc64"}
"""libvirt's names of those that QEMU's programs call otherwise."""

WRAPPER = re.compile(r"qemu|kvm")
"""In the name of whatever is run."""
WRAPPER_BYTES_MAX = 1 << 20
NOBODY = 65534
ASK_S = 5.0
ANSWER_BYTES = 4096

KNOWN_MAX = 64
"""Programs that are remembered."""


@dataclass(frozen=True)
class Qemu:
    """A QEMU program."""

    path: str
    version: tuple[int, int] | None
    """Major and minor number; None if the program does not say it."""
    vhost_user_scsi: bool
    """Whether it has the device vhost-user-scsi-pci; of a wrapper that is not known: False."""
    vhost_user_blk: bool
    """Whether it has the device vhost-user-blk-pci; likewise."""
    is_wrapper: bool = False
    """Whether it has only told the version of another program, which it starts."""
    t10_pi: bool = False
    """Whether it has the property t10_pi; of a wrapper that is not known: False."""

    @property
    def reconnects(self) -> bool:
        """Whether the device can be told to connect again; False where it is not known."""
        return self.version is not None and self.version >= RECONNECTS

    @property
    def protects(self) -> bool | None:
        """Whether its guests can carry protection information; None where it is not known."""
        if self.version is None:
            return None
        if self.is_wrapper:
            return True if self.version >= PROTECTS else None
        return self.t10_pi


_known: dict[str, tuple[tuple[int, int], Qemu]] = {}
"""By path: the file's time of change (ns) and size (bytes), and what was found in it then."""


def reconnects(path: str | None, arch: str | None) -> bool:
    """Whether a domain's QEMU connects again to a target that restarted; False if that is unknown.

    Args:
        path: of the domain's <emulator>; None: it has none, and libvirt takes its default.
        arch: of the domain's <os><type>, as libvirt calls it; None: the host's own.
    """
    program = path or default(arch)
    found = of(program) if program is not None else None
    return found is not None and found.reconnects


def lacks_scsi(path: str | None, arch: str | None) -> bool:
    """Whether a domain's QEMU has no vhost-user-scsi; False if that is unknown, as of a wrapper.

    Arguments as of `reconnects`.
    """
    program = path or default(arch)
    found = of(program) if program is not None else None
    if found is None or found.version is None:
        return False
    return not found.vhost_user_scsi and not found.is_wrapper


def protects(path: str | None, arch: str | None) -> bool | None:
    """Whether a domain's QEMU lets its guest carry protection information; None if unknown.

    Arguments as of `reconnects`.
    """
    program = path or default(arch)
    found = of(program) if program is not None else None
    return None if found is None else found.protects


def default(arch: str | None) -> str | None:
    """Returns the path of the QEMU that libvirt takes for an architecture; None if there is none.

    `arch` is libvirt's name of it; None: the host's own.
    """
    host = platform.machine()
    name = arch or host
    program = f"qemu-system-{ARCHITECTURES.get(name, name)}"
    places = [f"{folder}/{program}" for folder in FOLDERS]
    if name == host or (name, host) == ("i686", "x86_64"):
        places.append(OUTSIDE)
    return next((place for place in places if os.access(place, os.X_OK)), None)


def of(path: str) -> Qemu | None:
    """Returns what a program is, remembered until its file changes; None if it cannot be read.

    A wrapper (a small program or script called after QEMU that belongs to root or to this process's
    own user, and that nobody else may write) is asked for its version, as libvirt asks it: as the
    user nobody, if this process is root's. It is asked each time: what it starts may change when
    its own file does not.
    """
    if not path.startswith("/"):
        return None
    opened = []
    try:
        # Anybody may name a device, whose opening alone may do something: only a file is opened.
        opened.append(os.open(path, os.O_PATH | os.O_CLOEXEC))
        status = os.fstat(opened[0])
        if not stat.S_ISREG(status.st_mode) or not status.st_mode & 0o111:
            return None
        key = status.st_mtime_ns, status.st_size
        before = _known.get(path)
        if before is not None and before[0] == key:
            return before[1]
        opened.append(os.open(f"/proc/self/fd/{opened[0]}", os.O_RDONLY | os.O_CLOEXEC))
        found = search(opened[1], path)
    except (OSError, ValueError):  # the latter: a NUL in the path
        return None
    finally:
        for number in opened:
            os.close(number)
    if found.version is None and _is_wrapper(path, status):
        return replace(found, version=_version(_answer(path)), is_wrapper=True)
    if len(_known) >= KNOWN_MAX:
        _known.clear()
    _known[path] = key, found
    return found


def search(number: int, path: str) -> Qemu:
    """Returns what an open file says; `path` is what it is called.

    Raises:
        OSError: it cannot be read.
    """
    scsi, blk, t10_pi, version, place, tail = False, False, False, None, 0, b""
    while place < PROGRAM_BYTES_MAX and not (scsi and blk and t10_pi and version):
        chunk = os.pread(number, CHUNK_BYTES, place)
        if not chunk:
            break
        place += len(chunk)
        text = tail + chunk
        scsi = scsi or SCSI in text
        blk = blk or BLK in text
        t10_pi = t10_pi or PROTECTION in text
        version = version or _version(text)
        tail = text[-OVERLAP_BYTES:]
    return Qemu(path, version, scsi, blk, t10_pi=t10_pi)


def _version(text: bytes) -> tuple[int, int] | None:
    """Returns the version that a program says it has."""
    found = VERSION.search(text)
    return None if found is None else (int(found[1]), int(found[2]))


def _is_wrapper(path: str, status: os.stat_result) -> bool:
    """Whether a program that does not say its version may be run."""
    return (
        status.st_uid in (0, os.geteuid())
        and not status.st_mode & 0o022
        and status.st_size <= WRAPPER_BYTES_MAX
        and WRAPPER.search(os.path.basename(path)) is not None  # noqa: PTH119 - slow to import
    )


def _answer(path: str) -> bytes:
    """Returns what a wrapper prints when it is asked for its version; nothing if it fails."""
    import select  # noqa: PLC0415 - hardly anybody has a wrapper
    import signal  # noqa: PLC0415
    import subprocess  # noqa: PLC0415
    import time  # noqa: PLC0415

    root = os.geteuid() == 0
    try:
        process = subprocess.Popen(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": ":".join(FOLDERS), "LC_ALL": "C"},
            start_new_session=True,
            user=NOBODY if root else None,
            group=NOBODY if root else None,
            extra_groups=[] if root else None,
        )
    except (OSError, subprocess.SubprocessError):
        return b""
    assert process.stdout is not None
    answer, end = b"", time.monotonic() + ASK_S
    with process.stdout as stream:
        ready = select.poll()  # select() knows no descriptor above 1023
        ready.register(stream, select.POLLIN)
        while len(answer) < ANSWER_BYTES:
            left = end - time.monotonic()
            if left <= 0 or not ready.poll(left * 1000):
                break
            if not (part := os.read(stream.fileno(), ANSWER_BYTES)):
                break
            answer += part
    # Whatever it has started goes with it: the session is its own.
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return answer
