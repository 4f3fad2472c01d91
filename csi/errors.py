"""What can go wrong in the driver, and the one table that turns it into gRPC's codes.

A `Failure` carries its code; every other exception finds its own in `describe`. The codes mean
what CSI 1.13 says ("Error Scheme" of each RPC): the orchestrator retries UNAVAILABLE,
DEADLINE_EXCEEDED, ABORTED and INTERNAL, and waits for a person on the others.
"""

from __future__ import annotations

import grpc

from csi.hosterrors import HelperUnavailable, HostError, OfflineOnly
from pydataplane.errors import (
    BUSY,
    EXISTS,
    INVALID,
    METHOD_NOT_FOUND,
    NO_DEVICE,
    NO_KEY,
    NO_SPACE,
    READ_ONLY,
    RpcError,
    TargetTimeout,
    TargetUnavailable,
    VolumeError,
    VolumeNotFoundError,
)

Code = grpc.StatusCode


class Failure(Exception):
    """A call ends with this code; the text names the object, the cause and the next step."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        """Keeps the code and the sentence for the caller."""
        super().__init__(message)
        self.code = code


RPC_CODES = {
    READ_ONLY: Code.FAILED_PRECONDITION,
    BUSY: Code.FAILED_PRECONDITION,  # in use by another face
    EXISTS: Code.ALREADY_EXISTS,
    NO_DEVICE: Code.NOT_FOUND,
    INVALID: Code.INVALID_ARGUMENT,
    NO_SPACE: Code.RESOURCE_EXHAUSTED,
    NO_KEY: Code.UNAVAILABLE,  # until somebody gives it
    METHOD_NOT_FOUND: Code.UNIMPLEMENTED,  # the target is older than the driver
}


def describe(error: Exception) -> tuple[grpc.StatusCode, str]:  # noqa: PLR0911 - it is a table
    """Returns the code and the sentence that a caller gets for `error`."""
    match error:
        case Failure():
            return error.code, str(error)
        case RpcError():
            code = RPC_CODES.get(error.code, Code.INTERNAL)
            return code, f"the target refused {error.method}: {error.message}"
        case TargetUnavailable():
            return Code.UNAVAILABLE, str(error)
        case TargetTimeout():
            return Code.DEADLINE_EXCEEDED, str(error)
        case VolumeNotFoundError():
            return Code.NOT_FOUND, str(error)
        case VolumeError():
            return Code.ALREADY_EXISTS, str(error)
        case HelperUnavailable():
            return Code.UNAVAILABLE, str(error)
        case OfflineOnly():
            return Code.FAILED_PRECONDITION, str(error)
        case HostError() | OSError():
            return Code.INTERNAL, f"this host refused: {error}"
        case _:
            return Code.INTERNAL, f"{type(error).__name__}: {error}; the driver's log has more"


def invalid(message: str) -> Failure:
    """Returns an INVALID_ARGUMENT."""
    return Failure(Code.INVALID_ARGUMENT, message)


def precondition(message: str) -> Failure:
    """Returns a FAILED_PRECONDITION."""
    return Failure(Code.FAILED_PRECONDITION, message)


def not_found(message: str) -> Failure:
    """Returns a NOT_FOUND."""
    return Failure(Code.NOT_FOUND, message)
