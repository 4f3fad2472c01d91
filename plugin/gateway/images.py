"""Disks over the network: their images are open in the target before a guest is shown them.

The target closes an image when no guest has it any more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from plugin.gateway import secrets
from plugin.gateway.call import Call
from plugin.gateway.errors import GatewayError
from plugin.gateway.services import Services
from plugin.gateway.upstream import Upstream
from pydataplane.domain.images import of_plan
from pydataplane.domain.translate import LunPlan, Plan


async def bring_back(services: Services, admin: Upstream, plan: Plan) -> None:
    """Opens those of a domain's images that the target has lost, as a running guest has them.

    Its secrets are asked for in the gateway's own name, for nobody asks for this.

    Raises:
        GatewayError: one cannot be opened.
    """
    for lun in of_plan(plan):
        if not await services.target.has_image(plan, lun):
            await _open(services, admin, plan, lun)


@asynccontextmanager
async def opened(call: Call, plan: Plan, luns: list[LunPlan]) -> AsyncIterator[None]:
    """Opens the images of disks that the client's domain is to have, for the body to show them.

    Also where an image is open already, the client has to have the right to read its secret. Those
    that were opened are closed again if the body fails.

    Raises:
        GatewayError: one cannot be opened; what libvirtd says where the client may not read its
            secret.
    """
    services, new = call.services, []
    try:
        for lun in luns:
            if await _open(services, await call.caller.own(), plan, lun):
                new.append(lun)
        yield
    except BaseException:
        for lun in new:
            with suppress(GatewayError):
                await services.target.close_image(plan, lun)
        raise


async def _open(services: Services, upstream: Upstream, plan: Plan, lun: LunPlan) -> bool:
    """Opens an image with the rights of this connection; False if it is open already."""
    source = lun.volume.source
    assert source is not None
    key = await secrets.ceph_key(upstream, source.secret) if source.secret is not None else None
    return await services.target.open_image(plan, lun, key)
