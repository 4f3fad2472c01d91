"""The other host of a move: a program such as ssh runs `virtlun volume incoming` there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import BinaryIO, cast

from plugin.hostmoves.wire import PROTOCOL, ChunkWriter, Input, Message, say
from plugin.signals import uninterrupted
from pydataplane.errors import VolumeError

HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_\[][A-Za-z0-9_.:%\]-]*")
"""[USER@]HOST, as which no option of ssh's and nothing of a shell's passes."""
END_S = 10.0
"""How long the program may take to end when nothing more is asked, seconds."""
VERSION_CHARS = 40
"""Of its version, for a sentence."""
SAID_BYTES = 4096
"""Of what it says at its end."""


class RemoteError(VolumeError):
    """The other host refuses, or does not answer; the text names it."""

    is_refusal = False
    """Whether it has answered: what was asked for is not done there."""


class Remote:
    """A connection to the destination, by which one request after the other is answered."""

    def __init__(self, host: str, ssh: Sequence[str], command: Sequence[str]) -> None:
        """`ssh` is the program that runs things there, `command` what `virtlun` is called there.

        Raises:
            VolumeError: `host` is no name of one.
        """
        if not HOST.fullmatch(host):
            raise VolumeError(f"{host!r} names no host: write HOST or USER@HOST")
        self.host = host
        self._command = [*ssh, "--", host, shlex.join([*command, "volume", "incoming"])]
        self._process: subprocess.Popen[bytes] | None = None
        self._said: BinaryIO | None = None
        self.target = ""
        """Which target is there, as `wire.identity` tells them apart."""
        self.may_have = False
        """Whether a stream may have been received: all of it was sent, and no refusal came."""

    @contextmanager
    def connected(self) -> Iterator[Remote]:
        """Has the program run for the length of a block.

        Raises:
            RemoteError: there is no such program, or it is of another version there.
        """
        with tempfile.TemporaryFile() as said:
            self._said = cast(BinaryIO, said)
            try:
                # ^C is for this command, which ends the connection where that does no harm.
                with uninterrupted():
                    self._process = subprocess.Popen(
                        self._command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=self._said,
                    )
            except OSError as error:
                raise RemoteError(
                    f"{self.host}: {self._command[0]}: {error.strerror or error}"
                ) from error
            try:
                assert self._process.stdout is not None
                self._input = Input(self._process.stdout.fileno())
                self._check_version(self._answer())
                yield self
            finally:
                with uninterrupted():
                    self._end()

    def ask(self, do: str, **values: object) -> Message:
        """Has something be done there, and returns the answer.

        Raises:
            RemoteError: it is refused, or the connection ended: then nobody knows.
        """
        self._check_connected()
        with suppress(BrokenPipeError):  # what it said before tells more
            say(self._to, {"do": do, **values})
        return self._answer()

    def stream(self, write: Callable[[ChunkWriter], None], **values: object) -> tuple[Message, int]:
        """Has a stream be received, which `write` writes; returns the answer, and bytes sent.

        Raises:
            RemoteError: as `ask`; and what `write` raises, then the connection is at its end.
        """
        self._check_connected()
        out, had = ChunkWriter(self._to), self.may_have
        try:
            say(self._to, {"do": "receive", **values})
            write(out)
            out.end()
            self.may_have = True
        except BrokenPipeError:
            pass  # what it said before tells more
        except BaseException:
            with uninterrupted():
                self._end()
            raise
        try:
            return self._answer(), out.count
        except RemoteError as error:
            if error.is_refusal:
                self.may_have = had
            raise

    @property
    def _to(self) -> BinaryIO:
        assert self._process is not None
        assert self._process.stdin is not None
        return cast(BinaryIO, self._process.stdin)

    def _check_connected(self) -> None:
        if self._to.closed:
            raise RemoteError(f"{self.host}: the connection has ended")

    def _answer(self) -> Message:
        try:
            found = self._input.message()
        except VolumeError as error:
            raise RemoteError(f"{self.host}: {error}") from error
        if found is None:
            raise RemoteError(f"{self.host}: {self._ended()}")
        if "error" in found:
            refusal = RemoteError(f"{self.host}: {_printable(str(found['error']))}")
            refusal.is_refusal = True
            raise refusal
        return found

    def _ended(self) -> str:
        """Returns why the connection has ended, as the program that had it says."""
        status = self._end()
        assert self._said is not None
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - SAID_BYTES))
        lines = self._said.read(SAID_BYTES).decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        why = _printable(last)
        return f"the connection ended (exit status {status})" + (f": {why}" if why else "")

    def _check_version(self, greeting: Message) -> None:
        self.target = str(greeting.get("target", ""))
        there = _printable(str(greeting.get("virtlun", "of an unknown version")))[:VERSION_CHARS]
        if greeting.get("protocol") != PROTOCOL:
            raise RemoteError(
                f"{self.host}: virtlun there is {there}, here {version('virtlun')}, and they do not"
                " understand each other: have the same on both"
            )

    def _end(self) -> int:
        """Ends the connection; returns the program's exit status."""
        process = self._process
        assert process is not None
        with suppress(BrokenPipeError):
            self._to.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
        assert process.stdout is not None
        status = process.wait()
        process.stdout.close()
        return status


def _printable(text: str) -> str:
    """Returns what another host says without what a terminal would obey."""
    return "".join(c for c in text if c.isprintable()).strip()
