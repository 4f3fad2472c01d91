"""A typed JSON-RPC client over SPDK's own, for our target and for a real SPDK target.

The `spdk` package frames and connects; three of its habits are mended here: its time-outs count
CPU time instead of wall clock, it drops a chunk that ends inside a UTF-8 character, and it turns
an error's code into text. No two calls use a connection at the same time, so a `Client` may be
shared by threads and outlives restarts of the target.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spdk.rpc.client import JSONRPCClient

from pydataplane import sockets
from pydataplane.errors import (
    INTERNAL_ERROR,
    NO_DEVICE,
    NO_KEY,
    RpcError,
    TargetForbidden,
    TargetTimeout,
    TargetUnavailable,
    refused,
)
from pydataplane.methods import BatchRpc
from pydataplane.sockets import start_command

DEFAULT_SOCKET = Path(sockets.DEFAULT)
DEFAULT_TIMEOUT_S = 30.0
CHUNK_BYTES = 65536


BATCH_MAX = 512
"""Calls sent at once; the target takes 1,024 and a MiB."""


def _result(method: str, answer: Mapping[str, Any], path: Path) -> Any:
    """Returns an answer's result, or its error; `path` is the target's socket."""
    failure = answer.get("error")
    if failure is None:
        return answer.get("result")
    text = str(failure.get("message", json.dumps(failure)))
    return refused(int(failure.get("code", INTERNAL_ERROR)), text, method, path)


class _Connection(JSONRPCClient):  # type: ignore[misc]
    """SPDK's client with a wall-clock deadline, whole characters and checked ids."""

    sock: Any
    place: tuple[int, int] | None = None
    """Of the socket that it was connected to: device and inode."""

    def __init__(self, address: str, timeout_s: float) -> None:
        super().__init__(address, timeout=timeout_s)
        # The base adds one more handler to a logger shared by address at every construction.
        self._logger.handlers.clear()

    def _connect(self, addr: str, _port: int | None) -> None:
        """Connects; raises OSError, TimeoutError where the target does not come to take it.

        That is how it is with one that is stopped and has a full queue, for as long as it is. A
        socket with Python's own time-out is told so at once, and would not wait for one that lives.
        """
        self.sock = socket.socket(socket.AF_UNIX)
        whole, part = divmod(self.timeout, 1)
        wait = struct.pack("@ll", int(whole), max(1, int(part * 1e6)))
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
            self.sock.connect(addr)
            self.sock.settimeout(self.timeout)  # a long question is not taken at once either
        except BlockingIOError:
            self.drop()
            raise TimeoutError from None
        except BaseException:
            self.drop()
            raise

    def recv(self) -> Any:
        """Returns what was answered: an object, or an array to a batch."""
        deadline = time.monotonic() + self.timeout
        said = bytearray()
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            self.sock.settimeout(remaining)
            chunk = self.sock.recv(CHUNK_BYTES)
            if not chunk:
                raise ConnectionError("the connection closed before the answer")
            said += chunk
            # To parse each piece of a long answer from its start costs the square of its length.
            if not bytes(said[-16:]).rstrip().endswith((b"}", b"]")):
                continue
            try:
                return json.loads(said)
            except UnicodeDecodeError:
                raise
            except ValueError:
                continue

    @property
    def is_quiet(self) -> bool:
        """Whether the other end is there and has said nothing that was not asked for."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)

    def drop(self) -> None:
        """Closes it."""
        if self.sock is not None:
            self.sock.close()
            self.sock = None


class Client(BatchRpc):
    """Calls methods of the target that listens on a UNIX socket."""

    def __init__(
        self,
        path: Path | str = DEFAULT_SOCKET,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        keep: int = 0,
    ) -> None:
        """Remembers the socket `path` and how long to wait for an answer, in seconds.

        Up to `keep` connections stay open for the next calls.
        """
        self.path = Path(path)
        self.timeout_s = timeout_s
        self._kept: deque[_Connection] = deque(maxlen=keep)
        self._closed = False

    def call_raw(self, method: str, **params: Any) -> Any:
        """Calls `method` and returns its result; parameters that are None are left out.

        `call` is the same for the methods of schemas/rpc, with their types.

        Raises:
            RpcError: the target refused; `code` and `message` are its own.
            TargetTimeout: no answer in time; the call may still take effect.
            TargetUnavailable: no target, or it went away before it answered.
            TargetForbidden: the socket is not for this user.
        """
        (answer,) = self._exchange(method, [(method, params)])
        if isinstance(answer, RpcError):
            raise answer
        return answer

    def call_all(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Any]:
        """Makes many calls in few exchanges; returns the result of each, in order.

        That of one that the target refused is the RpcError. Parameters that are None are left out.

        Raises:
            TargetTimeout, TargetUnavailable, TargetForbidden: as `call_raw`.
        """
        found: list[Any] = []
        for start in range(0, len(requests), BATCH_MAX):
            batch = requests[start : start + BATCH_MAX]
            found += self._exchange(f"{batch[0][0]} and {len(batch) - 1} more", batch)
        return found

    def call_for_each_raw(
        self, method: str, names: Sequence[str], params: Callable[[str], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Calls `method` about each of `names` with `params` of it; returns the results by name.

        Those that the target does not have (ENODEV), or has no key of (ENOKEY), are left out.

        Raises:
            RpcError: another refusal of one of them.
            TargetTimeout, TargetUnavailable, TargetForbidden: as `call_raw`.
        """
        answers = self.call_all([(method, params(name)) for name in names])
        found = {}
        for name, answer in zip(names, answers, strict=True):
            if not isinstance(answer, RpcError):
                found[name] = answer
            elif answer.code not in (NO_DEVICE, NO_KEY):
                raise answer
        return found

    def _exchange(self, what: str, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Any]:
        """Makes one call, or a batch of them, on one connection; `what` it is, for messages."""
        texts: list[dict[str, Any]] = []
        for number, (method, params) in enumerate(requests, 1):
            text: dict[str, Any] = {"jsonrpc": "2.0", "method": method, "id": number}
            given = {name: value for name, value in params.items() if value is not None}
            texts.append(text | ({"params": given} if given else {}))
        connection = self._connection()
        whole = False
        try:
            connection.sock.sendall(json.dumps(texts if len(texts) > 1 else texts[0]).encode())
            said = connection.recv()
            answers = said if len(texts) > 1 else [said]
            if not isinstance(answers, list) or not all(isinstance(a, dict) for a in answers):
                raise ConnectionError("the answer is not a JSON-RPC object")
            by_id = {answer.get("id"): answer for answer in answers}
            whole = by_id.keys() == {text["id"] for text in texts}
        except TimeoutError as error:
            raise TargetTimeout(
                f"{what}: no answer from {self.path} within {self.timeout_s:g} s"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise TargetUnavailable(f"{what}: the target on {self.path} went away") from error
        finally:
            if not (whole and self._keep(connection)):
                connection.drop()
        failure = answers[0].get("error") if len(texts) == 1 else None
        if not whole and failure is None:
            raise TargetUnavailable(f"{what}: the answer carries another call's id")
        if not whole:
            return [_result(requests[0][0], answers[0], self.path)]
        return [
            _result(method, by_id[number], self.path)
            for number, (method, _) in enumerate(requests, 1)
        ]

    def _connection(self) -> _Connection:
        """Returns one that was kept and still lives, or a new one."""
        while self._kept:
            try:
                connection = self._kept.pop()
            except IndexError:  # another thread took it
                break
            # A target that was started anew, or moved away, is not asked under the old one's name.
            if connection.is_quiet and connection.place == self._place():
                connection.sock.settimeout(self.timeout_s)
                return connection
            connection.drop()  # its target has ended
        try:
            place = self._place()
            connection = _Connection(str(self.path), self.timeout_s)
            connection.place = place
            return connection
        except TimeoutError as error:
            raise TargetTimeout(
                f"{self.path} took no connection within {self.timeout_s:g} s"
            ) from error
        except OSError as error:
            if isinstance(error, PermissionError):
                raise TargetForbidden(
                    f"{self.path} is not for this user: run as root, or start virtlun-target with "
                    "--rpc-group and a group of this user"
                ) from error
            raise TargetUnavailable(
                f"no target answers on {self.path}: start it with `{start_command(self.path)}`"
            ) from error

    def _place(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _keep(self, connection: _Connection) -> bool:
        """Keeps a connection for the next call; False: there is no room for it."""
        if self._closed or len(self._kept) == self._kept.maxlen or connection.place is None:
            return False
        self._kept.append(connection)
        if self._closed:  # meanwhile, by another thread
            self.close()
        return True

    def close(self) -> None:
        """Closes the connections that were kept; none is kept any more. Calls go on to work."""
        self._closed = True
        while self._kept:
            try:
                self._kept.pop().drop()
            except IndexError:  # another thread took it
                break
