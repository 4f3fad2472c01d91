"""Device events of our disks: libvirtd knows nothing of them, so the gateway sends them itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from plugin.gateway.messages import Domain
from plugin.gateway.procs import Proc
from plugin.gateway.wire import MessageType, message
from plugin.gateway.xdr import Reader, Writer


class DeviceEvent(Enum):
    """virDomainEventID of the events we send."""

    REMOVED = 15
    ADDED = 19


_CALLBACK_PROC = {
    DeviceEvent.REMOVED: Proc.CALLBACK_DEVICE_REMOVED,
    DeviceEvent.ADDED: Proc.CALLBACK_DEVICE_ADDED,
}


@dataclass(frozen=True)
class Happening:
    """A disk came or went."""

    event: DeviceEvent
    dom: Domain
    alias: str


@dataclass
class Subscriptions:
    """What one client registered for, as its own calls and libvirtd's replies tell."""

    callbacks: dict[int, tuple[int, bytes | None]] = field(default_factory=dict)
    """By callback id: event id, and the domain's UUID or None for all."""
    legacy: set[int] = field(default_factory=set)
    """Event ids of the calls that have no callback id (clients before libvirt 1.3.3)."""

    def registered(self, args: bytes, result: bytes) -> None:
        """Notes a successful CONNECT_DOMAIN_EVENT_CALLBACK_REGISTER_ANY."""
        reader = Reader(args)
        event = reader.i32()
        dom = reader.optional(lambda: Domain.read(reader))
        self.callbacks[Reader(result).i32()] = (event, dom.uuid if dom else None)

    def deregistered(self, args: bytes) -> None:
        """Notes a successful CONNECT_DOMAIN_EVENT_CALLBACK_DEREGISTER_ANY."""
        self.callbacks.pop(Reader(args).i32(), None)

    def wants(self, happening: Happening) -> bool:
        """Whether the client gets at least one message about this."""
        return bool(self.messages(happening))

    def messages(self, happening: Happening) -> list[bytes]:
        """Returns the messages to send to the client."""
        event, dom, alias = happening.event, happening.dom, happening.alias
        found = []
        for callback, (wanted, uuid) in self.callbacks.items():
            if wanted == event.value and uuid in (None, dom.uuid):
                body = bytes(dom.write(Writer().i32(callback)).string(alias))
                found.append(message(MessageType.MESSAGE, _CALLBACK_PROC[event], 0, body))
        # The protocol has a message without callback id for removal only.
        if event is DeviceEvent.REMOVED and event.value in self.legacy:
            body = bytes(dom.write(Writer()).string(alias))
            found.append(message(MessageType.MESSAGE, Proc.EVENT_DEVICE_REMOVED, 0, body))
        return found
