"""The calls that lead to an open connection: who the client is, and what it opens.

Until libvirtd knows who the client is, nothing else is passed on: every connection of ours arrives
there as root, and a call that overtook CONNECT_SET_IDENTITY would run with root's rights.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from plugin.gateway import libvirtdconf, polkit
from plugin.gateway.call import Call, Reply
from plugin.gateway.caller import Caller
from plugin.gateway.errors import Code, Refused, UpstreamError
from plugin.gateway.listen import Listener
from plugin.gateway.messages import read_string
from plugin.gateway.peer import Peer
from plugin.gateway.procs import Proc, name_of
from plugin.gateway.services import Services
from plugin.gateway.wire import REMOTE_PROGRAM, Header, MessageType, Status, WireError
from plugin.gateway.xdr import Reader, Writer

AUTH_POLKIT_TYPE = 2
"""REMOTE_AUTH_POLKIT, an element of AUTH_LIST's result."""

_BEFORE_OPEN = {
    Proc.CONNECT_OPEN,
    Proc.CONNECT_CLOSE,
    Proc.CONNECT_SUPPORTS_FEATURE,
    Proc.AUTH_LIST,
    Proc.AUTH_SASL_INIT,
    Proc.AUTH_SASL_START,
    Proc.AUTH_SASL_STEP,
    Proc.AUTH_POLKIT,
}
_OWN_SERIAL = 0xFFFF_FFFF

_MIGRATION_V3 = 6
"""VIR_DRV_FEATURE_MIGRATION_V3."""

Exchange = Callable[[Header, bytes], Awaitable[Reply]]
"""Makes a call on the client's connection to libvirtd."""


class Admission:
    """What is known of a connection: nothing, who its client is, and then what it opened."""

    def __init__(
        self,
        services: Services,
        listener: Listener,
        peer: Peer,
        caller: Caller,
        exchange: Exchange,
    ) -> None:
        """`exchange` makes calls of our own, before the client can make any other."""
        self._services = services
        self._read_only = listener.read_only
        self._peer = peer
        self._caller = caller
        self._exchange = exchange
        self._authorised = peer.uid == 0 or listener.auth is not libvirtdconf.Auth.POLKIT
        self.is_open = False
        """Whether CONNECT_OPEN succeeded, as the client."""
        self.is_ours = False
        """Whether the connection is to the hypervisor whose domains we serve."""

    @staticmethod
    def expects(header: Header) -> None:
        """Raises WireError for a call that nobody may make before CONNECT_OPEN."""
        if (
            header.program != REMOTE_PROGRAM
            or header.type != MessageType.CALL
            or header.procedure not in _BEFORE_OPEN
        ):
            raise WireError(f"{name_of(header.procedure)} before the connection was opened")

    async def admit(self, call: Call) -> None:
        """Answers one of the calls that lead to an open connection.

        Raises:
            GatewayError: the client may not, or libvirtd does not answer.
            WireError: libvirtd does not take the client's identity.
        """
        procedure = call.header.procedure
        if not self._authorised:
            if procedure == Proc.AUTH_LIST:
                reply = await call.forward()
                types = bytes(Writer().u32(1).u32(AUTH_POLKIT_TYPE))
                await call.respond(reply, types if reply.ok else None)
                return
            if procedure != Proc.AUTH_POLKIT:
                raise Refused(Code.RPC, "authentication required")
            action = polkit.MONITOR if self._read_only else polkit.MANAGE
            await polkit.check(self._peer, action, self._services.config.pkcheck)
            self._authorised = True
            await call.answer(bytes(Writer().i32(1)))
            return
        reply = await call.forward()
        if procedure == Proc.CONNECT_OPEN and reply.ok:
            await self._hand_on_identity()
            await self._check_may_open()
            self._caller.open_arguments = call.payload
            self.is_ours = await self._opens_ours(call.payload)
            self.is_open = True
        await call.respond(reply)

    async def _opens_ours(self, arguments: bytes) -> bool:
        """Whether CONNECT_OPEN opened the configured hypervisor, not another driver of libvirtd's.

        Permission is asked of the driver that the client chose: one that says yes to everybody (as
        test:///default) must not decide about a domain of ours.
        """
        reader = Reader(arguments)
        uri = self._services.config.uri
        if reader.optional(reader.string) == uri:
            return True
        # An alias, none at all, or with parameters: libvirtd says what it opened.
        reply = await self._ask(Proc.CONNECT_GET_URI)
        return reply.ok and read_string(reply.payload).partition("?")[0] == uri

    async def _hand_on_identity(self) -> None:
        """Tells libvirtd whose rights this connection has; without that it is closed."""
        reply = await self._ask(Proc.SET_IDENTITY, self._caller.identity)
        if not reply.ok:
            raise WireError("libvirtd does not take the client's identity")

    async def _check_may_open(self) -> None:
        """Lets libvirtd judge whether the client may open this hypervisor, where it judges calls.

        CONNECT_OPEN came to it as root's. CONNECT_SUPPORTS_FEATURE needs the same right, which is
        connect:getattr, and QEMU's driver is asked about this feature.

        Raises:
            UpstreamError: the client may not, in libvirtd's words.
        """
        if libvirtdconf.judges_calls(self._services.config.libvirtd_conf):
            feature = bytes(Writer().i32(_MIGRATION_V3))
            reply = await self._ask(Proc.CONNECT_SUPPORTS_FEATURE, feature)
            if not reply.ok:
                raise UpstreamError(reply.payload)

    async def _ask(self, procedure: Proc, payload: bytes = b"") -> Reply:
        """Makes a call of our own on the client's connection, before the client can make any."""
        words = (0, REMOTE_PROGRAM, 1, procedure, MessageType.CALL, _OWN_SERIAL, Status.OK)
        return await self._exchange(Header(*words).resized(len(payload)), payload)
