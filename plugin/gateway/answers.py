"""What several targets say to one question, of which some may say nothing.

A silent one is waited for, to its deadline, only as long as nobody else's answer will do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from plugin.gateway.errors import GatewayError, NoAnswer
from plugin.gateway.target import Target
from plugin.targets import TargetAddress

T = TypeVar("T")

LOOK_S = 0.25
"""How often it is looked whether those that are waited for are silent, seconds."""


@dataclass(frozen=True)
class Member:
    """One of the targets."""

    address: TargetAddress
    target: Target

    @property
    def label(self) -> str:
        """Returns what to call it in messages."""
        return f"target {self.address.label}"


@dataclass(frozen=True)
class Answers(Generic[T]):
    """What the targets said to one question, each list in their order."""

    given: list[tuple[Member, T]]
    refused: list[tuple[Member, GatewayError]]
    silent: list[tuple[Member, NoAnswer]]


async def answers_of(
    asked: Mapping[asyncio.Future[T], Member],
    *,
    enough: Callable[[list[T]], bool],
    wait_for_silent: bool,
) -> Answers[T]:
    """Returns what they say who were asked; each has said it, or is silent.

    A silent one is waited for as long as what the others said is not `enough`; without
    `wait_for_silent` it is not. What it was asked is cancelled then.

    Raises:
        GatewayError: none of them answers.
    """
    silent: dict[asyncio.Future[T], NoAnswer] = {}
    waiting = set(asked)
    try:
        while waiting:
            if not wait_for_silent or enough(
                [task.result() for task in asked if _has_answered(task)]
            ):
                found = ((task, asked[task].target.silence) for task in waiting)
                silent |= {task: why for task, why in found if why is not None}
                waiting -= silent.keys()
            if waiting:
                _, waiting = await asyncio.wait(
                    waiting, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
    finally:
        for task in waiting | silent.keys():
            task.cancel()
    answers: Answers[T] = Answers([], [], [])
    for task, member in asked.items():
        try:
            if task in silent:
                raise silent[task]
            answers.given.append((member, task.result()))
        except NoAnswer as error:
            answers.silent.append((member, error))
        except GatewayError as error:
            answers.refused.append((member, error))
    if len(answers.silent) == len(asked):
        raise answers.silent[0][1]
    return answers


def _has_answered(task: asyncio.Future[T]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
