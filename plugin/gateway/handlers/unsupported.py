"""Block calls that our disks cannot do: libvirtd, which does not know them, would say "no disk"."""

from __future__ import annotations

from plugin.gateway.call import Call
from plugin.gateway.errors import Refused
from plugin.gateway.handlers.block import find
from plugin.gateway.messages import Domain
from plugin.gateway.procs import Proc
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain.errors import Refusal
from pydataplane.domain.translate import LunPlan

_WITHOUT_JOB = "block jobs (copy, pull, commit, mirror) are not possible on virtlun volumes"


async def _disk(call: Call) -> LunPlan | None:
    """Returns the disk of ours that a call {dom, disk, ...} is about; otherwise passes it on."""
    reader = Reader(call.payload)
    dom = Domain.read(reader)
    if call.header.procedure == Proc.GET_BLOCK_IO_TUNE:
        disk = reader.optional(reader.string)
    else:
        disk = reader.string()
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
        raise _refused(lun, "block peek is not supported for virtlun volumes")


async def io_tune(call: Call) -> None:
    """SET_BLOCK_IO_TUNE and GET_BLOCK_IO_TUNE: limits are not there yet."""
    lun = await _disk(call)
    if lun is not None:
        raise _refused(lun, "I/O limits of virtlun volumes are not supported yet")


async def threshold(call: Call) -> None:
    """SET_BLOCK_THRESHOLD: a volume's allocation is the lvstore's business."""
    lun = await _disk(call)
    if lun is not None:
        raise _refused(
            lun,
            "write thresholds are not supported for virtlun volumes: "
            "`virtlun lvstore list` shows what is free",
        )


async def block_job(call: Call) -> None:
    """BLOCK_PULL, _REBASE, _COMMIT, _COPY, BLOCK_JOB_ABORT and _SET_SPEED."""
    lun = await _disk(call)
    if lun is not None:
        raise _refused(lun, _WITHOUT_JOB)


async def block_job_info(call: Call) -> None:
    """GET_BLOCK_JOB_INFO: there is none, as on any disk at rest."""
    if await _disk(call) is not None:
        await call.answer(bytes(Writer().i32(0).i32(0).u64(0).u64(0).u64(0)))
