"""A screen without a monitor, with one program on it that is used as a screen reader does."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.wait import serves

DRIVER = Path(__file__).with_name("atspi.py")
#: Debian's, which has AT-SPI.
PYTHON = "/usr/bin/python3"
DEPTH = 24
#: Starts the program beside the one that uses it, which ends both.
BESIDE = '"$@" & trap "kill $!" EXIT; "$PYTHON" "$DRIVER"'


class DesktopError(AssertionError):
    """Something is not on the screen, or cannot be used; the text says what is there."""


class Desktop:
    """A screen, and the program on it."""

    def __init__(self, screen: Path, process: subprocess.Popen[str], log: Path) -> None:
        self._screen = screen
        self._process = process
        self._log = log

    def do(self, what: str, role: str, name: str = "", text: str = "") -> dict[str, Any]:
        """Does one thing with what has this role and name; see tests/support/atspi.py.

        Raises:
            DesktopError: it is not there within its time, or cannot be used so.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        asked = {"do": what, "role": role} | ({} if what == "names" else {"name": name})
        asked |= {"text": text} if text else {}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        # The bus, and what it starts, write there as well.
        line = next((line for line in self._process.stdout if line.startswith("{")), "")
        if not line:
            raise DesktopError(f"it ended:\n{self._log.read_text(errors='replace')[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        if not answer["ok"]:
            raise DesktopError(answer["why"])
        return answer

    def names(self, role: str) -> list[str]:
        """Returns the names of all that has a role."""
        return list(self.do("names", role)["names"])

    def picture(self, path: Path) -> None:
        """Saves what is on the screen as a PNG."""
        path.write_bytes(png(self._screen.read_bytes()))


def png(xwd: bytes) -> bytes:
    """Returns a picture of Xvfb's, as xwd (XWDFile.h) has it with 32 bits a pixel, as a PNG."""
    header = struct.unpack_from(">25I", xwd)
    (size, width, height), line, colours = (header[0], *header[4:6]), header[12], header[19]
    at = size + colours * 12
    rows = bytearray()
    for row in range(height):
        pixels = xwd[at + row * line : at + row * line + width * 4]
        colour = bytearray(width * 3)
        # Blue, green, red and nothing, in memory.
        colour[0::3], colour[1::3], colour[2::3] = pixels[2::4], pixels[1::4], pixels[0::4]
        rows += b"\0" + colour
    kind = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", kind), (b"IDAT", zlib.compress(bytes(rows), 9)), (b"IEND", b"")
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@contextlib.contextmanager
def desktop(
    folder: Path, program: Sequence[str], size: tuple[int, int], before: Sequence[str] = ()
) -> Iterator[Desktop]:
    """Runs a program on a screen of that size for the duration of a block.

    `before` are the words of what runs it, with its session bus.
    """
    log = folder / "desktop.log"
    reading, writing = os.pipe()
    with log.open("ab") as output, contextlib.ExitStack() as ending:
        width, height = size
        server = subprocess.Popen(
            [
                *(
                    "Xvfb",
                    "-displayfd",
                    str(writing),
                    "-nolisten",
                    "tcp",
                    "-nocursor",
                    "-fbdir",
                    str(folder),
                ),
                *("-screen", "0", f"{width}x{height}x{DEPTH}"),
            ],
            pass_fds=(writing,),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        ending.callback(server.wait)
        ending.callback(server.terminate)
        os.close(writing)
        with os.fdopen(reading) as told:
            display = told.readline().strip()
        screen = folder / "Xvfb_screen0"
        serves(server, screen.exists, "Xvfb", log)
        process = subprocess.Popen(
            [*before, "dbus-run-session", "--", "bash", "-c", BESIDE, "bash", *program],
            env={
                **os.environ,
                "PYTHON": PYTHON,
                "DRIVER": str(DRIVER),
                "DISPLAY": f":{display}",
                "HOME": str(folder),
                "XDG_RUNTIME_DIR": str(folder),
                "GSETTINGS_BACKEND": "memory",
                "LC_ALL": "C.UTF-8",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )
        ending.callback(process.communicate, timeout=60)
        yield Desktop(screen, process, log)
