"""Events of definitions that the gateway replaces: those of its own, and no other."""

from __future__ import annotations

import pytest

from plugin.gateway import redefined
from plugin.gateway.events import Subscriptions
from plugin.gateway.messages import Domain
from plugin.gateway.procs import Proc
from plugin.gateway.redefined import HeldBack
from plugin.gateway.wire import REMOTE_PROGRAM, Header, MessageType
from plugin.gateway.xdr import Writer

ONE, TWO = bytes(16), bytes(15) + b"2"
ALL, OF_ONE, OTHER = 1, 2, 3
LIFECYCLE = Header(0, REMOTE_PROGRAM, 1, Proc.CALLBACK_LIFECYCLE, MessageType.MESSAGE, 0, 0)


@pytest.fixture
def held() -> HeldBack:
    """A client with callbacks for all domains, for one of them, and for other events."""
    return HeldBack(Subscriptions({ALL: (0, None), OF_ONE: (0, ONE), OTHER: (15, None)}))


def event(callback: int, uuid: bytes = ONE, what: int = 0, detail: int = 1) -> bytes:
    """A lifecycle event; that of a definition that was replaced is 0, 1."""
    return bytes(Domain("d", uuid, -1).write(Writer().i32(callback)).i32(what).i32(detail))


def test_each_callback_that_is_told_has_one_event_less(held: HeldBack) -> None:
    assert not held.may_be(LIFECYCLE), "as nothing is replaced, all passes by its header"
    held.begin(ONE)
    assert held.may_be(LIFECYCLE)
    assert not held.may_be(LIFECYCLE._replace(procedure=Proc.CALLBACK_DEVICE_ADDED))
    assert held.is_one(event(ALL)) and not held.is_one(event(ALL))
    assert held.is_one(event(OF_ONE)) and not held.is_one(event(OF_ONE))
    assert not held.may_be(LIFECYCLE)


def test_others_pass(held: HeldBack) -> None:
    held.begin(ONE)
    for other in (event(ALL, TWO), event(ALL, what=2, detail=0), event(ALL, detail=0), event(9)):
        assert not held.is_one(other)
    assert not held.is_one(b"") and not held.is_one(event(ALL)[:-1])
    assert held.is_one(event(ALL))


def test_two_replaced_one_after_the_other_are_two(held: HeldBack) -> None:
    held.begin(ONE)
    held.begin(ONE)
    held.begin(TWO)
    assert [held.is_one(event(ALL)) for _ in range(3)] == [True, True, False]
    assert [held.is_one(event(ALL, TWO)) for _ in range(2)] == [True, False]


def test_what_was_not_replaced_is_not_waited_for(held: HeldBack) -> None:
    held.begin(ONE)
    held.begin(ONE)
    held.cancel(ONE)
    assert [held.is_one(event(ALL)) for _ in range(2)] == [True, False]
    held.cancel(ONE)
    held.cancel(TWO)
    assert not held.may_be(LIFECYCLE)


def test_an_event_that_does_not_come_is_not_waited_for_long(
    held: HeldBack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redefined, "WITHIN_S", 0.0)
    held.begin(ONE)
    monkeypatch.undo()
    assert not held.is_one(event(ALL))
    assert not held.may_be(LIFECYCLE)
