"""Locks of volumes: one command at a time works with each."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugin.volumelocks import locked
from pydataplane.errors import VolumeError


def test_one_within_another_leaves_the_outer_one_locked(tmp_path: Path) -> None:
    with locked(tmp_path, ("a", "a is being moved")):
        with locked(tmp_path, ("b", "b is being sent")):
            pass
        for _ in range(2):
            with (
                pytest.raises(VolumeError, match="a is being moved by another command"),
                locked(tmp_path, ("b", "b"), ("a", "a is being moved")),
            ):
                pass
    with locked(tmp_path, ("a", "a")):
        pass
