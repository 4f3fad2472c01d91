"""One call of a client that the gateway looks into, and the reply to it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from plugin.gateway.caller import Caller
from plugin.gateway.errors import GatewayError, Refused
from plugin.gateway.events import Subscriptions
from plugin.gateway.messages import Domain
from plugin.gateway.parsing import ClientParser
from plugin.gateway.services import Services
from plugin.gateway.streams import Stream
from plugin.gateway.wire import Header, MessageType, Status, message

T = TypeVar("T")


@dataclass(frozen=True)
class Reply:
    """libvirtd's reply to a call that was passed on, with descriptors that are ours to pass on."""

    header: Header
    payload: bytes
    descriptors: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the call succeeded."""
        return self.header.status == Status.OK


class Connection(Protocol):
    """Both ends of a client's connection, as a call needs them."""

    async def exchange(
        self, header: Header, payload: bytes, descriptors: tuple[int, ...] = ()
    ) -> Reply:
        """Passes a call on to libvirtd and returns its reply; raises UpstreamGone."""

    async def send(self, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Sends a message to the client; raises OSError if it is gone."""

    def open_stream(self, header: Header) -> Stream:
        """Returns the stream of a call; what comes for it goes there from now on."""

    def close_stream(self, header: Header) -> None:
        """Ends that: what still comes for it goes to libvirtd, which ignores it."""


@dataclass(frozen=True)
class Call:
    """A call of a client; a handler answers it exactly once, by `respond` or `answer`."""

    connection: Connection
    services: Services
    caller: Caller
    subscriptions: Subscriptions
    """The events that the client registered for."""
    parser: ClientParser
    """What reads the client's XML."""
    header: Header
    payload: bytes
    descriptors: list[int] = field(default_factory=list)
    """What came with the call, until it is passed on."""

    async def parse(self, work: Callable[[], T], text: str) -> T:
        """Does what parses `text`, XML that the client sent, in a thread, when it is its turn."""
        return await self.parser.parse(work, len(text))

    def drop(self) -> None:
        """Closes the descriptors that were not passed on; the session does it at the end."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    async def forward(self, payload: bytes | None = None) -> Reply:
        """Passes the call on to libvirtd, with another payload if given; returns the reply.

        Raises:
            UpstreamGone: libvirtd closed the connection first.
        """
        body = self.payload if payload is None else payload
        given = tuple(self.descriptors)
        self.descriptors.clear()
        return await self.connection.exchange(self.header, body, given)

    async def forward_as(self, procedure: int, payload: bytes) -> Reply:
        """Makes another call in the place of this one, as the client; returns the reply as this's.

        Not for a call that came with descriptors.

        Raises:
            UpstreamGone: libvirtd closed the connection first.
        """
        asked = self.header._replace(procedure=procedure)
        reply = await self.connection.exchange(asked, payload)
        return replace(reply, header=reply.header._replace(procedure=self.header.procedure))

    async def respond(self, reply: Reply, payload: bytes | None = None) -> None:
        """Gives libvirtd's reply to the client, with another payload if given."""
        body = reply.payload if payload is None else payload
        header = reply.header.resized(len(body))
        await self.connection.send(header.pack() + body, reply.descriptors)

    async def answer(self, payload: bytes = b"", *, status: Status = Status.OK) -> None:
        """Answers the call without libvirtd."""
        await self.connection.send(
            message(
                MessageType.REPLY,
                self.header.procedure,
                self.header.serial,
                payload,
                status=status,
                program=self.header.program,
            )
        )

    @contextmanager
    def stream(self) -> Iterator[Stream]:
        """Opens the call's stream for the body."""
        try:
            yield self.connection.open_stream(self.header)
        finally:
            self.connection.close_stream(self.header)

    async def give(self, answer: Reply | bytes | None) -> None:
        """Answers the call with libvirtd's reply, with a result of ours, or with none."""
        if isinstance(answer, Reply):
            await self.respond(answer)
        else:
            await self.answer(answer or b"")

    @asynccontextmanager
    async def for_who_sees(self, dom: Domain) -> AsyncIterator[None]:
        """A refusal inside is only for who may see the domain; to others it is libvirtd's word.

        Raises:
            Refused: what is inside refuses, and the client may read the domain.
        """
        try:
            yield
        except Refused:
            try:
                await (await self.caller.own()).xml(dom, 0)
            except GatewayError:
                return
            raise

    async def pass_on(self) -> None:
        """Lets libvirtd alone answer the call."""
        await self.respond(await self.forward())


Handler = Callable[[Call], Awaitable[None]]
