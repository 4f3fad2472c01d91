"""What our pools are: one for each lvstore that a target has loaded."""

from __future__ import annotations

import uuid as uuids
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from plugin.gateway.errors import GatewayError, NoAnswer
from plugin.gateway.storage.leftovers import Leftovers
from plugin.gateway.storage.refs import StoragePool, StorageVol
from plugin.gateway.storage.states import State, States
from plugin.gateway.target import Target
from plugin.gateway.targets import Loaded, Targets
from pydataplane.domain.errors import Refusal
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
        self._heard: dict[Target, set[str]] = {}
        """The names that each target's lvstores had when it was last heard."""

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
        """Returns all, by name, also those that are undefined; see `_all`.

        Raises:
            GatewayError: no target answers.
        """
        return (await self._all())[0]

    async def _all(self) -> tuple[list[Pool], Loaded]:
        """Returns them, by name, and what the targets said.

        Of two of one name neither: which of them is meant nobody can say. A target that is silent
        is taken to have what it had when it was last heard.

        Raises:
            GatewayError: no target answers.
        """
        if not self._prefix:
            return [], Loaded([], [])
        loaded = await self._targets.stores()
        last = {
            member.target: self._heard.get(member.target, set()) for member, _ in loaded.unheard
        }
        now: dict[Target, set[str]] = {}
        for target, store in loaded.stores:
            now.setdefault(target, set()).add(store.name)
        self._heard = last | now
        having = Counter(name for names in self._heard.values() for name in names)
        pools = [self._pool(*each) for each in loaded.stores if having[each[1].name] == 1]
        return sorted(pools, key=lambda pool: pool.name), loaded

    async def shown(self) -> list[Pool]:
        """Returns those that clients see, by name; none where no target answers."""
        try:
            return [pool for pool in await self.every() if pool.state is not State.UNDEFINED]
        except GatewayError:
            return []

    async def named(self, name: str, *, undefined: bool = False) -> Pool | None:
        """Returns the pool of this name, or None; with `undefined` also one that is so.

        Raises:
            GatewayError: it can be ours, and of a target that does not answer.
        """
        if not self.may_be(name):
            return None
        return await self._one(lambda pool: pool.name == name, name, undefined=undefined)

    async def with_uuid(self, uuid: bytes, name: str | None = None) -> Pool | None:
        """Returns the pool with this UUID, or None; `name` is what the client calls it.

        Raises:
            GatewayError: it can be of a target that does not answer.
        """
        called = name or str(uuids.UUID(bytes=uuid))
        return await self._one(lambda pool: pool.ref.uuid == uuid, called)

    async def _one(
        self, is_meant: Callable[[Pool], bool], name: str, *, undefined: bool = False
    ) -> Pool | None:
        pools, loaded = await self._all()
        for pool in filter(is_meant, pools):
            return pool if undefined or pool.state is not State.UNDEFINED else None
        if loaded.unheard:
            member, why = loaded.unheard[0]
            raise NoAnswer(
                Refusal.NO_TARGET,
                f"pool {name} is in no target that answers; {member.label}: {why}",
            )
        return None

    def _pool(self, target: Target, store: Lvstore) -> Pool:
        state = self._states.of(store.uuid)
        return Pool(store, target, state, self._prefix + store.name, self._paths + store.name)

    def set_state(self, pool: Pool, state: State) -> None:
        """Notes a pool's state; raises Refused where that cannot be written."""
        self._states.set(pool.store.uuid, state)
