"""The source of a <disk type='network'>: an image of Ceph, an NBD export, or a LUN by iSCSI.

    <source protocol='rbd' name='POOL/IMAGE'>
      <host name='10.0.0.1' port='6789'/>           monitors; none: as the configuration says
      <snapshot name='monday'/>
      <config file='/etc/ceph/ceph.conf'/>
      <auth username='cinder'><secret type='ceph' uuid='...'/></auth>
    </source>
    <source protocol='nbd' name='EXPORT'><host name='10.0.0.1' port='10809'/></source>
    <source protocol='nbd' name='EXPORT'><host transport='unix' socket='/run/nbd.sock'/></source>
    <source protocol='iscsi' name='TARGET/LUN'>     without LUN: 0
      <host name='10.0.0.1' port='3260'/>
      <initiator><iqn name='iqn.2026-11.org.example:host1'/></initiator>
      <auth username='me'><secret type='iscsi' usage='...'/></auth>
    </source>

<auth> may stand beside <source>, too, as in older libvirt. Another protocol is one more reader in
_READERS, and what makes its bdev in pydataplane.domain.images.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.model import (
    ANY,
    Allowed,
    Host,
    KnownAs,
    NetworkSource,
    SecretRef,
    VolumeRef,
)
from pydataplane.domain.portals import DEFAULT_PORT, includes
from pydataplane.domain.xml.document import Node

NBD_PORT = 10809
# Text, which re compiles when it is first used: the hook reads this at the start of each VM.
_NAME = r"[^/@\x00-\x1f\x7f]{1,255}"
"""Of a pool, a namespace, an image or a snapshot."""
_HOST = r"[A-Za-z0-9._-]{1,253}"
"""A name, or an address of IPv4."""
_HOST_6 = r"(\[?)([0-9A-Fa-f:.]{2,45})(%[A-Za-z0-9._-]{1,15})?(\]?)"
"""An address of IPv6, which may stand in brackets."""
_USER = r"[A-Za-z0-9._-]{1,255}"
_ISCSI_NAME = r"[A-Za-z0-9._:-]{1,223}"
"""Of a target or an initiator (RFC 7143 4.2.7), in letters that no URL quotes."""
_CHAP_USER = r"[!-~]{1,223}"
LUN_MAX = 16383
"""Of the flat address space (SAM-5 4.7.7.2)."""
_CONFIG = r"/etc/ceph/[A-Za-z0-9][A-Za-z0-9._-]{0,254}"
"""Of Ceph, where root alone puts one: options of it have the target load and write files."""
EXPORT_MAX = 4096
"""Bytes of the name of an NBD export."""


_SPACE = "8d0c5f0e-3c0b-4b55-9d3f-0f6f2a5c1c77"


def identity(source: NetworkSource) -> str:
    """Returns the UUID of the bdev that a source is, which is also its name.

    It is made of what the source is opened by, so that it is the same on every host, and another
    one where anything of that differs: no domain gets by it what its own secret is not for. It
    stands in domains' metadata, so what it is made of must stay as it is.
    """
    return _identity(source, _way(source))


def known_as(source: NetworkSource) -> KnownAs:
    """Returns as what a guest knows the image of a source that it gets now."""
    return KnownAs(identity(source), json.dumps(_way(source), sort_keys=True))


def known_by(source: NetworkSource, way: str) -> KnownAs | None:
    """Returns as what a guest knows the image of a source that it got by another way.

    It is always one of an image of this name. None if `way` is none, as somebody changed it.
    """
    if source.protocol == "nbd" and not source.image:
        return None
    try:
        given = json.loads(way)
        if not isinstance(given, dict) or given.keys() != _way(source).keys():
            return None
        return KnownAs(_identity(source, given), way)
    except (ValueError, RecursionError):
        return None


def _way(source: NetworkSource) -> dict[str, Any]:
    """Returns what a source is opened by, but for what it is."""
    secret = source.secret
    hosts = [{"name": host.name, "port": host.port} for host in source.hosts]
    way: dict[str, Any] = {
        "hosts": sorted(hosts, key=lambda host: (host["name"], host["port"] or 0)),
        "config": source.config,
        "user": source.user,
        "secret": {"uuid": secret.uuid, "usage": secret.usage} if secret is not None else None,
        "read_only": source.read_only,
        "shared": source.shared,
    }
    if source.protocol == "iscsi":
        way["initiator"] = source.initiator
    return way


def _identity(source: NetworkSource, way: Mapping[str, Any]) -> str:
    from uuid import UUID, uuid5  # noqa: PLC0415 - slow to import, and most domains have none

    named = {"protocol": source.protocol, "pool": source.pool, "image": source.image}
    return str(uuid5(UUID(_SPACE), json.dumps({**way, **named}, sort_keys=True)))


def forbidden(source: NetworkSource, allowed: Allowed) -> str | None:
    """Returns why this host's configuration has no such disk served; None if it has.

    The target would reach for it what its client need not be allowed to.
    """
    if source.protocol == "rbd" and source.secret is None and not allowed.own_keyring:
        return "it names no secret, and own_keyring of virtlun.toml is off"
    if source.protocol == "iscsi":
        (host,) = source.hosts
        assert host.port is not None
        if not includes(allowed.iscsi_portals, host.name, host.port):
            return f"host {host.text} is none of iscsi_portals in virtlun.toml"
    for host in source.hosts:
        if source.protocol != "nbd" or host.port is not None:
            continue
        path = os.path.normpath(host.name)
        if not any(path.startswith(f"{folder.rstrip('/')}/") for folder in allowed.nbd_sockets):
            return f"socket {path} is in none of the folders of nbd_sockets in virtlun.toml"
    return None


def can_be_ours(node: Node, protocols: frozenset[str]) -> bool:
    """Whether a <disk> is over the network, by one of `protocols`, and QEMU need not have it.

    What its source says may be wrong, or `forbidden` here.
    """
    source = node.child("source")
    if source is None or node.attrs.get("type") != "network":
        return False
    protocol = source.attrs.get("protocol", "")
    return protocol in protocols and protocol in _READERS and not _is_qemus(node, source)


def volume(node: Node, protocols: frozenset[str], allowed: Allowed = ANY) -> VolumeRef | None:
    """Returns what a <disk> names over the network, by one of `protocols`; None if it does not.

    Nor does what only QEMU can have: a CD-ROM, a disk on another bus than ours, one that QEMU
    decrypts, or reads as another format than raw, or has by TLS; one that is transient or has
    snapshots in files; an image without the name of its pool; an iSCSI LUN that the guest is to
    have itself (device='lun'); and what is `forbidden` here.

    Raises:
        TranslateError: BAD_XML or UNSUPPORTED, the source is wrong.
    """
    source = node.child("source")
    if source is None or not can_be_ours(node, protocols):
        return None
    found = _READERS[source.attrs["protocol"]](node, source)
    assert found.source is not None
    return None if forbidden(found.source, allowed) else found


def stored_volume(node: Node) -> VolumeRef | None:
    """As `volume`, of a <disk> that is ours already, whatever is left to QEMU since."""
    source = node.child("source")
    protocol = source.attrs.get("protocol", "") if source is not None else ""
    if source is None or protocol not in _READERS:
        return None
    if protocol == "rbd" and _image(source) is None:
        return None
    return _READERS[protocol](node, source)


def _is_qemus(node: Node, source: Node) -> bool:
    if source.attrs.get("protocol") == "rbd" and _image(source) is None:
        return True  # QEMU knows a default pool
    bus = node.value("target", "bus")
    dev = node.value("target", "dev") or ""
    ours = bus in ("scsi", "virtio") if bus else dev.startswith(("sd", "vd"))
    encrypted = node.child("encryption") or source.child("encryption")
    # Its commands, persistent reservations among them, go to the LUN itself.
    passed_through = source.attrs.get("protocol") == "iscsi" and node.attrs.get("device") == "lun"
    return (
        not ours
        or passed_through
        or node.attrs.get("device", "disk") not in ("disk", "lun")
        or encrypted is not None
        or node.value("driver", "type") not in (None, "raw", "aio")
        or source.attrs.get("tls", "no") != "no"
        or node.attrs.get("snapshot") == "external"
        or node.child("transient") is not None
    )


def _image(source: Node) -> list[str] | None:
    """Returns POOL and IMAGE, or POOL, NAMESPACE and IMAGE; None if a source names it otherwise."""
    parts = source.attrs.get("name", "").split("/")
    named = all(re.fullmatch(_NAME, part) for part in parts)
    return parts if len(parts) in (2, 3) and named else None


def _rbd(node: Node, source: Node) -> VolumeRef:
    name, parts = source.attrs.get("name", ""), _image(source)
    assert parts is not None
    snapshot = source.value("snapshot", "name")
    read_only = node.child("readonly") is not None
    if snapshot is not None and not re.fullmatch(_NAME, snapshot):
        raise _bad(f"rbd source '{name}': '{snapshot}' is no name of a snapshot")
    if snapshot is not None and not read_only:
        raise TranslateError(
            Refusal.UNSUPPORTED,
            f"rbd source '{name}': its snapshot {snapshot} cannot be written to: give the disk"
            " <readonly/>, or name a clone of the snapshot",
        )
    config = source.value("config", "file")
    if config is not None and not re.fullmatch(_CONFIG, config):
        raise _bad(
            f"rbd source '{name}': its config file '{config}' is to be in /etc/ceph: what is in it"
            " is for all of this host's disks to bear"
        )
    auth = source.child("auth") or node.child("auth")
    user, secret = _auth(auth, "rbd", name) if auth is not None else (None, None)
    hosts = sorted(
        (_tcp(host, name) for host in source.every("host")),
        key=lambda host: (host.name, host.port or 0),
    )
    path = "/".join(parts[:-1])
    image = parts[-1] if snapshot is None else f"{parts[-1]}@{snapshot}"
    found = NetworkSource(
        "rbd", path, image, tuple(hosts), config, user, secret, read_only, _is_shared(node)
    )
    return VolumeRef(f"rbd:{path}", image, found)


def _nbd(node: Node, source: Node) -> VolumeRef:
    export = source.attrs.get("name", "")
    if len(export.encode()) > EXPORT_MAX:
        raise _bad(f"the name of an NBD export has at most {EXPORT_MAX} bytes")
    node_of_host = _only_host(source, export)
    transport, path = node_of_host.attrs.get("transport", "tcp"), node_of_host.attrs.get("socket")
    if transport == "unix":
        if path is None or not path.startswith("/"):
            raise _bad(f"nbd source '{export}': its socket is no path from the root")
        host = Host(path, None)
    else:
        host = _tcp(node_of_host, export)
        host = Host(host.name, host.port or NBD_PORT)
    read_only = node.child("readonly") is not None
    found = NetworkSource("nbd", "", export, (host,), None, None, None, read_only, _is_shared(node))
    return VolumeRef(f"nbd:{host.text}", export, found)


def _iscsi(node: Node, source: Node) -> VolumeRef:
    name = source.attrs.get("name", "")
    target, slash, number = name.partition("/")
    number = number if slash else "0"  # as libvirt has it
    is_lun = number.isascii() and number.isdigit() and int(number) <= LUN_MAX
    if not re.fullmatch(_ISCSI_NAME, target) or not is_lun:
        raise _bad(
            f"iscsi source '{name}' is to name a target and a LUN of 0 to {LUN_MAX}, such as"
            " iqn.2026-11.org.example:disks/1"
        )
    host = _tcp(_only_host(source, name), name)
    if "%" in host.name:
        raise _bad(f"iscsi source '{name}': a <host> with a zone, as {host.name}, is not known")
    host = Host(host.name, host.port or DEFAULT_PORT)
    initiator = source.child("initiator")
    own = initiator.value("iqn", "name") if initiator is not None else None
    if initiator is not None and not re.fullmatch(_ISCSI_NAME, own or ""):
        raise _bad(f"iscsi source '{name}': '{own or ''}' is no name of an initiator")
    auth = source.child("auth") or node.child("auth")
    user, secret = _auth(auth, "iscsi", name) if auth is not None else (None, None)
    read_only = node.child("readonly") is not None
    lun = str(int(number))
    found = NetworkSource(
        "iscsi", target, lun, (host,), None, user, secret, read_only, _is_shared(node), own
    )
    return VolumeRef(f"iscsi:{target}", lun, found)


_READERS: Mapping[str, Callable[[Node, Node], VolumeRef]] = {
    "rbd": _rbd,
    "nbd": _nbd,
    "iscsi": _iscsi,
}
PROTOCOLS = frozenset(_READERS)
"""Of <source protocol=>, those whose disks can be ours."""


def _only_host(source: Node, name: str) -> Node:
    """Returns the one <host> of a source.

    Raises:
        TranslateError: there is none, or there are several, which libvirt refuses as well.
    """
    hosts = list(source.every("host"))
    if len(hosts) != 1:
        protocol = source.attrs.get("protocol")
        raise _bad(f"{protocol} source '{name}' is to have one <host>, not {len(hosts)}")
    return hosts[0]


def _is_shared(node: Node) -> bool:
    return node.child("shareable") is not None


def _tcp(node: Node, name: str) -> Host:
    """Reads a <host>.

    Raises:
        TranslateError: it is none that a TCP connection can be made to.
    """
    host, port = node.attrs.get("name", ""), node.attrs.get("port")
    if node.attrs.get("transport", "tcp") != "tcp" or not _is_host(host):
        raise _bad(f"source '{name}': its <host> is no name or address, by TCP")
    if port is not None and not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise _bad(f"source '{name}': '{port}' is no port of TCP")
    return Host(host.strip("[]"), int(port) if port else None)


def _is_host(text: str) -> bool:
    if re.fullmatch(_HOST, text):
        return True
    found = re.fullmatch(_HOST_6, text)
    if found is None or bool(found[1]) != bool(found[4]):
        return False
    try:
        socket.inet_pton(socket.AF_INET6, found[2])
    except OSError:
        return False
    return True


def _auth(node: Node, protocol: str, name: str) -> tuple[str, SecretRef]:
    """Reads an <auth>.

    Raises:
        TranslateError: it lacks what names user and secret.
    """
    what = f"{protocol} source '{name}'"
    user, secret = node.attrs.get("username", ""), node.child("secret")
    users, whose, kind = _USERS[protocol]
    if not re.fullmatch(users, user):
        raise _bad(f"{what}: '{user}' is no user of {whose}")
    if secret is None:
        raise _bad(f"{what}: its <auth> has no <secret>")
    uuid, usage = secret.attrs.get("uuid"), secret.attrs.get("usage")
    if secret.attrs.get("type") != kind or (uuid is None) == (usage is None):
        raise _bad(f"{what}: its <secret> is to have type='{kind}', and uuid or usage")
    return user, SecretRef(uuid, usage)


_USERS: Mapping[str, tuple[str, str, str]] = {
    "rbd": (_USER, "Ceph", "ceph"),
    "iscsi": (_CHAP_USER, "CHAP", "iscsi"),
}
"""By protocol: names of users, whose they are, and the type of their secrets."""


def _bad(message: str) -> TranslateError:
    return TranslateError(Refusal.BAD_XML, message)
