"""One client's connection and its counterpart to libvirtd.

Two pumps run beside each other: calls towards libvirtd, replies and events back. A message nobody
looks into passes in the event loop's callback, by its header alone, and so does a reply that shows
a domain's XML, unless it is to be translated first (plugin.gateway.xmlcache), or statistics that
have none of our domains (plugin.gateway.domstats). A call of plugin.gateway.procedures with a
handler is read whole and becomes a task of its own (libvirtd too works on several calls of a client
at a time); the pump goes on meanwhile.

Until libvirtd knows who the client is, nothing but what leads to CONNECT_OPEN is passed on
(plugin.gateway.admission).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import structlog

from plugin.gateway.admission import Admission
from plugin.gateway.budget import Grant
from plugin.gateway.call import Call, Handler, Reply
from plugin.gateway.caller import Caller
from plugin.gateway.channel import Channel, Pass, Route
from plugin.gateway.errors import (
    Code,
    GatewayError,
    UpstreamGone,
    error_payload,
)
from plugin.gateway.eventfilter import EventFilter
from plugin.gateway.events import (
    Announced,
    Subscriptions,
    is_event_of_metadata,
    is_lifecycle,
    is_ours,
    of_io_error,
)
from plugin.gateway.listen import Listener
from plugin.gateway.messages import SMALL_CALL_MAX_BYTES, XML_CALL_MAX_BYTES
from plugin.gateway.outgoing import PeerGone
from plugin.gateway.peer import peer_of
from plugin.gateway.procedures import PROCEDURES, SHOWING, Access, Procedure
from plugin.gateway.procs import Proc, name_of
from plugin.gateway.services import Services
from plugin.gateway.storage.events import PoolEvent
from plugin.gateway.storage.rights import pool_action, pool_details
from plugin.gateway.streams import STREAM_MAX_BYTES, STREAMS, Stream
from plugin.gateway.upstream import connect
from plugin.gateway.wire import (
    CALLS,
    KEEPALIVE_PROGRAM,
    MESSAGE_MAX_BYTES,
    REMOTE_PROGRAM,
    REPLIES,
    Header,
    Status,
    WireError,
)
from pydataplane.domain.errors import TranslateError

CALLS_MAX = 32
"""Calls of one client that the gateway works on at a time, waiting for libvirtd or each other.

With one more it stops reading from the client, keepalive included; libvirtd does so at 5.
"""

SHOWN_MAX = 8
"""Replies of one client that are translated at a time; with one more no further one is read."""

STALL_S = 60.0
"""How long a client may take nothing of what is sent to it, or send a long call, seconds.

Replies wait behind it, and with them the calls that hold a domain's lock. libvirtd's own keepalive
gives up after half of that.
"""

EVENTS_MAX = 1024
"""Events of ours waiting for a client that does not read; with one more it is disconnected."""

FINISH_S = 60.0
"""How long calls begun are given to finish after their client or libvirtd went away, seconds."""


class Session:
    """A client, from accept to close."""

    def __init__(self, services: Services, listener: Listener, sock: socket.socket) -> None:
        """Serves the client behind `sock`, which came to `listener`.

        Raises:
            OSError: it is gone again.
        """
        self._services = services
        self.read_only = listener.read_only
        self.peer = peer_of(sock)
        self.client = Channel(sock, STALL_S)
        self.subscriptions = Subscriptions()
        self.event_filter = EventFilter(self.subscriptions)
        self._listener = listener
        self._upstream: Channel | None = None
        self._caller = Caller(self.peer, listener.upstream, services.config)
        self._parser = services.parsers.of_client(self.peer.uid)
        self._admission = Admission(services, listener, self.peer, self._caller, self.exchange)
        self._stopping = asyncio.Event()
        self._awaited: dict[tuple[int, int], asyncio.Future[Reply]] = {}
        self._streams: dict[tuple[int, int], Stream] = {}
        self._slots = asyncio.Semaphore(CALLS_MAX)
        self._memory = services.budget.share(self.peer.uid)
        self._showing = asyncio.Semaphore(SHOWN_MAX)
        self._to_client = Pass(self.client)
        self._shown = {
            number: Pass(self.client, showing(services).at_once)
            for number, showing in SHOWING.items()
        }
        self._tasks: set[asyncio.Task[None]] = set()
        self._changes: asyncio.Queue[Announced] = asyncio.Queue(EVENTS_MAX)
        self.log = structlog.get_logger(__name__).bind(pid=self.peer.pid, uid=self.peer.uid)

    async def run(self) -> None:
        """Serves the client until it or libvirtd goes away, and finishes what was begun."""
        pumps: list[asyncio.Task[Any]] = []
        try:
            if not await self._speaks():
                return  # a client that says nothing takes no connection of libvirtd's
            await self._caller.identify()
            try:
                self._upstream = Channel(await connect(self._listener.upstream))
            except UpstreamGone as error:
                await self._turn_away(error)
                return
            pumps = [
                asyncio.create_task(self._pump_calls(self._upstream)),
                asyncio.create_task(self._pump_replies(self._upstream)),
                asyncio.create_task(self._pump_events()),
            ]
            stopping = asyncio.create_task(self._stopping.wait())
            pumps.append(stopping)
            await asyncio.wait((*pumps[:2], stopping), return_when=asyncio.FIRST_COMPLETED)
            if not pumps[0].cancel():
                self.client.close()  # the client left, or is to be
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=FINISH_S)
        finally:
            for task in (*pumps, *self._tasks):
                task.cancel()
            for outcome in await asyncio.gather(*pumps, *self._tasks, return_exceptions=True):
                self._log_end(outcome)
            self.client.close()
            if self._upstream is not None:
                self._upstream.close()
            await self._caller.close()

    async def _speaks(self) -> bool:
        """Waits for the client's first byte; False if it leaves, or the gateway stops, before."""
        waits = [
            asyncio.create_task(self.client.speaks()),
            asyncio.create_task(self._stopping.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return not self._stopping.is_set() and waits[0].result()
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def end(self) -> None:
        """Makes `run` come to its end: calls begun are answered, no further ones are read."""
        self._stopping.set()

    def _log_end(self, outcome: BaseException | None) -> None:
        if isinstance(outcome, WireError):
            self.log.warning("client disconnected: it broke the protocol", error=str(outcome))
        elif isinstance(outcome, Exception) and not isinstance(outcome, OSError):
            self.log.error("a connection ended by a defect", exc_info=outcome)

    async def _turn_away(self, error: GatewayError) -> None:
        """Answers the client's first call with the reason, so that it can show it."""
        with suppress(TimeoutError, OSError, WireError):
            header = await asyncio.wait_for(self.client.header(), 2.0)
            if header is not None and header.type in CALLS:
                payload, descriptors = await self.client.payload(header, XML_CALL_MAX_BYTES)
                call = self._call(header, payload, descriptors)
                call.drop()
                await call.answer(error.payload(), status=Status.ERROR)
        self.log.warning("no libvirtd", error=str(error))

    # Calls

    async def _pump_calls(self, upstream: Channel) -> None:
        to_libvirtd = Pass(upstream)

        def route(header: Header) -> Pass | None:
            if header.program != KEEPALIVE_PROGRAM and not self._admission.is_open:
                return None
            if self._stream_of(header) is not None:
                return None
            return to_libvirtd if self._procedure(header) is None else None

        try:
            await self._take_calls(route)
        finally:
            for stream in self._streams.values():
                stream.end()

    async def _take_calls(self, route: Route) -> None:
        while (header := await self.client.next(route)) is not None:
            stream = self._stream_of(header)
            if stream is not None:
                grant, payload, _ = await self._read(header, STREAM_MAX_BYTES)
                try:
                    await stream.put(header, payload)
                finally:
                    grant.release()
                continue
            procedure = self._procedure(header) if self._admission.is_open else None
            if procedure is None:
                await self._before_open(header)
                continue
            await self._slots.acquire()
            grant, call = await self._read_call(header, procedure)
            task = self._spawn(self._handle(procedure.handler, call))
            task.add_done_callback(lambda _, grant=grant: grant.release())  # type: ignore[misc]

    async def _read_call(self, header: Header, procedure: Procedure) -> tuple[Grant, Call]:
        """Reads a call whole, when there is room for it; raises WireError as `_read`."""
        grant, payload, descriptors = await self._read(header, procedure.max_bytes)
        return grant, self._call(header, payload, descriptors)

    async def _read(self, header: Header, max_bytes: int) -> tuple[Grant, bytes, list[int]]:
        """Reads a message's payload and descriptors, when there is room for them.

        Raises:
            WireError: it is longer than `max_bytes`, or does not come to its end for STALL_S.
        """
        if header.payload_bytes > max_bytes:
            raise WireError(f"{name_of(header.procedure)} with {header.payload_bytes} bytes")
        grant = await self._memory.take(header.payload_bytes)
        try:
            # Others may wait for this room.
            async with asyncio.timeout(STALL_S if grant.drawn else None):
                payload, descriptors = await self.client.payload(header, max_bytes)
        except BaseException as error:
            grant.release()
            if isinstance(error, TimeoutError):
                text = f"{name_of(header.procedure)} is not there after {STALL_S:g} s"
                raise WireError(text) from error
            raise
        return grant, payload, descriptors

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _call(self, header: Header, payload: bytes, descriptors: list[int]) -> Call:
        given = (self, self._services, self._caller, self.subscriptions, self._parser)
        return Call(*given, header, payload, descriptors)

    def _stream_of(self, header: Header) -> Stream | None:
        """Returns the stream of a call of ours that a message belongs to."""
        if header.type not in STREAMS or header.program != REMOTE_PROGRAM:
            return None
        return self._streams.get((header.serial, header.procedure))

    def open_stream(self, header: Header) -> Stream:
        """Returns the stream of a call; what comes for it goes there from now on.

        Raises:
            WireError: a call with this serial has one.
        """
        key = (header.serial, header.procedure)
        if key in self._streams:
            raise WireError(f"serial {header.serial} is in use")
        self._streams[key] = Stream(header)
        return self._streams[key]

    def close_stream(self, header: Header) -> None:
        """Ends that."""
        stream = self._streams.pop((header.serial, header.procedure), None)
        if stream is not None:
            stream.end()

    def _procedure(self, header: Header) -> Procedure | None:
        """Returns what we do with a call; None: libvirtd alone answers it."""
        if header.program != REMOTE_PROGRAM or header.type not in CALLS:
            return None
        # SET_IDENTITY is of every driver.
        if not self._admission.is_ours and header.procedure != Proc.SET_IDENTITY:
            return None
        procedure = PROCEDURES.get(header.procedure)
        if procedure is not None and procedure.of_paused and not self._services.paused:
            return None
        if procedure is not None and procedure.only_bytes not in (None, header.payload_bytes):
            return None
        if self.read_only and procedure is not None and procedure.access is Access.WRITE:
            return None  # libvirtd refuses it in its own words
        return procedure

    async def _handle(self, handler: Handler, call: Call) -> None:
        """Runs a handler; whatever it raises becomes the call's error."""
        refusal: bytes | None = None
        try:
            await handler(call)
        except GatewayError as error:
            refusal = error.payload()
        except TranslateError as error:
            refusal = error_payload(error.libvirt.code, error.message, error.libvirt.domain)
        except WireError as error:
            refusal = error_payload(Code.RPC, f"{name_of(call.header.procedure)}: {error}")
        except OSError:
            pass  # the client is gone
        except Exception:
            self.log.exception("a call failed by a defect", call=name_of(call.header.procedure))
            refusal = error_payload(Code.INTERNAL_ERROR, "virtlun-gateway failed: see its log")
        finally:
            call.drop()
            self._slots.release()
        if refusal is not None:
            with suppress(OSError):
                await call.answer(refusal, status=Status.ERROR)

    # Before CONNECT_OPEN: the client waits, nothing overtakes

    async def _before_open(self, header: Header) -> None:
        self._admission.expects(header)
        payload, _ = await self.client.payload(header, SMALL_CALL_MAX_BYTES)
        call = self._call(header, payload, [])
        try:
            await self._admission.admit(call)
        except GatewayError as error:
            await call.answer(error.payload(), status=Status.ERROR)

    # Replies

    async def exchange(
        self, header: Header, payload: bytes, descriptors: tuple[int, ...] = ()
    ) -> Reply:
        """Sends a call on the client's connection to libvirtd and returns the reply.

        Raises:
            UpstreamGone: libvirtd closed the connection first.
            WireError: another call with this serial is under way.
        """
        key = (header.serial, header.procedure)
        if self._upstream is None or key in self._awaited:
            for descriptor in descriptors:
                os.close(descriptor)
            raise WireError(f"serial {header.serial} is in use")
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._awaited[key] = reply
        try:
            body = header.resized(len(payload)).pack() + payload
            await self._upstream.send(body, descriptors)
            return await reply
        except OSError as error:
            raise UpstreamGone("libvirtd closed the connection") from error
        finally:
            del self._awaited[key]

    async def send(self, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Sends a message to the client; raises OSError if it is gone."""
        await self.client.send(data, descriptors)

    def _route_reply(self, header: Header) -> Pass | None:
        """Says where a message of libvirtd's goes; None: to the client, but by the pump's task."""
        if self.client.closed:
            return None
        if header.program == REMOTE_PROGRAM:
            if header.type in REPLIES:
                if (header.serial, header.procedure) in self._awaited:
                    return None
                if self._admission.is_ours and header.status == Status.OK:
                    return self._shown.get(header.procedure, self._to_client)
            elif (
                is_event_of_metadata(header)
                or self.event_filter.may_match(header)
                or (self._services.paused and is_lifecycle(header))
            ):
                return None
        return self._to_client

    async def _pump_replies(self, upstream: Channel) -> None:
        try:
            while True:
                try:
                    header = await upstream.next(self._route_reply)
                    if header is None:
                        return
                    await self._take_reply(header, upstream)
                except PeerGone:  # the client left: what was begun goes on
                    continue
        finally:
            for waiting in self._awaited.values():
                if not waiting.done():
                    waiting.set_exception(UpstreamGone("libvirtd closed the connection"))

    async def _take_reply(self, header: Header, upstream: Channel) -> None:
        """Takes a message of libvirtd's that does not pass by its header alone."""
        reply = self._awaited.get((header.serial, header.procedure))
        is_reply = header.program == REMOTE_PROGRAM and header.type in REPLIES
        if is_event_of_metadata(header):
            await self._pass_event(header, upstream, is_ours)
        elif self.event_filter.may_match(header):
            await self._pass_event(header, upstream, self.event_filter.consume)
        elif self._services.paused and is_lifecycle(header):
            await self._pass_event(header, upstream, lambda _: False)
        elif is_reply and reply is not None and not reply.done():
            payload, descriptors = await upstream.payload(header, MESSAGE_MAX_BYTES)
            reply.set_result(Reply(header, payload, tuple(descriptors)))
        elif is_reply and (way := self._route_reply(header)) is not None and way.look is not None:
            payload, descriptors = await upstream.payload(header, MESSAGE_MAX_BYTES)
            await self._showing.acquire()
            self._spawn(self._show(Reply(header, payload, tuple(descriptors))))
        else:
            await upstream.relay(header, None if self.client.closed else self.client)

    async def _show(self, reply: Reply) -> None:
        """Sends a reply of a procedure of SHOWING as the client is to see it."""
        try:
            header, shown = await self._as_shown(reply)
            with suppress(OSError):
                await self.client.send(header.resized(len(shown)).pack() + shown, reply.descriptors)
        finally:
            self._showing.release()

    async def _as_shown(self, reply: Reply) -> tuple[Header, bytes]:
        """Returns what the client is to see of a reply; an error where that cannot be told."""
        header = reply.header
        try:
            return header, await SHOWING[header.procedure](self._services).translated(reply.payload)
        except GatewayError as error:
            payload = error.payload()
        except WireError as error:
            payload = error_payload(Code.RPC, f"reply to {name_of(header.procedure)}: {error}")
        return header._replace(status=Status.ERROR), payload

    async def _pass_event(
        self, header: Header, upstream: Channel, is_own: Callable[[bytes], bool]
    ) -> None:
        """Passes an event on, unless it is of a change of our own.

        One that a domain was paused says why, where I/O errors were the reason.
        """
        payload, _ = await upstream.payload(header, MESSAGE_MAX_BYTES)
        if not is_own(payload):
            if is_lifecycle(header):
                payload = of_io_error(header, payload, self._services.paused)
            with suppress(OSError):
                await self.client.send(header.pack() + payload)

    # Events

    def hears(self, change: Announced) -> bool:
        """Whether the client registered for an event."""
        admission = self._admission
        return admission.is_open and admission.is_ours and self.subscriptions.wants(change)

    def notify(self, change: Announced) -> None:
        """Queues an event for the client, if it registered for it. Never waits."""
        if not self.hears(change):
            return
        try:
            self._changes.put_nowait(change)
        except asyncio.QueueFull:
            self.log.warning("client disconnected: it does not read its events")
            self.client.shutdown()

    async def _may_hear(self, change: Announced) -> bool:
        """Whether the client may see what an event tells of."""
        if isinstance(change, PoolEvent):
            return await self._caller.may_do([pool_action("getattr")], pool_details(change.pool))
        try:
            await (await self._caller.own()).lookup(change.dom.uuid)
        except GatewayError:
            return False
        return True

    async def _pump_events(self) -> None:
        while True:
            change = await self._changes.get()
            if self.peer.uid != 0 and not await self._may_hear(change):
                continue
            for event in self.subscriptions.messages(change):
                await self.client.send(event)
