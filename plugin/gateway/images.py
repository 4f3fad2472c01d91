"""Disks over the network: their images are open in the target before a guest is shown them.

The target closes an image when no guest has it any more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from plugin.gateway import secrets
from plugin.gateway.call import Call
from plugin.gateway.errors import GatewayError, Refused, ServerSilent
from plugin.gateway.services import Services
from plugin.gateway.upstream import Upstream
from pydataplane.domain.errors import ImageError, Refusal
from pydataplane.domain.images import check_allowed, is_lun, of_plan, unknown_lun
from pydataplane.domain.model import Host
from pydataplane.domain.names import domain_of
from pydataplane.domain.translate import LunPlan, Plan

Cluster = tuple[str, tuple[Host, ...], str | None]


class Silent:
    """The clusters and servers that did not answer, so that a round of all domains waits once."""

    def __init__(self) -> None:
        """None yet."""
        self._why: dict[Cluster, GatewayError] = {}

    def check(self, lun: LunPlan) -> None:
        """Raises what was said of the disk's."""
        why = self._why.get(_cluster_of(lun))
        if why is not None:
            raise why

    def note(self, lun: LunPlan, why: GatewayError) -> None:
        """Keeps why the image of a disk was not opened."""
        self._why[_cluster_of(lun)] = why


def _cluster_of(lun: LunPlan) -> Cluster:
    source = lun.volume.source
    assert source is not None
    return source.protocol, source.hosts, source.config


async def bring_back(
    services: Services, admin: Upstream, plan: Plan, silent: Silent | None = None
) -> dict[LunPlan, GatewayError]:
    """Opens those of a domain's images that the target has lost, as a running guest has them.

    Its secrets are asked for in the gateway's own name, for nobody asks for this; so only those
    that a client who may read them had opened for this domain. Returns why which disks have none,
    also where the target goes on to try.
    """
    failed: dict[LunPlan, GatewayError] = {}
    silent = silent or Silent()
    for lun in of_plan(plan):
        try:
            if await services.target.is_open(plan, lun):
                if not _may_have(services, plan, lun):
                    shown = await services.target.holders(lun.bdev_name, besides="")
                    if domain_of(plan.controller) not in shown:  # it is open for another one
                        raise _refused(lun, _NOT_GRANTED)
                continue
            if await services.target.has_image(plan, lun):
                raise _refused(lun, "is not open yet; the target goes on to try")
            if not _may_have(services, plan, lun):
                raise _refused(lun, _NOT_GRANTED)
            expected = services.image_grants.lun(plan.controller, lun.bdev_name)
            if is_lun(lun) and expected is None:
                raise Refused(Refusal.NOT_POSSIBLE_NOW, str(unknown_lun(lun)))
            _check_allowed(services, lun)
            silent.check(lun)
        except GatewayError as error:
            failed[lun] = error
            continue
        try:
            await services.target.open_image(plan, lun, await _key(admin, lun), expected)
        except GatewayError as error:
            failed[lun] = error
            if isinstance(error, ServerSilent):
                silent.note(lun, error)
    return failed


_NOT_GRANTED = (
    "was not opened for this domain by a client that may read its secret: stop the domain, and"
    " start it through the gateway"
)


def _may_have(services: Services, plan: Plan, lun: LunPlan) -> bool:
    """Whether an image needs no secret, or was opened for the domain by who may read that."""
    source = lun.volume.source
    secret = source.secret if source is not None else None
    return secret is None or services.image_grants.has(plan.controller, lun.bdev_name)


def _refused(lun: LunPlan, why: str) -> Refused:
    text = f"disk {lun.dev}: image {lun.volume.alias} {why}"
    return Refused(Refusal.NOT_POSSIBLE_NOW, text)


@asynccontextmanager
async def opened(call: Call, plan: Plan, luns: list[LunPlan]) -> AsyncIterator[None]:
    """Opens the images of disks that the client's domain is to have, for the body to show them.

    Also where an image is open already, the client has to have the right to read its secret. For a
    plan that is `incoming` an image of Ceph stays the other host's until the guest runs here. Those
    that were opened are closed again if the body fails. It is noted that they may be opened for
    this domain: see plugin.gateway.imagegrants.

    Raises:
        GatewayError: one cannot be opened; what libvirtd says where the client may not read its
            secret.
    """
    services, new = call.services, []
    again = replace(plan, incoming=False)  # one that is asked for so stays as it is
    keys: dict[LunPlan, str | None] = {}
    try:
        for lun in luns:
            _check_allowed(services, lun)
            key = await _key(await call.caller.own(), lun)
            if await services.target.open_image(plan, lun, key):
                new.append(lun)
            for earlier, its in keys.items():  # else they go again while the others are opened
                if await services.target.open_image(again, earlier, its):
                    new.append(earlier)
                    if plan.incoming:  # nor is it known any more who had it
                        raise _refused(earlier, "was closed while others were opened: try again")
            keys[lun] = key
        there = {
            lun.bdev_name: await services.target.identity_of(plan, lun) if is_lun(lun) else None
            for lun in luns
        }
        services.image_grants.add(plan.controller, there)
        yield
    except BaseException:
        for lun in new:
            with suppress(GatewayError):
                await services.target.close_image(plan, lun)
        raise


def _check_allowed(services: Services, lun: LunPlan) -> None:
    try:
        check_allowed(lun, services.settings.allowed)
    except ImageError as error:
        raise Refused(Refusal.DENIED, str(error)) from error


async def _key(upstream: Upstream, lun: LunPlan) -> str | None:
    """Returns what an image is opened with, with the rights of this connection."""
    source = lun.volume.source
    assert source is not None
    if source.secret is None:
        return None
    return await secrets.key(upstream, source.protocol, source.secret)
