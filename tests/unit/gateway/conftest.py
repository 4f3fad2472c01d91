"""Fixtures of the gateway's unit tests."""

from __future__ import annotations

import pytest

from plugin.gateway import session
from tests.unit.gateway.world import NOBODY


@pytest.fixture
def as_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every client looks like an ordinary user's process."""
    monkeypatch.setattr(session, "peer_of", lambda sock: NOBODY)
