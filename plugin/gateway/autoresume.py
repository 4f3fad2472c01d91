"""Records domains that the gateway paused for lack of space (ENOSPC), to resume them later.

Only those: not one that an administrator paused, before or after that, nor one with another error.
Each is recorded in a file, for the gateway that comes after this one. A record counts only while
the target still has the same requests: the guest may have run meanwhile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from plugin.gateway.target import Room, Suspended

AGAIN_S = 5.0
"""After how long one is tried again that failed again soon after, seconds; then after twice that,
and so on."""
AGAIN_MAX_S = 600.0
CALM_S = 60.0
"""A domain that was resumed and ran so long begins anew with that, seconds."""

SUFFIX = ".no-room"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class WaitingDomain:
    """The record of a domain that the gateway paused."""

    failures: frozenset[tuple[str, int, float]]
    """Controller, target and time of what waits at the target."""
    rooms: Mapping[str, Room]
    """By lvstore, what there was when it failed."""
    not_before: float
    """When it may be resumed, seconds of the monotonic clock."""
    once: bool
    """Then it is, whatever room there is: there was some already when it was looked for."""
    inherited: bool = False
    """From the gateway before this one."""

    def is_over(self, found: Collection[tuple[str, int, float]]) -> bool:
        """Whether the domain has run since, as what waits now, of all its disks, tells."""
        if self.failures <= set(found):
            return False
        # A target that was killed knows nothing of what it kept; we have watched the domain.
        return self.inherited or bool(found)

    def may_go_on(self, rooms: Mapping[str, Room], now: float) -> bool:
        """Whether there is room for each of its disks again."""
        if now < self.not_before:
            return False
        if self.once:
            return True
        there = [(rooms.get(name), before) for name, before in self.rooms.items()]
        return all(room is not None and room.has_come_since(before) for room, before in there)


def failures(items: Iterable[Suspended]) -> frozenset[tuple[str, int, float]]:
    """Returns what tells these apart from all others."""
    return frozenset((item.controller, item.target, item.since) for item in items)


class AutoResume:
    """By domain (its UUID, 16 bytes)."""

    def __init__(self, folder: Path) -> None:
        """Takes over what the gateway before this one has noted in `folder`."""
        self._folder = folder
        self.waiting: dict[bytes, WaitingDomain] = {}
        self._resumed: dict[bytes, tuple[float, float]] = {}
        """When, in seconds of the monotonic clock, and after how long it may be the next time."""
        for file in sorted(folder.glob(f"*{SUFFIX}")):
            with suppress(OSError, ValueError, TypeError, KeyError):
                self.waiting[bytes.fromhex(file.name.removesuffix(SUFFIX))] = _read(file)

    def paused(
        self, uuid: bytes, items: Iterable[Suspended], rooms: Mapping[str, Room], now: float
    ) -> None:
        """Notes that a domain was paused, as there was no room for `items`."""
        at, again_s = self._resumed.get(uuid, (-CALM_S, 0.0))
        again_s = 0.0 if now - at > CALM_S else again_s
        self._resumed[uuid] = (at, again_s)
        # Else it waits for what it lacked.
        once = all(room.lvstore >= room.cluster for room in rooms.values()) and not again_s
        not_before = now + (AGAIN_S if once else again_s)
        note = WaitingDomain(failures(items), rooms, not_before, once)
        self.waiting[uuid] = note
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = self._file(uuid).with_suffix(".new")
            new.write_text(_text(note))
            new.rename(self._file(uuid))
        except OSError as error:
            _log.warning("a gateway that comes after this one will not resume it", error=str(error))

    def resumed(self, uuid: bytes, now: float) -> None:
        """A domain is about to be resumed."""
        _, again_s = self._resumed.get(uuid, (now, 0.0))
        self._resumed[uuid] = (now, min(max(2 * again_s, AGAIN_S), AGAIN_MAX_S))
        self.forget(uuid)

    def forget(self, uuid: bytes) -> None:
        """A domain goes on, or is to stay as it is."""
        if self.waiting.pop(uuid, None) is not None:
            self._file(uuid).unlink(missing_ok=True)

    def put_off(self, uuid: bytes, now: float) -> None:
        """A domain could not be resumed."""
        if (note := self.waiting.get(uuid)) is not None:
            self.waiting[uuid] = replace(note, not_before=now + AGAIN_S)

    def _file(self, uuid: bytes) -> Path:
        return self._folder / f"{uuid.hex()}{SUFFIX}"


def _text(note: WaitingDomain) -> str:
    rooms = {name: [r.lvstore, r.cluster, r.below] for name, r in note.rooms.items()}
    return json.dumps({"failures": sorted(note.failures), "rooms": rooms, "once": note.once})


def _read(file: Path) -> WaitingDomain:
    said = json.loads(file.read_text())
    found = said["rooms"].items()
    rooms = {name: Room(int(free), int(cluster), below) for name, (free, cluster, below) in found}
    failed = frozenset((str(c), int(t), float(s)) for c, t, s in said["failures"])
    return WaitingDomain(failed, rooms, time.monotonic(), bool(said["once"]), inherited=True)
