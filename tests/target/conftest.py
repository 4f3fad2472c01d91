"""Targets on scratch directories."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.scratch import short_directory
from tests.support.target import SANDBOX_REFUSED, Target

MakeTarget = Callable[..., Target]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory with a path short enough for sockets."""
    with short_directory("vt-") as path:
        yield path


@contextlib.contextmanager
def _making(scratch: Path) -> Iterator[MakeTarget]:
    made: list[Target] = []

    def make(*options: str) -> Target:
        directory = scratch / str(len(made))
        directory.mkdir()
        made.append(Target(directory, *options))
        return made[-1]

    yield make
    try:
        # One may be the disk of those that were made after it.
        statuses = [(target, target.stop()) for target in reversed(made)]
    finally:
        for target in made:
            target.end_holder()  # or whoever looks at what it exported waits for ever
    for target, status in statuses:
        assert status == 0, f"exit status {status} of the target:\n{target.words()}"
        assert "panicked" not in target.words(), target.words()
        assert SANDBOX_REFUSED not in target.words(), target.words()


@pytest.fixture
def make_target(scratch: Path) -> Iterator[MakeTarget]:
    """Makes targets, each in a directory of its own; the last is stopped first."""
    with _making(scratch) as make:
        yield make


@pytest.fixture(scope="module")
def make_shared_target() -> Iterator[MakeTarget]:
    """Makes targets for several tests of a module, which leave them as they were."""
    with short_directory("vt-") as path, _making(path) as make:
        yield make


@pytest.fixture
def target(make_target: MakeTarget) -> Target:
    """A running target."""
    return make_target().start()
