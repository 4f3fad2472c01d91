"""How a libvirt RPC message looks on the wire (virnetprotocol.x), and the limits we hold it to.

A message is a length word that counts itself, six header words and a payload of XDR. After a
message of a WITH_FDS type each file descriptor follows in a sendmsg of its own, with one carrier
byte that the length does not count.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

HEADER = struct.Struct(">IIIiIII")
HEADER_BYTES = HEADER.size
"""Length word and header, bytes: the shortest message there is."""

MESSAGE_MAX_BYTES = 33_554_432 + 4
"""VIR_NET_MESSAGE_MAX plus the length word."""

STRING_MAX_BYTES = 4_194_304
"""VIR_NET_MESSAGE_STRING_MAX."""

FDS_MAX = 32
"""VIR_NET_MESSAGE_NUM_FDS_MAX: descriptors of one message."""

REMOTE_PROGRAM = 0x20008086
QEMU_PROGRAM = 0x20008087
KEEPALIVE_PROGRAM = 0x6B656570
PROTOCOL_VERSION = 1


class WireError(Exception):
    """The peer broke the protocol; its connection, and only that, is closed."""


class MessageType(IntEnum):
    """virNetMessageType."""

    CALL = 0
    REPLY = 1
    MESSAGE = 2
    STREAM = 3
    CALL_WITH_FDS = 4
    REPLY_WITH_FDS = 5
    STREAM_HOLE = 6


class Status(IntEnum):
    """virNetMessageStatus."""

    OK = 0
    ERROR = 1
    CONTINUE = 2


CALLS = (MessageType.CALL, MessageType.CALL_WITH_FDS)
REPLIES = (MessageType.REPLY, MessageType.REPLY_WITH_FDS)
WITH_FDS = (MessageType.CALL_WITH_FDS, MessageType.REPLY_WITH_FDS)


class Header(NamedTuple):
    """The seven words a message begins with. `length` is in bytes and counts all of the message."""

    length: int
    program: int
    version: int
    procedure: int
    type: int
    serial: int
    status: int

    @property
    def payload_bytes(self) -> int:
        """Length of what follows the header, in bytes."""
        return self.length - HEADER_BYTES

    @property
    def with_fds(self) -> bool:
        """Whether descriptors follow the message."""
        return self.type in WITH_FDS

    def pack(self) -> bytes:
        """Returns the header's 28 bytes."""
        return HEADER.pack(*self)

    def resized(self, payload_bytes: int) -> Header:
        """Returns the same header for a payload of another length."""
        return self._replace(length=HEADER_BYTES + payload_bytes)


def unpack_header(data: bytes | bytearray | memoryview, offset: int = 0) -> Header:
    """Reads and checks the header at `offset`.

    Raises:
        WireError: a length, type or status that no libvirt message has.
    """
    header = Header(*HEADER.unpack_from(data, offset))
    if not HEADER_BYTES <= header.length <= MESSAGE_MAX_BYTES:
        raise WireError(f"a message of {header.length} bytes")
    if not 0 <= header.type <= MessageType.STREAM_HOLE:
        raise WireError(f"message type {header.type}")
    if header.status > Status.CONTINUE:
        raise WireError(f"message status {header.status}")
    return header


def message(
    kind: MessageType,
    procedure: int,
    serial: int,
    payload: bytes = b"",
    *,
    status: Status = Status.OK,
    program: int = REMOTE_PROGRAM,
) -> bytes:
    """Returns a whole message of our own making."""
    length = HEADER_BYTES + len(payload)
    if length > MESSAGE_MAX_BYTES:
        raise WireError(f"a message of {length} bytes")
    words = HEADER.pack(length, program, PROTOCOL_VERSION, procedure, kind, serial, status)
    return words + payload
