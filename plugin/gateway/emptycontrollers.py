"""Makes controllers for domains without a disk of ours, for a first attach while they run.

An empty controller is never a condition of anything else. So it is in no persistent definition: a
start through the gateway gives it to the domain for that run only (virDomainCreateXML with the
definition and the controller), and where that does not work, for whatever reason, the domain starts
as its client defined it. With a QEMU that has no vhost-user-scsi it gets shared memory alone, for a
first virtio-blk disk. A guest that has run with a controller and is restored, or comes from another
host, needs a device there: without a target that is QEMU's own virtio-scsi (see
pydataplane.domain.xml.carrier), which is no other's but of one that carries protection information.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from uuid import UUID

import structlog

from plugin.gateway import protection
from plugin.gateway.errors import GatewayError
from plugin.gateway.parsing import ClientParser
from plugin.gateway.services import Services
from pydataplane.domain import translate
from pydataplane.domain.errors import TranslateError
from pydataplane.domain.translate import Definition, Plan

MAKE_S = 5.0
"""How long a target may take to make an empty controller, seconds: a start waits for it."""

_NO_UUID = UUID(int=0)
"""For domains that libvirtd gave: they have a UUID."""

_log = structlog.get_logger(__name__)


def is_wanted(services: Services, xml: str) -> bool:
    """Whether a domain (libvirtd's XML) is to run with a controller also without a disk of ours."""
    return services.config.controllers_for_all or translate.is_marked(xml)


async def with_controller(
    services: Services, xml: str, new_uuid: UUID = _NO_UUID, client: ClientParser | None = None
) -> Definition | None:
    """Returns a domain with an empty controller; None if it cannot have one.

    `new_uuid` becomes its UUID if it has none; `client` as in `Services.define`.
    """
    had = xml if client is None else ""  # what a client writes of its disks is no proof
    try:
        made = await services.define(
            xml, new_uuid=new_uuid, controller=True, client=client, served_in=had
        )
    except (GatewayError, TranslateError):
        return None
    protection.tell(services, made.plan)
    return made if made.plan is not None else None


async def make(services: Services, plan: Plan) -> bool:
    """Makes the controller of a plan without LUNs; False if the target does not, in a short time.

    A plan without a controller, for a QEMU that has none, needs no target. The caller holds the
    domain's lock.
    """
    if not plan.controllers:
        return True
    try:
        silent = services.target.silence_at(plan)
        if silent is not None:
            raise silent
        async with asyncio.timeout(MAKE_S):
            await services.target.ensure(plan)
    except (GatewayError, TimeoutError) as error:
        why = str(error) or f"the target did not answer within {MAKE_S:g} s"
        _log.warning("a domain goes without a controller", domain=plan.domain, error=why)
        return False
    return True


@dataclass(frozen=True)
class Fitted:
    """What is restored or received of a guest that has run with an empty controller."""

    xml: str | None
    """libvirtd's XML instead of the one there was; None: that one."""
    made: Plan | None
    """The controller that was made for it in the target."""


async def fit(services: Services, xml: str) -> Fitted:
    """Makes the controller of a guest without a disk of ours, or lets QEMU's own stand in for it.

    The caller holds the domain's lock.

    Raises:
        TranslateError: our metadata is damaged; or its QEMU lacks what the guest was offered.
        Refused: nothing can stand in for its controller.
    """
    real = await services.parse(lambda: translate.with_target(xml, services.settings))
    plan = translate.plan(real or xml)
    if plan is None or plan.luns:
        return Fitted(None, None)
    await protection.check_qemu(services, plan, real or xml)
    if await make(services, plan):
        return Fitted(real, plan)
    if plan.protection:
        raise protection.unserved(plan)
    return Fitted(None if real else translate.without_target(xml), None)
