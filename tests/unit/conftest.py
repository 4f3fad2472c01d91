"""What each unit test leaves behind for the next one: nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from pydataplane.domain.xml import view as views


@pytest.fixture(autouse=True)
def usual_log() -> Iterator[None]:
    """The log goes where it goes by default, whatever a program under test has configured."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def no_domain_stays_parsed() -> None:
    """What a test counts is not what the one before has read."""
    views._kept.cache_clear()
