"""A program of an older release, as a new one sees it at an upgrade.

Run as `python -m tests.support.older_target SOCKET`: takes the place of the target that waits there
for a new program, and hands on what both say, in version 1 of the messages and without what that
did not have. A process of its own: the target takes it for the new program, and would end it.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any

HEAD = struct.Struct("=II")
"""Bytes and descriptors of a message."""
PACK = 128
"""Descriptors that come with one byte."""
WAITS = "an older target waits"
"""On standard output, once a new program may be started."""


def changed(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message as version 1 has it."""
    if message["message"] == "hello":
        return message | {"newest": 1}
    return {key: value for key, value in message.items() if key != "flush_errors"}


def take(stream: socket.socket, count: int) -> bytes:
    """Takes as many bytes; EOFError when there are none any more."""
    found = b""
    while len(found) < count:
        piece = stream.recv(count - len(found))
        if not piece:
            raise EOFError
        found += piece
    return found


def hand_on(source: socket.socket, to: socket.socket) -> None:
    """Hands messages on, with their descriptors, until the one who says them ends."""
    try:
        while True:
            length, count = HEAD.unpack(take(source, HEAD.size))
            text = json.dumps(changed(json.loads(take(source, length)))).encode()
            to.sendall(HEAD.pack(len(text), count) + text)
            for left in range(count, 0, -PACK):
                byte, fds, _, _ = socket.recv_fds(source, 1, PACK)
                assert len(fds) == min(left, PACK)
                rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds)
                to.sendmsg([byte], [rights])
                for fd in fds:
                    os.close(fd)
    except (EOFError, ConnectionError):
        to.shutdown(socket.SHUT_WR)


def main(path: Path) -> None:
    """Stands between the target and one new program."""
    own = path.with_name(path.name + "d")
    path.rename(own)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        print(WAITS, flush=True)
        new, _ = listener.accept()
        with new, socket.socket(socket.AF_UNIX) as old:
            old.connect(str(own))
            back = threading.Thread(target=hand_on, args=(new, old))
            back.start()
            hand_on(old, new)
            back.join()
    own.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
