"""Volumes as files, for what is read and written by us."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path

from plugin.gateway.errors import Code, GatewayError, Refused
from plugin.gateway.storage.leftovers import Leftovers
from plugin.gateway.storage.openexport import OpenExport
from plugin.gateway.storage.pools import Pool
from pydataplane.lvols import Volume


@asynccontextmanager
async def opened(
    pool: Pool, volume: Volume, leftovers: Leftovers, *, write: bool
) -> AsyncIterator[int]:
    """Gives a volume as an open file for the body.

    To be written it must not be in use, and nobody else can use it meanwhile. It is read as it is
    at the beginning, in use or not, by an lvol snapshot that goes at the end, where its store has
    such; so whoever reads it keeps no domain from starting.

    Raises:
        GatewayError: it cannot be opened, or what is written is not at its end.
    """
    open_export = OpenExport.of(
        pool.store.uuid, volume, snapshot=not write and pool.store.makes_volumes
    )
    await pool.target.do(open_export.check_free)
    note = leftovers.add(open_export)
    opening = asyncio.ensure_future(
        pool.target.do(
            lambda volumes: _open(open_export.begin(volumes, write=write), volume, write)
        )
    )
    try:
        yield await asyncio.shield(opening)
    finally:
        await asyncio.wait((opening,))  # the target's thread goes on where this task is cancelled
        if not opening.exception():
            os.close(opening.result())
        # Who has written may not be told that all is well; who has read is done.
        with nullcontext() if write else suppress(GatewayError):
            await leftovers.end(pool.target, note, open_export)


def _open(path: Path, volume: Volume, write: bool) -> int:
    try:
        return os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        raise Refused(
            Code.SYSTEM_ERROR, f"volume {volume.path}: {path}: {error.strerror}"
        ) from error
