"""Answers calls about domains that are paused because of I/O errors (plugin.gateway.ioerrors)."""

from __future__ import annotations

from plugin.gateway.call import Call
from plugin.gateway.handlers.block import seen
from plugin.gateway.messages import Domain
from plugin.gateway.services import NO_SPACE
from plugin.gateway.upstream import PAUSED, PAUSED_BY_IO_ERROR, PAUSED_BY_USER
from plugin.gateway.xdr import Reader, Writer

_ERROR_UNSPEC = 1
_ERROR_NO_SPACE = 2
"""virDomainDiskErrorCode."""

DISK_ERRORS_MAX = 256
"""REMOTE_DOMAIN_DISK_ERRORS_MAX."""


async def state(call: Call) -> None:
    """DOMAIN_GET_STATE: to libvirtd a client of its own paused the domain."""
    dom = Domain.read(Reader(call.payload))
    reply = await call.forward()
    if reply.ok and dom.uuid in call.services.paused:
        reader = Reader(reply.payload)
        if (reader.i32(), reader.i32()) == (PAUSED, PAUSED_BY_USER):
            await call.respond(reply, bytes(Writer().i32(PAUSED).i32(PAUSED_BY_IO_ERROR)))
            return
    await call.respond(reply)


async def suspend(call: Call) -> None:
    """DOMAIN_SUSPEND: one that is paused already is to stay so, whatever room there is."""
    dom = Domain.read(Reader(call.payload))
    reply = await call.forward()
    if reply.ok:
        call.services.auto_resume.forget(dom.uuid)
    await call.respond(reply)


async def disk_errors(call: Call) -> None:
    """DOMAIN_GET_DISK_ERRORS; asked for none it tells how many disks there are."""
    reader = Reader(call.payload)
    dom, wanted = Domain.read(reader), reader.u32()
    reply = await call.forward()
    if not reply.ok:
        await call.respond(reply)
        return
    result = Reader(reply.payload)
    errors = result.array(lambda: (result.string(), result.i32()), DISK_ERRORS_MAX)
    count = result.i32()
    if wanted:
        mine = call.services.paused.get(dom.uuid, {})
        errors += [
            (d, _ERROR_NO_SPACE if e == NO_SPACE else _ERROR_UNSPEC) for d, e in mine.items()
        ]
        errors = errors[: min(wanted, DISK_ERRORS_MAX)]
        count = len(errors)
    else:
        count += len((await seen(call, dom)).luns)
    writer = Writer()
    writer.array(errors, lambda error: writer.string(error[0]).i32(error[1]))
    await call.answer(bytes(writer.i32(count)))
