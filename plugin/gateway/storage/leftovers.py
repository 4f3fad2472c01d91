"""Volumes that are read or written as files, noted: what was cut off is ended later.

That is done by the gateway that comes after one that was killed, and by this one, where a target
did not answer at the end.
"""

from __future__ import annotations

import asyncio
import uuid as uuids
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import structlog

from plugin.gateway.errors import GatewayError, noting
from plugin.gateway.locks import Locks
from plugin.gateway.storage.openexport import OpenExport
from plugin.gateway.target import Target
from plugin.gateway.targets import Targets

SUFFIX = ".stream"

RETRY_S = 30.0
"""How long it takes until what could not be ended is tried again, seconds."""

_log = structlog.get_logger(__name__)


class Leftovers:
    """A file for each volume that is one."""

    def __init__(self, folder: Path) -> None:
        """Notes in `folder`, which is for root alone; what is noted there is of one before."""
        self._folder = folder
        self._left = dict(self._read())
        """What nobody is at any more, by its note."""
        self._some = asyncio.Event()
        if self._left:
            self._some.set()

    def _read(self) -> Iterator[tuple[Path, OpenExport]]:
        for note in sorted(self._folder.glob(f"*{SUFFIX}")):
            with suppress(OSError, UnicodeError):
                export = OpenExport.read(note.read_text())
                if export is not None:
                    yield note, export

    def add(self, export: OpenExport) -> Path:
        """Notes what is to begin; returns the note.

        Raises:
            Refused: that cannot be written.
        """
        note = self._folder / f"{uuids.uuid4().hex}{SUFFIX}"
        with noting(note):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            note.write_text(export.text)
        return note

    async def end(self, target: Target, note: Path, export: OpenExport) -> None:
        """Ends what was noted.

        Raises:
            GatewayError: it could not be ended now; it will be.
        """
        try:
            await target.ping()  # one that is silent is not waited for as one that copies
            await target.do(export.end, copies=True)
        except BaseException:
            self._left[note] = export
            self._some.set()
            raise
        self._forget(note)

    def _forget(self, note: Path) -> None:
        self._left.pop(note, None)
        with suppress(OSError):
            note.unlink(missing_ok=True)

    async def end_of(self, target: Target, store: str, name: str) -> None:
        """Ends what is left of a volume, whose lock is held, of an lvstore (its UUID).

        Raises:
            GatewayError: it could not be ended now.
        """
        for note, export in list(self._left.items()):
            if (export.store, export.name) == (store, name):
                await self.end(target, note, export)
                _log.info("ended what was left of a volume read or written", volume=name)

    async def clean(self, targets: Targets, locks: Locks) -> None:
        """Ends what is left, again and again, until it is cancelled."""
        while True:
            await self._some.wait()
            self._some.clear()
            for export in list(self._left.values()):
                # Who has the lock ends it, or will be waited for the next time.
                with suppress(GatewayError, TimeoutError):
                    async with locks.hold(export.lock, wait_s=RETRY_S):
                        for target, store in (await targets.stores()).stores:
                            if store.uuid == export.store:
                                await self.end_of(target, export.store, export.name)
            if self._left:
                self._some.set()
                await asyncio.sleep(RETRY_S)
