"""Events: those of our disks, which libvirtd knows nothing of, and those that are about us only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from plugin.gateway.messages import Domain
from plugin.gateway.procs import Proc
from plugin.gateway.wire import REMOTE_PROGRAM, Header, MessageType, WireError, message
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain.translate import PREFIX

OUR_NAMESPACES = f"https://{PREFIX}.dev/xmlns/"
"""How the URIs of all metadata begin that is the gateway's own."""


def is_event_of_metadata(header: Header) -> bool:
    """Whether libvirtd tells of changed metadata."""
    return (header.program, header.type, header.procedure) == (
        REMOTE_PROGRAM,
        MessageType.MESSAGE,
        Proc.CALLBACK_METADATA_CHANGE,
    )


def is_ours(payload: bytes) -> bool:
    """Whether an event of changed metadata is about an element of ours."""
    reader = Reader(payload)
    try:
        reader.i32()  # the callback
        Domain.read(reader)
        reader.i32()  # description, title or element
        uri = reader.optional(reader.string)
    except WireError:
        return False
    return uri is not None and uri.startswith(OUR_NAMESPACES)


class DeviceEvent(Enum):
    """virDomainEventID of the events we send."""

    REMOVED = 15
    ADDED = 19


_CALLBACK_PROC = {
    DeviceEvent.REMOVED: Proc.CALLBACK_DEVICE_REMOVED,
    DeviceEvent.ADDED: Proc.CALLBACK_DEVICE_ADDED,
}


@dataclass(frozen=True)
class DeviceChange:
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

    def wants(self, change: DeviceChange) -> bool:
        """Whether the client gets at least one message about this."""
        return bool(self.messages(change))

    def messages(self, change: DeviceChange) -> list[bytes]:
        """Returns the messages to send to the client."""
        event, dom, alias = change.event, change.dom, change.alias
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
