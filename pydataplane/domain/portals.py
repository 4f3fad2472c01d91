"""Which iSCSI targets disks may be on: the entries of `iscsi_portals` in virtlun.toml.

Standard library only: the hook is made of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ipaddress import IPv4Network, IPv6Network

DEFAULT_PORT = 3260
"""TCP port of iSCSI."""
_WITH_PORT = r"(\[[^\]]*\](?:/[0-9]+)?|[^:\[\]]+):([0-9]{1,5})"
_NAME = r"(?=.*[A-Za-z_-][A-Za-z0-9_-]*\.?\Z)[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*\.?"


def check(portal: str) -> str:
    """Returns an entry as it is: a name, address or network, with a port or without, or "*".

    Raises:
        ValueError: it is none; one sentence.
    """
    host, port = split(portal)
    is_host = portal == "*" or re.fullmatch(_NAME, host) or _network(host) is not None
    if not is_host or not 0 < port < 1 << 16:
        raise ValueError(
            f"'{portal}' is no name, address or network (10.0.0.0/24), nor one with a port"
            " (san.lan:3261, [fd00::1]:3261)"
        )
    return portal


def includes(portals: Iterable[str], host: str, port: int) -> bool:
    """Whether a name or address with a port is one of these; nobody is asked what a name means.

    An entry without a port has that of iSCSI alone, as on others anybody may listen.
    """
    return any(portal == "*" or _is_one(*split(portal), host, port) for portal in portals)


def _is_one(entry: str, entrys_port: int, host: str, port: int) -> bool:
    if port != entrys_port:
        return False
    if entry == host:
        return True
    network, address = _network(entry), _network(host)
    return (
        network is not None
        and address is not None
        and network.version == address.version
        and address.network_address in network
    )


def split(portal: str, default: int = DEFAULT_PORT) -> tuple[str, int]:
    """Returns host and port of HOST[:PORT], an address of IPv6 without its brackets."""
    found = re.fullmatch(_WITH_PORT, portal)
    host, port = (found[1], int(found[2])) if found is not None else (portal, default)
    return re.sub(r"^\[([^\[\]]*)\]", r"\1", host), port


def _network(text: str) -> IPv4Network | IPv6Network | None:
    from ipaddress import ip_network  # noqa: PLC0415 - slow to import, and rarely used

    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None
