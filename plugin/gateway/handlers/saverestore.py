"""Saves and restores domains, and lets clients read and change the definition in a save image.

libvirt keeps a domain's whole XML in the image. A guest that is restored has its controller and
LUNs before libvirtd is asked, as one that is started; of an image that the client may not read,
libvirtd alone is asked. The image of a guest with a controller and no disk of ours says that QEMU's
own virtio-scsi is there, which needs nothing of ours: so libvirtd alone restores it, too, and
gateway or hook put the controller back. That of one that carries protection information stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from uuid import UUID

import structlog

from plugin.gateway import copies, emptycontrollers, inflight, polkit, protection
from plugin.gateway.call import Call, Reply
from plugin.gateway.domains import identity_of
from plugin.gateway.errors import Code, GatewayError, Refused
from plugin.gateway.handlers import guestxml
from plugin.gateway.handlers.start import begun, prepared, startable
from plugin.gateway.messages import STRING, Domain, TypedParam, read_string
from plugin.gateway.procs import Proc
from plugin.gateway.upstream import XML_SECURE, Upstream
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain import translate
from pydataplane.domain.errors import TranslateError

PARAMS_MAX = 16
"""REMOTE_DOMAIN_SAVE_PARAMETERS_MAX and its likes."""

_FILE, _XML = "file", "dxml"
"""VIR_DOMAIN_SAVE_PARAM_FILE and _DXML."""

_RIGHTS = (polkit.START, polkit.WRITE)
"""What libvirt asks of whoever restores a domain (remote_protocol.x, DOMAIN_RESTORE)."""

_log = structlog.get_logger(__name__)


async def define_image(call: Call) -> None:
    """SAVE_IMAGE_DEFINE_XML: {file, xml, flags}."""
    reader = Reader(call.payload)
    file, xml, flags = reader.string(), reader.string(), reader.u32()
    xml = await guestxml.translated(call, xml, await _xml_of(call, file))
    xml = await _alone(call, xml) or xml
    await call.respond(await call.forward(bytes(Writer().string(file).string(xml).u32(flags))))


async def define_managed(call: Call) -> None:
    """MANAGED_SAVE_DEFINE_XML: {dom, xml or nothing, flags}."""
    reader = Reader(call.payload)
    dom, xml, flags = Domain.read(reader), reader.optional(reader.string), reader.u32()
    if xml is not None:
        own = await call.caller.own()
        args = bytes(dom.write(Writer()).u32(0))
        try:
            current = read_string(await own.call(Proc.MANAGED_SAVE_GET_XML_DESC, args))
        except GatewayError:
            current = None  # libvirtd's answer to the call itself says why
        xml = await guestxml.translated(call, xml, current)
        xml = await _alone(call, xml) or xml
    writer = dom.write(Writer())
    await call.respond(await call.forward(bytes(writer.optional(xml, writer.string).u32(flags))))


async def save_managed(call: Call) -> None:
    """MANAGED_SAVE: {dom, flags}."""
    dom = Domain.read(Reader(call.payload))
    await _check_saved(call, dom)
    reply = await call.forward()
    if reply.ok:
        await _let_stand_in(call, dom, None)
    await call.respond(reply)


async def save(call: Call) -> None:
    """SAVE, SAVE_FLAGS and SAVE_PARAMS: {dom, file}, or with XML for the image."""
    reader = Reader(call.payload)
    dom = Domain.read(reader)
    await _check_saved(call, dom)
    if call.header.procedure == Proc.SAVE:
        saving = _Saving(reader.string(), None, None)
    else:
        saving = _Saving.read(reader, params=call.header.procedure == Proc.SAVE_PARAMS)
    payload = call.payload
    if saving.xml is not None:
        try:
            current = await (await call.caller.own()).xml(dom, XML_SECURE)
        except GatewayError:
            current = None
        saving = replace(saving, xml=await guestxml.translated(call, saving.xml, current))
        payload = bytes(saving.write(dom.write(Writer())))
    reply = await call.forward(payload)
    if reply.ok and saving.file is not None:
        await _let_stand_in(call, dom, saving.file)
    await call.respond(reply)


async def _check_saved(call: Call, dom: Domain) -> None:
    """Raises Refused where a domain cannot be saved now."""
    await copies.check_none(call, dom)
    await inflight.check_call(call, dom)


async def _alone(call: Call, xml: str) -> str | None:
    """Returns an image's XML with what stands in for a controller; None as `without_target`."""
    return await call.parse(partial(translate.without_target, xml), xml)


async def _let_stand_in(call: Call, dom: Domain, file: str | None) -> None:
    """Gives the image of the domain that was just saved the definition that needs nothing of ours.

    `file` is that image, None the managed one. Not done earlier, with the XML for SAVE_FLAGS: a
    disk could have been attached meanwhile. Where it fails, as without the right to, the image is
    as libvirtd made it, and restored through gateway or hook.
    """
    try:
        # A file is opened as its client may; the managed image is libvirtd's, which let it be made.
        if file is not None:
            image = _Image(await call.caller.own(), file)
        else:
            image = _Image(await call.services.admin(), dom)
        async with call.services.domain_lock(dom.uuid):
            alone = await _alone(call, await image.xml())
            if alone is not None:
                await image.define(alone)
    except (GatewayError, TranslateError) as error:
        _log.info("a saved domain needs a gateway or hook", domain=dom.name, error=str(error))


async def restore(call: Call) -> None:
    """RESTORE, RESTORE_FLAGS and RESTORE_PARAMS."""
    services, reader = call.services, Reader(call.payload)
    if call.header.procedure == Proc.RESTORE:
        saving = _Saving(reader.string(), None, None)
    else:
        saving = _Saving.read(reader, params=call.header.procedure == Proc.RESTORE_PARAMS)
    image = await _xml_of(call, saving.file) if saving.file is not None else None
    uuid = await _uuid_of(call, image) if image is not None else None
    if image is None or uuid is None:
        await call.respond(await call.forward())  # libvirtd says why not
        return
    async with services.domain_lock(uuid):
        # Whose image it is was not held until now: it may have been exchanged.
        if saving.file is not None and await _xml_of(call, saving.file) != image:
            raise Refused(
                Code.OPERATION_FAILED,
                f"{saving.file} has changed while it was read: restore it again",
            )
        reply = await _restore(call, saving, image, uuid)
    await call.respond(reply)


async def _uuid_of(call: Call, xml: str) -> bytes | None:
    return (await call.parse(lambda: identity_of(xml), xml))[1]


async def _restore(call: Call, saving: _Saving, image: str, uuid: bytes) -> Reply:
    """Restores the domain of an image (XML and UUID), whose lock is held."""
    services, payload = call.services, call.payload
    if saving.xml is not None:
        if await _uuid_of(call, saving.xml) != uuid:
            return await call.forward()  # libvirtd refuses XML of another domain
        saving = replace(saving, xml=await guestxml.translated(call, saving.xml, image))
        payload = bytes(saving.write(Writer()))
    xml = saving.xml or image
    plan = await call.parse(partial(translate.plan, xml), xml)
    carries = await call.parse(partial(translate.has_controller, xml), xml)
    if (plan is None or not plan.luns) and carries:
        return await _restore_without_disks(call, saving, xml)
    found = await startable(call, plan, xml, _RIGHTS)
    if found is None:
        return await call.forward(payload)
    await protection.check_qemu(services, found[0], xml, call.parser)
    async with prepared(call, *found, saved=True) as attempt:
        reply = await call.forward(payload)
        attempt.started = reply.ok
    return reply


async def _restore_without_disks(call: Call, saving: _Saving, xml: str) -> Reply:
    """Restores a guest that was saved with a controller and no disk of ours, from `xml`.

    The caller holds its lock.
    """
    services = call.services
    name, uuid = await call.parse(lambda: identity_of(xml), xml)
    if uuid is None or not await call.caller.may(_RIGHTS, name or "", str(UUID(bytes=uuid))):
        return await call.forward()
    fitted = await emptycontrollers.fit(services, xml)
    given = replace(saving, flags=saving.flags or 0).with_xml(fitted.xml or saving.xml)
    if given.xml is None:
        starting = call.forward()
    elif call.header.procedure == Proc.RESTORE:
        starting = call.forward_as(Proc.RESTORE_FLAGS, bytes(given.write(Writer())))
    else:
        starting = call.forward(bytes(given.write(Writer())))
    return await begun(services, fitted.made, uuid, starting)


@dataclass(frozen=True)
class _Saving:
    """File, XML and flags of the calls that have them, as words or as typed parameters."""

    file: str | None
    xml: str | None
    flags: int | None
    params: tuple[TypedParam, ...] | None = None

    @staticmethod
    def read(reader: Reader, *, params: bool) -> _Saving:
        """Reads {file, xml or nothing, flags} or {params, flags}."""
        if not params:
            file, xml = reader.string(), reader.optional(reader.string)
            return _Saving(file, xml, reader.u32())
        given = tuple(reader.array(lambda: TypedParam.read(reader), PARAMS_MAX))
        texts = {item.field: str(item.value) for item in given if item.kind == STRING}
        return _Saving(texts.get(_FILE), texts.get(_XML), reader.u32(), given)

    def with_xml(self, xml: str | None) -> _Saving:
        """Returns a copy with this XML, also where none was given."""
        if self.params is None or xml is None or self.xml is not None:
            return replace(self, xml=xml)
        return replace(self, xml=xml, params=(*self.params, TypedParam(_XML, STRING, xml)))

    def write(self, writer: Writer) -> Writer:
        """Appends it; not for what has no flags."""
        assert self.flags is not None
        if self.params is None:
            writer.string(self.file or "").optional(self.xml, writer.string)
            return writer.u32(self.flags)
        params = [
            replace(item, value=self.xml) if item.field == _XML and self.xml is not None else item
            for item in self.params
        ]
        return writer.array(params, lambda item: item.write(writer)).u32(self.flags)


@dataclass(frozen=True)
class _Image:
    """A save image: a file's, or the managed one of a domain."""

    libvirtd: Upstream
    """Whose rights it is read and changed with."""
    of: str | Domain

    async def xml(self) -> str:
        """Returns libvirtd's XML there; GatewayError if it is not to be read."""
        is_file = isinstance(self.of, str)
        proc = Proc.SAVE_IMAGE_GET_XML_DESC if is_file else Proc.MANAGED_SAVE_GET_XML_DESC
        return read_string(await self.libvirtd.call(proc, bytes(self._name().u32(XML_SECURE))))

    async def define(self, xml: str) -> None:
        """Replaces the XML; running or paused as it was saved. GatewayError if that is refused."""
        writer = self._name()
        if isinstance(self.of, str):
            args = bytes(writer.string(xml).u32(0))
            await self.libvirtd.call(Proc.SAVE_IMAGE_DEFINE_XML, args)
        else:
            args = bytes(writer.optional(xml, writer.string).u32(0))
            await self.libvirtd.call(Proc.MANAGED_SAVE_DEFINE_XML, args)

    def _name(self) -> Writer:
        return Writer().string(self.of) if isinstance(self.of, str) else self.of.write(Writer())


async def _xml_of(call: Call, file: str) -> str | None:
    """Returns libvirtd's XML in a save image; None where the client may not read it."""
    try:
        return await _Image(await call.caller.own(), file).xml()
    except GatewayError:
        return None
