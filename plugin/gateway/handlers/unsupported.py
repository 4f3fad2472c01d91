"""Block calls that our disks cannot do: libvirtd, which does not know them, would say "no disk"."""

from __future__ import annotations

from plugin.gateway.call import Call
from plugin.gateway.errors import Refused
from plugin.gateway.handlers.block import find
from plugin.gateway.messages import Domain
from plugin.gateway.xdr import Reader
from pydataplane.domain.errors import Refusal
from pydataplane.domain.translate import LunPlan


async def _disk(call: Call) -> LunPlan | None:
    """Returns the disk of ours that a call {dom, disk, ...} is about; otherwise passes it on."""
    reader = Reader(call.payload)
    dom, disk = Domain.read(reader), reader.string()
    lun = await find(call, dom, disk) if disk else None
    if lun is None:
        await call.pass_on()
    return lun


def _refused(lun: LunPlan, what: str) -> Refused:
    return Refused(Refusal.CANNOT_CHANGE, f"disk {lun.dev}: {what}")


async def peek(call: Call) -> None:
    """BLOCK_PEEK: the gateway touches no I/O."""
    lun = await _disk(call)
    if lun is not None:
        raise _refused(
            lun, "block peek is not supported for virtlun volumes; read the disk in the guest"
        )


async def threshold(call: Call) -> None:
    """SET_BLOCK_THRESHOLD: a volume's allocation is the lvstore's business."""
    lun = await _disk(call)
    if lun is not None:
        raise _refused(
            lun,
            "write thresholds are not supported for virtlun volumes: "
            "`virtlun lvstore list` shows what is free",
        )
