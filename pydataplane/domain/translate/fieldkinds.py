"""What becomes of an element or attribute of a <disk>: the rows of the tables of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Effect(enum.Enum):
    """What becomes of a field whose value is accepted."""

    HONOURED = "honoured"
    NONE = "without effect"
    """It speaks of how QEMU would do what the target does."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Field:
    """An element (`a/b`) or attribute (`a/b@c`) below <disk>."""

    path: str
    effect: Effect
    means: str
    """What it does, why it has no effect, or what to do instead of a refused one."""
    values: frozenset[str] | None = None
    """Those that are accepted; None: any, or such as `check` looks at. Others are refused."""
    instead: str = ""
    """Why the other values are refused, and what to do."""
    whole: bool = False
    """It speaks for all that is inside of the element."""


def done(path: str, means: str, values: str | None = None, instead: str = "") -> Field:
    """Returns one that is honoured; of `values`, words, where only those are accepted."""
    return Field(path, Effect.HONOURED, means, _split(values), instead)


def same(
    path: str, means: str, values: str | None = None, instead: str = "", *, whole: bool = False
) -> Field:
    """Returns one that has no effect; as `done`."""
    return Field(path, Effect.NONE, means, _split(values), instead, whole)


def never(path: str, instead: str) -> Field:
    """Returns one that is refused, with all inside of it."""
    return Field(path, Effect.REFUSED, instead, frozenset(), instead, whole=True)


def _split(values: str | None) -> frozenset[str] | None:
    return None if values is None else frozenset(values.split())
