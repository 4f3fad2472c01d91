"""The procedures of remote_protocol.x that the gateway touches, by number. All else passes through.

libvirt only ever appends to this list, so the numbers hold for every version.
"""

from __future__ import annotations

from enum import IntEnum


class Proc(IntEnum):
    """REMOTE_PROC_*; the DOMAIN_ of the protocol's names is left out where nothing is ambiguous."""

    CONNECT_OPEN = 1
    CONNECT_CLOSE = 2
    ATTACH_DEVICE = 8
    CREATE = 9
    CREATE_XML = 10
    DEFINE_XML = 11
    DETACH_DEVICE = 13
    GET_XML_DESC = 14
    LOOKUP_BY_NAME = 23
    LOOKUP_BY_UUID = 24
    CONNECT_SUPPORTS_FEATURE = 60
    BLOCK_STATS = 64
    AUTH_LIST = 66
    AUTH_SASL_INIT = 67
    AUTH_SASL_START = 68
    AUTH_SASL_STEP = 69
    AUTH_POLKIT = 70
    BLOCK_PEEK = 103
    IS_ACTIVE = 150
    IS_PERSISTENT = 151
    ATTACH_DEVICE_FLAGS = 160
    DETACH_DEVICE_FLAGS = 161
    EVENT_REGISTER_ANY = 167
    EVENT_DEREGISTER_ANY = 168
    UPDATE_DEVICE_FLAGS = 174
    HAS_MANAGED_SAVE_IMAGE = 183
    GET_BLOCK_INFO = 194
    CREATE_WITH_FLAGS = 196
    BLOCK_STATS_FLAGS = 243
    BLOCK_RESIZE = 251
    SET_BLOCK_IO_TUNE = 252
    GET_BLOCK_IO_TUNE = 253
    SET_METADATA = 264
    GET_METADATA = 265
    LIST_ALL_DOMAINS = 273
    CREATE_XML_WITH_FILES = 309
    CREATE_WITH_FILES = 310
    EVENT_DEVICE_REMOVED = 311
    CALLBACK_REGISTER_ANY = 316
    CALLBACK_DEREGISTER_ANY = 317
    CALLBACK_DEVICE_REMOVED = 333
    GET_ALL_DOMAIN_STATS = 344
    DEFINE_XML_FLAGS = 350
    CALLBACK_DEVICE_ADDED = 354
    MANAGED_SAVE_GET_XML_DESC = 388
    DETACH_DEVICE_ALIAS = 392
    SET_IDENTITY = 419


def name_of(procedure: int) -> str:
    """Returns a procedure's name for a log line, or its number."""
    try:
        return Proc(procedure).name
    except ValueError:
        return str(procedure)
