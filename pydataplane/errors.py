"""What can go wrong when talking to a target.

TargetError
|-- TargetUnavailable   no target answers on the socket, or it went away
|   `-- TargetForbidden the socket is there, but not for this user
|-- TargetTimeout       it did not answer in time
`-- RpcError            it answered with an error; `code` says which
"""

from __future__ import annotations


class TargetError(Exception):
    """Base of all errors of this package."""


class TargetUnavailable(TargetError):
    """Nothing listens on the RPC socket, or the connection broke before the answer."""


class TargetForbidden(TargetUnavailable):
    """The RPC socket is there, but this user may not use it."""


class TargetTimeout(TargetError):
    """No answer within the time given, in seconds of wall clock."""


class RpcError(TargetError):
    """The target refused a call.

    `code` is the JSON-RPC code: -32700..-32600 for a bad request, else a negative errno as SPDK
    uses it (-17 exists, -19 no such device, -28 no space, -16 busy, -22 invalid).
    """

    def __init__(self, code: int, message: str, method: str = "") -> None:
        """Keeps the parts of the answer's `error` object and the method that was called."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.method = method
