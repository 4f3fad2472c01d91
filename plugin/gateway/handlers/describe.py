"""CONNECT_DOMAIN_XML_TO_NATIVE: the command line of a client's domain as it would run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from uuid import uuid4

from plugin.gateway.call import Call
from plugin.gateway.messages import XmlCall
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain import translate
from pydataplane.domain.errors import TranslateError


async def to_native(call: Call) -> None:
    """CONNECT_DOMAIN_XML_TO_NATIVE: {format, xml, flags}; the command line has the controller."""
    reader = Reader(call.payload)
    form = reader.string()
    rest = XmlCall.read(call.payload[reader.offset :], flags=True)
    services = call.services
    given = services.config.controllers_for_all
    try:
        work = partial(translate.define, rest.xml, services.settings, new_uuid=uuid4())
        made = await call.parse(lambda: work(controller=given), rest.xml)
    except TranslateError:
        await call.pass_on()
        return
    payload = replace(rest, xml=made.xml).pack()
    await call.respond(await call.forward(bytes(Writer().string(form)) + payload))
