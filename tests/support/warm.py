"""Our programs in Python, begun from a process that has imported what they are made of.

To import takes a gateway or a driver 0.8 s of a processor and more, each time, and the tests begin
them by the hundred. So one process for each program, of each process of pytest, imports it once,
and forks where a test begins it. What runs is the program as installed, from its first line on, in
a process of its own with the arguments, environment, folder and files that the test says. That
`/proc/PID/cmdline` is another one is all that it can see of that. The tests of the systemd units,
of the READMEs and on Kubernetes begin the programs themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

ROOT = Path(__file__).parents[2]
CLONE_NEWNS = 0x20000
LONGEST = 1 << 20
"""Bytes of a request."""
NUMBER = struct.Struct("i")
"""What is answered: the process id, and how it ended, as `Popen.returncode` has it."""
Stream: TypeAlias = IO[Any] | int


@dataclass(frozen=True)
class Program:
    """One of ours: what is imported ahead, and what is run then."""

    ahead: tuple[str, ...]
    module: str = ""
    """Run as by `python -m`."""
    script: str = ""
    """Its path, where it is no module."""


@dataclass(frozen=True)
class Job:
    """What a forked process is to do."""

    program: Program
    words: tuple[str, ...]
    environment: dict[str, str]
    mounts_of: int | None


GATEWAY = Program(
    ("plugin.gateway.__main__",), script=str(Path(sys.executable).with_name("virtlun-gateway"))
)
DRIVER = Program(("csi.cli",), module="csi.cli")
#: Replaces parts of the driver before the others import them: so only what is not ours comes ahead.
KILLED_DRIVER = Program(
    ("click", "grpc", "httpx2", "lightkube", "pydantic", "rich.traceback", "structlog", "yaml"),
    module="tests.support.killed",
)


class ForkedProgram(subprocess.Popen[bytes]):
    """A process that was forked for a test, which only the one that forked it can wait for."""

    def __init__(self, pid: int, words: Sequence[str], answer: socket.socket) -> None:
        """Takes what was answered; `answer` is where its status will be told."""
        self._child_created = False  # of this process it is no child
        self.pid, self.args = pid, words
        self.returncode: int | None = None
        self.stdin = self.stdout = self.stderr = None
        self._answer = answer

    def poll(self) -> int | None:
        """As Popen's."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As Popen's."""
        if self.returncode is None:
            if not select.select([self._answer], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            with self._answer:
                self.returncode = NUMBER.unpack(self._answer.recv(NUMBER.size))[0]
        return self.returncode


def begin(
    program: Program,
    words: Sequence[str],
    *,
    stdin: Stream = subprocess.DEVNULL,
    stdout: Stream = subprocess.DEVNULL,
    stderr: Stream = subprocess.DEVNULL,
    mounts_of: int | None = None,
) -> ForkedProgram:
    """Begins a program with `words`, in the folder of the checkout.

    With `mounts_of` it is in the mount namespace of the process with that id, whose root is its
    folder, as after nsenter(1). What is not said comes from, or goes to, /dev/null.
    """
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    job = Job(program, tuple(words), dict(os.environ), mounts_of)
    with theirs, Path(os.devnull).open("r+b", buffering=0) as nothing:
        places = (stdin, stdout, stdout if stderr == subprocess.STDOUT else stderr)
        files = [nothing if each == subprocess.DEVNULL else each for each in places]
        numbers = [each if isinstance(each, int) else each.fileno() for each in files]
        request = json.dumps(asdict(job)).encode()
        socket.send_fds(_server(program), [request], [*numbers, theirs.fileno()])
    return ForkedProgram(NUMBER.unpack(mine.recv(NUMBER.size))[0], (repr(program), *words), mine)


@functools.cache
def _server(program: Program) -> socket.socket:
    """Starts what forks for this process, and ends with it; returns the socket that it reads."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (mine, theirs):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
    with theirs:
        words = [sys.executable, "-m", "tests.support.warm", str(theirs.fileno()), *program.ahead]
        # ^C is for whoever begins programs, who ends them and then this.
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    atexit.register(process.wait)
    atexit.register(mine.close)  # first
    return mine


def _serve(control: socket.socket) -> Job:
    """Forks as it is told, and ends where nobody is left to tell; returns in forked ones."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing)
    children: dict[int, socket.socket] = {}
    while True:
        ready = select.select([control.fileno(), reading], [], [])[0]
        if reading in ready:
            os.read(reading, 4096)
            _tell_of_ended(children)
        if control.fileno() not in ready:
            continue
        request, files, *_ = socket.recv_fds(control, LONGEST, 4)
        if not request:
            sys.exit()
        answer = socket.socket(fileno=files.pop())
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (control, answer, *children.values()):
                each.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
            os.closerange(3, max(writing, *files) + 1)
            read = json.loads(request)
            return Job(Program(**read.pop("program")), **read)
        children[pid] = answer
        answer.send(NUMBER.pack(pid))
        for file in files:
            os.close(file)


def _tell_of_ended(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with children.pop(pid) as answer, contextlib.suppress(BrokenPipeError):
            answer.send(NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _be(job: Job) -> None:
    """Runs the program, as its own first process would."""
    os.environ.clear()
    os.environ.update(job.environment)
    if job.mounts_of is not None:
        with Path(f"/proc/{job.mounts_of}/ns/mnt").open() as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), CLONE_NEWNS):
                raise OSError(ctypes.get_errno(), "cannot enter the mount namespace")
    program = job.program
    if program.script:
        sys.argv[:] = [program.script, *job.words]
        runpy.run_path(program.script, run_name="__main__")
    else:
        # Where it was imported ahead, what `python -m` runs is a second copy, as always.
        sys.modules.pop(program.module, None)
        sys.argv[:] = [program.module, *job.words]
        runpy.run_module(program.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _be(_serve(socket.socket(fileno=int(sys.argv[1]))))
