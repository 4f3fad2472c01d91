"""Events of definitions that the gateway replaces: those of its own, and no other."""

from __future__ import annotations

import pytest

from plugin.gateway import eventfilter
from plugin.gateway.eventfilter import EventFilter
from plugin.gateway.events import Subscriptions
from plugin.gateway.messages import Domain
from plugin.gateway.procs import Proc
from plugin.gateway.wire import REMOTE_PROGRAM, Header, MessageType
from plugin.gateway.xdr import Writer

ONE, TWO = bytes(16), bytes(15) + b"2"
ALL, OF_ONE, OTHER = 1, 2, 3
LIFECYCLE = Header(0, REMOTE_PROGRAM, 1, Proc.CALLBACK_LIFECYCLE, MessageType.MESSAGE, 0, 0)


@pytest.fixture
def events() -> EventFilter:
    """A client with callbacks for all domains, for one of them, and for other events."""
    return EventFilter(Subscriptions({ALL: (0, None), OF_ONE: (0, ONE), OTHER: (15, None)}))


def event(callback: int, uuid: bytes = ONE, what: int = 0, detail: int = 1) -> bytes:
    """A lifecycle event; that of a definition that was replaced is 0, 1."""
    return bytes(Domain("d", uuid, -1).write(Writer().i32(callback)).i32(what).i32(detail))


def test_each_callback_that_is_told_has_one_event_less(events: EventFilter) -> None:
    assert not events.may_match(LIFECYCLE), "as nothing is replaced, all passes by its header"
    events.expect(ONE)
    assert events.may_match(LIFECYCLE)
    assert not events.may_match(LIFECYCLE._replace(procedure=Proc.CALLBACK_DEVICE_ADDED))
    assert events.consume(event(ALL)) and not events.consume(event(ALL))
    assert events.consume(event(OF_ONE)) and not events.consume(event(OF_ONE))
    assert not events.may_match(LIFECYCLE)


def test_others_pass(events: EventFilter) -> None:
    events.expect(ONE)
    for other in (event(ALL, TWO), event(ALL, what=2, detail=0), event(ALL, detail=0), event(9)):
        assert not events.consume(other)
    assert not events.consume(b"") and not events.consume(event(ALL)[:-1])
    assert events.consume(event(ALL))


def test_two_replaced_one_after_the_other_are_two(events: EventFilter) -> None:
    events.expect(ONE)
    events.expect(ONE)
    events.expect(TWO)
    assert [events.consume(event(ALL)) for _ in range(3)] == [True, True, False]
    assert [events.consume(event(ALL, TWO)) for _ in range(2)] == [True, False]


def test_what_was_not_replaced_is_not_waited_for(events: EventFilter) -> None:
    events.expect(ONE)
    events.expect(ONE)
    events.cancel(ONE)
    assert [events.consume(event(ALL)) for _ in range(2)] == [True, False]
    events.cancel(ONE)
    events.cancel(TWO)
    assert not events.may_match(LIFECYCLE)


def test_an_event_that_does_not_come_is_not_waited_for_long(
    events: EventFilter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eventfilter, "WITHIN_S", 0.0)
    events.expect(ONE)
    monkeypatch.undo()
    assert not events.consume(event(ALL))
    assert not events.may_match(LIFECYCLE)
