"""A thread of another process, stopped where a test wants it: ptrace(2), Linux on x86-64.

Nothing in the program knows of it, so it is the one that users run. A place is a store to shared
memory, where the processor itself stops the thread (a hardware watchpoint), or a system call.
Whoever may trace the process can use it; root can.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.wait import until

POKEUSER, CONT, DETACH, SYSCALL, SETOPTIONS, SEIZE, INTERRUPT = 6, 7, 17, 24, 0x4200, 0x4206, 0x4207
PEEKUSER = 3
IO_URING_ENTER = 426
TRACESYSGOOD = 1
WALL = 0x40000000
SYSCALL_STOP = signal.SIGTRAP | 0x80
EVENT_STOP = 128
"""PTRACE_EVENT_STOP, what SEIZE and INTERRUPT end with."""
RDX, RSI, RDI, RAX, ORIG_RAX = 12 * 8, 13 * 8, 14 * 8, 10 * 8, 15 * 8
"""Offsets of registers in `struct user`."""
DEBUG = 848
"""Offset of the first debug register there; 8 bytes each."""
WRITES = 0b01
LENGTHS = {1: 0b00, 2: 0b01, 4: 0b11, 8: 0b10}
NOT_YET = -38
"""-ENOSYS in rax: a system call is entered, not left."""
DEADLINE_S = 60.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def is_possible() -> bool:
    """Whether this machine is one that `Tracer` knows the registers of."""
    return platform.machine() == "x86_64"


def thread_named(pid: int, name: str) -> int:
    """Returns the thread of process `pid` that has that name."""

    def found() -> list[int]:
        threads = []
        for task in Path(f"/proc/{pid}/task").iterdir():
            # Others may end meanwhile.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if (task / "comm").read_text().strip() == name:
                    threads.append(int(task.name))
        return threads

    # The kernel may leave one out of the list when another one ends while that is read.
    (tid,) = until(found, f"a thread {name} of process {pid}")
    return tid


def address_of(pid: int, memfd: str, offset: int) -> int:
    """Returns where process `pid` has byte `offset` of the memory file of that name mapped."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, _, first, _, _, *path = line.split(maxsplit=5)
        begin, end = (int(word, 16) for word in span.split("-"))
        at = begin + offset - int(first, 16)
        if path and path[0].startswith(f"/memfd:{memfd} ") and begin <= at < end:
            return at
    raise AssertionError(f"process {pid} has no byte {offset} of {memfd} mapped")


class NotReachedError(Exception):
    """What was waited for has ended without the place."""


class Tracer:
    """Thread `tid` of process `pid`, stopped between calls; a context manager.

    The process is killed at the end, as one that was stopped in the midst of something would go on;
    unless it was let go.
    """

    def __init__(self, pid: int, tid: int) -> None:
        """Stops the thread wherever it is.

        Raises:
            OSError: it may not be traced, or is by somebody else.
        """
        self._pid, self._tid = pid, tid
        self._call(SEIZE, 0, TRACESYSGOOD)
        self._call(INTERRUPT)
        self._wait(lambda stop, event: event == EVENT_STOP, CONT)

    def until_store(self, address: int, length: int, times: int = 1) -> None:
        """Lets it go on until it has stored something in `length` bytes at `address`, that often.

        `address` is one of the process's, and a multiple of `length`: 1, 2, 4 or 8.
        """
        self._poke(0, address)
        self._poke(7, (WRITES | LENGTHS[length] << 2) << 16 | 1)
        for _ in range(times):
            self._call(CONT)
            self._wait(lambda stop, event: stop == signal.SIGTRAP and not event, CONT)
        self._poke(7, 0)

    def until_call(
        self,
        number: int,
        which: Callable[[int, int, int], bool],
        unless: Callable[[], bool] = lambda: False,
    ) -> None:
        """Lets it go on until it makes a system call of that number whose arguments are right.

        Raises:
            NotReachedError: it makes none any more, and `unless` is true.
        """
        while True:
            self._go_on_to_call(unless)
            if self._register(ORIG_RAX) == number and self._register(RAX) == NOT_YET:
                arguments = [self._register(at) for at in (RDI, RSI, RDX)]
                if which(*arguments):
                    return

    def until_submission(self, unless: Callable[[], bool] = lambda: False) -> None:
        """Lets it go on until it submits something to an io_uring; raises as `until_call`."""
        self.until_call(IO_URING_ENTER, lambda _, to_submit, __: to_submit > 0, unless)

    def until_return(self) -> int:
        """Lets it go on until the system call that it makes returns, and returns its result."""
        self._go_on_to_call()
        return self._register(RAX)

    def let_go(self, instead: int) -> None:
        """Lets it make another system call than the one before which it is, and go on for good."""
        self._call(POKEUSER, ORIG_RAX, instead)
        self._call(DETACH)
        self._tid = 0

    def kill_before_submission(self, nth: int, unless: Callable[[], bool]) -> bool:
        """Kills the process before its nth submission (0: the next), or when there is none.

        Returns whether it came there; `unless` as `until_call` has it.
        """
        reached = True
        try:
            for _ in range(nth + 1):
                self.until_submission(unless)
        except NotReachedError:
            reached = False
        self.kill()
        return reached

    def kill(self) -> None:
        """Kills the process."""
        os.kill(self._pid, signal.SIGKILL)
        while self._tid:
            ended, status = os.waitpid(self._tid, WALL)
            if ended == self._tid and (os.WIFSIGNALED(status) or os.WIFEXITED(status)):
                self._tid = 0

    def __enter__(self) -> Tracer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tid:
            self.kill()

    def _go_on_to_call(self, unless: Callable[[], bool] = lambda: False) -> None:
        self._call(SYSCALL)
        self._wait(lambda stop, event: stop == SYSCALL_STOP, SYSCALL, unless)

    def _wait(
        self,
        is_wanted: Callable[[int, int], bool],
        go_on: int,
        unless: Callable[[], bool] = lambda: False,
    ) -> None:
        """Waits for the stop that is wanted; signals are delivered meanwhile."""
        end = time.monotonic() + DEADLINE_S
        while True:
            stopped, status = os.waitpid(self._tid, WALL | os.WNOHANG)
            if not stopped:
                if unless():
                    raise NotReachedError
                assert time.monotonic() < end, "the thread does not come there"
                time.sleep(0.0002)
                continue
            assert os.WIFSTOPPED(status), f"the thread ended: {status:#x}"
            stop, event = os.WSTOPSIG(status), status >> 16
            if is_wanted(stop, event):
                return
            own = event or stop in (signal.SIGTRAP, SYSCALL_STOP)
            self._call(go_on, 0, 0 if own else stop)

    def _poke(self, register: int, value: int) -> None:
        self._call(POKEUSER, DEBUG + 8 * register, value)

    def _register(self, offset: int) -> int:
        return self._call(PEEKUSER, offset)

    def _call(self, request: int, address: int = 0, data: int = 0) -> int:
        ctypes.set_errno(0)
        result: int = _libc.ptrace(request, self._tid, address, data)
        error = ctypes.get_errno()
        if result == -1 and error:
            raise OSError(error, f"ptrace request {request:#x}: {os.strerror(error)}")
        return result
