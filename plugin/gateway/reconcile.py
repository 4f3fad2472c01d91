"""Makes the target follow what the domains' metadata says, when plugin.gateway.loop asks for it.

It gives running domains their LUNs again after a target came back without them, and takes away what
nobody uses any more: controllers of domains that do not run, or are gone. A controller that a QEMU
is connected to is never taken away, whatever libvirtd says, nor one whose name is not `vm-UUID`.
From a domain that runs no LUN is taken: one that its metadata does not have is named in the log, as
kept, with what puts it right.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from uuid import UUID

import structlog

from plugin.gateway import copies, images, records
from plugin.gateway.domaincache import CachedDomain
from plugin.gateway.errors import Code, GatewayError, LunNotReleased, UpstreamError
from plugin.gateway.messages import Domain
from plugin.gateway.services import Services
from plugin.gateway.targets import Observed
from plugin.gateway.upstream import XML_INACTIVE, XML_SECURE
from pydataplane.domain import translate
from pydataplane.domain.errors import TranslateError
from pydataplane.domain.names import domain_controller
from pydataplane.domain.translate import CONTROLLER_PREFIX, controller_name

_log = structlog.get_logger(__name__)


TURN = 64
"""Domains after which others than the round get their turn."""

FAILED = "not reconciled"
"""Event of the log: what the sentence says failed."""
KEPT = "LUN kept on a running domain"
"""Event of the log: nothing failed, and the sentence says what was found and what changes it."""


class Reconciler:
    """Goes through all domains and controllers; remembers what it has said and seen.

    What each domain needs is cached (plugin.gateway.domaincache) and what the targets have is asked
    once a round, so a domain that is right costs no call.
    """

    def __init__(self, services: Services) -> None:
        """Has seen nothing yet."""
        self._services = services
        self._said: dict[str, str] = {}
        self._strays: set[str] = set()
        self._recorded: dict[bytes, CachedDomain] = {}
        """The domains whose metadata says all, and as what they were known then."""

    async def run(self) -> None:
        """Goes through all once. What cannot be put right is logged and left.

        Raises:
            GatewayError: libvirtd cannot be asked.
        """
        services = self._services
        try:
            # Before the domains: a controller made for one that starts meanwhile is not among them.
            observed = await services.target.observe()
        except GatewayError as error:
            self._say("target", str(error))
            return
        self._said.pop("target", None)
        domains = await (await services.admin()).domains(0)
        unopened = images.Silent()
        for nth, dom in enumerate(domains):
            if nth % TURN == TURN - 1:
                await asyncio.sleep(0)
            try:
                seen = await services.domain_cache.current(dom)
                if not self._is_right(dom, seen, observed):
                    silent = services.target.silence_at(seen.plan) if seen.plan else None
                    if silent is not None:  # others are not to wait for it
                        raise silent
                    await self._put_right(dom, unopened)
                self._said.pop(dom.uuid_text, None)
            except LunNotReleased as error:
                self._say(dom.uuid_text, str(error), KEPT, domain=dom.name)
            except (GatewayError, TranslateError) as error:
                self._say(dom.uuid_text, str(error), domain=dom.name)
        there = {dom.uuid for dom in domains}
        self._recorded = {uuid: seen for uuid, seen in self._recorded.items() if uuid in there}
        known = {controller_name(dom.uuid_text) for dom in domains}
        idle = {name for name in observed.idle if name.startswith(CONTROLLER_PREFIX)}
        strays = {domain_controller(name) for name in idle} - known
        for name in strays & self._strays:  # another libvirtd of this host may just make it
            await self._remove_stray(name)
        self._strays = strays

    def _is_right(self, dom: Domain, seen: CachedDomain, observed: Observed) -> bool:
        """Whether there is nothing to do for a domain, as far as can be told without a call."""
        if not seen.running:
            recorded = all(lun.uuid is not None for lun in seen.luns)
            return recorded and not observed.of_domain(controller_name(dom.uuid_text))
        if self._recorded.get(dom.uuid) is not seen:  # of its persistent side nothing is known here
            return False
        return seen.plan is not None and observed.is_right(seen.plan)

    async def _put_right(self, dom: Domain, unopened: images.Silent) -> None:
        services = self._services
        async with services.domain_lock(dom.uuid):
            recorded = await records.take_over(services, dom)
            await reconcile_domain(services, dom, unopened=unopened)
        seen = await services.domain_cache.current(dom)
        if recorded:
            self._recorded[dom.uuid] = seen

    async def _remove_stray(self, controller: str) -> None:
        """Removes the controller of a domain that libvirtd does not know at all."""
        services = self._services
        try:
            uuid = UUID(controller.removeprefix(CONTROLLER_PREFIX)).bytes
        except ValueError:
            return
        try:
            async with services.domain_lock(uuid):
                try:
                    await (await services.admin()).lookup(uuid)
                except UpstreamError as error:
                    if error.code != Code.NO_DOMAIN:
                        raise
                    outcome = await services.target.release_idle(controller)
                    if outcome != "busy":
                        services.image_grants.forget(controller)
                    if outcome == "released":
                        _log.info("controller of a domain that is gone released", name=controller)
        except GatewayError as error:
            self._say(controller, str(error))

    def _say(self, what: str, text: str, event: str = FAILED, **more: str) -> None:
        """Logs a sentence once, until it is another."""
        if self._said.get(what) != text:
            self._said[what] = text
            _log.warning(event, **{"error" if event == FAILED else "why": text}, **more)


async def reconcile_domain(
    services: Services,
    dom: Domain,
    *,
    only_stopped: bool = False,
    unopened: images.Silent | None = None,
) -> bool:
    """Makes one domain's controller what it should be; the caller holds the domain's lock.

    `only_stopped` leaves a domain alone that runs: it may just be stopping, and what is made for it
    now would stay. A disk whose image cannot be opened keeps no other one away; `unopened` has what
    was found of clusters before.

    Of a domain that has stopped, and of which a copy is not resolved, all stays: what the target
    has recorded of the disk says which volume counts.

    Returns False if the domain has stopped, or runs again without a controller of ours, and its
    QEMU is connected still.

    Raises:
        GatewayError, TranslateError: it cannot be done.
    """
    admin = await services.admin()
    try:
        active = await admin.active(dom)
    except UpstreamError as error:
        if error.code != Code.NO_DOMAIN:
            raise
        active = False
    xml = await admin.xml(dom, 0) if active else ""
    controller = controller_name(dom.uuid_text)
    # It may run again by now, and without virtlun: nothing of it names the controller then.
    if controller not in xml:
        if copies.unresolved(services, dom.uuid):
            return True
        outcome = await services.target.release_idle(controller)
        if outcome != "busy":
            services.image_grants.forget(controller)
        if outcome == "released":
            _log.info("controller of a stopped domain released", domain=dom.name)
        return outcome != "busy"
    if only_stopped:
        return True
    plan = translate.plan(xml)
    if plan is None:
        return True
    failed = await images.bring_back(services, admin, plan, unopened)
    there = replace(plan, luns=tuple(lun for lun in plan.luns if lun not in failed))
    added = await services.target.ensure(there, whole=False)
    if added:
        _log.info("LUNs put right", domain=dom.name, devs=[lun.dev for lun in added])
    gone = await services.target.release_leftovers(plan)
    if gone:
        _log.info("controllers of detached disks released", domain=dom.name, names=sorted(gone))
    for why in failed.values():
        raise why
    return True


async def move_socket(services: Services, dom: Domain) -> None:
    """Gives a persistent definition this host's socket; the caller holds the domain's lock.

    libvirt brings the definition of a migrated domain along as it was.

    Raises:
        GatewayError, TranslateError: it cannot be done.
    """
    admin = await services.admin()
    try:
        if not await admin.persistent(dom):
            return
        xml = await admin.xml(dom, XML_INACTIVE | XML_SECURE)
    except UpstreamError as error:
        if error.code == Code.NO_DOMAIN:
            return
        raise
    socket = translate.socket(xml)
    if socket is None:
        return
    moved = await services.define(
        xml, new_uuid=UUID(bytes=dom.uuid), current_xml=xml, served_in=xml, as_stored=True
    )
    if moved.plan is not None and moved.plan.socket != socket:
        await services.redefine(admin, dom.uuid, moved.xml)
        _log.info("the controller's socket put right in a definition", domain=dom.name)
