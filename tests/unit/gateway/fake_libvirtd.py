"""A FAKE of libvirtd, for unit tests only: domains as XML texts, scripted refusals.

It speaks the real wire protocol and keeps libvirt's rules where the gateway leans on them: calls
before CONNECT_OPEN are refused, SET_METADATA puts elements into the call's namespace, an identity
counts from CONNECT_SET_IDENTITY on, few calls of a connection are served at a time.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lxml import etree

from plugin.gateway.channel import Channel
from plugin.gateway.errors import Code, Refused
from plugin.gateway.messages import (
    Domain,
    DomainCall,
    TuneQuery,
    TypedParam,
    XmlCall,
    pack_params,
    pack_string,
)
from plugin.gateway.procs import Proc
from plugin.gateway.wire import (
    CALLS,
    KEEPALIVE_PROGRAM,
    MESSAGE_MAX_BYTES,
    Header,
    MessageType,
    Status,
    WireError,
    message,
)
from plugin.gateway.xdr import Reader, Writer

INACTIVE = 2

REQUESTS_MAX = 5
"""Calls of one connection that are served at a time: libvirtd's max_client_requests."""


@dataclass
class Hang:
    """A call that gets no answer any more: the `nth` one of `proc`, done or not before that."""

    proc: int
    nth: int
    done: bool
    reached: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class FakeDomain:
    """A domain: `live` is set while it runs, `config` if it is persistent."""

    name: str
    uuid: bytes
    config: str | None = None
    live: str | None = None
    run: int = 1
    """Its id while it runs."""

    @property
    def ref(self) -> Domain:
        return Domain(self.name, self.uuid, self.run if self.live else -1)


@dataclass
class Connection:
    """One connection from the gateway."""

    channel: Channel
    read_only: bool
    opened: bool = False
    identity: dict[str, object] = field(default_factory=dict)
    calls: list[tuple[int, dict[str, object]]] = field(default_factory=list)
    """Procedure and the identity it ran under."""
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(REQUESTS_MAX))


class FakeLibvirtd:
    """Listens on `path` (read-write) and `path`-ro."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path_ro = path.with_name(path.name + "-ro")
        self.domains: dict[bytes, FakeDomain] = {}
        self.connections: list[Connection] = []
        self.refuse: dict[int, Refused] = {}
        self.delay_s: dict[int, float] = {}
        self.gate: dict[int, asyncio.Event] = {}
        """What the answer to a call that came waits for."""
        self.slow: dict[bytes, asyncio.Event] = {}
        """What the answer with the XML of a domain waits for, by UUID."""
        self.answers: dict[int, Callable[[bytes], bytes]] = {}
        self.dropped_fds: list[int] = []
        self.hang: Hang | None = None
        self.auth_type = 0
        """What AUTH_LIST asks of everybody: a REMOTE_AUTH type; 0: nothing."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets: list[socket.socket] = []

    def add(self, name: str, *, config: str | None = None, live: str | None = None) -> FakeDomain:
        text = config or live
        assert text is not None
        digits = re.search(r"<uuid>(.*?)</uuid>", text)
        assert digits is not None
        uuid = bytes.fromhex(digits[1].replace("-", ""))
        self.domains[uuid] = FakeDomain(name, uuid, config, live)
        return self.domains[uuid]

    def calls(self) -> list[int]:
        """Returns the procedures called, over all connections."""
        return [proc for item in self.connections for proc, _ in item.calls]

    async def start(self) -> None:
        for path, read_only in ((self.path, False), (self.path_ro, True)):
            path.unlink(missing_ok=True)
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(str(path))
            sock.listen(64)
            sock.setblocking(False)
            self._sockets.append(sock)
            self._spawn(self._accept(sock, read_only))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self.connections:
            connection.channel.close()
        self._tasks.clear()
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()
        self.path.unlink(missing_ok=True)
        self.path_ro.unlink(missing_ok=True)

    async def event(self, proc: int, payload: bytes) -> None:
        """Sends an event to every connection that registered for any."""
        for connection in self.connections:
            called = {called for called, _ in connection.calls}
            if Proc.CALLBACK_REGISTER_ANY in called and not connection.channel.closed:
                await connection.channel.send(message(MessageType.MESSAGE, proc, 0, payload))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, sock: socket.socket, read_only: bool) -> None:
        while True:
            peer, _ = await asyncio.get_running_loop().sock_accept(sock)
            connection = Connection(Channel(peer), read_only)
            self.connections.append(connection)
            self._spawn(self._serve(connection))

    async def _serve(self, connection: Connection) -> None:
        channel = connection.channel
        try:
            while (header := await channel.header()) is not None:
                payload, fds = await channel.payload(header, MESSAGE_MAX_BYTES)
                for fd in fds:
                    self.dropped_fds.append(os.fstat(fd).st_size)
                    os.close(fd)
                if header.program == KEEPALIVE_PROGRAM:
                    await channel.send(
                        message(MessageType.MESSAGE, 2, 0, program=KEEPALIVE_PROGRAM)
                    )
                elif header.type in CALLS:
                    self._spawn(self._answer(connection, header, payload))
        except OSError:
            pass
        finally:
            channel.close()

    async def _answer(self, connection: Connection, header: Header, payload: bytes) -> None:
        async with connection.slots:
            await self._served(connection, header, payload)

    async def _wait(self, proc: int, payload: bytes) -> None:
        """Returns when a call may be answered: see `gate` and `slow`."""
        if proc in self.gate:
            await self.gate[proc].wait()
        if proc == Proc.GET_XML_DESC and self.slow:
            uuid = Domain.read(Reader(payload)).uuid
            if uuid in self.slow:
                await self.slow[uuid].wait()

    async def _served(self, connection: Connection, header: Header, payload: bytes) -> None:
        status, body = Status.OK, b""
        proc = header.procedure
        if proc in self.delay_s:
            await asyncio.sleep(self.delay_s[proc])
        connection.calls.append((proc, dict(connection.identity)))
        await self._wait(proc, payload)
        if header.type == MessageType.CALL_WITH_FDS:
            payload = payload[4:]
        hang = self.hang
        if hang is not None and hang.proc == proc:
            hang.nth -= 1
            if hang.nth == 0:
                if hang.done:
                    self._call(connection, proc, payload)
                hang.reached.set()
                await asyncio.get_running_loop().create_future()
        try:
            if proc in self.refuse:
                raise self.refuse[proc]
            if proc in self.answers:
                body = self.answers[proc](payload)
            else:
                body = self._call(connection, proc, payload)
        except Refused as error:
            status, body = Status.ERROR, error.payload()
        except (WireError, etree.XMLSyntaxError) as error:
            status, body = Status.ERROR, Refused(Code.RPC, str(error)).payload()
        with suppress(OSError):
            await self._send(connection, header, status, body)

    @staticmethod
    async def _send(connection: Connection, header: Header, status: Status, body: bytes) -> None:
        await connection.channel.send(
            message(
                MessageType.REPLY,
                header.procedure,
                header.serial,
                body,
                status=status,
                program=header.program,
            )
        )

    # The procedures

    def _call(self, connection: Connection, proc: int, payload: bytes) -> bytes:  # noqa: PLR0911, PLR0912, PLR0915
        if proc == Proc.AUTH_LIST:
            return bytes(Writer().u32(1).u32(self.auth_type))
        if proc == Proc.CONNECT_SUPPORTS_FEATURE:
            return bytes(Writer().i32(1))
        if proc == Proc.CONNECT_OPEN:
            connection.opened = True
            return b""
        if not connection.opened:
            raise Refused(Code.INTERNAL_ERROR, "connection not open")
        if proc == Proc.SET_IDENTITY:
            reader = Reader(payload)
            params = reader.array(lambda: TypedParam.read(reader), 20)
            connection.identity = {param.field: param.value for param in params}
            return b""
        if proc in (Proc.CALLBACK_REGISTER_ANY, Proc.EVENT_REGISTER_ANY):
            return bytes(Writer().i32(7))
        if proc == Proc.CALLBACK_DEREGISTER_ANY:
            return b""
        if proc == Proc.LIST_ALL_DOMAINS:
            writer = Writer()
            writer.array(list(self.domains.values()), lambda item: item.ref.write(writer))
            return bytes(writer.u32(len(self.domains)))
        if proc == Proc.LOOKUP_BY_UUID:
            return bytes(self._domain(payload[:16]).ref.write(Writer()))
        if proc == Proc.LOOKUP_BY_NAME:
            name = Reader(payload).string()
            for item in self.domains.values():
                if item.name == name:
                    return bytes(item.ref.write(Writer()))
            raise Refused(Code.NO_DOMAIN, "no domain")
        if proc in (Proc.DEFINE_XML, Proc.DEFINE_XML_FLAGS, Proc.CREATE_XML):
            self._writing(connection)
            xml = XmlCall.read(payload, flags=proc != Proc.DEFINE_XML).xml
            return self._define(xml, live=proc == Proc.CREATE_XML)
        reader = Reader(payload)
        dom = self._domain(Domain.read(reader).uuid)
        if proc == Proc.GET_XML_DESC:
            flags = reader.u32()
            text = dom.config if flags & INACTIVE and dom.config else dom.live or dom.config
            return pack_string(text or "")
        if proc == Proc.IS_ACTIVE:
            return bytes(Writer().i32(dom.live is not None))
        if proc == Proc.IS_PERSISTENT:
            return bytes(Writer().i32(dom.config is not None))
        if proc == Proc.GET_METADATA:
            return self._metadata(dom, reader)
        if proc == Proc.SET_METADATA:
            self._writing(connection)
            return self._set_metadata(dom, reader)
        if proc in (Proc.CREATE, Proc.CREATE_WITH_FLAGS):
            self._writing(connection)
            assert dom.config is not None
            dom.live = dom.config.replace("<domain ", "<domain id='1' ", 1)
            return b"" if proc == Proc.CREATE else bytes(dom.ref.write(Writer()))
        if proc == Proc.SNAPSHOT_CREATE_XML:
            self._writing(connection)
            raise Refused(Code.INVALID_ARG, "unsupported flags (0x40000000) in function f")
        if proc == Proc.BLOCK_RESIZE:
            self._writing(connection)
            if dom.live is None:
                raise Refused(Code.OPERATION_INVALID, "domain is not running")
            raise Refused(Code.INVALID_ARG, "disk was not found in the domain config")
        if proc == Proc.SET_BLOCK_THRESHOLD:
            self._writing(connection)
            raise Refused(Code.INVALID_ARG, "failed to find disk")
        if proc == Proc.GET_BLOCK_IO_TUNE:
            asked = TuneQuery.read(payload)
            self._side(dom, asked.flags)
            if asked.count == 0:  # of any disk, or none
                return pack_params([]) + bytes(Writer().i32(20))
            raise Refused(Code.INVALID_ARG, "disk was not found in the domain config")
        if proc in (Proc.ATTACH_DEVICE_FLAGS, Proc.DETACH_DEVICE_FLAGS):
            self._writing(connection)
            return b""
        if proc == Proc.GET_BLOCK_INFO:
            DomainCall.read(payload, text=True, flags=True)
            return bytes(Writer().u64(1).u64(2).u64(3))
        raise Refused(Code.RPC, f"unknown procedure: {proc}")

    def _writing(self, connection: Connection) -> None:
        if connection.read_only:
            raise Refused(Code.OPERATION_DENIED, "read only access prevents this")

    def _domain(self, uuid: bytes) -> FakeDomain:
        if uuid not in self.domains:
            raise Refused(Code.NO_DOMAIN, "Domain not found")
        return self.domains[uuid]

    def _define(self, xml: str, *, live: bool) -> bytes:
        root = etree.fromstring(xml.encode())
        name, digits = root.findtext("name"), root.findtext("uuid")
        assert name and digits
        uuid = bytes.fromhex(digits.replace("-", ""))
        dom = self.domains.setdefault(uuid, FakeDomain(name, uuid))
        if live:
            dom.live = xml.replace("<domain ", "<domain id='1' ", 1)
        else:
            dom.config = xml
        return bytes(dom.ref.write(Writer()))

    @staticmethod
    def _side(dom: FakeDomain, flags: int) -> list[str]:
        """Returns the names of the sides that flags mean: live 1, config 2, current 0."""
        if not flags & 3:
            return ["live" if dom.live else "config"]
        sides = []
        if flags & 1:
            if dom.live is None:
                raise Refused(Code.OPERATION_INVALID, "domain is not running")
            sides.append("live")
        if flags & 2:
            if dom.config is None:
                raise Refused(
                    Code.OPERATION_INVALID, "transient domains do not have any persistent config"
                )
            sides.append("config")
        return sides

    def _metadata(self, dom: FakeDomain, reader: Reader) -> bytes:
        reader.i32()
        uri = reader.optional(reader.string)
        (side,) = self._side(dom, reader.u32())
        root = etree.fromstring(getattr(dom, side).encode())
        for child in root.iterfind("metadata/*"):
            if etree.QName(child).namespace == uri:
                return pack_string(etree.tostring(child, encoding="unicode", with_tail=False))
        raise Refused(Code.NO_DOMAIN_METADATA, "Requested metadata element is not present")

    def _set_metadata(self, dom: FakeDomain, reader: Reader) -> bytes:
        reader.i32()
        text, key, uri = (reader.optional(reader.string) for _ in range(3))
        for side in self._side(dom, reader.u32()):
            root = etree.fromstring(getattr(dom, side).encode())
            metadata = root.find("metadata")
            if metadata is None:
                metadata = etree.SubElement(root, "metadata")
            for child in list(metadata):
                if etree.QName(child).namespace == uri:
                    metadata.remove(child)
            if text is not None:
                assert key is not None and f"xmlns:{key}" not in text
                metadata.append(_in_namespace(etree.fromstring(text.encode()), key, uri or ""))
            setattr(dom, side, etree.tostring(root, encoding="unicode"))
        return b""


def _in_namespace(element: etree._Element, key: str, uri: str) -> etree._Element:
    """Returns a copy as virXMLInjectNamespace makes it."""
    made = etree.Element(f"{{{uri}}}{etree.QName(element).localname}", nsmap={key: uri})
    made.text, made.tail = element.text, element.tail
    for name, value in element.attrib.items():
        made.set(name, value)
    for child in element:
        made.append(_in_namespace(child, key, uri))
    return made
