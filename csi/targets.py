"""The targets of this node, and which of them has a volume: the one place that knows.

A target that does not answer delays only what is its own. Each is asked in a thread, all at once,
and where one has what is looked for the others are waited for a moment only. One that owes an
answer since longer, and has said nothing to anybody meanwhile (pydataplane.watchedclient), is not
asked again until it gives it. Nothing is kept but where a volume's lvstore was seen last, which is
looked at again before it counts: an lvstore may move.

With one target nothing is asked here; it says itself what it does not have.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from csi import handles
from csi.errors import Code, Failure
from pydataplane.client import Client
from pydataplane.errors import (
    NO_DEVICE,
    RpcError,
    TargetError,
    TargetUnavailable,
    VolumeNotFoundError,
)
from pydataplane.lvstores import Lvstore
from pydataplane.volumes import Volumes
from pydataplane.watchedclient import WatchedClient

T = TypeVar("T")
ANSWER_S = 10.0
"""How long a target may take to say what it has, seconds."""
OTHERS_S = 2.0
"""How long the others are waited for where one has what is looked for, seconds."""
UNIQUE = (
    "names of lvstores are unique on a node; name the lvstore by its UUID in the StorageClass, or "
    "let one target have it only"
)
STORE_DIGITS = 12
"""Hexadecimal digits at the start of a handle that tells its lvstore, without the dash."""


class Found(NamedTuple):
    """An lvstore and the target that has it."""

    client: Client
    store: Lvstore


@dataclass(frozen=True)
class Answer(Generic[T]):
    """What one target said: `value`, or why it said nothing."""

    client: Client
    value: T | None
    error: TargetError | None

    def get(self) -> T:
        """Returns what it said; raises its error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


class _Questions:
    """What is asked of one target and not answered yet."""

    def __init__(self, client: WatchedClient) -> None:
        self.client = client
        self.open: dict[int, float] = {}
        """When each was asked, of time.monotonic()."""

    def silent_for(self, seconds: float) -> bool:
        """Whether it owes an answer since longer than that, and is silent altogether.

        One that answers others is busy with this one. One that is silent while nothing is open here
        is asked: what somebody else waits for may be a long piece of work.
        """
        since = min(list(self.open.values()), default=None)
        overdue = since is not None and time.monotonic() - since > seconds
        return overdue and self.client.silent_s > 0

    def silent(self) -> TargetUnavailable:
        """Returns the error of a target that owes an answer."""
        return TargetUnavailable(
            f"the target on {self.client.path} does not answer: see whether it and the devices "
            "under its lvstores work, and start it anew if need be; its volumes wait for it"
        )


class Targets:
    """The targets of this node; threads may share it."""

    def __init__(
        self,
        clients: Sequence[WatchedClient],
        *,
        answer_s: float = ANSWER_S,
        others_s: float = OTHERS_S,
    ) -> None:
        """Knows the targets of `clients`, one at least, each by a socket of its own.

        `answer_s` is how long one may take to say what it has, `others_s` how long the others are
        waited for where one has what is looked for; seconds.
        """
        assert clients, "a node has a target"
        self.clients = tuple(clients)
        self._answer_s = answer_s
        self._others_s = others_s
        self._changed = threading.Condition()
        self._questions = {id(client): _Questions(client) for client in self.clients}
        self._numbers = 0
        self._seen: dict[str, Client] = {}
        """Of the size of the lvstores, older volumes, and machines here."""

    @property
    def sole(self) -> Client | None:
        """The target, if it is the only one."""
        return self.clients[0] if len(self.clients) == 1 else None

    # The target of something

    def of(self, volume: str) -> Client:
        """Returns the target that has the volume of this handle, or its lvstore.

        If all answer and none has it, that is the one that was seen with it last, or the first
        one: it says itself that it does not have it.

        Raises:
            TargetUnavailable: one does not answer that may have it; the text names its socket.
            RpcError: one refuses to tell.
            Failure: FAILED_PRECONDITION, several have it.
        """
        if self.sole is not None:
            return self.sole
        key = self._key(volume)
        before = self._seen.get(key)
        what = f"volume {volume}: {UNIQUE}"
        found = None
        if key != volume:
            with suppress(TargetUnavailable):  # what has moved here another target may have
                found = self.having(key, what, lambda client: _has(client, volume, itself=False))
        if found is None:
            found = self.having(volume, what, lambda client: _has(client, volume, itself=True))
        return found or before or self.clients[0]

    def _key(self, volume: str) -> str:
        """Returns what a volume's target is remembered by: its lvstore, where its handle tells it.

        For one that was found in another lvstore that is the handle.
        """
        return volume if volume in self._seen else _key(volume)

    def having(self, key: str, what: str, has: Callable[[Client], bool]) -> Client | None:
        """Returns the target that has something; None if all answer, and none has it.

        `what` it is, and what to do where several have it, ends that message. `has` asks one
        target, in a call or two. The answer is remembered by `key`: that one is asked first the
        next time.

        Raises:
            TargetUnavailable: one does not answer that may have it; the text names its socket.
            RpcError: one refuses to tell.
            Failure: FAILED_PRECONDITION, several have it.
        """
        before = self._seen.get(key)
        answers = []
        if before is not None:
            answers = self._ask([before], has)
            if answers[0].value:
                return before
        answers += self._ask(
            [client for client in self.clients if client is not before], has, enough=bool
        )
        found = [answer.client for answer in answers if answer.value]
        if len(found) > 1:
            raise _several(what, found)
        if not found:
            for answer in answers:
                answer.get()
            return None
        self._seen[key] = found[0]
        return found[0]

    def forget(self, key: str) -> None:
        """Forgets which target was found to have something, as it is gone."""
        self._seen.pop(key, None)

    def of_store(self, uuid: str) -> Client:
        """Returns the target that has the lvstore of this UUID; otherwise as `of`."""
        return self.of(handles.make(uuid, "", ""))

    def holders(self, volume: str) -> list[Client]:
        """Returns the targets that something of a volume may be left on: its own, or else all.

        Raises:
            TargetUnavailable, RpcError, Failure: as `of`.
        """
        client = self.of(volume)
        if self.sole is not None or self._seen.get(self._key(volume)) is client:
            return [client]
        return list(self.clients)

    def by_target(self, volumes: Iterable[str]) -> list[tuple[list[str], Answer[Client]]]:
        """Returns groups of volumes, each with its target or why nobody knows it."""
        answers: dict[str, Answer[Client]] = {}
        groups: dict[object, tuple[list[str], Answer[Client]]] = {}
        for volume in volumes:
            key = self._key(volume)
            if key not in answers:
                answers[key] = self._answer_of(volume)
            answer = answers[key]
            group = key if answer.error else id(answer.client)
            groups.setdefault(group, ([], answer))[0].append(volume)
        return list(groups.values())

    def _answer_of(self, volume: str) -> Answer[Client]:
        try:
            client = self.of(volume)
        except TargetError as error:
            return Answer(self.clients[0], None, error)
        except Failure as error:  # several have it, and it is on the wrong one for all that we know
            return Answer(self.clients[0], None, TargetUnavailable(str(error)))
        return Answer(client, client, None)

    def store(self, name: str) -> Found:
        """Returns the lvstore that a class names, by its name or UUID, and its target.

        One that does not answer is left out where another has it.

        Raises:
            VolumeNotFoundError: all answer, and none has it.
            TargetUnavailable: none has it that answers; the text names the socket of one that
                does not.
            RpcError: one refuses to tell.
            Failure: FAILED_PRECONDITION, several have one of that name.
        """
        if self.sole is not None:
            return Found(self.sole, Volumes(self.sole).lvstore(name))

        def named(client: Client) -> Lvstore | None:
            return next((s for s in Volumes(client).lvstores() if s.is_called(name)), None)

        answers = self._ask(self.clients, named, enough=bool)
        found = [Found(each.client, each.value) for each in answers if each.value is not None]
        if len(found) > 1:
            raise _several(f"lvstore {name}: {UNIQUE}", [each.client for each in found])
        if not found:
            for answer in answers:
                answer.get()
            raise VolumeNotFoundError(f"there is no lvstore {name} on any target of this node")
        self._seen[_key(handles.make(found[0].store.uuid, "", ""))] = found[0].client
        return found[0]

    # All targets

    def ask(self, what: Callable[[Client], T]) -> list[Answer[T]]:
        """Asks all at once; returns what each says, in the order of the targets.

        `what` may make many calls, each of which the client waits for as long as for any other. A
        target that does not say at first that it is there is not asked.
        """
        if self.sole is not None:
            return [_said(self.sole, what)]
        there = self._ask(self.clients, _status)
        with ThreadPoolExecutor(len(there)) as threads:
            return list(
                threads.map(
                    lambda answer: (
                        Answer(answer.client, None, answer.error)
                        if answer.error
                        else _said(answer.client, what)
                    ),
                    there,
                )
            )

    def gather(self, what: Callable[[Client], list[T]]) -> list[T]:
        """Asks all at once; returns what all say together.

        Raises:
            TargetError: one does not answer, or refuses: what is left out would seem to be gone.
        """
        return [each for answer in self.ask(what) for each in answer.get()]

    def lvstores(self) -> list[Lvstore]:
        """Returns the lvstores of all targets that answer.

        Raises:
            TargetError: none answers.
        """
        answers = self.ask(lambda client: Volumes(client).lvstores())
        if all(answer.error for answer in answers):
            answers[0].get()
        return [store for answer in answers for store in answer.value or ()]

    def problem(self) -> str | None:
        """Returns why none of the targets answers; None where one does."""
        if self.sole is not None:
            answers = [_said(self.sole, _status)]
        else:
            answers = self._ask(self.clients, _status, enough=bool, others_s=0)
        if any(answer.error is None for answer in answers):
            return None
        return "; ".join(str(answer.error) for answer in answers)

    def _ask(
        self,
        clients: Sequence[Client],
        what: Callable[[Client], T],
        *,
        enough: Callable[[T], bool] | None = None,
        others_s: float | None = None,
    ) -> list[Answer[T]]:
        """Asks these at once; once one says what is `enough`, the others have `others_s` left.

        `what` is a call or two: one that owes its answer for long may be silent.
        """
        begin = time.monotonic()
        longest_s = self._answer_s if enough is None else self._others_s
        answers: dict[int, Answer[T]] = {}
        for client in clients:
            questions = self._questions[id(client)]
            if questions.silent_for(longest_s):
                answers[id(client)] = Answer(client, None, questions.silent())
            else:
                self._begin(questions, what, answers)
        end = begin + self._answer_s
        others_s = self._others_s if others_s is None else others_s
        with self._changed:
            while len(answers) < len(clients):
                if enough is not None and any(
                    each.error is None and enough(each.get()) for each in answers.values()
                ):
                    end = min(end, time.monotonic() + others_s)
                    enough = None
                left = end - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return [
                answers.get(id(client))
                or Answer(client, None, self._questions[id(client)].silent())
                for client in clients
            ]

    def _begin(
        self, questions: _Questions, what: Callable[[Client], T], answers: dict[int, Answer[T]]
    ) -> None:
        """Asks one target, in a thread of its own."""
        with self._changed:
            self._numbers += 1
            number = self._numbers
            questions.open[number] = time.monotonic()

        def work() -> None:
            answer: Answer[T] | None = None
            try:
                answer = _said(questions.client, what)
            finally:
                with self._changed:
                    del questions.open[number]
                    answers[id(questions.client)] = answer or Answer(
                        questions.client, None, questions.silent()
                    )
                    self._changed.notify_all()

        name = f"asking {questions.client.path}"
        threading.Thread(target=work, name=name, daemon=True).start()


def _said(client: Client, what: Callable[[Client], T]) -> Answer[T]:
    try:
        return Answer(client, what(client), None)
    except TargetError as error:
        return Answer(client, None, error)


def _status(client: Client) -> Any:
    return client.call("virtlun_get_status")


def _key(volume: str) -> str:
    """Returns what volumes share that are on one target: what tells the lvstore, or the handle."""
    if not handles.tells_lvstore(volume):
        return volume
    return volume.replace("-", "")[:STORE_DIGITS]


def _has(client: Client, volume: str, *, itself: bool) -> bool:
    """Whether a target has a volume `itself`, or else its lvstore if the handle tells that."""
    if not itself:
        stores = Volumes(client).lvstores()
        return any(handles.may_be_in(volume, store.uuid) for store in stores)
    try:
        return bool(client.call("bdev_get_bdevs", name=volume))
    except RpcError as error:
        if error.code != NO_DEVICE:
            raise
        return False


def _several(what: str, clients: list[Client]) -> Failure:
    sockets = " and ".join(str(client.path) for client in clients)
    return Failure(
        Code.FAILED_PRECONDITION,
        f"the targets on {sockets} all have {what}",
    )
