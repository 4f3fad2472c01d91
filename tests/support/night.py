"""Which variants of a test are left to the night."""

from __future__ import annotations

from typing import Any

import pytest


def at_night(*values: Any, id: str | None = None) -> Any:  # noqa: A002 - as pytest.param has it
    """Returns the parameters of a variant that runs where `-m nightly` is said."""
    return pytest.param(*values, id=id, marks=pytest.mark.nightly)
