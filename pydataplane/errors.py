"""What can go wrong when talking to a target or using its volumes. Standard library only.

TargetError
|-- TargetUnavailable   no target answers on the socket, or it went away
|   `-- TargetForbidden the socket is there, but not for this user
|-- TargetTimeout       it did not answer in time
`-- RpcError            it answered with an error; `code` says which

VolumeError             a volume or lvstore cannot be used as asked
`-- VolumeNotFoundError there is none
"""

from __future__ import annotations

import errno
import os

READ_ONLY = -1
NO_ENTRY = -2
AGAIN = -11
BUSY = -16
EXISTS = -17
NO_DEVICE = -19
INVALID = -22
NO_SPACE = -28
NO_DATA = -61
TIMED_OUT = -110
NO_KEY = -126
"""Codes of RpcError that mean something here: negative errno (EPERM, EBUSY, ...), as SPDK's."""
METHOD_NOT_FOUND = -32601
BAD_PARAMETERS = -32602
INTERNAL_ERROR = -32603
"""JSON-RPC 2.0's codes: the target has no such method, or not with such parameters; and of an
error that has no other."""


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


SPDK_HIDES = {os.strerror(-code): code for code in (AGAIN, BUSY, EXISTS, NO_DEVICE, NO_SPACE)}
"""What SPDK's target says with a code of JSON-RPC: the errno's text."""
SPDK_REFUSES = os.strerror(errno.EINVAL)
SPDK_KNOWS_NOT = "spdk_json_decode_object failed"
"""What it says of parameters that it does not know, in vhost's methods and in others; the first
also of those that are wrong, so that it stays BAD_PARAMETERS."""


def refused(code: int, message: str, method: str, path: object) -> RpcError:
    """Returns the error of a call of `method` to the target on the socket `path`.

    The code is the one that our target would have given, and where a program lacks what was called,
    the text says so.
    """
    if code == METHOD_NOT_FOUND:
        message = (
            f"not possible with the target on {path}: its program does not have the method"
            f" {method}, as it is SPDK's, or an older one"
        )
    elif code in (BAD_PARAMETERS, INTERNAL_ERROR) and message == SPDK_KNOWS_NOT:
        code = BAD_PARAMETERS
        message = (
            f"not possible with the target on {path}: its program, SPDK's, does not know all of the"
            f" parameters of {method} that this needs"
        )
    elif code in (BAD_PARAMETERS, INTERNAL_ERROR):
        code = SPDK_HIDES.get(message.rpartition(": ")[2], code)
    return RpcError(code, message, method)


class VolumeError(Exception):
    """A volume or lvstore cannot be used as asked; the text says which, why and what to do."""


class VolumeNotFoundError(VolumeError):
    """There is no such volume or lvstore."""
