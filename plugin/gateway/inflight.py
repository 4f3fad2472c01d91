"""Refuses to save or migrate a domain whose in-flight virtio-blk requests would be lost.

Requests of a virtio-blk disk that wait because an I/O failed are in the guest's rings, and so in
its memory. But where later requests had ended before them, only QEMU's in-flight region tells of
them, and QEMU (as of 10.0) neither saves nor migrates that. They would be lost, and the guest would
wait for them until it is reset.
"""

from __future__ import annotations

from uuid import UUID

from plugin.gateway.call import Call
from plugin.gateway.errors import Code, Refused
from plugin.gateway.messages import Domain
from plugin.gateway.services import Services
from pydataplane.domain.names import domain_of


async def check(services: Services, dom: Domain) -> None:
    """Refuses what would save a domain's memory.

    Raises:
        Refused: requests would be lost.
        GatewayError: no target answers.
    """
    if dom.uuid not in services.paused:
        return
    own = str(UUID(bytes=dom.uuid))
    found = await services.target.suspended()
    if any(item.overtaken and domain_of(item.controller) == own for item in found):
        raise Refused(
            Code.OPERATION_INVALID,
            f"domain '{dom.name}' is paused because of I/O errors, and requests of its virtio-blk"
            " disks that wait would be lost: make room, or mend the disk, and resume it first"
            " (`virtlun domain errors` shows why it waits)",
        )


async def check_call(call: Call, dom: Domain) -> None:
    """As `check`, for a call that libvirtd is to judge.

    Raises:
        Refused: requests would be lost. Who may not see the domain is told by libvirtd.
    """
    async with call.for_who_sees(dom):
        await check(call.services, dom)
