"""Runs commands in the test guest, over its second serial port."""

from __future__ import annotations

import base64
import itertools
import socket
import time
from pathlib import Path

from tests.support.starved import ran, starved, times


class GuestError(Exception):
    """A command failed in the guest, or the guest did not answer in time."""


class Agent:
    """The guest's command line: one command at a time, output and exit status back.

    The guest's side is `serve` in tests/guest/init. The socket is QEMU's end of ttyS1, in server
    mode, so an agent can be made again after a reboot or by another process. It is a UNIX socket's
    path, or a host and port of TCP. Who knows QEMU's process says it by `qemu`: an error then tells
    whether the guest was starved.
    """

    #: What the guest's side says first.
    BANNER = b"AGENT-READY\n"

    def __init__(
        self, at: Path | tuple[str, int], deadline_s: float = 60.0, qemu: int | None = None
    ) -> None:
        """Connects to the socket `at`, waiting up to `deadline_s` seconds for QEMU."""
        self._qemu = qemu
        end = time.monotonic() + deadline_s
        self._ids = itertools.count(1)
        self._buffer = b""
        while True:
            family = socket.AF_UNIX if isinstance(at, Path) else socket.AF_INET
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            try:
                self._socket.connect(str(at) if isinstance(at, Path) else at)
                break
            except OSError as error:
                self._socket.close()
                if time.monotonic() > end:
                    raise GuestError(f"no serial port at {at}: {error}") from error
                time.sleep(0.05)

    def close(self) -> None:
        """Closes the connection; the guest stays as it is."""
        self._socket.close()

    def wait_ready(self, deadline_s: float = 180.0) -> None:
        """Returns when the guest answers; raises GuestError after `deadline_s` seconds."""
        end = time.monotonic() + deadline_s
        wait_s = 2.0  # for one answer: a starved guest must not fall behind its questions
        while time.monotonic() < end:
            try:
                self.run("true", deadline_s=wait_s)
            except GuestError:
                wait_s *= 1.5
                continue
            return
        raise GuestError(f"the guest did not come up within {deadline_s:.0f} s")

    def run(self, command: str, deadline_s: float = 120.0, check: bool = True) -> str:
        """Runs a shell command in the guest and returns its output (stdout and stderr).

        Raises:
            GuestError: no answer within `deadline_s` seconds, or the guest has just booted and may
                never have seen the command, or, with `check`, exit status not 0.
        """
        name = f"c{next(self._ids)}-{time.monotonic_ns() % 1_000_000}"
        self._buffer = b""
        line = f"{name} {base64.b64encode(command.encode()).decode()}\n".encode()
        end = time.monotonic() + deadline_s
        before = None if self._qemu is None else times(self._qemu)
        self._socket.settimeout(deadline_s)
        try:
            self._socket.sendall(line)
            begin = f"BEGIN {name}\n".encode()
            finish = f"END {name} ".encode()
            while True:
                at = self._buffer.find(finish)
                if at >= 0 and b"\n" in self._buffer[at:]:
                    break
                if self.BANNER in self._buffer:
                    raise GuestError(f"the guest has just booted, and may not have seen: {command}")
                self._socket.settimeout(max(0.01, end - time.monotonic()))
                data = self._socket.recv(65536)
                if not data:
                    raise GuestError(f"the guest went away during: {command}")
                self._buffer += data.replace(b"\r", b"")
        except TimeoutError as error:
            why = starved(self._qemu, deadline_s, before) if before else ""
            raise GuestError(
                f"no answer within {deadline_s:.0f} s{why} to: {command}\n"
                f"{ran(self._qemu, before)}; it said so far: {self._buffer!r}"
            ) from error
        start = self._buffer.find(begin) + len(begin)
        output = base64.b64decode(self._buffer[start:at]).decode(errors="replace")
        status = int(self._buffer[at + len(finish) :].split(b"\n", 1)[0])
        if check and status != 0:
            raise GuestError(f"exit status {status} in the guest from: {command}\n{output}")
        return output

    def wait_for(self, command: str, deadline_s: float = 60.0) -> str:
        """Runs `command` until it succeeds and returns its output; GuestError at the deadline."""
        end = time.monotonic() + deadline_s
        while True:
            try:
                return self.run(command)
            except GuestError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
