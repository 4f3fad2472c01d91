"""Who a call comes from: the client's identity, its rights, and our own calls under its name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from plugin.config import GatewaySection
from plugin.gateway import libvirtdconf, polkit
from plugin.gateway.messages import Domain
from plugin.gateway.peer import Peer
from plugin.gateway.upstream import Upstream

_NAMES = ThreadPoolExecutor(4, "names")


class Caller:
    """One client as libvirtd sees it."""

    def __init__(self, peer: Peer, upstream: Path, config: GatewaySection) -> None:
        """`upstream` is libvirtd's socket of the client's kind: read-write or read-only."""
        self.peer = peer
        self.open_arguments = b""
        """The client's arguments of CONNECT_OPEN, once libvirtd took them."""
        self.identity = b""
        """Arguments of CONNECT_SET_IDENTITY: whose rights the client has; see `identify`."""
        self._path = upstream
        self._config = config
        self._own: Upstream | None = None
        self._mutex = asyncio.Lock()

    async def identify(self) -> None:
        """Finds the client's `identity`: names of users and groups may come from far away."""
        loop = asyncio.get_running_loop()
        self.identity = await loop.run_in_executor(_NAMES, self.peer.identity)

    async def check_may_read(self, dom: Domain) -> None:
        """Lets libvirtd judge whether the client may read a domain, where it judges each call.

        Raises:
            GatewayError: it may not, or libvirtd is not there.
        """
        if self.is_judged:
            await (await self.own()).metadata(dom, 0)

    async def may(self, actions: Sequence[str], name: str, uuid: str) -> bool:
        """Whether libvirtd would let the client do these polkit actions to a domain."""
        if not self.is_judged:
            return True
        return await polkit.may(self.identity, actions, name, uuid, self._config.pkcheck)

    async def may_do(self, actions: Sequence[str], of: Mapping[str, str]) -> bool:
        """Whether libvirtd would let the client do these polkit actions to what `of` says."""
        if not self.is_judged:
            return True
        return await polkit.may_do(self.identity, actions, of, self._config.pkcheck)

    @property
    def is_judged(self) -> bool:
        """Whether libvirtd judges each call."""
        return libvirtdconf.judges_calls(self._config.libvirtd_conf)

    async def own(self) -> Upstream:
        """Returns the connection for calls of our own in this client's name.

        Raises:
            UpstreamGone, UpstreamError: libvirtd is not there or refuses.
        """
        async with self._mutex:
            if self._own is None or not self._own.alive:
                if self._own is not None:
                    await self._own.close()
                self._own = await Upstream.open(
                    self._path, self.open_arguments, self.identity, self._config.auth_conf
                )
            return self._own

    async def adopt_identity(self, payload: bytes) -> None:
        """Makes our own calls for this client use the identity that it set itself (root only)."""
        async with self._mutex:
            self.identity = payload
            if self._own is not None:
                await self._own.close()
                self._own = None

    async def close(self) -> None:
        """Closes the connection for our own calls, if there is one."""
        if self._own is not None:
            await self._own.close()
