"""A small libvirt client: the calls that the gateway makes itself.

Each client that needs it gets a second connection to libvirtd of its own, opened under the
client's identity and on the same kind of socket (read-write or read-only). So libvirtd judges our
calls exactly as the client's, a client that does not read cannot hold them up, and one that dies
in mid-call does not take away what is needed to finish or undo the call.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from plugin.gateway import sasl
from plugin.gateway.channel import Channel
from plugin.gateway.errors import UpstreamError, UpstreamGone
from plugin.gateway.messages import Domain, DomainCall, read_string
from plugin.gateway.procs import QEMU_AGENT_COMMAND, Proc, name_of
from plugin.gateway.wire import (
    MESSAGE_MAX_BYTES,
    QEMU_PROGRAM,
    REMOTE_PROGRAM,
    REPLIES,
    Header,
    MessageType,
    Status,
    WireError,
    message,
)
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain.translate import NAMESPACE, PREFIX

CONNECT_S = 5.0
"""How long a restarting libvirtd is waited for, seconds."""

CALL_S = 90.0
"""How long libvirtd may take for one of our calls (it waits 30 s for a busy domain), seconds."""

AUTH_SASL = 1
"""REMOTE_AUTH_SASL, an element of AUTH_LIST's result."""
AUTH_TYPES_MAX = 20
"""REMOTE_AUTH_TYPE_LIST_MAX."""

AFFECT_LIVE = 1
AFFECT_CONFIG = 2
XML_SECURE = 1
XML_INACTIVE = 2
XML_MIGRATABLE = 8

RUNNING = 1
PAUSED = 3
"""virDomainState."""
PAUSED_BY_USER = 1
PAUSED_BY_IO_ERROR = 5
"""virDomainPausedReason."""

_METADATA_ELEMENT = 2
_EVENTS = {
    Proc.CALLBACK_LIFECYCLE: 0,
    Proc.CALLBACK_DEVICE_REMOVED: 15,
    Proc.CALLBACK_METADATA_CHANGE: 23,
}
"""virDomainEventID."""

Events = Mapping[int, Callable[[bytes], None]]
"""By procedure of the message, one of _EVENTS: what takes its payload."""

_log = structlog.get_logger(__name__)


async def connect(path: Path, deadline_s: float = CONNECT_S) -> socket.socket:
    """Connects to libvirtd's socket, waiting for one that is just being restarted.

    Raises:
        UpstreamGone: nothing listens there within `deadline_s` seconds.
    """
    loop = asyncio.get_running_loop()
    end = time.monotonic() + deadline_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, str(path))
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            sock.close()
            if time.monotonic() > end:
                raise UpstreamGone(f"libvirtd does not listen on {path}") from error
            await asyncio.sleep(0.05)
        except OSError as error:
            sock.close()
            raise UpstreamGone(f"libvirtd's socket {path}: {error.strerror}") from error
        except BaseException:
            sock.close()
            raise
        else:
            return sock


def open_arguments(uri: str | None) -> bytes:
    """Returns the arguments of CONNECT_OPEN; without a URI libvirtd opens its default."""
    writer = Writer()
    return bytes(writer.optional(uri, writer.string).u32(0))


class Upstream:
    """A connection to libvirtd on which we call; replies find their callers by serial."""

    def __init__(self, sock: socket.socket) -> None:
        self._channel = Channel(sock)
        self._events: Events = {}
        self._lost: Callable[[], None] | None = None
        self._serials = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(
        cls, path: Path, arguments: bytes, identity: bytes | None, auth_conf: Path
    ) -> Upstream:
        """Connects to libvirtd, opens its hypervisor and hands over the identity to act under.

        `arguments` are those of CONNECT_OPEN: see `open_arguments`. `auth_conf` says who we are
        where libvirtd asks: see plugin.gateway.sasl.

        Raises:
            UpstreamGone: no libvirtd.
            UpstreamError: it refuses.
            Refused: it asks for what the gateway cannot answer.
        """
        upstream = cls(await connect(path))
        try:
            # AUTH_LIST is what makes libvirtd take a local root client as authenticated.
            reader = Reader(await upstream.call(Proc.AUTH_LIST))
            if AUTH_SASL in reader.array(reader.u32, AUTH_TYPES_MAX):
                await sasl.authenticate(upstream.call, auth_conf)
            await upstream.call(Proc.CONNECT_OPEN, arguments)
            if identity is not None:
                await upstream.call(Proc.SET_IDENTITY, identity)
        except BaseException:
            await upstream.close()
            raise
        return upstream

    @property
    def alive(self) -> bool:
        """Whether calls can still be made."""
        return not self._reader.done()

    async def close(self) -> None:
        """Closes the connection; calls still waiting fail."""
        self._reader.cancel()
        await asyncio.wait([self._reader])  # where we are cancelled ourselves, that is not lost
        self._channel.close()
        self._fail("the gateway closed its connection to libvirtd")

    async def call(
        self,
        proc: int,
        payload: bytes = b"",
        deadline_s: float = CALL_S,
        *,
        program: int = REMOTE_PROGRAM,
    ) -> bytes:
        """Makes one call, of REMOTE_PROGRAM or QEMU_PROGRAM, and returns the reply's payload.

        Raises:
            UpstreamError: libvirtd's error.
            UpstreamGone: the connection ended, or no answer within `deadline_s` seconds.
        """
        serial = next(self._serials)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[serial] = reply
        try:
            if not self.alive:
                raise ConnectionResetError
            await self._channel.send(
                message(MessageType.CALL, proc, serial, payload, program=program)
            )
            async with asyncio.timeout(deadline_s):
                return await reply
        except TimeoutError as error:
            raise UpstreamGone(f"libvirtd does not answer {name_of(proc)}") from error
        except OSError as error:
            raise UpstreamGone("libvirtd closed the connection") from error
        finally:
            self._waiting.pop(serial, None)

    async def _read(self) -> None:
        try:
            while (header := await self._channel.header()) is not None:
                reply = self._waiting.get(header.serial) if self._is_reply(header) else None
                event = self._events.get(header.procedure) if self._is_event(header) else None
                if event is not None:
                    payload, _ = await self._channel.payload(header, MESSAGE_MAX_BYTES)
                    event(payload)
                    continue
                if reply is None or reply.done():
                    await self._channel.discard(header)
                    continue
                payload, _ = await self._channel.payload(header, MESSAGE_MAX_BYTES)
                if header.status == Status.OK:
                    reply.set_result(payload)
                else:
                    reply.set_exception(UpstreamError(payload))
        except (OSError, WireError) as error:
            _log.warning("libvirtd's end broke", error=str(error))
        finally:
            self._fail("libvirtd closed the connection")
            if self._lost is not None:
                self._lost()

    @staticmethod
    def _is_reply(header: Header) -> bool:
        return header.program in (REMOTE_PROGRAM, QEMU_PROGRAM) and header.type in REPLIES

    @staticmethod
    def _is_event(header: Header) -> bool:
        return (header.program, header.type) == (REMOTE_PROGRAM, MessageType.MESSAGE)

    def _fail(self, text: str) -> None:
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(UpstreamGone(text))

    # The calls, by name

    async def watch(self, events: Events, lost: Callable[[], None]) -> None:
        """Has each event of all domains taken, and `lost` called when the connection ends."""
        self._events, self._lost = events, lost
        for proc in events:
            args = bytes(Writer().i32(_EVENTS[Proc(proc)]).u32(0))  # of all domains
            await self.call(Proc.CALLBACK_REGISTER_ANY, args)

    async def xml(self, dom: Domain, flags: int) -> str:
        """Returns the domain's XML (needs domain:read, with XML_SECURE read_secure)."""
        args = DomainCall(dom, flags=flags).pack(flags=True)
        return read_string(await self.call(Proc.GET_XML_DESC, args))

    async def metadata(self, dom: Domain, flags: int) -> str | None:
        """Returns our metadata element, or None (needs domain:read)."""
        args = dom.write(Writer()).i32(_METADATA_ELEMENT)
        args.optional(NAMESPACE, args.string).u32(flags)
        try:
            return read_string(await self.call(Proc.GET_METADATA, bytes(args)))
        except UpstreamError as error:
            if error.is_no_metadata:
                return None
            raise

    async def set_metadata(
        self, dom: Domain, xml: str | None, flags: int, *, uri: str = NAMESPACE
    ) -> None:
        """Sets our metadata element, or removes it (needs domain:write, for config also save)."""
        args = dom.write(Writer()).i32(_METADATA_ELEMENT)
        args.optional(xml, args.string).optional(PREFIX, args.string).optional(uri, args.string)
        await self.call(Proc.SET_METADATA, bytes(args.u32(flags)))

    async def attach(self, dom: Domain, device_xml: str) -> None:
        """Attaches a device to a running domain (needs domain:write)."""
        args = DomainCall(dom, device_xml, AFFECT_LIVE).pack(text=True, flags=True)
        await self.call(Proc.ATTACH_DEVICE_FLAGS, args)

    async def detach(self, dom: Domain, device_xml: str) -> None:
        """Has a running guest let a device go, for which libvirtd waits some seconds.

        Needs domain:write. It may be there still, where the guest takes longer.
        """
        args = DomainCall(dom, device_xml, AFFECT_LIVE).pack(text=True, flags=True)
        await self.call(Proc.DETACH_DEVICE_FLAGS, args)

    async def define(self, xml: str) -> Domain:
        """Defines a persistent domain."""
        reply = await self.call(Proc.DEFINE_XML, bytes(Writer().string(xml)))
        return Domain.read(Reader(reply))

    async def lookup(self, uuid: bytes) -> Domain:
        """Returns the domain with this UUID (needs domain:getattr)."""
        reply = await self.call(Proc.LOOKUP_BY_UUID, bytes(Writer().fixed(uuid)))
        return Domain.read(Reader(reply))

    async def lookup_name(self, name: str) -> Domain:
        """Returns the domain with this name (needs domain:getattr)."""
        reply = await self.call(Proc.LOOKUP_BY_NAME, bytes(Writer().string(name)))
        return Domain.read(Reader(reply))

    async def ask_agent(self, dom: Domain, command: str, timeout_s: int) -> str:
        """Has the guest's agent carry out a command and returns its answer (needs domain:write)."""
        args = dom.write(Writer()).string(command).i32(timeout_s).u32(0)
        reply = Reader(await self.call(QEMU_AGENT_COMMAND, bytes(args), program=QEMU_PROGRAM))
        return reply.optional(reply.string) or ""

    async def persistent(self, dom: Domain) -> bool:
        """Whether the domain has a persistent definition."""
        reply = await self.call(Proc.IS_PERSISTENT, bytes(dom.write(Writer())))
        return Reader(reply).i32() != 0

    async def active(self, dom: Domain) -> bool:
        """Whether the domain runs."""
        reply = await self.call(Proc.IS_ACTIVE, bytes(dom.write(Writer())))
        return Reader(reply).i32() != 0

    async def state(self, dom: Domain) -> tuple[int, int]:
        """Returns the domain's virDomainState and its reason (needs domain:read)."""
        reply = Reader(await self.call(Proc.GET_STATE, DomainCall(dom).pack(flags=True)))
        return reply.i32(), reply.i32()

    async def suspend(self, dom: Domain) -> None:
        """Pauses a domain that runs (needs domain:suspend)."""
        await self.call(Proc.SUSPEND, bytes(dom.write(Writer())))

    async def resume(self, dom: Domain) -> None:
        """Has a paused domain go on (needs domain:suspend)."""
        await self.call(Proc.RESUME, bytes(dom.write(Writer())))

    async def destroy(self, dom: Domain) -> None:
        """Ends a domain that runs, at once (needs domain:stop)."""
        await self.call(Proc.DESTROY, bytes(dom.write(Writer())))

    async def domains(self, flags: int) -> list[Domain]:
        """Lists domains; `flags` are virConnectListAllDomainsFlags, 0 for all."""
        reply = Reader(await self.call(Proc.LIST_ALL_DOMAINS, bytes(Writer().i32(1).u32(flags))))
        return reply.array(lambda: Domain.read(reply), 16_384)
