"""What each unit test leaves behind for the next one: nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def usual_log() -> Iterator[None]:
    """The log goes where it goes by default, whatever a program under test has configured."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
