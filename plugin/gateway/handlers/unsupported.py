"""Block calls that our disks cannot do: libvirtd, which does not know them, would say "no disk"."""

from __future__ import annotations

from plugin.gateway.call import Call
from plugin.gateway.errors import Refused
from plugin.gateway.handlers import pull
from plugin.gateway.handlers.block import find
from plugin.gateway.messages import Domain
from plugin.gateway.procs import Proc
from plugin.gateway.xdr import Reader
from pydataplane.domain import translate
from pydataplane.domain.errors import Refusal
from pydataplane.domain.translate import LunPlan
from pydataplane.domain.xml.document import escape

REBASE_COPY = 8
"""VIR_DOMAIN_BLOCK_REBASE_COPY: `base` is what to copy to."""

_IN_THE_GUEST = "attach the other disk, too, and copy in the guest, or shut the guest down and copy"
_WHY = {
    Proc.BLOCK_JOB_SET_SPEED: "a block job of a virtlun volume has no limit of its speed",
    Proc.BLOCK_COPY: "QEMU cannot copy a virtlun volume, for the target does its I/O: "
    + _IN_THE_GUEST,
}


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
        raise _refused(
            lun, "block peek is not supported for virtlun volumes; read the disk in the guest"
        )


async def io_tune(call: Call) -> None:
    """SET_BLOCK_IO_TUNE and GET_BLOCK_IO_TUNE: limits are not there yet."""
    lun = await _disk(call)
    if lun is not None:
        raise _refused(
            lun,
            "I/O limits of virtlun volumes are not supported yet; limit the I/O in the guest "
            "(io.max of its cgroups), or use a disk of libvirt's own",
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


async def block_job(call: Call) -> None:
    """BLOCK_COPY and BLOCK_JOB_SET_SPEED."""
    lun = await _disk(call)
    if lun is not None:
        raise _refused(lun, _WHY[Proc(call.header.procedure)])


async def copy(call: Call) -> None:
    """BLOCK_COPY {dom, disk, dest, ...}, where neither side can be a volume of ours."""
    reader = Reader(call.payload)
    Domain.read(reader)
    reader.string()
    await _check_destination(call, reader.string())
    await block_job(call)


async def rebase(call: Call) -> None:
    """BLOCK_REBASE {dom, disk, base, bandwidth, flags}; with a flag it copies to `base`.

    Without it, it is a pull, from what is above `base` where there is one.
    """
    reader = Reader(call.payload)
    Domain.read(reader)
    disk, base = reader.string(), reader.optional(reader.string)
    reader.u64()
    copies = bool(reader.u32() & REBASE_COPY)
    if copies and base is not None:
        await _check_destination(call, f"<disk type='file'><source file='{escape(base)}'/></disk>")
        lun = await find(call, Domain.read(Reader(call.payload)), disk)
        if lun is not None:
            raise _refused(lun, _WHY[Proc.BLOCK_COPY])
    if copies:
        await call.pass_on()
    else:
        await pull.begin(call, Domain.read(Reader(call.payload)), disk, base=base)


async def _check_destination(call: Call, disk_xml: str) -> None:
    """Refuses a copy to a volume of ours.

    Raises:
        Refused: CANNOT_CHANGE.
    """
    services = call.services
    volume = await call.parse(lambda: translate.volume_of(disk_xml, services.settings), disk_xml)
    if volume is not None:
        raise Refused(
            Refusal.CANNOT_CHANGE,
            f"QEMU cannot copy a disk to virtlun volume {volume.alias}, which it does not open: "
            + _IN_THE_GUEST,
        )
