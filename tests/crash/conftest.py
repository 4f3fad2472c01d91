"""Targets on scratch directories, as in tests/target."""

from tests.target.conftest import make_target, scratch, target

__all__ = ["make_target", "scratch", "target"]
