"""What requests of a disk's volume have to be like: `block.N.limits.*` of libvirt 11.10 and newer.

For disks of its own libvirt has them of QEMU's block layer, in bytes, while the domain runs. What
the target does not tell is left out, as QEMU leaves out what has no limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass

from plugin.gateway.batching import Batcher
from plugin.gateway.errors import GatewayError
from pydataplane import methods
from pydataplane.client import Client
from pydataplane.errors import RpcError

AGE_S = 600.0
"""What is known is asked for again after so many seconds: a server's disk may be another one."""

WAIT_S = 2.0
"""The longest that an answer waits for it, seconds: of a volume of Ceph the target asks Ceph."""

RETRY_S = 60.0
"""How long nothing is asked for when that has taken longer, or the target did not answer."""


@dataclass(frozen=True, slots=True)
class BlockLimits:
    """The limits of one bdev, bytes."""

    request_alignment: int
    """A logical block, without its metadata."""
    discard_alignment: int | None = None
    """Best length and alignment of discards; None: of a block, or the volume takes none."""
    transfer_optimal: int | None = None
    """Best length of long requests, which is told of images of Ceph; None: it is not."""

    def fields(self) -> tuple[tuple[str, int], ...]:
        """Returns what is known by libvirt's names, in its order."""
        named = (
            ("limits.request_alignment", self.request_alignment),
            ("limits.discard_alignment", self.discard_alignment),
            ("limits.transfer_optimal", self.transfer_optimal),
        )
        return tuple((name, value) for name, value in named if value is not None)


def ask(client: Client, names: Collection[str]) -> dict[str, BlockLimits]:
    """Returns the limits of those of these bdevs that the target tells of, by the name given.

    Raises:
        TargetError: the target does not answer.
    """
    answers = client.call_all([("bdev_get_bdevs", {"name": name}) for name in names])
    found = {}
    for name, answer in zip(names, answers, strict=True):
        if not isinstance(answer, RpcError):
            (found[name],) = (limits_of(item) for item in answer)
    return found


def limits_of(item: methods.Bdev) -> BlockLimits:
    """Reads one entry of bdev_get_bdevs."""
    inside = item.get("md_size", 0) if item.get("md_interleave", False) else 0
    block = item["block_size"] - inside
    granularity = item.get("preferred_unmap_granularity", 0)  # not of each SPDK
    discard = granularity * block if item["supported_io_types"].get("unmap", False) else 0
    image = item["driver_specific"].get("rbd", {})
    return BlockLimits(block, discard or None, image.get("object_size"))


class KnownLimits:
    """The limits of bdevs, which are asked for when somebody wants them, and then kept."""

    def __init__(self, ask: Callable[[list[str]], Awaitable[dict[str, BlockLimits]]]) -> None:
        """`ask` takes names, each once, and returns what is known by name."""
        self._asking = Batcher(self._learn)
        self._ask = ask
        self._known: dict[str, BlockLimits] = {}
        self._since = self._not_before = time.monotonic()

    async def of(self, names: Collection[str]) -> Mapping[str, BlockLimits]:
        """Returns what is known of these bdevs, and of others; waits `WAIT_S` for it at most."""
        now = time.monotonic()
        if now - self._since > AGE_S:
            self._known, self._since = {}, now
        known = self._known
        missing = [name for name in names if name not in known]
        if missing and now >= self._not_before:
            try:
                await asyncio.wait_for(self._asking.get(missing), WAIT_S)
            except (GatewayError, TimeoutError):
                self._not_before = time.monotonic() + RETRY_S
        return known

    async def _learn(self, names: list[str]) -> dict[str, BlockLimits]:
        known = self._known
        found = await self._ask(names)
        known.update(found)
        return found
