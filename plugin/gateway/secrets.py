"""Values of libvirt's secrets: keys of Ceph and passwords of CHAP that disks are opened with.

They are asked for on a connection of the client's own, so that libvirtd judges whether it may read
them, as it does when QEMU is to have one. None is kept here, or shown in a log or error.
"""

from __future__ import annotations

import base64
from uuid import UUID

from plugin.gateway.errors import Code, Refused, UpstreamError
from plugin.gateway.procs import Proc
from plugin.gateway.upstream import Upstream
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain.errors import Refusal
from pydataplane.domain.model import SecretRef

USAGES = {"rbd": 2, "iscsi": 3}
"""By protocol: VIR_SECRET_USAGE_TYPE_CEPH and _ISCSI."""

PASSWORD_MAX_BYTES = 223
"""What libiscsi takes of a password."""

VALUE_MAX_BYTES = 65_536
"""REMOTE_SECRET_VALUE_MAX."""


async def key(upstream: Upstream, protocol: str, secret: SecretRef) -> str:
    """Returns the value of a secret: a key as Ceph writes it, a password of CHAP as it is.

    Raises:
        UpstreamError: there is no such secret, or it has no value, or the client may not read it.
        Refused: libvirtd tells nobody, or it is no password.
        UpstreamGone: it cannot be asked.
    """
    value = await _value(upstream, USAGES[protocol], secret)
    if protocol == "rbd":
        return base64.b64encode(value).decode()
    text = value.decode("ascii", "replace")
    if not text.isascii() or not text.isprintable() or not 0 < len(text) <= PASSWORD_MAX_BYTES:
        raise Refused(
            Refusal.UNSUPPORTED,
            f"secret {secret.uuid or secret.usage} is no password of CHAP: give it a value of 1 to"
            f" {PASSWORD_MAX_BYTES} letters, digits and signs of ASCII, without a line break",
        )
    return text


async def _value(upstream: Upstream, usage: int, secret: SecretRef) -> bytes:
    found = await _look_up(upstream, usage, secret)
    try:
        reply = await upstream.call(Proc.SECRET_GET_VALUE, found + bytes(Writer().u32(0)))
    except UpstreamError as error:
        if error.code != Code.INVALID_SECRET:
            raise
        raise Refused(
            Refusal.DENIED,
            f"secret {secret.uuid or secret.usage} is private, so that libvirt tells it to QEMU"
            " alone: define it with private='no'",
        ) from error
    return Reader(reply).opaque(VALUE_MAX_BYTES)


async def _look_up(upstream: Upstream, usage: int, secret: SecretRef) -> bytes:
    """Returns libvirtd's word for a secret (remote_nonnull_secret)."""
    if secret.usage is not None:
        wanted = bytes(Writer().i32(usage).string(secret.usage))
        return await upstream.call(Proc.SECRET_LOOKUP_BY_USAGE, wanted)
    try:
        uuid = UUID(secret.uuid)
    except ValueError as error:
        text = f"'{secret.uuid}', by which a disk names its secret, is no UUID"
        raise Refused(Refusal.BAD_XML, text) from error
    found = await upstream.call(Proc.SECRET_LOOKUP_BY_UUID, bytes(Writer().fixed(uuid.bytes)))
    reader = Reader(found)
    reader.fixed(16)
    if reader.i32() != usage:  # as libvirt itself (virSecretGetSecretString)
        (kind,) = (protocol for protocol, each in USAGES.items() if each == usage)
        kind = {"rbd": "ceph"}.get(kind, kind)
        text = f"secret {secret.uuid} is for something else: name one with <usage type='{kind}'>"
        raise Refused(Refusal.DENIED, text)
    return found
