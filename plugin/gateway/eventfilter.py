"""Suppresses libvirtd's event of a definition that the gateway replaced for a change of disks.

libvirtd tells of a definition that is replaced (`Defined Updated`), but not of one to which a disk
is attached. Where a disk of ours changes what the domain boots, the gateway replaces the definition
for what its client sees as an attach or detach, so that client's event, and everybody else's, is
not passed on. Nothing in the event says who replaced the definition: for each callback that is
registered when the gateway begins, one such event is suppressed.
"""

from __future__ import annotations

import time
from collections import deque

from plugin.gateway.events import Subscriptions
from plugin.gateway.messages import Domain
from plugin.gateway.procs import Proc
from plugin.gateway.wire import REMOTE_PROGRAM, Header, MessageType, WireError
from plugin.gateway.xdr import Reader

LIFECYCLE = 0
"""virDomainEventID of lifecycle events."""
DEFINED_UPDATED = (0, 1)
"""VIR_DOMAIN_EVENT_DEFINED, VIR_DOMAIN_EVENT_DEFINED_UPDATED."""
WITHIN_S = 30.0
"""An event that has not come by then does not come: libvirtd shows this client no such domain."""

Key = tuple[int, bytes]
"""The callback, and the domain's UUID."""


class EventFilter:
    """The events that one client is not to be sent."""

    def __init__(self, subscriptions: Subscriptions) -> None:
        """`subscriptions` are the client's."""
        self._subscriptions = subscriptions
        self._awaited: dict[Key, deque[float]] = {}
        """Until when each is waited for, seconds of the monotonic clock."""

    def expect(self, uuid: bytes) -> None:
        """Expects an event of a domain at each callback of the client's that it comes to."""
        self._expire()
        for callback, (event, only) in self._subscriptions.callbacks.items():
            if event == LIFECYCLE and only in (None, uuid):
                until = self._awaited.setdefault((callback, uuid), deque())
                until.append(time.monotonic() + WITHIN_S)

    def cancel(self, uuid: bytes) -> None:
        """Expects one event of a domain less: its definition was not replaced."""
        for key in [key for key in self._awaited if key[1] == uuid]:
            self._take(key)

    def may_match(self, header: Header) -> bool:
        """Whether a message of libvirtd's may be one of these; `consume` is to judge it."""
        return bool(self._awaited) and (header.program, header.type, header.procedure) == (
            REMOTE_PROGRAM,
            MessageType.MESSAGE,
            Proc.CALLBACK_LIFECYCLE,
        )

    def consume(self, payload: bytes) -> bool:
        """Whether a lifecycle event is one of these, which then is expected no longer."""
        self._expire()
        reader = Reader(payload)
        try:
            key = (reader.i32(), Domain.read(reader).uuid)
            what = (reader.i32(), reader.i32())
        except WireError:
            return False
        return what == DEFINED_UPDATED and self._take(key)

    def _take(self, key: Key) -> bool:
        """Removes the oldest of a key's; False if there is none."""
        until = self._awaited.get(key)
        if until is None:
            return False
        until.popleft()
        if not until:
            del self._awaited[key]
        return True

    def _expire(self) -> None:
        now = time.monotonic()
        for key, until in list(self._awaited.items()):
            while until and until[0] < now:
                until.popleft()
            if not until:
                del self._awaited[key]
