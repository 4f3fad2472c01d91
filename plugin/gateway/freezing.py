"""Freezes a guest's file systems for a snapshot, and thaws them, whatever becomes of it.

The guest's agent does it, which libvirtd asks. It may not answer: its guest is paused, or waits for
a disk, or the agent has died. A freeze that was asked for may then be done later, so what is to be
thawed stays to be thawed until the agent has said so, or the domain has ended.
"""

from __future__ import annotations

import asyncio

from plugin.gateway import domsnapshots
from plugin.gateway.errors import Code, GatewayError, Refused, UpstreamError, UpstreamGone
from plugin.gateway.messages import Domain
from plugin.gateway.services import Services

THAW_S = 20.0
"""How long a thaw is waited for before it is left to be tried again, seconds."""

LOOK_S = 0.5
"""How often it is looked whether a domain that is being frozen was paused, seconds."""

_UNASKED = {Code.ARGUMENT_UNSUPPORTED, Code.OPERATION_INVALID, Code.OPERATION_TIMEOUT}
"""Of libvirtd before it asks the agent: the domain has no channel for it, does not run, or another
call of it does not end."""

_ENDED = {Code.NO_DOMAIN, Code.OPERATION_INVALID}


class NotFrozen(UpstreamError):
    """libvirtd's refusal to freeze, before anything was asked of the guest."""


class NotThawed(GatewayError):
    """The guest's agent has not said that all is thawed: it is to be asked again."""


async def freeze(services: Services, dom: Domain) -> None:
    """Has the agent freeze all file systems of a running domain.

    Raises:
        NotFrozen: nothing was frozen.
        GatewayError: something may be, now or later.
    """
    work = asyncio.create_task(domsnapshots.freeze(await services.admin(), dom))
    try:
        while not (await asyncio.wait([work], timeout=LOOK_S))[0]:
            if dom.uuid in services.paused:
                raise Refused(
                    Code.OPERATION_FAILED,
                    f"domain '{dom.name}' is paused because of I/O errors, so its file systems"
                    " cannot be frozen: `virtlun domain errors` shows why",
                )
        await work
    except UpstreamError as error:
        # The agent was connected once, or not yet: libvirtd has nobody to ask.
        absent = error.code == Code.AGENT_UNRESPONSIVE and "not connected" in str(error)
        if error.code in _UNASKED or absent:
            raise NotFrozen(error.raw) from error
        raise
    finally:
        work.cancel()


async def thaw(services: Services, dom: Domain) -> None:
    """Has the agent thaw all file systems; safe to repeat, and done for a domain that has ended.

    Raises:
        NotThawed: it has not said that it did.
    """
    if dom.uuid in services.paused:
        raise NotThawed(f"domain '{dom.name}' is paused because of I/O errors")
    try:
        await domsnapshots.thaw(await services.admin(), dom, THAW_S)
    except (UpstreamError, UpstreamGone) as error:
        if isinstance(error, UpstreamError) and error.code in _ENDED:
            return
        raise NotThawed(
            f"the file systems of domain '{dom.name}' are not thawed yet, which is tried again"
            f" until its agent answers: {error}"
        ) from error
