"""GET_XML_DESC: clients see their own disks and nothing of what carries them."""

from __future__ import annotations

from plugin import translate
from plugin.gateway.call import Call
from plugin.gateway.domains import is_running
from plugin.gateway.messages import pack_string, read_string
from plugin.translate import PREFIX

_TRACE = PREFIX.encode()


async def xml(call: Call) -> None:
    """GET_XML_DESC, with any flags."""
    reply = await call.forward()
    if not reply.ok or _TRACE not in reply.payload:
        await call.respond(reply)
        return
    text = read_string(reply.payload)
    settings = call.session.gateway.settings
    shown = translate.present(text, live=is_running(text), settings=settings)
    await call.respond(reply, pack_string(shown))
