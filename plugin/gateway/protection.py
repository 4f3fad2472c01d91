"""Guests that carry protection information: what they need where they start, and where they go on.

A guest that boots does without where its QEMU has no property for it. One that goes on (restored,
or from another host) was offered it and needs it: see pydataplane.domain.xml.carrier.
"""

from __future__ import annotations

from functools import partial

import structlog

from plugin.gateway.errors import Refused
from plugin.gateway.parsing import ClientParser
from plugin.gateway.services import Services
from pydataplane.domain import translate
from pydataplane.domain.errors import Refusal
from pydataplane.domain.translate import Plan

_log = structlog.get_logger(__name__)


async def check_qemu(
    services: Services, plan: Plan, xml: str, client: ClientParser | None = None
) -> None:
    """Refuses a guest that goes on with a QEMU without the property; `xml` is what `plan` is of.

    `client` as in `Services.define`.

    Raises:
        TranslateError: UNSUPPORTED.
    """
    if plan.protection:
        work = partial(translate.check_protection, xml, services.settings)
        await (services.parse(work) if client is None else client.parse(work, len(xml)))


def unserved(plan: Plan) -> Refused:
    """Returns why a guest without disks of ours cannot go on where no target has its controller."""
    return Refused(
        Refusal.NO_TARGET,
        f"domain '{plan.domain}' has a virtlun controller with protection information, without"
        " which it cannot go on, and no target of this host has made it: start the target, or see"
        " the gateway's log",
    )


def tell(services: Services, plan: Plan | None) -> None:
    """Logs that a guest boots without protection information that it was to carry."""
    if plan is None or not plan.has_scsi or plan.protection:
        return
    if services.settings.protection:
        _log.warning(
            "a domain starts without protection information (disks.protection of virtlun.toml): its"
            " QEMU is not known to have vhost-user-scsi's property t10_pi",
            domain=plan.domain,
        )
