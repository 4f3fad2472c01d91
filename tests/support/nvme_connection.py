"""The controller's side of a connection of NVMe/TCP, for `nvme_target`: PDUs, digests, data."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

INIT, TERMINATE, COMMAND, RESPONSE, H2C_DATA, C2H_DATA, R2T = 0, 2, 4, 5, 6, 7, 9
HDGST, DDGST, LAST, SUCCESS = 1, 2, 4, 8


POLL_S = 0.01
"""Between two looks whether a connection was ended."""


def _table() -> list[int]:
    table = []
    for byte in range(256):
        entry = byte
        for _ in range(8):
            entry = entry >> 1 ^ (0x82F63B78 if entry & 1 else 0)
        table.append(entry)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> bytes:
    """Returns the digest of some bytes, as it is sent."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return (crc ^ 0xFFFFFFFF).to_bytes(4, "little")


class Lose(Exception):
    """Raised by who answers: the connection ends without an answer."""


class WrongPdu(AssertionError):
    """The host sent what it must not."""


class Answer(Protocol):
    """How a command ends."""

    @property
    def status(self) -> int: ...
    @property
    def data(self) -> bytes: ...
    @property
    def result(self) -> int: ...


class Target(Protocol):
    """What a connection asks its target."""

    in_capsule: int
    r2t: int
    h2c: int
    c2h: int
    padding: int
    alignment: int
    success: bool
    wrong_digest: int

    @property
    def wrong(self) -> Callable[[bytes], bytes]:
        """What becomes of each PDU that is sent."""

    def carry_out(self, connection: Connection, sqe: bytes, data: bytes) -> Answer | None:
        """Carries a command out; None: it is not answered now."""


@dataclass
class Transfer:
    """A command whose data is asked for."""

    sqe: bytes
    size: int
    data: bytearray
    until: int
    """Bytes that were asked for."""


class Connection:
    """One queue; `serve` until it ends."""

    def __init__(self, target: Target, sock: socket.socket, port: int) -> None:
        self.target, self.port, self.queue = target, port, 0
        self.controller: object = None
        self.failed_fused = False
        self.problem: str | None = None
        self._sock = sock
        self._sending = threading.Lock()
        self._flags = 0
        self._transfers: dict[int, Transfer] = {}

    def close(self, *, reset: bool = False) -> None:
        """Ends it; with `reset` not in order."""
        with contextlib.suppress(OSError):
            if reset:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self._sock.close()  # no thread is in a call that reads, which would delay that
            else:
                self._sock.shutdown(socket.SHUT_RDWR)

    def complete(self, cid: int, status: int, result: int = 0) -> None:
        """Sends the end of a command."""
        entry = struct.pack("<QIHH", result, 0, cid, status << 1)
        self._send(RESPONSE, 0, entry)

    def serve(self) -> None:
        """Answers until the host ends the connection.

        Raises:
            OSError, EOFError: it ends.
        """
        kind, _, request = self._receive()
        assert kind == INIT and len(request) == 120, request
        self._flags = request[3]
        answer = bytes([0, 0, self.target.alignment, self._flags]) + struct.pack(
            "<I", self.target.h2c
        )
        self._put(struct.pack("<BBBBI", 1, 0, 128, 0, 128) + answer.ljust(120, b"\0"))
        while True:
            kind, header, data = self._receive_checked()
            if kind == COMMAND:
                self._begin(header, data)
            elif kind == H2C_DATA:
                self._take(header, data)
            else:
                raise WrongPdu(kind)

    def _begin(self, sqe: bytes, data: bytes) -> None:
        cid, length, kind = (
            int.from_bytes(sqe[2:4], "little"),
            int.from_bytes(sqe[32:36], "little"),
            sqe[39],
        )
        assert sqe[1] & 0xC0 == 0x40, "SGLs are used"
        opcode = sqe[4] if sqe[0] == 0x7F else sqe[0]
        if opcode & 3 == 1 and length and kind == 0x5A:
            self._transfers[cid] = Transfer(sqe, length, bytearray(), 0)
            self._ask(cid)
            return
        assert len(data) == (length if kind == 0x01 else 0), (len(data), length, kind)
        self._answer(sqe, data)

    def _ask(self, cid: int) -> None:
        transfer = self._transfers[cid]
        offset = len(transfer.data)
        size = min(self.target.r2t, transfer.size - offset)
        transfer.until = offset + size
        self._send(R2T, 0, struct.pack("<HHII4x", cid, cid ^ 0x5555, offset, size))

    def _take(self, header: bytes, data: bytes) -> None:
        cid, tag, offset, size = struct.unpack("<HHII4x", header[:16])
        transfer = self._transfers[cid]
        assert tag == cid ^ 0x5555 and size == len(data) <= self.target.h2c
        assert offset == len(transfer.data) and offset + size <= transfer.until
        transfer.data += data
        if len(transfer.data) == transfer.size:
            del self._transfers[cid]
            self._answer(transfer.sqe, bytes(transfer.data))
        elif len(transfer.data) == transfer.until:
            self._ask(cid)

    def _answer(self, sqe: bytes, data: bytes) -> None:
        answer = self.target.carry_out(self, sqe, data)
        if answer is None:
            return
        cid = int.from_bytes(sqe[2:4], "little")
        if answer.status == 0 and answer.data:
            size = self.target.c2h
            for at in range(0, len(answer.data), size):
                part = answer.data[at : at + size]
                flags = 0
                if at + size >= len(answer.data):
                    flags = LAST | (SUCCESS if self.target.success else 0)
                self._send(C2H_DATA, flags, struct.pack("<HHII4x", cid, 0, at, len(part)), part)
            if self.target.success:
                return
        self.complete(cid, answer.status, answer.result)

    def _send(self, kind: int, flags: int, rest: bytes, data: bytes = b"") -> None:
        begin = 24 + (4 if self._flags & 1 else 0)
        padding = bytes([0xA5]) * (self.target.padding if data else 0)
        begin += len(padding)
        length = begin + len(data)
        if self._flags & 1:
            flags |= HDGST
        if data and self._flags & 2:
            flags |= DDGST
            length += 4
        header = struct.pack("<BBBBI", kind, flags, 24, begin if data else 0, length) + rest
        pdu = header
        if flags & HDGST:
            pdu += crc32c(header)
        pdu += padding + data
        if flags & DDGST:
            digest = crc32c(data)
            if self.target.wrong_digest:
                self.target.wrong_digest -= 1
                digest = bytes(byte ^ 0xFF for byte in digest)
            pdu += digest
        self._put(self.target.wrong(pdu))

    def _put(self, pdu: bytes) -> None:
        with self._sending:
            self._sock.sendall(pdu)

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            with contextlib.suppress(ValueError):  # it is closed
                if not select.select([self._sock], [], [], POLL_S)[0]:
                    continue
            part = self._sock.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _receive(self) -> tuple[int, int, bytes]:
        head = self._exactly(8)
        kind, flags, _, _, length = struct.unpack("<BBBBI", head)
        return kind, flags, self._exactly(length - 8)

    def _receive_checked(self) -> tuple[int, bytes, bytes]:
        head = self._exactly(8)
        kind, flags, size, offset, length = struct.unpack("<BBBBI", head)
        rest = self._exactly(length - 8)
        header, at = rest[: size - 8], size
        assert bool(flags & HDGST) == bool(self._flags & 1)
        if flags & HDGST:
            assert rest[size - 8 : size - 4] == crc32c(head + header), (
                "the header's digest is wrong"
            )
            at += 4
        if offset:
            assert at <= offset and offset % (4 * (self.target.alignment + 1)) == 0, offset
            assert not any(rest[at - 8 : offset - 8]), "there is something before the data"
            data = rest[offset - 8 :]
        else:
            data = rest[at - 8 :]
        assert bool(flags & DDGST) == bool(data and self._flags & 2)
        if flags & DDGST:
            data, digest = data[:-4], data[-4:]
            assert digest == crc32c(data), "the digest of data is wrong"
        return kind, header, data
