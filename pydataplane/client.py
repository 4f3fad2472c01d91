"""A typed JSON-RPC client over SPDK's own, for our target and for a real SPDK target.

The `spdk` package frames and connects; three of its habits are mended here: its time-outs count
CPU time instead of wall clock, it drops a chunk that ends inside a UTF-8 character, and it turns
an error's code into text. No two calls use a connection at the same time, so a `Client` may be
shared by threads and outlives restarts of the target.
"""

from __future__ import annotations

import json
import select
import time
from collections import deque
from pathlib import Path
from typing import Any

from spdk.rpc.client import JSONRPCClient, JSONRPCException

from pydataplane import sockets
from pydataplane.errors import RpcError, TargetForbidden, TargetTimeout, TargetUnavailable
from pydataplane.sockets import start_command

DEFAULT_SOCKET = Path(sockets.DEFAULT)
DEFAULT_TIMEOUT_S = 30.0
CHUNK_BYTES = 65536


class _Connection(JSONRPCClient):  # type: ignore[misc]
    """SPDK's client with a wall-clock deadline, whole characters and checked ids."""

    sock: Any

    def __init__(self, address: str, timeout_s: float) -> None:
        super().__init__(address, timeout=timeout_s)
        # The base adds one more handler to a logger shared by address at every construction.
        self._logger.handlers.clear()

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


class Client:
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

    def call(self, method: str, **params: Any) -> Any:
        """Calls `method` and returns its result; parameters that are None are left out.

        Raises:
            RpcError: the target refused; `code` and `message` are its own.
            TargetTimeout: no answer in time; the call may still take effect.
            TargetUnavailable: no target, or it went away before it answered.
            TargetForbidden: the socket is not for this user.
        """
        given = {name: value for name, value in params.items() if value is not None}
        connection = self._connection()
        kept = False
        try:
            sent = connection.send(method, given)
            answer = connection.recv()
            if not isinstance(answer, dict):
                raise ConnectionError("the answer is not a JSON-RPC object")
            kept = answer.get("id") == sent and self._keep(connection)
        except TimeoutError as error:
            raise TargetTimeout(
                f"{method}: no answer from {self.path} within {self.timeout_s:g} s"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise TargetUnavailable(f"{method}: the target on {self.path} went away") from error
        finally:
            if not kept:
                connection.drop()
        failure = answer.get("error")
        if failure is not None:
            raise RpcError(
                int(failure.get("code", -32603)),
                str(failure.get("message", json.dumps(failure))),
                method,
            )
        if answer.get("id") != sent:
            raise TargetUnavailable(f"{method}: the answer carries another call's id")
        return answer.get("result")

    def _connection(self) -> _Connection:
        """Returns one that was kept and still lives, or a new one."""
        while self._kept:
            try:
                connection = self._kept.pop()
            except IndexError:  # another thread took it
                break
            if connection.is_quiet:
                connection.sock.settimeout(self.timeout_s)
                return connection
            connection.drop()  # its target has ended
        try:
            return _Connection(str(self.path), self.timeout_s)
        except (JSONRPCException, OSError) as error:
            if isinstance(error.__cause__, PermissionError):
                raise TargetForbidden(
                    f"{self.path} is not for this user: run as root, or start virtlun-target with "
                    "--rpc-group and a group of this user"
                ) from error
            raise TargetUnavailable(
                f"no target answers on {self.path}: start it with `{start_command(self.path)}`"
            ) from error

    def _keep(self, connection: _Connection) -> bool:
        """Keeps a connection for the next call; False: there is no room for it."""
        if len(self._kept) == self._kept.maxlen:
            return False
        self._kept.append(connection)
        return True
