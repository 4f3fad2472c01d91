"""What the gateway does with the calls it looks into, one module a concern.

A handler answers its call exactly once or raises: GatewayError and TranslateError become the
call's error. WRITING are the calls that a read-only connection may not make; there they go to
libvirtd's read-only socket untouched, which refuses them in its own words.
"""

from __future__ import annotations

from plugin.gateway.call import Handler
from plugin.gateway.handlers import attach, block, connection, define, describe, start, stats
from plugin.gateway.messages import (
    DOMAIN_LIST_MAX,
    SMALL_CALL_MAX_BYTES,
    XML_CALL_MAX_BYTES,
)
from plugin.gateway.procs import Proc

HANDLERS: dict[int, Handler] = {
    Proc.SET_IDENTITY: connection.set_identity,
    Proc.CALLBACK_REGISTER_ANY: connection.register,
    Proc.CALLBACK_DEREGISTER_ANY: connection.deregister,
    Proc.EVENT_REGISTER_ANY: connection.register_legacy,
    Proc.EVENT_DEREGISTER_ANY: connection.deregister_legacy,
    Proc.DEFINE_XML: define.define,
    Proc.DEFINE_XML_FLAGS: define.define,
    Proc.CREATE_XML: define.create,
    Proc.CREATE_XML_WITH_FILES: define.create,
    Proc.CREATE: start.start,
    Proc.CREATE_WITH_FLAGS: start.start,
    Proc.CREATE_WITH_FILES: start.start,
    Proc.GET_XML_DESC: describe.xml,
    Proc.ATTACH_DEVICE: attach.attach,
    Proc.ATTACH_DEVICE_FLAGS: attach.attach,
    Proc.DETACH_DEVICE: attach.detach,
    Proc.DETACH_DEVICE_FLAGS: attach.detach,
    Proc.DETACH_DEVICE_ALIAS: attach.detach_alias,
    Proc.UPDATE_DEVICE_FLAGS: attach.update,
    Proc.GET_BLOCK_INFO: block.info,
    Proc.BLOCK_STATS: block.stats,
    Proc.BLOCK_STATS_FLAGS: block.stats_flags,
    Proc.BLOCK_RESIZE: block.resize,
    Proc.BLOCK_PEEK: block.peek,
    Proc.SET_BLOCK_IO_TUNE: block.io_tune,
    Proc.GET_BLOCK_IO_TUNE: block.io_tune,
    Proc.GET_ALL_DOMAIN_STATS: stats.all_domains,
}

WRITING = {
    Proc.SET_IDENTITY,
    Proc.DEFINE_XML,
    Proc.DEFINE_XML_FLAGS,
    Proc.CREATE_XML,
    Proc.CREATE_XML_WITH_FILES,
    Proc.CREATE,
    Proc.CREATE_WITH_FLAGS,
    Proc.CREATE_WITH_FILES,
    Proc.ATTACH_DEVICE,
    Proc.ATTACH_DEVICE_FLAGS,
    Proc.DETACH_DEVICE,
    Proc.DETACH_DEVICE_FLAGS,
    Proc.DETACH_DEVICE_ALIAS,
    Proc.UPDATE_DEVICE_FLAGS,
    Proc.BLOCK_RESIZE,
    Proc.BLOCK_PEEK,
    Proc.SET_BLOCK_IO_TUNE,
}

_WITH_XML = {
    Proc.DEFINE_XML,
    Proc.DEFINE_XML_FLAGS,
    Proc.CREATE_XML,
    Proc.CREATE_XML_WITH_FILES,
    Proc.ATTACH_DEVICE,
    Proc.ATTACH_DEVICE_FLAGS,
    Proc.DETACH_DEVICE,
    Proc.DETACH_DEVICE_FLAGS,
    Proc.UPDATE_DEVICE_FLAGS,
}


def payload_limit(procedure: int) -> int:
    """Returns how long the arguments of a call may be that is read whole, bytes."""
    if procedure in _WITH_XML:
        return XML_CALL_MAX_BYTES
    if procedure == Proc.GET_ALL_DOMAIN_STATS:
        return DOMAIN_LIST_MAX * 128
    return SMALL_CALL_MAX_BYTES
