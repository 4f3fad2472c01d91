"""A socket in front of the target's JSON-RPC socket, where somebody dies at a chosen call.

What passes is unchanged. So a test needs no luck to hit the middle of what the gateway or the hook
does: it says between which two calls the target, the gateway, libvirtd or a client is to end.
"""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

CHUNK_BYTES = 65536


class Step(NamedTuple):
    """A moment: before a call of `method` reaches the target, or after it has been carried out.

    `unanswered`: who called sees the connection close instead of the answer.
    """

    when: Literal["before", "unanswered", "answered"]
    method: str


class Relay:
    """Listens on `path` and hands each connection to the socket `target`; a context manager."""

    def __init__(self, path: Path, target: Path, kill: Callable[[], None]) -> None:
        """Calls `kill` at the step that `end_at` names; it returns when the victim has ended."""
        self._target, self._kill = target, kill
        self._lock = threading.Lock()
        self._step: Step | None = None
        self._other: Callable[[], None] | None = None
        self._ending = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._path = path
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()
        self._passing: list[threading.Thread] = []

    def end_at(self, step: Step, kill: Callable[[], None] | None = None) -> None:
        """At `step`, once, the target ends, or whom `kill` ends.

        With `kill` the call itself goes on where its two ends still are.
        """
        with self._lock:
            self._step, self._other = step, kill

    def hit(self) -> bool:
        """Whether the step was reached, and its victim ended; it is forgotten where it was not."""
        with self._lock:
            step, self._step = self._step, None
        return step is None

    def _reach(self, step: Step) -> bool:
        with self._lock:
            if self._step != step:
                return False
            self._step = None
            if self._other is not None:
                self._other()
                return False
            self._kill()
            return True

    def _accept(self) -> None:
        while not self._ending.is_set():
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._pass, args=(peer,))
            self._passing.append(thread)
            thread.start()

    def _pass(self, peer: socket.socket) -> None:
        with peer, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as target:
            try:
                target.connect(str(self._target))
                while (request := self._receive(peer, target)) is not None:
                    asked = request[1]  # or several at once, as an array, which are no step
                    method = str(asked.get("method")) if isinstance(asked, dict) else ""
                    if self._reach(Step("before", method)):
                        return
                    target.sendall(request[0])
                    answer = self._receive(target, peer)
                    if answer is None or self._reach(Step("unanswered", method)):
                        return
                    ended = self._reach(Step("answered", method))
                    peer.sendall(answer[0])
                    if ended:
                        return
            except OSError:
                return  # one end is gone; the other learns it by the close

    def _receive(self, source: socket.socket, other: socket.socket) -> tuple[bytes, Any] | None:
        """Returns the next JSON value that `source` sends, None where it or `other` ends."""
        data = b""
        while not self._ending.is_set():
            ready, _, _ = select.select([source, other], [], [], 0.2)
            if other in ready and not other.recv(1, socket.MSG_PEEK):
                return None
            if source not in ready:
                continue
            chunk = source.recv(CHUNK_BYTES)
            if not chunk:
                return None
            data += chunk
            try:
                return data, json.loads(data)
            except ValueError:
                continue  # more of it is to come
        return None

    def __enter__(self) -> Relay:
        """Returns the relay, which listens."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends every connection and removes the socket."""
        self._ending.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        for thread in self._passing:
            thread.join()
        self._path.unlink()
