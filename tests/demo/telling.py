"""How steps are told: each with its words, and what it has to show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.console import Console

T = TypeVar("T")


def tell(out: Console, story: T, steps: Sequence[Callable[[T], str]]) -> None:
    """Does the steps in order; says what each does, and what came of it."""
    for number, step in enumerate(steps, 1):
        out.print(f"[bold cyan]{number:2}. {step.__doc__}[/]")
        with out.status("..."):
            shown = step(story)
        for line in shown.splitlines():
            out.print(f"    {line}", markup=False)
        out.print()
