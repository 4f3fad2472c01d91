"""What our pools are: one for each lvstore that a target has loaded."""

from __future__ import annotations

import uuid as uuids
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from plugin.gateway.errors import GatewayError
from plugin.gateway.storage.leftovers import Leftovers
from plugin.gateway.storage.refs import StoragePool, StorageVol
from plugin.gateway.storage.states import State, States
from plugin.gateway.target import Target
from plugin.gateway.targets import Targets
from pydataplane.domain.translate import Settings
from pydataplane.lvstores import Lvstore


@dataclass(frozen=True)
class Pool:
    """One of them, at one moment."""

    store: Lvstore
    target: Target
    """The one that has it."""
    state: State
    name: str
    path: str
    """Where its volumes are, as a domain's disks name them; no such folder exists."""

    @property
    def active(self) -> bool:
        """Whether it shows its volumes."""
        return self.state is State.ACTIVE

    @property
    def ref(self) -> StoragePool:
        """How the protocol names it."""
        return StoragePool(self.name, uuids.UUID(self.store.uuid).bytes)

    def volume_path(self, name: str) -> str:
        """Returns the path of a volume, which is its key as well."""
        return f"{self.path}/{name}"

    def volume_ref(self, name: str) -> StorageVol:
        """Returns how the protocol names a volume."""
        return StorageVol(self.name, name, self.volume_path(name))


class Pools:
    """All of them. What is not theirs is told from its name or path alone, without a question."""

    def __init__(self, targets: Targets, settings: Settings, folder: Path) -> None:
        """Looks at the targets anew at each question; `folder` is for notes, and root's alone."""
        self._targets = targets
        self._prefix = settings.pool_prefix
        self._paths = settings.path_prefix
        self._states = States(folder)
        self.leftovers = Leftovers(folder)

    @property
    def prefix(self) -> str:
        """How the names of pools of ours begin; empty: there are none."""
        return self._prefix

    def may_be(self, name: str) -> bool:
        """Whether a pool's name is of ours."""
        return bool(self._prefix) and name.startswith(self._prefix)

    def split(self, path: str) -> tuple[str, str] | None:
        """Returns pool and volume that a path (or key) names; None: it is none of ours."""
        if not self._prefix or not self._paths or not path.startswith(self._paths):
            return None
        store, slash, volume = path[len(self._paths) :].partition("/")
        return (self._prefix + store, volume) if slash and volume else None

    async def every(self) -> list[Pool]:
        """Returns all, by name, also those that are undefined.

        Of two of one name neither: which of them is meant nobody can say.

        Raises:
            GatewayError: no target answers.
        """
        if not self._prefix:
            return []
        found = await self._targets.stores()
        having = Counter(store.name for _, store in found)
        pools = [self._pool(target, store) for target, store in found if having[store.name] == 1]
        return sorted(pools, key=lambda pool: pool.name)

    async def shown(self) -> list[Pool]:
        """Returns those that clients see, by name; none where no target answers."""
        try:
            return [pool for pool in await self.every() if pool.state is not State.UNDEFINED]
        except GatewayError:
            return []

    async def named(self, name: str, *, undefined: bool = False) -> Pool | None:
        """Returns the pool of this name, or None; with `undefined` also one that is so.

        Raises:
            GatewayError: it can be ours, and no target answers.
        """
        if not self.may_be(name):
            return None
        return self._one([p for p in await self.every() if p.name == name], undefined)

    async def with_uuid(self, uuid: bytes) -> Pool | None:
        """Returns the pool with this UUID, or None.

        Raises:
            GatewayError: no target answers.
        """
        return self._one([p for p in await self.every() if p.ref.uuid == uuid], False)

    @staticmethod
    def _one(found: list[Pool], undefined: bool) -> Pool | None:
        if not found or (found[0].state is State.UNDEFINED and not undefined):
            return None
        return found[0]

    def _pool(self, target: Target, store: Lvstore) -> Pool:
        state = self._states.of(store.uuid)
        return Pool(store, target, state, self._prefix + store.name, self._paths + store.name)

    def set_state(self, pool: Pool, state: State) -> None:
        """Notes a pool's state; raises Refused where that cannot be written."""
        self._states.set(pool.store.uuid, state)
