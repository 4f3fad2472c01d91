"""A target's client that notices when the target says nothing any more, as when it is stopped.

Whoever asks a silent target waits to the end of one deadline: once a whole deadline has passed
without an answer to anybody, what is asked is refused at once, with the name of its socket. A
thread of its own waits for an answer meanwhile, and with the first one all is as before.

The gateway and the CSI driver decide by it whom to wait for.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydataplane.client import DEFAULT_TIMEOUT_S, Client
from pydataplane.errors import TargetError, TargetTimeout

SILENT_S = 2.0
"""A target that was asked and has said nothing to anybody for so many seconds is silent."""

PROBE_S = 600.0
"""How long one question whether it is back waits, seconds: each is a connection in its queue."""


class WatchedClient(Client):
    """A `Client`, for many threads, that knows whether its target is silent."""

    def __init__(
        self, path: Path | str, timeout_s: float = DEFAULT_TIMEOUT_S, *, keep: int = 0
    ) -> None:
        """As `Client`."""
        super().__init__(path, timeout_s, keep=keep)
        self._mutex = threading.Lock()
        self._numbers = itertools.count()
        self._asked: dict[int, float] = {}
        """When each question was put that is not answered, seconds of the monotonic clock."""
        self._heard = time.monotonic()
        """When there was an answer, or it was plain that there is no target."""
        self._missed: float | None = None
        """Since when nothing was said, once a deadline has passed without an answer."""
        self._listening = False

    @property
    def silent_s(self) -> float:
        """Returns for how long the target has been silent, seconds; 0 if it is not."""
        with self._mutex:
            since = self._missed
            if since is None and self._asked:
                since = max(self._heard, min(self._asked.values()))
            silent = 0.0 if since is None else time.monotonic() - since
            return silent if self._missed is not None or silent > SILENT_S else 0.0

    @property
    def silence(self) -> str:
        """Returns the sentence that says that it is silent."""
        return f"no answer from {self.path} for {self.silent_s:.0f} s"

    def _exchange(self, what: str, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Any]:
        """As the base class, but refused at once after a whole deadline without an answer.

        Raises:
            TargetTimeout: also then.
        """
        if self._missed is not None:
            raise TargetTimeout(f"{what}: {self.silence}")
        with self._question():
            return super()._exchange(what, requests)

    @contextmanager
    def _question(self) -> Iterator[None]:
        """Notes that something is asked for as long as the `with` block has no answer."""
        number, begun = next(self._numbers), time.monotonic()
        with self._mutex:
            self._asked[number] = begun
        timed_out = False
        try:
            yield
        except TargetTimeout:
            timed_out = True
            raise
        finally:
            with self._mutex:
                del self._asked[number]
                if not timed_out:
                    self._heard, self._missed = time.monotonic(), None
                elif self._heard <= begun and self._missed is None:  # nor was anybody answered
                    self._missed = begun
                    self._begin_listening()

    def _begin_listening(self) -> None:
        """Has a thread wait for an answer, unless one does; the caller holds the mutex."""
        if not self._listening:
            self._listening = True
            threading.Thread(target=self._listen, name=f"silence {self.path}", daemon=True).start()

    def _listen(self) -> None:
        """Returns when there is an answer, or no target."""
        asking = Client(self.path, PROBE_S)  # on one connection, which waits in the target's queue
        silent = True
        while silent and not self._closed:
            try:
                asking.call("spdk_get_version")
            except TargetTimeout:
                continue
            except TargetError:  # to refuse is an answer as well
                pass
            silent = False
        with self._mutex:
            self._heard, self._missed, self._listening = time.monotonic(), None, False
