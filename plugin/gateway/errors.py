"""What the gateway tells a client when it refuses: libvirt's error codes and their wire form.

GatewayError
|-- Refused         our own: a code of virterror.h and one sentence
|   `-- NoAnswer    a target does not run or does not answer in time
|-- UpstreamError   libvirtd's own, kept byte for byte
`-- UpstreamGone    libvirtd closed the connection or does not answer
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

from plugin.gateway.wire import WireError
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain.errors import LIBVIRT, LibvirtCode, Refusal


class Code(IntEnum):
    """virErrorNumber, those we send or look at."""

    INTERNAL_ERROR = 1
    NO_CONNECT = 5
    INVALID_ARG = 8
    OPERATION_FAILED = 9
    XML_ERROR = 27
    OPERATION_DENIED = 29
    SYSTEM_ERROR = 38
    RPC = 39
    NO_DOMAIN = 42
    AUTH_FAILED = 45
    NO_STORAGE_POOL = 49
    NO_STORAGE_VOL = 50
    OPERATION_INVALID = 55
    CONFIG_UNSUPPORTED = 67
    OPERATION_TIMEOUT = 68
    INVALID_SECRET = 65
    NO_DOMAIN_SNAPSHOT = 72
    ARGUMENT_UNSUPPORTED = 74
    SNAPSHOT_REVERT_RISKY = 77
    AUTH_CANCELLED = 79
    NO_DOMAIN_METADATA = 80
    BLOCK_COPY_ACTIVE = 83
    OVERFLOW = 82
    OPERATION_UNSUPPORTED = 84
    AGENT_UNRESPONSIVE = 86
    RESOURCE_BUSY = 87
    ACCESS_DENIED = 88
    STORAGE_VOL_EXIST = 90
    AUTH_UNAVAILABLE = 94
    DEVICE_MISSING = 99
    NO_DOMAIN_CHECKPOINT = 103
    NO_DOMAIN_BACKUP = 104
    CHECKPOINT_INCONSISTENT = 109


_PREFIXES: dict[int, str] = {
    Code.INTERNAL_ERROR: "internal error: ",
    Code.INVALID_ARG: "invalid argument: ",
    Code.OPERATION_FAILED: "operation failed: ",
    Code.XML_ERROR: "XML error: ",
    Code.OPERATION_DENIED: "operation forbidden: ",
    Code.RPC: "RPC error: ",
    Code.AUTH_FAILED: "authentication failed: ",
    Code.AUTH_CANCELLED: "authentication cancelled: ",
    Code.AUTH_UNAVAILABLE: "authentication unavailable: ",
    Code.NO_DOMAIN_METADATA: "metadata not found: ",
    Code.NO_STORAGE_POOL: "Storage pool not found: ",
    Code.NO_STORAGE_VOL: "Storage volume not found: ",
    Code.OPERATION_INVALID: "Requested operation is not valid: ",
    Code.CONFIG_UNSUPPORTED: "unsupported configuration: ",
    Code.OPERATION_TIMEOUT: "Timed out during operation: ",
    Code.ARGUMENT_UNSUPPORTED: "argument unsupported: ",
    Code.OPERATION_UNSUPPORTED: "Operation not supported: ",
    Code.RESOURCE_BUSY: "resource busy: ",
    Code.BLOCK_COPY_ACTIVE: "block copy still active: ",
    Code.SNAPSHOT_REVERT_RISKY: "revert requires force: ",
    Code.DEVICE_MISSING: "device not found: ",
    Code.NO_DOMAIN_CHECKPOINT: "Domain checkpoint not found: ",
    Code.NO_DOMAIN_BACKUP: "Domain backup job id not found: ",
    Code.CHECKPOINT_INCONSISTENT: "checkpoint inconsistent: ",
}
"""What libvirt's virErrorMsg puts before the detail, so that ours read like its own."""

FROM_RPC = 7
FROM_QEMU = 10
LEVEL_ERROR = 2


class GatewayError(Exception):
    """Base of what ends one call of one client."""

    def payload(self) -> bytes:
        """Returns the remote_error that the client gets."""
        return error_payload(Code.OPERATION_FAILED, str(self))


class Refused(GatewayError):
    """An error of our own: object, operation, cause and next step in one sentence."""

    def __init__(self, why: Refusal | Code, text: str) -> None:
        super().__init__(text)
        self.numbers = LIBVIRT[why] if isinstance(why, Refusal) else LibvirtCode(FROM_RPC, why)

    def payload(self) -> bytes:
        """Returns the remote_error that the client gets."""
        return error_payload(self.numbers.code, str(self), self.numbers.domain)


@contextmanager
def noting(path: Path, what: str = "") -> Iterator[None]:
    """Has a body write a note in the gateway's folder of state, and says so where it cannot.

    `what` is what the note is of, for the sentence.

    Raises:
        Refused: an OSError of the body.
    """
    try:
        yield
    except OSError as error:
        raise Refused(
            Refusal.INTERNAL,
            f"{what}{path} cannot be written ({error.strerror}): make gateway.state_dir of"
            " virtlun.toml a folder with space",
        ) from error


class NoAnswer(Refused):
    """A target does not run, is not for this user, or does not answer in time."""


class ServerSilent(Refused):
    """The cluster or server of an image did not answer in time."""


class LunNotReleased(Refused):
    """A running domain keeps a LUN that its metadata does not have so: see `LunKept`."""


class UpstreamError(GatewayError):
    """libvirtd refused; `raw` is its remote_error, passed on verbatim."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.code, text = _read(raw)
        super().__init__(text)

    @property
    def is_no_metadata(self) -> bool:
        """Whether the domain just has no metadata of ours."""
        return self.code == Code.NO_DOMAIN_METADATA

    def payload(self) -> bytes:
        """Returns libvirtd's own bytes."""
        return self.raw


class UpstreamGone(GatewayError):
    """libvirtd closed our connection, cannot be reached, or does not answer in time."""


def error_payload(code: int, text: str, origin: int = FROM_QEMU) -> bytes:
    """Returns a virNetMessageError with libvirt's prefix for `code` before `text`."""
    full = _PREFIXES.get(code, "") + text
    writer = Writer().i32(code).i32(origin)
    writer.optional(full, writer.string).i32(LEVEL_ERROR).u32(0)
    writer.optional(full, writer.string).u32(0).u32(0)
    return bytes(writer.i32(0).i32(0).u32(0))


def _read(raw: bytes) -> tuple[int, str]:
    """Returns code and message of a virNetMessageError."""
    reader = Reader(raw)
    try:
        code = reader.i32()
        reader.i32()
        return code, reader.optional(reader.string) or ""
    except WireError:
        return Code.INTERNAL_ERROR, "libvirtd sent an error that cannot be read"
