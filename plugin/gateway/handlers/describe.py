"""Calls that show a domain's XML: clients see their own disks and nothing of what carries them."""

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

from plugin.gateway.call import Call
from plugin.gateway.domains import is_running
from plugin.gateway.messages import XmlCall, pack_string, read_string
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain import translate
from pydataplane.domain.errors import TranslateError
from pydataplane.domain.translate import PREFIX

_TRACE = PREFIX.encode()


async def xml(call: Call) -> None:
    """GET_XML_DESC, with any flags."""
    await presented(call)


async def presented(call: Call) -> None:
    """Passes on a call whose result is one domain's XML, and shows that to the client."""
    reply = await call.forward()
    if not reply.ok or _TRACE not in reply.payload:
        await call.respond(reply)
        return
    text = read_string(reply.payload)
    settings = call.services.settings
    shown = translate.present(text, live=is_running(text), settings=settings)
    await call.respond(reply, pack_string(shown))


async def to_native(call: Call) -> None:
    """CONNECT_DOMAIN_XML_TO_NATIVE: {format, xml, flags}; the command line has the controller."""
    reader = Reader(call.payload)
    form = reader.string()
    rest = XmlCall.read(call.payload[reader.offset :], flags=True)
    settings = call.services.settings
    try:
        rest = replace(rest, xml=translate.define(rest.xml, settings, new_uuid=uuid4()).xml)
    except TranslateError:
        await call.pass_on()
        return
    await call.respond(await call.forward(bytes(Writer().string(form)) + rest.pack()))
