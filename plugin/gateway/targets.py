"""All targets of the host as one: each call goes to those that it concerns.

A volume is where its lvstore is, a domain's controller where its socket is; the volumes of a domain
are all of one target, for QEMU has one controller for them. A target that does not answer is no
hindrance to what others serve; what it alone may have is refused with its name.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from plugin.config import Config
from plugin.gateway.answers import Answers, Member, answers_of
from plugin.gateway.batching import Batcher
from plugin.gateway.blocklimits import BlockLimits
from plugin.gateway.errors import GatewayError, NoAnswer, Refused
from plugin.gateway.latencies import Latencies, Wanted
from plugin.gateway.lvolcheckpoints import Checkpoint
from plugin.gateway.target import Room, Suspended, Target
from plugin.gateway.usage import Unit, Usage
from plugin.targets import addresses
from pydataplane.domain import translate
from pydataplane.domain.actions import actions, leftovers, unasked
from pydataplane.domain.errors import Refusal
from pydataplane.domain.images import LunIdentity
from pydataplane.domain.limits import Limits
from pydataplane.domain.model import DiskAddress
from pydataplane.domain.names import domain_controller
from pydataplane.domain.observed import State
from pydataplane.domain.reconcile import Release
from pydataplane.domain.translate import Definition, LunPlan, Plan, Settings
from pydataplane.lvols import Lvol, Sizes
from pydataplane.lvstores import Lvstore
from pydataplane.watchedclient import WatchedClient

T = TypeVar("T")

KEPT = 4
"""Connections to each target that stay open; it serves 64 clients in all."""


@dataclass(frozen=True)
class Observed:
    """The controllers of all targets at one moment."""

    states: list[tuple[Path, State]]
    """With each target's folder of sockets."""

    @property
    def controllers(self) -> set[str]:
        """Returns the names of all controllers."""
        return {name for _, state in self.states for name in state.controllers}

    @property
    def idle(self) -> set[str]:
        """Returns the names of the controllers that no QEMU is connected to."""
        return {n for _, state in self.states for n in set(state.controllers) - state.connected}

    def is_right(self, plan: Plan) -> bool:
        """Whether a running domain's controller has exactly its LUNs, as far as this tells."""
        folder = Path(plan.socket).parent
        at = [state for where, state in self.states if where == folder]
        if len(at) != 1:
            return False
        if actions(plan, at[0], whole=False) or unasked(plan, at[0]):
            return False
        return not leftovers(plan, at[0])

    def of_domain(self, controller: str) -> set[str]:
        """Returns the names of a domain's controllers; `controller` is its own."""
        return {name for _, state in self.states for name in state.of_domain(controller)}


@dataclass(frozen=True)
class Loaded:
    """The lvstores and pools of all targets at one moment."""

    stores: list[tuple[Target, Lvstore]]
    """With the target that has each."""
    unheard: list[tuple[Member, GatewayError]]
    """Targets that say nothing, and may have more."""


class Targets:
    """The targets of this host; each method is that of `Target`."""

    def __init__(self, config: Config) -> None:
        """Looks anew at each call for what targets there are, as `config` says."""
        self._config = config
        self._made: dict[Path, Target] = {}
        self._usage = Batcher(self._usage_of)
        self._sizes = Batcher(self._sizes_of)
        self._latencies = Batcher(self._latencies_of)

    def _members(self) -> list[Member]:
        there = addresses(self._config)
        for socket in self._made.keys() - {address.rpc_socket for address in there}:
            self._made.pop(socket).close()
        return [Member(address, self._target(address.rpc_socket)) for address in there]

    def close(self) -> None:
        """Lets all threads and connections go; calls under way come to their end."""
        while self._made:
            self._made.popitem()[1].close()

    def _target(self, socket: Path) -> Target:
        if socket not in self._made:
            client = WatchedClient(socket, self._config.target.timeout_s, keep=KEPT)
            self._made[socket] = Target(client)
        return self._made[socket]

    async def _ask(
        self,
        question: Callable[[Target], Awaitable[T]],
        *,
        enough: Callable[[list[T]], bool] = bool,
        wait_for_silent: bool = True,
    ) -> Answers[T]:
        """Puts a question to all targets; `enough` and `wait_for_silent` as for `answers_of`.

        Raises:
            GatewayError: none of them answers.
        """
        members = self._members()
        if len(members) == 1 and wait_for_silent:  # nobody else can know
            (member,) = members
            try:
                return Answers([(member, await question(member.target))], [], [])
            except NoAnswer:
                raise
            except GatewayError as error:
                return Answers([], [(member, error)], [])
        asked: dict[asyncio.Future[T], Member] = {
            asyncio.ensure_future(question(member.target)): member for member in members
        }
        return await answers_of(asked, enough=enough, wait_for_silent=wait_for_silent)

    async def _only(
        self, question: Callable[[Target], Awaitable[T]], what: str
    ) -> tuple[Member, T]:
        """Returns the one target that answers a question about `what` without a refusal.

        Raises:
            GatewayError: none does, or more than one.
        """
        members = self._members()
        if len(members) == 1:
            return members[0], await question(members[0].target)
        answers = await self._ask(question)
        if len(answers.given) > 1:
            labels = " and ".join(member.label for member, _ in answers.given)
            raise Refused(
                Refusal.NO_VOLUME,
                f"{what} is in {labels}: give one of the two lvstores another name, for a name is"
                " of one target",
            )
        if answers.given:
            return answers.given[0]
        if answers.silent:
            member, error = answers.silent[0]
            raise NoAnswer(
                Refusal.NO_TARGET, f"{what} is in no target that answers; {member.label}: {error}"
            )
        refusals = [error for _, error in answers.refused]
        raise next((e for e in refusals if "there is no lvstore" not in str(e)), refusals[0])

    def _of_plan(self, plan: Plan) -> Target:
        """Returns the target that makes the plan's socket: the first, if none is known to."""
        members = self._members()
        folder = Path(plan.socket).parent
        fitting = [member for member in members if member.address.vhost_dir == folder]
        return (fitting or members)[0].target

    async def _check_home(self, plan: Plan, luns: tuple[LunPlan, ...]) -> None:
        """Refuses disks whose volumes are of another target than the domain's controller."""
        members = self._members()
        if len(members) == 1 or not luns:
            return
        home = self._of_plan(plan)
        at = next(member for member in members if member.target is home)
        stores = await self._ask(Target.lvstores)
        for lun in luns:
            having = [member for member, names in stores.given if lun.volume.lvstore in names]
            if having and at not in having:
                raise Refused(
                    Refusal.UNSUPPORTED,
                    f"disk {lun.dev}: volume {lun.volume.alias} is of {having[0].label}, but domain"
                    f" {plan.domain} has its controller in {at.label}: all volumes of a domain are"
                    " of one target; stop the domain and define it with disks of that one only",
                )

    async def check_home(self, plan: Plan, lun: LunPlan) -> None:
        """Refuses a disk whose volume is of another target than the domain's controller."""
        await self._check_home(plan, (lun,))

    def at_home(self, settings: Settings, xml: str) -> Settings:
        """Returns the settings with the folder of sockets that a domain's controller is in.

        libvirtd's own `xml`; the settings as they are, where the controller is in no known one.
        """
        members = self._members()
        plan = translate.plan(xml) if len(members) > 1 else None
        folder = Path(plan.socket).parent if plan is not None else None
        if folder not in [member.address.vhost_dir for member in members]:
            return settings
        return replace(settings, vhost_dir=str(folder))

    async def settings(
        self, settings: Settings, translated: Callable[[Settings], Awaitable[Definition]]
    ) -> Settings:
        """Returns the settings with the folder of sockets for a domain, as it is translated.

        Raises:
            GatewayError: its volumes are of several targets.
            TranslateError: as the translation.
        """
        if len(self._members()) == 1:
            return settings
        plan = (await translated(settings)).plan
        if plan is None or not plan.luns:
            return settings
        wanted = {lun.volume.lvstore for lun in plan.luns if lun.volume.source is None}
        answers = await self._ask(
            Target.lvstores, enough=lambda found: wanted <= set().union(*found)
        )
        homes = [(member, names & wanted) for member, names in answers.given if names & wanted]
        for store in sorted(wanted):
            having = [member.label for member, names in homes if store in names]
            if len(having) > 1:
                raise Refused(
                    Refusal.NO_STORE,
                    f"lvstore {store} is in {' and '.join(having)}: give one of the two another"
                    " name, for a name is of one target",
                )
        if len(homes) > 1:
            parts = [f"{', '.join(sorted(names))} of {member.label}" for member, names in homes]
            raise Refused(
                Refusal.UNSUPPORTED,
                f"domain {plan.domain} has disks in lvstores {' and '.join(parts)}: all volumes of"
                " a domain are of one target",
            )
        if not homes:
            return settings
        return replace(settings, vhost_dir=str(homes[0][0].address.vhost_dir))

    def _check_heard(self) -> None:
        """Raises a refusal if a target is silent, which may have what no other one has."""
        why = next((why for member in self._members() if (why := member.target.silence)), None)
        if why is not None:
            raise why

    def missing(self, lun: LunPlan) -> Refused:
        """Returns why nothing is known of a disk's volume."""
        try:
            self._check_heard()
        except NoAnswer as why:
            return why
        if lun.volume.source is not None:
            text = f"image {lun.volume.alias} is open, and known here, while its domain runs"
            return Refused(Refusal.NOT_POSSIBLE_NOW, text)
        return Refused(Refusal.NO_VOLUME, f"the target has no volume {lun.volume.alias}")

    def silence_at(self, plan: Plan) -> NoAnswer | None:
        """Returns why nothing should wait for the target that makes a plan's socket, or None."""
        return self._of_plan(plan).silence

    async def _of_controller(self, controller: str) -> list[Target]:
        members = self._members()
        if len(members) == 1:
            return [members[0].target]
        answers = await self._ask(Target.controllers)
        return [member.target for member, names in answers.given if _has(names, controller)]

    async def volume(self, reference: str) -> Lvol:
        """Returns a volume by LVSTORE/LVOL or UUID."""
        return (await self._only(lambda t: t.volume(reference), f"volume {reference}"))[1]

    async def lvol(self, reference: str) -> Lvol:
        """Returns a volume by LVSTORE/LVOL or UUID, for what no image of another host can have.

        Raises:
            Refused: it is such an image.
        """
        found = await self.volume(reference)
        if found.image is not None:
            raise Refused(
                Refusal.CANNOT_CHANGE,
                f"image {found.path} is no virtlun volume: its snapshots, copies and backups are"
                " made where it is; leave the disk out (snapshot='no')",
            )
        return found

    async def stores(self) -> Loaded:
        """Returns all lvstores and pools that are loaded.

        Raises:
            GatewayError: none of them tells.
        """
        answers = await self._ask(Target.stores, wait_for_silent=False)
        if not answers.given:
            raise answers.refused[0][1]
        stores = [(member.target, store) for member, found in answers.given for store in found]
        return Loaded(stores, [*answers.silent, *answers.refused])

    async def sizes(self, references: list[str]) -> Mapping[str, Sizes]:
        """Returns the sizes of those of these volumes that are there; see `Batcher.get`.

        Of a target that is silent no volume is there.
        """
        return await self._sizes.get(references)

    async def _sizes_of(self, references: list[str]) -> dict[str, Sizes]:
        answers = await self._ask(lambda t: t.sizes(references), wait_for_silent=False)
        return {name: item for _, found in answers.given for name, item in found.items()}

    async def ping(self, controller: str | None = None) -> None:
        """Raises a refusal if no target answers, or none that has this controller."""
        members = self._members()
        if len(members) == 1:
            await members[0].target.ping()
            return
        answers = await self._ask(Target.controllers)
        if controller is not None and any(_has(names, controller) for _, names in answers.given):
            return
        if answers.silent:
            raise answers.silent[0][1]

    async def cluster_size(self, volume: Lvol) -> int:
        """Returns the step in which a volume's size can change, bytes."""
        return await (await self._having(volume)).cluster_size(volume)

    async def _having(self, volume: Lvol) -> Target:
        return await self.of_volume(volume.uuid)

    async def uuids(self, references: list[str]) -> dict[str, str]:
        """Returns the UUIDs of those of these LVSTORE/LVOL that can be found now."""
        if not references:
            return {}
        try:
            answers = await self._ask(lambda t: t.uuids(references))
        except GatewayError:
            return {}
        having = Counter(name for _, uuids in answers.given for name in uuids)
        # A name that two targets have says of neither volume that it is meant.
        return {
            name: uuid
            for _, uuids in answers.given
            for name, uuid in uuids.items()
            if having[name] == 1
        }

    async def resize(self, volume: Lvol, size: int) -> None:
        """Gives a volume at least `size` bytes."""
        await (await self._having(volume)).resize(volume, size)

    async def of_volume(self, volume: str) -> Target:
        """Returns the target that has a volume (its UUID); all of a domain's are of one."""
        return (await self._only(lambda t: t.volume(volume), f"volume {volume}"))[0].target

    async def checkpoints(self, lvstores: Collection[str], domain: str) -> list[Checkpoint]:
        """Returns what checkpoints a domain (its UUID) has in these lvstores, oldest first."""
        members = self._members()
        having = [member.target for member in members]
        if len(members) > 1:
            wanted = set(lvstores)
            answers = await self._ask(
                Target.lvstores, enough=lambda found: bool(wanted & set().union(*found))
            )
            having = [member.target for member, names in answers.given if names & wanted]
            if not having and answers.silent:
                raise answers.silent[0][1]
        return await having[0].checkpoints(lvstores, domain) if having else []

    async def usage(self, units: list[Unit]) -> Mapping[Unit, Usage]:
        """Returns what guests did with LUNs; unknown ones lack. See `Batcher.get`."""
        return await self._usage.get(units)

    async def _usage_of(self, units: list[Unit]) -> dict[Unit, Usage]:
        answers = await self._ask(lambda t: t.usage(units), wait_for_silent=False)
        return {unit: item for _, found in answers.given for unit, item in found.items()}

    async def latencies(self, wanted: list[Wanted]) -> Mapping[Wanted, tuple[Latencies, ...]]:
        """Returns how long operations of volumes took; see `Batcher.get`."""
        return await self._latencies.get(wanted)

    async def _latencies_of(self, wanted: list[Wanted]) -> dict[Wanted, tuple[Latencies, ...]]:
        answers = await self._ask(lambda t: t.latencies(wanted), wait_for_silent=False)
        return {each: item for _, found in answers.given for each, item in found.items()}

    async def block_limits(self, names: list[str]) -> dict[str, BlockLimits]:
        """Returns what requests of bdevs have to be like; of a target that is silent nothing.

        Raises:
            GatewayError: none of the targets answers.
        """
        answers = await self._ask(lambda t: t.block_limits(names), wait_for_silent=False)
        return {name: item for _, found in answers.given for name, item in found.items()}

    async def holders(self, uuid: str, besides: str) -> list[str]:
        """Returns the UUIDs of other domains whose controller has this volume as a LUN."""
        answers = await self._ask(lambda t: t.holders(uuid, besides))
        return [name for _, found in answers.given for name in found]

    async def suspended(self) -> list[Suspended]:
        """Returns what waits because an I/O failed; of a target that is silent nothing."""
        answers = await self._ask(Target.suspended, wait_for_silent=False)
        return [item for _, found in answers.given for item in found]

    async def rooms(self, lvstores: Collection[str]) -> dict[str, Room]:
        """Returns what room there is in those of these lvstores that a target has loaded."""
        answers = await self._ask(lambda t: t.rooms(lvstores), wait_for_silent=False)
        return {name: room for _, found in answers.given for name, room in found.items()}

    async def observe(self) -> Observed:
        """Returns what all targets have; of one that is silent nothing."""
        answers = await self._ask(Target.state)
        return Observed([(member.address.vhost_dir, state) for member, state in answers.given])

    async def has_disk(self, address: DiskAddress, bdev: str) -> bool:
        """Whether a controller shows this bdev at this address."""
        answers = await self._ask(lambda t: t.has_disk(address, bdev))
        if any(found for _, found in answers.given):
            return True
        if answers.silent:
            raise answers.silent[0][1]
        return False

    async def find_volumes(self, plan: Plan, known: Mapping[str, str]) -> Plan:
        """Returns the plan with the UUIDs of the volumes that are there; see `missingvolumes`."""
        await self._check_home(plan, plan.luns)
        return await self._of_plan(plan).find_volumes(plan, dict(known))

    async def is_open(self, plan: Plan, lun: LunPlan) -> bool:
        """Whether a plan's image is open in its target."""
        return await self._of_plan(plan).is_open(lun)

    async def image(self, plan: Plan, lun: LunPlan) -> Lvol:
        """Returns the open image of a plan's disk, which other targets may have open, too."""
        return await self._of_plan(plan).volume(lun.bdev_name)

    async def has_image(self, plan: Plan, lun: LunPlan) -> bool:
        """Whether a plan's image is open, or the target tries; see `Target.has_image`."""
        return await self._of_plan(plan).has_image(lun)

    async def identity_of(self, plan: Plan, lun: LunPlan) -> LunIdentity | None:
        """Returns which LUN a disk is on. See `Target.identity_of`."""
        return await self._of_plan(plan).identity_of(lun)

    async def open_image(
        self,
        plan: Plan,
        lun: LunPlan,
        key: str | None,
        expected: LunIdentity | None = None,
    ) -> bool:
        """Opens it in the plan's target; False if it is open. See `Target.open_image`."""
        target, incoming = self._of_plan(plan), plan.incoming
        return await target.open_image(plan.controller, lun, key, expected, incoming=incoming)

    async def close_image(self, plan: Plan, lun: LunPlan) -> None:
        """Closes it, unless somebody uses it."""
        await self._of_plan(plan).close_image(lun)

    async def make_volumes(self, plan: Plan, mib: int) -> Plan:
        """Makes those volumes of the plan that have no UUID; returns it with all of them."""
        return await self._of_plan(plan).make_volumes(plan, mib)

    async def ensure(self, plan: Plan, *, whole: bool = True) -> list[LunPlan]:
        """Makes the controller exist with the plan's LUNs; see `Target.ensure`."""
        return await self._of_plan(plan).ensure(plan, whole=whole)

    async def add(self, plan: Plan, lun: LunPlan, volume: Lvol) -> bool:
        """Adds one LUN, of this volume, to the plan's controller; False if it is there already."""
        await self._check_home(plan, (lun,))
        return await self._of_plan(plan).add(plan, lun, volume)

    async def remove(self, address: DiskAddress, limited: str | None) -> None:
        """Removes one disk; its I/O has ended when this returns. Safe to repeat."""
        found = await self._of_controller(address.controller)
        for having in found:
            await having.remove(address, limited)
        if not found:
            self._check_heard()

    async def limits(self, volume: str) -> Limits:
        """Returns how much I/O is allowed with a volume (its UUID, or LVSTORE/LVOL)."""
        return (await self._only(lambda t: t.limits(volume), f"volume {volume}"))[1]

    async def tune(self, volume: str, controller: str | None, limits: Limits) -> None:
        """Gives a volume (its UUID) other limits; see `Target.tune`."""
        await (await self.of_volume(volume)).tune(volume, controller, limits)

    async def count(self, bdev: str, controller: str, *, counted: bool) -> None:
        """Has latencies of a disk of this controller's domain be counted; see `Target.count`."""
        for having in await self._of_controller(controller):
            await having.count(bdev, counted=counted)

    async def unlimit(self, volume: str, controller: str) -> None:
        """Takes a disk's limits from the volume that it was of; see `Target.unlimit`."""
        for having in await self._of_controller(controller):
            await having.unlimit(volume, controller)

    async def release_idle(self, controller: str) -> Release:
        """Deletes a domain's controllers with its disks unless a QEMU is connected to them."""
        outcome: Release = "none"
        for having in await self._of_controller(controller):
            found = await having.release_idle(controller)
            outcome = found if outcome != "busy" else outcome
        return outcome

    async def release_leftovers(self, plan: Plan) -> set[str]:
        """Deletes a running domain's idle controllers that its plan lacks; returns their names."""
        return await self._of_plan(plan).release_leftovers(plan)


def _has(names: Collection[str], controller: str) -> bool:
    """Whether there is a controller of the domain that `controller` is of."""
    return any(domain_controller(name) == domain_controller(controller) for name in names)
