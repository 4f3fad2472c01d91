"""The gateway's own connection to libvirtd, under its own identity.

For questions that no client asked, and to finish or take back what a client began: never for what
a client wants done. It is opened when it is needed and again after libvirtd went away. There are
two: on one the changes and libvirtd's events, on the other what is read for the cache of domains
(plugin.gateway.domaincache), so that neither waits for the other in libvirtd's queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from plugin.gateway.upstream import Events, Upstream, open_arguments


class AdminConnection:
    """One connection to the libvirtd behind `path`, shared by all who need it."""

    def __init__(self, path: Path, uri: str, auth_conf: Path) -> None:
        """Opens nothing yet; `uri` is the one of the hypervisor whose domains we serve.

        `auth_conf` says who we are where libvirtd asks.
        """
        self._path = path
        self._arguments = open_arguments(uri)
        self._auth_conf = auth_conf
        self._events: Events = {}
        self._lost: Callable[[], None] | None = None
        self._upstream: Upstream | None = None
        self._mutex = asyncio.Lock()

    def watch(self, events: Events, lost: Callable[[], None]) -> None:
        """Has libvirtd's events taken (see `Upstream.watch`), and `lost` called when they end.

        Takes effect with the next connection, so call it before `get`.
        """
        self._events, self._lost = events, lost

    async def get(self) -> Upstream:
        """Returns the connection, a new one if the last has ended.

        Raises:
            UpstreamGone, UpstreamError: libvirtd is not there or refuses.
        """
        async with self._mutex:
            if self._upstream is None or not self._upstream.alive:
                if self._upstream is not None:
                    await self._upstream.close()
                upstream = await Upstream.open(self._path, self._arguments, None, self._auth_conf)
                try:
                    if self._lost is not None:
                        await upstream.watch(self._events, self._lost)
                except BaseException:
                    await upstream.close()
                    raise
                self._upstream = upstream
            return self._upstream

    @property
    def opened(self) -> bool:
        """Whether there has been a connection; it may have ended since."""
        return self._upstream is not None

    async def close(self) -> None:
        """Closes the connection, if there is one."""
        if self._upstream is not None:
            await self._upstream.close()
