"""What the helper, and the programs that it runs, may not ask the kernel for: a seccomp filter.

An allow-list would be one of other people's programs, which call what their next version calls:
blkid, mkfs, e2fsck, resize2fs, xfs_growfs. So this is a list of what CAP_SYS_ADMIN opens and none
of them needs. Such a call fails with EPERM, and the first of each name is logged with its program;
nothing is killed.

libseccomp makes the filter, as it does systemd's; the kernel asks this process about each call on
the list, so that it can be named (SECCOMP_RET_USER_NOTIF). Once this process has ended, such a call
of a program that it left fails with ENOSYS.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

LIBRARY = "libseccomp.so.2"

DENIED = {
    "code in the kernel": (
        *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load"),
        *("bpf", "perf_event_open"),
    ),
    "other processes": (
        *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd"),
        *("kcmp", "fanotify_init"),
    ),
    "namespaces and roots": ("setns", "unshare", "pivot_root", "chroot"),
    "mounts, but by mount(2) and umount2(2)": (
        *("fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr", "move_mount", "open_tree"),
    ),
    "files without their path": ("open_by_handle_at",),
    "calls that no filter sees": ("io_uring_setup", "io_uring_enter", "io_uring_register"),
    "keys": ("add_key", "keyctl", "request_key"),
    "the machine": (
        *("reboot", "swapon", "swapoff", "sethostname", "setdomainname", "acct", "syslog"),
        *("settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "iopl", "ioperm"),
        *("quotactl", "quotactl_fd", "vhangup", "userfaultfd"),
    ),
}
"""By what they are to."""

AF_UNIX = 1
CLONE_NAMESPACES = (
    0x00020000,  # NEWNS
    0x02000000,  # NEWCGROUP
    0x04000000,  # NEWUTS
    0x08000000,  # NEWIPC
    0x10000000,  # NEWUSER
    0x20000000,  # NEWPID
    0x40000000,  # NEWNET
)
# seccomp.h of libseccomp
ALLOW = 0x7FFF0000
NOTIFY = 0x7FC00000
ERRNO = 0x00050000
ATTRIBUTE_BAD_ARCH = 2
NOT_EQUAL, MASKED_EQUAL = 1, 7
NO_SUCH_CALL = -1
THREAD = "denied calls"
AGAIN_S = 0.01

Log = Callable[..., None]


class Unavailable(OSError):
    """The calls cannot be denied; the text says why, and what to do."""


class _Comparison(ctypes.Structure):
    """struct scmp_arg_cmp."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


class _Question(ctypes.Structure):
    """struct seccomp_notif of linux/seccomp.h."""

    _fields_ = (
        ("id", ctypes.c_uint64),
        ("pid", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("number", ctypes.c_int32),
        ("arch", ctypes.c_uint32),
        ("instruction", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 6),
    )


class _Answer(ctypes.Structure):
    """struct seccomp_notif_resp."""

    _fields_ = (
        ("id", ctypes.c_uint64),
        ("value", ctypes.c_int64),
        ("error", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
    )


class Denial:
    """The filter of this process; its threads and programs inherit it for good."""

    def __init__(self, log: Log) -> None:
        """Has no filter yet; `log` is told the first denied call of each name.

        Raises:
            Unavailable: the library is not there.
        """
        self._log = log
        self._denied: set[str] = set()
        self._library = _library()

    def names(self) -> list[str]:
        """Returns the calls that were denied so far, each once."""
        return sorted(self._denied.copy())

    def begin(self) -> None:
        """Denies the calls from now on, to this thread and all that it starts.

        Needs no_new_privs, or CAP_SYS_ADMIN.

        Raises:
            Unavailable: the kernel or the library cannot.
        """
        library = self._library
        context = ctypes.c_void_p(library.seccomp_init(ALLOW))
        if not context:
            raise Unavailable(f"system calls cannot be denied: {LIBRARY} has no memory for it")
        try:
            # those of another architecture, which nobody has programs of
            _checked(library.seccomp_attr_set(context, ATTRIBUTE_BAD_ARCH, ERRNO | errno.EPERM))
            for calls in DENIED.values():
                for name in calls:
                    self._rule(context, NOTIFY, name)
            self._rule(context, NOTIFY, "socket", _Comparison(0, NOT_EQUAL, AF_UNIX))
            for flag in CLONE_NAMESPACES:
                self._rule(context, NOTIFY, "clone", _Comparison(0, MASKED_EQUAL, flag, flag))
            # its flags are in memory, where a filter cannot look: C libraries take the older call
            self._rule(context, ERRNO | errno.ENOSYS, "clone3")
            _checked(library.seccomp_load(context))
            listener = _checked(library.seccomp_notify_fd(context))
        finally:
            library.seccomp_release(context)
        threading.Thread(target=self._answer, args=(listener,), name=THREAD, daemon=True).start()

    def _rule(self, context: ctypes.c_void_p, action: int, name: str, *when: _Comparison) -> None:
        number = self._library.seccomp_syscall_resolve_name(name.encode())
        if number == NO_SUCH_CALL:  # younger than the library
            return
        comparisons = (_Comparison * len(when))(*when)
        # does nothing for a call that this architecture does not have
        _checked(
            self._library.seccomp_rule_add_array(context, action, number, len(when), comparisons)
        )

    def _answer(self, listener: int) -> None:
        """Denies what the kernel asks about, until the process ends."""
        while True:
            question = _Question()
            status = self._library.seccomp_notify_receive(listener, ctypes.byref(question))
            if status < 0:  # who asked was killed meanwhile
                time.sleep(AGAIN_S)
                continue
            self._note(question)
            answer = _Answer(id=question.id, error=-errno.EPERM)
            self._library.seccomp_notify_respond(listener, ctypes.byref(answer))

    def _note(self, question: _Question) -> None:
        resolve = self._library.seccomp_syscall_resolve_num_arch
        call = (resolve(question.arch, question.number) or b"unknown").decode()
        try:
            program = Path(f"/proc/{question.pid}/comm").read_text().strip()
        except (OSError, UnicodeDecodeError):
            program = "unknown"
        if call not in self._denied:
            self._denied.add(call)
            self._log("denied", call=call, program=program, pid=question.pid)


def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(LIBRARY)
        pointer = ctypes.c_void_p
        for name, result, arguments in (
            ("seccomp_init", pointer, (ctypes.c_uint32,)),
            ("seccomp_attr_set", ctypes.c_int, (pointer, ctypes.c_int, ctypes.c_uint32)),
            (
                "seccomp_rule_add_array",
                ctypes.c_int,
                (pointer, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, pointer),
            ),
            ("seccomp_load", ctypes.c_int, (pointer,)),
            ("seccomp_release", None, (pointer,)),
            ("seccomp_syscall_resolve_name", ctypes.c_int, (ctypes.c_char_p,)),
            (
                "seccomp_syscall_resolve_num_arch",
                ctypes.c_char_p,
                (ctypes.c_uint32, ctypes.c_int),
            ),
            ("seccomp_notify_fd", ctypes.c_int, (pointer,)),
            ("seccomp_notify_receive", ctypes.c_int, (ctypes.c_int, pointer)),
            ("seccomp_notify_respond", ctypes.c_int, (ctypes.c_int, pointer)),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise Unavailable(
            f"system calls cannot be denied: {error}; install libseccomp2 (2.5 or newer), or start "
            "with --no-sandbox"
        ) from error
    return library


def _checked(answer: int) -> int:
    if answer < 0:
        raise Unavailable(
            f"system calls cannot be denied: {os.strerror(-answer)}; the kernel needs "
            "CONFIG_SECCOMP_FILTER and be 5.0 or newer, or start with --no-sandbox"
        )
    return answer
