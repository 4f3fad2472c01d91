"""An iSCSI target of a few lines, which tests have do what no real one does when it is asked to.

It has one medium in memory, as one LUN or several, and speaks as much of RFC 7143 as libiscsi asks
for: no CHAP, no digests,
and all data of a WRITE with its command.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

BLOCK = 512
IQN = "iqn.2026-11.org.virtlun:fake"
GOOD, CHECK, BUSY = 0, 2, 8
MAX_TRANSFER = 256
"""Blocks of a command: what fits into one PDU."""

_LOGIN = {
    "HeaderDigest": "None",
    "DataDigest": "None",
    "InitialR2T": "Yes",
    "ImmediateData": "Yes",
    "MaxBurstLength": "262144",
    "FirstBurstLength": "262144",
    "MaxRecvDataSegmentLength": "262144",
    "MaxConnections": "1",
    "DefaultTime2Wait": "0",
    "DefaultTime2Retain": "0",
    "MaxOutstandingR2T": "1",
    "ErrorRecoveryLevel": "0",
}


@dataclass(frozen=True)
class Command:
    """A SCSI command as it came."""

    isid: bytes
    cdb: bytes
    data: bytes
    lun: int = 1

    @property
    def opcode(self) -> int:
        """The first byte."""
        return self.cdb[0]

    @property
    def lba(self) -> int:
        """First block of a command of 16 bytes."""
        return int.from_bytes(self.cdb[2:10], "big")


@dataclass(frozen=True)
class Answer:
    """How a command ends."""

    data: bytes = b""
    status: int = GOOD
    sense: bytes = b""
    residual: int = 0
    """Bytes that are said to be left over of a command without data to the initiator; less than 0:
    to lack."""


def sense(key: int, code: int) -> Answer:
    """Returns CHECK CONDITION with a sense key and an additional code."""
    return Answer(
        status=CHECK,
        sense=bytes([0x70, 0, key, 0, 0, 0, 0, 10, 0, 0, 0, 0, code >> 8, code & 255, *bytes(4)]),
    )


class Lose(Exception):
    """Raised by who answers: the connection ends without an answer."""


Answering = Callable[[Command, Callable[[Command], Answer]], Answer | bytes]


@dataclass
class FakeIscsi:
    """The target; a context manager that ends it.

    `answering` is called with each command and what would answer it; bytes that it returns are
    sent as they are.
    """

    blocks: int = 8 * 2048
    block_size: int = BLOCK
    mode: bytes = bytes([23, 0, 0x10, 0, 8, 18, 4, *bytes(17)])
    """What MODE SENSE (6) tells: a volatile cache (WCE), and FUA (DPOFUA)."""
    unsolicited: bool = False
    """The data of a WRITE comes without being asked for, of which only what is with the command is
    looked at, and is read slowly."""
    after: Callable[[], None] = field(default=lambda: None)
    """Called once a command is answered, before more is read."""
    identity: bytes = b"\x60identit"
    """The designator of the device identification page (NAA) of LUN 1, of others with their number.
    """
    luns: tuple[int, ...] = (1,)
    """What REPORT LUNS tells."""
    answering: Answering = field(default=lambda command, usual: usual(command))
    log: list[Command] = field(default_factory=list)
    logins: list[bytes] = field(default_factory=list)
    content: bytearray = field(default_factory=lambda: bytearray(8 << 20))

    def __enter__(self) -> FakeIscsi:
        outer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, EOFError, Lose):
                    _Connection(outer, self.request).serve()

        socketserver.ThreadingTCPServer.allow_reuse_address = True
        socketserver.ThreadingTCPServer.daemon_threads = True
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        if self.unsolicited:
            # Before anybody connects: a large write is not sent at once then.
            self._server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        """Address of the LUN."""
        return f"iscsi://{self.portal}/{IQN}/1"

    @property
    def portal(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    def opcodes(self, *of: int) -> list[Command]:
        """Returns the commands that came with one of these operation codes."""
        return [command for command in self.log if command.opcode in of]

    def usual(self, command: Command) -> Answer:
        """Answers a command as a disk does."""
        at = command.lba * self.block_size
        if command.opcode in {0x88, 0x89, 0x8A}:
            return self._transfer(command, at)
        answers = {
            0x00: Answer(),
            0x91: Answer(),
            0x12: self._inquiry(command),
            0xA0: Answer(
                (8 * len(self.luns)).to_bytes(4, "big")
                + bytes(4)
                + b"".join(bytes([0, lun, *bytes(6)]) for lun in self.luns)
            ),
            0x1A: Answer(self.mode),
            0x9E: Answer(struct.pack(">QI20x", (self.blocks - 1) % (1 << 64), self.block_size)),
        }
        return answers.get(command.opcode, sense(5, 0x2000))

    def _transfer(self, command: Command, at: int) -> Answer:
        data = command.data
        if command.opcode == 0x88:
            count = int.from_bytes(command.cdb[10:14], "big") * self.block_size
            return Answer(bytes(self.content[at : at + count]))
        if command.opcode == 0x89:
            half = len(data) // 2
            if self.content[at : at + half] != data[:half]:
                return sense(0xE, 0x1D00)
            data = data[half:]
        self.content[at : at + len(data)] = data
        return Answer()

    def _inquiry(self, command: Command) -> Answer:
        cdb, identity = command.cdb, self.identity
        if identity and command.lun != 1:
            identity = identity[:-1] + bytes([command.lun])
        if not cdb[1] & 1:
            return Answer(bytes([0, 0, 6, 2, 31, 0, 0, 2]) + b"fake".ljust(28))
        match cdb[2]:
            case 0:
                return Answer(bytes([0, 0, 0, 3, 0, 0x83, 0xB0]))
            case 0x83:
                known = bytes([1, 3, 0, len(identity)]) + identity if identity else b""
                return Answer(
                    bytes([0, 0x83, *(len(known) + 240).to_bytes(2, "big")])
                    + known
                    + bytes([1, 0, 0, 236])
                    + bytes(236)
                )
            case 0xB0:
                page = bytearray(64)
                page[:6] = [0, 0xB0, 0, 60, 0, 8]
                page[8:12] = (8192 if self.unsolicited else MAX_TRANSFER).to_bytes(4, "big")
                return Answer(bytes(page))
        return sense(5, 0x2400)


class _Connection:
    """One connection, from its login on."""

    def __init__(self, target: FakeIscsi, to: socket.socket) -> None:
        self.target, self.socket = target, to
        self.status_number, self.expected = 0, 0
        self.isid = b""

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def serve(self) -> None:
        """Answers until the other end has gone."""
        while True:
            header = self._read(48)
            length = int.from_bytes(header[5:8], "big")
            data = self._read((length + 3) & ~3)[:length]
            number = int.from_bytes(header[24:28], "big")
            self.expected = number if header[0] & 0x40 else number + 1
            match header[0] & 0x3F:
                case 0x03:
                    self._login(header, data)
                case 0x01:
                    self._command(header, data)
                case 0x06:
                    return self._send(0x26, 0x80, header)
                case 0x05 if self.target.unsolicited:
                    pass
                case 0x00:
                    self._send(0x20, 0x80, header)
                case other:
                    raise AssertionError(f"a PDU of type {other:#x}")

    def _send(self, opcode: int, flags: int, to: bytes, data: bytes = b"", **fields: bytes) -> None:
        header = bytearray(48)
        header[0], header[1] = opcode, flags
        header[5:8] = len(data).to_bytes(3, "big")
        header[16:20] = to[16:20]
        header[20:24] = b"\xff" * 4 if opcode in {0x25, 0x20} else bytes(4)
        header[24:36] = struct.pack(
            ">III", self.status_number, self.expected, (self.expected + 32) % (1 << 32)
        )
        for name, value in fields.items():
            at = int(name.removeprefix("at"))
            header[at : at + len(value)] = value
        self.status_number += 1
        self.socket.sendall(bytes(header) + data.ljust((len(data) + 3) & ~3, b"\0"))

    def _login(self, header: bytes, data: bytes) -> None:
        self.isid = header[8:14]
        asked = dict(pair.split("=", 1) for pair in data.decode().split("\0") if pair)
        known = {**_LOGIN, "AuthMethod": "None"}
        if self.target.unsolicited:
            known |= {
                "InitialR2T": "No",
                "FirstBurstLength": "8388608",
                "MaxBurstLength": "8388608",
            }
        text = "".join(f"{key}={known[key]}\0" for key in asked if key in known)
        flags = header[1] & 0x8F
        done = flags & 0x83 == 0x83
        if done:
            self.target.logins.append(self.isid)
        session = b"\0\1" if done else b"\0\0"
        self._send(0x23, flags, header, text.encode(), at8=self.isid, at14=session)

    def _command(self, header: bytes, data: bytes) -> None:
        command = Command(self.isid, header[32:48], data, header[9])
        self.target.log.append(command)
        answer = self.target.answering(command, self.target.usual)
        if isinstance(answer, bytes):
            self.socket.sendall(answer)
            return
        if answer.status == GOOD and header[1] & 0x40:
            wanted = int.from_bytes(header[20:24], "big")
            came = answer.data[:wanted]
            missing = (wanted - len(came)).to_bytes(4, "big")
            flags = 0x81 | (2 if len(came) < wanted else 0)
            self._send(0x25, flags, header, came, at44=missing)
            return
        told = len(answer.sense).to_bytes(2, "big") + answer.sense if answer.sense else b""
        flags = 0x80 | (2 if answer.residual > 0 else 4 if answer.residual else 0)
        left = abs(answer.residual).to_bytes(4, "big")
        self._send(0x21, flags, header, told, at3=bytes([answer.status]), at20=bytes(4), at44=left)
        self.target.after()
