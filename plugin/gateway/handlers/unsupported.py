"""A block call that our disks cannot do: libvirtd, which knows no such disk, says only that."""

from __future__ import annotations

from plugin.gateway.call import Call
from plugin.gateway.errors import Refused
from plugin.gateway.handlers.block import find
from plugin.gateway.messages import Domain
from plugin.gateway.xdr import Reader
from pydataplane.domain.errors import Refusal


async def peek(call: Call) -> None:
    """BLOCK_PEEK {dom, disk, ...}: the gateway touches no I/O."""
    reader = Reader(call.payload)
    dom, disk = Domain.read(reader), reader.string()
    lun = await find(call, dom, disk) if disk else None
    if lun is None:
        await call.pass_on()
        return
    raise Refused(
        Refusal.CANNOT_CHANGE,
        f"disk {lun.dev}: block peek is not supported for virtlun volumes; read the disk in the"
        " guest",
    )
