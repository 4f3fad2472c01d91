"""A model of an NVMe/TCP target, which tests have do what no real one does when it is asked to.

It is no peer to find out with what the protocol means: it was written beside the initiator. It has
one subsystem with namespaces in memory, at one or more ports, and speaks as much of NVM Express's
base specification 2.1 and NVMe/TCP 1.1 as a host asks for: digests, R2T, fused commands, asymmetric
namespace access, events.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.nvme_connection import Connection, Lose
from tests.support.ports import free_port

NQN = "nqn.2026-11.org.virtlun:model"
FLUSH, WRITE, READ, COMPARE, WRITE_ZEROES, DATASET = 0x00, 0x01, 0x02, 0x05, 0x08, 0x09
FABRICS = 0x7F
OK, INVALID_FIELD, INVALID_NAMESPACE, LBA_RANGE = 0x000, 0x002, 0x00B, 0x080
FAILED_FUSED, COMPARE_FAILURE, ANA_INACCESSIBLE = 0x009, 0x285, 0x302
OPTIMIZED, NON_OPTIMIZED, INACCESSIBLE = 1, 2, 3
NAMESPACES, ANA_CHANGE = 1 << 8, 1 << 11
DNR = 0x4000


@dataclass
class Namespace:
    """A namespace in memory."""

    blocks: int
    block_size: int = 512
    uuid: bytes = b"namespace-uuid-1"
    metadata: int = 0
    """Bytes of metadata of a block."""
    group: int = 1
    """Of asymmetric access."""
    content: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.content.extend(bytes(self.blocks * self.block_size - len(self.content)))


@dataclass(frozen=True)
class Command:
    """A command as it came."""

    port: int
    queue: int
    sqe: bytes
    data: bytes
    at: float
    """Of time.monotonic()."""

    @property
    def opcode(self) -> int:
        """The first byte."""
        return self.sqe[0]

    @property
    def nsid(self) -> int:
        """The namespace."""
        return int.from_bytes(self.sqe[4:8], "little")

    @property
    def lba(self) -> int:
        """First block of a command on blocks."""
        return int.from_bytes(self.sqe[40:48], "little")

    @property
    def blocks(self) -> int:
        """Blocks of such a command."""
        return int.from_bytes(self.sqe[48:50], "little") + 1

    @property
    def fua(self) -> bool:
        """Whether it is to be durable when it is answered."""
        return bool(self.sqe[51] & 0x40)


@dataclass(frozen=True)
class Answer:
    """How a command ends."""

    status: int = OK
    data: bytes = b""
    result: int = 0


Answering = Callable[[Command, Callable[[Command], Answer]], Answer | None]
Administering = Callable[[Command, Callable[[Command], Answer | None]], Answer | None]


@dataclass
class Controller:
    """An association: what one Connect of an admin queue has made."""

    cntlid: int
    port: int
    keep_alive_ms: int
    configuration: int = 0
    told: int = 0
    """What it tells of: Asynchronous Event Configuration."""
    events: list[tuple[Connection, int]] = field(default_factory=list)
    """Asynchronous Event Requests that wait."""
    pending: list[int] = field(default_factory=list)
    """Results of events that none waits for."""
    heard: float = field(default_factory=time.monotonic)
    """When a command came last, of time.monotonic()."""
    expired: bool = False
    """It was ended, as none came for too long."""


@dataclass
class NvmeTarget:
    """The target; a context manager that ends it.

    `answering` is called with each command of an I/O queue and what would answer it; None: it is
    not answered. It may raise Lose.
    """

    namespaces: dict[int, Namespace] = field(default_factory=lambda: {1: Namespace(16384)})
    ports: int = 1
    subnqn: str = NQN
    answering: Answering = field(default=lambda command, usual: usual(command))
    administering: Administering = field(default=lambda command, usual: usual(command))
    """As `answering`, of the commands of admin queues but those of fabrics."""
    limits: tuple[int, int] | None = None
    """WZSL and DMRSL."""
    in_capsule: int = 8192
    """Bytes of data of a capsule."""
    r2t: int = 65536
    """Bytes that are asked for at once."""
    h2c: int = 65536
    """Bytes of one PDU to the target at most (MAXH2CDATA)."""
    c2h: int = 65536
    """Bytes of one PDU to the host."""
    alignment: int = 0
    """CPDA."""
    success: bool = True
    """The last data of a READ stands for its completion."""
    mdts: int = 5
    cache: bool = True
    """A volatile write cache."""
    fused: bool = True
    ana: bool = False
    groups: int = 1
    """Of asymmetric access; the first one is in the state of the port, the others are optimized,
    but for those in `other_groups`."""
    other_groups: dict[int, int] = field(default_factory=dict)
    """Their states."""
    hides_sizes: bool = False
    """Tells no size of a namespace by a path where it is inaccessible, as the specification has it
    (base specification 2.1, 8.1.1.6)."""
    ignores_offset: bool = False
    """Gives log pages from their beginning, whatever offset is asked for, though it says that it
    gives them in parts: Linux's target does so with that of asymmetric access."""
    keeps_time: bool = False
    """Ends an association that it hears nothing of for twice its keep-alive timeout (KATO), the
    latest that a controller may which counts all commands (TBKAS)."""
    tells: bool = True
    """Of changed namespaces."""
    wrong_digest: int = 0
    """So many PDUs of data have a wrong digest."""
    wrong: Callable[[bytes], bytes] = field(default=lambda pdu: pdu)
    """What becomes of each PDU that is sent."""
    padding: int = 0
    """Bytes between a header and its data, of what the host reads."""
    model_name: str = "virtlun's model"
    first_controller: int = 1
    """Number of its first controller: two models may stand for one subsystem."""
    through: threading.Event | None = None
    """Is as Linux's target with a connection that ends: waits for this, and then resets it."""
    authentication: bool = False
    problems: list[str] = field(default_factory=list)
    """What the host has sent that it must not."""
    log: list[Command] = field(default_factory=list)
    states: list[int] = field(default_factory=lambda: [OPTIMIZED] * 8)
    """Of the namespaces at each port."""
    changes: int = 0
    """Of those states, so far."""
    controllers: list[Controller] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)

    def __enter__(self) -> NvmeTarget:
        self._lock = threading.RLock()
        self._servers: list[socketserver.ThreadingTCPServer | None] = [None] * self.ports
        self._numbers = [free_port() for _ in range(self.ports)]
        for port in range(self.ports):
            self.listen(port)
        self._over = threading.Event()
        if self.keeps_time:
            threading.Thread(target=self._keep_time, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        for port in range(self.ports):
            self.vanish(port)
        assert not self.problems, self.problems

    def listen(self, port: int = 0) -> None:
        """Is there, at its port."""
        outer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                try:
                    with contextlib.suppress(OSError, EOFError, Lose):
                        _serve(outer, self.request, port)
                except AssertionError as error:
                    outer.problems.append(repr(error))

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

        server = Server(("127.0.0.1", self._numbers[port]), Handler)
        self._servers[port] = server
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def vanish(self, port: int = 0) -> None:
        """Is not there any more, as if it was killed."""
        server = self._servers[port]
        if server is not None:
            self._servers[port] = None
            server.shutdown()
            server.server_close()
        self.drop(port)

    def drop(
        self, port: int | None = None, *, queue: int | None = None, reset: bool = False
    ) -> None:
        """Ends connections, of one port and one queue if given; in order, or by a reset."""
        for each in list(self.connections):
            if port in (None, each.port) and queue in (None, each.queue):
                each.close(reset=reset)

    def port(self, number: int = 0) -> str:
        """The port of TCP, as trsvcid."""
        return str(self._numbers[number])

    def params(self, port: int = 0) -> dict[str, str]:
        """What bdev_nvme_attach_controller has to be given."""
        address = {"trtype": "tcp", "traddr": "127.0.0.1", "trsvcid": self.port(port)}
        return {**address, "adrfam": "ipv4", "subnqn": self.subnqn}

    def seen(self, opcode: int) -> list[Command]:
        """Returns the commands of I/O queues with this opcode."""
        return [each for each in self.log if each.queue and each.opcode == opcode]

    def resize(self, blocks: int, nsid: int = 1) -> None:
        """Gives a namespace another size, and tells of it."""
        namespace = self.namespaces[nsid]
        namespace.blocks = blocks
        namespace.content.extend(
            bytes(max(0, blocks * namespace.block_size - len(namespace.content)))
        )
        if self.tells:
            self._tell(NAMESPACES, 2 | 0x04 << 16)

    def add(self, nsid: int, namespace: Namespace) -> None:
        """Adds a namespace, or puts another one in its place, and tells of it."""
        self.namespaces[nsid] = namespace
        if self.tells:
            self._tell(NAMESPACES, 2 | 0x04 << 16)

    def remove(self, nsid: int) -> None:
        """Deletes a namespace, and tells of it."""
        del self.namespaces[nsid]
        if self.tells:
            self._tell(NAMESPACES, 2 | 0x04 << 16)

    def _keep_time(self) -> None:
        silent: dict[int, tuple[float, float]] = {}
        last = time.monotonic()
        while not self._over.wait(0.05):
            # What came while nobody ran here is heard of first.
            passed, last = min(time.monotonic() - last, 0.1), time.monotonic()
            for each in list(self.controllers):
                its = [c for c in list(self.connections) if c.controller is each]
                heard, so_far = silent.get(each.cntlid, (each.heard, 0.0))
                so_far = so_far + passed if heard == each.heard else 0.0
                silent[each.cntlid] = each.heard, so_far
                if its and so_far > 2 * each.keep_alive_ms / 1000:
                    each.expired = True
                    for connection in its:
                        connection.close(reset=True)

    def set_state(self, state: int, port: int = 0) -> None:
        """Has the namespaces be used in another way at a port, and tells of it."""
        self.states[port] = state
        self.changes += 1
        self._tell(ANA_CHANGE, 2 | 3 << 8 | 0x0C << 16, port)

    def _tell(self, kind: int, result: int, port: int | None = None) -> None:
        with self._lock:
            for each in self.controllers:
                if port not in (None, each.port) or not each.told & kind:
                    continue
                if each.events:
                    connection, cid = each.events.pop()
                    with contextlib.suppress(OSError):
                        connection.complete(cid, OK, result)
                else:
                    each.pending.append(result)

    # What follows runs on the threads of connections.

    def connect(self, connection: Connection, sqe: bytes, data: bytes) -> Answer:
        """Connect: makes a controller, or gives one another queue."""
        queue, kato = int.from_bytes(sqe[42:44], "little"), int.from_bytes(sqe[48:52], "little")
        subnqn = data[256:512].split(b"\0")[0].decode()
        if subnqn != self.subnqn:
            return Answer(0x182 | DNR)
        with self._lock:
            if queue == 0:
                number = self.first_controller + len(self.controllers)
                made = Controller(number, connection.port, kato)
                self.controllers.append(made)
            else:
                number = int.from_bytes(data[16:18], "little")
                made = self.controllers[number - self.first_controller]
            connection.controller, connection.queue = made, queue
        return Answer(result=made.cntlid | (0x20000 if self.authentication else 0))

    def carry_out(self, connection: Connection, sqe: bytes, data: bytes) -> Answer | None:
        """Carries a command out; None: it is not answered now."""
        command = Command(connection.port, connection.queue, sqe, data, time.monotonic())
        self.log.append(command)
        if isinstance(connection.controller, Controller):
            connection.controller.heard = command.at
        if command.opcode == FABRICS:
            return self._fabrics(connection, sqe, data)
        if connection.queue:
            return self.answering(command, lambda command: self._io(command, connection))
        return self.administering(command, lambda command: self._admin(connection, command))

    def _fabrics(self, connection: Connection, sqe: bytes, data: bytes) -> Answer:
        kind, offset = sqe[4], int.from_bytes(sqe[44:48], "little")
        if kind == 1:
            return self.connect(connection, sqe, data)
        made = connection.controller
        assert isinstance(made, Controller)
        if kind == 0 and offset == 0x14:
            made.configuration = int.from_bytes(sqe[48:52], "little")
            return Answer()
        if kind == 4 and offset == 0:
            return Answer(result=127 | 1 << 16 | 2 << 24 | 1 << 37)
        if kind == 4 and offset == 0x1C:
            shut_down = 2 if made.configuration >> 14 & 3 else 0
            return Answer(result=made.configuration & 1 | shut_down << 2)
        return Answer(INVALID_FIELD | DNR)

    def _admin(self, connection: Connection, command: Command) -> Answer | None:
        made = connection.controller
        assert isinstance(made, Controller)
        low = int.from_bytes(command.sqe[40:44], "little")
        match command.opcode:
            case 0x06:  # Identify
                answer = self._identify(low & 0xFF, command)
            case 0x09:  # Set Features; of the number of queues: four
                if low & 0xFF == 0x0B:
                    made.told = int.from_bytes(command.sqe[44:48], "little")
                answer = Answer(result=3 | 3 << 16 if low & 0xFF == 7 else 0)
            case 0x18:  # Keep Alive
                answer = Answer()
            case 0x02:  # Get Log Page
                size = 4 * ((low >> 16) + 1)
                begin = int.from_bytes(command.sqe[48:56], "little")
                assert not self.mdts or size <= 4096 << self.mdts, size
                begin = 0 if self.ignores_offset else begin
                page = self._ana(command.port) if low & 0xFF == 0x0C else b""
                answer = Answer(data=page[begin : begin + size].ljust(size, b"\0"))
            case 0x0C:  # Asynchronous Event Request
                return self._wait(made, connection, int.from_bytes(command.sqe[2:4], "little"))
            case _:
                answer = Answer(0x001 | DNR)
        return answer

    def _wait(self, made: Controller, connection: Connection, cid: int) -> Answer | None:
        with self._lock:
            if made.pending:
                return Answer(result=made.pending.pop(0))
            made.events.append((connection, cid))
        return None

    def _ana(self, port: int) -> bytes:
        states = dict.fromkeys(range(1, self.groups + 1), OPTIMIZED)
        states |= {1: self.states[port], **self.other_groups}
        each = [struct.pack("<IIQB15x", number, 0, 0, state) for number, state in states.items()]
        return struct.pack("<QH6x", self.changes, len(each)) + b"".join(each)

    def _is_inaccessible(self, namespace: Namespace, port: int) -> bool:
        return self.ana and namespace.group == 1 and self.states[port] == INACCESSIBLE

    def _identify(self, cns: int, command: Command) -> Answer:
        page, nsid = bytearray(4096), command.nsid
        if cns == 1:
            page[4:24], page[24:64] = b"model".ljust(20), self.model_name.encode().ljust(40)
            page[76], page[77] = (8 if self.ana else 0), self.mdts
            events = (NAMESPACES if self.tells else 0) | (ANA_CHANGE if self.ana else 0)
            page[92:96] = events.to_bytes(4, "little")
            page[96] = 0x40  # TBKAS
            page[111], page[320] = 1, 1
            page[261] = 4  # log pages in parts
            page[344:352] = struct.pack("<II", self.groups, self.groups)  # ANAGRPMAX, NANAGRPID
            page[512], page[513] = 0x66, 0x44
            page[520], page[522], page[525] = 0x0D, int(self.fused), int(self.cache)
            page[532] = 15  # ACWU
            page[1792:1796] = ((self.in_capsule + 64) // 16).to_bytes(4, "little")
            page[1796] = 1
        elif cns == 2:
            numbers = sorted(self.namespaces)
            page[: 4 * len(numbers)] = struct.pack(f"<{len(numbers)}I", *numbers)
        elif cns == 6:
            if self.limits is None:
                return Answer(INVALID_FIELD | DNR)
            page[1], page[4:8] = self.limits[0], self.limits[1].to_bytes(4, "little")
        elif nsid not in self.namespaces:
            return Answer(INVALID_NAMESPACE | DNR)
        elif cns == 3:
            page[:4], page[4:20] = bytes([3, 16, 0, 0]), self.namespaces[nsid].uuid
        else:
            namespace = self.namespaces[nsid]
            hides = self.hides_sizes and self._is_inaccessible(namespace, command.port)
            page[:8] = page[8:16] = (0 if hides else namespace.blocks).to_bytes(8, "little")
            page[24], page[33] = 1, 9  # THINP; deallocated blocks are zeros, also by Write Zeroes
            page[92:96] = namespace.group.to_bytes(4, "little")
            page[128] = namespace.metadata
            page[130] = namespace.block_size.bit_length() - 1
        return Answer(data=bytes(page))

    def _io(self, command: Command, connection: Connection) -> Answer:
        namespace = self.namespaces.get(command.nsid)
        if namespace is None:
            return Answer(INVALID_NAMESPACE | DNR)
        if self._is_inaccessible(namespace, command.port):
            return Answer(ANA_INACCESSIBLE)
        if command.opcode == FLUSH:
            return Answer()
        size, content = namespace.block_size, namespace.content
        with self._lock:
            if command.opcode == DATASET:
                for at in range(0, len(command.data), 16):
                    blocks, lba = struct.unpack_from("<4xIQ", command.data, at)
                    content[lba * size : (lba + blocks) * size] = bytes(blocks * size)
                return Answer()
            begin, end = command.lba * size, (command.lba + command.blocks) * size
            if command.lba + command.blocks > namespace.blocks:
                return Answer(LBA_RANGE | DNR)
            return self._blocks(command, connection, content, slice(begin, end))

    def _blocks(
        self, command: Command, connection: Connection, content: bytearray, where: slice
    ) -> Answer:
        fused, failed = command.sqe[1] & 3, connection.failed_fused
        connection.failed_fused = False
        if fused == 2 and failed:
            return Answer(FAILED_FUSED)
        match command.opcode:
            case 0x02:
                return Answer(data=bytes(content[where]))
            case 0x01:
                content[where] = command.data
            case 0x08:
                content[where] = bytes(where.stop - where.start)
            case 0x05 if content[where] != command.data:
                connection.failed_fused = fused == 1
                return Answer(COMPARE_FAILURE | DNR)
        return Answer()


def _serve(target: NvmeTarget, sock: socket.socket, port: int) -> None:
    connection = Connection(target, sock, port)
    target.connections.append(connection)
    try:
        connection.serve()
    finally:
        if target.through is not None:
            target.through.wait(60)
        target.connections.remove(connection)
        connection.close(reset=target.through is not None)
