"""The helper: answers the driver's questions, each on a connection and in a thread of its own.

What changes something of a volume happens one at a time, in the order of asking, and is not begun
when who asked for it is gone: a driver that starts anew finds nothing of its predecessor underway
once its own question is answered.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from csi.host import rights, wire
from csi.hosterrors import HostError

READS = {"loops", "answers", "disks"}
"""They change nothing, and may wait for the target: nobody waits for them."""
CONNECTIONS_MAX = 256
SOCKET_MODE = 0o600
AGAIN_S = 0.1
"""After which a connection is accepted again where the system could not, seconds."""
PATH_BYTES_MAX = 107
"""sockaddr_un.sun_path without its NUL."""


class Operations(Protocol):
    """What the helper can do."""

    def do(self, name: str, volume: str, arguments: dict[str, Any]) -> object:
        """Does it and returns what JSON can have; HostError, OSError or ValueError."""


class Server:
    """Serves one user at a socket."""

    def __init__(
        self,
        path: Path,
        operations: Operations,
        uid: int,
        refused: Callable[[], list[str]] = list,
    ) -> None:
        """Listens at `path`, for processes of the user `uid`; `refused` names denied system calls.

        Raises:
            OSError: the socket cannot be made there.
        """
        if len(os.fsencode(path)) > PATH_BYTES_MAX:
            raise OSError(f"{path}: a socket's path has {PATH_BYTES_MAX} bytes at most")
        path.parent.mkdir(parents=True, exist_ok=True)
        with wire.new_socket() as other:
            if other.connect_ex(str(path)) == 0:
                raise OSError(f"{path}: another helper listens there")
        path.unlink(missing_ok=True)
        self._operations = operations
        self._uid = uid
        self._refused = refused
        self._mutex = threading.Lock()
        self._locks: dict[str, tuple[threading.Lock, int]] = {}
        self._connections = 0
        self._listener = wire.new_socket()
        mask = os.umask(0o777 & ~SOCKET_MODE)
        try:
            self._listener.bind(str(path))
        finally:
            os.umask(mask)
        # Never of what a link leads to: the driver may write to the socket's folder.
        os.chown(path, uid, -1, follow_symlinks=False)
        self._listener.listen(CONNECTIONS_MAX)

    def serve(self) -> None:
        """Serves until the process ends, whatever becomes of a connection."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # no descriptor or memory now; what is underway goes on
                log("not accepted", reason=str(error))
                time.sleep(AGAIN_S)
                continue
            pid, uid = wire.peer(connection)
            with self._mutex:
                room = self._connections < CONNECTIONS_MAX
            if uid != self._uid or not room:
                why = f"user {uid} may not" if uid != self._uid else "too many at a time"
                log("refused", pid=pid, uid=uid, reason=why)
                with contextlib.suppress(OSError):
                    wire.send(connection, {"failed": f"the helper refuses: {why}"})
                connection.close()
                continue
            with self._mutex:
                self._connections += 1
            try:
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()
            except RuntimeError as error:  # no thread: the driver asks again
                log("refused", pid=pid, uid=uid, reason=str(error))
                connection.close()
                with self._mutex:
                    self._connections -= 1

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                question = wire.receive(connection)
                if question is not None:
                    answer = self._done(connection, question)
                    wire.send(connection, answer)
        except (ValueError, RecursionError) as error:
            log("refused", reason=str(error))
        finally:
            with self._mutex:
                self._connections -= 1

    def _done(self, connection: socket.socket, question: dict[str, Any]) -> dict[str, Any]:
        if question == {"do": "rights"}:
            return {"done": rights.facts(self._refused())}
        name, volume = str(question.get("do")), question.get("volume")
        arguments = question.get("with", {})
        if not isinstance(volume, str) or not isinstance(arguments, dict):
            return {"failed": "a question names a volume and arguments"}
        try:
            with contextlib.nullcontext() if name in READS else self._alone(volume):
                if _is_gone(connection):
                    return {"failed": "nobody waits for it any more"}
                found = self._operations.do(name, volume, arguments)
        except (HostError, OSError, ValueError) as error:
            log("failed", do=name, volume=volume, arguments=arguments, reason=str(error))
            return {"failed": str(error), "kind": type(error).__name__}
        if name not in READS:
            log("done", do=name, volume=volume, arguments=arguments)
        return {"done": found}

    @contextlib.contextmanager
    def _alone(self, volume: str) -> Iterator[None]:
        """Holds the lock of a volume, which is there as long as somebody has it or wants it."""
        with self._mutex:
            lock, users = self._locks.get(volume, (threading.Lock(), 0))
            self._locks[volume] = lock, users + 1
        try:
            with lock:
                yield
        finally:
            with self._mutex:
                lock, users = self._locks.pop(volume)
                if users > 1:
                    self._locks[volume] = lock, users - 1


def _is_gone(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def log(event: str, **words: object) -> None:
    """Writes a line of JSON to the standard error, as the driver's log has them."""
    print(json.dumps({"event": event, **words}, default=str), file=sys.stderr, flush=True)
