"""SASL towards libvirtd, for connections of the gateway's own.

Who libvirtd is to take us for stands in libvirt's own file for this, auth.conf (see
https://libvirt.org/auth.html, "Client configuration"), as service `libvirt` of host `localhost`:

    [credentials-gateway]
    authname=virtlun
    password=...

    [auth-libvirt-localhost]
    credentials=gateway

The mechanisms are SCRAM's (RFC 5802, RFC 7677), which need nothing but a name and a password, and
prove to us that libvirtd knows it, too. A client answers libvirtd by itself, with any mechanism.
"""

from __future__ import annotations

import configparser
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import scramp

from plugin.gateway.errors import Code, Refused
from plugin.gateway.messages import read_string
from plugin.gateway.procs import Proc
from plugin.gateway.xdr import Reader, Writer

MECHANISMS = ("SCRAM-SHA-512", "SCRAM-SHA-256", "SCRAM-SHA-1")
"""Those that we know, the best first."""

DATA_MAX = 65536
"""REMOTE_AUTH_SASL_DATA_MAX, bytes."""

_SERVICES = ("auth-libvirt-localhost", "auth-libvirt-default")

Exchange = Callable[[int, bytes], Awaitable[bytes]]
"""Makes a call and returns the reply's payload."""


@dataclass(frozen=True)
class Credentials:
    """Who the gateway is for libvirtd."""

    name: str
    password: str = field(repr=False)


def credentials(auth_conf: Path) -> Credentials:
    """Returns what auth.conf has for libvirtd on this host.

    Raises:
        Refused: nothing; says what to write where.
    """
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(auth_conf.read_text())
    except FileNotFoundError as error:
        raise _without(f"there is no {auth_conf}") from error
    except OSError as error:
        raise _without(f"{auth_conf} cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, configparser.Error) as error:
        raise _without(f"{auth_conf} is not such a file") from error
    for service in _SERVICES:
        named = parser.get(service, "credentials", fallback=None)
        section = f"credentials-{named}"
        name = parser.get(section, "authname", fallback=None)
        password = parser.get(section, "password", fallback=None)
        if name and password:
            return Credentials(name, password)
    raise _without(f"{auth_conf} has no name and password for libvirt on localhost")


def _without(why: str) -> Refused:
    return Refused(
        Code.AUTH_UNAVAILABLE,
        f"libvirtd asks for SASL, and {why}: write [auth-libvirt-localhost] and its credentials"
        " there (gateway.auth_conf in virtlun.toml names the file), or let auth_unix_rw be polkit"
        " or none in libvirtd's configuration",
    )


def _mechanism(offered: Sequence[str]) -> str:
    """Returns the best of those that both sides know.

    Raises:
        Refused: there is none.
    """
    known = [each for each in MECHANISMS if each in offered]
    if not known:
        raise Refused(
            Code.AUTH_UNAVAILABLE,
            f"libvirtd asks for SASL by {', '.join(offered) or 'no mechanism'}, and the gateway"
            f" knows {', '.join(MECHANISMS)}: add one to mech_list in /etc/sasl2/libvirt.conf",
        )
    return known[0]


async def authenticate(exchange: Exchange, auth_conf: Path) -> None:
    """Has libvirtd take a new connection for the one of auth.conf.

    Raises:
        Refused: we have no credentials, or no mechanism, or it does not prove to know them.
        GatewayError: libvirtd refuses, or is gone.
    """
    who = credentials(auth_conf)
    offered = read_string(await exchange(Proc.AUTH_SASL_INIT, b"")).split(",")
    mechanism = _mechanism(offered)
    try:
        client = scramp.ScramClient([mechanism], who.name, who.password)
        started = Writer().string(mechanism)
        reply = await exchange(Proc.AUTH_SASL_START, _data(started, client.get_client_first()))
        client.set_server_first(_said(reply))
        final = _data(Writer(), client.get_client_final())
        reply = await exchange(Proc.AUTH_SASL_STEP, final)
        client.set_server_final(_said(reply))
    except scramp.ScramException as error:
        raise Refused(Code.AUTH_FAILED, f"SASL with libvirtd ({mechanism}): {error}") from error
    if not Reader(reply).i32():
        reply = await exchange(Proc.AUTH_SASL_STEP, _data(Writer(), ""))
    if not Reader(reply).i32():
        raise Refused(Code.AUTH_FAILED, f"libvirtd does not end SASL ({mechanism})")


def _data(writer: Writer, text: str) -> bytes:
    """Appends `nil` and `data` of remote_auth_sasl_start_args and _step_args: a word a byte."""
    return bytes(writer.i32(0).array(list(text.encode()), writer.u32))


def _said(reply: bytes) -> str:
    """Returns the text in the result of AUTH_SASL_START or _STEP: complete, nil, data."""
    reader = Reader(reply)
    reader.i32()
    reader.i32()
    # Not opaque data: a char is signed, and a word of its own.
    chars = reader.array(reader.i32, DATA_MAX)
    return bytes(char & 0xFF for char in chars).decode(errors="replace")
