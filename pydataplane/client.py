"""A typed JSON-RPC client over SPDK's own, for our target and for a real SPDK target.

The `spdk` package frames and connects; three of its habits are mended here: its time-outs count
CPU time instead of wall clock, it drops a chunk that ends inside a UTF-8 character, and it turns
an error's code into text. Each call uses a connection of its own, so a `Client` may be shared by
threads and outlives restarts of the target.
"""

from __future__ import annotations

import codecs
import json
import time
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

    def __init__(self, address: str, timeout_s: float) -> None:
        super().__init__(address, timeout=timeout_s)
        # The base adds one more handler to a logger shared by address at every construction.
        self._logger.handlers.clear()

    def recv(self) -> dict[str, Any]:
        deadline = time.monotonic() + self.timeout
        decoder = codecs.getincrementaldecoder("utf-8")()
        while (answer := self.decode_one_response()) is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            self.sock.settimeout(remaining)
            chunk = self.sock.recv(CHUNK_BYTES)
            if not chunk:
                raise ConnectionError("the connection closed before the answer")
            self._recv_buf += decoder.decode(chunk)
        if not isinstance(answer, dict):
            raise ConnectionError("the answer is not a JSON-RPC object")
        return answer


class Client:
    """Calls methods of the target that listens on a UNIX socket."""

    def __init__(
        self, path: Path | str = DEFAULT_SOCKET, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Remembers the socket `path` and how long to wait for an answer, in seconds."""
        self.path = Path(path)
        self.timeout_s = timeout_s

    def call(self, method: str, **params: Any) -> Any:
        """Calls `method` and returns its result; parameters that are None are left out.

        Raises:
            RpcError: the target refused; `code` and `message` are its own.
            TargetTimeout: no answer in time; the call may still take effect.
            TargetUnavailable: no target, or it went away before it answered.
            TargetForbidden: the socket is not for this user.
        """
        given = {name: value for name, value in params.items() if value is not None}
        try:
            connection = _Connection(str(self.path), self.timeout_s)
        except (JSONRPCException, OSError) as error:
            if isinstance(error.__cause__, PermissionError):
                raise TargetForbidden(
                    f"{self.path} is not for this user: run as root, or start virtlun-target with "
                    "--rpc-group and a group of this user"
                ) from error
            raise TargetUnavailable(
                f"no target answers on {self.path}: start it with `{start_command(self.path)}`"
            ) from error
        try:
            sent = connection.send(method, given)
            answer = connection.recv()
        except TimeoutError as error:
            raise TargetTimeout(
                f"{method}: no answer from {self.path} within {self.timeout_s:g} s"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise TargetUnavailable(f"{method}: the target on {self.path} went away") from error
        finally:
            if connection.sock is not None:
                connection.sock.close()
                connection.sock = None
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
