"""The target's JSON-RPC over one connection, all calls within one deadline. Standard library only.

SPDK's own client, which pydataplane.client uses, takes longer to import than the hook may run.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from pydataplane.errors import (
    BUSY,
    EXISTS,
    RpcError,
    TargetTimeout,
    TargetUnavailable,
    refused,
)
from pydataplane.methods import Rpc
from pydataplane.sockets import start_command

MAX_ANSWER_BYTES = 64 << 20
RETRY_S = 0.05
"""Pause between attempts at what is still being removed, seconds."""

RETRIED = {"vhost_scsi_controller_add_target": EXISTS, "vhost_delete_controller": BUSY}
"""Calls that are repeated while they fail so: a real SPDK takes targets away in the background."""


class Connection(Rpc):
    """A connection to the target, from the first call to the end of the process."""

    def __init__(self, path: str, deadline_s: float) -> None:
        """Connects to the UNIX socket `path`; `deadline_s` seconds from now no call waits longer.

        Raises:
            TargetUnavailable: nobody listens there.
            TargetTimeout: nobody answers there.
        """
        self._deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s
        self._path = path
        self._id = 0
        self._socket = socket.socket(socket.AF_UNIX)
        self._wait()
        try:
            self._socket.connect(path)
        except TimeoutError as error:
            raise self._late() from error
        except OSError as error:
            raise TargetUnavailable(
                f"the virtlun target does not answer on {path} ({error.strerror or error}); start"
                f" it with `{start_command(path)}`"
            ) from error

    def call_raw(self, method: str, **params: Any) -> Any:
        """Calls a method; parameters that are None are left out.

        Raises:
            RpcError: the target refused.
            TargetTimeout: the deadline is over.
            TargetUnavailable: the target went away or answers nonsense.
        """
        while True:
            try:
                return self._call(method, params)
            except RpcError as error:
                remaining = self._end - time.monotonic()
                # `force` has a value for a target that is not SPDK's, where a VM is connected.
                final = error.code != RETRIED.get(method) or "force" in params
                if final or remaining < RETRY_S * 2:
                    raise
            time.sleep(RETRY_S)

    def _call(self, method: str, params: dict[str, Any]) -> Any:
        self._id += 1
        request: dict[str, object] = {"jsonrpc": "2.0", "id": self._id, "method": method}
        given = {key: value for key, value in params.items() if value is not None}
        if given:
            request["params"] = given
        try:
            self._wait()
            self._socket.sendall(json.dumps(request).encode())
            answer = self._receive()
        except TimeoutError as error:
            raise self._late() from error
        except OSError as error:
            raise TargetUnavailable(
                f"{method}: the virtlun target on {self._path} went away"
            ) from error
        failure = answer.get("error")
        if isinstance(failure, dict):
            code, message = failure.get("code"), failure.get("message")
            raise refused(code if isinstance(code, int) else 0, str(message), method, self._path)
        if answer.get("id") != self._id or "result" not in answer:
            raise TargetUnavailable(
                f"{method}: the virtlun target's answer is not one to this call"
            )
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        data = b""
        while len(data) <= MAX_ANSWER_BYTES:
            self._wait()
            chunk = self._socket.recv(1 << 16)
            if not chunk:
                break
            data += chunk
            if not data.rstrip().endswith(b"}"):
                continue
            try:
                answer = json.loads(data)
            except ValueError:  # more to come; UnicodeDecodeError is one, too
                continue
            if isinstance(answer, dict):
                return answer
            break
        raise TargetUnavailable("the virtlun target closed the connection or answered nonsense")

    def _wait(self) -> None:
        """Lets the socket wait until the deadline."""
        remaining = self._end - time.monotonic()
        if remaining <= 0:
            raise self._late()
        self._socket.settimeout(remaining)

    def _late(self) -> TargetTimeout:
        return TargetTimeout(
            f"the virtlun target did not answer within {self._deadline_s:g} s; see its log"
        )
